"""Fine-tunes many runs of one task at once, and chooses each one's best epoch.

`read_task_data` makes rows of a task's examples. `fit` trains a `trial.Trial`
on them, evaluates it after each epoch, and keeps the scores in a
`TuningOutcome` for each run.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from antlm_jax import hashing
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching
from antlm_jax.evals.finetuning.batching import ExampleRows
from antlm_jax.evals.finetuning.task import Predictions, Task
from antlm_jax.evals.finetuning.trial import Hyperparameters, Trial, TrialRun
from antlm_jax.inference.model import Loaded
from antlm_jax.runtime import progress


@dataclasses.dataclass
class TuningOutcome:
  """A run's losses, scores and predictions, epoch after epoch."""

  run: TrialRun
  # For each epoch the `train_loss` in nats, and the metrics by evaluation set.
  # If the run diverged in an epoch, its loss is not finite and its metrics are
  # meaningless.
  epochs: Sequence[dict[str, Any]] = ()
  # Epoch of the best score, from 1; the first of equals, or if none counts.
  best_epoch: int = 0
  # Its predictions of every example, by evaluation set.
  predictions: Mapping[str, Predictions] | None = None

  @property
  def best(self) -> dict[str, Any]:
    """Loss and metrics of the best epoch."""
    return self.epochs[self.best_epoch - 1]

  def on(self, names: Sequence[str]) -> "TuningOutcome":
    """Returns the outcome on some of the evaluation sets."""
    keys = "train_loss", *names
    return dataclasses.replace(
      self,
      epochs=[{key: epoch[key] for key in keys} for epoch in self.epochs],
      predictions={name: self.predictions[name] for name in names},
    )

  @property
  def diverged(self) -> int | None:
    """Epoch in which it diverged, from 1; None if it did not."""
    finite = [math.isfinite(epoch["train_loss"]) for epoch in self.epochs]
    return None if all(finite) else 1 + finite.index(False)


def epoch_score(task: Task, epoch: Mapping[str, Any]) -> float:
  """Returns an epoch's score for comparisons; -inf if the run diverged."""
  score = epoch[task.choosing_set][task.choosing_metric]
  counts = math.isfinite(epoch["train_loss"]) and not math.isnan(score)
  return score if counts else -math.inf


class TaskData(NamedTuple):
  """A task's rows: those to train on, and those of each evaluation set."""

  train: ExampleRows
  evaluations: dict[str, ExampleRows]


def read_task_data(
  loaded: Loaded, task: Task, max_length: int, limit: int = 0
) -> TaskData:
  """Reads a task's examples and makes rows of at most `max_length` tokens.

  If `limit` is not 0, a random part of so many training examples is used.
  Prints a line about each set of which texts are cut.

  Raises:
    UserError: A set has no examples, or cannot be read.
  """
  longest = batching.longest(loaded, max_length)
  limited_by = (
    "max_length" if longest == max_length else "the model's longest row"
  )

  rows = {}
  for name in ("train", *task.evaluations):
    examples = task.examples(name)
    if name == "train" and 0 < limit < len(examples):
      indices = hashing.permute(np.arange(limit), len(examples), 0)
      examples = [examples[i] for i in np.sort(indices)]
    rows[name] = task.head.encode(loaded, examples, max_length)
    if cut := rows[name].cut:
      progress.say(
        f"warning: {task.name}: texts of {name} that are cut to fit {longest}"
        f" tokens ({limited_by}): {cut}"
      )
  return TaskData(rows.pop("train"), rows)


