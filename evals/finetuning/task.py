"""A fine-tuning task is a value: examples, a head on the encoder, metrics.

A `Head` is the model's side of it: how examples become rows, what stands on
the encoder, the loss, and how outputs become predictions. It is what a saved
model needs, and is saved with it. A `Task` is the data's side: where examples
come from, what their predictions are worth, and how they are written. Nothing
else of fine-tuning knows whether it classifies, tags, or retrieves; a new kind
of task is a file like `classification`, and a row of `saved.HEADS`.
"""

import abc
import collections
import dataclasses
import json
import math
import operator
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.inference.model import Loaded

Params = dict[str, jax.Array]
Predictions = Sequence[Any]  # of m examples, as plain JSON has them
Metric = Callable[[Predictions, Sequence[Any]], float]


class Param(NamedTuple):
  """A parameter of a head, as it is declared."""

  shape: tuple[int, ...]
  axes: tuple[str | None, ...]  # logical, one a dimension: decay goes by them
  # Deviation of the normal that it is drawn from, cut at two; 0 for `fill`.
  std: float = 0.0
  fill: float = 0.0


class Head(abc.ABC):
  """The model's side of a task; a frozen dataclass of plain JSON values.

  Heads that are equal share their compiled programs.

  Attributes:
    kind: Its name in checkpoints, a key of `saved.HEADS`.
  """

  kind: ClassVar[str]

  @abc.abstractmethod
  def parameters(self, width: int) -> dict[str, Param]:
    """Declares its parameters, for hidden states of a width D."""

  @abc.abstractmethod
  def __call__(
    self,
    params: Params,
    hidden: jax.Array,
    lengths: jax.Array,
    dropout_key: jax.Array | None = None,
  ) -> Any:
    """Hidden states `[B, T, D]` of rows of `[B]` tokens to outputs `[B, ...]`.

    Each row by itself: only the loss sees a whole batch, so that it may compare
    rows with each other. Texts that are encoded apart are rows here; the loss
    and `decode` get `[B, S, ...]`.
    """

  @abc.abstractmethod
  def loss(
    self, outputs: Any, labels: jax.Array, weights: jax.Array
  ) -> jax.Array:
    """Returns the loss of a batch, float32 `[]`; rows of weight 0 are padding.

    Labels are those of the rows that `encode` made.
    """

  @abc.abstractmethod
  def encode(
    self, loaded: Loaded, examples: Sequence[Example], max_length: int
  ) -> Rows:
    """Makes rows of at most so many tokens, to learn from or to predict."""

  def reduce(self, outputs: Any) -> Any:
    """Returns what `decode` needs of outputs, on the device: by default all."""
    return outputs

  @abc.abstractmethod
  def decode(self, reduced: Any, rows: Rows) -> Predictions:
    """Makes predictions of all rows' arrays `[n, ...]`, on the host.

    Returns:
      One for each of `rows.examples`, as plain JSON has them.
    """

  @property
  def settings(self) -> dict[str, Any]:
    """Its fields, as plain JSON; the class makes the same head of them."""
    return dataclasses.asdict(self)

  def init(self, key: jax.Array, width: int) -> Params:
    """Draws its parameters, for hidden states of a width D."""
    declared = self.parameters(width)
    # One key for each that is drawn: those of zeros change no other's draw.
    drawn = [name for name, param in declared.items() if param.std]
    keys = dict(zip(drawn, jax.random.split(key, len(drawn)), strict=True))

    def value(name: str, param: Param) -> jax.Array:
      if name not in keys:
        return jnp.full(param.shape, param.fill)
      cut = jax.random.truncated_normal(keys[name], -2.0, 2.0, param.shape)
      return param.std * cut

    return {name: value(name, param) for name, param in declared.items()}


class PerToken(Head):
  """A linear layer on every token; the rest of a head is for its subclasses.

  Attributes:
    num_outputs: How many numbers it makes of a token, C.
  """

  @property
  @abc.abstractmethod
  def num_outputs(self) -> int:
    """See the class."""

  def parameters(self, width: int) -> dict[str, Param]:
    """A kernel from N(0, .02^2), cut at two deviations."""
    return {
      "classes/kernel": Param((width, self.num_outputs), ("embed", None), 0.02),
      "classes/bias": Param((self.num_outputs,), ("norm",)),
    }

  def __call__(self, params: Params, hidden, lengths, dropout_key=None):
    """Returns logits, float32 `[B, T, C]`."""
    hidden = hidden.astype(jnp.float32)
    return hidden @ params["classes/kernel"] + params["classes/bias"]


def held_out(
  examples: Sequence[Example], kept: float = 0.95, seed: int = 42
) -> tuple[list[Example], list[Example]]:
  """Divides a training set in two, as Hugging Face's datasets library does.

  The second part is left out of the training set, to choose on.
  """
  order = np.random.default_rng(seed).permutation(len(examples))
  count = len(examples) - math.floor(kept * len(examples))
  train, left_out = order[count:], order[:count]
  return [examples[i] for i in train], [examples[i] for i in left_out]


