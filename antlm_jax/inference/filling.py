"""Filling masks in a text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import models, settings
from antlm_jax.data.tokenizer import MASK
from antlm_jax.errors import UserError
from antlm_jax.inference import framing, programs
from antlm_jax.inference.framing import TextModel
from antlm_jax.masks import AttentionMask
from antlm_jax.settings import setting

_STAND_IN = "0"  # no letter, so that it stays apart from what is around it


@dataclasses.dataclass(frozen=True)
class Filling:
  """What is filled."""

  text: str = setting(help=f"holds one {MASK} or more, each for one token")
  top: int = setting(5, "candidates of each mask", least=1)


def fill_mask(
  loaded: TextModel, text: str, top: int = 5
) -> list[list[tuple[str, float]]]:
  """Predicts the masked tokens of a text, each by itself.

  Attention is bidirectional. A prediction is read in place, or one position
  before where the model was trained so (see `TextModel.mask_shift`).

  Args:
    loaded: The model.
    text: Holds one `<mask>` or more; each stands for one token.
    top: Candidates of each mask.

  Returns:
    For each mask, its candidates and their probabilities, best first.

  Raises:
    UserError: if there is no mask, the text is too long, or the model cannot
      predict a mask.
  """
  settings.check(Filling(text, top))
  tokens = encode(loaded, text)
  framing.check_length(loaded, len(tokens), text)
  probabilities = _probabilities(loaded, tokens)[predicted_at(loaded, tokens)]
  best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top]
  decode = loaded.tokenizer.decode
  return [
    [(decode([t], skip_special=False), float(row[t])) for t in candidates]
    for row, candidates in zip(probabilities, best, strict=True)
  ]


def predicted_at(loaded: TextModel, tokens: np.ndarray) -> np.ndarray:
  """Returns where the outputs that predict the masks of a text stand, `[m]`.

  Raises:
    UserError: if there is no mask, or no such place.
  """
  (masked,) = np.nonzero(tokens == framing.mask_id(loaded))
  if not len(masked):
    raise UserError(f"the text holds no {MASK}")
  at = masked - loaded.mask_shift
  if at[0] < 0:
    raise UserError(
      "nothing stands before the first <mask>, where this model predicts it"
    )
  return at


def encode(loaded: TextModel, text: str, masks: int = 0) -> np.ndarray:
  """Encodes a text with masks, and so many behind it, framed, int32 `[n]`.

  The text around a mask is encoded as it would be around a word: a mask takes
  the space before it, as a word does.
  """
  mask_id = framing.mask_id(loaded)
  pieces = text.split(MASK)
  # The text is encoded with a sign in the place of each mask; then the tokens
  # that meet a sign, or the space before it, become masks. There may be two of
  # a mask (the space alone, then the sign), or one of two masks.
  ids, spans = loaded.tokenizer.encode_offsets(_STAND_IN.join(pieces))
  ends = np.cumsum([len(piece) + 1 for piece in pieces[:-1]])
  # The space before may be a token of its own, and is added where none is.
  spaces = [not piece or piece.endswith(" ") for piece in pieces[:-1]]
  starts = ends - 1 - np.array(spaces, int)
  out, done = [], 0  # masks that are written
  for token, (start, end) in zip(ids, spans, strict=True):
    begun = int(np.searchsorted(starts, end))
    if begun == np.searchsorted(ends, start, side="right"):  # meets no mask
      out.append(token)
      continue
    out += [mask_id] * (begun - done)
    done = begun
  before, after = loaded.frame
  out += [mask_id] * masks
  return np.concatenate([before, np.array(out, np.int32), after])


def _probabilities(loaded: TextModel, tokens: np.ndarray) -> np.ndarray:
  """Probabilities at every position of a row, float32 `[n, V]`."""
  config = loaded.model.config
  length = programs.round_up(len(tokens), config.max_seq_len)
  # Zeros fill it up: bidirectional attention must be told to end before them.
  row = np.zeros((1, length), np.int32)
  row[0, : len(tokens)] = tokens
  program = programs.compiled(_softmax, config)
  return np.asarray(program(loaded.params, row, len(tokens)))[: len(tokens)]


def _softmax(model: models.Model, params, row, length):
  positions = jnp.arange(row.shape[1])[None]
  mask = AttentionMask(k_end=jnp.full(row.shape, length))
  hidden = model.encode(params, row, positions, mask)
  return jax.nn.softmax(model.logits(params, hidden[0]))
