"""Fills the masks of texts, in steps.

Each step encodes the whole text, draws a token for each mask and keeps some of
these tokens. Later steps see the kept tokens. A single step predicts each mask
independently. More steps sample from masked diffusion. Texts can be filled in
blocks from left to right; then each block has its steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models, settings
from antlm_jax.data import words
from antlm_jax.data.tokenizer import MASK, MASKS
from antlm_jax.errors import UserError
from antlm_jax.inference import framing, inputs, programs
from antlm_jax.inference.framing import TextModel
from antlm_jax.inference.generation import (
  Count,
  Temperature,
  TopK,
  TopP,
  draw_tokens,
)
from antlm_jax.inference.model import ModelOrPath, open_model
from antlm_jax.masks import AttentionMask
from antlm_jax.models.encoder import Head
from antlm_jax.settings import PythonOnly, argument

ORDERS = "confidence", "random", "ancestral"
_CONTEXT = 16  # tokens before a mask, with which it is decoded


class FilledMask(NamedTuple):
  """A filled mask, and the model's predictions at that step.

  Probabilities are over all tokens, at temperature 1.
  """

  position: int  # index among the tokens, including special tokens
  token: str  # token that fills the mask
  probability: float
  candidates: list[tuple[str, float]]  # likeliest tokens, best first


@dataclasses.dataclass(frozen=True, repr=False)
class Filled:
  """A text and its filled masks."""

  text: str
  masks: list[FilledMask]

  def __repr__(self) -> str:
    return f"<Filled {self.text!r:.70}>"


@settings.checked
def fill(
  model: ModelOrPath[TextModel],
  text: Annotated[str | Iterable[str], argument(may_be_empty=True)],
  *,
  tokens: Annotated[int, argument(least=0)] = 0,
  temperature: Temperature = 0.0,
  top_k: TopK = 0,
  top_p: TopP = 1.0,
  seed: int = 0,
  count: Count = 1,
  steps: Annotated[int, argument(least=0)] = 0,
  order: Annotated[str, argument(choices=ORDERS)] = "confidence",
  block_length: Annotated[int, argument(least=0)] = 0,
  top: Annotated[int, argument(least=0)] = 5,
  step: int | None = None,
  watch: PythonOnly[Callable[[list[Filled]], object] | None] = None,
) -> list[Filled]:
  """Fills the masks of one or more texts.

  The model sees the end of each text, as at the end of a document. A text
  without masks, to which masks are added, can end early with the end-of-text
  token. No other special token fills a mask. The results for a text do not
  depend on the other texts.

  Args:
    model: Model trained with bidirectional attention, in full or in blocks, or
      path to its run or checkpoint.
    text: Text with masks, or texts; each `<mask>` is one token. The
      tokenizer's own name of the mask, such as `[MASK]`, is read as well.
    tokens: Number of masks to add to a text that has none.
    temperature: Divisor of the logits; 0 takes the likeliest token.
    top_k: Number of likeliest tokens to draw from; 0 for all.
    top_p: Total probability of the likeliest tokens to draw from (nucleus
      sampling, arXiv 1904.09751).
    seed: Random seed; equal seeds give equal texts.
    count: Number of results for each text.
    steps: Number of steps per block; 0 for one token per step, 1 to predict
      each mask independently.
    order: Masks that a step fills: the likeliest tokens (`confidence`, as in
      MaskGIT and LLaDA), as many at random (`random`), or each at random
      independently (`ancestral`, as in MDLM).
    block_length: Number of tokens per block, with blocks filled from left to
      right; 0 for the blocks of training, or the whole text.
    top: Number of candidates for each mask.
    step: Step of the run; by default the newest.
    watch: Function to call with the results so far, after each step. Masks that
      are not filled yet are `<mask>` in the text.

  Returns:
    `count` results for each text, in the order of the texts.

  Raises:
    UserError: A text is too long or has no mask, the model has no bidirectional
      training, or an argument is out of range.
  """
  # `step` chooses the checkpoint; `steps` and all other steps fill masks.
  loaded = open_model(model, step)
  user_texts = inputs.as_texts(text)
  if not user_texts:
    raise UserError("there is no text to fill")
  attention_block = _block_length(loaded) or loaded.model.config.max_seq_len
  fill_block = block_length or attention_block
  texts = [_with_usual_masks(loaded, text, tokens) for text in user_texts]
  rows = _lay_out(loaded, texts, tokens, count, top)
  masked_at_start = rows.masked
  most_masks = min(fill_block, int(masked_at_start.sum(axis=1).max()))
  static = _StaticSettings(
    sampling=(temperature, top_k, top_p),
    order=order,
    mask_shift=loaded.mask_shift,
    masks_per_block=programs.round_up(most_masks, masked_at_start.shape[1]),
  )
  traced = _TracedSettings(
    attention_block=attention_block,
    fill_block=fill_block,
    steps_per_block=steps,
    # A watcher sees the rows after each step.
    steps_per_call=settings.LARGEST if watch is None else 1,
    seed=seed,
    rows_per_text=count,
  )
  config, params = programs.unrolled(loaded)
  fill_masks = programs.compiled(_fill_masks, config, static)
  banned = _banned_tokens(loaded)
  while np.any(rows.masked):
    rows = jax.device_get(fill_masks(params, rows, banned, traced))
    filled = [
      _decode_filled(
        loaded, texts[row_index // count], rows, masked_at_start, row_index
      )
      for row_index in range(len(masked_at_start))
    ]
    if watch is not None:
      watch(filled)
  return filled


class _FillingRows(NamedTuple):
  """Texts while their masks are filled."""

  tokens: jax.Array  # token, then K candidates, int32 `[B, T, 1 + K]`
  chances: jax.Array  # their probabilities at filled masks, `[B, T, 1 + K]`
  masked: jax.Array  # masks that are not filled yet, bool `[B, T]`
  length: jax.Array  # number of tokens, int32 `[B]`
  may_not_end: jax.Array  # 1 if the text may not end early, int32 `[B]`
  block: jax.Array  # block of the last step, int32 `[B]`
  steps_left: jax.Array  # number of steps left for that block, int32 `[B]`
  steps_done: jax.Array  # number of steps done, int32


def _block_length(loaded: TextModel) -> int:
  """Returns the block length of bidirectional training, or 0."""
  objectives = [o for o in loaded.config.trained if not o.left_to_right]
  if not objectives:
    raise UserError(
      "the model was trained only left to right (curriculum="
      f"{loaded.config.curriculum}): use generate"
    )
  lengths = (o.block_length for o in objectives if o.attention == "block")
  return next(lengths, 0)


def _with_usual_masks(loaded: TextModel, text: str, added: int) -> str:
  """Returns a text with `<mask>` in place of the model's own mask token.

  Raises a UserError if there is nothing to fill: the text has no mask, and none
  is `added` to it later.
  """
  framing.mask_id(loaded)  # raises a UserError if the model has no mask token
  mask_token = loaded.tokenizer.mask_token
  text = text.replace(mask_token, MASK)
  if MASK in text:
    return text
  names = MASK if mask_token == MASK else f"{MASK} or {mask_token}"
  if other := next((name for name in MASKS if name in text), None):
    raise UserError(
      f"{text!r:.60} has {other}, which is no mask of this model: write {names}"
    )
  if not added:
    raise UserError(
      f"{text!r:.60} holds no {names}: write it for each word to fill, or give"
      " tokens=N to add N masks at the end"
    )
  return text


def _banned_tokens(loaded: TextModel) -> np.ndarray:
  """Returns whether a token is never drawn, by `may_not_end`, bool `[2, V]`."""
  special = loaded.tokenizer.special
  ends = np.isin(np.arange(len(special)), framing.end_tokens(loaded))
  # A text that may end early draws end tokens, and no other special token.
  banned = np.stack([special & ~ends, special | ends])
  banned[:, framing.mask_id(loaded)] = True
  return banned


def _lay_out(
  loaded: TextModel, texts: Sequence[str], added: int, count: int, top: int
) -> _FillingRows:
  """Encodes texts into `count` rows each."""
  encoded = []
  mask_id = framing.mask_id(loaded)
  for text in texts:
    tokens = framing.encode_framed(loaded, text, 0 if MASK in text else added)
    framing.check_length(loaded, len(tokens), text)
    if mask_id in tokens[: loaded.mask_shift]:
      raise UserError(
        "this model predicts a <mask> at the token before it: put a word before"
        " the first <mask>"
      )
    encoded += [tokens] * count
  length = np.array([len(tokens) for tokens in encoded], np.int32)
  size = programs.round_up(length.max(), loaded.model.config.max_seq_len)
  row = np.stack([np.pad(t, (0, size - len(t))) for t in encoded])
  top = min(top, loaded.tokenizer.vocab_size)
  tokens = np.pad(row[..., None], ((0, 0), (0, 0), (0, top)))
  may_not_end = np.array([MASK in text for text in texts], np.int32)
  zeros = np.zeros_like(length)
  return _FillingRows(
    tokens=tokens,
    chances=np.zeros(tokens.shape, np.float32),
    masked=(row == mask_id) & (np.arange(size) < length[:, None]),
    length=length,
    may_not_end=np.repeat(may_not_end, count),
    block=zeros - 1,
    steps_left=zeros,
    steps_done=np.int32(0),
  )


def _decode_filled(
  loaded: TextModel,
  text: str,
  rows: _FillingRows,
  masked_at_start: np.ndarray,
  row_index: int,
) -> Filled:
  """Decodes a row's masks up to its end, into the text that has them."""
  decode = loaded.tokenizer.decode
  tokens = rows.tokens[row_index]
  chances = rows.chances[row_index]
  masked = rows.masked[row_index]
  is_mask = masked_at_start[row_index]
  is_filled = is_mask & ~masked
  ids = tokens[:, 0]
  (ends,) = np.nonzero(is_filled & np.isin(ids, framing.end_tokens(loaded)))
  end = ends[0] if len(ends) else rows.length[row_index]
  masks = []
  for place in np.flatnonzero(is_filled[: end + 1]):
    names = [decode([token], skip_special=False) for token in tokens[place]]
    token, *best = zip(names, chances[place].tolist(), strict=True)
    masks.append(FilledMask(int(place), *token, best))
  places = np.flatnonzero(is_mask[:end])
  return Filled(_write_masks(loaded, text, ids, places, masked), masks)


