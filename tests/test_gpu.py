"""Tests that need a GPU: attention, and training compared with a CPU.

    python -m tests.test_gpu [PATTERN]

runs these tests, or those whose names match a pattern such as `our_kernel`. It
needs no pytest and few of antlm_jax's dependencies: jax, flax, optax, orbax.
"""

import re
import sys
import time
import traceback
import unittest

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import attention, cli, errors
from antlm_jax import mesh as mesh_lib
from antlm_jax.evals.benchmarks import train_step as benchmark
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models.llama import LlamaConfig
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.objectives.corruption import Segments
from antlm_jax.training.step import jitted, state_shardings
from tests import reference

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


def inputs(dtype, width: int = WIDTH):
  """Returns q, k, v and a gradient of the output."""
  draw = np.random.default_rng(0)
  heads = HEADS, KV_HEADS, KV_HEADS, HEADS
  return [
    jnp.asarray(draw.normal(size=(*SHAPE, n, width)), dtype) for n in heads
  ]


@jax.jit(static_argnames="implementation")
def attend(q, k, v, g, mask, dropout, implementation):
  """Returns the output, and the gradients for its upstream gradient g."""

  def run(q, k, v):
    return attention.attend(
      q, k, v, mask, dropout=dropout, implementation=implementation
    )

  out, pull = jax.vjp(run, q, k, v)
  return out, *pull(g)


def check(mask, dtype, implementation, dropout=None, width=WIDTH):
  """Compares attention and its gradients with the reference."""
  arrays = inputs(dtype, width)
  # By default a GPU multiplies float32 in TF32, which has 10 bits.
  with jax.default_matmul_precision("highest"):
    found = attend(*arrays, mask, dropout, implementation)
  *arrays, g = arrays
  seen, kept = reference.visible(mask, *SHAPE, LENGTH), None
  if dropout is not None:
    with jax.default_device(jax.devices("cpu")[0]):
      kept = np.asarray(dropout.kept(HEADS, AT[0], AT[0])) * dropout.scale
  expected, _ = reference.attention(*arrays, seen, g, kept)
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


def check_widths(kernel: str):
  """Checks a kernel with all masks and several head widths."""
  need(kernel)
  for mask in (CAUSAL, BIDIRECTIONAL, packed(True), packed(False), mixed()):
    for width in (64, 96, 128):
      for dtype in (jnp.bfloat16, jnp.float16):
        check(mask, dtype, kernel, width=width)


def test_our_kernel_in_every_width():
  check_widths("mosaic")


def test_tokamax_in_every_width():
  check_widths("tokamax")


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
  for dtype in XLA:
    for mask in (packed(True), packed(False), mixed()):
      check(mask, dtype, "chunked")
    for mask in (CAUSAL, packed(False)):
      check(mask, dtype, "chunked", DROPOUT)
    check_zeros(dtype, "chunked")


def test_our_kernel_gives_zeros_where_nothing_is_seen():
  need("mosaic")
  check_zeros(jnp.bfloat16, "mosaic")


def test_tokamax_gives_zeros_where_nothing_is_seen():
  need("tokamax")
  check_zeros(jnp.bfloat16, "tokamax")


def check_zeros(dtype, implementation):
  """Checks queries that see no key, in a part of a row and in a whole row."""
  start, end = AT * 0, AT * 0 + LENGTH
  start[0, 7:300] = end[0, 7:300] = 40  # empty intervals
  end[1] = 0  # a whole row
  mask = AttentionMask(False, start, end)
  out, dq, dk, dv = check(mask, dtype, implementation)
  for x in (out, dq):
    assert not x[0, 7:300].any() and not x[1].any()
    assert x[0, :7].any() and x[0, 300:].any()
  assert not dk[1].any() and not dv[1].any()


def test_the_choice_is_cudnn_where_it_can_and_chunks_elsewhere():
  q, k = inputs(jnp.bfloat16)[:2]
  for mask in (CAUSAL, BIDIRECTIONAL):
    assert attention.choose_attention(mask, q, k, dropout=True) == "chunked"
    for odd in (
      inputs(jnp.float32),
      inputs(jnp.bfloat16, 12),
      inputs(jnp.bfloat16, 512),
    ):
      assert attention.choose_attention(mask, *odd[:2]) == "chunked"
  for mask in (packed(True), packed(False), mixed()):
    assert attention.choose_attention(mask, q, k) == "chunked"
  need_cudnn()
  for mask in (CAUSAL, BIDIRECTIONAL):
    assert attention.choose_attention(mask, q, k) == "cudnn"


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
