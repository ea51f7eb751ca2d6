"""Small models, rows and sources that several test files use."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from antlm_jax import config, models, optim
from antlm_jax import mesh as mesh_lib
from antlm_jax.data.order import Order, Stage
from antlm_jax.data.source import BatchSource
from antlm_jax.masks import BIDIRECTIONAL
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.batch import Batch, BatchLayout
from antlm_jax.objectives.corruption import Segments, Vocabulary, WordTokens
from antlm_jax.objectives.objective import OBJECTIVES
from antlm_jax.training.step import (
  TrainState,
  TrainStep,
  jitted,
  state_shardings,
)

PAD, BOS, EOS, MASK = range(4)
SPECIAL = 4  # ids below this are special
VOCAB = 64
TINY = {
  "name": "llama",
  "layers": 2,
  "width": 32,
  "heads": 4,
  "kv_heads": 2,
  "mlp_width": 48,
  "max_seq_len": 64,
}


def vocabulary() -> Vocabulary:
  """Returns a vocabulary of 64 tokens, of which 4 are special.

  Of the others, every second token begins a word.
  """
  ids = np.arange(VOCAB)
  words = WordTokens((ids >= SPECIAL) & (ids % 2 == 0))
  return Vocabulary(MASK, PAD, EOS, ids < SPECIAL, lambda: words)


def tokens(n: int, length: int, seed: int = 0, special: float = 0.1):
  """Returns random rows; a share `special` of tokens is special, never mask."""
  draw = np.random.default_rng(seed)
  ordinary = draw.integers(SPECIAL, VOCAB, (n, length))
  out = np.where(
    draw.random((n, length)) < special,
    draw.integers(0, MASK, (n, length)),
    ordinary,
  )
  return out.astype(np.int32)


def starts(n: int, length: int, seed: int = 0, share: float = 0.1):
  """Returns which tokens begin a segment, at random, bool `[n, T]`."""
  out = np.random.default_rng(seed + 1).random((n, length)) < share
  out[:, 0] = True
  return out


def segments(n: int, length: int, seed: int = 0) -> Segments:
  return Segments.of(starts(n, length, seed))


class FakeRows:
  """Rows in memory with the interface of `antlm_jax.data.rows.Rows`."""

  def __init__(self, n=24, length=16, packed=False, seed=0, special=0.1):
    self.tokens = tokens(n, length, seed, special)
    self.starts = starts(n, length, seed) if packed else None
    self.seq_len, self.segmented = length, packed

  def __len__(self):
    return len(self.tokens)

  def read(self, indices):
    first = None if self.starts is None else self.starts[indices]
    return self.tokens[indices], first


class CountingRows(FakeRows):
  """Easy rows, in which each token is its predecessor plus 1."""

  def __init__(self, n=24, length=16):
    super().__init__(n, length)
    first = np.random.default_rng(0).integers(0, VOCAB, (n, 1))
    span = VOCAB - SPECIAL
    self.tokens = SPECIAL + (first + np.arange(length, dtype=np.int32)) % span
    self.tokens = self.tokens.astype(np.int32)


def source(
  text="C+M",
  rows=None,
  layout=None,
  objectives=None,
  steps=8,
  rounding="carry",
  shuffle=True,
  **changes,
) -> BatchSource:
  """Returns a source over fake rows; `text` is its curriculum."""
  rows = FakeRows() if rows is None else rows
  layout = layout or BatchLayout(batch_size=8)
  objectives = OBJECTIVES | (objectives or {})
  parts = (Stage(0.0, layout),)
  order = Order({"": len(rows)}, parts, rounding=rounding, shuffle=shuffle)
  parsed = curriculum.parse_curriculum(
    text, list(objectives), order.steps_per_epoch, steps
  )
  settings = {"vocabulary": vocabulary(), "seed": 0} | changes
  return BatchSource(rows, order, parsed, objectives, **settings)


def model(**changes) -> models.Model:
  return models.build_model(TINY | changes, VOCAB)


def ltg_bert(**changes) -> models.Model:
  """A small LTG-BERT without dropout."""
  settings = {
    "name": "ltg_bert",
    "layers": 2,
    "width": 32,
    "heads": 4,
    "mlp_width": 48,
    "position_buckets": 8,
    "longest_distance": 20,
    "dropout": 0.0,
    "attention_dropout": 0.0,
  }
  return models.build_model(settings | changes, VOCAB)


def random_params(of: models.Model, seed: int = 0) -> models.Params:
  """Returns parameters far from the initial values, so that all matter."""
  draw = np.random.default_rng(seed)
  out = {}
  for path, shape in of.shapes.items():
    value = draw.normal(0, 0.3, shape.shape)
    out[path] = jnp.asarray(value + ("norm" in path), jnp.float32)
  return out


def settings(**groups) -> config.Config:
  """Returns the default config with changes by group."""
  return config.load_config(config.changes().to_dict() | groups)


def train_step(of=None, num_objectives=2, rate=1e-2, optimizer=None, **changes):
  """Returns a train step with a constant rate; by default SGD, one layer."""
  return TrainStep(
    model=of or model(layers=1),
    optimizer=optimizer or optax.identity(),
    schedule=lambda step: jnp.float32(rate),
    num_objectives=num_objectives,
    **changes,
  )


def begin(of: TrainStep) -> TrainState:
  """Returns an initial state with random parameters, without compiling."""
  params = random_params(of.model)
  return TrainState(
    step=jnp.int32(0),
    params=params,
    opt_state=of.optimizer.init(params),
    ema=jax.tree.map(jnp.copy, params) if of.average_decay else None,
  )


def trained(of: models.Model, optimizer="adamw", head="auto", **shape) -> dict:
  """Trains four steps on a mesh; returns losses and parameter shardings."""
  shape = {"data": 1, "fsdp": 1, "tensor": 1} | shape
  mesh = mesh_lib.Mesh(**shape).build(jax.devices()[: max(shape.values())])
  layout = BatchLayout(8, 2, mesh_lib.data_shards(mesh))
  batches = source("C:M=1:1", FakeRows(packed=True), layout)
  made = optim.OPTIMIZERS[optimizer]().build(of.axes)
  training, losses = train_step(of, optimizer=made, head=head), []
  with jax.set_mesh(mesh):
    init, update, _ = jitted(training, state_shardings(training, mesh))
    state = init()
    first = jax.device_get(state.params)
    for step in range(4):
      state, metrics = update(state, mesh_lib.place_batch(mesh, batches[step]))
      losses.append(float(metrics["total_loss"]))
  params = state.params
  named = jax.tree_util.tree_leaves_with_path(state.opt_state)
  moments = {path: x for path, x in named if hasattr(path[-1], "key")}
  split = {n: x.sharding.shard_shape(x.shape) for n, x in params.items()}
  return {
    "losses": losses,
    "first": {n: float(np.abs(x).sum(dtype="f8")) for n, x in first.items()},
    "split": split,
    "parts": {n: x.size // math.prod(split[n]) for n, x in params.items()},
    "follows": all(
      moment.sharding == params[path[-1].key].sharding
      for path, moment in moments.items()
    ),
  }


def check_leaks(run, seen, places=None) -> None:
  """Asserts, bit for bit, that a changed token changes only its observers.

  Args:
    run: Maps tokens `[2, T]` to their states or scores `[2, T, ...]`.
    seen: Which tokens each token sees, in both rows, bool `[T, T]`.
    places: Positions to change; by default all.
  """
  length = len(seen)
  before = tokens(2, length, special=0)
  expected = np.asarray(run(before))
  for at in range(length) if places is None else places:
    other = before.copy()
    other[0, at] = SPECIAL + (other[0, at] + 7) % (VOCAB - SPECIAL)
    changed = (expected != np.asarray(run(other))).any(axis=2)
    assert not changed[1].any(), at
    assert (changed[0] == seen[:, at]).all(), at


def by_row(batch: Batch, layout: BatchLayout, shifts) -> tuple:
  """Returns a batch in the order of its rows.

  Returns:
    Inputs by row, and (target, weight, objective) by row and position.
  """
  length = batch.inputs.shape[-1]
  inputs = batch.inputs.reshape(-1, length)
  rows = layout.slots.reshape(layout.microbatches, len(layout.local), -1)
  found = {}
  for index in zip(*np.nonzero(batch.weights), strict=True):
    row, at = divmod(int(batch.target_positions[index]), length)
    kind = int(batch.objective_ids[index])
    key = int(rows[index[:2]][row]), at + shifts[kind]
    assert key not in found
    found[key] = (int(batch.targets[index]), float(batch.weights[index]), kind)
  return dict(zip(layout.slots.tolist(), inputs.tolist(), strict=True)), found


def equal(a, b) -> bool:
  """Returns whether two trees have the same structure and the same bits."""
  leaves, others = jax.tree.leaves(a), jax.tree.leaves(b)
  return jax.tree.structure(a) == jax.tree.structure(b) and all(
    np.array_equal(x, y) for x, y in zip(leaves, others, strict=True)
  )


def closest(tree, other) -> float:
  """Returns the largest difference of leaves, relative to `other`'s largest."""
  worst = 0.0
  for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    worst = max(worst, np.abs(x - y).max() / max(np.abs(y).max(), 1e-30))
  return worst


