"""Scores of variants compared: means over seeds, and paired differences.

Nothing here knows which variants a study has, or on what they are compared: a
place is (variant, task, mode), with results by seed. The mode of a task that
is fine-tuned is its attention.
"""

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax.evals.design import CAUSAL, Row
from antlm_jax.evals.reporting import statistics
from antlm_jax.evals.reporting.runs import Result, TrainedRun
from antlm_jax.evals.reporting.statistics import Interval, Resampled


class Mean(NamedTuple):
  """A number over seeds."""

  values: Mapping[str, float]  # by seed; at least one
  mean: float
  std: float | None  # the sample's standard deviation; None of one seed


def mean(values: Mapping[str, float]) -> Mean | None:
  """Returns the mean of values by seed, or None if there are none."""
  if not values:
    return None
  found = [*values.values()]
  std = float(np.std(found, ddof=1)) if len(found) > 1 else None
  return Mean(dict(values), float(np.mean(found)), std)


def half_width(found: Mean) -> float | None:
  """Returns half of the mean's 95 % interval over seeds; None of one seed."""
  if found.std is None:
    return None
  count = len(found.values)
  return statistics.student(count - 1) * found.std / count**0.5


class Pair(NamedTuple):
  """Two sides to compare, each a variant and the mode that it is scored in."""

  variant: tuple[str, str]
  control: tuple[str, str]

  @property
  def alike(self) -> bool:
    """Whether both are scored causally, or neither is."""
    return (self.variant[1] == CAUSAL) == (self.control[1] == CAUSAL)


class Delta(NamedTuple):
  """A variant's score minus its control's, in [-1, 1]."""

  task: str
  part: str  # of the task; "" for all of it
  pair: Pair
  seeds: tuple[int, int]  # number of runs of the variant, and of the control
  by_items: Interval  # for these very runs
  by_seeds: Interval | None  # for other seeds, too; None if a side has only one

  @property
  def interval(self) -> Interval:
    """The one that says more: by seeds, where there are several."""
    return self.by_seeds or self.by_items

  @property
  def verdict(self) -> str:
    """What may be said of it: above, below, or that the interval contains 0."""
    if self.interval.contains_zero:
      return "contains 0"
    return "above" if self.interval.estimate > 0 else "below"


class Common(NamedTuple):
  """A task's items on which runs compare."""

  # Indices of the UIDs of each part, such as a phenomenon, by name.
  parts: Mapping[str, Sequence[int]]
  # Indices among `resampled`'s runs, by variant and mode.
  runs: Mapping[tuple[str, str], Sequence[int]]
  resampled: Resampled
  # (variant, mode, seed) that were scored on other items.
  others: Collection[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True)
class Study:
  """Variants, their runs, and the scores of these."""

  variants: Mapping[str, Row]  # by name, in order, with runs or without
  runs: Mapping[str, Sequence[TrainedRun]]  # of the variants that have any
  pipeline: str  # by which pairs are scored
  name: str = ""
  confidence: float = statistics.CONFIDENCE  # of intervals over paired seeds

  @property
  def families(self) -> dict[str, list[str]]:
    """The variants that have runs, by family, in order."""
    out = collections.defaultdict(list)
    for name in self.runs:
      out[self.variants[name].family].append(name)
    return dict(out)

  def title(self, name: str, how: str = "") -> str:
    """Returns a variant's title, with the mode or attention that is told."""
    return self.variants[name].title + (f" ({how})" if how else "")

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

    Tasks have the same weight. With `complete`, only scores on all of a task's
    data count.
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
        if len(found) == len(tasks)  # a mean over fewer is of something else
      }
    )

  def differences(
    self, task: str, pairs: Iterable[Pair], by_part: bool = False
  ) -> list[Delta]:
    """Compares pairs, as far as both sides have runs on the same items.

    That is on all of the task, or on each part of it.
    """
    common = self.common.get(task)
    if common is None:
      return []
    parts = sorted(common.parts.items()) if by_part else [("", None)]
    return [
      _delta(task, part, pair, [common.resampled.scores(r, uids) for r in runs])
      for pair in pairs
      for part, uids in parts
      if all(runs := [common.runs.get(side) for side in pair])
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
    return {task: _common(found) for task, found in out.items()}


def _common(found: Mapping[tuple[str, str, str], Result]) -> Common:
  # A run that was scored on other items (another --limit, say) cannot be
  # paired: the items of most runs count, and the report names the others.
  keys = collections.Counter(result.items.key for result in found.values())
  most = keys.most_common(1)[0][0]
  same = {place: r for place, r in found.items() if r.items.key == most}
  first = next(iter(same.values()))
  runs, parts = collections.defaultdict(list), collections.defaultdict(list)
  # One matrix of all runs, resampled once: that is what pairs the differences.
  for i, (variant, mode, _) in enumerate(same):
    runs[variant, mode].append(i)
  for i, uid in enumerate(first.items.uids):
    if first.parts.get(uid):
      parts[first.parts[uid]].append(i)
  scores = np.stack([result.items.scores for result in same.values()])
  resampled = statistics.resample(scores, first.items.strata)
  return Common(parts, runs, resampled, found.keys() - same.keys())


def _delta(task, part, pair, sides: Sequence[statistics.Scores]) -> Delta:
  seeds = tuple(len(side.observed) for side in sides)
  # One run says nothing about how much others of its kind would differ.
  by_items, by_seeds = statistics.difference(*sides), None
  if min(seeds) > 1:
    by_seeds = statistics.difference(*sides, by_seeds=True)
  return Delta(task, part, pair, seeds, by_items, by_seeds)