def _write_masks(loaded: TextModel, text: str, ids, places, masked) -> str:
  """Returns a text with the tokens at masks; the rest of it stays as it is.

  Args:
    loaded: The model.
    text: Text with `<mask>`, or text to which masks are added.
    ids: Tokens of the row `[T]`.
    places: Places of the masks in the row `[n]`.
    masked: Whether a mask is not filled yet `[T]`.
  """
  if not len(places):
    return text
  pieces = text.split(MASK) if MASK in text else [text] + [""] * len(places)
  written = pieces[0]
  number = 0
  # Tokens next to each other may be parts of one character.
  for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1):
    between = pieces[number + 1 : number + len(run)]
    number += len(run)
    if not np.all(masked[run]):
      row = ids[: run[-1] + 1]
      joined = _add_words(loaded, written, row, len(run), MASK not in text)
      written = joined.replace(loaded.tokenizer.mask_token, MASK)
    else:
      written += MASK + "".join(piece + MASK for piece in between)
    written += pieces[number]
  return written


def _add_words(
  loaded: TextModel, text: str, ids, count: int, separate: bool
) -> str:
  """Returns a text and the last `count` tokens of `ids`, which follow it.

  `separate` says whether a decoder's space between words follows the text.
  """
  decode = functools.partial(loaded.tokenizer.decode, skip_special=False)
  context = ids[: len(ids) - count][-_CONTEXT:]
  before = decode(context)
  whole = decode([*context, *ids[len(ids) - count :]])
  added = whole.removeprefix(before)
  if not whole.startswith(before):
    added = decode(ids[len(ids) - count :])
  # A mask includes the space before it, if the tokenizer's words do.
  bare = text.rstrip(" ")
  spaced = len(text) - len(bare) > len(before) - len(before.rstrip(" "))
  text = text[:-1] if spaced else text
  if spaced or not added.startswith(" "):
    return text + added
  # A decoder separates all words, and a token may begin with a space. Japanese,
  # Chinese and Thai have no space between words.
  first = loaded.tokenizer.token(int(ids[-count]))
  separate |= first.startswith((*words.SPACES, " "))
  unspaced = any(map(words.is_unspaced, text[-1:] + added[1:2]))
  return text + (added if separate and text and not unspaced else added[1:])


