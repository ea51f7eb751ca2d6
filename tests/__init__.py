"""Tests. This module sets the environment before jax is imported."""

import os
import pathlib

# All workers and the processes that tests start share compiled programs.
_CACHE = pathlib.Path(__file__).parents[1] / "build/compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
