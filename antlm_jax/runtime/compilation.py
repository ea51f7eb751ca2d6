"""Keeps compiled programs on disk, so that later runs need not compile."""

import contextlib
import os
import pathlib
import platform
import zlib

import jax
from jax.experimental.compilation_cache import compilation_cache

_LEAST = 0.1  # least seconds of compiling for a program to be kept


def keep_programs() -> None:
  """Lets JAX keep compiled programs, unless the user has chosen a folder.

  Without a home folder that can be written, as in a container, each process
  compiles its own.
  """
  chosen = jax.config.jax_compilation_cache_dir
  if chosen or "JAX_COMPILATION_CACHE_DIR" in os.environ:
    return
  home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  folder = pathlib.Path(home, "antlm_jax/compiled", _machine())
  with contextlib.suppress(OSError):
    if not home.startswith("~"):  # else it is unknown
      folder.mkdir(parents=True, exist_ok=True)
  if not os.access(folder, os.W_OK):
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  compilation_cache.reset_cache()  # JAX looks only once for a folder
  if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST)


def _machine() -> str:
  """Names the CPU's features: programs for other CPUs may not run here."""
  machine = platform.machine()
  try:
    lines = pathlib.Path("/proc/cpuinfo").read_text("utf-8").splitlines()
  except OSError:
    return machine
  # Other lines, such as the frequency, change.
  able = [x for x in lines if x.startswith(("flags", "Features", "model name"))]
  return f"{machine}-{zlib.crc32(str(sorted(set(able))).encode()):08x}"


def program_cache() -> str | None:
  """Returns the folder of compiled programs, or None."""
  enabled = jax.config.jax_enable_compilation_cache
  return (enabled and jax.config.jax_compilation_cache_dir) or None
