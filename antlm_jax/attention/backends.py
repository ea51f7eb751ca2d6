"""Implementations of attention, and the calls that each can compute."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from antlm_jax.attention.blocks import AttentionBlocks
from antlm_jax.attention.gpu import tokamax, visits
from antlm_jax.attention.reference import chunked, reference
from antlm_jax.attention.tpu import grid, kernel
from antlm_jax.mesh import (
  WHOLE,
  capability,
  device,
  number_of_shards,
  on_shards,
)

_CPU_LONG = 1024  # with this many keys or more, chunks cost no time on CPU
_MOST_SCALARS = 150_000  # 600 kB of the 1 MB of scalar memory
_MOSAIC_WIDTHS = (64, 96, 128)  # head widths that were compiled and tested
# The first JAX with the interpreter of GPU programs and the kernel's functions.
_MOSAIC_JAX = (0, 11, 2)


class Call(NamedTuple):
  """Static properties of a call to attention."""

  q: tuple[int, ...]  # shape [B, T, N, H]
  k: tuple[int, ...]  # shape [B, S, K, H]
  dtype: str
  dropout: bool  # whether attention weights may be dropped
  buckets: int  # number of buckets of position terms; 0 without terms

  @classmethod
  def of(cls, q, k, dropout: bool, buckets: int) -> "Call":
    dtype = jnp.dtype(q.dtype).name
    return cls(tuple(q.shape), tuple(k.shape), dtype, dropout, buckets)

  @property
  def blocks(self) -> AttentionBlocks:
    """Blocks that the TPU kernel uses."""
    group = self.q[2] // self.k[2]
    return kernel.choose_blocks(
      self.q[1], self.k[1], group, self.q[3], self.dtype
    )


class Platform(NamedTuple):
  """A device and the packages on which the choice of attention depends."""

  name: str  # cpu, gpu or tpu
  kind: str = ""  # `device_kind` of the jax.Device
  capability: float = 0.0  # compute capability of a GPU; 0 if unknown
  jax_version: tuple[int, ...] = _MOSAIC_JAX
  tokamax_version: str = tokamax.TESTED[0]  # "" if it is not installed

  @classmethod
  def here(cls) -> "Platform":
    """Returns the platform of the current mesh.

    An absent device, as in a plan, is assumed to have all packages.
    """
    name = device().platform
    kind = device().device_kind
    compute = capability(kind) or 0.0 if name == "gpu" else 0.0
    if name not in ("cpu", jax.default_backend()):
      return cls(name, kind, compute)
    versions = jax.__version_info__, tokamax.installed_version()
    return cls(name, kind, compute, *versions)


class Backend:
  """An implementation of attention; by itself, a function of plain XLA."""

  # Whether `run` rotates queries and keys. Otherwise its `rope` is None.
  rotates = False

  def __init__(self, function: Callable | None = None):
    self.function = function

  def run(self, q, k, v, prepared, scale, dropout, relative, rope) -> jax.Array:
    """Computes the outputs `[B, T, N, H]`."""
    return self.function(q, k, v, prepared.mask, scale, dropout, relative)

  def obstacle(self, mask, call: Call, split, platform) -> str | None:
    """Returns a requirement that is not met, or None.

    Args:
      mask: Mask of the call.
      call: Properties of the call.
      split: Mesh axes that split rows and heads.
      platform: Device and packages.
    """
    return None

  # `schedule(mask, rows, call)` lists the blocks that a kernel visits.
  schedule: Callable | None = None


class Pallas(Backend):
  """Fused kernel for TPU."""

  rotates = True

  def run(self, q, k, v, prepared, scale, dropout, relative, rope):
    mask = prepared.mask
    kv_heads = k.shape[2]
    settings = kernel.KernelSettings(
      blocks=prepared.call.blocks,
      causal=mask.causal,
      scale=scale,
      rate=dropout.rate if dropout else 0.0,
      edges=relative.edges if relative else None,
      interpret=device().platform != "tpu",
    )
    bounds = {"start": mask.k_start, "end": mask.k_end}
    bounds = {n: jnp.asarray(b) for n, b in bounds.items() if b is not None}
    seeds = None
    terms = {}
    if dropout:
      seeds = dropout.seeds(q.shape[2]).reshape(len(q), kv_heads, -1)
    if relative:
      terms = {"query_terms": relative.query, "key_terms": relative.key}
    split = prepared.split
    by_head = PartitionSpec(split.rows, None, split.heads, None)
    by_row = PartitionSpec(split.rows)
    # Each array or group of arrays, and the mesh axes that split it.
    arguments = {
      "q": (q, by_head),
      "k": (k, by_head),
      "v": (v, by_head),
      "rope": (rope, by_row),
      "terms": (terms, by_head),
      "bounds": (bounds, by_row),
      "seeds": (seeds, PartitionSpec(split.rows, split.heads)),
      "schedules": (prepared.schedules, by_row),
    }
    arrays = {name: array for name, (array, _) in arguments.items()}
    specs = {name: spec for name, (_, spec) in arguments.items()}
    call = on_shards(
      lambda arrays: _call_flash(settings, **arrays), (specs,), by_head
    )
    return call(arrays)

  def obstacle(self, mask, call, split, platform) -> str | None:
    # Scalar memory holds all tables and seeds of a shard at once.
    scalars = grid.table_size(mask, call.q[0], call.blocks)
    if call.dropout:
      scalars += call.q[0] * call.q[2] // number_of_shards(split.heads)
    scalars //= number_of_shards(split.rows)
    if scalars > _MOST_SCALARS:
      return f"smaller batches: {scalars} scalars exceed {_MOST_SCALARS}"
    return kernel.obstacle(call.q, call.k[2], call.dtype, call.buckets)

  def schedule(self, mask, rows: int, call: Call):
    return grid.make_grid_schedules(mask, rows, call.blocks)


def _call_flash(
  settings, q, k, v, rope, terms, bounds, seeds, schedules
) -> jax.Array:
  """Calls the kernel on arrays as `attend` has them."""
  # The kernel has positions along the lanes. XLA makes the neighboring
  # products write and read this layout, so nothing is transposed.
  batch, queries, heads, width = q.shape
  q = q.reshape(batch, queries, k.shape[2], -1, width)
  terms = {name: x.transpose(0, 2, 3, 1) for name, x in terms.items()}
  if terms:
    terms["query_terms"] = terms["query_terms"][:, :, None]
  q = q.transpose(0, 2, 3, 4, 1)
  k = k.transpose(0, 2, 3, 1)
  v = v.transpose(0, 2, 3, 1)
  if rope:
    rope = jnp.concatenate(rope, axis=-1)[:, :, 0].transpose(0, 2, 1)
  out = kernel.flash(settings, q, k, v, rope, terms, bounds, seeds, schedules)
  out = out.transpose(0, 4, 1, 2, 3)
  return out.reshape(batch, queries, heads, width)


def _gpu_obstacle(
  platform: Platform, call: Call, dtypes, widths: range
) -> str | None:
  """Returns an obstacle for kernels without dropout and position terms."""
  # A T4 (7.5) lacks the kernels, and JAX finds out only when it compiles.
  if platform.name == "gpu" and platform.capability < 8:
    return f"compute capability 8.0 or later, not {platform.kind}"
  if call.dtype not in dtypes:
    return f"{' or '.join(dtypes)}, not {call.dtype}"
  if call.q[3] not in widths:
    least = widths[0]
    most = widths[-1]
    return f"a head width of {least} to {most} in steps of 8, not {call.q[3]}"
  if call.buckets:
    return "scores without position terms"
  if call.dropout:
    return "no attention dropout"
  return None


class Cudnn(Backend):
  """cuDNN's kernel, called through JAX."""

  def run(self, q, k, v, prepared, scale, dropout, relative, rope):
    spec = PartitionSpec(prepared.split.rows, None, prepared.split.heads, None)
    run = jax.nn.dot_product_attention
    causal = prepared.mask.causal
    run = functools.partial(
      run, scale=scale, is_causal=causal, implementation="cudnn"
    )
    return on_shards(run, (spec,) * 3, spec)(q, k, v)

  def obstacle(self, mask, call, split, platform) -> str | None:
    if platform.name != "gpu":
      return "a GPU"
    if mask.bounded:
      return "a causal or full mask without bounds"
    # cuDNN takes wider heads on Hopper and later.
    widest = 256 if platform.capability >= 9 else 128
    widths = range(8, widest + 1, 8)
    return _gpu_obstacle(platform, call, ("bfloat16",), widths)


