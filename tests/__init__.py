"""The tests; what is set here is set before jax is imported."""

import os
import pathlib

# Programs that were compiled once are not compiled again, by no worker and no
# process that a test starts.
_CACHE = pathlib.Path(__file__).parents[1] / "build/compiled"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
