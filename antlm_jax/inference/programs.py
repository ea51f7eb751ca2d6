"""Compiled programs of generation, filling and scoring, kept for the next call.

A program is a function of a model. The last few are kept, one for each
function, model configuration and static arguments. Below them, jit keeps one
executable for every shape. `round_up` keeps the shapes few.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable

import jax

from antlm_jax import models
from antlm_jax.inference.framing import TextModel
from antlm_jax.models.encoder import EncoderConfig

LOGIT_ROWS = 256  # tokens whose logits `[V]` are in memory at once
_KEPT = 32  # programs; their executables take host memory
_STEP = 32  # row lengths are multiples of it


def round_up(length: int, limit: int | None = None, step: int = _STEP) -> int:
  """Rounds a number of tokens up to a multiple of `step`, at most to `limit`.

  Each length of a row needs a compilation, so there should be few.
  """
  rounded = -(-int(length) // step) * step
  return rounded if limit is None else min(rounded, limit)


@functools.lru_cache(maxsize=_KEPT)
def compiled(
  function: Callable, config: EncoderConfig, *static: Hashable
) -> Callable:
  """Returns `function(model, *static, ...)` as a jitted function of the rest.

  `function` belongs to a module: each closure would be another program. The
  parameters are an argument: models of one `config` share a program.
  """
  model = models.from_config(config)
  return jax.jit(functools.partial(function, model, *static))


def unrolled(loaded: TextModel) -> tuple[EncoderConfig, models.Params]:
  """Returns a model's configuration and parameters with its blocks unstacked.

  Programs that encode many times need it: a loop over stacked blocks would copy
  the weights of each block every time.
  """
  config = loaded.model.config
  config = dataclasses.replace(config, scan_layers="no", remat="none")
  return config, compiled(models.Model.unstack, config)(loaded.params)
