"""Trials: runs of one task that train together, and their settings.

A run is a learning rate and a seed. The runs of a trial are one state with a
leading axis `[runs]`, and one compiled program: `jax.vmap` over one run's
computations. A run depends on its own learning rate and seed only, whichever
runs are next to it, even if one of them diverges.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching
from antlm_jax.evals.finetuning.batching import ExampleRows, TaskBatch
from antlm_jax.evals.finetuning.task import TaskHead
from antlm_jax.inference.model import Loaded
from antlm_jax.masks import AttentionMask
from antlm_jax.models import layers
from antlm_jax.models.encoder import EncoderConfig
from antlm_jax.optim import DECAYS, AdamW
from antlm_jax.settings import Section, setting

ATTENTIONS = ("bidirectional", "causal")
WEIGHTS = ("float32", "bfloat16")
_ADAMW = ("b1", "b2", "eps", "weight_decay", "decay_scope", "clip")
# Hyperparameters that change a compiled program.
_COMPILED = (
  *("attention", "encoder_dropout", "freeze", "rows_at_once", "weights"),
  *_ADAMW,
)
_HEAD = "task_head/"  # prefix of the head's parameters


@dataclasses.dataclass(frozen=True)
class Hyperparameters(Section):
  """Hyperparameters of a run's training; the defaults are BabyLM's of 2024.

  With `weights="bfloat16"`, parameters, gradients and AdamW's moments are
  bfloat16 without a float32 copy, as in the code of arXiv 2507.00994. Updates
  below about 1/500 of a weight are then lost, and `b2` over .996 has no effect
  on a moment. The model computes in its own dtype.
  """

  batch_size: int = setting(64, "Number of examples in a step", least=1)
  rows_at_once: int = setting(
    0, "Number of examples in memory at a time; 0 for all of a step", least=0
  )
  epochs: int = setting(
    10, "Largest number of epochs; 0 to evaluate without training", least=0
  )
  steps: int = setting(
    0,
    "Largest number of steps, evaluated only at the end; 0 for all epochs",
    least=0,
  )
  patience: int = setting(
    3,
    "Number of epochs without a better score that end a run; 0 for all epochs",
    least=0,
  )
  threshold: float = setting(
    0.001,
    "Smallest gain that counts as a better score (scores are up to 1)",
    least=0,
  )
  drop_last: bool = setting(
    False,
    "Leave out the examples of an epoch that do not fill a batch",
    action=argparse.BooleanOptionalAction,  # a preset may turn it on
  )
  max_length: int = setting(128, "Largest number of tokens in a row", least=8)
  attention: str = setting(
    "bidirectional", "Attention of the encoder", choices=ATTENTIONS
  )
  warmup: float = setting(
    0.0, "Share of the steps in which the learning rate rises", least=0, under=1
  )
  decay: str = setting(
    "linear",
    "Decay of the learning rate after the warm-up",
    choices=tuple(DECAYS),
  )
  floor: float = setting(
    0.0,
    "Learning rate at the end of the decay, as a share of its peak",
    least=0,
    most=1,
  )
  b1: float = setting(
    0.9, "First decay rate of AdamW's moments", least=0, under=1
  )
  b2: float = setting(
    0.999, "Second decay rate of AdamW's moments", least=0, under=1
  )
  eps: float = setting(1e-8, "Epsilon of AdamW", least=0)
  weight_decay: float = setting(0.0, "Weight decay of AdamW", least=0)
  decay_scope: str = setting(
    "matrices",
    "Parameters that decay; matrices leaves out norms and biases",
    choices=("all", "matrices"),
  )
  clip: float = setting(
    1.0, "Largest gradient norm; 0 for no clipping", least=0
  )
  encoder_dropout: float | None = setting(
    None,
    "Dropout of states and attention in training; by default as in pretraining",
    least=0,
    under=1,
  )
  weights: str = setting(
    "float32", "Dtype of parameters and AdamW's state", choices=WEIGHTS
  )
  freeze: bool = setting(
    False,
    "Train the head alone, on the frozen encoder without dropout (linear probe"
    " with --head=linear)",
  )

  @property
  def rows_in_memory(self) -> int:
    """Number of examples that are computed together."""
    return min(self.rows_at_once or self.batch_size, self.batch_size)

  def rate_shares(self, steps: int) -> np.ndarray:
    """Returns the share of the peak rate at each step, float32 `[steps]`.

    As in transformers and in BabyLM's pipelines, a step has the rate at its
    begin: the first step of a warm-up has none, and the last step is above the
    floor.
    """
    warmup = int(self.warmup * steps)
    step = np.arange(steps)
    progress = np.maximum(step - warmup, 0) / (steps - warmup)
    down = self.floor + (1 - self.floor) * DECAYS[self.decay](progress, np)
    up = step / max(1, warmup)
    return np.where(step < warmup, up, down).astype(np.float32)


class TrialRun(NamedTuple):
  """One of the runs that train together."""

  lr: float  # peak learning rate
  seed: int  # of the head, the order of the examples and the dropout

  def __str__(self) -> str:
    return f"seed {self.seed} at rate {self.lr:g}"


class Trial:
  """Runs that train together, from the same pretrained encoder."""

  def __init__(
    self,
    loaded: Loaded,
    head: TaskHead,
    settings: Hyperparameters,
    runs: Sequence[TrialRun],
    steps: int,
  ):
    """Starts runs whose learning rates decay over so many steps."""
    compiled = Hyperparameters(**{n: getattr(settings, n) for n in _COMPILED})
    self._program = RunProgram(loaded.model.config, head, compiled)
    self._rows_in_memory = settings.rows_in_memory
    self._rates = np.array([run.lr for run in runs], np.float32)
    self._seeds = np.array([run.seed for run in runs], np.uint32)
    self._rate_shares = settings.rate_shares(steps)
    self._step = 0
    encoder, self._frozen = divided(loaded.params, settings.freeze)
    self._state = init(self._program, encoder, self._seeds)

  def train(self, batches: Iterable[TaskBatch]) -> np.ndarray:
    """Trains on batches `[runs, B, ...]`; returns the mean losses `[runs]`."""
    losses = []
    for batch in batches:
      self._state, loss = step(
        self._program,
        self._state,
        self._frozen,
        batch,
        self._rates * self._rate_shares[self._step],
        self._seeds,
        self._step,
      )
      losses.append(loss)
      self._step += 1
    return np.mean(jax.device_get(losses), axis=0)

  def predict(
    self, rows: ExampleRows, batch_size: int = 0
  ) -> tuple[Any, np.ndarray]:
    """Returns arrays to decode `[runs, n, ...]`, and runs with NaN `[runs]`.

    By default, computes as many rows at once as in training.
    """
    call = functools.partial(
      predict, self._program, self._state.params, self._frozen
    )
    size = batch_size or self._rows_in_memory
    reduced, is_nan = batching.predict_rows(call, rows, size)
    return reduced, is_nan.any(axis=1)

  def params(self, run: int) -> dict[str, np.ndarray]:
    """Copies the parameters of the run of this index to the host, in float32.

    No checkpoint has another dtype. The arrays are copied one by one, so that
    the device needs memory for one more only.
    """
    pick = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    return {
      name: np.asarray(pick(p, run), np.float32)
      for name, p in self._state.params.items()
    }


def divided(
  params: Mapping[str, Any], freeze: bool = False
) -> tuple[dict, dict]:
  """Divides a model's parameters into those to train and those that are frozen.

  The LM head is always frozen. `freeze` says whether the encoder is, too.
  """
  encoder, head = models.divided(params)
  return ({}, dict(params)) if freeze else (encoder, head)


class State(NamedTuple):
  """Parameters and optimizer state, of one run or `[runs, ...]`."""

  params: dict[str, jax.Array]
  opt_state: Any


@dataclasses.dataclass(frozen=True)
class RunProgram:
  """Computations of a single run; equal values share compiled programs."""

  config: EncoderConfig
  head: TaskHead
  # Only those of `_COMPILED`; all others have their defaults.
  settings: Hyperparameters

  @functools.cached_property
  def _model(self) -> models.Model:
    config = self.config
    dropout = 0.0 if self.settings.freeze else self.settings.encoder_dropout
    if dropout is not None:
      config = dataclasses.replace(
        config, dropout=dropout, attention_dropout=dropout
      )
    return models.from_config(config)

  @functools.cached_property
  def _optimizer(self):
    head = self.head.parameters(self.config.width)
    encoder, _ = divided(self._model.axes, self.settings.freeze)
    axes = join_params(
      encoder, {name: param.axes for name, param in head.items()}
    )
    adamw = {name: getattr(self.settings, name) for name in _ADAMW}
    return AdamW(**adamw).build(axes)

  def init(self, encoder: Mapping, seed: jax.Array) -> State:
    """Draws a head for the encoder's parameters."""
    head = self.head.init(jax.random.key(seed), self.config.width)
    params = join_params(encoder, head)
    params = jax.tree.map(lambda p: p.astype(self.settings.weights), params)
    return State(params, self._optimizer.init(params))

  def step(
    self, state: State, frozen: Mapping, batch: TaskBatch, rate, seed, step
  ) -> tuple[State, jax.Array]:
    """Returns the next state, and the loss `[]`."""
    # Depends on seed and step alone, not on the other runs of the trial.
    key = jax.random.fold_in(jax.random.key(seed), step)

    def loss_of(params):
      compute = functools.partial(self._outputs, params, frozen)
      rows = batch.tokens, batch.lengths, key
      out = in_chunks(compute, self.settings.rows_at_once, *rows)
      return self.head.loss(out, batch.labels, batch.weights)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = self._optimizer.update(
      grads, state.opt_state, state.params
    )
    # The rate is float32, so this subtracts in float32 and rounds afterwards.
    params = jax.tree.map(
      lambda p, u: (p - rate * u).astype(p.dtype), state.params, updates
    )
    return State(params, opt_state), loss

  def predict(self, params: Mapping, frozen: Mapping, tokens, lengths):
    """Returns outputs to decode `[B, ...]`, and rows with NaN `[B]`."""
    out = self._outputs(params, frozen, tokens, lengths)
    # Before `reduce`: the argmax of NaNs is a class like any other.
    is_nan = [
      jnp.isnan(x).reshape(len(x), -1).any(1) for x in jax.tree.leaves(out)
    ]
    return self.head.reduce(out), jnp.stack(is_nan).any(0)

  def _outputs(self, *args):
    causal = self.settings.attention == "causal"
    return outputs(self._model, self.head, causal, *args)


