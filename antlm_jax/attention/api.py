"""Attention through one function, for every mask.

    out = attend(q, k, v, mask)

How it is computed depends on the device, and may be forced:

- pallas: the fused kernel (`attention.tpu.kernel`). The choice on TPU.
- cudnn: the one of `jax.nn.dot_product_attention`. The choice on a GPU that
  has it, where the mask is plainly causal or full.
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

from antlm_jax.attention.dropout import Dropout
from antlm_jax.attention.reference import chunked, reference
from antlm_jax.attention.relative import Relative, log_edges
from antlm_jax.attention.tpu import kernel, schedule
from antlm_jax.attention.tpu.kernel import SAVED
from antlm_jax.masks import AttentionMask
from antlm_jax.runtime import sharding

__all__ = [
  "IMPLEMENTATIONS",
  "SAVED",
  "Dropout",
  "Prepared",
  "Relative",
  "attend",
  "choose",
  "log_edges",
  "prepare",
]

_CPU_LONG = 1024  # keys of a row from which on chunks cost no time on CPU
_MOST_SCALARS = 150_000  # 600 kB of the 1 MB of scalar memory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
  """A mask made ready for an implementation; takes a mask's place.

  Attributes:
    mask: The mask.
    implementation: A name of `IMPLEMENTATIONS`.
    fits: What it was made for: the shapes of q and k, their dtype, whether
      attention weights may be dropped, and the position terms' buckets.
    schedules: The kernel's, one after another of each data shard.
  """

  mask: AttentionMask
  implementation: str = dataclasses.field(metadata={"static": True})
  fits: tuple = dataclasses.field(metadata={"static": True})
  schedules: tuple[schedule.Schedule, ...] | None = None


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: AttentionMask | Prepared,
  *,
  scale: float | None = None,
  dropout: Dropout | None = None,
  relative: Relative | None = None,
  implementation: str = "auto",
) -> jax.Array:
  """Scaled dot-product attention with grouped queries.

  Query head n reads key/value head n // (N / K). The softmax is in float32. A
  query that sees no key returns zeros and has zero gradients. The kernel does
  not round float32 in its products; in the XLA ways
  `jax.default_matmul_precision` says how they are rounded.

  Args:
    q: Queries `[B, T, N, H]`, float32 or bfloat16.
    k: Keys `[B, S, K, H]`, with K dividing N.
    v: Values `[B, S, K, H]`.
    mask: Which keys each query sees. Where several layers share one, `prepare`
      it once.
    scale: Multiplies the scores; None for H ** -0.5.
    dropout: What is dropped of the attention weights.
    relative: What relative positions add to the scores, before the scale, in
      q's dtype.
    implementation: A name of `IMPLEMENTATIONS`, or auto.

  Returns:
    `[B, T, N, H]`, of q's dtype.

  Raises:
    ValueError: for shapes, dtypes and bounds that do not fit, and for an
      implementation that cannot compute this.
  """
  _check(q, k, v, dropout, relative)
  if dropout is not None and not dropout.rate:
    dropout = None
  needs = {"dropout": dropout is not None, "buckets": _buckets(relative)}
  if isinstance(mask, AttentionMask):
    mask = prepare(mask, q, k, implementation, **needs)
  else:
    _check_prepared(mask, q, k, implementation, **needs)
  if scale is None:
    scale = q.shape[-1] ** -0.5
  run = IMPLEMENTATIONS[mask.implementation]
  return run(q, k, v, mask, float(scale), dropout, relative)


def prepare(
  mask: AttentionMask,
  q: jax.Array | jax.ShapeDtypeStruct,
  k: jax.Array | jax.ShapeDtypeStruct,
  implementation: str = "auto",
  dropout: bool = False,
  buckets: int = 0,
) -> Prepared:
  """Makes ready once what `attend` needs of a mask in every layer.

  Args:
    mask: Its bounds, if any, are `[B, T]`.
    q: The queries to come, or their shape `[B, T, N, H]` and dtype.
    k: Likewise the keys, `[B, S, K, H]`.
    implementation: A name of `IMPLEMENTATIONS`, or auto.
    dropout: Whether attention weights will be dropped.
    buckets: How many the position terms to come have; 0 without any.

  Raises:
    ValueError: as `attend` does.
  """
  _check_bounds(mask, q.shape, k.shape)
  name = choose(mask, q, k, implementation, dropout, buckets)
  fits = _fits(q, k, dropout, buckets)
  if name != "pallas":
    return Prepared(mask, name, fits)
  rows, _ = sharding.batch_and_heads(k.shape)
  blocks, local = _blocks(q, k), q.shape[0] // sharding.ways(rows)
  make = sharding.on_shards(
    lambda mask: schedule.make(mask, local, blocks),
    in_specs=PartitionSpec(rows),
    out_specs=PartitionSpec(rows),
  )
  return Prepared(mask, name, fits, make(mask))


def choose(
  mask: AttentionMask,
  q,
  k,
  implementation: str = "auto",
  dropout: bool = False,
  buckets: int = 0,
) -> str:
  """Returns the name of the implementation that `prepare` takes.

  Raises:
    ValueError: if there is no such implementation, or it cannot compute this.
  """
  if implementation == "auto":
    platform = sharding.device().platform
    if platform == "cpu":
      return "chunked" if k.shape[1] >= _CPU_LONG else "reference"
    best = "pallas" if platform == "tpu" else "cudnn"
    obstacle = _obstacle(best, mask, q, k, dropout, buckets)
    return "chunked" if obstacle else best
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"attention={implementation!r} is not one of auto,"
      f" {', '.join(IMPLEMENTATIONS)}"
    )
  obstacle = _obstacle(implementation, mask, q, k, dropout, buckets)
  if obstacle:
    raise ValueError(f"attention={implementation!r} needs {obstacle}")
  return implementation


def _obstacle(name: str, mask, q, k, dropout: bool, buckets: int) -> str | None:
  """Returns what an implementation needs and does not find."""
  if name == "pallas":
    rows, heads = sharding.batch_and_heads(k.shape)
    scalars = schedule.table_size(mask, q.shape[0], _blocks(q, k))
    if dropout:
      scalars += q.shape[0] * q.shape[2] // sharding.ways(heads)
    scalars //= sharding.ways(rows)
    if scalars > _MOST_SCALARS:
      return f"smaller batches: {scalars} numbers for {_MOST_SCALARS} places"
    return kernel.obstacle(q, k.shape[2], buckets)
  if name == "cudnn":
    return _cudnn_obstacle(mask, q, dropout, buckets)
  return None


def _cudnn_obstacle(mask, q, dropout: bool, buckets: int) -> str | None:
  if sharding.device().platform != "gpu":
    return "a GPU"
  try:
    capability = float(jax.devices("gpu")[0].compute_capability)
  except ValueError:  # gfx942, say
    return "a GPU by NVIDIA"
  # A T4 (7.5) has no such kernel, and JAX asks only while it compiles.
  widest = 256 if capability >= 9 else 128
  if capability < 8:
    return f"compute capability 8.0 or later; this GPU has {capability}"
  if mask.bounded:
    return "a mask that is plainly causal or full"
  if q.dtype != jnp.bfloat16:
    return f"bfloat16, not {q.dtype}"
  if q.shape[-1] > widest or q.shape[-1] % 8:
    return f"a head width that is a multiple of 8, of at most {widest}"
  if buckets:
    return "scores without position terms"
  return "no attention dropout" if dropout else None


# What each implementation is called by: `(q, k, v, prepared, scale, dropout,
# relative)`.


def _plain(run):
  return lambda q, k, v, prepared, scale, dropout, relative: run(
    q, k, v, prepared.mask, scale, dropout, relative
  )


def _cudnn(q, k, v, prepared, scale, dropout, relative):
  rows, heads = sharding.batch_and_heads(k.shape)
  spec = PartitionSpec(rows, None, heads, None)
  run = functools.partial(
    jax.nn.dot_product_attention,
    scale=scale,
    is_causal=prepared.mask.causal,
    implementation="cudnn",
  )
  return sharding.on_shards(run, (spec,) * 3, spec)(q, k, v)


def _pallas(q, k, v, prepared, scale, dropout, relative):
  mask, kv_heads = prepared.mask, k.shape[2]
  settings = kernel.Settings(
    blocks=_blocks(q, k),
    causal=mask.causal,
    scale=scale,
    rate=dropout.rate if dropout else 0.0,
    edges=relative.edges if relative else None,
    interpret=sharding.device().platform != "tpu",
  )
  bounds = {"start": mask.k_start, "end": mask.k_end}
  bounds = {n: jnp.asarray(b) for n, b in bounds.items() if b is not None}
  seeds = None
  if dropout:
    seeds = dropout.seeds(q.shape[2]).reshape(len(q), kv_heads, -1)
  terms = {}
  if relative:
    terms = {"of_query": relative.query, "of_key": relative.key}

  def run(q, k, v, terms, bounds, seeds, schedules):
    batch, queries, heads, width = q.shape
    q = q.reshape(batch, queries, k.shape[2], -1, width)
    terms = {name: x.transpose(0, 2, 3, 1) for name, x in terms.items()}
    if terms:
      terms["of_query"] = terms["of_query"][:, :, None]
    out = kernel.flash(
      settings,
      q.transpose(0, 2, 3, 4, 1),
      k.transpose(0, 2, 3, 1),
      v.transpose(0, 2, 3, 1),
      terms,
      bounds,
      seeds,
      schedules,
    )
    out = out.transpose(0, 4, 1, 2, 3)
    return out.reshape(batch, queries, heads, width)

  rows, heads = sharding.batch_and_heads(k.shape)
  rows, heads = PartitionSpec(rows), PartitionSpec(rows, heads)
  arrays = PartitionSpec(*rows, None, *heads[1:], None)
  run = sharding.on_shards(
    run, (arrays, arrays, arrays, arrays, rows, heads, rows), arrays
  )
  return run(q, k, v, terms, bounds, seeds, prepared.schedules)


IMPLEMENTATIONS = {
  "pallas": _pallas,
  "cudnn": _cudnn,
  "chunked": _plain(chunked),
  "reference": _plain(reference),
}


def _blocks(q, k) -> schedule.Blocks:
  group = q.shape[2] // k.shape[2]
  return kernel.cut(q.shape[1], k.shape[1], group, q.shape[3], q.dtype)


# What can be known to be wrong while tracing.


def _check(q, k, v, dropout: Dropout | None, relative) -> None:
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
  if not q.dtype == k.dtype == v.dtype or q.dtype not in (
    jnp.float32,
    jnp.bfloat16,
  ):
    raise ValueError(f"attention is all float32 or all bfloat16, not {shapes}")
  if dropout is not None:
    _check_dropout(q, dropout)
  if relative is not None:
    _check_relative(q, k, relative)


def _check_dropout(q, dropout: Dropout) -> None:
  if not 0.0 <= dropout.rate < 1.0:
    raise ValueError(f"attention dropout of {dropout.rate} is not in [0, 1)")
  keys = dropout.row_keys
  if keys.shape != q.shape[:1] or keys.dtype != jnp.uint32:
    raise ValueError(
      f"dropout.row_keys is {_say(keys)}, not uint32[{q.shape[0]}], one a row"
    )


def _check_relative(q, k, relative: Relative) -> None:
  if tuple(relative.edges) != tuple(sorted(set(relative.edges))):
    raise ValueError(f"relative.edges {relative.edges} do not ascend")
  for name, rows in (("query", q), ("key", k)):
    terms = getattr(relative, name)
    shape = (*rows.shape[:2], q.shape[2], _buckets(relative))
    if terms.shape != shape or terms.dtype != q.dtype:
      wanted = jax.ShapeDtypeStruct(shape, q.dtype)
      raise ValueError(
        f"relative.{name} is {_say(terms)}, not {_say(wanted)}, as many as"
        " there are buckets"
      )


def _buckets(relative: Relative | None) -> int:
  return 0 if relative is None else len(relative.edges) + 1


def _fits(q, k, dropout: bool, buckets: int) -> tuple:
  dtype = jnp.dtype(q.dtype).name
  return tuple(q.shape), tuple(k.shape), dtype, dropout, buckets


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


def _say(x) -> str:
  return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


def _check_bounds(mask: AttentionMask, q_shape, k_shape) -> None:
  bounds = {"k_start": mask.k_start, "k_end": mask.k_end}
  bounds = {name: b for name, b in bounds.items() if b is not None}
  for name, bound in bounds.items():
    if bound.shape != tuple(q_shape[:2]) or bound.dtype != jnp.int32:
      raise ValueError(
        f"{name} is {_say(bound)}, not int32{list(q_shape[:2])}, one a query"
      )
  # What is known already: NumPy's arrays, and JAX's outside of a trace.
  known = {
    name: np.asarray(bound)
    for name, bound in bounds.items()
    if isinstance(bound, np.ndarray | jax.Array)
    and not isinstance(bound, jax.core.Tracer)
  }
  for name, bound in known.items():
    if bound.size and (bound.min() < 0 or bound.max() > k_shape[1]):
      raise ValueError(
        f"{name} goes from {bound.min()} to {bound.max()}, outside"
        f" [0, {k_shape[1]}]"
      )
  if len(known) == 2 and (known["k_start"] > known["k_end"]).any():
    row, query = np.argwhere(known["k_start"] > known["k_end"])[0]
    raise ValueError(
      f"k_start > k_end at row {row}, query {query}: make them equal where"
      " nothing is seen"
    )
