"""Classification: one of a few classes for each text, or pair of texts."""

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.task import (
  ClassCounts,
  Param,
  Params,
  Prediction,
  Predictions,
  Task,
  TaskHead,
  mean_of,
)
from antlm_jax.models import layers
from antlm_jax.settings import Section, setting

POOLS = ("first", "last", "mean")
# The pool and head that transformers has for LTG-BERT, and for a causal Llama.
_BY_ATTENTION = {
  "bidirectional": ("first", "norms"),
  "causal": ("last", "linear"),
}


@dataclasses.dataclass(frozen=True)
class ClassifierOptions(Section):
  """Command-line options of a classifier."""

  pool: str | None = setting(
    None,
    "Token whose vector is classified, or the mean of all; by default first if"
    " the attention is bidirectional, last if it is causal",
    choices=POOLS,
  )
  head: str | None = setting(
    None,
    "Head: norms as in LTG-BERT and BabyLM, plain (no norms) as in EuroBERT,"
    " last_norm as in ModernBERT, or linear (one layer) as in UltraBERT and in"
    " transformers' causal models. By default norms if the attention is"
    " bidirectional, linear if it is causal. preset=classification chooses a"
    " head that can be exported, if possible",
    choices=("norms", "plain", "last_norm", "linear"),
  )
  dropout: float = setting(
    0.1, "Dropout in the head, unless it is linear", least=0, under=1
  )

  def classifier(
    self, labels: Sequence[str], attention: str, heads: "Heads | None" = None
  ) -> "LinearHead":
    """Returns one of two heads, with outputs of these names.

    By default it predicts one of these classes.
    """
    linear, deep = heads or HEADS
    default_pool, default_head = _BY_ATTENTION[attention]
    pool = self.pool or default_pool
    head = self.head or default_head
    if head == "linear" and linear:
      return linear(tuple(labels), pool)
    norms = {"norms": head == "norms", "last_norm": head == "last_norm"}
    return deep(tuple(labels), pool, self.dropout, **norms)


@dataclasses.dataclass(frozen=True)
class LinearHead(TaskHead):
  """One linear layer without a bias, on one vector of the row.

  On the last token it is the head of causal models in transformers, such as
  LlamaForSequenceClassification.
  """

  labels: tuple[str, ...]  # names of the C classes
  pool: str  # vector: the `first` token's, the `last` token's, or the `mean`
  kind: ClassVar[str] = "linear"

  @property
  def num_outputs(self) -> int:
    """One output for each class."""
    return len(self.labels)

  def logits(self, outputs) -> jax.Array:
    """Returns the classes' logits, `[B, C]`."""
    return outputs

  def parameters(self, width: int) -> dict[str, Param]:
    """Declares a kernel from N(0, .02^2), cut at two deviations."""
    shape = width, self.num_outputs
    return {"classes/kernel": Param(shape, ("embed", None), 0.02)}

  def __call__(self, params: Params, hidden, lengths, dropout_key=None):
    """Returns logits, float32 `[B, C]`."""
    x = pooled(hidden, lengths, self.pool).astype(jnp.float32)
    return x @ params["classes/kernel"]

  def loss(self, outputs, labels, weights) -> jax.Array:
    """Returns the mean cross-entropy in nats."""
    return class_loss(self.logits(outputs), labels, weights)

  def encode(self, loaded, examples, max_length) -> ExampleRows:
    """Makes a row of each example's texts together."""
    texts = [example.texts for example in examples]
    tokens, lengths, cut = batching.frame_texts(loaded, texts, max_length)
    targets = self.targets(examples)
    return ExampleRows(tokens, lengths, targets, examples=examples, cut=cut)

  def targets(self, examples: Sequence[Example]) -> np.ndarray:
    """Returns the labels for the loss, `[n, ...]`; 0 if unknown."""
    return np.array([example.label or 0 for example in examples])

  def reduce(self, outputs) -> jax.Array:
    """Returns the class of the highest logit, int32 `[B]`."""
    return jnp.argmax(self.logits(outputs), axis=-1).astype(jnp.int32)

  def decode(self, reduced: np.ndarray, rows: ExampleRows) -> list[int]:
    """Returns the classes."""
    return reduced.tolist()

  def probabilities(self, outputs) -> jax.Array:
    """Returns the classes' probabilities, `[B, C]`."""
    return jax.nn.softmax(self.logits(outputs), axis=-1)

  def predictions(self, outputs, rows) -> list[Prediction]:
    """Adds the classes' probabilities."""
    predictions = super().predictions(outputs, rows)
    probabilities = np.asarray(self.probabilities(outputs)).tolist()
    return [
      dataclasses.replace(
        prediction, probabilities=dict(zip(self.labels, row, strict=True))
      )
      for prediction, row in zip(predictions, probabilities, strict=True)
    ]

  def prediction_fields(self, prediction: int) -> dict[str, str]:
    """Returns the name of a class."""
    return {"label": self.labels[prediction]}


