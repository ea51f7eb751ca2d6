"""Cache of compiled programs for generation, filling and scoring.

A program is a function of a model. The cache has the most recent programs, by
function, model configuration and static arguments. In each program, jit caches
an executable for each shape. `round_up` keeps the number of shapes small.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable

import jax

from antlm_jax import models
from antlm_jax.inference.framing import TextModel
from antlm_jax.models.encoder import EncoderConfig

LOGIT_ROWS = 256  # number of tokens whose logits `[V]` are in memory at once
_KEPT = 32  # number of cached programs, which need host memory
_STEP = 32  # row lengths are multiples of this number


def round_up(length: int, limit: int | None = None, step: int = _STEP) -> int:
  """Rounds a number of tokens up to a multiple of `step`, at most to `limit`.

  Each row length needs a compilation, so there should be few lengths.
  """
  rounded = -(-int(length) // step) * step
  return rounded if limit is None else min(rounded, limit)


@functools.lru_cache(maxsize=_KEPT)
def compiled(
  function: Callable, config: EncoderConfig, *static: Hashable
) -> Callable:
  """Returns `function(model, *static, ...)` jitted over the other arguments.

  `function` must belong to a module, because each closure would be another
  program. Models of equal `config` share programs, since parameters are an
  argument.
  """
  model = models.from_config(config)
  return jax.jit(functools.partial(function, model, *static))


def unrolled(loaded: TextModel) -> tuple[EncoderConfig, models.Params]:
  """Returns a model's configuration and parameters with unstacked blocks.

  Use it in programs that encode many times. A loop over stacked blocks would
  copy the weights of each block every time.
  """
  config = loaded.model.config
  config = dataclasses.replace(config, scan_layers="no", remat="none")
  return config, compiled(models.Model.unstack, config)(loaded.params)
