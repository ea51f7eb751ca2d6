"""Attention with one function for all masks and devices.

    out = attend(q, k, v, mask)

`implementation="auto"` chooses by device from `BACKENDS`:

- pallas: the fused kernel of `attention.tpu.kernel`. Default on TPU.
- cudnn: the kernel of `jax.nn.dot_product_attention`. Default on GPU for masks
  that are causal or full, without bounds.
- mosaic: the fused kernel for Hopper GPUs (`attention.gpu.kernel`). Default on
  Hopper for masks with bounds, and with dropout.
- tokamax: tokamax's kernels for GPUs (`attention.gpu.tokamax`), if installed.
  Default on other GPUs for masks with bounds.
- chunked: plain XLA, in memory linear in T. Default on CPU for long rows, and
  on GPU and TPU if their kernel cannot compute the call.
- reference: plain XLA, with all scores in memory. Default on CPU.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from antlm_jax.attention.backends import (
  BACKENDS,
  Call,
  Platform,
  fastest_backend,
)
from antlm_jax.attention.cache import Cached
from antlm_jax.attention.dropout import Dropout
from antlm_jax.attention.gpu import visits
from antlm_jax.attention.relative import Relative
from antlm_jax.attention.rope import Rope, turned
from antlm_jax.attention.tpu import grid
from antlm_jax.errors import UserError
from antlm_jax.masks import AttentionMask
from antlm_jax.mesh import WHOLE, Split, number_of_shards, on_shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskPlan:
  """A mask prepared for an implementation; pass it in place of the mask."""

  mask: AttentionMask
  # A name in `BACKENDS`.
  implementation: str = dataclasses.field(metadata={"static": True})
  # The calls that may use it.
  call: Call = dataclasses.field(metadata={"static": True})
  split: Split = dataclasses.field(metadata={"static": True})
  # Schedules of the kernel, concatenated over the data shards.
  schedules: tuple[grid.Schedule, ...] | visits.VisitSchedule | None = None


@jax.named_scope("attention")
def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: AttentionMask | MaskPlan | Cached,
  *,
  scale: float | None = None,
  dropout: Dropout | None = None,
  relative: Relative | None = None,
  rope: Rope | None = None,
  implementation: str = "auto",
  split: Split = WHOLE,
) -> jax.Array:
  """Scaled dot-product attention with grouped queries.

  Query head n uses key/value head n // (N / K). The softmax is in float32. For
  a query that sees no key, the output and the gradients are zero. The TPU
  kernel does not round float32 in its products. In plain XLA,
  `jax.default_matmul_precision` decides.

  Args:
    q: Queries `[B, T, N, H]`, float32, bfloat16 or float16.
    k, v: Keys and values `[B, S, K, H]`, where K divides N.
    mask: Keys that each query sees. If several layers share a mask,
      `prepare_mask` it once. If it is one layer's cache, q, k and v belong to
      new tokens.
    scale: Factor of the scores; None for H ** -0.5.
    dropout: Dropout of attention weights.
    relative: Position terms in q's dtype, added to the scores before `scale`.
    rope: Rotations of queries and keys, without gradient. T must equal S.
    implementation: A name in `BACKENDS`, or auto.
    split: Mesh axes that split rows and heads. By default each device computes
      everything. Ignored for a prepared mask, which includes a split.

  Returns:
    Outputs `[B, T, N, H]`, in q's dtype.

  Raises:
    ValueError: Shapes, dtypes or bounds do not fit together, or the named
      implementation cannot compute this call.
  """
  _check_arrays(q, k, v)
  if dropout is not None:
    if not 0.0 <= dropout.rate < 1.0:
      raise ValueError(f"attention dropout of {dropout.rate} is not in [0, 1)")
    keys = dropout.row_keys
    _check_array("dropout.row_keys", keys, jnp.uint32, q.shape[:1], "one a row")
    dropout = dropout if dropout.rate else None
  buckets = 0
  if relative is not None:
    buckets = len(relative.edges) + 1
    _check_terms(q, k, relative, buckets)
  if scale is None:
    scale = q.shape[-1] ** -0.5
  for angles in rope or ():
    angles_shape = q.shape[0], k.shape[1], 1, q.shape[3] // 2
    _check_array(
      "rope", angles, jnp.float32, angles_shape, "one for each query and key"
    )
  if isinstance(mask, Cached):
    q, k = turned(rope, q, k)
    return mask.attend(q, k, v, float(scale), relative)
  dropped = dropout is not None
  if isinstance(mask, AttentionMask):
    mask = prepare_mask(mask, q, k, implementation, dropped, buckets, split)
  elif not isinstance(mask, MaskPlan):
    raise UserError(
      f"attend got a mask of type {type(mask).__name__}: give it an"
      " AttentionMask, or in blocks mask.of_layer(layer), as"
      " antlm_jax.models.encoder.run_blocks does"
    )
  else:
    _check_prepared(mask, Call.of(q, k, dropped, buckets), implementation)
  backend = BACKENDS[mask.implementation]
  if not backend.rotates:
    q, k = turned(rope, q, k)
    rope = None
  return backend.run(q, k, v, mask, float(scale), dropout, relative, rope)


def prepare_mask(
  mask: AttentionMask,
  q: jax.Array | jax.ShapeDtypeStruct,
  k: jax.Array | jax.ShapeDtypeStruct,
  implementation: str = "auto",
  dropout: bool = False,
  buckets: int = 0,
  split: Split = WHOLE,
) -> MaskPlan:
  """Prepares a mask once for all layers that use it.

  `attend` documents the other arguments and the errors.

  Args:
    mask: Mask, with bounds `[B, T]` if it has any.
    q, k: Queries and keys, or their shapes and dtypes.
    dropout: Whether attention weights will be dropped.
    buckets: Number of buckets of position terms; 0 without terms.
  """
  _check_bounds(mask, q.shape[:2], k.shape[1])
  split = split.here(k.shape[0], k.shape[2])
  name = choose_attention(mask, q, k, implementation, dropout, buckets, split)
  call = Call.of(q, k, dropout, buckets)
  schedule = BACKENDS[name].schedule
  if schedule is None:
    return MaskPlan(mask, name, call, split)
  # Each data shard lists the blocks of its rows.
  local = q.shape[0] // number_of_shards(split.rows)
  spec = PartitionSpec(split.rows)
  make = on_shards(lambda mask: schedule(mask, local, call), spec, spec)
  return MaskPlan(mask, name, call, split, make(mask))


def choose_attention(
  mask, q, k, implementation="auto", dropout=False, buckets=0, split=WHOLE
) -> str:
  """Returns the name of the implementation that `prepare_mask` chooses.

  Raises:
    ValueError: The implementation is unknown or cannot compute this call.
  """
  platform = Platform.here()
  call = Call.of(q, k, dropout, buckets)
  if implementation == "auto":
    return fastest_backend(platform, mask, call, split)
  if implementation not in BACKENDS:
    raise ValueError(
      f"attention={implementation!r} is not one of auto, {', '.join(BACKENDS)}"
    )
  backend = BACKENDS[implementation]
  if needed := backend.obstacle(mask, call, split, platform):
    raise ValueError(f"attention={implementation!r} needs {needed}")
  return implementation


def _check_arrays(q, k, v) -> None:
  supported = q.dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
  wrong = ""
  if not q.ndim == k.ndim == v.ndim == 4:
    wrong = "attention needs q [B, T, N, H], k and v [B, S, K, H]"
  elif k.shape != v.shape:
    wrong = "k and v differ in shape"
  elif 0 in (*q.shape, *k.shape):
    wrong = "attention needs at least one query and key"
  elif (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
    wrong = "q and k differ in rows or head width"
  elif q.shape[2] % k.shape[2]:
    wrong = (
      f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value"
      " heads"
    )
  elif not supported or not q.dtype == k.dtype == v.dtype:
    wrong = "q, k and v must share a dtype, float32, bfloat16 or float16"
  if wrong:
    arrays = zip("qkv", (q, k, v), strict=True)
    shapes = ", ".join(f"{name} {_array_text(x)}" for name, x in arrays)
    raise ValueError(f"{wrong}: {shapes}")


def _check_array(name: str, x, dtype, shape, why: str) -> None:
  """Checks an array's dtype and shape."""
  if x.shape != tuple(shape) or x.dtype != dtype:
    expected = f"{jnp.dtype(dtype).name}{list(shape)}"
    raise ValueError(f"{name} is {_array_text(x)}, not {expected}, {why}")