@dataclasses.dataclass(frozen=True)
class Classifier(LinearHead):
  """Norm, linear, exact GELU, norm, dropout, linear, on one vector of the row.

  It is the head of LTG-BERT and of BabyLM's 2026 pipeline, whose norms have no
  parameters. Without norms it is EuroBERT's head (transformers'
  EuroBertForSequenceClassification). With the last norm only, which then has a
  scale, it is ModernBERT's.
  """

  dropout: float = 0.1  # before the last linear layer, in training
  norms: bool = True
  last_norm: bool = False
  kind: ClassVar[str] = "classifier"

  def parameters(self, width: int) -> dict[str, Param]:
    """Declares kernels from N(0, 2 / 5D) cut at two deviations, as LTG-BERT."""
    std = (2 / (5 * width)) ** 0.5
    classes = self.num_outputs
    # Biases count as norms, both of which weight decay may leave out.
    scale = {"norm/scale": Param((width,), ("norm",), fill=1.0)}
    return (scale if self.last_norm else {}) | {
      "dense/kernel": Param((width, width), ("embed", "embed"), std),
      "dense/bias": Param((width,), ("norm",)),
      "classes/kernel": Param((width, classes), ("embed", None), std),
      "classes/bias": Param((classes,), ("norm",)),
    }

  def __call__(self, params: Params, hidden, lengths, dropout_key=None):
    """Returns logits, float32 `[B, C]`."""
    norm = layers.LayerNorm(hidden.shape[-1], eps=1e-5)
    x = pooled(hidden, lengths, self.pool).astype(jnp.float32)
    x = norm(x) if self.norms else x
    x = x @ params["dense/kernel"] + params["dense/bias"]
    x = jax.nn.gelu(x, approximate=False)
    x = norm(x) if self.norms or self.last_norm else x
    x = x * params["norm/scale"] if self.last_norm else x
    x = layers.dropout(x, self.dropout, dropout_key)
    return x @ params["classes/kernel"] + params["classes/bias"]


@dataclasses.dataclass(frozen=True)
class Chooser(Classifier):
  """Choice of one of C texts: a score of each, read after a context.

  As in transformers' ForMultipleChoice. An example has its context and then the
  choices.
  """

  kind: ClassVar[str] = "chooser"
  num_outputs: ClassVar[int] = 1

  def logits(self, outputs) -> jax.Array:
    """Returns the scores of the choices, `[B, C]` of `[B, C, 1]`."""
    return outputs[..., 0]

  def encode(self, loaded, examples, max_length) -> ExampleRows:
    """Makes rows `[n, C, T]`: each choice after the context."""
    pairs = []
    for example in examples:
      context, *choices = example.texts
      if len(choices) != len(self.labels):
        raise UserError(
          f"{context!r:.60} has {len(choices)} choices, not {len(self.labels)}"
        )
      pairs += [(context, choice) for choice in choices]
    tokens, lengths, cut = batching.frame_texts(loaded, pairs, max_length)
    shape = len(examples), len(self.labels)
    rows = tokens.reshape(*shape, -1), lengths.reshape(shape)
    targets = self.targets(examples)
    return ExampleRows(*rows, targets, examples=examples, cut=cut)


# A linear head, or None if there is none, and a deeper head.
Heads = tuple[type[LinearHead] | None, type[Classifier]]
HEADS: Heads = LinearHead, Classifier
CHOOSERS: Heads = None, Chooser


