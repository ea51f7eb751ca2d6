"""Tests that need a GPU: attention, and training compared with a CPU.

    python -m tests.test_gpu [PATTERN]

runs these tests, or those whose names match a pattern such as `our_kernel`. It
needs no pytest and few of antlm_jax's dependencies: jax, flax, optax, orbax.
"""

import concurrent.futures
import functools
import importlib.metadata
import itertools
import re
import sys
import time
import traceback
import unittest
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import attention, cli, errors
from antlm_jax import mesh as mesh_lib
from antlm_jax.evals.benchmarks import train_step as benchmark
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models import fused, layers
from antlm_jax.models.llama import LlamaConfig
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.objectives.corruption import Segments
from antlm_jax.training.step import jitted, state_shardings
from tests import attention_cases
from tests.attention_cases import check_gaps, mask_with_gaps

try:
  import pytest
except ImportError:
  pytest = None
else:
  pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU"),
  ]

# More keys than one chunk, and not a multiple of it.
ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 320, 4, 2, 64
SHAPE = ROWS, LENGTH
AT = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), SHAPE)
# Largest error, relative to the largest value. Weights are rounded to
# bfloat16 before they meet the values.
LIMITS = {jnp.float32: 2e-5, jnp.bfloat16: 2e-2, jnp.float16: 4e-3}
XLA = (jnp.float32, jnp.bfloat16)
DROPOUT = attention.Dropout(0.2, jnp.asarray([3, 2**32 - 5], jnp.uint32))


def packed(causal: bool) -> AttentionMask:
  """Returns a mask of rows of about six documents."""
  starts = np.random.default_rng(0).random(SHAPE) < 6 / LENGTH
  segments = Segments.of(starts | (AT == 0))
  return AttentionMask(causal, segments.start, None if causal else segments.end)


def mixed() -> AttentionMask:
  """Returns a mask of a causal and a bidirectional row."""
  end = AT + 1
  end[1] = LENGTH
  return AttentionMask(False, None, end)


def shape_of(width: int = WIDTH) -> tuple[int, ...]:
  return *SHAPE, LENGTH, HEADS, KV_HEADS, width


def inputs(dtype, width: int = WIDTH):
  """Returns q, k, v and a gradient of the output."""
  return attention_cases.inputs(shape_of(width), dtype=dtype)


@jax.jit(static_argnames="implementation")
def attend(q, k, v, g, mask, dropout, implementation):
  """Returns the output, and the gradients for its upstream gradient g."""
  return attention_cases.attend(
    *(q, k, v, mask, g, implementation), dropout=dropout
  )


class Case(NamedTuple):
  """A call of attention."""

  mask: AttentionMask
  dtype: Any
  implementation: str
  dropout: attention.Dropout | None = None
  width: int = WIDTH

  def compile(self):
    """Compiles the call and its gradients."""
    arrays = inputs(self.dtype, self.width)
    # By default a GPU multiplies float32 in TF32, which has 10 bits.
    with jax.default_matmul_precision("highest"):
      lowered = attend.lower(
        *arrays, self.mask, self.dropout, self.implementation
      )
      return lowered.compile()


def check_cases(cases: Sequence[Case]) -> None:
  """Checks cases; compiling takes most of the time, so it is in threads."""
  with concurrent.futures.ThreadPoolExecutor() as pool:
    compiled = list(pool.map(Case.compile, cases))
  for case, run in zip(cases, compiled, strict=True):
    check(*case, run=run)


def check(mask, dtype, implementation, dropout=None, width=WIDTH, run=None):
  """Compares attention and its gradients with the reference."""
  case = Case(mask, dtype, implementation, dropout, width)
  arrays = inputs(dtype, width)
  found = (run or case.compile())(*arrays, mask, dropout)
  with jax.default_device(jax.devices("cpu")[0]):
    expected, _ = attention_cases.expected(
      shape_of(width), mask, arrays, dropout=dropout
    )
  for name, x, y in zip(expected._fields, found, expected, strict=False):
    assert x.dtype == dtype
    error = np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max()
    assert error < LIMITS[dtype], f"{name} is off by {error:.1e}, relatively"
  return found


def need(kernel: str):
  """Skips the test if a kernel cannot run here."""
  q, k = inputs(jnp.bfloat16)[:2]
  try:
    attention.choose_attention(CAUSAL, q, k, kernel)
  except ValueError as reason:
    raise unittest.SkipTest(str(reason)) from None


