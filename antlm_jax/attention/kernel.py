"""Fused attention in Pallas for TPU, forward and backward, for every mask.

The scores exist one block at a time, keys along the sublanes and queries along
the lanes. What belongs to a query (its bounds, its maximum, its sum) is then a
row, as it lies in memory, and a head narrower than the 128 lanes wastes none
of them. The queries of all heads that share a key head lie side by side, so
that keys and values are loaded once for the group.

The online softmax and its gradient are those of FlashAttention-2 (arXiv
2307.08691). Which blocks are visited: `antlm_jax.attention.schedule`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from antlm_jax.attention.dropout import keep
from antlm_jax.attention.schedule import LANES, Blocks, Schedule, Step

SAVED = "attention"  # `jax.checkpoint` may keep the residuals by this name

_LOG2E = math.log2(math.e)
_HIDDEN = -1e38  # score of a hidden key
_FLOOR = -1e37  # the first maximum: so far over _HIDDEN that exp2 gives 0
_BLOCK = 512  # largest side of a block
_SCORES = 2**18  # most scores of a step in bfloat16: 1 MiB of the 16
_ROW_BYTES = 6 * 2**20  # most for a row's dQ, of v4's 16 MiB vector memory


@dataclasses.dataclass(frozen=True)
class Settings:
  """What a compiled kernel depends on beside its arguments' shapes.

  Attributes:
    blocks: How queries and keys are cut.
    causal: Whether no query sees a later key.
    scale: Multiplies the scores.
    rate: Share of the attention weights that is dropped.
    interpret: Whether to run on any device, slowly.
  """

  blocks: Blocks
  causal: bool
  scale: float
  rate: float = 0.0
  interpret: bool = False


def cut(queries: int, keys: int, group: int, width: int, dtype) -> Blocks:
  """Chooses the blocks for `group` query heads per key head."""
  largest, most = _BLOCK, _most_scores(width, dtype)
  while largest > LANES and group * largest**2 > most:
    largest //= 2
  return Blocks.of(queries, keys, largest)


def obstacle(q, kv_heads: int, relative: bool = False) -> str | None:
  """Returns what the kernel would need for queries q `[B, T, N, H]`."""
  if relative:
    return "scores without position terms"
  group = q.shape[2] // kv_heads
  # The smallest block of a group's queries still is one of all its heads.
  most = 2 * _most_scores(q.shape[3], q.dtype) // LANES**2
  if group > most:
    return f"at most {most} query heads to a key head; these are {group}"
  return None


def heads_of_a_step(
  kv_heads: int, group: int, width: int, blocks: Blocks, dtype
) -> int:
  """Returns how many key heads a step takes, so that it is worth its start.

  At most half of them: v4 and v5p share them out to two cores.
  """
  scores = group * blocks.q_size * blocks.k_size
  fit = min(_most_scores(width, dtype) // scores, kv_heads // 2)
  return max(n for n in range(1, max(1, fit) + 1) if not kv_heads % n)


def _most_scores(width: int, dtype) -> int:
  """Most scores of a step: what is wide leaves them less vector memory."""
  return 2 * _SCORES // (-(-width // LANES) * jnp.dtype(dtype).itemsize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(settings: Settings, q, k, v, bounds, seeds, schedules) -> jax.Array:
  """Runs the kernel.

  Args:
    settings: What is static.
    q: Queries `[B, K, G, H, T]`: G heads for each key head.
    k: Keys `[B, K, H, S]`.
    v: Values `[B, K, H, S]`.
    bounds: The mask's: "start" and "end", int32 `[B, T]`, those it has.
    seeds: The dropout's, uint32 `[B, K, G]`, or None.
    schedules: By queries and by keys, from `schedule.make`.

  Returns:
    `[B, K, G, H, T]`, of q's dtype.
  """
  return _flash_forward(settings, q, k, v, bounds, seeds, schedules)[0]


def _flash_forward(settings, q, k, v, bounds, seeds, schedules):
  lanes = q.shape[2] * settings.blocks.q_size
  out, lse = _call(
    _output,
    settings=settings,
    schedule=schedules[0],
    arrays={"q": q, "k": k, "v": v} | bounds,
    seeds=seeds,
    outputs={"q": q, "lse": jax.ShapeDtypeStruct(_rows(q), jnp.float32)},
    scratch=((q.shape[3], lanes), (1, lanes), (1, lanes)),
    products=2,
  )
  out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
  return out, (q, k, v, bounds, seeds, schedules, out, lse)


def _flash_backward(settings, residuals, grad):
  q, k, v, bounds, seeds, (by_query, by_key), out, lse = residuals
  delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=3)
  arrays = {"q": q, "k": k, "v": v, "do": grad, "lse": lse, "delta": delta}
  blocks, group, width = settings.blocks, *q.shape[2:4]
  lanes = group * blocks.q_size
  call = functools.partial(
    _call, settings=settings, arrays=arrays | bounds, seeds=seeds
  )
  key_scratch = ((width, blocks.k_size),) * 2
  if _row_bytes(q, settings) <= _ROW_BYTES:
    dq, dk, dv = call(
      _gradients,
      schedule=by_key,
      outputs={"row": q, "k": k, "v": v},
      scratch=((blocks.q_count, width, lanes), *key_scratch),
      products=5,
    )
  else:
    (dq,) = call(
      _query_gradient,
      schedule=by_query,
      outputs={"q": q},
      scratch=((width, lanes),),
      products=3,
    )
    dk, dv = call(
      _key_gradients,
      schedule=by_key,
      outputs={"k": k, "v": v},
      scratch=key_scratch,
      products=4,
    )
  return dq, dk, dv, None, None, None


def _row_bytes(q, settings: Settings) -> int:
  """Vector memory for dQ of a step's heads and all their queries."""
  heads = heads_of_a_step(*q.shape[1:4], settings.blocks, q.dtype)
  queries = settings.blocks.q_count * settings.blocks.q_size
  # In float32 to add up, and twice in q's dtype to be written from.
  size = 4 + 2 * q.dtype.itemsize
  return heads * math.prod(q.shape[2:4]) * queries * size


