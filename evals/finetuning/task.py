"""Fine-tuning tasks: examples, a head, and metrics.

A `TaskHead` is the model's side: it makes rows of examples, maps hidden states
to outputs, and has the loss and the predictions. A saved model keeps its head.
A `Task` is the data's side: where the examples come from, and how predictions
are measured and written. A `Preset` makes tasks by name. A new kind of task is
one file, such as `tagging`, and its row in `presets.PRESETS`.
"""

import abc
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import sets
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.inference.model import Loaded

_GROUPS = 1000  # calls of a metric for its jackknife, at most
Params = dict[str, jax.Array]
Predictions = Sequence[Any]  # one for each example, as plain JSON
# Maps predictions and labels to a score; a `Ratio` is fast to compare by item.
Metric = Callable[[Predictions, Sequence[Any]], float]
Examples = Mapping[str, Sequence[Example]]  # by evaluation set
Answers = Mapping[str, Predictions]  # by evaluation set


class Entity(NamedTuple):
  """Kind of the words from `start` up to `stop` of a sentence."""

  kind: str
  start: int
  stop: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Prediction:
  """Prediction of a fine-tuned model; None where its head has no such thing."""

  texts: tuple[str, ...]  # of the example; a tagger's are words
  label: str | None = None  # of a text, or of texts that are read together
  probabilities: Mapping[str, float] | None = None  # by label
  # Of each word, None for a word without a token; or all of the text.
  labels: tuple[str | None, ...] | None = None
  entities: tuple[Entity, ...] | None = None
  answer: str | None = None  # part of the second text; empty for none
  value: object = None  # a number, or plain JSON of a head of another kind

  def __repr__(self) -> str:
    values = {name: x for name, x in vars(self).items() if x is not None}
    del values["texts"]
    probabilities = values.pop("probabilities", None)
    if probabilities and self.label is not None:
      values["probabilities"] = f"{probabilities[self.label]:.1%}"
    return f"<{', '.join(map(str, values.values()))}>"

  def to_json(self) -> dict[str, object]:
    """Returns all fields that are not None, as plain JSON."""
    values = {name: x for name, x in vars(self).items() if x is not None}
    if self.entities is not None:
      values["entities"] = [entity._asdict() for entity in self.entities]
    return values


class Param(NamedTuple):
  """Declares a parameter of a head."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]  # logical axes, which decide on weight decay
  # Deviation of its normal distribution, cut at two; 0 for a constant `fill`.
  std: float = 0.0
  fill: float = 0.0


class TaskHead(abc.ABC):
  """Model's side of a task: a frozen dataclass whose fields are plain JSON.

  Equal heads share their compiled programs.

  Attributes:
    kind: Name in checkpoints, different for each class.
    export_as: Kind of `hf.heads.HEADS` with the same parameters and settings,
      if it has another name; such a head can be exported.
    columns: Names of an example's texts in a file, for `predict`.
  """

  kind: ClassVar[str]
  # Settings that only evaluate it, which may change after training.
  evaluating: ClassVar[tuple[str, ...]] = ()
  export_as: ClassVar[str] = ""
  columns: ClassVar[tuple[str, ...]] = ("text",)

  @abc.abstractmethod
  def parameters(self, width: int) -> dict[str, Param]:
    """Declares its parameters, for hidden states of width D."""

  @abc.abstractmethod
  def __call__(
    self,
    params: Params,
    hidden: jax.Array,
    lengths: jax.Array,
    dropout_key: jax.Array | None = None,
  ) -> Any:
    """Maps hidden states `[B, T, D]` of rows of `[B]` tokens to `[B, ...]`.

    An output depends on its own row only; `loss` may compare rows. If a row
    consists of S texts that are encoded apart, each is a row here, and `loss`
    and `decode` get `[B, S, ...]`.
    """

  @abc.abstractmethod
  def loss(
    self, outputs: Any, labels: jax.Array, weights: jax.Array
  ) -> jax.Array:
    """Returns a batch's loss, float32 `[]`; rows of weight 0 are padding.

    The labels are those of the rows that `encode` made.
    """

  @abc.abstractmethod
  def encode(
    self, loaded: Loaded, examples: Sequence[Example], max_length: int
  ) -> ExampleRows:
    """Makes rows of at most `max_length` tokens, with or without labels."""

  def reduce(self, outputs: Any) -> Any:
    """Returns the part of the outputs that `decode` needs, on the device."""
    return outputs

  @abc.abstractmethod
  def decode(self, reduced: Any, rows: ExampleRows) -> Predictions:
    """Returns a prediction for each of `rows.examples`, on the host.

    `reduced` has the arrays `[n, ...]` of all rows.
    """

  def further_scores(self, reduced: Any, rows: ExampleRows) -> dict[str, float]:
    """Returns scores that need more than the predictions, by name."""
    return {}

  def example(self, texts: str | Sequence[str]) -> Example:
    """Returns a text, or several that are read together, as an example."""
    return Example((texts,) if isinstance(texts, str) else tuple(texts))

  def predictions(self, outputs: Any, rows: ExampleRows) -> list[Prediction]:
    """Returns the predictions of `rows.examples` for users, with names.

    `outputs` has the arrays `[n, ...]` of all rows, on the host.
    """
    predictions = self.decode(jax.device_get(self.reduce(outputs)), rows)
    return [
      Prediction(texts=example.texts, **self.prediction_fields(prediction))
      for example, prediction in zip(rows.examples, predictions, strict=True)
    ]

  def evaluated_as(self, other: "TaskHead") -> "TaskHead":
    """Returns this head with the settings `evaluating` of another."""
    settings = {name: getattr(other, name) for name in self.evaluating}
    return dataclasses.replace(self, **settings)

  def prediction_fields(self, prediction: Any) -> dict[str, Any]:
    """Returns a prediction as fields of `Prediction`."""
    return {"value": prediction}

  @property
  def settings(self) -> dict[str, Any]:
    """Its fields, as plain JSON; the class makes an equal head of them."""
    return dataclasses.asdict(self)

  def init(self, key: jax.Array, width: int) -> Params:
    """Draws its parameters, for hidden states of width D."""
    declared = self.parameters(width)
    # Constants take no key, so they do not change the other parameters' draws.
    random = [name for name, param in declared.items() if param.std]
    keys = dict(zip(random, jax.random.split(key, len(random)), strict=True))

    def draw(name: str, param: Param) -> jax.Array:
      if name not in keys:
        return jnp.full(param.shape, param.fill)
      cut = jax.random.truncated_normal(keys[name], -2.0, 2.0, param.shape)
      return param.std * cut

    return {name: draw(name, param) for name, param in declared.items()}


class ClassCounts(NamedTuple):
  """How often a class, or a kind of entity, is predicted, true, and both."""

  predicted: int
  true: int
  correct: int

  @property
  def f1(self) -> float:
    """F1; 0 for a class that is neither predicted nor true."""
    return 2 * self.correct / max(self.predicted + self.true, 1)

  def to_json(self) -> dict[str, float]:
    """Returns the scores with scikit-learn's names."""
    return {
      "precision": self.correct / max(self.predicted, 1),
      "recall": self.correct / max(self.true, 1),
      "f1": self.f1,
      "support": self.true,
    }


