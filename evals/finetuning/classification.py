"""Classification: one of a few classes for each text, or pair of texts."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.settings import setting
from evals.finetuning import rows as rows_lib
from evals.finetuning.rows import Example, Rows
from evals.finetuning.task import Head, Param, Params, Predictions, Task

POOLS = ("first", "last", "mean")
_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Options:
  """The settings of a classifier that a command offers."""

  pool: str | None = setting(
    None,
    "which vector is classified; by default the first token's if the attention"
    " is bidirectional, the last one's if it is causal",
    choices=POOLS,
  )
  head: str = setting(
    "norms",
    "BabyLM's, with norms, or plain, without: EuroBERT's",
    choices=("norms", "plain"),
  )
  dropout: float = setting(0.1, "in the head", least=0, under=1)

  def classifier(self, labels: Sequence[str], attention: str) -> "Classifier":
    """Returns the head for classes of these names."""
    pool = self.pool or ("last" if attention == "causal" else "first")
    norms = self.head == "norms"
    return Classifier(tuple(labels), pool, self.dropout, norms)


# -------------------------------------------------------------------- the head


@dataclasses.dataclass(frozen=True)
class Classifier(Head):
  """Norm, linear, GELU, norm, dropout, linear, on one vector of the row.

  The head of BabyLM's 2025 pipeline; its norms have no parameters and its GELU
  is the tanh approximation. Without norms it is EuroBERT's head for sequences
  (transformers' EuroBertForSequenceClassification): linear, exact GELU, linear.

  Attributes:
    labels: Names of the C classes, in their order.
    pool: The vector: of the `first` token, of the `last`, or their `mean`.
    dropout: Share that is dropped before the last linear layer in training.
    norms: Whether it has norms.
  """

  labels: tuple[str, ...]
  pool: str
  dropout: float = 0.1
  norms: bool = True
  kind: ClassVar[str] = "classifier"

  def parameters(self, width: int) -> dict[str, Param]:
    """Kernels from N(0, 2 / 5D) cut at two deviations, as LTG-BERT's."""
    std, classes = (2 / (5 * width)) ** 0.5, len(self.labels)
    # Biases count as norms do: weight decay leaves both out.
    return {
      "dense/kernel": Param((width, width), ("embed", "embed"), std),
      "dense/bias": Param((width,), ("norm",)),
      "classes/kernel": Param((width, classes), ("embed", None), std),
      "classes/bias": Param((classes,), ("norm",)),
    }

  def __call__(self, params: Params, hidden, lengths, dropout_key=None):
    """Returns logits, float32 `[B, C]`."""
    norm = _norm if self.norms else lambda x: x
    x = norm(pooled(hidden, lengths, self.pool).astype(jnp.float32))
    x = x @ params["dense/kernel"] + params["dense/bias"]
    x = norm(jax.nn.gelu(x, approximate=self.norms))
    if dropout_key is not None and self.dropout:
      keep = jax.random.bernoulli(dropout_key, 1 - self.dropout, x.shape)
      x = jnp.where(keep, x / (1 - self.dropout), 0.0)
    return x @ params["classes/kernel"] + params["classes/bias"]

  def loss(self, outputs, labels, weights) -> jax.Array:
    """The mean cross-entropy in nats."""
    return cross_entropy(outputs, labels, weights)

  def encode(self, loaded, examples, max_length) -> Rows:
    """Reads the texts of an example together, in one row."""
    texts = [example.texts for example in examples]
    labels = np.array([example.label or 0 for example in examples])
    made = rows_lib.framed(loaded, texts, max_length)
    return Rows(*made, labels, examples=examples)

  def reduce(self, outputs) -> jax.Array:
    """Returns the class of the highest logit, int32 `[B]`."""
    return jnp.argmax(outputs, axis=-1).astype(jnp.int32)

  def decode(self, reduced: np.ndarray, rows: Rows) -> list[int]:
    """Returns the classes."""
    return reduced.tolist()


def pooled(hidden: jax.Array, lengths: jax.Array, pool: str) -> jax.Array:
  """Returns one vector a row, `[B, D]`, of hidden states `[B, T, D]`.

  Args:
    hidden: Hidden states, padded at the right.
    lengths: Tokens of each row, int32 `[B]`.
    pool: One of `POOLS`.
  """
  if pool == "first":
    return hidden[:, 0]
  if pool == "last":
    at = (lengths - 1)[:, None, None]
    return jnp.take_along_axis(hidden, at, axis=1)[:, 0]
  real = jnp.arange(hidden.shape[1]) < lengths[:, None]
  total = jnp.where(real[..., None], hidden.astype(jnp.float32), 0).sum(axis=1)
  return total / lengths[:, None]


def _norm(x: jax.Array) -> jax.Array:
  x = x - x.mean(axis=-1, keepdims=True)
  return x * jax.lax.rsqrt((x * x).mean(axis=-1, keepdims=True) + _NORM_EPS)


def cross_entropy(
  logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> jax.Array:
  """Returns the mean in nats over a batch, weighted, `[]`.

  Args:
    logits: float32 `[..., C]`.
    labels: int32 `[...]`.
    weights: float32 `[...]`.
  """
  at_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
  nats = jax.nn.logsumexp(logits, axis=-1) - at_label
  return (weights * nats).sum() / weights.sum()


# -------------------------------------------------------------------- the task


def task(
  name: str,
  load: Callable[[str], Sequence[Example]],
  evaluations: Sequence[str],
  head: Classifier,
  main_metric: str = "accuracy",
  **more,
) -> Task:
  """Makes a task of classes; F1 and MCC are of two classes only.

  Args:
    name: Its name.
    load: Reads examples whose labels are indices of the head's `labels`.
    evaluations: Names of its evaluation sets.
    head: The classifier.
    main_metric: The one that is reported.
    **more: Further fields of the Task.
  """
  return Task(
    name=name,
    load=load,
    evaluations=tuple(evaluations),
    head=head,
    metrics=BINARY if len(head.labels) == 2 else {"accuracy": accuracy},
    main_metric=main_metric,
    baseline="one class",
    trivial=one_class,
    **more,
  )


def one_class(examples: Sequence[Example]) -> Iterator[Predictions]:
  """Yields, for each class that occurs, the answer that is always this one."""
  for label in sorted({example.label for example in examples}):
    yield [label] * len(examples)


def accuracy(predictions: Sequence[int], labels: Sequence[int]) -> float:
  """Share of predictions that are right."""
  return float(np.mean(np.asarray(predictions) == np.asarray(labels)))


def f1(predictions: Sequence[int], labels: Sequence[int]) -> float:
  """F1 of class 1; 0 where it is neither predicted nor there."""
  x, y = (np.asarray(v) == 1 for v in (predictions, labels))
  called = x.sum() + y.sum()
  return float(2 * (x & y).sum() / called) if called else 0.0


def mcc(predictions: Sequence[int], labels: Sequence[int]) -> float:
  """Matthews correlation of two classes; 0 where one side is constant."""
  x, y = (np.asarray(v) == 1 for v in (predictions, labels))
  if np.ptp(x.astype(int)) == 0 or np.ptp(y.astype(int)) == 0:
    return 0.0
  return float(np.corrcoef(x.astype(np.float64), y.astype(np.float64))[0, 1])


BINARY = {"accuracy": accuracy, "f1": f1, "mcc": mcc}
