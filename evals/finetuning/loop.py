"""Fine-tunes many runs of one task at once, and chooses each one's best epoch.

`read_rows` makes rows of a task's examples. `fit` trains a `trial.Trial` on
them, evaluates it after each epoch, and keeps the scores in a `TuningOutcome`
for each run.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

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
  epochs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  # For each epoch the score that compares it; -inf if the run diverged.
  scores: list[float] = dataclasses.field(default_factory=list)
  # Predictions of every example in the best epoch, by evaluation set.
  predictions: Mapping[str, Predictions] = dataclasses.field(
    default_factory=dict
  )

  def add_epoch(
    self,
    task: Task,
    loss: float,
    metrics: Mapping[str, Mapping[str, float]],
    predictions: Mapping[str, Predictions],
  ) -> None:
    """Adds an epoch: its loss, and metrics and predictions by evaluation set.

    A loss that is not finite means that the run has diverged.
    """
    score = metrics[task.choosing_set][task.choosing_metric]
    counts = math.isfinite(loss) and not math.isnan(score)
    self.epochs.append({"train_loss": loss, **metrics})
    self.scores.append(score if counts else -math.inf)
    if self.best_epoch == len(self.epochs):
      self.predictions = predictions

  @property
  def best_epoch(self) -> int:
    """Epoch of the best score, from 1; the first of equals."""
    return 1 + self.scores.index(self.best_score)

  @property
  def best_score(self) -> float:
    """Score of the best epoch; -inf if the run diverged in its first."""
    return max(self.scores)

  @property
  def best(self) -> dict[str, Any]:
    """Loss and metrics of the best epoch."""
    return self.epochs[self.best_epoch - 1]

  @property
  def diverged(self) -> int | None:
    """Epoch in which it diverged, from 1; None if it did not."""
    finite = [math.isfinite(epoch["train_loss"]) for epoch in self.epochs]
    return None if all(finite) else 1 + finite.index(False)

  def stopped(self, settings: Hyperparameters) -> bool:
    """Whether it diverged, or waited for a better score too long."""
    if self.diverged:
      return True  # its parameters stay NaN
    best = -math.inf
    waited = 0
    for score in self.scores:
      # As in transformers: a gain below the threshold is the best score from
      # then on, but does not count as better.
      waited = 0 if score - best > settings.threshold else waited + 1
      best = max(best, score)
    return 0 < settings.patience <= waited


class BestParams:
  """Parameters of each rate's best run at its best epoch, on the host.

  Needs host memory for a copy of the trained parameters for each rate, and
  device memory for one extra copy of the largest array. If scores are equal,
  the earlier run is the best.
  """

  def __init__(self, runs: Sequence[TrialRun]):
    self._runs = list(runs)
    self._ranks: dict[float, tuple[float, int]] = {}
    self._params: dict[float, dict[str, np.ndarray]] = {}

  def of_rate(self, lr: float) -> dict[str, np.ndarray]:
    """Returns the parameters of a rate's best run; empty if all diverged."""
    return self._params.get(lr, {})

  def update(
    self, outcomes: Sequence[TuningOutcome], copy: Callable[[int], dict]
  ) -> None:
    """Copies the parameters of runs that are their rate's best since an epoch.

    Args:
      outcomes: Outcomes of the runs that train together.
      copy: Function that copies the parameters of the run of an index.
    """
    last = max(len(outcome.epochs) for outcome in outcomes)
    ranks = dict(self._ranks)
    leaders = {}
    for index, outcome in enumerate(outcomes):
      lr = outcome.run.lr
      rank = outcome.best_score, -self._runs.index(outcome.run)
      if outcome.best_epoch == last and rank > ranks.get(lr, (-math.inf, 0)):
        ranks[lr] = rank
        leaders[lr] = index
    for lr, index in leaders.items():
      self._params.pop(lr, None)  # first, so that memory never holds two
      self._params[lr] = copy(index)
      # Last: if a copy finds no memory, the runs start again.
      self._ranks[lr] = ranks[lr]


def read_rows(
  loaded: Loaded, task: Task, max_length: int, limit: int = 0
) -> dict[str, ExampleRows]:
  """Reads a task's examples and makes rows of at most `max_length` tokens.

  If `limit` is not 0, a random part of so many training examples is used.
  Prints a line about each set of which texts are cut.

  Returns:
    The rows of `train`, and of each evaluation set by its name.

  Raises:
    UserError: A set has no examples, or cannot be read.
  """
  rows = {}
  for name in ("train", *task.evaluations):
    examples = task.examples(name)
    if name == "train" and 0 < limit < len(examples):
      indices = hashing.permute(np.arange(limit), len(examples), 0)
      examples = [examples[i] for i in np.sort(indices)]
    rows[name] = task.head.encode(loaded, examples, max_length)
    batching.warn_of_cut(loaded, rows[name], max_length, f"{task.name}, {name}")
  return rows


