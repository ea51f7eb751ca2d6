"""What scores are made into: accuracy, rank correlation, variance explained."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Item


class Metric(NamedTuple):
  """A number of some items.

  Attributes:
    key: Its name in summaries.
    title: Its name in reports of pipeline 2025.
    scale: What it is multiplied with there.
    of: Makes it, `[K]`, of n items and the scores `[C, n, K]` of their choices.
    details: Yields what is predicted of each item beside the choice, of scores
      `[C, n]`.
    all_items: What that report calls a group that is all items; "" for the
      group's own name.
  """

  key: str
  title: str
  scale: float
  of: Callable[[Sequence[Item], np.ndarray], np.ndarray]
  details: Callable[[np.ndarray], Iterator[dict]]
  all_items: str = ""


def first_probability(scores: np.ndarray) -> np.ndarray:
  """Returns the first choice's share of probability, float32 `[...]`.

  `scores` are the log-probabilities `[C, ...]` of choices.
  """
  # In float32 as in the pipeline: shares next to 1 are ties there.
  scores = scores.astype(np.float32)
  weights = np.exp(scores - scores.max(axis=0))
  return weights[0] / weights.sum(axis=0)


def _rank_correlation(items: Sequence[Item], scores: np.ndarray) -> np.ndarray:
  ratings = [item.rating for item in items]
  shares = first_probability(scores)  # [n, K]
  return np.array([spearman(share, ratings) for share in shares.T])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
  """Returns the correlation of ranks; NaN if all of a or of b are equal."""
  return pearson(ranks(a), ranks(b))


def ranks(values: Sequence[float]) -> np.ndarray:
  """Returns ranks from 1 on, float64 `[n]`; equal values share their mean."""
  _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
  last = np.cumsum(counts)
  return (last - (counts - 1) / 2)[index]


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
  """Returns the correlation; NaN if all of a or of b are equal."""
  a, b = (np.asarray(x, np.float64) - np.mean(x) for x in (a, b))
  scale = np.sqrt((a @ a) * (b @ b))
  return float(a @ b / scale) if scale else float("nan")


def explained(predictors: Sequence[np.ndarray], target: np.ndarray) -> float:
  """Returns R^2 of least squares with an intercept.

  `predictors` are P arrays `[n]`, `target` is `[n]`.
  """
  design = np.stack([np.ones_like(target), *predictors], axis=1)
  weights, *_ = np.linalg.lstsq(design, target)
  left, spread = target - design @ weights, target - target.mean()
  return float(1 - left @ left / (spread @ spread))


# What pandas, which the pipeline reads CSV files with, takes for nothing.
NOTHING = ("", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null")


def number(text: str) -> float:
  """Reads a number of a CSV file, NaN where there is none."""
  return float("nan" if text in NOTHING else text)


ACCURACY = Metric(
  key="accuracy",
  title="ACCURACY",
  scale=100,
  # The first choice of each item is right.
  of=lambda items, scores: pairs.correct(scores).mean(axis=0),
  details=lambda scores: ({} for _ in scores[0]),
)
SPEARMAN = Metric(
  key="spearman",
  title="SPEARMAN'S RHO",
  scale=1,
  of=_rank_correlation,
  details=lambda scores: (
    {"prob": float(share)} for share in first_probability(scores)
  ),
  all_items="avg",
)