class Mosaic(Backend):
  """Fused kernel for Hopper GPUs."""

  def run(self, q, k, v, prepared, scale, dropout, relative, rope):
    # The import is slow, and needs a newer JAX than the rest of the package.
    from antlm_jax.attention.gpu import kernel as gpu_kernel

    rate = 0.0
    seeds = None
    if dropout:
      rate = dropout.rate
      seeds = dropout.seeds(q.shape[2])
    settings = gpu_kernel.GpuKernelSettings(
      scale, rate, device().platform != "gpu"
    )
    flash = functools.partial(gpu_kernel.mosaic_attention, settings)
    rows, heads = prepared.split
    arrays = PartitionSpec(rows, None, heads, None)
    specs = *(arrays,) * 3, PartitionSpec(rows, heads), PartitionSpec(rows)
    return on_shards(flash, specs, arrays)(q, k, v, seeds, prepared.schedules)

  def obstacle(self, mask, call, split, platform) -> str | None:
    if platform.name not in ("gpu", "cpu"):
      return "a GPU"
    # Blackwell lacks the instructions that the kernel multiplies with.
    if platform.name == "gpu" and int(platform.capability) != 9:
      return f"a Hopper GPU, for its wgmma instructions, not {platform.kind}"
    if platform.jax_version < _MOSAIC_JAX:
      needed = ".".join(map(str, _MOSAIC_JAX))
      version = ".".join(map(str, platform.jax_version))
      return f"jax {needed} or later (Python 3.12), not jax {version}"
    if call.dtype not in ("bfloat16", "float16"):
      return f"bfloat16 or float16, not {call.dtype}"
    if call.q[3] not in _MOSAIC_WIDTHS:
      return f"a head width of {_MOSAIC_WIDTHS}, not {call.q[3]}"
    return "scores without position terms" if call.buckets else None

  def schedule(self, mask, rows: int, call: Call):
    return visits.make_visit_schedule(mask, rows, call.q[1], call.k[1])


