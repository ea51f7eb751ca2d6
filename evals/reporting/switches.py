"""What becomes of an objective's held-out loss where a curriculum switches."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from evals.reporting.runs import TrainedRun


class Moment(NamedTuple):
  """An objective's held-out loss around a switch, in nats.

  Attributes:
    best: The lowest before, the switch included.
    at: At the switch.
    end: At the end of the phase after it.
    again: At the end of the next phase that trains it, if there is one.
  """

  best: float
  at: float
  end: float
  again: float | None

  @property
  def change(self) -> float:
    """What the phase after the switch adds."""
    return self.end - self.at


class Switch(NamedTuple):
  """What becomes of an objective at a switch.

  Attributes:
    variant: The variant's name.
    phases: Such as `C→M`.
    step: Steps done by then, in the first run.
    kind: The objective's logged name.
    left: Whether it is the one that is left; else it is taken up.
    moments: By seed.
  """

  variant: str
  phases: str
  step: int
  kind: str
  left: bool
  moments: Mapping[str, Moment]

  def mean(self, what: str) -> float | None:
    """Returns the mean over seeds of a Moment's attribute."""
    values = [getattr(moment, what) for moment in self.moments.values()]
    return None if None in values else float(np.mean(values))


def ended(runs: Sequence[TrainedRun]) -> list[TrainedRun]:
  """Returns the runs at their end that have the first such one's curriculum."""
  runs = [run for run in runs if run.curriculum is not None]
  return [run for run in runs if run.text == runs[0].text]


def read(runs: Sequence[TrainedRun]) -> Iterator[Switch]:
  """Yields every objective that a variant leaves or takes up, in order."""
  runs = ended(runs)
  for index in range(len(runs[0].curriculum.phases) - 1 if runs else 0):
    before, after = runs[0].curriculum.phases[index : index + 2]
    for name, kind in runs[0].names.items():
      moments = {run.seed: _moment(run, name, index) for run in runs}
      moments = {seed: found for seed, found in moments.items() if found}
      if moments and (name in before.shares) != (name in after.shares):
        yield Switch(
          variant=runs[0].variant,
          phases=f"{before}→{after}",
          step=after.start,
          kind=kind,
          left=name in before.shares,
          moments=moments,
        )


def _moment(run: TrainedRun, name: str, index: int) -> Moment | None:
  """Reads a run's losses, or None if they were not measured there."""
  losses = run.held_out(run.names[name])
  _, after, *later = run.curriculum.phases[index:]
  again = next((p.stop for p in later if name in p.shares), None)
  if after.start not in losses or after.stop not in losses:
    return None
  return Moment(
    best=min(loss for step, loss in losses.items() if step <= after.start),
    at=losses[after.start],
    end=losses[after.stop],
    again=losses.get(again),
  )


class Forgetting(NamedTuple):
  """Whether a variant forgets what it leaves, over seeds and switches.

  Attributes:
    variant: The variant's name.
    changes: What each phase adds to the loss of what was left, in nats.
    gaps: What is left of that over the best before, once it is trained again.
  """

  variant: str
  changes: Sequence[float]
  gaps: Sequence[float]


def forgetting(switches: Sequence[Switch]) -> list[Forgetting]:
  """Returns what becomes of all that each variant leaves."""
  left = collections.defaultdict(list)
  for switch in switches:
    if switch.left:
      left[switch.variant] += switch.moments.values()
  return [
    Forgetting(
      variant=variant,
      changes=[moment.change for moment in moments],
      gaps=[m.again - m.best for m in moments if m.again is not None],
    )
    for variant, moments in left.items()
  ]