def fit(
  loaded: Loaded,
  task: Task,
  data: TaskData,
  settings: Hyperparameters,
  runs: Sequence[TrialRun],
  keep: Callable[[TrialRun, float, Callable[[], dict]], None] | None = None,
) -> list[TuningOutcome]:
  """Trains runs together, evaluates each epoch, and stops each run by itself.

  `data` is from `read_task_data`. Prints a line about each epoch. If an epoch
  is the best of a learning rate's leading run (the first of equals), calls
  `keep`. Its arguments are this run, the score and a function that copies the
  run's parameters to the host.

  Returns:
    The outcome of each run, in their order.
  """
  steps = count_steps(task, data.train, settings)
  trial = Trial(loaded, task.head, settings, runs, steps)
  standings = Standings(task, data.evaluations, runs, settings)
  for batches in _training_parts(data.train, settings, runs):
    make_batches = progress.track(batches, unit="step", name=task.name)
    losses = trial.train(make_batch() for make_batch in make_batches)
    outputs = {}
    for name, rows in data.evaluations.items():
      outputs[name], is_nan = trial.predict(rows)
      losses = np.where(is_nan, np.nan, losses)
    standings.add(losses, outputs)
    progress.say(standings.line())
    for leader, score in standings.leaders_by_last_epoch if keep else ():
      keep(runs[leader], score, functools.partial(trial.params, leader))
    if standings.stopped == len(runs):
      break
  return standings.outcomes


