"""Attention through one function, for every mask.

    out = attend(q, k, v, mask)

How it is computed depends on the device, and may be forced:

- pallas: the fused kernel (`attention.tpu.kernel`). The choice on TPU.
- cudnn: the one of `jax.nn.dot_product_attention`. The choice on a GPU that
  has it, where the mask is plainly causal or full.
- mosaic: the fused kernel for Hopper GPUs (`attention.gpu.kernel`), for every
  mask and with dropout. By its name alone, until it has run on one.
- chunked: plain XLA in memory linear in T. The choice elsewhere on a GPU, and
  for long rows on CPU.
- reference: plain XLA, all scores at once. The choice on CPU.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from antlm_jax.attention.blocks import Blocks
from antlm_jax.attention.cache import Cached
from antlm_jax.attention.devices import capability, device
from antlm_jax.attention.dropout import Dropout
from antlm_jax.attention.gpu import visits
from antlm_jax.attention.reference import chunked, reference
from antlm_jax.attention.relative import Relative
from antlm_jax.attention.split import WHOLE, Split, on_shards, parts
from antlm_jax.attention.tpu import grid, kernel
from antlm_jax.masks import AttentionMask

_CPU_LONG = 1024  # keys of a row from which on chunks cost no time on CPU
_MOST_SCALARS = 150_000  # 600 kB of the 1 MB of scalar memory
_MOSAIC_WIDTHS = (64, 96, 128)  # those it was compiled and tested for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
  """A mask made ready for an implementation; takes a mask's place."""

  mask: AttentionMask
  # A name of `IMPLEMENTATIONS`.
  implementation: str = dataclasses.field(metadata={"static": True})
  # What it was made for: the shapes of q and k, their dtype, whether attention
  # weights may be dropped, and the position terms' buckets.
  fits: tuple = dataclasses.field(metadata={"static": True})
  # Which mesh axes split rows and heads.
  split: Split = dataclasses.field(metadata={"static": True})
  # The kernel's, one after another of each data shard.
  schedules: tuple[grid.Schedule, ...] | visits.Schedule | None = None


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: AttentionMask | Prepared | Cached,
  *,
  scale: float | None = None,
  dropout: Dropout | None = None,
  relative: Relative | None = None,
  implementation: str = "auto",
  split: Split = WHOLE,
) -> jax.Array:
  """Scaled dot-product attention with grouped queries.

  Query head n reads key/value head n // (N / K). The softmax is in float32. A
  query that sees no key returns zeros and has zero gradients. The kernel does
  not round float32 in its products; in the XLA ways
  `jax.default_matmul_precision` says how they are rounded.

  Args:
    q: Queries `[B, T, N, H]`, float32, bfloat16 or float16.
    k: Keys `[B, S, K, H]`, with K dividing N.
    v: Values `[B, S, K, H]`.
    mask: Which keys each query sees. Where several layers share one, `prepare`
      it once. With a cache of one layer, q, k and v are those of new tokens.
    scale: Multiplies the scores; None for H ** -0.5.
    dropout: What is dropped of the attention weights.
    relative: What relative positions add to the scores, before the scale, in
      q's dtype.
    implementation: A name of `IMPLEMENTATIONS`, or auto.
    split: Which axes of the mesh, if there is one, split rows and heads; by
      default each device computes everything. A prepared mask has its own.

  Returns:
    `[B, T, N, H]`, of q's dtype.

  Raises:
    ValueError: for shapes, dtypes and bounds that do not fit, and for an
      implementation that cannot compute this.
  """
  _check_arrays(q, k, v)
  if dropout is not None:
    _check_dropout(q, dropout)
    dropout = dropout if dropout.rate else None
  if relative is not None:
    _check_terms(q, k, relative)
  if scale is None:
    scale = q.shape[-1] ** -0.5
  if isinstance(mask, Cached):
    return mask.attend(q, k, v, float(scale), relative)
  needs = dropout is not None, _buckets(relative)
  if isinstance(mask, AttentionMask):
    mask = prepare(mask, q, k, implementation, *needs, split)
  else:
    _check_prepared(mask, q, k, implementation, *needs)
  run = IMPLEMENTATIONS[mask.implementation]
  return run(q, k, v, mask, float(scale), dropout, relative)


