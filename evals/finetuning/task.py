"""A fine-tuning task is a value: examples, a head, a loss, metrics.

A head turns hidden states into outputs, the loss compares outputs with labels,
`decode` makes predictions of them, and metrics compare those with labels.
Nothing else of fine-tuning (`evals.finetuning.loop`) knows what the task is.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray | jax.Array
Params = dict[str, jax.Array]
Metric = Callable[[np.ndarray, np.ndarray], float]
POOLS = ("first", "last", "mean")
_NORM_EPS = 1e-5


class Example(NamedTuple):
  """An example of a task.

  Attributes:
    texts: One text, or several that are read together, in this order.
    label: What is to be predicted.
    id: Its name in the predictions.
  """

  texts: tuple[str, ...]
  label: Any
  id: str


class Head(Protocol):
  """What a task puts on the encoder; hashable, so that programs are shared."""

  def init(self, key: jax.Array, width: int) -> Params:
    """Draws its parameters, for hidden states of a width D."""

  @property
  def axes(self) -> Mapping[str, tuple[str | None, ...]]:
    """Logical axes of each parameter, for weight decay."""

  def __call__(
    self,
    params: Params,
    hidden: jax.Array,
    lengths: jax.Array,
    dropout_key: jax.Array | None,
  ) -> Any:
    """Hidden states `[B, T, D]` of rows of `[B]` tokens to outputs."""


@dataclasses.dataclass(frozen=True)
class Task:
  """A task.

  Attributes:
    name: Its name on the command line.
    load: Reads the examples of `train`, or of an evaluation set by its name.
    evaluations: Names of the evaluation sets. The first one chooses the epoch.
    head: What is put on the encoder.
    loss: `(outputs, labels, weights)` to a float32 `[]`; examples of weight 0
      are padding.
    decode: Outputs to predictions `[B]`.
    metrics: By name, functions of predictions `[n]` and labels `[n]`.
    main_metric: The one that is reported, the higher the better.
    labels: Names of the classes, if there are classes, in their order.
  """

  name: str
  load: Callable[[str], Sequence[Example]]
  evaluations: tuple[str, ...]
  head: Head
  loss: Callable[[Any, jax.Array, jax.Array], jax.Array]
  decode: Callable[[Any], jax.Array]
  metrics: Mapping[str, Metric]
  main_metric: str
  labels: tuple[str, ...] = ()


# ------------------------------------------------------------ classification


@dataclasses.dataclass(frozen=True)
class Classifier:
  """Norm, linear, GELU, norm, dropout, linear, on one vector of the row.

  The head of BabyLM's 2025 pipeline; its norms have no parameters and its GELU
  is the tanh approximation. Without norms it is EuroBERT's head for sequences
  (transformers' EuroBertForSequenceClassification): linear, exact GELU, linear.

  Attributes:
    classes: Number of classes C.
    pool: The vector: of the `first` token, of the `last`, or their `mean`.
    dropout: Share that is dropped before the last linear layer in training.
    norms: Whether it has norms.
  """

  classes: int
  pool: str
  dropout: float = 0.1
  norms: bool = True

  @property
  def axes(self) -> dict[str, tuple[str | None, ...]]:
    """Biases count as norms do: weight decay leaves both out."""
    return {
      "dense/kernel": ("embed", "embed"),
      "dense/bias": ("norm",),
      "classes/kernel": ("embed", None),
      "classes/bias": ("norm",),
    }

  def init(self, key: jax.Array, width: int) -> Params:
    """Kernels from N(0, 2 / 5D) cut at two deviations, as LTG-BERT's."""
    std = (2 / (5 * width)) ** 0.5
    dense, classes = jax.random.split(key)

    def kernel(key, columns):
      shape = (width, columns)
      return std * jax.random.truncated_normal(key, -2.0, 2.0, shape)

    return {
      "dense/kernel": kernel(dense, width),
      "dense/bias": jnp.zeros(width),
      "classes/kernel": kernel(classes, self.classes),
      "classes/bias": jnp.zeros(self.classes),
    }

  def __call__(self, params, hidden, lengths, dropout_key=None) -> jax.Array:
    """Returns logits, float32 `[B, C]`."""
    norm = _norm if self.norms else lambda x: x
    x = norm(pooled(hidden, lengths, self.pool).astype(jnp.float32))
    x = x @ params["dense/kernel"] + params["dense/bias"]
    x = norm(jax.nn.gelu(x, approximate=self.norms))
    if dropout_key is not None and self.dropout:
      keep = jax.random.bernoulli(dropout_key, 1 - self.dropout, x.shape)
      x = jnp.where(keep, x / (1 - self.dropout), 0.0)
    return x @ params["classes/kernel"] + params["classes/bias"]


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
    logits: float32 `[B, C]`.
    labels: int32 `[B]`.
    weights: float32 `[B]`.
  """
  at_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
  nats = jax.nn.logsumexp(logits, axis=-1) - at_label
  return (weights * nats).sum() / weights.sum()


def likeliest(logits: jax.Array) -> jax.Array:
  """Returns the class of the highest logit, int32 `[B]`."""
  return jnp.argmax(logits, axis=-1).astype(jnp.int32)


# ------------------------------------------------------------------- metrics


def accuracy(predictions: np.ndarray, labels: np.ndarray) -> float:
  """Share of predictions that are right."""
  return float(np.mean(predictions == labels))


def f1(predictions: np.ndarray, labels: np.ndarray) -> float:
  """F1 of class 1; 0 where it is neither predicted nor there."""
  found = np.sum((predictions == 1) & (labels == 1))
  called = np.sum(predictions == 1) + np.sum(labels == 1)
  return float(2 * found / called) if called else 0.0


def mcc(predictions: np.ndarray, labels: np.ndarray) -> float:
  """Matthews correlation of two classes; 0 where one side is constant."""
  x, y = (np.asarray(v == 1, np.float64) for v in (predictions, labels))
  if np.ptp(x) == 0 or np.ptp(y) == 0:
    return 0.0
  return float(np.corrcoef(x, y)[0, 1])