# ------------------------------------------------------------- on the device


class _StaticSettings(NamedTuple):
  """Settings that are constants of the program."""

  sampling: tuple[float, int, float]  # temperature, top_k, top_p
  order: str
  mask_shift: int  # distance from a mask back to its prediction
  masks_per_block: int  # upper bound M of the masks in a block of a row


class _TracedSettings(NamedTuple):
  """Settings that the program takes as arguments, int32."""

  attention_block: jax.Array  # number of tokens in a block of attention
  fill_block: jax.Array  # number of tokens in a block that is filled
  steps_per_block: jax.Array  # 0 for one token a step
  steps_per_call: jax.Array  # largest number of steps of a call
  seed: jax.Array
  rows_per_text: jax.Array


class _Masks(NamedTuple):
  """Masks that a step may fill: those of each row's first unfinished block."""

  block: jax.Array  # the block of each row, int32 `[B]`
  steps_left: jax.Array  # for the block, with this step, int32 `[B]`
  places: jax.Array  # of its masks, then of other tokens, int32 `[B, M]`
  present: jax.Array  # whether there is a mask, bool `[B, M]`


def _fill_masks(
  model: models.Model,
  static: _StaticSettings,
  params,
  rows: _FillingRows,
  banned,  # tokens that are not drawn, by `may_not_end`, bool `[2, V]`
  traced: _TracedSettings,
) -> _FillingRows:
  """Fills masks of rows from `_lay_out` or an earlier call."""
  end_step = rows.steps_done + traced.steps_per_call
  keys = _row_keys(len(rows.length), traced)
  places = jnp.arange(rows.masked.shape[1])
  block_end = (places // traced.attention_block + 1) * traced.attention_block
  mask = AttentionMask(k_end=jnp.minimum(rows.length[:, None], block_end))
  head = model.output_head(params)

  def fill_step(now: _FillingRows) -> _FillingRows:
    masks = _find_masks(now, traced, static.masks_per_block)
    text = now.tokens[..., 0]
    positions = jnp.broadcast_to(places, text.shape)
    hidden = model.encode(params, text, positions, mask)
    step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, now.steps_done)
    tokens, chances, score = _predict_masks(
      static, head, hidden, now, masks, banned, step_keys
    )
    chosen = _chosen(static.order, masks.present, score, masks.steps_left)
    return _written(now, masks, chosen, tokens, chances)

  def unfinished(now: _FillingRows):
    return (now.steps_done < end_step) & jnp.any(now.masked)

  return jax.lax.while_loop(unfinished, fill_step, rows)


