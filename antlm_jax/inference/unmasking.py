"""Fills all masks of a text together: sampling of masked diffusion.

Each step encodes the whole text, draws a token for each mask and keeps a few of
them. Later steps see the kept tokens. A text may be filled in blocks, from left
to right; the steps of a block share its masks.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models, settings
from antlm_jax.data.tokenizer import MASK
from antlm_jax.errors import UserError
from antlm_jax.inference import filling, framing, programs
from antlm_jax.inference.framing import TextModel
from antlm_jax.inference.generation import Sampling, draw
from antlm_jax.masks import AttentionMask
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True)
class Unmasking(Sampling):
  """How the masks of a text are filled."""

  steps: int = setting(
    16, "Number of steps for each block; 0 for one token a step", least=0
  )
  order: str = setting(
    "confidence",
    "Masks that a step fills: those with the likeliest tokens (MaskGIT, LLaDA),"
    " the same number at random, or each by a coin (MDLM)",
    choices=("confidence", "random", "ancestral"),
  )
  block_length: int = setting(
    0,
    "Number of tokens in a block, filled from left to right; 0 for the blocks"
    " of training, or the whole text",
    least=0,
  )


def unmask(
  loaded: TextModel, text: str | Sequence[str], **unmasking
) -> list[str]:
  """Fills the masks of one or more texts in few steps.

  Each mask sees the masks filled before; `fill_mask` predicts each on its own.
  A text without masks is a prompt: `tokens` masks follow it. The model sees
  that the text ends there, as a document does, and the end-of-text token may
  end it earlier. No other special token is drawn, unless the model is imported.
  What is drawn for a text does not depend on the other texts.

  Args:
    loaded: A model trained with bidirectional attention, whole or in blocks.
    text: One text or several; each `<mask>` is one token.
    **unmasking: Fields of `Unmasking`: those of `generate`, `steps=16`,
      `order="confidence"` and `block_length=0`.

  Returns:
    `count` texts for each text, in the order of the texts.

  Raises:
    UserError: for a text that is too long, a model without bidirectional
      training, or a setting out of range.
  """
  *_, texts = stream(loaded, text, every=settings.LARGEST, **unmasking)
  return texts


def stream(
  loaded: TextModel, text: str | Sequence[str], every: int = 1, **unmasking
) -> Iterator[list[str]]:
  """Yields the texts of `unmask` after each `every` steps.

  The arguments and errors are those of `unmask`. A mask that is not filled yet
  is `<mask>`.
  """
  how = Unmasking(**unmasking)
  settings.check(how)
  texts = [text] if isinstance(text, str) else text
  if not texts:
    raise UserError("there is no text to fill")
  seen = _block_length(loaded) or loaded.model.config.max_seq_len
  block_length = how.block_length or seen
  canvas, state = _lay_out(loaded, texts, how)
  blocks = np.arange(canvas.masked.shape[1]) // block_length
  in_blocks = (canvas.masked[:, blocks == block] for block in set(blocks))
  most = max(masked.sum(axis=1).max() for masked in in_blocks)
  config, params = programs.unrolled(loaded)
  most = programs.round_up(most, len(blocks))
  drawn, shift = (how.temperature, how.top_k, how.top_p), loaded.mask_shift
  fill = programs.compiled(_fill, config, drawn, how.order, shift, most)
  # Tokens that are not drawn: where a text may end early, and where not.
  never, ends = framing.never_drawn(loaded), framing.ends(loaded)
  never[framing.mask_id(loaded)] = True
  banned = np.stack([never, never | np.isin(np.arange(len(never)), ends)])
  numbers = seen, block_length, how.steps, every, how.seed
  while np.any(state.masked):
    state = jax.device_get(fill(params, canvas, state, banned, *numbers))
    yield [_decode(loaded, canvas, state, n) for n in range(len(state.tokens))]


class _Canvas(NamedTuple):
  """Rows before any mask is filled."""

  masked: np.ndarray  # bool `[B, T]`
  length: np.ndarray  # number of tokens, int32 `[B]`
  whole: np.ndarray  # 1 if the text may not end early, else 0, int32 `[B]`
  number: np.ndarray  # index among the rows of the same text, int32 `[B]`


class _State(NamedTuple):
  """Rows while their masks are filled."""

  tokens: jax.Array  # int32 `[B, T]`
  masked: jax.Array  # tokens that are not filled yet, bool `[B, T]`
  step: jax.Array  # number of steps done, int32
  block: jax.Array  # block of the last step, int32 `[B]`
  left: jax.Array  # number of steps left for that block, int32 `[B]`


def _block_length(loaded: TextModel) -> int:
  """Returns the tokens in a block of bidirectional training, or 0."""
  found = [o for o in loaded.config.trained if not o.left_to_right]
  if not found:
    raise UserError(
      "the model was trained left to right alone (curriculum="
      f"{loaded.config.curriculum}): use --mode=causal"
    )
  return next((o.block_length for o in found if o.attention == "block"), 0)


def _lay_out(loaded: TextModel, texts: Sequence[str], how: Unmasking):
  """Encodes texts into `count` rows each."""
  encoded = [
    filling.encode(loaded, text, 0 if MASK in text else how.tokens)
    for text in texts
  ]
  for text, tokens in zip(texts, encoded, strict=True):
    framing.check_length(loaded, len(tokens), text)
    filling.predicted_at(loaded, tokens)
  length = np.array([len(tokens) for tokens in encoded], np.int32)
  size = programs.round_up(length.max(), loaded.model.config.max_seq_len)
  tokens = np.stack([np.pad(t, (0, size - len(t))) for t in encoded])
  masked = tokens == framing.mask_id(loaded)
  masked &= np.arange(size) < length[:, None]
  whole = np.array([MASK in text for text in texts], np.int32)
  tokens, masked, length, whole = (
    np.repeat(x, how.count, axis=0) for x in (tokens, masked, length, whole)
  )
  number = np.tile(np.arange(how.count, dtype=np.int32), len(texts))
  zeros = np.zeros(len(number), np.int32)
  state = _State(tokens, masked, np.int32(0), zeros - 1, zeros)
  return _Canvas(masked, length, whole, number), state


def _decode(loaded: TextModel, canvas: _Canvas, state: _State, n: int) -> str:
  """Decodes row n up to its end, with `<mask>` for each mask."""
  tokens, masked = state.tokens[n], state.masked[n]
  kept = masked | ~loaded.tokenizer.special[tokens]
  kept[canvas.length[n] :] = False
  drawn = canvas.masked[n] & ~masked
  (ends,) = np.nonzero(drawn & np.isin(tokens, framing.ends(loaded)))
  if len(ends):
    kept[ends[0] :] = False
  return loaded.tokenizer.decode(tokens[kept], skip_special=False)


# ------------------------------------------------------------- on the device


def _fill(
  model: models.Model,
  drawn: tuple[float, int, float],  # temperature, top_k and top_p
  order: str,
  shift: int,  # distance from a mask back to its prediction
  most: int,  # largest number M of masks in a row's block
  params,
  canvas: _Canvas,
  state: _State,
  banned,  # tokens that are not drawn, by `canvas.whole`, bool `[2, V]`
  seen,  # number of tokens in a block of attention
  filled,  # number of tokens in a block that is filled
  steps,  # number of steps for each block; 0 for one token a step
  every,  # largest number of steps of this call
  seed,
) -> _State:
  """Fills masks of rows from `_lay_out` or an earlier call."""
  stop = state.step + every
  # Draws depend on the row's number, the step and the place, not on other rows.
  fold_in = jax.random.fold_in
  keys = jax.vmap(fold_in, (None, 0))(jax.random.key(seed), canvas.number)
  places = jnp.arange(canvas.masked.shape[1])
  blocks = places // filled
  k_end = jnp.minimum(canvas.length[:, None], (places // seen + 1) * seen)
  rows = jnp.arange(len(canvas.number))[:, None]
  logits_of, whole = model.logits_of(params), canvas.whole

  def step(state):
    # The block of each row is the first one with a mask.
    block = jnp.min(jnp.where(state.masked, blocks, len(places)), axis=1)
    unfilled = state.masked & (blocks == block[:, None])
    first = jnp.where(steps > 0, steps, jnp.sum(unfilled, axis=1))
    left = jnp.where(block == state.block, state.left, first)
    # The places of its masks come first, of M in all.
    at = jnp.argsort(~unfilled, axis=1, stable=True)[:, :most]
    here = jnp.take_along_axis(unfilled, at, axis=1)
    mask = AttentionMask(k_end=k_end)
    hidden = model.encode(params, state.tokens, places[None], mask)
    now = jax.vmap(fold_in, (0, None))(keys, state.step)
    own = jax.vmap(jax.vmap(fold_in, (None, 0)))(now, at)
    hidden = hidden[rows, at - shift]
    new, sure, noise = _draw(logits_of, drawn, hidden, own, banned, whole)
    chosen = _chosen(order, here, sure, noise, left)
    tokens = jnp.where(chosen, new, state.tokens[rows, at])
    return _State(
      tokens=state.tokens.at[rows, at].set(tokens),
      masked=state.masked.at[rows, at].min(~chosen),
      step=state.step + 1,
      block=block,
      left=left - 1,
    )

  def unfinished(state):
    return (state.step < stop) & jnp.any(state.masked)

  return jax.lax.while_loop(unfinished, step, state)


def _draw(logits_of, drawn, hidden, keys, banned, whole):
  """Draws tokens; returns them, their probabilities and noise, `[B, M]`."""

  def one(state):
    hidden, key, whole = state
    logits = jnp.where(banned[whole], -jnp.inf, logits_of(hidden))
    token_key, own_key = jax.random.split(key)
    token = draw(token_key, logits, *drawn)
    return token, jax.nn.softmax(logits)[token], jax.random.uniform(own_key)

  states = hidden, keys, jnp.broadcast_to(whole[:, None], keys.shape)
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
  out = jax.lax.map(one, flat, batch_size=programs.LOGIT_ROWS)
  return [x.reshape(keys.shape) for x in out]


def _chosen(order: str, here, sure, noise, left) -> jax.Array:
  """Chooses the masks that a step fills; `left` steps fill them all."""
  left = jnp.maximum(left, 1)[:, None]
  if order == "ancestral":
    return here & (noise * left < 1)
  score = jnp.where(here, sure if order == "confidence" else noise, -1)
  rank = jnp.argsort(jnp.argsort(-score, axis=1, stable=True), axis=1)
  return rank < -(-jnp.sum(here, axis=1, keepdims=True) // left)
