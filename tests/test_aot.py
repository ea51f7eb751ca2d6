"""The hot path, compiled for absent TPUs."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src import compilation_cache

from antlm_jax import attention, models
from antlm_jax import mesh as mesh_lib
from antlm_jax.evals.benchmarks import attention as benchmark
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.benchmarks.attention import Shape
from antlm_jax.head import losses
from antlm_jax.head import tpu as head_tpu
from antlm_jax.masks import CAUSAL
from antlm_jax.models import llama
from antlm_jax.models.encoder import Head
from antlm_jax.objectives.batch import Batch
from antlm_jax.planning import compilers, topology
from tests import helpers

needs_libtpu = pytest.mark.skipif(
  compilers.libtpu() is None,
  reason="libtpu is not installed: launch/setup.sh libtpu (700 MB)",
)
GENERATIONS = {  # a small slice of each TPU generation
  "v4": "v4:2x2x1",
  "v5e": "v5e:2x2",
  "v5p": "v5p:2x2x1",
  "v6e": "v6e:2x2",
  "tpu7x": "tpu7x:2x2x1",
}
FUSED = ["gradients", "output"]
IN_TWO = ["key_gradients", "output", "query_gradient"]


def kernels(compiled) -> list[str]:
  """Returns the names of a program's calls of attention kernels."""
  calls = re.findall(
    r"%(\S+) = \S.* custom-call\(.*tpu_custom_call", compiled.as_text()
  )
  names = (re.search(r"attention_([a-z]+(_[a-z]+)?)_*\.", c) for c in calls)
  return sorted(name[1].rstrip("_") for name in names if name)


def temp(compiled) -> int:
  return compiled.memory_analysis().temp_size_in_bytes


def compile_attention(device, shape, mask, implementation="pallas", **options):
  def attend(q, k, v, mask):
    return attention.attend(
      q, k, v, mask, implementation=implementation, **options
    )

  return benchmark.compile_attention(device, attend, shape, mask)


# The generation with the least vector memory compiles every shape; the others
# compile one shape.
FULLY = "v4"
SHAPES = (
  (Shape(2, 2048, 6, 2, 64), "mixed"),
  (Shape(2, 1100, 8, 1, 64), "packed causal"),  # no block divides it
  (Shape(1, 1536, 4, 1, 128), "packed"),  # the largest row of one kernel
  (Shape(1, 32768, 1, 1, 64), "packed"),
)
MORE_SHAPES = (
  (Shape(2, 2048, 4, 4, 64), "causal"),
  (Shape(2, 2048, 4, 4, 64), "full"),
  (Shape(8, 128, 12, 12, 64), "packed"),
)

SMALL = ((Shape(2, 1024, 4, 2, 64), "packed causal"),)
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@needs_libtpu
@pytest.mark.parametrize(
  "generation, width, shapes",
  [
    *(("v5e", width, SMALL) for width in (64, 128)),
    pytest.param(FULLY, 64, SHAPES, marks=SLOW),
    pytest.param(FULLY, 64, MORE_SHAPES, marks=NIGHTLY),
    pytest.param(FULLY, 96, SHAPES + MORE_SHAPES, marks=NIGHTLY),
    pytest.param("v6e", 128, SHAPES[:1], marks=SLOW),
    *(
      pytest.param(generation, 128, SHAPES[:1], marks=NIGHTLY)
      for generation in ("v5e", "v5p", "tpu7x")
    ),
  ],
)
def test_the_kernels_compile_for_every_generation(generation, width, shapes):
  device = topology.topology_devices(GENERATIONS[generation])[0]
  for shape, name in shapes:
    if shape.width == 64:
      shape = dataclasses.replace(shape, width=width)
    mask = benchmark.make_mask(name, shape.rows, shape.length)
    names = kernels(compile_attention(device, shape, mask))
    row = shape.heads // shape.kv_heads * shape.length * shape.width
    assert names == (IN_TWO if row > 3 * 2**18 else FUSED), shape


# The kernel's largest shapes by number of heads, width or group: rows, length,
# heads, heads of keys and values, width and dtype.
LARGE = (
  (2, 1024, 4, 4, 256, jnp.float32),
  (2, 1024, 4, 2, 128, jnp.float32),
  (2, 1024, 4, 2, 128, jnp.bfloat16),
  (8, 128, 16, 16, 128, jnp.float32),
  (8, 128, 16, 16, 256, jnp.bfloat16),
  (1, 256, 32, 1, 128, jnp.bfloat16),
)


