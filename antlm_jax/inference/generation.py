"""Continues prompts from left to right.

Each row has S slots for its prompt and its new tokens. First, prompts are
encoded in pieces. Then each step encodes the last token of each row, using
cached keys and values of earlier tokens, and draws the next token. All prompts
that fit in S slots share a program.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models, settings
from antlm_jax.attention import Cache
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.inference import framing, inputs, programs
from antlm_jax.inference.framing import TextModel
from antlm_jax.inference.model import ModelOrPath, open_model
from antlm_jax.models.layers import likeliest
from antlm_jax.settings import PythonOnly, argument

_PIECE = 16  # number of prompt tokens encoded at once; it divides S
_HALF = "\ufffd"  # of the bytes of a character that is not whole
# Under it, float32 overflows, and the likeliest token is certain anyway.
_COLDEST = 1e-30
_WATCHED_STEPS = 8  # number of tokens between two calls of `watch`


# Arguments of both `generate` and `fill`.
Temperature = Annotated[float, argument(least=0)]
TopK = Annotated[int, argument(least=0)]
TopP = Annotated[float, argument(over=0, most=1)]
Count = Annotated[int, argument(least=1, most=4096)]


@settings.checked
def generate(
  model: ModelOrPath[TextModel],
  prompt: Annotated[str | Iterable[str], argument(may_be_empty=True)],
  *,
  tokens: Annotated[int, argument(least=1)] = 50,
  temperature: Temperature = 0.8,
  top_k: TopK = 0,
  top_p: TopP = 1.0,
  seed: int = 0,
  count: Count = 1,
  step: int | None = None,
  watch: PythonOnly[Callable[[list[str]], object] | None] = None,
) -> list[str]:
  """Continues one or more prompts from left to right.

  A text ends with the end-of-text token, after `tokens` tokens, or at the
  model's `max_seq_len`. Only imported models draw other special tokens. The
  texts of a prompt do not depend on the other prompts.

  Args:
    model: Model, or path to its run or checkpoint.
    prompt: Text to continue, or texts. It may be empty if documents began with
      a special token in training. It may have `<mask>`.
    tokens: Largest number of tokens to add.
    temperature: Divisor of the logits; 0 takes the likeliest token.
    top_k: Number of likeliest tokens to draw from; 0 for all.
    top_p: Total probability of the likeliest tokens to draw from (nucleus
      sampling, arXiv 1904.09751).
    seed: Random seed; equal seeds give equal texts.
    count: Number of texts for each prompt.
    step: Step of the run; by default the newest.
    watch: Function to call with the texts so far, after every 8 tokens and at
      the end.

  Returns:
    `count` texts for each prompt, in the order of the prompts. A text begins
    with its prompt, as the tokenizer decodes it.

  Raises:
    UserError: A prompt is too long or cannot be continued, the model has no
      causal training, or an argument is out of range.
  """
  loaded = open_model(model, step)
  if not any(o.left_to_right for o in loaded.config.trained):
    raise UserError(
      "the model was never trained left to right (curriculum="
      f"{loaded.config.curriculum}): use fill"
    )
  prompts = inputs.as_texts(prompt, "prompt")
  if not prompts:
    raise UserError("there is no prompt to continue")
  starts = [encode_prompt(loaded, text) for text in prompts]
  config, params = programs.unrolled(loaded)
  length = np.array([len(start) for start in starts], np.int32)
  most = min(tokens, config.max_seq_len)
  stop = np.minimum(length + most, config.max_seq_len).astype(np.int32)
  # Slots beyond the model's positions stay empty.
  slots = programs.round_up(stop.max())
  padded = np.stack([np.pad(s, (0, slots - len(s))) for s in starts])
  rows = programs.compiled(_begin_texts, config, count)(
    params, padded, length, stop
  )
  add_tokens = programs.compiled(_continue, config, (temperature, top_k, top_p))
  endings = framing.never_drawn(loaded), framing.end_tokens(loaded)
  steps = tokens if watch is None else _WATCHED_STEPS
  growing = True
  while growing:
    rows = add_tokens(params, rows, steps, *endings, seed, count)
    token_ids, length, stop = jax.device_get(rows[:3])
    growing = bool(np.any(length < stop))
    begins = np.repeat([len(start) for start in starts], count)
    texts = [
      _decode_characters(loaded.tokenizer, row[:end], begin)
      for row, end, begin in zip(token_ids, length, begins, strict=True)
    ]
    if watch is not None:
      watch(texts)
  return texts


def encode_prompt(loaded: TextModel, prompt: str) -> np.ndarray:
  """Encodes a prompt after the special tokens before a document, int32 `[n]`.

  Raises a UserError if the prompt is too long to be continued, or has no token.
  """
  framed = framing.encode_framed(loaded, prompt)
  start = framed[: len(framed) - len(loaded.frame[1])]
  framing.check_length(loaded, len(start) + 1, prompt)
  if not len(start):
    raise UserError(
      "the prompt is empty, but in training no token was before a document:"
      " give a prompt"
    )
  return start


def _decode_characters(tokenizer: Tokenizer, ids, begin: int) -> str:
  """Decodes tokens, but for the bytes of a last character that is not whole.

  Tokens before `begin` are a prompt, which is decoded whole.
  """
  for end in range(len(ids), max(begin, len(ids) - 3) - 1, -1):
    text = tokenizer.decode(ids[:end])
    if not text.endswith(_HALF):
      return text
  return tokenizer.decode(ids)


def draw_tokens(
  key: jax.Array,
  logits: jax.Array,
  temperature: float,
  top_k: int = 0,
  top_p: float = 1.0,
) -> jax.Array:
  """Draws tokens `[...]` from logits `[..., V]`; see `generate`."""
  if temperature < _COLDEST:
    return likeliest(logits)
  logits = logits / temperature
  if not top_k and top_p == 1:
    return likeliest(logits + jax.random.gumbel(key, logits.shape))
  order = jnp.argsort(-logits, axis=-1)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  likely = jax.nn.softmax(ranked)
  # Keep a token if the total probability of likelier tokens is under top_p. So
  # the likeliest token is always kept.
  allowed = jnp.cumsum(likely, axis=-1) - likely < top_p
  if top_k:
    allowed &= jnp.arange(logits.shape[-1]) < top_k
  rank = jax.random.categorical(key, jnp.where(allowed, ranked, -jnp.inf))
  return jnp.take_along_axis(order, rank[..., None], axis=-1)[..., 0]


# ------------------------------------------------------------- on the device


class _GrowingRows(NamedTuple):
  """Texts while they grow."""

  tokens: jax.Array  # int32 `[B, S]`
  length: jax.Array  # number of tokens, int32 `[B]`
  stop: jax.Array  # largest number of tokens, int32 `[B]`
  cache: Cache  # cache of all tokens except the last


def _begin_texts(model: models.Model, count: int, params, tokens, length, stop):
  """Encodes prompts and returns `count` rows of each."""

  def piece(i, cache):
    part = jax.lax.dynamic_slice_in_dim(tokens, i * _PIECE, _PIECE, axis=1)
    # Slots after a shorter prompt are replaced before a token sees them.
    start = jnp.full_like(length, i * _PIECE)
    return model.extend(params, part, start, cache)[1]

  pieces = -(-jnp.max(length) // _PIECE)
  cache = jax.lax.fori_loop(0, pieces, piece, model.cache(*tokens.shape))
  rows = _GrowingRows(tokens, length, stop, cache)
  return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), rows)


def _continue(
  model: models.Model,
  sampling: tuple[float, int, float],  # temperature, top_k and top_p
  params,
  rows: _GrowingRows,
  steps,
  banned,  # tokens that are not drawn, bool `[V]`
  ends,  # tokens that end a text, int32 `[n]`
  seed,
  repeats,  # number of rows for each prompt
) -> _GrowingRows:
  """Adds up to `steps` tokens to rows of `_begin_texts` or an earlier call."""
  row_index = jnp.arange(len(rows.length))
  # Draws depend on the seed, the number of the row among its prompt's rows and
  # the slot, not on the other prompts.
  fold_in = jax.random.fold_in
  number = row_index % repeats
  keys = jax.vmap(fold_in, (None, 0))(jax.random.key(seed), number)
  # Build the head outside the loop, because a tied head copies the embeddings
  # on CPU.
  head = model.output_head(params)

  def unfinished(carry):
    done, rows = carry
    return (done < steps) & jnp.any(rows.length < rows.stop)

  def step(carry):
    done, (tokens, length, stop, cache) = carry
    last = tokens[row_index, length - 1][:, None]
    hidden, cache = model.extend(params, last, length - 1, cache)
    logits = jnp.where(banned, -jnp.inf, head.logits(hidden[:, 0]))
    slot_keys = jax.vmap(fold_in)(keys, length)
    token = jax.vmap(lambda key, row: draw_tokens(key, row, *sampling))(
      slot_keys, logits
    )
    # Nothing reads the slots after the end of a text.
    tokens = tokens.at[row_index, length].set(token)
    ended = (length >= stop) | jnp.isin(token, ends)
    stop = jnp.where(ended, length, stop)
    length = jnp.where(ended, length, length + 1)
    return done + 1, _GrowingRows(tokens, length, stop, cache)

  return jax.lax.while_loop(unfinished, step, (0, rows))[1]
