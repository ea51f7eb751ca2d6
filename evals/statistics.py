"""Means over seeds and items, and their confidence intervals.

A difference of two rows is measured once for each seed and item. Both rows have
the same items and the same seeds (data order, head, order of fine-tuning), so
their common noise cancels. The seeds of a difference are

- pretrainings, if there are several, each the mean of its fine-tunings. The
  interval then covers other pretrainings and other items;
- fine-tunings of one pretraining on either side. The interval then covers other
  fine-tunings and other items, for these very models alone. Nothing in the data
  says how much other pretrainings differ.

With S seeds, let `by_seeds` be the variance of the mean over seeds, and
`by_items` that of the mean over items. `both` is the part that is in either:
the chance in one seed's answer to one item. Half of the interval is the largest
of

    t(items) sqrt(by_items)                             other items only
    t(S - 1) sqrt(by_seeds)                             other seeds only
    sqrt(t(items)² by_items + t(S - 1)² (by_seeds - both))

where t is Student's quantile. A bootstrap over runs and items counts `both`
three times (Owen 2007, The pigeonhole bootstrap). A bootstrap that draws
the runs of each row apart also counts the noise that the rows share, so it
covers too often. tests/test_report.py simulates studies.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95


class Interval(NamedTuple):
  """A difference and its confidence interval, in the scores' unit."""

  estimate: float
  low: float
  high: float

  @property
  def sign(self) -> int:
    """Sign of the difference; 0 if the interval contains zero."""
    return int(self.low > 0) - int(self.high < 0)


class MeanEstimate(NamedTuple):
  """A mean over seeds and items, and the variances that make its interval."""

  value: float
  seeds: int
  items: int  # that differ; 1 if there are none, as for a loss
  freedom: int  # degrees of freedom of `by_items`
  by_items: float = 0.0
  by_seeds: float = 0.0
  both: float = 0.0  # a key of stored results
  pretrained: bool = True  # whether the seeds are pretrainings

  @property
  def general(self) -> bool:
    """Whether the interval covers other pretrainings."""
    return self.pretrained and self.seeds > 1

  def interval(self, confidence: float = CONFIDENCE) -> Interval | None:
    """Returns the interval, or None if one value is all that there is."""
    if self.seeds < 2 and self.freedom < 1:
      return None
    half = self.half_width(confidence)
    return Interval(self.value, self.value - half, self.value + half)

  def half_width(self, confidence: float = CONFIDENCE) -> float:
    """Returns half of the interval; 0 if one value is all that there is."""
    by_items = by_seeds = by_answers = 0.0
    if self.freedom:
      by_items = student(self.freedom, confidence) ** 2 * self.by_items
    if self.seeds > 1:
      factor = student(self.seeds - 1, confidence) ** 2
      by_seeds = factor * self.by_seeds
      by_answers = factor * self.both
    return max(by_items, by_seeds, by_items + by_seeds - by_answers) ** 0.5

  def with_seeds(self, count: int) -> "MeanEstimate":
    """Returns it as of so many seeds that differ as much as these."""
    share = self.seeds / count
    return self._replace(
      seeds=count,
      by_items=self.by_items - (1 - share) * self.both,
      by_seeds=share * self.by_seeds,
      both=share * self.both,
    )

  def times(self, unit: float) -> "MeanEstimate":
    """Returns it in another unit, such as points: 100 of a share."""
    parts = ("by_items", "by_seeds", "both")
    squares = {name: getattr(self, name) * unit**2 for name in parts}
    return self._replace(value=unit * self.value, **squares)


def estimate_mean(
  values: np.ndarray,
  strata: np.ndarray | None = None,
  texts: np.ndarray | None = None,
  pretrained: bool = True,
) -> MeanEstimate:
  """Estimates the mean over S seeds of the unweighted mean over strata.

  Args:
    values: Of each seed and item, `[S, n]`.
    strata: Stratum of each item, such as its paradigm, int `[n]`.
    texts: Items with equal numbers are one item: repeating a text tells nothing
      new, and does not narrow the interval. int `[n]`.
    pretrained: Whether the seeds are pretrainings.
  """
  seeds, count = values.shape
  strata = np.zeros(count, int) if strata is None else strata
  texts = np.arange(count) if texts is None else texts
  means = []
  items = 0
  by_items = 0.0
  by_answers = 0.0
  distinct = np.unique(strata)
  for stratum in distinct:
    scores = values[:, strata == stratum].astype(np.float64)
    means.append(scores.mean(axis=1))
    _, item = np.unique(texts[strata == stratum], return_inverse=True)
    size = item.max() + 1
    items += size
    if size > 1:
      # Each item's contribution to its seed's mean, times their number: `[S,
      # size]`.
      scores -= scores.mean(axis=1, keepdims=True)
      added = np.stack([np.bincount(item, row, size) for row in scores])
      added *= size / scores.shape[1]
      mean = added.mean(axis=0)
      by_items += mean.var(ddof=1) / size
      squares = ((added - mean) ** 2).sum()
      residual = squares / (max(1, seeds - 1) * (size - 1))
      by_answers += residual / (seeds * size)
  by_seed = np.mean(means, axis=0)
  return MeanEstimate(
    value=float(by_seed.mean()),
    seeds=seeds,
    items=int(items),
    freedom=int(items - len(distinct)),
    by_items=float(by_items) / len(distinct) ** 2,
    by_seeds=float(by_seed.var(ddof=1)) / seeds if seeds > 1 else 0.0,
    both=float(by_answers) / len(distinct) ** 2,
    pretrained=pretrained,
  )


def estimate_over_seeds(
  values: Mapping[tuple[str, str], np.ndarray | float], **items
) -> MeanEstimate | None:
  """Estimates a mean over pretrainings, or over one's fine-tunings.

  Args:
    values: By pretraining and fine-tuning: of each item `[n]`, or one value.
    **items: `strata` and `texts` of `estimate_mean`.
  """
  by_seed = {}
  for (seed, _), scores in values.items():
    by_seed.setdefault(seed, []).append(np.atleast_1d(scores))
  if not by_seed:
    return None
  has_seeds = len(by_seed) > 1
  rows = [np.mean(x, axis=0) for x in by_seed.values()]
  rows = np.stack(rows if has_seeds else next(iter(by_seed.values())))
  # One value of one pretraining is of a pretraining.
  return estimate_mean(rows, **items, pretrained=has_seeds or len(rows) == 1)


class Mean(NamedTuple):
  """A number over seeds."""

  values: Mapping[str, float]  # by seed; at least one
  mean: float
  std: float | None  # the sample's standard deviation; None of one seed

  def half_width(self, confidence: float = CONFIDENCE) -> float | None:
    """Half of the mean's interval by Student's t; None of one seed."""
    if self.std is None:
      return None
    count = len(self.values)
    return student(count - 1, confidence) * self.std / count**0.5


def mean_of_seeds(values: Mapping[str, float]) -> Mean | None:
  """Returns the mean of values by seed, or None if there are none."""
  if not values:
    return None
  numbers = [*values.values()]
  std = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None
  return Mean(dict(values), float(np.mean(numbers)), std)


def student(freedom: int, confidence: float) -> float:
  """Returns how many standard errors half an interval has, by Student's t."""
  return float(special.stdtrit(freedom, (1 + confidence) / 2))
