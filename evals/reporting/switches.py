"""What becomes of an objective's held-out loss where a curriculum switches."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from antlm_jax.evals.reporting.runs import TrainedRun, ended
from antlm_jax.evals.reporting.statistics import Mean, mean
from antlm_jax.training.metrics import REPORT


class Moment(NamedTuple):
  """An objective's held-out loss around a switch, in nats."""

  best: float  # at the best step before, the switch included
  at: float  # at the switch
  end: float  # at the end of the phase after it
  again: float | None  # at the end of the next phase that trains it, if any

  @property
  def forgotten(self) -> float:
    """What the phase after the switch adds."""
    return self.end - self.at


class Switch(NamedTuple):
  """What becomes of an objective at a switch."""

  phases: str  # such as `C→M`
  step: int  # steps done by then, in the first run
  kind: str  # the objective's logged name
  left: bool  # whether it is the one that is left; else it is taken up
  moments: Mapping[str, Moment]  # by seed

  def mean(self, what: str) -> Mean | None:
    """Returns an attribute's mean over seeds; None if a seed has it not."""
    found = {seed: getattr(m, what) for seed, m in self.moments.items()}
    return None if None in found.values() else mean(found)


def read(runs: Sequence[TrainedRun]) -> Iterator[Switch]:
  """Yields every objective that a variant leaves or takes up, in order."""
  runs = ended(runs)
  for index in range(len(runs[0].curriculum.phases) - 1 if runs else 0):
    before, after = runs[0].curriculum.phases[index : index + 2]
    for name, kind in runs[0].names.items():
      moments = {run.seed: _moment(run, name, index) for run in runs}
      moments = {seed: found for seed, found in moments.items() if found}
      if moments and (name in before.shares) != (name in after.shares):
        left = name in before.shares
        yield Switch(f"{before}→{after}", after.start, kind, left, moments)


def _moment(run: TrainedRun, name: str, index: int) -> Moment | None:
  """Reads a run's losses, or None if they were not measured there.

  They are of the half of the held-out rows that did not choose the best step.
  """
  kind = run.names[name]
  losses = run.held_out(kind, REPORT)
  _, *phases = run.curriculum.phases[index:]
  # Held-out losses are measured at every switch, and so at the phases' ends.
  if not phases or not losses.keys() >= {phases[0].start, phases[0].stop}:
    return None  # a run may have ended in an earlier phase than others
  start, stop = phases[0].start, phases[0].stop
  again = next((p.stop for p in phases[1:] if name in p.shares), None)
  return Moment(
    best=losses[run.best(kind, until=start)],
    at=losses[start],
    end=losses[stop],
    again=losses.get(again),
  )
