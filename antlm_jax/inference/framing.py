"""Special tokens around a text, and positions that predict masks.

Scoring, generation and mask filling need both for each model. They follow from
the model's training data and curriculum.
"""

import dataclasses
import functools

import numpy as np

from antlm_jax import models
from antlm_jax.config import Config
from antlm_jax.data import packing
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError

OWN = "own"  # boundary of the tokens that the tokenizer adds elsewhere
_STAND_IN = "0"  # not a letter, so that it does not merge with words


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextModel:
  """A model and its tokenizer, ready to read texts."""

  model: models.Model
  params: models.Params  # may be split over the current mesh
  tokenizer: Tokenizer
  boundary: str  # tokens around a document, in `packing.BOUNDARIES` or `OWN`
  config: Config  # config of its training run
  ends: tuple[int, ...] = ()  # tokens that end a text; empty for `</s>`

  @functools.cached_property
  def frame(self) -> tuple[np.ndarray, np.ndarray]:
    """Special tokens before and after a text, both int32 `[n]`."""
    if self.boundary == OWN:
      before, after = self.tokenizer.frame
    else:
      ids = packing.frame_ids(self.tokenizer, self.boundary)
      before, after = ([] if i is None else [i] for i in ids)
    return np.array(before, np.int32), np.array(after, np.int32)

  @functools.cached_property
  def mask_shift(self) -> int:
    """Distance from a masked token back to the output that predicts it.

    It is 1 if all masked training was masked next-token prediction (arXiv
    2410.24159), else 0.
    """
    masked = [o for o in self.config.trained if not o.left_to_right]
    return 1 if {objective.shift for objective in masked} == {1} else 0


def trained_modes(config: Config) -> list[str]:
  """Returns the scoring modes that a run trains, `causal` first."""
  modes = {
    "causal" if one.left_to_right else ("mlm", "mntp")[one.shift]
    for one in config.trained
  }
  return sorted(modes)


def ends(loaded: TextModel) -> np.ndarray:
  """Returns the tokens that end a generated text, int32 `[n]`."""
  eos = loaded.tokenizer.eos_id
  return np.array(loaded.ends or [-1 if eos is None else eos], np.int32)


def never_drawn(loaded: TextModel) -> np.ndarray:
  """Returns whether generation never draws a token, bool `[V]`.

  It never draws special tokens, except those that end a text. Imported models
  may draw all tokens, as in their original library.
  """
  banned = loaded.tokenizer.special & (loaded.boundary != OWN)
  banned[[i for i in ends(loaded) if i >= 0]] = False
  return banned


def mask_id(loaded: TextModel) -> int:
  """Returns the id of `<mask>`, or raises a UserError if there is none."""
  if loaded.tokenizer.mask_id is None:
    raise UserError(
      "the model's tokenizer has no <mask> token: use mode=causal or generate"
    )
  return loaded.tokenizer.mask_id


def check_length(loaded: TextModel, length: int, text: str) -> None:
  """Raises a UserError if a text is longer than the model's `max_seq_len`.

  `length` is its number of tokens, including special tokens.
  """
  longest = loaded.model.config.max_seq_len
  if length > longest:
    quoted = text if len(text) <= 60 else text[:57] + "..."
    raise UserError(
      f"{quoted!r} has {length} tokens, more than the model's"
      f" max_seq_len={longest}"
    )


def encode(loaded: TextModel, text: str, masks: int = 0) -> np.ndarray:
  """Encodes a text with special tokens and `masks` added masks, int32 `[n]`.

  A mask is like a word: it includes the space before it, and does not change
  the tokens around it. If there is no mask token, `<mask>` is a word.
  """
  mask_id = loaded.tokenizer.mask_id
  *pieces, rest = [text] if mask_id is None else text.split(MASK)
  # Replace each mask with a character. Then replace all tokens that overlap it,
  # or the space before it, with a mask.
  joined, places = "", []
  for piece in pieces:
    joined += piece + _STAND_IN
    # The tokenizer may add a space before the text.
    space = not piece or piece.endswith(" ")
    places.append((len(joined) - 1 - space, len(joined)))
  ids, spans = loaded.tokenizer.encode_offsets(joined + rest)
  out, written = [], 0  # tokens, and the number of masks among them
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
