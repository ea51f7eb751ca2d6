"""Private names of JAX and tokamax, and the damage if a release moves them."""

import functools
import inspect
import re
import traceback

import jax
import pytest
from jax._src import xla_bridge

from antlm_jax import jax_flags, private
from antlm_jax.attention.gpu import tokamax
from tests import runs


def test_no_other_file_uses_a_private_name():
  """Catches a second place to mend when a release moves a name."""
  private_name = re.compile(
    r"\b(import|from) .*\._src\b|\._cache_size\b|\._value_holders\b"
  )
  users = {
    path.name
    for package in ("antlm_jax", "evals")
    for path in (runs.ROOT / package).rglob("*.py")
    if private_name.search(path.read_text("utf-8"))
  }
  assert users == {"private.py"}


def test_a_flag_is_held_in_a_block():
  """Without it, a notebook's flags would change results in silence."""
  assert private.jax_flags().keys() & jax_flags._VALUES.keys()
  with private.jax_flags()["jax_enable_x64"](True):
    assert jax.config.jax_enable_x64
  assert not jax.config.jax_enable_x64


def test_compiled_programs_are_counted():
  """Without it, minutes of compiling would count for the speed of a run."""
  double = jax.jit(lambda x: 2 * x)
  assert private.compiled_programs(double) == 0
  assert double(1) + double(2) == 6
  assert private.compiled_programs(double) == 1
  double(1.0)
  assert private.compiled_programs(functools.partial(double, 3)) == 2


_STORE = """
import socket
import jax
from antlm_jax import private
assert private.key_value_store() is None
with socket.socket() as free:
  free.bind(("localhost", 0))
  port = free.getsockname()[1]
jax.distributed.initialize(f"localhost:{port}", 1, 0)
private.key_value_store().key_value_set("failed/0", "why")
print(private.key_value_store().key_value_dir_get("failed"))
"""


def test_processes_share_a_store():
  """Without it, processes would wait for a failed process."""
  assert "why" in runs.run_code(_STORE, devices=1)


def test_a_compiler_can_be_registered():
  """Without it, `antlm plan` could not compile for absent GPUs."""
  signature = inspect.signature(xla_bridge.register_plugin)
  signature.bind("cuda", library_path="xla_cuda_plugin.so")


def test_errors_of_the_search_for_devices_are_known():
  """Without it, a wrong JAX_PLATFORMS would print a traceback."""
  with pytest.raises(RuntimeError) as caught:
    jax.devices("no_such_platform")
  frames = traceback.extract_tb(caught.value.__traceback__)
  assert private.searches_devices(frames[-1].filename)


@pytest.mark.skipif(
  tokamax.installed_version() not in tokamax.TESTED,
  reason=f"needs tokamax {' or '.join(tokamax.TESTED)} (Python 3.12)",
)
def test_tokamax_has_its_implementations_and_mask():
  """Without them, GPUs before and after Hopper have no masks with bounds."""
  run, mask = private.tokamax_attention("xla_chunked")
  assert callable(run) and mask(is_causal=True)
