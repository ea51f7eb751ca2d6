"""Continuing prompts, left to right.

Every row has S slots: its prompt, then what is drawn, from slot 0 on, however
long the prompts beside it are. Prompts are encoded a piece at a time, and then
each step encodes the row's last token, with what is kept of those before it,
and draws the next. So one program serves all prompts and lengths that S slots
hold.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models, settings
from antlm_jax.attention import Cache
from antlm_jax.data.tokenizer import MASK
from antlm_jax.errors import UserError
from antlm_jax.inference import filling, framing, programs
from antlm_jax.inference.framing import TextModel
from antlm_jax.models.layers import likeliest
from antlm_jax.settings import setting

_PIECE = 16  # tokens of a prompt that are encoded at once; it divides the slots


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


def generate(
  loaded: TextModel, prompt: str | Sequence[str], **sampling
) -> list[str]:
  """Continues a prompt, or several at once.

  A text ends with the end-of-text token, after so many tokens more, or where
  the model's max_seq_len is reached. No other special token is ever drawn, but
  by an imported model.
  What is drawn after a prompt does not depend on the prompts beside it.

  Args:
    loaded: The model.
    prompt: One or more; may be empty where documents began with a special
      token.
    **sampling: The fields of `Sampling`: `tokens=50`, `temperature=0.8`,
      `top_k=0`, `top_p=1.0`, `seed=0`, `count=1`.

  Returns:
    `count` texts of each prompt, one prompt after another, each with the
    prompt.

  Raises:
    UserError: for a prompt that is too long or that nothing can continue, or
      a setting out of range.
  """
  how = Sampling(**sampling)
  (texts,) = stream(loaded, prompt, how.tokens, **sampling)
  return texts


def stream(
  loaded: TextModel, prompt: str | Sequence[str], every: int = 8, **sampling
) -> Iterator[list[str]]:
  """Yields what `generate` returns as it grows, after every so many tokens.

  The arguments and errors are those of `generate`.
  """
  how = Sampling(**sampling)
  settings.check(how)
  prompts = [prompt] if isinstance(prompt, str) else prompt
  if not prompts:
    raise UserError("there is no prompt to continue")
  starts = [encode(loaded, one) for one in prompts]
  config, params = programs.unrolled(loaded)
  rows = _lay_out(starts, how.tokens, config.max_seq_len)
  begin = programs.compiled(_begin, config, how.count)
  rows, numbers = begin(params, *rows)
  drawn = how.temperature, how.top_k, how.top_p
  go_on = programs.compiled(_continue, config, drawn)
  endings = framing.never_drawn(loaded), framing.ends(loaded)
  growing = True
  while growing:
    rows = go_on(params, rows, numbers, every, *endings, how.seed)
    tokens, length, stop = jax.device_get(rows[:3])
    growing = np.any(length < stop)
    yield [
      loaded.tokenizer.decode(row[:end])
      for row, end in zip(tokens, length, strict=True)
    ]


def _lay_out(starts: Sequence[np.ndarray], tokens: int, longest: int):
  """Lays encoded prompts out, to be continued by so many tokens.

  Returns:
    What `_Rows` begins with.
  """
  length = np.array([len(start) for start in starts], np.int32)
  stop = np.minimum(length + tokens, longest).astype(np.int32)
  # There may be more slots than the model has places: nothing comes there.
  slots = programs.round_up(stop.max())
  rows = np.zeros((len(starts), slots), np.int32)
  for row, start in zip(rows, starts, strict=True):
    row[: len(start)] = start
  return rows, length, stop


def encode(loaded: TextModel, prompt: str) -> np.ndarray:
  """Encodes a prompt after what stood before a document, int32 `[n]`.

  It may hold `<mask>`, as fill-in-the-middle has it.

  Raises:
    UserError: if it is too long to be continued, or nothing.
  """
  before, after = loaded.frame
  if MASK in prompt and loaded.tokenizer.mask_id is not None:
    start = filling.encode(loaded, prompt)
    start = start[: len(start) - len(after)]
  else:
    start = np.concatenate([before, loaded.tokenizer.encode(prompt)])
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
  """Draws tokens `[...]` from logits `[..., V]`, as `Sampling` says."""
  if temperature == 0:
    return likeliest(logits)
  logits = logits / temperature
  if not top_k and top_p == 1:
    return likeliest(logits + jax.random.gumbel(key, logits.shape))
  order = jnp.argsort(-logits, axis=-1)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  likely = jax.nn.softmax(ranked)
  # A token stays if those before it are not yet likely enough together: so the
  # likeliest one always does.
  kept = jnp.cumsum(likely, axis=-1) - likely < top_p
  if top_k:
    kept &= jnp.arange(logits.shape[-1]) < top_k
  rank = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))
  return jnp.take_along_axis(order, rank[..., None], axis=-1)[..., 0]


# ------------------------------------------------------------- on the device


class _Rows(NamedTuple):
  """Texts as they grow."""

  tokens: jax.Array  # int32 `[B, S]`
  length: jax.Array  # how many of them there are, int32 `[B]`
  stop: jax.Array  # how many there may be, int32 `[B]`
  cache: Cache  # of all but the last of them


def _begin(model: models.Model, count: int, params, tokens, length, stop):
  """Encodes prompts, each to be continued `count` times.

  Returns:
    Their rows, and each one's number among those of its prompt, `[B]`.
  """

  def piece(i, cache):
    part = jax.lax.dynamic_slice_in_dim(tokens, i * _PIECE, _PIECE, axis=1)
    # What a shorter prompt keeps of zeros is not seen before it is replaced.
    start = jnp.full_like(length, i * _PIECE)
    return model.extend(params, part, start, cache)[1]

  pieces = -(-jnp.max(length) // _PIECE)
  cache = jax.lax.fori_loop(0, pieces, piece, model.cache(*tokens.shape))
  rows = jax.tree.map(
    lambda x: jnp.repeat(x, count, axis=0), _Rows(tokens, length, stop, cache)
  )
  return rows, jnp.tile(jnp.arange(count), len(tokens))


def _continue(
  model: models.Model, drawn, params, rows, numbers, steps, banned, ends, seed
) -> _Rows:
  """Continues rows by at most so many tokens each.

  Args:
    model: The encoder.
    drawn: What `draw` takes: temperature, top_k, top_p.
    params: Its parameters.
    rows: What `_begin` made, or an earlier call.
    numbers: Of each row among those of its prompt, int32 `[B]`.
    steps: So many.
    banned: Which tokens are not drawn, bool `[V]`.
    ends: The tokens that end a text, int32 `[n]`.
    seed: Of what is drawn.
  """
  every = jnp.arange(len(numbers))
  # A text's draws are by its number and the place: not by its neighbours.
  keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
  # Once: a tied head is the transposed table, a copy of it on a CPU.
  logits_of = model.logits_of(params)

  def unfinished(carry):
    done, rows = carry
    return (done < steps) & jnp.any(rows.length < rows.stop)

  def step(carry):
    done, (tokens, length, stop, cache) = carry
    last = tokens[every, length - 1][:, None]
    hidden, cache = model.extend(params, last, length - 1, cache)
    logits = jnp.where(banned, -jnp.inf, logits_of(hidden[:, 0]))
    here = jax.vmap(jax.random.fold_in)(keys, length)
    token = jax.vmap(lambda key, row: draw(key, row, *drawn))(here, logits)
    # What is written behind the end of a text is not read.
    tokens = tokens.at[every, length].set(token)
    ended = (length >= stop) | jnp.isin(token, ends)
    stop = jnp.where(ended, length, stop)
    length = jnp.where(ended, length, length + 1)
    return done + 1, _Rows(tokens, length, stop, cache)

  return jax.lax.while_loop(unfinished, step, (0, rows))[1]