def _rows(q):
  """The shape of what there is one of per query, `[B, K, G, T]`."""
  return (*q.shape[:3], q.shape[4])


flash.defvjp(_flash_forward, _flash_backward)


# The kernels: what is done with each block of scores.


def _output(b: "_Block", outs, acc, top, total):
  """Attention's output, and the base-2 log-sum-exp of each query's scores."""

  @pl.when(b.step.first)
  def _begin():
    acc[...] = jnp.zeros_like(acc)
    top[...] = jnp.full_like(top, _FLOOR)
    total[...] = jnp.zeros_like(total)

  @b.visit
  def _add(p: "_Head"):
    scores = p.hide(p.scores(), _HIDDEN)
    highest = jnp.maximum(top[p.h], scores.max(axis=0, keepdims=True))
    weights = jnp.exp2(scores - highest)
    shrink = jnp.exp2(top[p.h] - highest)
    top[p.h] = highest
    total[p.h] = total[p.h] * shrink + weights.sum(axis=0, keepdims=True)
    v, weights = p.keys("v"), p.drop(weights)
    acc[p.h] = acc[p.h] * shrink + _dot(v, weights.astype(v.dtype), 1, 0)

  @pl.when(b.step.last)
  def _end():
    for h in range(b.heads):
      seen = total[h] > 0.0  # a query that sees nothing gets zeros
      divisor = jnp.where(seen, total[h] * (1.0 - b.settings.rate), 1.0)
      b.store_queries(outs["q"], h, acc[h] / divisor)
      lse = jnp.where(seen, top[h] + jnp.log2(total[h]), 0.0)
      b.store_row(outs["lse"], h, lse)


def _gradients(b: "_Block", outs, dq, dk, dv):
  """All gradients at once, where a row's dQ fits into the vector memory.

  The scores are computed again once for all three, not for each kernel.
  """

  @pl.when(b.step.row_first)
  def _begin():
    dq[...] = jnp.zeros_like(dq)

  def add(p: "_Head", gradient):
    k = p.keys("k")
    dq[p.h, b.step.q] += _dot(k, gradient.astype(k.dtype), 1, 0)

  _add_key_gradients(b, outs, dk, dv, add)

  @pl.when(b.step.row_last)
  def _end():
    for h in range(b.heads):
      for q in range(b.settings.blocks.q_count):
        b.store_queries(outs["row"], h, dq[h, q] * b.settings.scale, q)


