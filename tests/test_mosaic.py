"""The kernel for Hopper GPUs, interpreted and compiled without a GPU.

JAX's interpreter of GPU programs follows every thread and barrier, and reports
races. That takes minutes, so all tests but one are slow. `./launch/test.sh
--mosaic` makes an environment for them, with each JAX and XLA's compiler.
"""

import importlib.util
import os
import re
import subprocess
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax import attention
from antlm_jax.masks import CAUSAL, AttentionMask
from tests import reference
from tests.attention_cases import (
  attend,
  check_errors,
  check_gaps,
  expected,
  inputs,
  long_mask,
  mask_with_gaps,
)
from tests.attention_draws import calls

if jax.__version_info__ < (0, 11, 2):
  pytest.skip(
    f"needs jax 0.11.2, not {jax.__version__}: ./launch/test.sh --mosaic",
    allow_module_level=True,
  )

if jax.__version_info__ < (0, 12):
  from jax._src.pallas.mosaic_gpu.interpret.shared_memory import Barrier

  def deallocate(barrier):
    """Allows the loading warpgroup to end before its last slots are free."""
    with barrier.cv:
      barrier.ref_count -= 1
      if not barrier.ref_count and barrier.arrivals_count:
        raise ValueError("a barrier ends with arrivals pending")

  Barrier.deallocate = deallocate  # as in JAX 0.12

LIMITS = {"bfloat16": 1e-2, "float16": 2e-3}


def check(shape, mask, dtype="bfloat16", rate=0.0, seed=0):
  """Compares outputs and gradients with float64; returns them."""
  arrays = q, k, v, g = inputs(shape, seed, dtype)
  dropout = None
  if rate:
    dropout = attention.Dropout(rate, jnp.arange(shape[0], dtype=jnp.uint32))
  found = attend(q, k, v, mask, g, "mosaic", dropout=dropout)
  assert all(x.dtype == dtype for x in found)
  exact = expected(shape, mask, arrays, dropout=dropout)
  check_errors(found, exact, LIMITS[dtype])
  return found


@pytest.mark.slow
def test_a_packed_row_is_exact():
  """The quick test: blocks with and without a mask, dropout, gradients."""
  start = np.repeat([0, 128], [128, 32]).astype(np.int32)[None]
  end = np.repeat([128, 160], [128, 32]).astype(np.int32)[None]
  end[0, 130] = 128  # a query that sees nothing
  check((1, 160, 160, 1, 1, 64), AttentionMask(False, start, end), rate=0.1)


@pytest.mark.nightly
@hypothesis.given(
  calls(
    longest=300,
    near=[1, 64, 127, 128, 129, 256, 257],
    widths=[64, 96, 128],
    dtypes=[*LIMITS],
    kv_heads=1,
    group=2,
  )
)
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
def test_it_and_its_gradients_are_exact(case):
  check(*case)


@pytest.mark.nightly
@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("mode", ["causal", "mixed"])
def test_every_width_in_whole_and_masked_blocks(mode, width):
  mask = {"causal": CAUSAL}.get(mode) or long_mask(mode, 2, 384, 384, 0)
  check((2, 384, 384, 4, 2, width), mask, rate=0.1)


@pytest.mark.nightly
def test_what_sees_nothing_gets_zeros():
  check_gaps(check((2, 256, 256, 2, 1, 64), mask_with_gaps(2, 256)))


@pytest.mark.nightly
def test_blocks_that_no_query_needs_are_not_touched():
  # Two documents of two blocks. A product of both would be NaN.
  first = np.repeat([0, 256], 256).astype(np.int32)[None]
  mask = AttentionMask(False, first, first + 256)
  arrays = inputs((1, 512, 512, 1, 1, 64), dtype=jnp.bfloat16)

  def run(q, k, v, g):
    return attend(q, k, v, mask, g, "mosaic")

  whole = run(*arrays)
  for there in (slice(0, 256), slice(256, 512)):
    other = [x.at[:, there].set(jnp.nan) for x in arrays]
    for x, y in zip(whole, run(*other), strict=True):
      x, y = (np.delete(np.asarray(z), there, axis=1) for z in (x, y))
      assert np.array_equal(x, y)


@pytest.mark.nightly
@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
def test_any_scale(scale):
  shape = 1, 128, 128, 1, 1, 64
  q, k, v, g = inputs(shape, dtype=jnp.bfloat16)
  out = attention.attend(q, k, v, CAUSAL, scale=scale, implementation="mosaic")
  seen = reference.visible(CAUSAL, 1, 128, 128)
  exact = reference.attention(q, k, v, seen, g, scale=scale)[0].out
  assert reference.relative_error(out, exact) < LIMITS["bfloat16"]


# The compiled program

PRODUCTS = {  # instructions of depth 16: two loops of one block, or of halves
  "attention_output": lambda width: 2 * (width // 16 + 8),
  "attention_query_gradient": lambda width: 4 * (2 * width // 16 + 4),
  "attention_key_gradients": lambda width: 4 * (2 * width // 16 + 8),
}
SHARED_MEMORY = 232_448  # bytes of a thread block, at most, on an H100


@pytest.mark.nightly
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("width", [64, 96, 128])
def test_compiled_for_an_h100_it_fits(width, rate):
  if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip("needs jax's compiler for GPUs: ./launch/test.sh --mosaic")
  told = ("PTXAS", "SASS", "RESOURCES")
  done = subprocess.run(
    [sys.executable, "-m", "tests.mosaic_h100", str(width), str(rate)],
    env=os.environ
    | {"JAX_PLATFORMS": "cpu"}
    | {f"MOSAIC_GPU_DUMP_{name}": "1" for name in told},
    capture_output=True,
    text=True,
    check=True,
  )
  memory = re.findall(r"smem_scratch_bytes=(\d+)", done.stdout)
  assert len(memory) == 3 and max(map(int, memory)) <= SHARED_MEMORY
  _, *parts = re.split(r"Compiling entry function '(\w+)_mosaic", done.stdout)
  found = dict(zip(parts[::2], parts[1::2], strict=True))
  assert found.keys() == PRODUCTS.keys()
  for name, text in found.items():
    assert "for 'sm_90a'" in text
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    # In the widest heads, the hash needs a few registers too many.
    most = 128 if rate and width == 128 else 0
    assert spilled and max(map(int, spilled)) <= most, name
    registers = int(re.search(r"Used (\d+) registers", text)[1])
    assert registers * 3 * 128 <= 65_536
    assert text.count("HGMMA") == PRODUCTS[name](width), name