class Tokamax(Backend):
  """tokamax's kernels for GPUs; on a CPU, its plain XLA."""

  def run(self, q, k, v, prepared, scale, dropout, relative, rope):
    mask = prepared.mask
    gpu = device()
    name = "xla_chunked"
    if gpu.platform == "gpu":
      name = tokamax.implementation(capability(gpu.device_kind))
    run = functools.partial(tokamax.tokamax_attention, name, scale)
    rows, heads = prepared.split
    arrays = PartitionSpec(rows, None, heads, None)
    run = on_shards(run, (*(arrays,) * 3, PartitionSpec(rows)), arrays)
    return run(q, k, v, jax.tree.map(jnp.asarray, mask))

  def obstacle(self, mask, call, split, platform) -> str | None:
    if platform.name not in ("gpu", "cpu"):
      return "a GPU"
    version = platform.tokamax_version or "installed"
    if version not in tokamax.TESTED:
      needed = " or ".join(tokamax.TESTED)
      return f"tokamax {needed} (Python 3.12 or later), not {version}"
    dtypes = ("bfloat16",)
    if platform.name == "gpu":
      dtypes += ("float16",)
    return _gpu_obstacle(platform, call, dtypes, range(16, 257, 8))


BACKENDS: dict[str, Backend] = {
  "pallas": Pallas(),
  "cudnn": Cudnn(),
  "mosaic": Mosaic(),
  "tokamax": Tokamax(),
  "chunked": Backend(chunked),
  "reference": Backend(reference),
}

# Implementations by speed, fastest first: `auto` takes the first that can.
_FASTEST = {"tpu": ("pallas",), "gpu": ("cudnn", "mosaic", "tokamax")}


def fastest_backend(platform: Platform, mask, call: Call, split=WHOLE) -> str:
  """Returns the name of the implementation that `auto` chooses."""
  if platform.name == "cpu":
    return "chunked" if call.k[1] >= _CPU_LONG else "reference"
  for name in _FASTEST.get(platform.name, ()):
    if not BACKENDS[name].obstacle(mask, call, split, platform):
      return name
  return "chunked"