def _query_gradient(b: "_Block", outs, acc):
  @pl.when(b.step.first)
  def _begin():
    acc[...] = jnp.zeros_like(acc)

  @b.visit
  def _add(p: "_Head"):
    _, gradient = p.weights_and_gradient()
    k = p.keys("k")
    acc[p.h] += _dot(k, gradient.astype(k.dtype), 1, 0)

  @pl.when(b.step.last)
  def _end():
    for h in range(b.heads):
      b.store_queries(outs["q"], h, acc[h] * b.settings.scale)


def _key_gradients(b: "_Block", outs, dk, dv):
  _add_key_gradients(b, outs, dk, dv, lambda p, gradient: None)


def _add_key_gradients(b: "_Block", outs, dk, dv, add):
  """Gradients of the keys and values; `add` gets the scores' gradient too."""

  @pl.when(b.step.first)
  def _begin():
    dk[...] = jnp.zeros_like(dk)
    dv[...] = jnp.zeros_like(dv)

  @b.visit
  def _add(p: "_Head"):
    weights, gradient = p.weights_and_gradient()
    q, do = p.queries("q"), p.queries("do")
    dv[p.h] += _dot(do, weights.astype(do.dtype), 1, 1)
    dk[p.h] += _dot(q, gradient.astype(q.dtype), 1, 1)
    add(p, gradient)

  @pl.when(b.step.last)
  def _end():
    scales = b.settings.scale, 1.0 / (1.0 - b.settings.rate)
    for name, x, scale in zip("kv", (dk, dv), scales, strict=True):
      outs[name][0] = (x[...] * scale).astype(outs[name].dtype)


def _dot(a, b, a_axis: int, b_axis: int) -> jax.Array:
  """Multiplies matrices over one axis of each; float32 is not rounded."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    a,
    b,
    (((a_axis,), (b_axis,)), ((), ())),
    precision=exact,
    preferred_element_type=jnp.float32,
  )


@dataclasses.dataclass(frozen=True)
class _Block:
  """The block of scores at a step, of some key heads and all their queries.

  Attributes:
    settings: What is static.
    step: Where the block stands.
    refs: The step's part of the inputs, by name.
    seed: `seed(h, g)` gives the dropout's seed of a head.
    heads: Number of key heads.
    group: Query heads per key head G.
  """

  settings: Settings
  step: Step
  refs: dict
  seed: Callable
  heads: int
  group: int

  def visit(self, add: Callable[["_Head"], None]) -> None:
    """Calls `add` for each head.

    There are two programs: a block that all its queries see whole goes
    without the mask's arithmetic.
    """

    def run(masked: bool):
      for h in range(self.heads):
        add(_Head(self, h, masked))

    if self.step.masked is False:
      return run(False)
    work, masked = self.step.work, self.step.masked
    pl.when(work & masked)(lambda: run(True))
    pl.when(work & ~masked)(lambda: run(False))

  def queries(self) -> jax.Array:
    """Index in its row of each query, int32 `[1, lanes]`."""
    size = self.settings.blocks.q_size
    at = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    return self.join([self.step.q * size + at] * self.group)

  def join(self, parts) -> jax.Array:
    """Puts what belongs to the query heads of a group side by side."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

  def store_queries(self, ref, h: int, x: jax.Array, q: int = 0) -> None:
    """Writes `[H, lanes]` to block q of a head's `[G, H, queries]`."""
    size = self.settings.blocks.q_size
    to = slice(q * size, min((q + 1) * size, ref.shape[-1]))
    for g in range(self.group):
      part = x[:, g * size : g * size + to.stop - to.start]
      ref[0, h, g, :, to] = part.astype(ref.dtype)

  def store_row(self, ref, h: int, row: jax.Array) -> None:
    """Writes `[1, lanes]` to a head's `[G, queries]`."""
    size = self.settings.blocks.q_size
    for g in range(self.group):
      ref[0, h, g : g + 1] = row[:, g * size : (g + 1) * size]