def need_cudnn():
  """Skips the test if the GPU is too old for cuDNN's fused attention."""
  capability = jax.devices("gpu")[0].compute_capability
  if float(capability) < 8:
    raise unittest.SkipTest(f"compute capability {capability} is under 8.0")


def check_whole_gpu(kernel: str):
  """Thousands of thread blocks, compared with chunks in float32."""
  need(kernel)
  draw = np.random.default_rng(1)
  rows, length = 4, 2048
  starts = draw.random((rows, length)) < 3 / length
  starts[:, 0] = True
  segments = Segments.of(starts)
  mask = AttentionMask(False, segments.start, segments.end)
  arrays = [
    jnp.asarray(draw.normal(size=(rows, length, n, 64)), jnp.bfloat16)
    for n in (12, 4, 4, 12)
  ]
  found = attend(*arrays, mask, None, kernel)
  arrays = [x.astype(jnp.float32) for x in arrays]
  with jax.default_matmul_precision("highest"):
    expected = attend(*arrays, mask, None, "chunked")
  for x, y in zip(found, expected, strict=True):
    error = jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max()
    assert error < LIMITS[jnp.bfloat16], error


def test_our_kernel_on_a_whole_gpu():
  check_whole_gpu("mosaic")


def test_tokamax_on_a_whole_gpu():
  check_whole_gpu("tokamax")


def check_widths(kernel: str, *masks: AttentionMask):
  """Checks a kernel with masks and several head widths."""
  need(kernel)
  kinds = itertools.product(masks, (64, 96, 128), (jnp.bfloat16, jnp.float16))
  check_cases(
    [Case(mask, dtype, kernel, width=width) for mask, width, dtype in kinds]
  )


def test_our_kernel_in_every_width():
  masks = CAUSAL, BIDIRECTIONAL, packed(True), packed(False), mixed()
  check_widths("mosaic", *masks)


def test_tokamax_in_every_width():
  check_widths("tokamax", packed(True), mixed())


def test_our_kernel_with_dropout():
  need("mosaic")
  for mask in (CAUSAL, packed(False)):
    check(mask, jnp.bfloat16, "mosaic", DROPOUT)


def test_our_kernel_gives_the_same_bits_again():
  need("mosaic")
  first, *others = (check(packed(True), jnp.bfloat16, "mosaic") for _ in "123")
  for other in others:
    for x, y in zip(first, other, strict=True):
      assert np.array_equal(x, y)


def test_attention_through_cudnn():
  need_cudnn()
  for mask in (CAUSAL, BIDIRECTIONAL):
    check(mask, jnp.bfloat16, "cudnn")


def test_attention_through_chunks():
  cases = []
  for dtype in XLA:
    for mask in (packed(True), packed(False), mixed()):
      cases.append(Case(mask, dtype, "chunked"))
    for mask in (CAUSAL, packed(False)):
      cases.append(Case(mask, dtype, "chunked", DROPOUT))
  check_cases(cases)
  for dtype in XLA:
    check_zeros(dtype, "chunked")


def test_our_kernel_gives_zeros_where_nothing_is_seen():
  need("mosaic")
  check_zeros(jnp.bfloat16, "mosaic")


def test_tokamax_gives_zeros_where_nothing_is_seen():
  need("tokamax")
  check_zeros(jnp.bfloat16, "tokamax")


def check_zeros(dtype, implementation):
  """Checks queries that see no key."""
  check_gaps(check(mask_with_gaps(*SHAPE), dtype, implementation))


def test_the_choice_is_the_fastest_that_this_gpu_can_run():
  """The rule is tested without a GPU; here, that it knows this machine."""
  version = float(jax.devices("gpu")[0].compute_capability)
  hopper = version == 9 and jax.__version_info__ >= (0, 11, 2)
  try:
    has_tokamax = importlib.metadata.version("tokamax") == "0.0.17"
    importlib.import_module("tokamax")
  except ImportError:
    has_tokamax = False
  plain = "cudnn" if version >= 8 else "chunked"
  dropped = "mosaic" if hopper else "chunked"
  bounded = "tokamax" if has_tokamax and version >= 8 else "chunked"
  bounded = "mosaic" if hopper else bounded
  q, k = inputs(jnp.bfloat16)[:2]
  for mask in (CAUSAL, BIDIRECTIONAL):
    assert attention.choose_attention(mask, q, k) == plain
    assert attention.choose_attention(mask, q, k, dropout=True) == dropped
    for odd in (
      inputs(jnp.float32),
      inputs(jnp.bfloat16, 12),
      inputs(jnp.bfloat16, 512),
    ):
      assert attention.choose_attention(mask, *odd[:2]) == "chunked"
  for mask in (packed(True), packed(False), mixed()):
    assert attention.choose_attention(mask, q, k) == bounded


