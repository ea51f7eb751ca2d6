"""Regression: a number for each text, or pair of texts."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar

import jax
import numpy as np

from antlm_jax.evals.finetuning import classification
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.classification import Classifier, LinearHead
from antlm_jax.evals.finetuning.task import Prediction, Predictions, TaskHead

OUTPUTS = ("value",)  # names of the head's outputs


@dataclasses.dataclass(frozen=True)
class LinearRegressor(LinearHead):
  """One linear layer, whose output is a number.

  The output is (number - mean) / deviation, so that a learning rate suits
  numbers of any size.
  """

  mean: float = 0.0  # of the numbers in train
  deviation: float = 1.0
  kind: ClassVar[str] = "linear_regressor"

  def loss(self, outputs, labels, weights) -> jax.Array:
    """Returns the mean squared error, in squared deviations."""
    errors = (outputs[:, 0] - labels) ** 2
    return (weights * errors).sum() / weights.sum()

  def targets(self, examples) -> np.ndarray:
    """Returns the outputs that are right, float32 `[n]`."""
    numbers = [self.mean if e.label is None else e.label for e in examples]
    targets = (np.array(numbers, np.float64) - self.mean) / self.deviation
    return targets.astype(np.float32)

  def reduce(self, outputs) -> jax.Array:
    """Returns the output, float32 `[B]`."""
    return outputs[:, 0]

  def decode(self, reduced: np.ndarray, rows: ExampleRows) -> list[float]:
    """Returns the numbers."""
    return (np.float64(reduced) * self.deviation + self.mean).tolist()

  def predictions(self, outputs, rows) -> list[Prediction]:
    """Returns the numbers as values."""
    return TaskHead.predictions(self, outputs, rows)

  def prediction_fields(self, prediction: float) -> dict[str, float]:
    """Returns the number."""
    return {"value": prediction}


@dataclasses.dataclass(frozen=True)
class Regressor(LinearRegressor, Classifier):
  """The layers of `Classifier`, whose output is a number."""

  kind: ClassVar[str] = "regressor"


HEADS: classification.Heads = LinearRegressor, Regressor


def spearman(predictions: Sequence[float], labels: Sequence[float]) -> float:
  """Spearman's correlation, that of ranks; 0 if one side is constant."""
  return classification.correlation(_ranks(predictions), _ranks(labels))


def r2(predictions: Sequence[float], labels: Sequence[float]) -> float:
  """Share of the labels' variance that is explained; 0 if they are constant."""
  x, y = (np.asarray(v, np.float64) for v in (predictions, labels))
  variance = y.var()
  return float(1 - ((x - y) ** 2).mean() / variance) if variance else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
  """Returns ranks from 1; equal values have the mean of their ranks."""
  _, inverse, counts = np.unique(
    values, return_inverse=True, return_counts=True
  )
  return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def the_mean(examples: Sequence[Example]) -> Iterator[Predictions]:
  """Yields the answers that are all the mean."""
  yield [float(np.mean([e.label for e in examples]))] * len(examples)


# Fields of a `Task` that differ from those of a classification.
FIELDS = {
  "metrics": {
    "pearson": classification.correlation,
    "spearman": spearman,
    "r2": r2,
  },
  "main_metric": "pearson",
  "best_by": "r2",  # correlations ignore a wrong scale
  "also": ("spearman", "r2"),
  "baseline": "the mean",
  "trivial": the_mean,
}
