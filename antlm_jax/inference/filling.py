"""Fills masks in a text."""

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

_STAND_IN = "0"  # not a letter: it stays apart from the words around it


@dataclasses.dataclass(frozen=True)
class Filling:
  """Arguments of `fill_mask`."""

  text: str = setting(help=f"Text with one or more {MASK}, each for one token")
  top: int = setting(5, "Number of candidates for each mask", least=1)


def fill_mask(
  loaded: TextModel, text: str, top: int = 5
) -> list[list[tuple[str, float]]]:
  """Predicts each masked token of a text on its own.

  Attention is bidirectional. A prediction is read at the mask, or one position
  before if the model was trained so (see `TextModel.mask_shift`).

  Returns, for each `<mask>` of the text, its `top` candidates and their
  probabilities, best first. Raises a UserError if there is no mask, the text is
  too long, or the model cannot predict a mask.
  """
  settings.check(Filling(text, top))
  tokens = encode(loaded, text)
  framing.check_length(loaded, len(tokens), text)
  at = predicted_at(loaded, tokens)
  config = loaded.model.config
  length = programs.round_up(len(tokens), config.max_seq_len)
  row = np.pad(tokens, (0, length - len(tokens)))[None]
  program = programs.compiled(_probabilities, config)
  probabilities = np.asarray(program(loaded.params, row, len(tokens)))[at]
  best = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top]
  decode = loaded.tokenizer.decode
  return [
    [(decode([t], skip_special=False), float(row[t])) for t in candidates]
    for row, candidates in zip(probabilities, best, strict=True)
  ]


def _probabilities(model: models.Model, params, row, length) -> jax.Array:
  """Computes probabilities at all places of a padded row, `[T, V]`."""
  positions = jnp.arange(row.shape[1])[None]
  mask = AttentionMask(k_end=jnp.full(row.shape, length))
  hidden = model.encode(params, row, positions, mask)
  return jax.nn.softmax(model.logits(params, hidden[0]))


def predicted_at(loaded: TextModel, tokens: np.ndarray) -> np.ndarray:
  """Returns the places of the outputs that predict a text's m masks, `[m]`.

  Raises a UserError if there is no mask, or no place to predict the first one.
  """
  (masked,) = np.nonzero(tokens == framing.mask_id(loaded))
  if not len(masked):
    raise UserError(f"the text holds no {MASK}")
  at = masked - loaded.mask_shift
  if at[0] < 0:
    raise UserError(
      "nothing stands before the first <mask>, where this model predicts it:"
      " put a word before it"
    )
  return at


def encode(loaded: TextModel, text: str, masks: int = 0) -> np.ndarray:
  """Encodes a text with its frame, int32 `[n]`; `masks` more follow the text.

  The tokens around a mask are those around a word. Like a word, a mask includes
  the space before it.
  """
  mask_id = framing.mask_id(loaded)
  *pieces, rest = text.split(MASK)
  # A character takes the place of each mask. Then all tokens that overlap it,
  # or the space before it, become one mask.
  joined, places = "", []
  for piece in pieces:
    joined += piece + _STAND_IN
    # The tokenizer may add a space at the start of the text.
    space = not piece or piece.endswith(" ")
    places.append((len(joined) - 1 - space, len(joined)))
  ids, spans = loaded.tokenizer.encode_offsets(joined + rest)
  out, written = [], 0  # tokens, and number of masks among them
  for token, (start, end) in zip(ids, spans, strict=True):
    met = [n for n, (a, b) in enumerate(places) if a < end and start < b]
    if met:
      out += [mask_id] * (met[-1] + 1 - written)
      written = met[-1] + 1
    else:
      out.append(token)
  before, after = loaded.frame
  out += [mask_id] * masks
  return np.concatenate([before, np.array(out, np.int32), after])