@dataclasses.dataclass(frozen=True)
class _Head:
  """A block's scores `[keys, lanes]` of one key head.

  The lanes are the queries, those of the group's heads side by side.

  Attributes:
    block: The block.
    h: The head, within the block.
    masked: Whether some key may be hidden from some query.
  """

  block: _Block
  h: int
  masked: bool

  def scores(self) -> jax.Array:
    """The scores in base 2, float32 `[keys, lanes]`, hidden ones too."""
    settings = self.block.settings
    scores = _dot(self.keys("k"), self.queries("q"), 0, 0)
    return scores * (settings.scale * _LOG2E)

  def weights_and_gradient(self) -> tuple[jax.Array, jax.Array]:
    """The weights after dropout, and the gradient of the scores.

    The weights lack dropout's scale, the gradient that of the scores.
    """
    rate = self.block.settings.rate
    weights = jnp.exp2(self.scores() - self.row("lse"))
    weights = self.hide(weights, 0.0)
    gradient = _dot(self.keys("v"), self.queries("do"), 0, 0)
    gradient = self.drop(gradient / (1.0 - rate) if rate else gradient)
    gradient = weights * (gradient - self.row("delta"))
    if self.block.settings.blocks.ragged_q:
      gradient = self.hide(gradient, 0.0)  # delta is anything over the end
    return self.drop(weights), gradient

  def hide(self, x: jax.Array, fill: float) -> jax.Array:
    """Puts `fill` where a query does not see a key."""
    if not self.masked:
      return x
    block = self.block
    blocks, i, j = block.settings.blocks, block.queries(), self.key_index(0)
    end = jnp.full_like(i, blocks.keys)
    if block.settings.causal:
      end = jnp.minimum(end, i + 1)
    if "end" in block.refs:
      end = jnp.minimum(end, block.join([block.refs["end"][0]] * block.group))
    if blocks.ragged_q:
      end = jnp.where(i < blocks.queries, end, 0)
    visible = j < end
    if "start" in block.refs:
      visible &= j >= block.join([block.refs["start"][0]] * block.group)
    return jnp.where(visible, x, fill)

  def drop(self, x: jax.Array) -> jax.Array:
    """Puts 0 where dropout takes a weight away."""
    block = self.block
    if not block.settings.rate:
      return x
    size = block.settings.blocks.q_size
    seeds = [
      jnp.full((1, size), block.seed(self.h, g)) for g in range(block.group)
    ]
    kept = keep(
      block.settings.rate,
      block.join(seeds).astype(jnp.uint32),
      block.queries(),
      self.key_index(0),
    )
    return jnp.where(kept, x, 0.0)

  def keys(self, name: str) -> jax.Array:
    """The keys' part of k or v, `[H, keys]`."""
    x = self.block.refs[name][0, self.h]
    blocks = self.block.settings.blocks
    if not (self.masked and blocks.ragged_k):
      return x
    # Over the end there may be anything, and 0 times anything may be NaN.
    return jnp.where(self.key_index(1) < blocks.keys, x, 0)

  def queries(self, name: str) -> jax.Array:
    """The queries' part of q or do, `[H, lanes]`."""
    block, blocks = self.block, self.block.settings.blocks
    x = block.join([block.refs[name][0, self.h, g] for g in range(block.group)])
    if not (self.masked and blocks.ragged_q):
      return x
    return jnp.where(block.queries() < blocks.queries, x, 0)

  def row(self, name: str) -> jax.Array:
    """The queries' part of lse or delta, `[1, lanes]`."""
    x = self.block.refs[name][0, self.h]
    return self.block.join([x[g : g + 1] for g in range(self.block.group)])

  def key_index(self, axis: int) -> jax.Array:
    """Index in its row of each key, int32, along `axis` of two."""
    size = self.block.settings.blocks.k_size
    shape = (1, size) if axis else (size, 1)
    at = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return self.block.step.k * size + at


# The call: which part of each array a step sees.


