"""Multi-label classification: any number of the labels for each text."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from antlm_jax.evals.finetuning import classification
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.classification import Classifier, LinearHead
from antlm_jax.evals.finetuning.task import (
  ClassCounts,
  Predictions,
  Ratio,
  mean_of,
)

Labels = Sequence[Sequence[int]]  # indices of each text's labels, sorted


@dataclasses.dataclass(frozen=True)
class MultiLabelLinear(LinearHead):
  """One linear layer; each label has a probability of its own (sigmoid)."""

  kind: ClassVar[str] = "multi_label_linear"

  def loss(self, outputs, labels, weights) -> jax.Array:
    """Returns the mean binary cross-entropy of all labels, in nats."""
    nats = optax.sigmoid_binary_cross_entropy(self.logits(outputs), labels)
    return (weights * nats.mean(axis=-1)).sum() / weights.sum()

  def targets(self, examples) -> np.ndarray:
    """Returns which labels each text has, float32 `[n, C]`."""
    lists = [example.label or [] for example in examples]
    return _hot(lists, len(self.labels)).astype(np.float32)

  def reduce(self, outputs) -> jax.Array:
    """Returns the labels whose probability is over 1/2, bool `[B, C]`."""
    return self.logits(outputs) > 0

  def decode(self, reduced: np.ndarray, rows: ExampleRows) -> list[list[int]]:
    """Returns the indices of each text's labels."""
    return [np.flatnonzero(row).tolist() for row in reduced]

  def probabilities(self, outputs) -> jax.Array:
    """Returns each label's own probability, `[B, C]`."""
    return jax.nn.sigmoid(jnp.asarray(self.logits(outputs)))

  def prediction_fields(
    self, prediction: Sequence[int]
  ) -> dict[str, tuple[str, ...]]:
    """Returns the names of the labels."""
    return {"labels": tuple(self.labels[label] for label in prediction)}


@dataclasses.dataclass(frozen=True)
class MultiLabelClassifier(MultiLabelLinear, Classifier):
  """The layers of `Classifier`; each label has a probability of its own."""

  kind: ClassVar[str] = "multi_label_classifier"


HEADS: classification.Heads = MultiLabelLinear, MultiLabelClassifier


def _hot(lists: Labels, count: int) -> np.ndarray:
  """Returns which of `count` labels are in each list, bool `[n, count]`."""
  out = np.zeros((len(lists), count), bool)
  for row, labels in zip(out, lists, strict=True):
    row[[*labels]] = True
  return out


def _label_counts(
  predictions: Labels, labels: Labels, least: int = 1
) -> tuple[np.ndarray, ...]:
  """Returns for each label how often it is predicted, true, and both.

  There are at least `least` labels.
  """
  count = max([least - 1, *itertools.chain(*predictions, *labels)]) + 1
  x, y = (_hot(lists, count) for lists in (predictions, labels))
  return x.sum(axis=0), y.sum(axis=0), (x & y).sum(axis=0)


def class_counts(
  names: Sequence[str], predictions: Labels, labels: Labels
) -> dict[str, ClassCounts]:
  """Counts the labels of these names, whose indices are given."""
  counts = np.stack(_label_counts(predictions, labels, len(names)), axis=1)
  return {
    name: ClassCounts(*label_counts)
    for name, label_counts in zip(names, counts.tolist(), strict=True)
  }


# F1 over all labels of all texts; 0 if none is predicted or true.
micro_f1 = Ratio(lambda x, y: (2 * len({*x} & {*y}), len(x) + len(y)))


def label_macro_f1(predictions: Labels, labels: Labels) -> float:
  """Mean F1 of the labels that are predicted or true."""
  predicted, true, correct = _label_counts(predictions, labels)
  called = predicted + true
  scores = 2 * correct[called > 0] / called[called > 0]
  return float(scores.mean()) if len(scores) else 0.0


# Share of texts all of whose labels, and no others, are predicted.
exact_match = mean_of(lambda x, y: [*x] == [*y])


def frequent(examples: Sequence[Example]) -> Iterator[Predictions]:
  """Yields the answers that give all texts the k most frequent labels."""
  counts = collections.Counter(label for e in examples for label in e.label)
  labels = [label for label, _ in counts.most_common()]
  for k in range(len(labels) + 1):
    yield [sorted(labels[:k])] * len(examples)


METRICS = {
  "micro_f1": micro_f1,
  "macro_f1": label_macro_f1,
  "exact_match": exact_match,
}
# Fields of a `Task` that differ from those of a classification.
FIELDS = {
  "metrics": METRICS,
  "main_metric": "micro_f1",
  "also": ("macro_f1", "exact_match"),
  "baseline": "the most frequent labels",
  "trivial": frequent,
}
