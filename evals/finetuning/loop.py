"""Fine-tunes many runs of one task at once.

A run is a learning rate and a seed. All runs are one state with a leading axis
`[runs]` and one compiled program: `vmap` over the step of one run. What a run
does depends on its rate and its seed alone, not on which others are beside it.

Rows are grouped by length, so that short ones are not padded to the longest,
and only a handful of shapes is compiled. Which lengths follow one another is
the same for all seeds, which rows they hold is not.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from antlm_jax import hashing, models
from antlm_jax.inference import framing
from antlm_jax.masks import AttentionMask
from antlm_jax.objectives import curriculum
from antlm_jax.training import optim
from antlm_jax.training.checkpoint import Loaded
from evals.finetuning.task import Example, Head, Task

ATTENTIONS = ("bidirectional", "causal")
DECAYS = ("linear", "cosine")
_SHORTEST = 16  # tokens; longer rows are padded to it doubled, and so on
_HEAD = "task_head/"  # stands before the names of the head's parameters
_ROWS, _BATCHES = 0, 1  # what a permutation is of


@dataclasses.dataclass(frozen=True)
class Settings:
  """How runs are trained; the defaults are those of BabyLM's 2024 pipeline.

  Attributes:
    batch_size: Examples B in a step.
    epochs: At most so many.
    patience: Epochs without a better score after which a run stops; 0 for
      none.
    max_length: Tokens T of a row, at most.
    attention: Whether rows are read bidirectional or causal.
    warmup: Share of the steps in which the rate rises, in [0, 1).
    decay: How it falls to 0 over the rest, linear or cosine.
    b1, b2, eps: AdamW's.
    weight_decay: AdamW's, of all but norms and biases.
    clip: Largest gradient norm; 0 for no clipping.
  """

  batch_size: int = 64
  epochs: int = 10
  patience: int = 3
  max_length: int = 128
  attention: str = "bidirectional"
  warmup: float = 0.0
  decay: str = "linear"
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip: float = 1.0


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
    predictions: Those of that epoch, `[n]`, by evaluation set.
  """

  run: Run
  epochs: tuple[dict[str, Any], ...]
  best_epoch: int
  predictions: dict[str, np.ndarray]

  @property
  def best(self) -> dict[str, Any]:
    """What was measured at the best epoch."""
    return self.epochs[self.best_epoch - 1]


# ---------------------------------------------------------------------- rows