def _check_terms(q, k, relative: Relative, buckets: int) -> None:
  if tuple(relative.edges) != tuple(sorted(set(relative.edges))):
    raise ValueError(f"relative.edges {relative.edges} do not ascend")
  for name, rows in (("query", q), ("key", k)):
    shape = (*rows.shape[:2], q.shape[2], buckets)
    array_name = f"relative.{name}"
    reason = "one for each bucket"
    _check_array(array_name, getattr(relative, name), q.dtype, shape, reason)


def _check_prepared(plan: MaskPlan, call: Call, implementation: str) -> None:
  if implementation not in ("auto", plan.implementation):
    raise ValueError(
      f"the mask is prepared for attention={plan.implementation!r}, not"
      f" {implementation!r}"
    )
  # A mask prepared for dropout works without dropout too.
  if plan.call not in (call, call._replace(dropout=True)):
    raise ValueError(f"the mask is prepared for {plan.call}, not {call}")


def _check_bounds(mask: AttentionMask, shape, keys: int) -> None:
  bounds = {}
  for name in ("k_start", "k_end"):
    bound = getattr(mask, name)
    if bound is None:
      continue
    _check_array(name, bound, jnp.int32, shape, "one a query")
    # NumPy arrays, and JAX arrays outside a trace, have known values.
    concrete = isinstance(bound, np.ndarray | jax.Array)
    if concrete and not isinstance(bound, jax.core.Tracer):
      bounds[name] = bound = np.asarray(bound)
      least, most = (bound.min(), bound.max()) if bound.size else (0, 0)
      if least < 0 or most > keys:
        raise ValueError(
          f"{name} ranges from {least} to {most}, outside [0, {keys}]"
        )
  if len(bounds) == 2 and (bounds["k_start"] > bounds["k_end"]).any():
    row, query = np.argwhere(bounds["k_start"] > bounds["k_end"])[0]
    raise ValueError(
      f"k_start > k_end at row {row}, query {query}: make them equal for a"
      " query that sees no key"
    )


def _array_text(x) -> str:
  return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"
