"""Special tokens around a text, and positions that predict masks.

Scoring, generation and mask filling need both for each model. They follow from
the model's training data and curriculum.
"""

import dataclasses
import functools

import numpy as np
import tokenizers

from antlm_jax import models
from antlm_jax.config import Config
from antlm_jax.data import packing
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.data.tokenizer_json import TokenizerJson
from antlm_jax.errors import UserError
from antlm_jax.training.checkpoint import Meta

OWN = "own"  # boundary of the tokens that the tokenizer adds elsewhere


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TextModel:
  """A model and its tokenizer, ready to read texts."""

  model: models.Model
  params: models.Params  # may be split over the current mesh
  meta: Meta  # its `boundary` is a key of `packing.BOUNDARIES`, or `OWN`

  @property
  def config(self) -> Config:
    """Config of its training run."""
    return self.meta.config

  @property
  def tokenizer(self) -> Tokenizer:
    """Tokenizer of its texts."""
    return self.meta.tokenizer

  @property
  def longest_row(self) -> int:
    """Number of tokens in the longest row of training, or `max_seq_len`."""
    return self.meta.row_tokens or self.model.config.max_seq_len

  @functools.cached_property
  def frame(self) -> tuple[np.ndarray, np.ndarray]:
    """Special tokens before and after a text, both int32 `[n]`."""
    if self.meta.boundary == OWN:
      before, after = self.tokenizer.frame
    else:
      ids = packing.frame_ids(self.tokenizer, self.meta.boundary)
      before, after = ([] if i is None else [i] for i in ids)
    return np.array(before, np.int32), np.array(after, np.int32)

  @functools.cached_property
  def mask_names(self) -> set[str]:
    """Names of a mask in texts; none if there is no mask token."""
    mask_token = self.tokenizer.mask_token
    return set() if mask_token is None else {MASK, mask_token}

  @functools.cached_property
  def mask_reader(self) -> tokenizers.Tokenizer:
    """Tokenizer that reads masks in a text as words."""
    spec = tokenizer_with_masks(self.tokenizer)
    names = dict(self.tokenizer.special_names)
    del names[self.tokenizer.mask_id]
    return spec.without_names(names).build()  # "</s>" in a text is text

  @functools.cached_property
  def mask_shift(self) -> int:
    """Distance from a masked token back to the output that predicts it.

    It is 1 if all masked training was masked next-token prediction (arXiv
    2410.24159), else 0.
    """
    masked = [o for o in self.config.trained if not o.left_to_right]
    return 1 if {objective.shift for objective in masked} == {1} else 0


@functools.lru_cache(maxsize=1)
def tokenizer_with_masks(tokenizer: Tokenizer) -> TokenizerJson:
  """Returns the tokenizer.json that reads masks in a text as words."""
  spec = TokenizerJson.parse(tokenizer.to_json())
  return spec.with_masks(tokenizer.mask_id, tokenizer.mask_token, MASK)


def trained_modes(config: Config) -> list[str]:
  """Returns the scoring modes that a run trains, `causal` first."""
  modes = {
    "causal" if objective.left_to_right else ("mlm", "mntp")[objective.shift]
    for objective in config.trained
  }
  return sorted(modes)


def end_tokens(loaded: TextModel) -> np.ndarray:
  """Returns the tokens that end a generated text, int32 `[n]`."""
  eos = loaded.tokenizer.eos_id
  return np.array(loaded.meta.ends or [-1 if eos is None else eos], np.int32)


def never_drawn(loaded: TextModel) -> np.ndarray:
  """Returns whether generation never draws a token, bool `[V]`.

  It never draws special tokens, except those that end a text. Imported models
  may draw all tokens, as in their original library.
  """
  banned = loaded.tokenizer.special & (loaded.meta.boundary != OWN)
  banned[[i for i in end_tokens(loaded) if i >= 0]] = False
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


def encode_framed(loaded: TextModel, text: str, masks: int = 0) -> np.ndarray:
  """Encodes a text with special tokens and `masks` added masks, int32 `[n]`.

  A mask is like a word: it includes the space before it, and does not change
  the tokens around it (`data.tokenizer_json`). Both `<mask>` and the
  tokenizer's own name are masks. If there is no mask token, they are words.
  """
  if any(name in text for name in loaded.mask_names):
    encoding = loaded.mask_reader.encode(text, add_special_tokens=False)
    inner = np.array(encoding.ids, np.int32)
  else:
    inner = loaded.tokenizer.encode(text)
  before, after = loaded.frame
  added = [loaded.tokenizer.mask_id] * masks
  return np.concatenate([before, inner, np.array(added, np.int32), after])
