"""Fine-tunes many runs of one task at once.

A run is a learning rate and a seed. Runs that train together are one state with
a leading axis `[runs]` and one compiled program: `vmap` over the step of one
run. What a run does depends on its rate and its seed alone, not on which others
are beside it, even if one diverges.
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
from antlm_jax.evals.finetuning import batching, trial
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.evals.finetuning.task import Predictions, Task
from antlm_jax.evals.finetuning.trial import Settings
from antlm_jax.inference.model import Loaded


class Run(NamedTuple):
  """One of the runs that train together."""

  lr: float  # the peak learning rate
  seed: int  # draws the head, the order of the examples and the dropout

  def __str__(self) -> str:
    return f"seed {self.seed} at rate {self.lr:g}"


@dataclasses.dataclass
class Outcome:
  """What becomes of a run, epoch after epoch."""

  run: Run
  # By epoch: `train_loss` in nats and the metrics by evaluation set. The loss
  # of one in which it diverged is not finite, and what is measured of it says
  # nothing.
  epochs: Sequence[dict[str, Any]] = ()
  # From 1, of the best score; the first if tied, and if none has a score.
  best_epoch: int = 0
  # Those of that epoch, of every example, by evaluation set.
  predictions: Mapping[str, Predictions] | None = None

  @property
  def best(self) -> dict[str, Any]:
    """What was measured at the best epoch."""
    return self.epochs[self.best_epoch - 1]

  @property
  def diverged(self) -> int | None:
    """The epoch in which it diverged, from 1; None if it did not."""
    finite = [math.isfinite(epoch["train_loss"]) for epoch in self.epochs]
    return None if all(finite) else 1 + finite.index(False)


def standing(task: Task, epoch: Mapping[str, Any]) -> float:
  """Returns what an epoch is compared by: below all others if it diverged."""
  score = task.score(epoch)
  counts = math.isfinite(epoch["train_loss"]) and not math.isnan(score)
  return score if counts else -math.inf


# ------------------------------------------------------------------ training


class Data(NamedTuple):
  """The rows of a task: for training, and of each evaluation set."""

  train: Rows
  evaluations: dict[str, Rows]


def read(
  loaded: Loaded,
  task: Task,
  max_length: int,
  limit: int = 0,
  tell: Callable[[str], None] = lambda line: None,
) -> Data:
  """Reads a task's examples and makes rows of at most `max_length` tokens.

  With a limit there are so many training examples, at most, a random part.
  `tell` is given a line about each set of which something is cut.

  Raises:
    UserError: if a set is bad, or has no examples.
  """
  train = task.load("train")
  if 0 < limit < len(train):
    chosen = hashing.permute(np.arange(limit), len(train), 0)
    train = [train[i] for i in np.sort(chosen)]
  longest = batching.longest(loaded, max_length)
  by = "--max_length" if longest == max_length else "the model's longest row"

  def encode(name: str, examples: Sequence[Example]) -> Rows:
    if not examples:
      raise UserError(
        f"{task.name}: its files hold too few examples: none is left for {name}"
      )
    rows = task.head.encode(loaded, examples, max_length)
    if rows.cut:
      tell(
        f"{task.name}: texts of {name} that are cut to fit {longest} tokens"
        f" ({by}): {rows.cut}"
      )
    return rows

  return Data(
    encode("train", train),
    {name: encode(name, task.load(name)) for name in task.evaluations},
  )


def fit(
  loaded: Loaded,
  task: Task,
  data: Data,
  settings: Settings,
  runs: Sequence[Run],
  track: Callable[[Sequence], Iterable] = iter,
  tell: Callable[[str], None] = lambda line: None,
  keep: Callable[[Run, float, Callable[[], dict]], None] | None = None,
) -> list[Outcome]:
  """Trains runs together, evaluates each epoch, and stops each run by itself.

  Args:
    track: Wraps the list of an epoch's batches, as tqdm does.
    tell: Is given a line about each epoch.
    keep: Is given the best run, the first of equals, after an epoch that made
      it so, with its score and what copies its parameters to the host.

  Returns:
    What became of each run, in their order.
  """
  made = trial.programs(loaded.model.config, task.head, settings)
  params = loaded.params
  encoder = {n: p for n, p in params.items() if n in made.trained}
  frozen = {n: p for n, p in params.items() if n not in made.trained}
  rates = np.array([run.lr for run in runs], np.float32)
  seeds = np.array([run.seed for run in runs], np.uint32)
  state = made.init(encoder, seeds)
  watch = _Watch(task, data.evaluations, runs, settings)
  size, examples = settings.batch_size, len(data.train)
  if settings.drop_last and examples < size:
    raise UserError(
      f"{task.name}: its {examples} training examples do not fill a batch of"
      f" {size}, and --drop_last leaves them out: give --batch_size"
    )
  of_epoch = examples // size if settings.drop_last else -(-examples // size)
  # The rate falls over all epochs' steps.
  share = trial.shares(settings, settings.steps or of_epoch * settings.epochs)
  step = 0
  for epoch, batches in enumerate(_parts(data.train, settings, runs)):
    losses = []
    for batch in track(batches):
      rate = rates * share[step]
      state, loss = made.step(state, frozen, batch(), rate, seeds, step)
      losses.append(loss)
      step += 1
    call = functools.partial(made.predict, state.params, frozen)
    found = {
      name: batching.predict(call, rows, settings.batch_size)
      for name, rows in data.evaluations.items()
    }
    nan = np.any([lost.any(axis=1) for _, lost in found.values()], axis=0)
    losses = np.where(nan, np.nan, np.mean(jax.device_get(losses), axis=0))
    watch.add(losses, {name: arrays for name, (arrays, _) in found.items()})
    tell(watch.line())
    index, score = watch.leader
    # The leader's parameters are those of now only if it leads by this epoch.
    better = watch.outcomes[index].best_epoch == epoch + 1
    if keep and better and score > -math.inf:
      keep(runs[index], score, functools.partial(_one, state.params, index))
    if watch.stopped == len(runs):
      break
  return watch.outcomes


def fit_in_groups(
  fit: Callable[[Sequence[Run]], list[Outcome]],
  runs: Sequence[Run],
  size: int,
  tell: Callable[[str], None],
) -> list[Outcome]:
  """Trains runs by `fit`, at most `size` at a time; fewer if memory is short.

  A group that the device has no memory for is halved, and begins anew.
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
      tell(f"no memory for {len(group)} runs at once: {size} are tried")
  return out


