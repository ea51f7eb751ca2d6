"""tokamax's attention through our interface, without a GPU.

`./launch/test.sh --mosaic` installs tokamax and runs the tests that need it.
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import jax.numpy as jnp
import pytest

from antlm_jax import attention
from antlm_jax.attention.gpu import tokamax
from antlm_jax.masks import CAUSAL
from tests.attention_cases import (
  MODES,
  attend,
  check_errors,
  check_gaps,
  expected,
  inputs,
  make_mask,
  mask_with_gaps,
)

needs_tokamax = pytest.mark.skipif(
  tokamax.installed_version() not in tokamax.TESTED,
  reason=f"needs tokamax {' or '.join(tokamax.TESTED)} (Python 3.12)",
)
SHAPE = 2, 160, 160, 4, 2, 64


def test_an_installation_without_xprof_is_refused(monkeypatch):
  """Catches a ModuleNotFoundError in a run's first step."""
  monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.17")
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  q = jnp.zeros((1, 8, 2, 16), jnp.bfloat16)
  with pytest.raises(ValueError, match=r"tokamax 0.0.17 .* without xprof"):
    attention.choose_attention(CAUSAL, q, q, "tokamax")


@needs_tokamax
@pytest.mark.parametrize("mode", MODES)
def test_each_mask_gives_the_reference_and_its_gradients(mode):
  """Catches bounds that tokamax reads in another way than we do."""
  arrays = inputs(SHAPE, dtype="bfloat16")
  *qkv, g = arrays
  mask = make_mask(mode, *SHAPE[:3])
  found = attend(*qkv, mask, g, "tokamax")
  check_errors(found, expected(SHAPE, mask, arrays), 1e-2)


@needs_tokamax
def test_a_query_without_keys_gets_zero():
  """tokamax itself has the mean of all values, and gradients for them."""
  *qkv, g = inputs(SHAPE, dtype="bfloat16")
  check_gaps(attend(*qkv, mask_with_gaps(*SHAPE[:2]), g, "tokamax"))


_COMPILE = """
import sys
import jax
from jax.experimental import topologies
from jax.extend import backend
from antlm_jax.evals.benchmarks import attention, common
from antlm_jax.planning import gpus

class Absent:  # tokamax asks the default device; there is none
  platform, device_kind, core_count = "gpu", sys.argv[1], 132
  compute_capability = sys.argv[2]

backend.get_default_device = Absent
from tokamax._src.ops import op
op.infer_devices = lambda bound: {Absent()}
device = topologies.get_topology_desc(
  platform="cuda", topology_name="x", topology="1x1x1",
  target_config=gpus.description(gpus.GPUS[sys.argv[3]]),
).devices[0]
shape = attention.SHAPES["150M"]
for name in ("window", "packed causal", "full"):
  mask = attention.make_mask(name, shape.rows, shape.length)
  attend = attention.our_attention(shape, name, "tokamax")
  made = attention.compile_attention(device, attend, shape, mask)
  print(name, made.memory_analysis().temp_size_in_bytes)
"""


@needs_tokamax
@pytest.mark.skipif(
  importlib.util.find_spec("jax_plugins") is None,
  reason="needs XLA's compiler for GPUs",
)
@pytest.mark.parametrize(
  "kind",
  [
    ("NVIDIA H100 80GB HBM3", "9.0", "h100"),  # Mosaic
    ("NVIDIA A100-SXM4-40GB", "8.0", "a100-40"),  # Triton
    ("NVIDIA GeForce RTX 4090", "8.9", "rtx4090"),
  ],
  ids=lambda kind: kind[2],
)
def test_it_compiles_for_a_gpu_that_is_not_there(kind):
  """Both directions, and no scores in memory."""
  found = subprocess.run(
    [sys.executable, "-c", _COMPILE, *kind],
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  )
  # tokamax warns of each shape that it was not tuned for, in a kilobyte.
  assert "Autotuning cache miss" not in found.stderr
  sizes = [int(line.split()[-1]) for line in found.stdout.splitlines()]
  assert len(sizes) == 3
  assert max(sizes) < 32 * 1024 * 1024 * 12 * 2 / 4  # a fourth of the scores