def _over_runs(method: Callable, in_axes: tuple, **options) -> Callable:
  """Compiles a method for runs that train together: arrays `[runs, ...]`."""

  def call(program: RunProgram, *args):
    return jax.vmap(functools.partial(method, program), in_axes)(*args)

  return jax.jit(call, static_argnums=0, **options)


# Arguments without an axis are shared: frozen parameters, the step, rows.
init = _over_runs(RunProgram.init, (None, 0))
step = _over_runs(  # uses up the state that it gets
  RunProgram.step, (0, None, 0, 0, 0, None), donate_argnums=1
)
predict = _over_runs(RunProgram.predict, (0, None, None, None))


def outputs(
  model: models.Model,
  head: TaskHead,
  causal: bool,
  params: Mapping,
  frozen: Mapping,
  tokens: jax.Array,
  lengths: jax.Array,
  dropout_key: jax.Array | None = None,
) -> Any:
  """Returns a head's outputs for rows `[B, T]` or `[B, S, T]`, `[B, ...]`.

  `params` are a run's, and `frozen` the model's other parameters.
  """
  encoder, head_params = split_params(params)
  keys = layers.split_key(dropout_key, 2)
  # Texts that are encoded apart, [B, S, T], are separate rows here.
  *axes, length = tokens.shape
  tokens = tokens.reshape(-1, length)
  lengths = lengths.reshape(-1)
  positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
  end = jnp.broadcast_to(lengths[:, None], tokens.shape)
  mask = AttentionMask(causal, k_end=end)
  hidden = model.encode(frozen | encoder, tokens, positions, mask, keys[0])
  out = head(head_params, hidden, lengths, keys[1])
  return jax.tree.map(lambda x: x.reshape(*axes, *x.shape[1:]), out)


