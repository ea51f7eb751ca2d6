"""Changes of an objective's held-out loss at a curriculum's switches."""

import itertools
from collections.abc import Iterator, Sequence

from antlm_jax.evals.statistics import mean_of_seeds
from antlm_jax.evals.studies.reporting.render import Row
from antlm_jax.evals.studies.reporting.runs import TrainedRun, ended
from antlm_jax.training.metrics import REPORT


def switch_rows(title: str, runs: Sequence[TrainedRun]) -> Iterator[Row]:
  """Yields a row for each objective that a row leaves or takes up.

  Losses are of the half of the held-out rows that did not choose the best step.
  """
  runs = ended(runs)
  phases = runs[0].curriculum.phases if runs else ()
  for index, (before, after) in enumerate(itertools.pairwise(phases)):
    for name, kind in runs[0].names.items():
      left = name in before.shares
      if left == (name in after.shares):
        continue
      columns = {}
      for run in runs:
        for head, loss in _around(run, name, index).items():
          columns.setdefault(head, {})[run.seed] = loss
      if columns:
        yield {
          "row": title,
          "switch": f"{before}→{after} after {after.start:,}",
          "loss of": f"{kind}, {'left' if left else 'taken up'}",
        } | {
          head: None if None in losses.values() else mean_of_seeds(losses)
          for head, losses in columns.items()
        }


def _around(run: TrainedRun, name: str, index: int) -> dict[str, float | None]:
  """Reads a run's losses around a switch; none if they were not measured."""
  kind = run.names[name]
  losses = run.held_out(kind, REPORT)
  before, *phases = run.curriculum.phases[index:]
  # Held-out losses are measured at every switch, and so at the phases' ends.
  if not phases or not losses.keys() >= {phases[0].start, phases[0].stop}:
    return {}  # a run may have ended in an earlier phase than others
  start = losses[phases[0].start]
  stop = losses[phases[0].stop]
  again = next((p.stop for p in phases[1:] if name in p.shares), None)
  left = name in before.shares  # else it was not forgotten
  return {
    "best before": losses[run.best(kind, until=phases[0].start)],
    "at the switch": start,
    "at the end of the phase": stop,
    "forgotten by": stop - start if left else None,
    "trained again": losses.get(again) if left else None,
  }