def target_scores(of: models.Model, params, batch: Batch):
  """Returns log-partitions and target scores of a batch's one target list."""
  mask = jax.tree.map(lambda bound: bound[0], batch.mask)
  row = batch.inputs[0], batch.positions[0], mask
  logits = np.float64(of.logits(params, of.encode(params, *row)))
  logits = logits.reshape(-1, logits.shape[-1])[batch.target_positions[0, 0]]
  at_target = np.take_along_axis(logits, batch.targets[0, 0][:, None], 1)
  return np.logaddexp.reduce(logits, axis=1), at_target[:, 0]


@functools.cache
def forward(model_config):
  """Compiles a model's logits `[n, T, V]` of rows `[n, T]`."""
  model = models.from_config(model_config)

  def logits(params, *rows):
    return model.logits(params, model.encode(params, *rows))

  return jax.jit(logits)


def logits(loaded, tokens, mask=BIDIRECTIONAL):
  """Returns float64 logits `[n, V]` of one row `[n]`.

  Padding that no token sees leaves few shapes to compile.
  """
  length = len(tokens)
  row = np.zeros((1, -(-length // 16) * 16), np.int32)
  row[0, :length] = tokens
  ends = np.full(row.shape, length, np.int32)
  if mask.k_end is not None:
    ends[:, :length] = mask.k_end
  mask = dataclasses.replace(mask, k_end=ends)
  positions = np.arange(row.shape[1])[None]
  run = forward(loaded.model.config)
  found = run(loaded.params, row, positions, mask)[0]
  return np.asarray(found, np.float64)[:length]


def log_softmax(logits):
  """Returns log-probabilities of logits `[..., V]`."""
  return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