def _row_keys(count: int, traced: _TracedSettings) -> jax.Array:
  """Returns a random key for each row `[B]`."""
  # Draws depend on the seed, the number of the row among its text's rows, the
  # step and the place, not on the other texts.
  number_in_text = jnp.arange(count) % traced.rows_per_text
  key = jax.random.key(traced.seed)
  return jax.vmap(jax.random.fold_in, (None, 0))(key, number_in_text)


def _find_masks(
  rows: _FillingRows, traced: _TracedSettings, masks_per_block: int
) -> _Masks:
  """Finds the masks that the next step may fill."""
  size = rows.masked.shape[1]
  block_of = jnp.arange(size) // traced.fill_block
  block = jnp.min(jnp.where(rows.masked, block_of, size), axis=1)
  unfilled = rows.masked & (block_of == block[:, None])
  # A row that begins a block has all of its steps.
  one_each = jnp.sum(unfilled, axis=1)
  all_steps = jnp.where(
    traced.steps_per_block > 0, traced.steps_per_block, one_each
  )
  steps_left = jnp.where(block == rows.block, rows.steps_left, all_steps)
  # A stable sort puts the places of the masks first.
  places = jnp.argsort(~unfilled, axis=1, stable=True)[:, :masks_per_block]
  present = jnp.take_along_axis(unfilled, places, axis=1)
  return _Masks(block, steps_left, places, present)