@dataclasses.dataclass(frozen=True)
class Rows:
  """Examples as rows of tokens.

  Attributes:
    tokens: int32 `[n, T]`, padded at the right.
    lengths: Tokens of each row, int32 `[n]`.
    labels: `[n, ...]`.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  labels: np.ndarray

  @functools.cached_property
  def groups(self) -> dict[int, np.ndarray]:
    """The rows of each padded length, shortest first."""
    longest = self.tokens.shape[1]
    doublings = np.ceil(np.log2(np.maximum(self.lengths / _SHORTEST, 1)))
    padded = np.minimum(_SHORTEST * 2 ** doublings.astype(int), longest)
    return {int(t): np.flatnonzero(padded == t) for t in np.unique(padded)}


def encode(
  loaded: Loaded, examples: Sequence[Example], max_length: int
) -> Rows:
  """Makes rows: `<s> A </s> B </s>`, as the training data frames a text.

  Where a text is framed by `</s>` alone or by nothing, so are these. What is
  too long loses tokens at the end of its longest text.

  Args:
    loaded: The model.
    examples: n examples.
    max_length: Tokens of a row, at most; the model's own limit holds too.
  """
  before, after = framing.frame(loaded)
  texts = [text for example in examples for text in example.texts]
  ids = iter(loaded.tokenizer.encode_batch(texts))
  limit = min(max_length, loaded.model.config.max_seq_len)
  tokens = np.zeros((len(examples), limit), np.int32)
  lengths = np.zeros(len(examples), np.int32)
  for i, example in enumerate(examples):
    parts = [next(ids) for _ in example.texts]
    budget = limit - len(before) - len(parts) * len(after)
    kept = truncated([len(part) for part in parts], budget)
    framed = [before]
    for part, length in zip(parts, kept, strict=True):
      framed += [part[:length], after]
    row = np.concatenate(framed)
    lengths[i] = len(row)
    tokens[i, : len(row)] = row
  longest = max(1, lengths.max())
  labels = np.array([example.label for example in examples])
  return Rows(tokens[:, :longest], np.maximum(lengths, 1), labels)


def truncated(lengths: Sequence[int], budget: int) -> list[int]:
  """Shortens the longest, again and again, until the sum fits the budget."""
  kept = list(lengths)
  while sum(kept) > max(budget, 0):
    kept[kept.index(max(kept))] -= 1
  return kept


class Slots(NamedTuple):
  """Which rows make a batch.

  Attributes:
    length: Tokens T that the batch is padded to.
    rows: int `[B]`; a place that is empty repeats the first row.
    weights: float32 `[B]`, 0 where a place is empty.
  """

  length: int
  rows: np.ndarray
  weights: np.ndarray


def batches(
  rows: Rows, size: int, seed: int | None = None, epoch: int = 0
) -> list[Slots]:
  """Cuts rows into batches of like length; every row is in one.

  What is left of a length that does not fill a batch goes with the next
  length, so at most one batch, of the longest, is incomplete.

  Args:
    rows: The rows.
    size: Rows of a batch B.
    seed: With the epoch, permutes the rows of a length; None to leave rows and
      batches in order.
    epoch: By itself, permutes the batches.
  """
  out, left = [], np.array([], int)
  for length, members in rows.groups.items():
    if seed is not None:
      key = (seed, epoch, _ROWS, length)
      members = members[_permutation(len(members), *key)]
    pool = np.concatenate([left, members])
    full = len(pool) // size * size
    for chosen in pool[:full].reshape(-1, size):
      out.append(Slots(length, chosen, np.ones(size, np.float32)))
    left = pool[full:]
  if len(left):
    out.append(_incomplete(length, left, size))
  if seed is None:
    return out
  return [out[i] for i in _permutation(len(out), epoch, _BATCHES)]


def _permutation(size: int, *key: int) -> np.ndarray:
  return hashing.permute(np.arange(size), size, *key)


def _incomplete(length: int, rows: np.ndarray, size: int) -> Slots:
  full = np.full(size, rows[0])
  full[: len(rows)] = rows
  return Slots(length, full, (np.arange(size) < len(rows)).astype(np.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """What a step of one run reads; in training with an axis `[runs]` before.

  Attributes:
    tokens: int32 `[B, T]`.
    lengths: int32 `[B]`.
    labels: `[B, ...]`.
    weights: float32 `[B]`; 0 for padding.
  """

  tokens: Any
  lengths: Any
  labels: Any
  weights: Any


def gather(rows: Rows, slots: Sequence[Slots]) -> Batch:
  """Reads batches of the same length, one a run, into `[runs, B, ...]`."""
  which = np.stack([s.rows for s in slots])
  return Batch(
    tokens=rows.tokens[which, : slots[0].length],
    lengths=rows.lengths[which],
    labels=rows.labels[which],
    weights=np.stack([s.weights for s in slots]),
  )


# ------------------------------------------------------------------ programs


class State(NamedTuple):
  """Parameters and optimizer state, each array `[runs, ...]`."""

  params: dict[str, jax.Array]
  opt_state: Any


class Programs(NamedTuple):
  """The compiled functions of a task and a model.

  Attributes:
    init: (encoder parameters, seeds `[runs]`) to a State.
    step: (State, frozen, Batch `[runs, ...]`, rates `[runs]`, seeds `[runs]`,
      step) to a State and the losses `[runs]`. The State given is used up.
    predict: (State's parameters, frozen, tokens, lengths) to predictions
      `[runs, B]`.
    trained: Names of the encoder's parameters that are trained: those that its
      hidden states depend on. The others are `frozen`: they are not copied.
  """

  init: Callable
  step: Callable
  predict: Callable
  trained: frozenset[str]


def programs(config, task: Task, settings: Settings) -> Programs:
  """Returns a task's functions of many runs.

  Tasks of the same head, loss and predictions share them.

  Args:
    config: The encoder's.
    task: The task.
    settings: How to train.
  """
  causal = settings.attention == "causal"
  return _programs(
    config, task.head, task.loss, task.decode, causal, _adamw(settings)
  )


@functools.lru_cache(maxsize=4)
def _programs(config, head: Head, loss, decode, causal: bool, adamw: tuple):
  """Makes the functions of one run, and maps them over runs."""
  model = models.from_config(config)
  trained = _trained(model)
  axes = joined({name: model.axes[name] for name in trained}, head.axes)
  optimizer = optim.make(ConfigDict(dict(adamw)), axes)
  compute = outputs(model, head, causal)

  def init(encoder, seed):
    drawn = head.init(jax.random.key(seed), config.width)
    params = joined(encoder, drawn)
    return State(params, optimizer.init(params))

  def step(state, frozen, batch, rate, seed, count):
    key = jax.random.fold_in(jax.random.key(seed), count)

    def loss_of(params):
      out = compute(params, frozen, batch.tokens, batch.lengths, key)
      return loss(out, batch.labels, batch.weights)

    value, grads = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
    return State(params, opt_state), value

  def predict(params, frozen, tokens, lengths):
    return decode(compute(params, frozen, tokens, lengths))

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
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    end = jnp.broadcast_to(lengths[:, None], tokens.shape)
    mask = AttentionMask(causal, k_end=end)
    hidden = model.encode(frozen | encoder, tokens, positions, mask, keys[0])
    return head(own, hidden, lengths, keys[1])

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
  one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  encode = lambda params, x: model.encode(params, x, x, AttentionMask())  # noqa: E731
  jaxpr = jax.make_jaxpr(encode)(model.shapes, one).jaxpr
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
  made = programs(loaded.model.config, task, settings)
  encoder = {n: p for n, p in loaded.params.items() if n in made.trained}
  frozen = {n: p for n, p in loaded.params.items() if n not in made.trained}
  rates = np.array([run.lr for run in runs], np.float32)
  seeds = np.array([run.seed for run in runs], np.uint32)
  state = made.init(encoder, seeds)
  watch = _Watch(task, runs, settings.patience)
  labels = {name: rows.labels for name, rows in data.evaluations.items()}
  per_epoch = -(-len(data.train.labels) // settings.batch_size)
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
    predictions = {
      name: predict(call, rows, settings.batch_size)
      for name, rows in data.evaluations.items()
    }
    watch.add(np.mean(jax.device_get(losses), axis=0), predictions, labels)
    tell(watch.line())
    run, best_epoch, score = watch.leader
    if keep and best_epoch == epoch + 1:
      keep(runs[run], score, functools.partial(_one, state.params, run))
    if watch.over:
      break
  return watch.outcomes()


def _epoch(rows: Rows, size: int, runs: Sequence[Run], epoch: int) -> list:
  """Returns an epoch's batches `[runs, ...]`, each made when it is called."""
  seeds = dict.fromkeys(run.seed for run in runs)
  by_seed = {seed: batches(rows, size, seed, epoch) for seed in seeds}
  steps = zip(*(by_seed[run.seed] for run in runs), strict=True)
  return [functools.partial(gather, rows, slots) for slots in steps]


def _one(params, run: int) -> dict[str, np.ndarray]:
  """Copies a run's parameters to the host, one array after another."""
  pick = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
  return {name: np.asarray(pick(p, run)) for name, p in params.items()}


def predict(call: Callable, rows: Rows, size: int) -> np.ndarray:
  """Calls a function on all rows, in batches of like length.

  Args:
    call: Tokens int32 `[B, T]` and lengths `[B]` to `[runs, B, ...]`.
    rows: n rows; the result is `[runs, n, ...]`.
    size: Rows of a batch B.
  """
  found, which = [], []
  for slots in batches(rows, size):
    tokens = rows.tokens[slots.rows, : slots.length]
    lengths = rows.lengths[slots.rows]
    found.append(call(tokens, lengths))
    which.append(slots)
  real = np.concatenate([slots.weights for slots in which]) > 0
  order = np.concatenate([slots.rows for slots in which])[real]
  found = np.concatenate(jax.device_get(found), axis=1)[:, real]
  return found[:, np.argsort(order)]


@dataclasses.dataclass
class _Watch:
  """Follows the runs of a group: their scores, and which of them go on.

  Attributes:
    task: The task.
    runs: The runs.
    patience: Epochs without a better score after which a run stops.
    epochs: By run, what each epoch measured.
    best: By run, its best epoch, from 1.
    predictions: By run, those of its best epoch.
  """

  task: Task
  runs: Sequence[Run]
  patience: int
  epochs: list[list[dict]] = dataclasses.field(init=False)
  best: list[int] = dataclasses.field(init=False)
  predictions: list[dict] = dataclasses.field(init=False)

  def __post_init__(self):
    self.epochs = [[] for _ in self.runs]
    self.best = [0] * len(self.runs)
    self.predictions = [{} for _ in self.runs]

  def add(self, losses, predictions, labels) -> None:
    """Takes an epoch: losses `[runs]`, predictions `[runs, n]` by set."""
    for run in [r for r in range(len(self.runs)) if not self._stopped(r)]:
      mine = {name: p[run] for name, p in predictions.items()}
      scores = measure(self.task, mine, labels)
      self.epochs[run].append({"train_loss": float(losses[run])} | scores)
      count = len(self.epochs[run])
      if count == 1 or self._score(run, count) > self._score(
        run, self.best[run]
      ):
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


def measure(task: Task, predictions, labels) -> dict[str, dict[str, float]]:
  """Returns every metric of every evaluation set."""
  return {
    name: {m: f(found, labels[name]) for m, f in task.metrics.items()}
    for name, found in predictions.items()
  }
