"""Fine-tunes many runs of one task at once.

A run is a learning rate and a seed. All runs are one state with a leading axis
`[runs]` and one compiled program: `vmap` over the step of one run. What a run
does depends on its rate and its seed alone, not on which others are beside it.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from antlm_jax import hashing, models
from antlm_jax.masks import AttentionMask
from antlm_jax.objectives import curriculum
from antlm_jax.settings import setting
from antlm_jax.training import optim
from antlm_jax.training.checkpoint import Loaded
from evals.finetuning import rows as rows_lib
from evals.finetuning.rows import Rows
from evals.finetuning.task import Head, Predictions, Task

ATTENTIONS = ("bidirectional", "causal")
DECAYS = ("linear", "cosine")
_HEAD = "task_head/"  # stands before the names of the head's parameters


@dataclasses.dataclass(frozen=True)
class Settings:
  """How runs are trained; the defaults are those of BabyLM's 2024 pipeline."""

  batch_size: int = setting(64, "examples in a step", least=1)
  epochs: int = setting(10, "epochs, at most", least=1)
  patience: int = setting(
    3, "epochs without a better score; 0 for all epochs", least=0
  )
  max_length: int = setting(128, "tokens of a row, at most", least=8)
  attention: str = setting(
    "bidirectional", "which tokens of its row a token sees", choices=ATTENTIONS
  )
  warmup: float = setting(
    0.0, "share of the steps in which the rate rises", least=0, under=1
  )
  decay: str = setting(
    "linear", "how it falls to 0 over the rest", choices=DECAYS
  )
  b1: float = setting(0.9, "AdamW's", least=0, under=1)
  b2: float = setting(0.999, "AdamW's", least=0, under=1)
  eps: float = setting(1e-8, "AdamW's", least=0)
  weight_decay: float = setting(
    0.0, "AdamW's, of all but norms and biases", least=0
  )
  clip: float = setting(
    1.0, "largest gradient norm; 0 for no clipping", least=0
  )

  @property
  def causal(self) -> bool:
    """Whether a token sees those before it alone."""
    return self.attention == "causal"


