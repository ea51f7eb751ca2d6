"""Metrics of scores: accuracy, rank correlation and explained variance."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax.inference import pairs
from antlm_jax.inference.pairs import Item


class Metric(NamedTuple):
  """A figure of some items and the scores of their choices."""

  key: str  # its name in summaries
  title: str  # its name in reports of pipeline 2025
  scale: float  # its factor in these reports
  # Computes it, `[K]`, from n items and their scores `[C, n, K]`.
  of: Callable[[Sequence[Item], np.ndarray], np.ndarray]


def first_probability(scores: np.ndarray) -> np.ndarray:
  """Returns the first choice's share of probability, float32 `[...]`.

  `scores` are the log-probabilities `[C, ...]` of choices.
  """
  # In float32 as in the pipeline: shares next to 1 are ties there.
  scores = scores.astype(np.float32)
  weights = np.exp(scores - scores.max(axis=0))
  return weights[0] / weights.sum(axis=0)


def rank_correlation(items: Sequence[Item], scores: np.ndarray) -> np.ndarray:
  """Correlates ratings with the first choice's probability, by ranks, `[K]`."""
  ratings = [item.rating for item in items]
  shares = first_probability(scores)  # [n, K]
  return np.array([spearman(share, ratings) for share in shares.T])


SPEARMAN = Metric("spearman", "SPEARMAN'S RHO", 1, rank_correlation)
ACCURACY = Metric(
  "accuracy", "ACCURACY", 100, lambda _, scores: pairs.correct(scores).mean(0)
)


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
  """Returns R^2 of least squares, with an intercept, for a target `[n]`."""
  design = np.stack([np.ones_like(target), *predictors], axis=1)
  weights, *_ = np.linalg.lstsq(design, target)
  left, spread = target - design @ weights, target - target.mean()
  return float(1 - left @ left / (spread @ spread))


# Texts that pandas, with which the pipeline reads CSV files, takes for missing.
NOTHING = ("", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null")


def number(text: str) -> float:
  """Reads a number of a CSV file; NaN if it is missing."""
  return float("nan" if text in NOTHING else text)