def _parts(
  rows: Rows, settings: Settings, runs: Sequence[Run]
) -> Iterator[list[Callable]]:
  """Yields the batches between evaluations: an epoch's, or all steps'."""
  epochs = (_epoch(rows, settings, runs, i) for i in itertools.count())
  if settings.steps:
    every = itertools.chain.from_iterable(epochs)
    yield list(itertools.islice(every, settings.steps))
  else:
    yield from itertools.islice(epochs, settings.epochs)


def _epoch(
  rows: Rows, settings: Settings, runs: Sequence[Run], epoch: int
) -> list[Callable]:
  """Returns an epoch's batches `[runs, ...]`, each made when it is called."""
  size, drop_last = settings.batch_size, settings.drop_last
  by_seed = {
    seed: batching.batches(rows, size, seed, epoch, drop_last)
    for seed in dict.fromkeys(run.seed for run in runs)
  }
  steps = zip(*(by_seed[run.seed] for run in runs), strict=True)
  return [functools.partial(batching.gather, rows, slots) for slots in steps]


def _one(params, run: int) -> dict[str, np.ndarray]:
  """Copies a run's parameters to the host, one array after another.

  They are float32, which loses nothing: a checkpoint has no other.
  """
  pick = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
  return {
    name: np.asarray(pick(p, run), np.float32) for name, p in params.items()
  }