def pooled(hidden: jax.Array, lengths: jax.Array, pool: str) -> jax.Array:
  """Returns one vector a row, `[B, D]`, of hidden states `[B, T, D]`.

  Rows have `lengths` tokens, int32 `[B]`, and padding on the right.
  """
  if pool == "first":
    return hidden[:, 0]
  if pool == "last":
    last = (lengths - 1)[:, None, None]
    return jnp.take_along_axis(hidden, last, axis=1)[:, 0]
  real = jnp.arange(hidden.shape[1]) < lengths[:, None]
  total = jnp.where(real[..., None], hidden.astype(jnp.float32), 0).sum(axis=1)
  return total / lengths[:, None]


def class_loss(
  logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> jax.Array:
  """Returns the weighted mean cross-entropy of a batch in nats, `[]`.

  Logits are float32 `[..., C]`, labels int32 and weights float32 `[...]`.
  """
  nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return (weights * nats).sum() / weights.sum()


def classification_task(
  name: str,
  load: Callable[[str], Sequence[Example]],
  evaluations: Sequence[str],
  head: LinearHead,
  **fields,
) -> Task:
  """Makes a classification task; only two classes have F1 and MCC.

  The labels that `load` reads are indices of the head's. `fields` are other
  fields of the Task.
  """
  metrics = BINARY if len(head.labels) == 2 else {"accuracy": accuracy}
  also = fields.get("also", ())
  usual = FIELDS | {
    "metrics": metrics | {name: METRICS[name] for name in also},
    "also": also,
  }
  return Task(name, load, tuple(evaluations), head, **usual | fields)


def one_class(examples: Sequence[Example]) -> Iterator[Predictions]:
  """Yields, for each class that occurs, the answers that are all this class."""
  for label in sorted({example.label for example in examples}):
    yield [label] * len(examples)


accuracy = mean_of(operator.eq)  # share of right predictions


def class_counts(
  names: Sequence[str], predictions: Sequence[int], labels: Sequence[int]
) -> dict[str, ClassCounts]:
  """Counts the classes of these names, whose indices are given."""
  counts = {}
  for index, name in enumerate(names):
    predicted = np.asarray(predictions) == index
    true = np.asarray(labels) == index
    correct = predicted & true
    counts[name] = ClassCounts(
      int(predicted.sum()), int(true.sum()), int(correct.sum())
    )
  return counts


def macro_f1(predictions: Sequence[int], labels: Sequence[int]) -> float:
  """Mean F1 of the classes that are predicted or true."""
  classes = np.union1d(predictions, labels)[:, None]
  predicted = np.asarray(predictions) == classes
  true = np.asarray(labels) == classes
  correct = (predicted & true).sum(axis=1)
  called = predicted.sum(axis=1) + true.sum(axis=1)
  return float(np.mean(2 * correct / called))


def f1(predictions: Sequence[int], labels: Sequence[int]) -> float:
  """F1 of class 1; 0 if it is neither predicted nor true."""
  x, y = (np.asarray(v) == 1 for v in (predictions, labels))
  called = x.sum() + y.sum()
  return float(2 * (x & y).sum() / called) if called else 0.0


def mcc(predictions: Sequence[int], labels: Sequence[int]) -> float:
  """Matthews correlation of two classes; 0 if one side is constant."""
  return correlation(*(np.asarray(v) == 1 for v in (predictions, labels)))


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
  """Pearson's correlation; 0 if one side is constant."""
  x, y = (np.asarray(v, np.float64) for v in (x, y))
  if np.ptp(x) == 0 or np.ptp(y) == 0:
    return 0.0
  return float(np.corrcoef(x, y)[0, 1])


BINARY = {"accuracy": accuracy, "f1": f1, "mcc": mcc}
METRICS = {"accuracy": accuracy, "macro_f1": macro_f1}  # of any classes
# Fields of a `Task` of any classes.
FIELDS = {
  "metrics": METRICS,
  "main_metric": "accuracy",
  "also": ("macro_f1",),
  "baseline": "one class",
  "trivial": one_class,
}