def _predict_masks(
  static: _StaticSettings,
  head: Head,
  hidden: jax.Array,  # outputs of the encoder `[B, T, D]`
  rows: _FillingRows,
  masks: _Masks,
  banned,
  keys: jax.Array,  # random keys of the rows for this step `[B]`
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Draws a token for each of the masks.

  Returns:
    Token, then K candidates, int32 `[B M, 1 + K]`, their probabilities, and the
    score by which `_chosen` orders the masks, `[B, M]`.
  """
  candidates = rows.tokens.shape[2] - 1

  def predict(mask):
    row, place = mask
    logits = head.logits(hidden[row, place - static.mask_shift])
    allowed = jnp.where(banned[rows.may_not_end[row]], -jnp.inf, logits)
    token_key, order_key = jax.random.split(
      jax.random.fold_in(keys[row], place)
    )
    token = draw_tokens(token_key, allowed, *static.sampling)
    if static.order == "confidence":
      score = jax.nn.softmax(allowed)[token]
    else:
      score = jax.random.uniform(order_key)
    chances = jax.nn.softmax(logits)
    tokens = jnp.append(token, jax.lax.top_k(chances, candidates)[1])
    return tokens, chances[tokens], score

  tokens, chances, score = jax.lax.map(
    predict, _flat(masks.places), batch_size=programs.LOGIT_ROWS
  )
  return tokens, chances, score.reshape(masks.places.shape)


def _flat(places: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns row and place of places `[B, M]`, each int32 `[B M]`."""
  count, width = places.shape
  return jnp.repeat(jnp.arange(count), width), places.reshape(-1)


def _written(
  rows: _FillingRows, masks: _Masks, chosen, tokens, chances
) -> _FillingRows:
  """Writes the tokens of the chosen masks, bool `[B, M]`, into rows."""
  # Writes to places outside the row have no effect.
  outside = rows.masked.shape[1]
  to = _flat(jnp.where(chosen, masks.places, outside))
  return rows._replace(
    tokens=rows.tokens.at[to].set(tokens, mode="drop"),
    chances=rows.chances.at[to].set(chances, mode="drop"),
    masked=rows.masked.at[to].set(False, mode="drop"),
    block=masks.block,
    steps_left=masks.steps_left - 1,
    steps_done=rows.steps_done + 1,
  )


def _chosen(order: str, present, score, steps_left) -> jax.Array:
  """Chooses the masks of a step, if `steps_left` steps fill all masks."""
  divisor = jnp.maximum(steps_left, 1)[:, None]
  if order == "ancestral":
    return present & (score * divisor < 1)
  score = jnp.where(present, score, -1)
  rank = jnp.argsort(jnp.argsort(-score, axis=1, stable=True), axis=1)
  return rank < -(-jnp.sum(present, axis=1, keepdims=True) // divisor)