def prepare(
  mask: AttentionMask,
  q: jax.Array | jax.ShapeDtypeStruct,
  k: jax.Array | jax.ShapeDtypeStruct,
  implementation: str = "auto",
  dropout: bool = False,
  buckets: int = 0,
  split: Split = WHOLE,
) -> Prepared:
  """Makes ready once what `attend` needs of a mask in every layer.

  Args:
    mask: Its bounds, if any, are `[B, T]`.
    q: The queries to come, or their shape `[B, T, N, H]` and dtype.
    k: Likewise the keys, `[B, S, K, H]`.
    implementation: A name of `IMPLEMENTATIONS`, or auto.
    dropout: Whether attention weights will be dropped.
    buckets: How many the position terms to come have; 0 without any.
    split: As in `attend`.

  Raises:
    ValueError: as `attend` does.
  """
  _check_bounds(mask, q.shape, k.shape)
  split = split.here(k.shape[0], k.shape[2])
  name = choose(mask, q, k, implementation, dropout, buckets, split)
  fits = _fits(q, k, dropout, buckets)
  if name not in _SCHEDULES:
    return Prepared(mask, name, fits, split)
  # Each data shard lists the blocks of its own rows.
  local, spec = q.shape[0] // parts(split.rows), PartitionSpec(split.rows)
  make = on_shards(lambda m: _SCHEDULES[name](m, local, q, k), spec, spec)
  return Prepared(mask, name, fits, split, make(mask))


def choose(
  mask: AttentionMask,
  q,
  k,
  implementation: str = "auto",
  dropout: bool = False,
  buckets: int = 0,
  split: Split = WHOLE,
) -> str:
  """Returns the name of the implementation that `prepare` takes.

  Raises:
    ValueError: if there is no such implementation, or it cannot compute this.
  """
  wanted = mask, q, k, dropout, buckets, split
  if implementation == "auto":
    platform = device().platform
    if platform == "cpu":
      return "chunked" if k.shape[1] >= _CPU_LONG else "reference"
    best = "pallas" if platform == "tpu" else "cudnn"
    return "chunked" if _OBSTACLES[best](*wanted) else best
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"attention={implementation!r} is not one of auto,"
      f" {', '.join(IMPLEMENTATIONS)}"
    )
  obstacle = _OBSTACLES.get(implementation, lambda *_: None)(*wanted)
  if obstacle:
    raise ValueError(f"attention={implementation!r} needs {obstacle}")
  return implementation


# What an implementation needs and does not find; None if nothing is missing.


def _pallas_obstacle(mask, q, k, dropout, buckets, split) -> str | None:
  # All tables and seeds of a shard are in scalar memory at once.
  scalars = grid.table_size(mask, q.shape[0], _blocks(q, k))
  if dropout:
    scalars += q.shape[0] * q.shape[2] // parts(split.heads)
  scalars //= parts(split.rows)
  if scalars > _MOST_SCALARS:
    return f"smaller batches: {scalars} numbers for {_MOST_SCALARS} places"
  return kernel.obstacle(q, k.shape[2], buckets)


def _cudnn_obstacle(mask, q, k, dropout, buckets, split) -> str | None:
  if device().platform != "gpu":
    return "a GPU"
  version = capability(device().device_kind)
  if version is None:
    return f"a GPU by NVIDIA that is known, not {device().device_kind}"
  # A T4 (7.5) has no such kernel, and JAX asks only while it compiles.
  widest = 256 if version >= 9 else 128
  if version < 8:
    return f"compute capability 8.0 or later; this GPU has {version}"
  if mask.bounded:
    return "a mask that is plainly causal or full"
  if q.dtype != jnp.bfloat16:
    return f"bfloat16, not {q.dtype}"
  if q.shape[-1] > widest or q.shape[-1] % 8:
    return f"a head width that is a multiple of 8, of at most {widest}"
  if buckets:
    return "scores without position terms"
  return "no attention dropout" if dropout else None


def _mosaic_obstacle(mask, q, k, dropout, buckets, split) -> str | None:
  platform, kind = device().platform, device().device_kind
  if platform not in ("gpu", "cpu"):
    return "a GPU"
  # The kernel's products are instructions that Blackwell has no more.
  if platform == "gpu" and int(capability(kind) or 0) != 9:
    return f"a Hopper GPU, for its wgmma instructions, not {kind}"
  # Here JAX has the interpreter, and the kernel's calls by these names.
  if jax.__version_info__ < (0, 12):
    return f"jax 0.12 or later, and so Python 3.12, not jax {jax.__version__}"
  if q.dtype not in (jnp.bfloat16, jnp.float16):
    return f"bfloat16 or float16, not {q.dtype}"
  if q.shape[-1] not in _MOSAIC_WIDTHS:
    return f"a head width of {_MOSAIC_WIDTHS}, not {q.shape[-1]}"
  return "scores without position terms" if buckets else None