class _Watch:
  """Follows the runs of a group: their scores, and which of them go on."""

  def __init__(
    self,
    task: Task,
    rows: Mapping[str, Rows],
    runs: Sequence[Run],
    settings: Settings,
  ):
    self._task, self._settings = task, settings
    self._standing = functools.partial(standing, task)
    self._rows = rows  # those that are predicted, by evaluation set
    self.outcomes = [Outcome(run) for run in runs]

  def add(self, losses, found: Mapping[str, Any]) -> None:
    """Takes an epoch: losses `[runs]`, and what to decode `[runs, n, ...]`.

    A loss that is not finite says that the run has diverged.
    """
    for run, outcome in enumerate(self.outcomes):
      # One that has stopped trains on beside the others, and is not looked at.
      if self._stopped(outcome):
        continue
      own = jax.tree.map(operator.itemgetter(run), found)
      if not math.isfinite(losses[run]):  # no metric is to meet a NaN
        own = jax.tree.map(lambda x: np.nan_to_num(x, posinf=0, neginf=0), own)
      mine = {
        name: self._task.head.decode(arrays, self._rows[name])
        for name, arrays in own.items()
      }
      scores = {
        name: self._task.measure(found, self._rows[name].examples)
        for name, found in mine.items()
      }
      epoch = {"train_loss": float(losses[run])} | scores
      before = outcome.epochs
      outcome.epochs = (*before, epoch)
      if not before or self._standing(epoch) > self._standing(outcome.best):
        outcome.best_epoch, outcome.predictions = len(outcome.epochs), mine

  @property
  def stopped(self) -> int:
    """How many runs have stopped."""
    return sum(map(self._stopped, self.outcomes))

  @property
  def leader(self) -> tuple[int, float]:
    """The index of the best run, the first of equals, and its best score."""
    scores = [self._standing(outcome.best) for outcome in self.outcomes]
    index = int(np.argmax(scores))
    return index, scores[index]

  def line(self) -> str:
    """Says how the runs stand."""
    count = max(len(outcome.epochs) for outcome in self.outcomes)
    last = [o.epochs[-1] for o in self.outcomes if len(o.epochs) == count]
    losses = [epoch["train_loss"] for epoch in last]
    scores = [100 * self._standing(epoch) for epoch in last]
    diverged = sum(o.diverged is not None for o in self.outcomes)
    which = ""
    stopped = f"; {self.stopped} of {len(self.outcomes)} runs stopped"
    if len(self.outcomes) == 1:
      which, stopped = f", {self.outcomes[0].run}", ""
    if diverged:
      stopped += f", {diverged} of which diverged" if stopped else "; diverged"
    return (
      f"{self._task.name} epoch {count}{which}: train loss {_span(losses, 3)},"
      f" {self._task.chooser} {_span(scores, 1)},"
      f" best {_span([100 * self.leader[1]], 1)}{stopped}"
    )

  def _stopped(self, outcome: Outcome) -> bool:
    if outcome.diverged:
      return True  # a NaN stays one
    scores = list(map(self._standing, outcome.epochs))
    waited = without_gain(scores, self._settings.threshold)
    return 0 < self._settings.patience <= waited


def without_gain(scores: Sequence[float], threshold: float) -> int:
  """Returns for how many epochs no score was better than all before it.

  Better by more than the threshold, that is, as in transformers: what is less
  is still the best from there on, and does not count as better.
  """
  best, waited = -math.inf, 0
  for score in scores:
    waited = 0 if score - best > threshold else waited + 1
    best = max(best, score)
  return waited


def _span(values: Iterable[float], digits: int) -> str:
  """Writes the range of those that are finite."""
  finite = list(filter(math.isfinite, values))
  if not finite:
    return "none"
  low, high = (f"{v:.{digits}f}" for v in (min(finite), max(finite)))
  return low if low == high else f"{low} to {high}"