@pytest.mark.sample(0, 1)
@needs_libtpu
@pytest.mark.parametrize(
  "generation, case",
  [
    *((generation, LARGE[0]) for generation in GENERATIONS),
    *((FULLY, case) for case in LARGE[1:]),
  ],
)
def test_dropout_and_large_steps_compile_for_every_generation(generation, case):
  device = topology.topology_devices(GENERATIONS[generation])[0]

  def run(q, k, row_keys):
    return jax.grad(
      lambda q, k: attention.attend(
        *(q, k, k, CAUSAL), dropout=attention.Dropout(0.1, row_keys)
      ).sum(),
      argnums=(0, 1),
    )(q, k)

  rows, length, heads, kv_heads, width, dtype = case
  q = jax.ShapeDtypeStruct((rows, length, heads, width), dtype)
  k = jax.ShapeDtypeStruct((rows, length, kv_heads, width), dtype)
  keys = jax.ShapeDtypeStruct((rows,), jnp.uint32)
  compiled = common.compile_for(device, run, q, k, keys)
  # A TPU chooses the kernel by default.
  assert kernels(compiled) in (FUSED, IN_TWO)


def compile_head(device, targets, tokens, width, dtype, biased):
  """Compiles the head's loss with a TPU's default implementation."""

  def run(hidden, kernel, bias, targets, weights):
    def loss(hidden, kernel, bias):
      of = Head(kernel, bias if biased else None)
      return losses.cross_entropy(
        of, hidden, None, targets, weights, targets, 1, z_loss=1e-4
      )

    grads, sums = jax.grad(loss, (0, 1, 2), has_aux=True)(hidden, kernel, bias)
    return grads, sums, loss(hidden, kernel, bias)[1]

  like = jax.ShapeDtypeStruct
  return common.compile_for(
    device,
    run,
    like((1, targets, width), dtype),
    like((width, tokens), jnp.float32),
    like((tokens,), jnp.float32),
    like((1, targets), jnp.int32),
    like((1, targets), jnp.float32),
  )


@pytest.mark.sample(0, 2)
@needs_libtpu
@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize(
  "case",
  [
    (2048, 32_768, 4096, jnp.bfloat16, False),  # the smallest blocks of v4
    (2048, 128_256, 1152, jnp.bfloat16, False),
    (1000, 50_368, 768, jnp.bfloat16, True),  # no block divides these
    (300, 6_144, 384, jnp.float32, True),
  ],
)
def test_the_heads_kernels_compile_for_every_generation(generation, case):
  device = topology.topology_devices(GENERATIONS[generation])[0]
  compiled = compile_head(device, *case)
  calls = re.findall(f"%({head_tpu.NAMES})", compiled.as_text())
  assert len({name for name, _ in calls}) == 3
  # The largest arrays are the kernel and its gradient, not the scores.
  scores = case[0] * case[1] * 4
  kernel = case[1] * case[2] * 4
  print(f"{generation} {case}: temp {temp(compiled):,} B")
  assert temp(compiled) < 2.5 * kernel + scores / 8


def compile_with_terms(device, shape, implementation="auto"):
  mask = benchmark.make_mask("packed", shape.rows, shape.length)
  attend = benchmark.our_attention(shape, "packed", implementation)
  return benchmark.compile_attention(device, attend, shape, mask)


@pytest.mark.sample(0, 1)
@needs_libtpu
@pytest.mark.parametrize(
  "generation, rows, length, width",
  [
    ("v5e", 8, 128, 64),
    ("v5e", 2, 512, 32),
    ("v5e", 1, 2048, 64),
    *((name, 2, 512, 64) for name in GENERATIONS if name != "v4"),
  ],
)
def test_position_terms_compile_for_later_generations(
  generation, rows, length, width
):
  device = topology.topology_devices(GENERATIONS[generation])[0]
  shape = Shape(rows, length, 4, 4, width, buckets=63)
  # A TPU chooses the kernel by default.
  assert kernels(compile_with_terms(device, shape)) == FUSED


@needs_libtpu
@pytest.mark.parametrize("generation", GENERATIONS)
def test_v4_has_no_position_terms_in_the_kernel(generation):
  devices = topology.topology_devices(GENERATIONS[generation])[:1]
  q = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.bfloat16)
  with jax.set_mesh(
    jax.make_mesh((1, 1, 1), mesh_lib.MESH_AXES, devices=devices)
  ):
    choice = attention.choose_attention(CAUSAL, q, q, buckets=63)
    assert choice == ("chunked" if generation == "v4" else "pallas")
    assert attention.choose_attention(CAUSAL, q, q) == "pallas"


@pytest.mark.slow
@needs_libtpu
def test_position_terms_take_memory_linear_in_the_length():
  device = topology.topology_devices(GENERATIONS["v5e"])[0]
  compiled = compile_with_terms(device, Shape(1, 65536, 2, 2, 64, buckets=63))
  assert kernels(compiled) == IN_TWO
  # One T x T matrix of bytes has 4 GiB per head; the terms have 16 MiB.
  print(f"temp at 65,536: {temp(compiled):,} B")
  assert temp(compiled) < 2**28
  shapes = re.findall(r"\b[a-z]\w*\[([\d,]+)\]", compiled.as_text())
  assert any("65536" in shape.split(",") for shape in shapes)
  assert not [s for s in shapes if s.split(",").count("65536") > 1]