_OBSTACLES = {
  "pallas": _pallas_obstacle,
  "cudnn": _cudnn_obstacle,
  "mosaic": _mosaic_obstacle,
}


# What each implementation is called by: `(q, k, v, prepared, scale, dropout,
# relative)`.


def _cudnn(q, k, v, prepared, scale, dropout, relative):
  spec = PartitionSpec(prepared.split.rows, None, prepared.split.heads, None)
  run = functools.partial(
    jax.nn.dot_product_attention,
    scale=scale,
    is_causal=prepared.mask.causal,
    implementation="cudnn",
  )
  return on_shards(run, (spec,) * 3, spec)(q, k, v)


def _pallas(q, k, v, prepared, scale, dropout, relative):
  mask, kv_heads = prepared.mask, k.shape[2]
  settings = kernel.KernelSettings(
    blocks=_blocks(q, k),
    causal=mask.causal,
    scale=scale,
    rate=dropout.rate if dropout else 0.0,
    edges=relative.edges if relative else None,
    interpret=device().platform != "tpu",
  )
  bounds = {"start": mask.k_start, "end": mask.k_end}
  bounds = {n: jnp.asarray(b) for n, b in bounds.items() if b is not None}
  seeds, terms = None, {}
  if dropout:
    seeds = dropout.seeds(q.shape[2]).reshape(len(q), kv_heads, -1)
  if relative:
    terms = {"of_query": relative.query, "of_key": relative.key}

  def run(q, k, v, terms, bounds, seeds, schedules):
    # To the kernel's order, in which positions are along the lanes: each
    # transpose moves an array once, and the kernel then reads whole tiles.
    batch, queries, heads, width = q.shape
    q = q.reshape(batch, queries, k.shape[2], -1, width)
    terms = {name: x.transpose(0, 2, 3, 1) for name, x in terms.items()}
    if terms:
      terms["of_query"] = terms["of_query"][:, :, None]
    q = q.transpose(0, 2, 3, 4, 1)
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 3, 1)
    out = kernel.flash(settings, q, k, v, terms, bounds, seeds, schedules)
    out = out.transpose(0, 4, 1, 2, 3)
    return out.reshape(batch, queries, heads, width)

  rows, heads = prepared.split
  arrays = PartitionSpec(rows, None, heads, None)
  of_rows, of_heads = PartitionSpec(rows), PartitionSpec(rows, heads)
  specs = (arrays, arrays, arrays, arrays, of_rows, of_heads, of_rows)
  run = on_shards(run, specs, arrays)
  return run(q, k, v, terms, bounds, seeds, prepared.schedules)


def _mosaic(q, k, v, prepared, scale, dropout, relative):
  # Here, since it loads slowly, and needs a JAX that not everyone has.
  from antlm_jax.attention.gpu import kernel as gpu_kernel

  settings = gpu_kernel.Settings(
    scale=scale,
    rate=dropout.rate if dropout else 0.0,
    interpret=device().platform != "gpu",
  )
  seeds = dropout.seeds(q.shape[2]) if dropout else None
  rows, heads = prepared.split
  arrays = PartitionSpec(rows, None, heads, None)
  specs = *(arrays,) * 3, PartitionSpec(rows, heads), PartitionSpec(rows)
  run = on_shards(functools.partial(gpu_kernel.flash, settings), specs, arrays)
  return run(q, k, v, seeds, prepared.schedules)


IMPLEMENTATIONS = {
  "pallas": _pallas,
  "cudnn": _cudnn,
  "mosaic": _mosaic,
  "chunked": lambda q, k, v, p, *rest: chunked(q, k, v, p.mask, *rest),
  "reference": lambda q, k, v, p, *rest: reference(q, k, v, p.mask, *rest),
}


# Of those that have one: a mask's schedule, `(mask, rows, q, k)`.
_SCHEDULES = {
  "pallas": lambda m, rows, q, k: grid.make(m, rows, _blocks(q, k)),
  "mosaic": lambda m, rows, q, k: visits.make(m, rows, q.shape[1], k.shape[1]),
}


