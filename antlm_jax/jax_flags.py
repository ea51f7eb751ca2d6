"""Flags of JAX that change results or break them, held at one value.

A shell's profile or a notebook may set them for other work, such as
JAX_ENABLE_X64=1. `library_flags` keeps them from this library's computations.
Other flags are the user's: those of XLA, devices, caches and debugging.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

from antlm_jax import private

# By their names in `jax.config`; in the environment, they are upper case.
_VALUES = {
  "jax_enable_x64": False,
  "jax_default_prng_impl": "threefry2x32",
  "jax_threefry_partitionable": True,
  "jax_enable_custom_prng": False,
  "jax_random_seed_offset": 0,
  "jax_high_dynamic_range_gumbel": False,
  "jax_accurate_erf_inv": False,
  "jax_default_matmul_precision": None,
  "jax_numpy_dtype_promotion": "standard",
  "jax_numpy_rank_promotion": "allow",
  "jax_softmax_custom_jvp": False,
  "jax_use_hlo_logistic_lowering": None,
  "jax_disable_jit": False,
}


@contextlib.contextmanager
def library_flags() -> Iterator[None]:
  """Holds the flags in its block or function, in this thread alone."""
  is_set = any(name.upper() in os.environ for name in _VALUES)
  if "jax" not in sys.modules and not is_set:
    yield  # commands that print help need not import JAX
    return
  import jax

  with contextlib.ExitStack() as held:
    for name, value in _VALUES.items():
      if getattr(jax.config, name, value) != value:
        held.enter_context(private.jax_flags()[name](value))
    yield


def ignored_flags() -> list[str]:
  """Returns the user's settings that `library_flags` replaces."""
  flags = private.jax_flags()
  values = {n: flags[n].get_global() for n in _VALUES.keys() & flags.keys()}
  return sorted(
    f"{name.upper()}={value}"
    for name, value in values.items()
    if value != _VALUES[name]
  )