def in_chunks(
  compute: Callable, size: int, tokens, lengths, dropout_key: jax.Array
) -> Any:
  """Computes rows' outputs for `size` rows at a time; 0 for all.

  The result is the same, because a row's outputs depend on no other row. The
  backward pass computes each chunk again, so that only one chunk and all
  outputs are in memory (gradient caching, arXiv 2101.06983).
  """
  rows = len(tokens)
  if not 0 < size < rows:
    return compute(tokens, lengths, dropout_key)
  if rows % size:
    raise UserError(f"rows_at_once={size} does not divide batch_size={rows}")
  count = rows // size
  parts = (
    tokens.reshape(count, size, *tokens.shape[1:]),
    lengths.reshape(count, size, *lengths.shape[1:]),
    jax.random.split(dropout_key, count),
  )
  out = jax.lax.map(jax.checkpoint(lambda part: compute(*part)), parts)
  return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), out)


def split_params(params: Mapping[str, Any]) -> tuple[dict, dict]:
  """Splits a run's parameters into the encoder's and the head's."""
  encoder = {}
  head = {}
  for name, param in params.items():
    if name.startswith(_HEAD):
      head[name.removeprefix(_HEAD)] = param
    else:
      encoder[name] = param
  return encoder, head


def join_params(encoder: Mapping[str, Any], head: Mapping[str, Any]) -> dict:
  """Joins the parameters that `split_params` splits."""
  return {**encoder, **{_HEAD + name: p for name, p in head.items()}}