def split_of(
  split: str,
  train: Callable[[], Sequence[Example]],
  test: Callable[[], Sequence[Example]],
) -> Sequence[Example]:
  """Reads `train`, or an evaluation set by its name.

  One whose name ends in -test has a file of its own; another is what is held
  out of the training set. The file that is not needed is not read.
  """
  if split.endswith("-test"):
    return test()
  learnt, left_out = held_out(train())
  return learnt if split == "train" else left_out


def share_of_one(predictions: Predictions) -> float:
  """Returns the share of the most frequent prediction."""
  counts = collections.Counter(map(json.dumps, predictions))
  return max(counts.values()) / len(predictions)


class Predicted(NamedTuple):
  """What a run predicts of an evaluation set."""

  examples: Sequence[Example]
  predictions: Predictions
  scores: Mapping[str, float]  # by metric


@dataclasses.dataclass(frozen=True)
class Task:
  """The data's side of a task.

  Attributes:
    name: Its name on the command line.
    load: Reads the examples of `train`, or of an evaluation set by its name.
    evaluations: Names of the evaluation sets. The first one chooses the epoch.
    head: The model's side.
    metrics: By name, functions of predictions and labels, the higher the
      better.
    main_metric: The one that is reported.
    by_example: Whether that one is the mean of what it is of each example.
    best_by: The one that epochs and runs are compared by; "" for the main one.
    baseline: What the best of the trivial answers is called.
    trivial: Examples to answers that need no model, each a list of predictions.
    references: What stands beside the runs without being trained: by name,
      functions of an evaluation set's examples, as `load` reads them, to
      predictions.
    right: Whether a prediction is right, given it and the label.
    texts: Predictions in the form in which others take them: what is predicted
      by evaluation set to texts by file name.
    files: What it is read from.
    about: What tells its data from other data, beside files' contents.
    also: Further metrics that the table shows.
  """

  name: str
  load: Callable[[str], Sequence[Example]]
  evaluations: tuple[str, ...]
  head: Head
  metrics: Mapping[str, Metric]
  main_metric: str
  baseline: str
  trivial: Callable[[Sequence[Example]], Sequence[Predictions]]
  references: Mapping[str, Callable[[Sequence[Example]], Predictions]] = (
    dataclasses.field(default_factory=dict)
  )
  right: Callable[[Any, Any], bool] = operator.eq
  by_example: bool = False
  best_by: str = ""
  texts: Callable[[Mapping[str, Predicted]], Mapping[str, str]] | None = None
  files: tuple[pathlib.Path, ...] = ()
  about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  also: tuple[str, ...] = ()

  @property
  def chooser(self) -> str:
    """The metric that epochs and runs are compared by."""
    return self.best_by or self.main_metric

  def measure(
    self, predictions: Predictions, examples: Sequence[Example]
  ) -> dict[str, float]:
    """Returns every metric of predictions of examples."""
    labels = [example.label for example in examples]
    return {n: of(predictions, labels) for n, of in self.metrics.items()}

  def score(self, scores: Mapping[str, Mapping[str, float]]) -> float:
    """Returns what they are compared by, of metrics by evaluation set."""
    return scores[self.evaluations[0]][self.chooser]


@dataclasses.dataclass(frozen=True, eq=False)
class Suite:
  """Tasks that are asked for by name, and found in a folder of data.

  Attributes:
    name: What the mean over all its scores is called.
    scores: Names of the evaluation sets, by task.
    make: (folder, task's name, settings of heads, attention) to the Task.
    folder: Of its results, in a run's evals/.
    defaults: By task, settings whose defaults are others than usual.
  """

  name: str
  scores: Mapping[str, tuple[str, ...]]
  make: Callable[[str, str, Any, str], Task]
  folder: str = "finetune"
  defaults: Mapping[str, dict] = dataclasses.field(default_factory=dict)

  @property
  def all_scores(self) -> tuple[str, ...]:
    """The names of all evaluation sets, in order."""
    return tuple(name for those in self.scores.values() for name in those)

  def named(self, wanted: str) -> list[str]:
    """Reads a list of tasks or scores, such as `cola,mnli-mm`, or `all`.

    Returns:
      The tasks' names, each once.

    Raises:
      UserError: for a name that is none.
    """
    if wanted == "all":
      return list(self.scores)
    owner = {
      name: task for task in self.scores for name in (task, *self.scores[task])
    }
    for name in wanted.split(","):
      if name not in owner:
        known = ", ".join(owner)
        raise UserError(f"--task={name!r} is not all or of {known}")
    return list(dict.fromkeys(owner[name] for name in wanted.split(",")))