def test_norms_and_gated_mlps_by_kernels():
  """Compares the kernels' results and gradients with the plain formulas."""
  keys = jax.random.split(jax.random.key(0), 4)
  x, y, *grads = (
    jax.random.normal(key, (8, 128, 768), jnp.bfloat16) for key in keys
  )

  def check_both(function, grad):
    results = []
    for kernel in (True, False):
      run = functools.partial(function, fused=kernel)
      result, pull = jax.jit(lambda x, y, run=run: jax.vjp(run, x, y))(x, y)
      results.append(jax.tree.leaves((result, pull(grad))))
    for a, b in zip(*results, strict=True):
      a, b = (z.astype(jnp.float32) for z in (a, b))
      error = float(jnp.sqrt(jnp.square(a - b).mean() / jnp.square(b).mean()))
      assert error < 1e-2, f"{function}: off by {error:.1e}"

  if not fused.available(x):
    raise unittest.SkipTest(f"no kernels for {jax.devices()[0].device_kind}")
  for norm in (
    layers.RMSNorm(768, 1e-5),
    layers.LayerNorm(768, 1e-5, affine=True, bias=False),
  ):
    check_both(functools.partial(fused.residual_norm, norm), tuple(grads))
  for activation in (jax.nn.silu, jax.nn.gelu, layers.exact_gelu):
    check_both(functools.partial(fused.gated_product, activation), grads[0])


def losses(batch: str, device: jax.Device, steps: int = 16) -> list[float]:
  """Returns the losses of some steps on one batch."""
  config = LlamaConfig(
    vocab_size=64,
    layers=2,
    width=128,
    heads=2,
    kv_heads=1,
    mlp_width=192,
    dtype="bfloat16",
  )
  train_step = benchmark.make_step(config)
  example = benchmark.make_example(
    batch, BatchLayout(4), LENGTH, config.vocab_size
  )
  mesh = mesh_lib.Mesh().build([device])
  found = []
  with jax.set_mesh(mesh):
    init, step, _ = jitted(train_step, state_shardings(train_step, mesh))
    state, example = init(), mesh_lib.place_batch(mesh, example)
    for _ in range(steps):
      state, metrics = step(state, example)
      found.append(float(metrics["total_loss"]))
  return found


def check_training(batch: str):
  """Trains on the GPU and on the CPU, and compares the losses."""
  on_gpu = losses(batch, jax.devices()[0])
  on_cpu = losses(batch, jax.devices("cpu")[0])
  assert on_gpu[-1] < 0.9 * on_gpu[0], on_gpu
  error = np.abs(np.divide(on_gpu, on_cpu) - 1).max()
  assert error < 2e-2, f"off by {error:.1e}: {on_gpu}, on the CPU {on_cpu}"


def test_clm_trains_as_on_the_cpu():
  check_training("clm")


def test_mlm_trains_as_on_the_cpu():
  check_training("mlm")


def test_packed_rows_train_as_on_the_cpu():
  check_training("packed")


def test_mixed_rows_train_as_on_the_cpu():
  check_training("mixed")


def main(argv) -> None:
  """Runs the tests, and prints a line for each."""
  parser = cli.Parser(prog="test_gpu", description=__doc__)
  parser.add_argument("pattern", nargs="?", default="", help="Names to run")
  pattern = parser.parse_args(argv).pattern
  if jax.default_backend() != "gpu":
    raise errors.UserError(f"JAX sees no GPU, only {jax.default_backend()}")
  failed = 0
  tests = {n: f for n, f in globals().items() if n.startswith("test_")}
  tests = {n: f for n, f in tests.items() if re.search(pattern, n)}
  for name, test in tests.items():
    begun, outcome = time.monotonic(), "passed"
    try:
      test()
    except unittest.SkipTest as reason:
      outcome = f"skipped: {reason}"
    except Exception:
      traceback.print_exc()
      outcome, failed = "FAILED", failed + 1
    print(f"{name} {outcome} ({time.monotonic() - begun:.1f} s)", flush=True)
  print(f"{len(tests)} tests, {failed} failed")
  sys.exit(failed > 0)


if __name__ == "__main__":
  cli.run_command(main)
