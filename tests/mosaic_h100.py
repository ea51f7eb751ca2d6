"""Compiles the kernels for an absent H100: arguments WIDTH RATE.

The compiler prints its results if its environment variables say so.
"""

import sys

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from antlm_jax.attention.gpu import kernel, visits
from antlm_jax.masks import AttentionMask
from antlm_jax.planning import gpus

ROWS, LENGTH, HEADS, KV_HEADS = 8, 2048, 12, 4


def program(settings: kernel.GpuKernelSettings, q, k, v, g, bounds, seeds):
  """Returns attention's output and gradients."""
  mask = AttentionMask(False, *bounds)
  made = visits.make_visit_schedule(mask, ROWS, LENGTH, LENGTH)
  out, pull = jax.vjp(
    lambda *args: kernel.mosaic_attention(settings, *args, seeds, made), q, k, v
  )
  return out, *pull(g)


def main(width: int, rate: float) -> None:
  topology = topologies.get_topology_desc(
    platform="cuda",
    topology_name="h100",
    target_config=gpus.description(gpus.GPUS["h100"]),
    topology="1x1x1",
  )
  mesh = topologies.make_mesh(topology, (1,), ("x",))
  where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  q = like(ROWS, LENGTH, HEADS, width)
  k = like(ROWS, LENGTH, KV_HEADS, width)
  bounds = [like(ROWS, LENGTH, dtype=jnp.int32)] * 2
  seeds = like(ROWS, HEADS, dtype=jnp.uint32)
  jitted = jax.jit(program, static_argnums=0)
  settings = kernel.GpuKernelSettings(width**-0.5, rate)
  traced = jitted.trace(settings, q, k, k, q, bounds, seeds)
  traced.lower(lowering_platforms=("cuda",)).compile()


if __name__ == "__main__":
  main(int(sys.argv[1]), float(sys.argv[2]))