def _call(
  body,
  *,
  settings,
  schedule: Schedule,
  arrays,
  seeds,
  outputs,
  scratch,
  products,
):
  """Runs a kernel over a schedule.

  Args:
    body: The kernel, `(block, outs, *scratch)`.
    settings: What is static.
    schedule: The blocks to visit.
    arrays: The inputs by name; their shapes are in `flash`, lse and delta are
      `[B, K, G, T]`.
    seeds: As in `flash`.
    outputs: Arrays or shapes of what is made, by the name whose parts it has.
    scratch: Shapes of what a head adds up from step to step, in float32.
    products: Matrix products per block, for the cost estimate.
  """
  rows, kv_heads, group, width, _ = arrays["q"].shape
  blocks = settings.blocks
  heads = heads_of_a_step(kv_heads, group, width, blocks, arrays["q"].dtype)
  parts = _parts(heads, group, width, blocks)
  arrays = {n: x[:, None] if x.ndim == 2 else x for n, x in arrays.items()}
  grid, scalars = schedule.grid(rows), schedule.scalars
  if seeds is not None:
    scalars += (jax.lax.bitcast_convert_type(seeds, jnp.int32).reshape(-1),)

  def spec(name):
    shape, index = parts[name]

    def index_map(h, *rest):
      step = schedule.at(rest[: len(grid)], rest[len(grid) :])
      return step.row, *index(h, step)

    return pl.BlockSpec(shape, index_map)

  def kernel(*refs):
    prefetched, refs = refs[: len(scalars)], refs[len(scalars) :]
    ins = dict(zip(arrays, refs[: len(arrays)], strict=True))
    refs = refs[len(arrays) :]
    outs = dict(zip(outputs, refs[: len(outputs)], strict=True))
    head, *ids = (pl.program_id(axis) for axis in range(1 + len(grid)))
    step = schedule.at(ids, prefetched)

    def seed(h, g):
      at = (step.row * kv_heads + head * heads + h) * group + g
      return prefetched[-1][at]

    block = _Block(settings, step, ins, seed, heads, group)
    body(block, outs, *refs[len(outputs) :])

  return pl.pallas_call(
    kernel,
    out_shape=[
      jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(kv_heads // heads, *grid),
      in_specs=[spec(name) for name in arrays],
      out_specs=[spec(name) for name in outputs],
      scratch_shapes=[pltpu.VMEM((heads, *s), jnp.float32) for s in scratch],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", *["arbitrary"] * len(grid))
    ),
    cost_estimate=_cost(settings, arrays, outputs, products),
    interpret=settings.interpret,
    name="attention" + body.__name__,
  )(*scalars, *arrays.values())


def _parts(heads: int, group: int, width: int, blocks: Blocks) -> dict:
  """Returns each array's part at a step.

  By name, its shape, and `index(h, step)`: where it is, after the batch's row.
  """
  q_part = (1, heads, group, width, blocks.q_size)
  k_part = (1, heads, width, blocks.k_size)
  row_part = (1, heads, group, width, blocks.queries)
  one_part = (1, heads, group, blocks.q_size)
  return {
    "q": (q_part, lambda h, step: (h, 0, 0, step.q)),
    "do": (q_part, lambda h, step: (h, 0, 0, step.q)),
    "k": (k_part, lambda h, step: (h, 0, step.k)),
    "v": (k_part, lambda h, step: (h, 0, step.k)),
    "row": (row_part, lambda h, step: (h, 0, 0, 0)),
    "lse": (one_part, lambda h, step: (h, 0, step.q)),
    "delta": (one_part, lambda h, step: (h, 0, step.q)),
    "start": ((1, 1, blocks.q_size), lambda h, step: (0, step.q)),
    "end": ((1, 1, blocks.q_size), lambda h, step: (0, step.q)),
  }


def _cost(settings, arrays, outputs, products: int) -> pl.CostEstimate:
  """Counts work, of a table as if it hid nothing more, and each array once."""
  q = arrays["q"]
  scores = math.prod(_rows(q)) * settings.blocks.keys
  if settings.causal:
    scores //= 2
  moved = [*arrays.values(), *outputs.values()]
  return pl.CostEstimate(
    flops=2 * products * scores * q.shape[3],
    transcendentals=scores,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
  )