def count_steps(
  task: Task, rows: ExampleRows, settings: Hyperparameters
) -> int:
  """Returns the steps of a run: those of all epochs, or fewer if set so.

  Raises a UserError if the training rows do not fill a batch.
  """
  size = settings.batch_size
  examples = len(rows)
  if settings.drop_last and examples < size:
    raise UserError(
      f"{task.name} has {examples} training examples, too few for a batch of"
      f" {size}: give a smaller batch_size, or drop_last=False"
    )
  incomplete = not settings.drop_last and examples % size > 0
  steps = (examples // size + incomplete) * settings.epochs
  return min(settings.steps or steps, steps)


def fit_in_groups(
  fit: Callable[[Sequence[TrialRun]], list[TuningOutcome]],
  runs: Sequence[TrialRun],
  size: int,
) -> list[TuningOutcome]:
  """Trains runs with `fit`, at most `size` at a time; fewer if memory is short.

  A group for which the device has too little memory is halved and restarted.
  """
  out = []
  while len(out) < len(runs):
    group = runs[len(out) : len(out) + size]
    try:
      out += fit(group)
    except jax.errors.JaxRuntimeError as error:
      if len(group) == 1 or "RESOURCE_EXHAUSTED" not in str(error):
        raise
      size = -(-len(group) // 2)
      progress.say(
        f"too little memory for {len(group)} runs at once: trying {size}"
      )
  return out


def _training_parts(
  rows: ExampleRows, settings: Hyperparameters, runs: Sequence[TrialRun]
) -> Iterator[list[Callable]]:
  """Yields the batches between evaluations: an epoch's, or those of all steps.

  A batch `[runs, B, ...]` is made when it is called.
  """

  def epoch_batches(epoch: int) -> list[Callable]:
    slots = {
      seed: batching.batches_by_length(
        rows, settings.batch_size, seed, epoch, settings.drop_last
      )
      for seed in {run.seed for run in runs}
    }
    steps = zip(*(slots[run.seed] for run in runs), strict=True)
    return [functools.partial(batching.gather, rows, step) for step in steps]

  epochs = map(epoch_batches, range(settings.epochs))
  if settings.steps:
    batches = itertools.chain.from_iterable(epochs)
    yield list(itertools.islice(batches, settings.steps))
  else:
    yield from epochs


class Standings:
  """Scores of the runs of a trial, and which of them have stopped.

  Attributes:
    outcomes: Outcome of each run.
  """

  def __init__(
    self,
    task: Task,
    rows: Mapping[str, ExampleRows],
    runs: Sequence[TrialRun],
    settings: Hyperparameters,
  ):
    """`rows` are those that are predicted, by evaluation set."""
    self._task = task
    self._rows = rows
    self._settings = settings
    self._score = functools.partial(epoch_score, task)
    self.outcomes = [TuningOutcome(run) for run in runs]

  def add(self, losses, outputs: Mapping[str, Any]) -> None:
    """Adds an epoch: losses `[runs]`, and arrays to decode `[runs, n, ...]`.

    A loss that is not finite means that the run has diverged.
    """
    for run, outcome in enumerate(self.outcomes):
      # A stopped run trains on next to the others, but no longer counts.
      if self._stopped(outcome):
        continue
      arrays = jax.tree.map(operator.itemgetter(run), outputs)
      if not math.isfinite(losses[run]):  # metrics and JSON take no NaN
        arrays = jax.tree.map(
          lambda x: np.nan_to_num(x, posinf=0, neginf=0), arrays
        )
      predictions = {}
      epoch = {"train_loss": float(losses[run])}
      for name, reduced in arrays.items():
        rows = self._rows[name]
        head = self._task.head
        predictions[name] = head.decode(reduced, rows)
        scores = self._task.measure(predictions[name], rows.examples)
        epoch[name] = scores | head.further_scores(reduced, rows)
      is_first = not outcome.epochs
      outcome.epochs = (*outcome.epochs, epoch)
      if is_first or self._score(epoch) > self._score(outcome.best):
        outcome.best_epoch = len(outcome.epochs)
        outcome.predictions = predictions

  @property
  def stopped(self) -> int:
    """Number of runs that have stopped."""
    return sum(map(self._stopped, self.outcomes))

  @property
  def leaders_by_last_epoch(self) -> list[tuple[int, float]]:
    """Indices and best scores of runs that lead since the last epoch.

    A run leads if its best score is the highest of its learning rate, the first
    of equals.
    """
    leaders = {}
    for index, outcome in enumerate(self.outcomes):
      score = self._score(outcome.best)
      if score > leaders.get(outcome.run.lr, (None, -math.inf))[1]:
        leaders[outcome.run.lr] = index, score
    epochs = max(len(outcome.epochs) for outcome in self.outcomes)
    return [
      (index, score)
      for index, score in leaders.values()
      if self.outcomes[index].best_epoch == epochs
    ]

  def line(self) -> str:
    """Returns a line about the last epoch."""
    count = max(len(outcome.epochs) for outcome in self.outcomes)
    last = [o.epochs[-1] for o in self.outcomes if len(o.epochs) == count]
    losses = [epoch["train_loss"] for epoch in last]
    scores = [100 * self._score(epoch) for epoch in last]
    diverged = sum(o.diverged is not None for o in self.outcomes)
    best = max(self._score(outcome.best) for outcome in self.outcomes)
    run_name = ""
    stopped = f"; {self.stopped} of {len(self.outcomes)} runs stopped"
    if len(self.outcomes) == 1:
      run_name = f", {self.outcomes[0].run}"
      stopped = ""
    if diverged:
      stopped += f", {diverged} of which diverged" if stopped else "; diverged"
    return (
      f"{self._task.name} epoch {count}{run_name}:"
      f" train loss {_span(losses, 3)},"
      f" {self._task.choosing_metric} {_span(scores, 1)},"
      f" best {_span([100 * best], 1)}{stopped}"
    )

  def _stopped(self, outcome: TuningOutcome) -> bool:
    if outcome.diverged:
      return True  # its parameters stay NaN
    best = -math.inf
    waited = 0
    for score in map(self._score, outcome.epochs):
      # As in transformers: a gain below the threshold is the best score from
      # then on, but does not count as better.
      waited = 0 if score - best > self._settings.threshold else waited + 1
      best = max(best, score)
    return 0 < self._settings.patience <= waited


def _span(values: Iterable[float], digits: int) -> str:
  """Returns the range of the finite values as text."""
  finite = list(filter(math.isfinite, values))
  if not finite:
    return "none"
  low, high = (f"{v:.{digits}f}" for v in (min(finite), max(finite)))
  return low if low == high else f"{low} to {high}"
