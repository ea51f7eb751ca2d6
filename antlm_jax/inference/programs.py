"""Compiled programs, kept for the next call: of generation, filling, scoring.

A program is a function of a model. One is kept for each of the last few
(function, model's configuration, static arguments), and below it jit keeps one
executable for every shape that it met. So callers pad rows to few lengths, by
`framing.round_up`.
"""

import functools
from collections.abc import Callable, Hashable

import jax

from antlm_jax import models
from antlm_jax.models.encoder import EncoderConfig

_KEPT = 32  # programs; their executables take host memory


@functools.lru_cache(maxsize=_KEPT)
def compiled(
  function: Callable, config: EncoderConfig, *static: Hashable
) -> Callable:
  """Returns `function(model, *static, ...)` as a jitted function of the rest.

  Args:
    function: A module's function: another closure would be another program.
    config: The model's configuration, which says all of its computation; the
      parameters are among the rest, so models of one shape share a program.
    static: What else the program depends on.
  """
  model = models.from_config(config)
  return jax.jit(functools.partial(function, model, *static))
