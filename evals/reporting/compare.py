"""Scores of variants compared: means over seeds, and paired differences.

Nothing here knows which variants a study has, or on what they are compared: a
place is (variant, task, mode), with results by seed. The mode of a task that
is fine-tuned is its attention.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from evals.reporting import statistics
from evals.reporting.runs import CAUSAL, Result, TrainedRun, Variant
from evals.reporting.statistics import Interval, Resampled


class Mean(NamedTuple):
  """A number over seeds.

  Attributes:
    values: By seed; at least one.
    mean: Their mean.
    std: The sample's standard deviation; None of one seed.
  """

  values: Mapping[str, float]
  mean: float
  std: float | None


def mean(values: Mapping[str, float]) -> Mean | None:
  """Returns the mean of values by seed, or None if there are none."""
  if not values:
    return None
  found = [*values.values()]
  std = float(np.std(found, ddof=1)) if len(found) > 1 else None
  return Mean(dict(values), float(np.mean(found)), std)


class Pair(NamedTuple):
  """Two sides to compare: a variant and its control, each in a mode."""

  variant: str
  mode: str
  control: str
  control_mode: str

  @property
  def alike(self) -> bool:
    """Whether both are scored causally, or neither is."""
    return (self.mode == CAUSAL) == (self.control_mode == CAUSAL)


class Delta(NamedTuple):
  """A variant's score minus its control's, in [-1, 1].

  Attributes:
    task: The task's name.
    part: Which part of the task it is of; "" for all of it.
    pair: The two sides.
    seeds: Number of runs of the variant, and of the control.
    by_items: The interval for these very runs.
    by_seeds: The one for other seeds, too; None if a side has only one.
    verdict: What the wider one says: above, below, contains 0.
  """

  task: str
  part: str
  pair: Pair
  seeds: tuple[int, int]
  by_items: Interval
  by_seeds: Interval | None
  verdict: str

  @property
  def interval(self) -> Interval:
    """The one that says more: by seeds, where there are several."""
    return self.by_seeds or self.by_items


@dataclasses.dataclass(frozen=True)
class Common:
  """A task's items on which runs compare.

  Attributes:
    task: The task.
    uids: The UIDs.
    parts: The part of the task that a UID is of, such as a phenomenon.
    column: Index of each (variant, mode, seed) among the runs of `resampled`.
    resampled: The runs on resampled items.
    others: (variant, mode, seed) that were scored on other items.
  """

  task: str
  uids: tuple[str, ...]
  parts: Mapping[str, str]
  column: Mapping[tuple[str, str, str], int]
  resampled: Resampled
  others: frozenset[tuple[str, str, str]]

  def differences(
    self, pairs: Iterable[Pair], part: str = "", uids=None
  ) -> list[Delta]:
    """Compares pairs, as far as both sides have runs on these items.

    Args:
      pairs: The pairs.
      part: What `uids` are of the task.
      uids: The UIDs on which to compare; all of them by default.
    """
    strata = None if uids is None else [self.uids.index(uid) for uid in uids]
    out = []
    for pair in pairs:
      runs = self._runs(*pair[:2]), self._runs(*pair[2:])
      if all(runs):
        sides = [self.resampled.scores(side, strata) for side in runs]
        out.append(_delta(self.task, part, pair, sides))
    return out

  def _runs(self, variant: str, mode: str) -> list[int]:
    side = variant, mode
    return [i for place, i in self.column.items() if place[:2] == side]


def _delta(task, part, pair, sides: Sequence[statistics.Scores]) -> Delta:
  seeds = tuple(len(side.observed) for side in sides)
  by_items, by_seeds = statistics.difference(*sides), None
  if min(seeds) > 1:
    by_seeds = statistics.difference(*sides, by_seeds=True)
  decisive = by_seeds or by_items
  verdict = "above" if decisive.estimate > 0 else "below"
  if decisive.contains_zero:
    verdict = "contains 0"
  return Delta(task, part, pair, seeds, by_items, by_seeds, verdict)


@dataclasses.dataclass(frozen=True)
class Study:
  """Variants, their runs, and the scores of these.

  Attributes:
    variants: Every variant by name, in order, with runs or without.
    runs: By variant; variants without any are left out.
    pipeline: By which pairs are scored.
  """

  variants: Mapping[str, Variant]
  runs: Mapping[str, Sequence[TrainedRun]]
  pipeline: str

  @property
  def families(self) -> dict[str, list[str]]:
    """The variants that have runs, by family, in order."""
    out = {variant.family: [] for variant in self.variants.values()}
    for name in self.runs:
      out[self.variants[name].family].append(name)
    return out

  @functools.cached_property
  def results(self) -> dict[tuple[str, str, str], dict[str, Result]]:
    """All results, by (variant, task, mode) and then seed."""
    out = collections.defaultdict(dict)
    for name, runs in self.runs.items():
      for run in runs:
        for place, result in run.results(self.pipeline).items():
          out[(name, *place)][run.seed] = result
    return dict(out)

  def at(self, variant: str, task: str, mode: str) -> dict[str, Result]:
    """Returns the results of one place by seed, which may be none."""
    return self.results.get((variant, task, mode), {})

  def mean(
    self, variant: str, tasks: Sequence[str], mode: str, complete: bool = False
  ) -> Mean | None:
    """Returns a variant's mean over tasks, of the seeds that have them all.

    Args:
      variant: Its name.
      tasks: The tasks, each of the same weight.
      mode: In which it was scored.
      complete: Whether only scores on all of a task's data count.
    """
    scores = collections.defaultdict(list)
    for task in tasks:
      for seed, result in self.at(variant, task, mode).items():
        if result.complete or not complete:
          scores[seed].append(result.score)
    return mean(
      {
        seed: float(np.mean(found))
        for seed, found in scores.items()
        if len(found) == len(tasks)
      }
    )

  def differences(self, task: str, pairs: Iterable[Pair]) -> list[Delta]:
    """Compares pairs on a task, as far as there are items."""
    common = self.common.get(task)
    return common.differences(pairs) if common else []

  def by_part(self, task: str, pairs: Iterable[Pair]) -> list[Delta]:
    """Compares pairs on each of a task's parts, by name; see `differences`."""
    common = self.common.get(task)
    uids = collections.defaultdict(list)
    for uid in common.uids if common else ():
      if common.parts.get(uid):
        uids[common.parts[uid]].append(uid)
    return [
      delta
      for pair in pairs
      for part, those in sorted(uids.items())
      for delta in common.differences([pair], part, those)
    ]

  # Kept: every comparison of a task uses the same draws.
  @functools.cached_property
  def common(self) -> dict[str, Common]:
    """The items on which most runs compare, by task that has items."""
    out = collections.defaultdict(dict)
    for (variant, task, mode), by_seed in self.results.items():
      for seed, result in by_seed.items():
        if result.items is not None:
          out[task][variant, mode, seed] = result
    return {task: _common(task, found) for task, found in out.items()}


def _common(task: str, found: Mapping[tuple, Result]) -> Common:
  keys = collections.Counter(result.items.key for result in found.values())
  most = keys.most_common(1)[0][0]
  same = {place: r for place, r in found.items() if r.items.key == most}
  first = next(iter(same.values()))
  correct = np.stack([result.items.correct for result in same.values()])
  return Common(
    task=task,
    uids=first.items.uids,
    parts=first.parts,
    column={place: i for i, place in enumerate(same)},
    resampled=statistics.resample(correct, first.items.strata),
    others=frozenset(found) - frozenset(same),
  )
