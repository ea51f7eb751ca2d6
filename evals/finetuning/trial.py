"""The step of fine-tuning: how it is set, and its compiled functions.

One run's functions are mapped over runs that train together: every array of
their state has a leading axis `[runs]`.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models
from antlm_jax.config import Optimizer
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning.task import Head
from antlm_jax.masks import AttentionMask
from antlm_jax.settings import setting
from antlm_jax.training import optim

ATTENTIONS = ("bidirectional", "causal")
DECAYS = {  # how a rate falls from 1 to 0, by the share of its way in [0, 1]
  "linear": lambda t: 1 - t,
  "cosine": lambda t: (1 + np.cos(np.pi * t)) / 2,
}
WEIGHTS = ("float32", "bfloat16")
_ADAMW = ("b1", "b2", "eps", "weight_decay", "decay_scope", "clip")
_HEAD = "task_head/"  # stands before the names of the head's parameters


@dataclasses.dataclass(frozen=True)
class Settings:
  """How runs are trained; the defaults are those of BabyLM's 2024 pipeline.

  With `weights="bfloat16"` the runs' parameters, their gradients and AdamW's
  moments are bfloat16, without a float32 copy, as in the code of arXiv
  2507.00994. An update of less than some 1/500 of a weight is then lost, and so
  is what `b2` takes of a moment where it is over .996. What is computed in is
  the model's own.
  """

  batch_size: int = setting(64, "examples in a step", least=1)
  rows_at_once: int = setting(
    0, "examples that are in memory together; 0 for all of a step", least=0
  )
  epochs: int = setting(10, "epochs, at most", least=1)
  steps: int = setting(
    0, "of a run, evaluated at their end alone; 0 for epochs", least=0
  )
  patience: int = setting(
    3, "epochs without a better score; 0 for all epochs", least=0
  )
  threshold: float = setting(
    0.001, "the gain, of scores up to 1, from which one is better", least=0
  )
  drop_last: bool = setting(
    False,
    "leave out, in each epoch, what does not fill a batch",
    action=argparse.BooleanOptionalAction,  # a preset may turn it on
  )
  max_length: int = setting(128, "tokens of a row, at most", least=8)
  attention: str = setting(
    "bidirectional", "which tokens of its row a token sees", choices=ATTENTIONS
  )
  warmup: float = setting(
    0.0, "share of the steps in which the rate rises", least=0, under=1
  )
  decay: str = setting(
    "linear", "how it falls over the rest", choices=tuple(DECAYS)
  )
  floor: float = setting(
    0.0, "the share of it that it falls to", least=0, most=1
  )
  b1: float = setting(0.9, "AdamW's", least=0, under=1)
  b2: float = setting(0.999, "AdamW's", least=0, under=1)
  eps: float = setting(1e-8, "AdamW's", least=0)
  weight_decay: float = setting(0.0, "AdamW's", least=0)
  decay_scope: str = setting(
    "matrices",
    "what decays: matrices is all but norms and biases",
    choices=("all", "matrices"),
  )
  clip: float = setting(
    1.0, "largest gradient norm; 0 for no clipping", least=0
  )
  encoder_dropout: float | None = setting(
    None,
    "of states and attention while it trains; as pretrained by default",
    least=0,
    under=1,
  )
  weights: str = setting(
    "float32", "what parameters and AdamW's state are kept in", choices=WEIGHTS
  )

  @property
  def causal(self) -> bool:
    """Whether a token sees those before it alone."""
    return self.attention == "causal"


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
      decodes, `[runs, B, ...]`, and whether there is a NaN behind it,
      `[runs, B]`.
    trained: Names of the model's parameters that are trained: all but those of
      pretraining's head. The others are `frozen`: they are not copied.
  """

  init: Callable
  step: Callable
  predict: Callable
  trained: frozenset[str]


def programs(config, head: Head, settings: Settings) -> Programs:
  """Returns the functions of many runs; tasks of equal heads share them.

  The config is the encoder's.
  """
  dropped = settings.encoder_dropout
  if dropped is not None:
    config = dataclasses.replace(
      config, dropout=dropped, attention_dropout=dropped
    )
  adamw = Optimizer("adamw", **{n: getattr(settings, n) for n in _ADAMW})
  causal, at_once = settings.causal, settings.rows_at_once
  return _programs(config, head, causal, adamw, at_once, settings.weights)


