"""The kernel for Hopper GPUs, interpreted and compiled without a GPU.

`./launch/test.sh --mosaic` makes the environment of these tests and runs them.
JAX's interpreter of GPU programs follows every thread and barrier, and reports
races.
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
from hypothesis import strategies as st

from antlm_jax import attention
from antlm_jax.masks import CAUSAL, AttentionMask
from tests import reference
from tests.attention_cases import (
  MODES,
  attend,
  check_errors,
  expected,
  inputs,
  long_mask,
)

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


@st.composite
def masks(draw, batch, queries, keys):
  """Draws masks as in training, and arbitrary or empty intervals."""
  seed = draw(st.integers(0, 2**16))
  modes = [*MODES, "packed", "mixed", "window", "prefix", "any", "any"]
  mode = draw(st.sampled_from(modes))
  if mode != "any":
    return long_mask(mode, batch, queries, keys, seed)
  random = np.random.default_rng(seed)
  start = random.integers(0, keys + 1, (batch, queries), np.int32)
  longest = draw(st.sampled_from([3, keys]))
  length = random.integers(0, longest + 1, start.shape, np.int32)
  return AttentionMask(
    draw(st.booleans()), start, np.minimum(start + length, keys)
  )


@st.composite
def cases(draw):
  """Draws arguments of `check`."""
  batch, kv_heads, group = (draw(st.integers(1, n)) for n in (2, 1, 2))
  near = st.sampled_from([1, 64, 127, 128, 129, 256, 257])
  queries = draw(near | st.integers(1, 300))
  keys = queries if draw(st.booleans()) else draw(near | st.integers(1, 300))
  width = draw(st.sampled_from([64, 96, 128]))
  shape = batch, queries, keys, group * kv_heads, kv_heads, width
  mask = draw(masks(batch, queries, keys))
  dtype = draw(st.sampled_from(list(LIMITS)))
  rate = draw(st.sampled_from([0.0, 0.0, 0.3]))
  return shape, mask, dtype, rate, draw(st.integers(0, 2**16))


@hypothesis.given(cases())
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
def test_it_and_its_gradients_are_exact(case):
  check(*case)


@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("mode", ["causal", "mixed"])
def test_every_width_in_whole_and_masked_blocks(mode, width):
  mask = {"causal": CAUSAL}.get(mode) or long_mask(mode, 2, 384, 384, 0)
  check((2, 384, 384, 4, 2, width), mask, rate=0.1)


def test_what_sees_nothing_gets_zeros():
  start = np.zeros((2, 256), np.int32)
  end = np.full((2, 256), 256, np.int32)
  end[0, 7:200] = 0
  end[1] = 0
  shape = 2, 256, 256, 2, 1, 64
  out, dq, dk, dv = check(shape, AttentionMask(False, start, end))
  for x in (out, dq):
    assert not x[0, 7:200].any() and not x[1].any()
    assert x[0, :7].any() and x[0, 200:].any()
  assert not dk[1].any() and not dv[1].any()


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
