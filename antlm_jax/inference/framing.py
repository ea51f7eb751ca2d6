"""How a text stands before a model: its frame, and where masks are predicted.

Scoring, generation and mask filling all ask the same questions of a model; the
answers are its data's and its curriculum's.
"""

import dataclasses

import numpy as np
from ml_collections import ConfigDict

from antlm_jax import config as config_lib
from antlm_jax import models
from antlm_jax.data import packing
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import Objective

OWN = "own"  # what the tokenizer itself adds, as other libraries use it


@dataclasses.dataclass(frozen=True)
class TextModel:
  """A model with what leads from text to its tokens.

  `Loaded` has the same attributes, and takes its place. Parameters
  may be split over the mesh that is set.
  """

  model: models.Model
  params: models.Params
  tokenizer: Tokenizer
  boundary: str  # which special tokens stood around the documents of its data
  config: ConfigDict  # what it was trained with
  ends: tuple[int, ...] = ()  # see `Meta`


def frame(loaded: TextModel) -> tuple[np.ndarray, np.ndarray]:
  """Returns the special tokens before and after a text, int32 `[n]`."""
  tokenizer = loaded.tokenizer
  if loaded.boundary == OWN:
    before, after = tokenizer.frame
  else:
    ids = packing.frame_ids(tokenizer, loaded.boundary)
    before, after = ([] if i is None else [i] for i in ids)
  return np.array(before, np.int32), np.array(after, np.int32)


def ends(loaded: TextModel) -> np.ndarray:
  """Returns the tokens that end a generated text, int32 `[n]`."""
  eos = loaded.tokenizer.eos_id
  return np.array(loaded.ends or [-1 if eos is None else eos], np.int32)


def never_drawn(loaded: TextModel) -> np.ndarray:
  """Returns which tokens are never generated, bool `[V]`.

  All special ones but the ends; of an imported model none, as in its library.
  """
  banned = loaded.tokenizer.special & (loaded.boundary != OWN)
  banned[[i for i in ends(loaded) if i >= 0]] = False
  return banned


def trained(config: ConfigDict) -> list[Objective]:
  """Returns the objectives of a run's curriculum."""
  objectives = config_lib.objectives(config)
  names = curriculum.names(config.curriculum, objectives)
  return [objectives[name] for name in names]


def mask_shift(config: ConfigDict) -> int:
  """Returns how far before a masked token the output that predicts it stands.

  That is 1 if the run trained masked next-token prediction (arXiv 2410.24159)
  and not prediction in place, else 0.
  """
  shifts = {
    objective.shift
    for objective in trained(config)
    if not objective.left_to_right
  }
  return 1 if shifts == {1} else 0


def mask_id(loaded: TextModel) -> int:
  """Returns the id of `<mask>`.

  Raises:
    UserError: if the tokenizer has none.
  """
  if loaded.tokenizer.mask_id is None:
    raise UserError(
      "the model's tokenizer has no <mask> token: only --mode=causal and"
      " generation are for it"
    )
  return loaded.tokenizer.mask_id


def check_length(loaded: TextModel, length: int, text: str) -> None:
  """Checks that a text of `length` tokens, with its frame, fits the model.

  Raises:
    UserError: if it is longer than the model's rows.
  """
  longest = loaded.model.config.max_seq_len
  if length > longest:
    quoted = text if len(text) <= 60 else text[:57] + "..."
    raise UserError(
      f"{quoted!r} takes {length} tokens, over the model's"
      f" max_seq_len={longest}"
    )


def round_up(length: int, multiple: int, limit: int) -> int:
  """Rounds a row's length up, so that few lengths need compiling."""
  return min(-(-length // multiple) * multiple, limit)