def _blocks(q, k) -> Blocks:
  group = q.shape[2] // k.shape[2]
  return kernel.cut(q.shape[1], k.shape[1], group, q.shape[3], q.dtype)


# What can be known to be wrong while tracing.


def _check_arrays(q, k, v) -> None:
  shapes = f"q {_say(q)}, k {_say(k)}, v {_say(v)}"
  if not q.ndim == k.ndim == v.ndim == 4:
    raise ValueError(
      f"attention takes q [B, T, N, H], k and v [B, S, K, H], not {shapes}"
    )
  if k.shape != v.shape:
    raise ValueError(f"k and v differ in shape: {shapes}")
  if 0 in (*q.shape, *k.shape):
    raise ValueError(f"there is nothing to attend to: {shapes}")
  if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
    raise ValueError(f"q and k differ in rows or head width: {shapes}")
  if q.shape[2] % k.shape[2]:
    raise ValueError(
      f"{q.shape[2]} query heads over {k.shape[2]} key/value heads: {shapes}"
    )
  known = q.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
  if not known or not q.dtype == k.dtype == v.dtype:
    raise ValueError(
      f"attention is all float32, all bfloat16 or all float16, not {shapes}"
    )


def _check_dropout(q, dropout: Dropout) -> None:
  keys = dropout.row_keys
  if not 0.0 <= dropout.rate < 1.0:
    raise ValueError(f"attention dropout of {dropout.rate} is not in [0, 1)")
  if keys.shape != q.shape[:1] or keys.dtype != jnp.uint32:
    raise ValueError(
      f"dropout.row_keys is {_say(keys)}, not uint32[{len(q)}], one a row"
    )


def _check_terms(q, k, relative: Relative) -> None:
  if tuple(relative.edges) != tuple(sorted(set(relative.edges))):
    raise ValueError(f"relative.edges {relative.edges} do not ascend")
  for name, rows in (("query", q), ("key", k)):
    terms = getattr(relative, name)
    wanted = (*rows.shape[:2], q.shape[2], _buckets(relative))
    if terms.shape != wanted or terms.dtype != q.dtype:
      raise ValueError(
        f"relative.{name} is {_say(terms)}, not {q.dtype.name}{list(wanted)},"
        " as many as there are buckets"
      )


def _check_prepared(
  made: Prepared, q, k, implementation: str, dropout: bool, buckets: int
) -> None:
  if implementation not in ("auto", made.implementation):
    raise ValueError(
      f"the mask is prepared for attention={made.implementation!r}, not"
      f" {implementation!r}"
    )
  # What may drop weights need not.
  if _fits(q, k, dropout or made.fits[3], buckets) != made.fits:
    raise ValueError(
      "the mask is prepared for (q, k, dtype, dropout, buckets) of"
      f" {made.fits}, not {_fits(q, k, dropout, buckets)}"
    )


def _check_bounds(mask: AttentionMask, q_shape, k_shape) -> None:
  known = {}
  for name in ("k_start", "k_end"):
    bound = getattr(mask, name)
    if bound is None:
      continue
    if bound.shape != tuple(q_shape[:2]) or bound.dtype != jnp.int32:
      raise ValueError(
        f"{name} is {_say(bound)}, not int32{list(q_shape[:2])}, one a query"
      )
    # Of NumPy's arrays, and JAX's outside of a trace, the values are known.
    concrete = isinstance(bound, np.ndarray | jax.Array)
    if concrete and not isinstance(bound, jax.core.Tracer):
      known[name] = bound = np.asarray(bound)
      least, most = (bound.min(), bound.max()) if bound.size else (0, 0)
      if least < 0 or most > k_shape[1]:
        raise ValueError(
          f"{name} goes from {least} to {most}, outside [0, {k_shape[1]}]"
        )
  if len(known) == 2 and (known["k_start"] > known["k_end"]).any():
    row, query = np.argwhere(known["k_start"] > known["k_end"])[0]
    raise ValueError(
      f"k_start > k_end at row {row}, query {query}: make them equal where"
      " nothing is seen"
    )


def _buckets(relative: Relative | None) -> int:
  return 0 if relative is None else len(relative.edges) + 1


def _fits(q, k, dropout: bool, buckets: int) -> tuple:
  dtype = jnp.dtype(q.dtype).name
  return tuple(q.shape), tuple(k.shape), dtype, dropout, buckets


def _say(x) -> str:
  return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