@functools.lru_cache(maxsize=4)
def _programs(
  config,
  head: Head,
  causal: bool,
  adamw: Optimizer,
  rows_at_once: int,
  weights: str,
) -> Programs:
  """Makes the functions of one run, and maps them over runs."""
  model = models.from_config(config)
  trained = frozenset(n for n in model.shapes if not n.startswith("head/"))
  declared = head.parameters(config.width).items()
  axes = joined(
    {name: model.axes[name] for name in trained},
    {name: param.axes for name, param in declared},
  )
  optimizer = optim.make(adamw, axes)
  compute = outputs(model, head, causal)

  def init(encoder, seed):
    drawn = head.init(jax.random.key(seed), config.width)
    params = joined(encoder, drawn)
    params = jax.tree.map(lambda p: p.astype(weights), params)
    return State(params, optimizer.init(params))

  def step(state, frozen, batch, rate, seed, count):
    # Of the seed and the step alone: no run knows which others are beside it.
    key = jax.random.fold_in(jax.random.key(seed), count)

    def loss_of(params):
      args = frozen, batch.tokens, batch.lengths, key
      out = chunked(compute, rows_at_once)(params, *args)
      return head.loss(out, batch.labels, batch.weights)

    value, grads = jax.value_and_grad(loss_of)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    # Subtracted in float32, as of the rate, and rounded to what is kept.
    params = jax.tree.map(
      lambda p, u: (p - rate * u).astype(p.dtype), state.params, updates
    )
    return State(params, opt_state), value

  def predict(params, frozen, tokens, lengths):
    out = compute(params, frozen, tokens, lengths)
    # Before they are reduced: the largest of NaNs is a class like any other.
    is_nan = [
      jnp.isnan(x).reshape(len(x), -1).any(1) for x in jax.tree.leaves(out)
    ]
    return head.reduce(out), jnp.stack(is_nan).any(0)

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


def chunked(compute: Callable, size: int) -> Callable:
  """Computes `outputs`' function for so many rows at a time; 0 for all.

  What is computed is the same: a row's outputs depend on no other row. The
  backward pass computes each chunk again, so that no more than a chunk and all
  outputs are in memory (gradient caching, arXiv 2101.06983).
  """

  def each(params, frozen, tokens, lengths, dropout_key):
    rows = len(tokens)
    if not 0 < size < rows:
      return compute(params, frozen, tokens, lengths, dropout_key)
    if rows % size:
      raise UserError(
        f"--rows_at_once={size} does not divide --batch_size={rows}"
      )
    count = rows // size

    def one(part):
      return compute(params, frozen, *part)

    parts = (
      tokens.reshape(count, size, *tokens.shape[1:]),
      lengths.reshape(count, size, *lengths.shape[1:]),
      jax.random.split(dropout_key, count),
    )
    out = jax.lax.map(jax.checkpoint(one), parts)
    return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), out)

  return each


def split(params: Mapping[str, Any]) -> tuple[dict, dict]:
  """Takes a run's parameters apart: the encoder's, and the head's."""
  encoder = {n: p for n, p in params.items() if not n.startswith(_HEAD)}
  head = {n: p for n, p in params.items() if n.startswith(_HEAD)}
  return encoder, {n.removeprefix(_HEAD): p for n, p in head.items()}


def joined(encoder: Mapping[str, Any], head: Mapping[str, Any]) -> dict:
  """Undoes `split`."""
  return {**encoder, **{_HEAD + name: p for name, p in head.items()}}


def shares(settings: Settings, steps: int) -> np.ndarray:
  """Returns the share of the peak rate at each step, float32 `[steps]`.

  As in transformers and in BabyLM's pipelines a step has the rate at which it
  begins: the first of a warm-up has none, and the last one is above the floor.
  """
  warmup, step = int(settings.warmup * steps), np.arange(steps)
  fallen = DECAYS[settings.decay]((step - warmup) / (steps - warmup))
  down = settings.floor + (1 - settings.floor) * fallen
  up = step / max(1, warmup)
  return np.where(step < warmup, up, down).astype(np.float32)
