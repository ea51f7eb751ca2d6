"""The kernels of norms and gated MLPs, interpreted, and compiled for GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from antlm_jax.models import fused, layers
from antlm_jax.planning import compilers, gpus, hlo, search, topology
from tests import runs

needs_compiler = pytest.mark.skipif(
  compilers.cuda() is None, reason="needs launch/setup.sh cuda-compiler"
)
KINDS = {
  norm: dataclasses.replace(kind, interpret=True, eps=1e-5)
  for norm, kind in fused.NORMS.items()
}


def draw(*shape, count, dtype=jnp.bfloat16):
  keys = jax.random.split(jax.random.key(0), count)
  return [jax.random.normal(key, shape, dtype) for key in keys]


def gradients(function, grads, *arrays):
  """Returns the results and gradients as float32 arrays."""
  results, pull = jax.vjp(function, *arrays)
  leaves = jax.tree.leaves((results, pull(grads)))
  return [np.asarray(x, np.float32) for x in leaves]


def check_as_exact_as(plain, kernel, exact):
  """Checks that a kernel's errors are not larger than the plain formula's."""
  for rounded, other, true in zip(plain, kernel, exact, strict=True):
    limit = 1.05 * np.square(rounded - true).mean() + 1e-9
    assert np.square(other - true).mean() <= limit


def plain_norm(norm_class, x, y, scale):
  options = {"affine": True, "bias": False}
  if norm_class is layers.RMSNorm:
    options = {}
  norm = norm_class(x.shape[-1], 1e-5, **options)
  norm.scale = nnx.Param(scale)
  return fused.residual_norm(norm, x, y)


@pytest.mark.parametrize("width", [96, 128])
@pytest.mark.parametrize("norm", KINDS)
@pytest.mark.parametrize("residual", [True, False])
def test_a_norm_is_the_formula_with_its_gradients(norm, residual, width):
  """On a CPU, `residual_norm` is the formula; the width may need a mask."""
  x, y, *grads = draw(2, 32, width, count=4)
  y = y if residual else None
  scale = 1 + 0.1 * draw(width, count=1, dtype=jnp.float32)[0]
  plain = functools.partial(plain_norm, norm)
  kernel = functools.partial(fused.norm_by_kernel, KINDS[norm])
  arrays = x, y, scale
  found = gradients(kernel, tuple(grads), *arrays)
  rounded = gradients(plain, tuple(grads), *arrays)
  np.testing.assert_array_equal(found[0], rounded[0])
  np.testing.assert_allclose(found[1], rounded[1], rtol=2**-7)  # a unit
  exact_arrays, exact_grads = jax.tree.map(
    lambda a: a.astype(jnp.float32), (arrays, tuple(grads))
  )
  exact = gradients(plain, exact_grads, *exact_arrays)
  check_as_exact_as(rounded, found, exact)


@pytest.mark.parametrize(
  "activation", [jax.nn.silu, jax.nn.gelu, layers.exact_gelu]
)
def test_a_gated_product_is_the_formula_with_its_gradients(activation):
  gate, up, grad = draw(2, 8, 128, count=3)
  gate = 3 * gate

  def plain(gate, up):
    return fused.gated_product(activation, gate, up)

  kernel = functools.partial(fused.gated_by_kernel, activation, True)
  arrays = [x.astype(jnp.float32) for x in (gate, up, grad)]
  exact = gradients(plain, arrays[2], *arrays[:2])
  rounded = gradients(plain, grad, gate, up)
  check_as_exact_as(rounded, gradients(kernel, grad, gate, up), exact)


def on_four_devices():
  """Compares kernels on a mesh, which splits rows and MLPs, with one device."""
  x, y, *grads = draw(4, 64, 128, count=4)
  kind = KINDS[layers.RMSNorm]
  norm = jax.jit(functools.partial(fused.norm_by_kernel, kind))
  gated = jax.jit(functools.partial(fused.gated_by_kernel, jax.nn.silu, True))

  def both():
    of_norm = gradients(norm, tuple(grads), x, y, jnp.ones(128))
    return of_norm + gradients(gated, grads[0], x, y)

  alone = both()
  auto = (jax.sharding.AxisType.Auto,) * 3
  mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=auto)
  with jax.set_mesh(mesh):
    for a, b in zip(alone, both(), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)


@pytest.mark.slow
def test_on_a_mesh_the_kernels_give_the_same():
  code = "from tests import test_fused; test_fused.on_four_devices()"
  runs.run_code(code, devices=4)


def lowered_step(shape, *settings):
  """Returns the text of a train step for GPUs that this machine lacks."""
  pod = search.Pod(
    "antlm_babyllama:curriculum=1C", {}, topology.topology_devices(shape), 512
  )
  small = "model.layers=1", "train.batch_size=16", "model.max_seq_len=128"
  run = pod.build_run((*small, *settings))
  batch = run.batch_kinds(evaluations=False)[0].batch
  return topology.lower(run.step, run.mesh, batch).as_text()


@needs_compiler
@pytest.mark.parametrize(
  "settings, calls",
  [
    # Two norms and a gated product; their gradients.
    (("model.fused_layers=true",), 5),
    ((), 0),
    (("model.fused_layers=true", "model.dtype=float32"), 0),
    # 1,500 states are no multiple of 64, but their MLPs are of 1,024.
    (
      (
        "model.fused_layers=true",
        "train.batch_size=15",
        "model.max_seq_len=100",
      ),
      1,
    ),
  ],
)
def test_bfloat16_steps_of_gpus_use_the_kernels(settings, calls):
  text = lowered_step("h100:1", *settings)
  assert text.count("xla.gpu.triton") == calls


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
  "shape", ["a100-40:1", "rtx4090:1", "h200:1", "b200:1"]
)
def test_the_kernels_compile_for_each_generation(shape):
  """One GPU of each compute capability in `fused.COMPILED`."""
  devices = topology.topology_devices(shape)
  mesh = jax.sharding.Mesh(np.array(devices), "x")
  place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  like = functools.partial(jax.ShapeDtypeStruct, sharding=place)
  states = like((8, 128, 768), jnp.bfloat16)
  scale = like((768,), jnp.float32)
  programs = []
  for kind in fused.NORMS.values():
    norm = functools.partial(fused.norm_by_kernel, kind)
    programs.append((norm, (states, states, scale), (states, states)))
  for activation in (jax.nn.silu, jax.nn.gelu, layers.exact_gelu):
    gated = functools.partial(fused.gated_by_kernel, activation, False)
    programs.append((gated, (states, states), states))
  for function, arrays, grads in programs:

    def both(arrays, grads, function=function):
      results, pull = jax.vjp(function, *arrays)
      return results, pull(grads)

    with jax.set_mesh(mesh):
      lowered = jax.jit(both).lower(arrays, grads)
    compiled = topology.compile_lowered(lowered, gpus.COMPILER_OPTIONS)
    text = compiled.as_text()
    assert "xla.gpu.triton" in text
    # Four arrays each way, or three and five; and a copy of a gradient.
    arrays_moved = hlo.count(text).bytes / (2 * states.size)
    assert 7.9 < arrays_moved < 10.5