@pytest.mark.slow
@needs_libtpu
def test_memory_is_linear_in_the_length():
  device = topology.topology_devices(GENERATIONS["v5e"])[0]
  found = {}
  for length in (4096, 16384):
    shape = Shape(1, length, 2, 2, 64)
    mask = benchmark.make_mask("packed", 1, length)
    found[length] = temp(compile_attention(device, shape, mask))
  # Temporary arrays are log-sum-exps, deltas and tables: q, k, v and the
  # gradients are arguments and results. A T x T matrix of bytes has 256 MiB.
  print(f"temp at 4,096 and at 16,384 tokens: {found}")
  assert found[16384] <= 4 * found[4096] + 2**20
  assert found[16384] < 2**23


@pytest.mark.nightly
@needs_libtpu
@pytest.mark.parametrize(
  "width", [64, pytest.param(128, marks=pytest.mark.nightly)]
)
def test_a_layers_memory_is_at_most_with_splash_attention(width):
  # With projections, because bare arrays get the layout that a kernel prefers.
  device = topology.topology_devices(GENERATIONS["v5e"])[0]
  shape = Shape(8, 2048, 12, 12, width)
  for name in ("causal", "packed"):
    mask = benchmark.make_mask(name, 8, 2048)
    ours, *theirs = (
      temp(benchmark.compile_layer(device, attend, shape, mask))
      for attend in (
        benchmark.our_attention(shape, name, "pallas"),
        benchmark.splash_attention(shape, name),
        benchmark.splash_attention(shape, name, fused=True),
      )
    )
    print(f"{shape} {name}: {ours:,} B; with splash attention {theirs}")
    assert ours <= min(theirs)


def step_example(rows, length, mask) -> Batch:
  """Returns a batch with targets at a fifth of its positions."""
  targets = np.zeros((1, 1, rows * length // 5), np.int32)
  tokens = np.zeros((1, rows, length), np.int32)
  return Batch(
    inputs=tokens,
    positions=tokens,
    mask=jax.tree.map(lambda x: x[None], mask),
    target_positions=targets,
    targets=targets,
    weights=targets.astype(np.float32),
    objective_ids=targets,
  )


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
  "size, length, mode",
  [
    pytest.param("97M", 1536, "causal", marks=pytest.mark.nightly),
    # With dropout; `test_plan` compiles a smaller step.
    pytest.param("97M", 1536, "mixed", marks=pytest.mark.nightly),
    pytest.param("610M", 2048, "packed", marks=pytest.mark.nightly),
  ],
)
def test_a_train_step_holds_the_kernel_and_no_square(size, length, mode):
  devices = topology.topology_devices(GENERATIONS["v5p"])[:1]
  mesh = mesh_lib.Mesh().build(devices)
  model = models.from_config(
    llama.LlamaConfig(
      vocab_size=16_000,
      **llama.SHAPES[size] | {"layers": 2},
      scan_layers="yes",
      tied=size == "97M",
      dtype="bfloat16",
      remat="none" if size == "97M" else "dots",
      attention_dropout=0.1 if mode == "mixed" else 0.0,
    )
  )
  train_step = helpers.train_step(model, optimizer=optax.scale_by_adam())
  example = step_example(4, length, benchmark.make_mask(mode, 4, length))
  lowered = topology.lower(train_step, mesh, example)
  compiled = topology.compile_lowered(lowered)
  # The loop over layers has one forward kernel, as no block is recomputed.
  assert kernels(compiled) == FUSED
  shapes = re.findall(r"\b[a-z]\w*\[([\d,]+)\]", compiled.as_text())
  assert any(str(length) in shape.split(",") for shape in shapes)
  squares = {s for s in shapes if s.split(",").count(str(length)) > 1}
  assert not squares


@needs_libtpu
def test_a_program_for_an_absent_device_is_not_kept(monkeypatch):
  """Only the device can read such a cache entry; others warn."""
  monkeypatch.setattr(compilation_cache, "put_executable_and_time", None)
  device = topology.topology_devices(GENERATIONS["v5e"])[0]
  mesh = jax.sharding.Mesh([device], ("x",))
  x = jax.ShapeDtypeStruct(
    (8, 8), jnp.float32, sharding=mesh_lib.replicated_sharding(mesh)
  )
  lowered = jax.jit(lambda x: x @ x).lower(x)
  kept = jax.config.jax_persistent_cache_min_compile_time_secs
  assert topology.compile_lowered(lowered).cost_analysis()
  assert jax.config.jax_persistent_cache_min_compile_time_secs == kept