def fit(
  loaded: Loaded,
  task: Task,
  rows: Mapping[str, ExampleRows],
  settings: Hyperparameters,
  runs: Sequence[TrialRun],
  best: BestParams | None = None,
) -> list[TuningOutcome]:
  """Trains runs together, evaluates each epoch, and stops each run by itself.

  If `settings.steps` is set, it evaluates only once, after the last step. It
  prints a line about each evaluation.

  Args:
    loaded: Model from which each run starts.
    task: Task to train.
    rows: Rows of `train` and of each evaluation set, from `read_rows`.
    settings: Hyperparameters of all runs.
    runs: Learning rate and seed of each run.
    best: Keeper of the best parameters.

  Returns:
    The outcome of each run, in their order.
  """
  steps = count_steps(task, rows["train"], settings)
  trial = Trial(loaded, task.head, settings, runs, steps)
  outcomes = [TuningOutcome(run) for run in runs]
  for batches in _training_parts(rows["train"], settings, runs):
    make_batches = progress.track(batches, unit="step", name=task.name)
    losses = trial.train(make_batch() for make_batch in make_batches)
    outputs = {}
    for name in task.evaluations:
      outputs[name], is_nan = trial.predict(rows[name])
      losses = np.where(is_nan, np.nan, losses)
    for index, outcome in enumerate(outcomes):
      # A stopped run trains on next to the others, but no longer counts.
      if not outcome.stopped(settings):
        arrays = jax.tree.map(operator.itemgetter(index), outputs)
        evaluate(task, rows, outcome, float(losses[index]), arrays)
    stopped = sum(outcome.stopped(settings) for outcome in outcomes)
    progress.say(_epoch_line(task, outcomes, stopped))
    if best:
      best.update(outcomes, trial.params)
    if stopped == len(runs):
      break
  return outcomes


def evaluate(
  task: Task,
  rows: Mapping[str, ExampleRows],
  outcome: TuningOutcome,
  loss: float,
  outputs: Mapping[str, Any],
) -> None:
  """Scores a run after an epoch, and adds the epoch to its outcome.

  Args:
    task: Task of the run.
    rows: Rows of each evaluation set.
    outcome: Outcome of the run, which gets the epoch.
    loss: Training loss of the epoch in nats; not finite if the run diverged.
    outputs: Arrays `[n, ...]` that the head decodes, by evaluation set.
  """
  if not math.isfinite(loss):
    # Metrics and JSON allow no NaN. `add_epoch` ignores these metrics.
    outputs = jax.tree.map(
      lambda x: np.nan_to_num(x, posinf=0, neginf=0), outputs
    )
  predictions = {}
  metrics = {}
  for name, reduced in outputs.items():
    predictions[name] = task.head.decode(reduced, rows[name])
    scores = task.measure(predictions[name], rows[name].examples)
    metrics[name] = scores | task.head.further_scores(reduced, rows[name])
  outcome.add_epoch(task, loss, metrics, predictions)


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


def _epoch_line(
  task: Task, outcomes: Sequence[TuningOutcome], stopped: int
) -> str:
  """Returns a line about the last epoch of runs, of which some have stopped."""
  count = max(len(outcome.epochs) for outcome in outcomes)
  last = [outcome for outcome in outcomes if len(outcome.epochs) == count]
  losses = [outcome.epochs[-1]["train_loss"] for outcome in last]
  scores = [100 * outcome.scores[-1] for outcome in last]
  best = 100 * max(outcome.best_score for outcome in outcomes)
  diverged = sum(outcome.diverged is not None for outcome in outcomes)
  run_name = ""
  note = f"; {stopped} of {len(outcomes)} runs stopped"
  if len(outcomes) == 1:
    run_name = f", {outcomes[0].run}"
    note = ""
  if diverged:
    note += f", {diverged} of which diverged" if note else "; diverged"
  return (
    f"{task.name} epoch {count}{run_name}:"
    f" train loss {_span(losses, 3)},"
    f" {task.choosing_metric} {_span(scores, 1)}, best {_span([best], 1)}{note}"
  )


def _span(values: Iterable[float], digits: int) -> str:
  """Returns the range of the finite values as text."""
  finite = list(filter(math.isfinite, values))
  if not finite:
    return "none"
  low, high = (f"{v:.{digits}f}" for v in (min(finite), max(finite)))
  return low if low == high else f"{low} to {high}"