@dataclasses.dataclass(frozen=True)
class Task:
  """Data's side of a task."""

  name: str  # on the command line
  # Reads the examples of `train`, or of an evaluation set by its name.
  load: Callable[[str], Sequence[Example]]
  evaluations: tuple[str, ...]  # sets by name; the first chooses the epoch
  head: TaskHead
  metrics: Mapping[str, Metric]  # by name; higher is better
  main_metric: str  # that is reported
  baseline: str  # name of the best trivial answer
  # Maps all examples that `load` reads to answers without a model, each a list
  # of predictions.
  trivial: Callable[[Sequence[Example]], Sequence[Predictions]]
  # Predictors that are not trained, by name, of all examples that `load` reads.
  references: Mapping[str, Callable[[Sequence[Example]], Predictions]] = (
    dataclasses.field(default_factory=dict)
  )
  best_by: str = ""  # metric that compares runs; main_metric if empty
  # Makes the texts of further files, by name.
  texts: Callable[[Examples, Answers], Mapping[str, str]] | None = None
  files: tuple[pathlib.Path, ...] = ()  # that it reads
  # Facts that distinguish its data, in addition to the files' contents.
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  also: tuple[str, ...] = ()  # further metrics that the table shows
  # Counts of each class, or kind of entity, of predictions and labels.
  by_class: (
    Callable[[Predictions, Sequence[Any]], Mapping[str, ClassCounts]] | None
  ) = None
  trained: bool = True  # whether it has a set to train on
  # Columns of the texts in the user's own records, for predictions from files.
  columns: tuple[str, ...] = ()

  @property
  def choosing_set(self) -> str:
    """Evaluation set that chooses epochs, runs and the learning rate."""
    return self.evaluations[0]

  @property
  def choosing_metric(self) -> str:
    """Metric that compares epochs and runs."""
    return self.best_by or self.main_metric

  def examples(self, name: str) -> Sequence[Example]:
    """Reads a set of at least one example; raises a UserError otherwise."""
    examples = self.load(name)
    if not examples:
      raise UserError(
        f"{self.name}: its files hold too few examples: none is left for {name}"
        " (examples with the same text or context stay together)"
      )
    return examples

  def measure(
    self, predictions: Predictions, examples: Sequence[Example]
  ) -> dict[str, float]:
    """Returns every metric of predictions of examples."""
    labels = [example.label for example in examples]
    return {
      name: metric(predictions, labels) for name, metric in self.metrics.items()
    }