class Run(NamedTuple):
  """One of the runs that train together.

  Attributes:
    lr: Its peak learning rate.
    seed: Draws the head, the order of the examples and the dropout.
  """

  lr: float
  seed: int


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What became of a run.

  Attributes:
    run: The run.
    epochs: By epoch: `train_loss` in nats and the metrics by evaluation set.
    best_epoch: The epoch, from 1, of the best main metric; the first if tied.
    predictions: Those of that epoch, of every example, by evaluation set.
  """

  run: Run
  epochs: tuple[dict[str, Any], ...]
  best_epoch: int
  predictions: dict[str, Predictions]

  @property
  def best(self) -> dict[str, Any]:
    """What was measured at the best epoch."""
    return self.epochs[self.best_epoch - 1]


# ------------------------------------------------------------------ programs


class State(NamedTuple):
  """Parameters and optimizer state, each array `[runs, ...]`."""

  params: dict[str, jax.Array]
  opt_state: Any


class Programs(NamedTuple):
  """The compiled functions of a head and a model.

  Attributes:
    init: (encoder parameters, seeds `[runs]`) to a State.
    step: (State, frozen, TaskBatch `[runs, ...]`, rates `[runs]`, seeds
      `[runs]`, step) to a State and the losses `[runs]`. The State given is
      used up.
    predict: (State's parameters, frozen, tokens, lengths) to what the head
      decodes, `[runs, B, ...]`.
    trained: Names of the encoder's parameters that are trained: those that its
      hidden states depend on. The others are `frozen`: they are not copied.
  """

  init: Callable
  step: Callable
  predict: Callable
  trained: frozenset[str]


def programs(config, head: Head, settings: Settings) -> Programs:
  """Returns the functions of many runs; tasks of equal heads share them.

  Args:
    config: The encoder's.
    head: What stands on it.
    settings: How to train.
  """
  return _programs(config, head, settings.causal, _adamw(settings))


@functools.lru_cache(maxsize=4)
def _programs(config, head: Head, causal: bool, adamw: tuple) -> Programs:
  """Makes the functions of one run, and maps them over runs."""
  model = models.from_config(config)
  trained = _trained(model)
  declared = head.parameters(config.width).items()
  axes = joined(
    {name: model.axes[name] for name in trained},
    {name: param.axes for name, param in declared},
  )
  optimizer = optim.make(ConfigDict(dict(adamw)), axes)
  compute = outputs(model, head, causal)

  def init(encoder, seed):
    drawn = head.init(jax.random.key(seed), config.width)
    params = joined(encoder, drawn)
    return State(params, optimizer.init(params))

  def step(state, frozen, batch, rate, seed, count):
    # Of the seed and the step alone: no run knows which others are beside it.
    key = jax.random.fold_in(jax.random.key(seed), count)

    def loss_of(params):
      out = compute(params, frozen, batch.tokens, batch.lengths, key)
      return head.loss(out, batch.labels, batch.weights)

    value, grads = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    return State(params, opt_state), value

  def predict(params, frozen, tokens, lengths):
    return head.reduce(compute(params, frozen, tokens, lengths))

  # What all runs share has no axis: frozen parameters, step, evaluation rows.
  return Programs(
    jax.jit(jax.vmap(init, in_axes=(None, 0))),
    jax.jit(jax.vmap(step, in_axes=(0, None, 0, 0, 0, None)), donate_argnums=0),
    jax.jit(jax.vmap(predict, in_axes=(0, None, None, None))),
    trained,
  )


def outputs(model: models.Model, head: Head, causal: bool) -> Callable:
  """Makes the function from a run's parameters and rows to a head's outputs."""

  def compute(params, frozen, tokens, lengths, dropout_key=None):
    encoder, own = split(params)
    keys = (None, None)
    if dropout_key is not None:
      keys = jax.random.split(dropout_key)
    # Texts that are encoded apart, [B, S, T], are rows of their own so far.
    apart, length = tokens.shape[:-1], tokens.shape[-1]
    tokens, lengths = tokens.reshape(-1, length), lengths.reshape(-1)
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    end = jnp.broadcast_to(lengths[:, None], tokens.shape)
    mask = AttentionMask(causal, k_end=end)
    hidden = model.encode(frozen | encoder, tokens, positions, mask, keys[0])
    out = head(own, hidden, lengths, keys[1])
    return jax.tree.map(lambda x: x.reshape(*apart, *x.shape[1:]), out)

  return compute


def split(params: Mapping[str, Any]) -> tuple[dict, dict]:
  """Takes a run's parameters apart: the encoder's, and the head's."""
  encoder = {n: p for n, p in params.items() if not n.startswith(_HEAD)}
  head = {n: p for n, p in params.items() if n.startswith(_HEAD)}
  return encoder, {n.removeprefix(_HEAD): p for n, p in head.items()}


def joined(encoder: Mapping[str, Any], head: Mapping[str, Any]) -> dict:
  """Undoes `split`."""
  return {**encoder, **{_HEAD + name: p for name, p in head.items()}}


def _trained(model: models.Model) -> frozenset[str]:
  """Finds what hidden states depend on: not an untied head, for one."""

  def encode(params, x):
    return model.encode(params, x, x, AttentionMask())

  one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  jaxpr = jax.make_jaxpr(encode)(model.shapes, one).jaxpr
  # What no equation reads, the hidden states do not depend on.
  used = {id(var) for equation in jaxpr.eqns for var in equation.invars}
  names = sorted(model.shapes)  # the order in which a dict is flattened
  pairs = zip(names, jaxpr.invars[: len(names)], strict=True)
  return frozenset(name for name, var in pairs if id(var) in used)


def _adamw(settings: Settings) -> tuple[tuple[str, Any], ...]:
  """Returns the `optimizer` config section, hashable."""
  chosen = ("b1", "b2", "eps", "weight_decay", "clip")
  fields = {name: getattr(settings, name) for name in chosen}
  fields |= {"name": "adamw", "decay_scope": "matrices"}
  return tuple(fields.items())


def shares(settings: Settings, steps: int) -> np.ndarray:
  """Returns the share of the peak rate at each step, float32 `[steps]`."""
  warmup = curriculum.amount(settings.warmup, steps)
  shape = {
    "name": "wsd",
    "decay": settings.decay,
    "peak_lr": 1.0,
    "warmup_steps": warmup,
    "decay_steps": steps - warmup,
    "min_lr_ratio": 0.0,
  }
  rate = optim.schedule(ConfigDict(shape), steps)
  return np.asarray(rate(jnp.arange(steps)), np.float32)


# ------------------------------------------------------------------ training


class Data(NamedTuple):
  """The rows of a task.

  Attributes:
    train: What is trained on.
    evaluations: What is evaluated on, by name.
  """

  train: Rows
  evaluations: dict[str, Rows]


def read(loaded: Loaded, task: Task, max_length: int, limit: int = 0) -> Data:
  """Reads a task's examples and makes rows of them.

  Args:
    loaded: The model.
    task: The task.
    max_length: Tokens of a row, at most.
    limit: Training examples, at most, a random part; 0 for all.
  """
  train = task.load("train")
  if 0 < limit < len(train):
    chosen = hashing.permute(np.arange(limit), len(train), 0)
    train = [train[i] for i in np.sort(chosen)]
  encode = functools.partial(task.head.encode, loaded, max_length=max_length)
  return Data(
    encode(train), {name: encode(task.load(name)) for name in task.evaluations}
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
    loaded: What they start from.
    task: The task.
    data: Its rows.
    settings: How to train.
    runs: The runs.
    track: Wraps the list of an epoch's batches, as tqdm does.
    tell: Is given a line about each epoch.
    keep: Is given the best run, the first of equals, after an epoch that made
      it so, with its score and what copies its parameters to the host.

  Returns:
    What became of each run, in their order.
  """
  made = programs(loaded.model.config, task.head, settings)
  encoder = {n: p for n, p in loaded.params.items() if n in made.trained}
  frozen = {n: p for n, p in loaded.params.items() if n not in made.trained}
  rates = np.array([run.lr for run in runs], np.float32)
  seeds = np.array([run.seed for run in runs], np.uint32)
  state = made.init(encoder, seeds)
  watch = _Watch(task, data.evaluations, runs, settings.patience)
  # The rate falls over all epochs, although a run may stop before.
  per_epoch = -(-len(data.train) // settings.batch_size)
  share = shares(settings, per_epoch * settings.epochs)
  step = 0
  for epoch in range(settings.epochs):
    losses = []
    for batch in track(_epoch(data.train, settings.batch_size, runs, epoch)):
      rate = rates * share[step]
      state, loss = made.step(state, frozen, batch(), rate, seeds, step)
      losses.append(loss)
      step += 1
    call = functools.partial(made.predict, state.params, frozen)
    found = {
      name: rows_lib.predict(call, rows, settings.batch_size)
      for name, rows in data.evaluations.items()
    }
    watch.add(np.mean(jax.device_get(losses), axis=0), found)
    tell(watch.line())
    run, best_epoch, score = watch.leader
    # The leader's parameters are those of now only if it leads by this epoch.
    if keep and best_epoch == epoch + 1:
      keep(runs[run], score, functools.partial(_one, state.params, run))
    if watch.over:
      break
  return watch.outcomes()


def _epoch(rows: Rows, size: int, runs: Sequence[Run], epoch: int) -> list:
  """Returns an epoch's batches `[runs, ...]`, each made when it is called."""
  seeds = dict.fromkeys(run.seed for run in runs)
  by_seed = {seed: rows_lib.batches(rows, size, seed, epoch) for seed in seeds}
  steps = zip(*(by_seed[run.seed] for run in runs), strict=True)
  return [functools.partial(rows_lib.gather, rows, slots) for slots in steps]


def _one(params, run: int) -> dict[str, np.ndarray]:
  """Copies a run's parameters to the host, one array after another."""
  pick = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
  return {name: np.asarray(pick(p, run)) for name, p in params.items()}


@dataclasses.dataclass
class _Watch:
  """Follows the runs of a group: their scores, and which of them go on.

  Attributes:
    task: The task.
    rows: Those that are predicted, by evaluation set.
    runs: The runs.
    patience: Epochs without a better score after which a run stops.
    epochs: By run, what each epoch measured.
    best: By run, its best epoch, from 1.
    predictions: By run, those of its best epoch.
  """

  task: Task
  rows: Mapping[str, Rows]
  runs: Sequence[Run]
  patience: int
  epochs: list[list[dict]] = dataclasses.field(init=False)
  best: list[int] = dataclasses.field(init=False)
  predictions: list[dict] = dataclasses.field(init=False)

  def __post_init__(self):
    self.epochs = [[] for _ in self.runs]
    self.best = [0] * len(self.runs)
    self.predictions = [{} for _ in self.runs]

  def add(self, losses, found: Mapping[str, Any]) -> None:
    """Takes an epoch: losses `[runs]`, and what to decode `[runs, n, ...]`."""
    # A run that has stopped trains on beside the others, and is not looked at.
    for run in [r for r in range(len(self.runs)) if not self._stopped(r)]:
      mine = {
        name: self.task.head.decode(
          jax.tree.map(operator.itemgetter(run), arrays), self.rows[name]
        )
        for name, arrays in found.items()
      }
      scores = measure(self.task, mine, self.rows)
      self.epochs[run].append({"train_loss": float(losses[run])} | scores)
      count = len(self.epochs[run])
      before = self.best[run]
      if not before or self._score(run, count) > self._score(run, before):
        self.best[run], self.predictions[run] = count, mine

  @property
  def over(self) -> bool:
    """Whether all runs have stopped."""
    return all(self._stopped(run) for run in range(len(self.runs)))

  @property
  def leader(self) -> tuple[int, int, float]:
    """The best run, its best epoch and its score then."""
    scores = self._best_scores()
    run = int(np.argmax(scores))
    return run, self.best[run], scores[run]

  def line(self) -> str:
    """Says how the runs stand."""
    epoch = max(map(len, self.epochs))
    going = [r for r, e in enumerate(self.epochs) if len(e) == epoch]
    scores = [self._score(run, epoch) for run in going]
    best = self._best_scores()
    losses = [self.epochs[run][-1]["train_loss"] for run in going]
    stopped = sum(self._stopped(run) for run in range(len(self.runs)))
    return (
      f"{self.task.name} epoch {epoch}: train loss {_span(losses, 3)},"
      f" {self.task.main_metric} {_span(np.multiply(scores, 100), 1)},"
      f" best {100 * max(best):.1f}; {stopped} of {len(best)} runs stopped"
    )

  def outcomes(self) -> list[Outcome]:
    """Returns what became of the runs."""
    fields = zip(
      self.runs, self.epochs, self.best, self.predictions, strict=True
    )
    return [Outcome(r, tuple(e), b, p) for r, e, b, p in fields]

  def _stopped(self, run: int) -> bool:
    since = len(self.epochs[run]) - self.best[run]
    return 0 < self.patience <= since

  def _best_scores(self) -> list[float]:
    return [self._score(run, epoch) for run, epoch in enumerate(self.best)]

  def _score(self, run: int, epoch: int) -> float:
    first = self.task.evaluations[0]
    return self.epochs[run][epoch - 1][first][self.task.main_metric]


def _span(values: Iterable[float], digits: int) -> str:
  low, high = (f"{v:.{digits}f}" for v in (min(values), max(values)))
  return low if low == high else f"{low} to {high}"


def measure(
  task: Task, predictions: Mapping[str, Predictions], rows: Mapping[str, Rows]
) -> dict[str, dict[str, float]]:
  """Returns every metric of every evaluation set."""
  labels = {n: [e.label for e in rows[n].examples] for n in predictions}
  return {
    name: {m: metric(found, labels[name]) for m, metric in task.metrics.items()}
    for name, found in predictions.items()
  }
