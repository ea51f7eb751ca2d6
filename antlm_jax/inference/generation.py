"""Continuing a prompt, left to right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models, settings
from antlm_jax.errors import UserError
from antlm_jax.inference import framing, programs
from antlm_jax.inference.framing import TextModel
from antlm_jax.masks import CAUSAL
from antlm_jax.settings import setting

_LENGTH_STEP = 64  # row lengths are multiples of it


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How a prompt is continued."""

  tokens: int = setting(50, "tokens to add, at most", least=1)
  temperature: float = setting(
    0.8, "divides the logits; 0 takes the likeliest token", least=0
  )
  top_k: int = setting(
    0, "draws from so many of the likeliest tokens; 0 for all", least=0
  )
  top_p: float = setting(
    1.0,
    "draws from the likeliest tokens that are this likely together (nucleus"
    " sampling, arXiv 1904.09751)",
    over=0,
    most=1,
  )
  seed: int = setting(0, "equal seeds give equal texts")
  count: int = setting(1, "how many continuations", least=1, most=4096)


def generate(loaded: TextModel, prompt: str, **sampling) -> list[str]:
  """Continues a prompt.

  A text ends with the end-of-text token, after so many tokens more, or where
  the model's max_seq_len is reached. No other special token is ever drawn.

  Args:
    loaded: The model.
    prompt: May be empty where documents began with a special token.
    **sampling: The fields of `Sampling`: `tokens=50`, `temperature=0.8`,
      `top_k=0`, `top_p=1.0`, `seed=0`, `count=1`.

  Returns:
    `count` texts, each with the prompt.

  Raises:
    UserError: for a prompt that is too long or that nothing can continue, or
      a setting out of range.
  """
  how = Sampling(**sampling)
  settings.check(how)
  start = encode(loaded, prompt)
  config = loaded.model.config
  stop = min(len(start) + how.tokens, config.max_seq_len)
  length = framing.round_up(stop, _LENGTH_STEP, config.max_seq_len)
  rows = np.zeros((how.count, length), np.int32)
  rows[:, : len(start)] = start
  eos = loaded.tokenizer.eos_id
  banned = loaded.tokenizer.special.copy()
  if eos is not None:
    banned[eos] = False
  drawn = how.temperature, how.top_k, how.top_p
  # A row is filled up in place; its unused end is never decoded.
  rows, ends = programs.compiled(_continue, config, drawn)(
    loaded.params,
    rows,
    len(start),
    stop,
    banned,
    -1 if eos is None else eos,  # no token: nothing ends a text early
    jax.random.key(how.seed),
  )
  return [
    loaded.tokenizer.decode(row[:end])
    for row, end in zip(np.asarray(rows), np.asarray(ends), strict=True)
  ]


def encode(loaded: TextModel, prompt: str) -> np.ndarray:
  """Encodes a prompt after what stood before a document, int32 `[n]`.

  Raises:
    UserError: if it is too long to be continued, or nothing.
  """
  ids = loaded.tokenizer.encode(prompt)
  start = np.concatenate([framing.frame(loaded)[0], ids])
  framing.check_length(loaded, len(start) + 1, prompt)
  if not len(start):
    raise UserError(
      "the prompt is empty, and this model saw no token before a document:"
      " give a prompt"
    )
  return start


def draw(
  key: jax.Array,
  logits: jax.Array,
  temperature: float,
  top_k: int = 0,
  top_p: float = 1.0,
) -> jax.Array:
  """Draws tokens `[B]` from logits `[B, V]`, by the settings of `Sampling`."""
  if temperature == 0:
    return jnp.argmax(logits, axis=-1)
  logits = logits / temperature
  order = jnp.argsort(-logits, axis=-1)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  likely = jax.nn.softmax(ranked)
  # A token stays if those before it are not yet likely enough together: so the
  # likeliest one always does.
  kept = jnp.cumsum(likely, axis=-1) - likely < top_p
  if top_k:
    kept &= jnp.arange(logits.shape[-1]) < top_k
  rank = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))
  return jnp.take_along_axis(order, rank[:, None], axis=-1)[:, 0]


def _continue(
  model: models.Model, drawn, params, rows, start, stop, banned, eos, key
):
  """Continues rows `[B, T]` of `start` tokens up to `stop`.

  Every token is computed from the whole row, without a cache of keys and
  values, for simplicity.

  Returns:
    The rows, and where each ends, `[B]`.
  """
  positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)

  def unfinished(carry):
    _, ends, at = carry
    return (at < stop) & jnp.any(ends == stop)

  def step(carry):
    rows, ends, at = carry
    # Causal attention: the zeros from `at` on are not seen.
    hidden = model.encode(params, rows, positions, CAUSAL)
    logits = model.logits(params, hidden[:, at - 1])
    logits = jnp.where(banned, -jnp.inf, logits)
    # Keys by position, so that a text does not depend on where others end.
    step_key = jax.random.fold_in(key, at)
    token = draw(step_key, logits, *drawn)
    ends = jnp.where((ends == stop) & (token == eos), at, ends)
    return rows.at[:, at].set(token), ends, at + 1

  ends = jnp.full(len(rows), stop)
  return jax.lax.while_loop(unfinished, step, (rows, ends, start))[:2]