@dataclasses.dataclass(frozen=True, eq=False)
class Preset:
  """Tasks of a kind, which are made by name from data, and their settings."""

  name: str  # of the mean over all its scores
  description: str  # for `--help`
  # Names of evaluation sets, by task; the task `own` is the user's own set.
  scores: Mapping[str, tuple[str, ...]]
  # Makes a task from the data's path, its name, the attention, and a value of
  # each of `settings`. Raises a UserError if a file is missing.
  make: Callable[..., Task]
  heads: tuple[type[TaskHead], ...] = ()  # that its file defines
  settings: tuple[type, ...] = ()  # dataclasses of command-line options
  # Defaults of command-line options, by task, if they differ.
  defaults: Mapping[str, Mapping] = dataclasses.field(default_factory=dict)
  # Whether the default head is a head of the encoder in transformers.
  exportable: bool = False
  in_memory: bool = False  # whether its own set may be `sets.Records`
  folder: str = "finetune"  # of its results in a run's evals/
  reported: bool = True  # whether `antlm report` reads its results

  def __post_init__(self):
    names = {*self.scores, *itertools.chain(*self.scores.values())}
    sets.NAMES.update(names - {sets.OWN})

  def named(self, names: str) -> list[str]:
    """Returns the tasks of a list of tasks or scores, or of `all`, each once.

    Raises a UserError for an unknown name.
    """
    if names == "all":
      return list(self.scores)
    for name in names.split(","):
      if name not in self.owner:
        raise UserError(
          f"task={name!r:.100} is not all or of {', '.join(self.owner)}"
        )
    return list(dict.fromkeys(self.owner[name] for name in names.split(",")))

  @property
  def owner(self) -> dict[str, str]:
    """The task of each name of a task or score."""
    return {
      name: task
      for task, scores in self.scores.items()
      for name in (task, *scores)
    }


@dataclasses.dataclass(frozen=True)
class Ratio:
  """Metric that divides two sums over examples, such as a mean or an F1.

  `parts` maps a prediction and its label to their summands.
  """

  parts: Callable[[Any, Any], tuple[float, float]]

  def __call__(self, predictions: Predictions, labels: Sequence) -> float:
    """Returns the ratio; 0 if the divisor is 0."""
    above, below = self.all_parts(predictions, labels).sum(axis=1)
    return float(above / below) if below else 0.0

  def all_parts(self, predictions: Predictions, labels: Sequence) -> np.ndarray:
    """Returns the parts of n examples, `[2, n]`."""
    pairs = zip(predictions, labels, strict=True)
    parts = zip(*(self.parts(*pair) for pair in pairs), strict=True)
    return np.array([*parts], np.float64)


def mean_of(score: Callable[[Any, Any], float]) -> Ratio:
  """Makes the metric that is the mean of each prediction's score."""
  return Ratio(lambda prediction, label: (score(prediction, label), 1))


def item_scores(
  metric: Metric, predictions: Predictions, labels: Sequence
) -> np.ndarray:
  """Returns each example's part in a metric, float64 `[n]`.

  Their mean is the metric. If the metric is a mean, they are its scores. They
  are the jackknife's pseudo-values otherwise (Efron 1982), so that the interval
  of their mean is the metric's.
  """
  value = metric(predictions, labels)
  count = len(labels)
  if count < 2:
    return np.full(count, value)
  if isinstance(metric, Ratio):
    parts = metric.all_parts(predictions, labels)
    above, below = parts.sum(axis=1, keepdims=True) - parts
    without = np.divide(above, below, out=np.zeros(count), where=below > 0)
    gains = (count - 1) * (without.mean() - without)
  else:
    gains = _jackknife(metric, predictions, labels)
  # Nine digits: a mean's scores are 0 and 1 again.
  return np.round(value + gains, 9)


def _jackknife(
  metric: Metric, predictions: Predictions, labels: Sequence
) -> np.ndarray:
  """Returns pseudo-values minus their mean, from one call for equal examples.

  If too many examples differ, groups of them are left out together. Their
  values have the deviation of single examples, so that intervals stay the same.
  """
  texts = map(json.dumps, zip(predictions, labels, strict=True))
  _, first, inverse = np.unique(
    [*texts], return_index=True, return_inverse=True
  )
  sides = []
  for values in (predictions, labels):
    is_number = all(isinstance(value, int | float) for value in values)
    dtype = float if is_number else object
    sides.append(np.fromiter(values, dtype, len(values)))
  count = groups = len(labels)
  left_out = first
  if len(first) > _GROUPS:
    groups = _GROUPS
    inverse = np.arange(count) % groups
    left_out = [np.arange(i, count, groups) for i in range(groups)]
  without = np.array(
    [metric(*(np.delete(side, i) for side in sides)) for i in left_out]
  )[inverse]
  return (count / groups) ** 0.5 * (groups - 1) * (without.mean() - without)
