"""All that this library uses of JAX and tokamax without a public name.

No other file uses a private name, so this file alone changes if a release moves
it. tests/test_private.py has a test for each name.
"""

import functools
import os
from collections.abc import Callable


def jax_flags() -> dict:
  """Returns JAX's flags by name; calling one holds a value in a block."""
  import jax

  return jax.config._value_holders  # only some have a public function


def compiled_programs(function: Callable) -> int:
  """Returns the number of programs that a jitted function has compiled."""
  if isinstance(function, functools.partial):
    function = function.func
  return function._cache_size()


def key_value_store():
  """Returns the key-value store of JAX's processes, which process 0 holds."""
  # orbax uses this name, too.
  from jax._src import distributed

  return distributed.global_state.client


def register_compiler(platform: str, path: str | os.PathLike[str]) -> None:
  """Registers a compiler's library for devices that need not exist."""
  from jax._src import xla_bridge

  xla_bridge.register_plugin(platform, library_path=str(path))


def searches_devices(filename: str) -> bool:
  """Whether a file of JAX looks for devices, and raises if it finds none."""
  return filename.endswith("xla_bridge.py")


def tokamax_attention(name: str) -> tuple[Callable, type]:
  """Returns an implementation of tokamax's attention, and its mask's class."""
  from tokamax._src.ops.attention import api, base

  return api.IMPLEMENTATIONS[name], base.Mask
