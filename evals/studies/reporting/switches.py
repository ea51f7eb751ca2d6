"""Changes of an objective's held-out loss at a curriculum's switches."""

from collections.abc import Iterator, Sequence

from antlm_jax.evals.statistics import mean_of_seeds
from antlm_jax.evals.studies.reporting.render import Row
from antlm_jax.evals.studies.reporting.runs import TrainedRun, ended
from antlm_jax.training.metrics import REPORT


def switch_rows(title: str, runs: Sequence[TrainedRun]) -> Iterator[Row]:
  """Yields a row for each objective that a variant leaves or takes up."""
  runs = ended(runs)
  for index in range(len(runs[0].curriculum.phases) - 1 if runs else 0):
    before, after = runs[0].curriculum.phases[index : index + 2]
    for name, kind in runs[0].names.items():
      losses = {run.seed: _around(run, name, index) for run in runs}
      losses = {seed: found for seed, found in losses.items() if found}
      left = name in before.shares
      if losses and left != (name in after.shares):
        row = {
          "row": title,
          "switch": f"{before}→{after} after {after.start:,}",
          "loss of": f"{kind}, {'left' if left else 'taken up'}",
        }
        for head in next(iter(losses.values())):
          by_seed = {seed: found[head] for seed, found in losses.items()}
          row[head] = (
            None if None in by_seed.values() else mean_of_seeds(by_seed)
          )
        yield row


def _around(
  run: TrainedRun, name: str, index: int
) -> dict[str, float | None] | None:
  """Reads a run's losses around a switch; None if they were not measured there.

  They are of the half of the held-out rows that did not choose the best step.
  """
  kind = run.names[name]
  losses = run.held_out(kind, REPORT)
  before, *phases = run.curriculum.phases[index:]
  # Held-out losses are measured at every switch, and so at the phases' ends.
  if not phases or not losses.keys() >= {phases[0].start, phases[0].stop}:
    return None  # a run may have ended in an earlier phase than others
  start, stop = phases[0].start, phases[0].stop
  again = next((p.stop for p in phases[1:] if name in p.shares), None)
  left = name in before.shares  # else it was not forgotten
  return {
    "best before": losses[run.best(kind, until=start)],
    "at the switch": losses[start],
    "at the end of the phase": losses[stop],
    "forgotten by": losses[stop] - losses[start] if left else None,
    "trained again": losses.get(again) if left else None,
  }
