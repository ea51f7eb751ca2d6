"""Filling all masks of a text together: sampling of masked diffusion.

A row, the canvas, is a whole text with its frame, some of its tokens masked.
Each step predicts all of them by one pass over the canvas, and keeps what it
drew for a few; the next step sees these. Within a block of the canvas the steps
share its masks out, and blocks are filled from left to right.
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
from antlm_jax.objectives.objective import Objective
from antlm_jax.settings import setting

_NONE = np.iinfo(np.int32).max  # the block of a row that is filled


@dataclasses.dataclass(frozen=True)
class Unmasking(Sampling):
  """How the masks of a text are filled."""

  steps: int = setting(
    16, "steps of diffusion, for each block; 0 for a token a step", least=0
  )
  order: str = setting(
    "confidence",
    "which masks a step of diffusion fills: those it is surest of, as many in"
    " each step (MaskGIT, LLaDA); as many at random; or each by a coin (MDLM)",
    choices=("confidence", "random", "ancestral"),
  )
  block_length: int = setting(
    0,
    "fills the text in blocks of so many tokens, from left to right; 0 in those"
    " that it was trained in, or as a whole",
    least=0,
  )


def unmask(
  loaded: TextModel, text: str | Sequence[str], **unmasking
) -> list[str]:
  """Fills the masks of a text, or of several at once, in few steps.

  Masks are filled together, each seeing those filled before; `fill_mask`
  predicts each by itself. A model trained with attention in blocks fills one
  after another. Behind a text without masks come so many `tokens`, masked: the
  model sees that the text ends there, as a document does, and may end it before
  by the end-of-text token. No other special token is drawn, but by an imported
  model.
  What is drawn for a text does not depend on those beside it.

  Args:
    loaded: A model trained with attention both ways, of a text or its blocks.
    text: One or more; each `<mask>` stands for one token.
    **unmasking: The fields of `Unmasking`: those of `generate`, and
      `steps=16`, `order="confidence"`, `block_length=0`.

  Returns:
    `count` texts of each text, one after another.

  Raises:
    UserError: for a text that is too long, a model that cannot predict a mask
      from both sides, or a setting out of range.
  """
  *_, texts = stream(loaded, text, every=settings.LARGEST, **unmasking)
  return texts


def stream(
  loaded: TextModel, text: str | Sequence[str], every: int = 1, **unmasking
) -> Iterator[list[str]]:
  """Yields texts as `unmask` fills them, after every so many steps.

  The arguments and errors are those of `unmask`. What is not filled yet is
  `<mask>`.
  """
  how = Unmasking(**unmasking)
  settings.check(how)
  texts = [text] if isinstance(text, str) else text
  if not texts:
    raise UserError("there is no text to fill")
  rows = _lay_out(loaded, texts, how)
  config, params = programs.unrolled(loaded)
  static = _Static(
    (how.temperature, how.top_k, how.top_p),
    how.order,
    loaded.mask_shift,
    _most_masks(rows),
  )
  fill = programs.compiled(_fill, config, static)
  banned, canvas = _banned(loaded), rows.masked
  while np.any(rows.masked):
    rows = fill(params, rows, banned, how.steps, every, how.seed)
    rows = jax.device_get(rows)
    yield [
      _decode(loaded, row, drawn)
      for row, drawn in zip(map(_Rows, *rows), canvas, strict=True)
    ]


class _Rows(NamedTuple):
  """Texts as they are filled."""

  tokens: jax.Array  # int32 `[B, T]`
  masked: jax.Array  # which are not filled yet, bool `[B, T]`
  k_end: jax.Array  # one past the last that each sees, int32 `[B, T]`
  blocks: jax.Array  # which one each is in, int32 `[B, T]`
  whole: jax.Array  # whether the text may not end early, 0 or 1, `[B]`
  number: jax.Array  # among the rows of the same text, int32 `[B]`
  step: jax.Array  # how many there were, int32 `[B]`
  block: jax.Array  # which one the last of them was at, int32 `[B]`
  left: jax.Array  # how many are left for that block, int32 `[B]`


class _Static(NamedTuple):
  """What a program of filling depends on."""

  drawn: tuple[float, int, float]  # temperature, top_k, top_p
  order: str  # which masks a step fills
  shift: int  # how far before a mask it is predicted
  most: int  # masks of a row that a step looks at, M


def _lay_out(loaded: TextModel, texts: Sequence[str], how: Unmasking) -> _Rows:
  """Encodes texts, and lays each out `count` times."""
  objective = _both_sides(loaded)
  encoded = [
    filling.encode(loaded, text, 0 if MASK in text else how.tokens)
    for text in texts
  ]
  for text, tokens in zip(texts, encoded, strict=True):
    framing.check_length(loaded, len(tokens), text)
    filling.predicted_at(loaded, tokens)
  lengths = np.array([[len(tokens)] for tokens in encoded])
  longest = loaded.model.config.max_seq_len
  at = np.arange(programs.round_up(lengths.max(), longest))
  rows = np.zeros((len(texts), len(at)), np.int32)
  for row, tokens in zip(rows, encoded, strict=True):
    row[: len(tokens)] = tokens
  each = (
    rows,
    (rows == framing.mask_id(loaded)) & (at < lengths),
    *_blocks(objective, how.block_length, lengths, at),
    np.array([MASK in text for text in texts], np.int32),
  )
  each = [np.repeat(x, how.count, axis=0) for x in each]
  zeros = np.zeros(len(each[0]), np.int32)
  number = np.tile(np.arange(how.count, dtype=np.int32), len(texts))
  return _Rows(*each, number, zeros, zeros - 1, zeros)


def _both_sides(loaded: TextModel) -> Objective:
  """Returns the objective by which the model reads texts from both sides.

  That in blocks, if there is one.

  Raises:
    UserError: if it was trained with none.
  """
  found = [o for o in framing.trained(loaded.config) if not o.left_to_right]
  if not found:
    raise UserError(
      "the model was trained left to right alone (curriculum="
      f"{loaded.config.curriculum}): only --mode=causal is for it"
    )
  return max(found, key=lambda o: o.attention == "block")


def _blocks(objective: Objective, block_length: int, lengths, at):
  """Returns what tokens see, and the blocks to fill, int32 `[n, T]` both."""
  k_end = np.broadcast_to(lengths, (len(lengths), len(at)))
  if objective.attention == "block":
    own = objective.block_length
    k_end = np.minimum(k_end, at // own * own + own)
    block_length = block_length or own
  blocks = np.broadcast_to(at // (block_length or len(at)), k_end.shape)
  return k_end.astype(np.int32), blocks.astype(np.int32)


def _banned(loaded: TextModel) -> np.ndarray:
  """Returns which tokens are not drawn, bool `[2, V]`.

  First where a text may end, then where it may not.
  """
  never = framing.never_drawn(loaded)
  never[framing.mask_id(loaded)] = True
  return np.stack([never, never | _ends(loaded, np.arange(len(never)))])


def _ends(loaded: TextModel, tokens: np.ndarray) -> np.ndarray:
  return np.isin(tokens, framing.ends(loaded))


def _most_masks(rows: _Rows) -> int:
  """Returns how many masks a block has at most, rounded up."""
  masks = [
    np.sum(rows.masked & (rows.blocks == block), axis=1).max()
    for block in np.unique(rows.blocks)
  ]
  return programs.round_up(max(masks), rows.masked.shape[1])


def _decode(loaded: TextModel, row: _Rows, canvas: np.ndarray) -> str:
  """Decodes a row up to its end, with `<mask>` where it is masked."""
  # Special tokens are left out here: all but the masks.
  kept = row.masked | ~loaded.tokenizer.special[row.tokens]
  kept[row.k_end[-1] :] = False
  (ends,) = np.nonzero(canvas & ~row.masked & _ends(loaded, row.tokens))
  if len(ends):
    kept[ends[0] :] = False
  return loaded.tokenizer.decode(row.tokens[kept], skip_special=False)


# ------------------------------------------------------------- on the device


def _fill(
  model: models.Model, how: _Static, params, rows, banned, steps, every, seed
) -> _Rows:
  """Fills masks of rows for at most so many steps.

  Args:
    model: The encoder.
    how: What the program depends on.
    params: The encoder's parameters.
    rows: What `_lay_out` made, or an earlier call.
    banned: Which tokens are not drawn, by `rows.whole`, bool `[2, V]`.
    steps: That of `Unmasking`.
    every: So many.
    seed: Of what is drawn.
  """
  stop = rows.step[0] + every
  # What is drawn for a text is by its number, the step and the place: not by
  # its neighbours.
  fold_in = jax.vmap(jax.random.fold_in)
  key = jax.random.key(seed)
  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, rows.number)
  places = jnp.arange(rows.tokens.shape[1])[None]
  every_row = jnp.arange(len(rows.step))[:, None]
  logits_of = model.logits_of(params)

  def step(rows):
    block = jnp.min(jnp.where(rows.masked, rows.blocks, _NONE), axis=1)
    unfilled = rows.masked & (rows.blocks == block[:, None])
    first = jnp.where(steps > 0, steps, jnp.sum(unfilled, axis=1))
    left = jnp.where(block == rows.block, rows.left, first)
    # Only M places of a row are looked at, its masks the first of them.
    at = jnp.argsort(~unfilled, axis=1, stable=True)[:, : how.most]
    here = jnp.take_along_axis(unfilled, at, axis=1)
    mask = AttentionMask(k_end=rows.k_end)
    hidden = model.encode(params, rows.tokens, places, mask)
    hidden = hidden[every_row, at - how.shift]
    own_keys = jax.vmap(fold_in, (None, 1), 1)(fold_in(keys, rows.step), at)
    new, sure, noise = _draw(
      logits_of, how.drawn, hidden, own_keys, banned, rows.whole
    )
    chosen = _chosen(how.order, here, sure, noise, left)
    old = rows.tokens[every_row, at]
    return rows._replace(
      tokens=rows.tokens.at[every_row, at].set(jnp.where(chosen, new, old)),
      masked=rows.masked.at[every_row, at].min(~chosen),
      step=rows.step + 1,
      block=block,
      left=left - 1,
    )

  def unfinished(rows):
    return (rows.step[0] < stop) & jnp.any(rows.masked)

  return jax.lax.while_loop(unfinished, step, rows)


def _draw(logits_of, drawn, hidden, keys, banned, whole):
  """Draws a token for each of B x M hidden states.

  Returns:
    The tokens, how likely the model holds each, and a number of its own, even
    in [0, 1); all `[B, M]`.
  """

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
  """Chooses which masks are filled, bool `[B, M]`.

  Args:
    order: That of `Unmasking`.
    here: Which of M places are masks, bool `[B, M]`.
    sure: The model's probabilities of the tokens drawn there, `[B, M]`.
    noise: Even in [0, 1), `[B, M]`.
    left: Steps left to fill all of them, this one too, `[B]`.
  """
  left = jnp.maximum(left, 1)[:, None]
  if order == "ancestral":
    return here & (noise * left < 1)
  score = jnp.where(here, sure if order == "confidence" else noise, -1)
  rank = jnp.argsort(jnp.argsort(-score, axis=1, stable=True), axis=1)
  return rank < -(-jnp.sum(here, axis=1, keepdims=True) // left)
