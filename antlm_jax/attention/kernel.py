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
_LANES = 2 * _BLOCK  # most queries of a block, over its heads
_SCORES = _BLOCK**2  # scores of a step, about: 1 MiB in float32


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


def cut(queries: int, keys: int, group: int) -> Blocks:
  """Chooses the blocks for `group` query heads per key head."""
  largest = _BLOCK
  while largest > LANES and group * largest > _LANES:
    largest //= 2
  return Blocks.of(queries, keys, largest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(settings: Settings, q, k, v, bounds, seeds, schedules) -> jax.Array:
  """Runs the kernel.

  Args:
    settings: What is static.
    q: Queries `[B, K, G, T, H]`: G heads for each key head.
    k: Keys `[B, K, S, H]`.
    v: Values `[B, K, S, H]`.
    bounds: The mask's: "start" and "end", int32 `[B, T]`, those it has.
    seeds: The dropout's, uint32 `[B, K, G]`, or None.
    schedules: By queries and by keys, from `schedule.make`.

  Returns:
    `[B, K, G, T, H]`, of q's dtype.
  """
  return _flash_forward(settings, q, k, v, bounds, seeds, schedules)[0]


def _flash_forward(settings, q, k, v, bounds, seeds, schedules):
  lanes = q.shape[2] * settings.blocks.q_size
  out, lse = _call(
    _output,
    settings,
    schedules[0],
    {"q": q, "k": k, "v": v} | bounds,
    seeds,
    outputs={"q": q, "lse": jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)},
    scratch=((q.shape[-1], lanes), (1, lanes), (1, lanes)),
    products=2,
  )
  out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
  return out, (q, k, v, bounds, seeds, schedules, out, lse)


def _flash_backward(settings, residuals, grad):
  q, k, v, bounds, seeds, (by_query, by_key), out, lse = residuals
  delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=-1)
  arrays = {"q": q, "k": k, "v": v, "do": grad, "lse": lse, "delta": delta}
  width, lanes = q.shape[-1], q.shape[2] * settings.blocks.q_size
  (dq,) = _call(
    _query_gradient,
    settings,
    by_query,
    arrays | bounds,
    seeds,
    outputs={"q": q},
    scratch=((width, lanes),),
    products=3,
  )
  dk, dv = _call(
    _key_gradients,
    settings,
    by_key,
    arrays | bounds,
    seeds,
    outputs={"k": k, "v": v},
    scratch=((settings.blocks.k_size, width),) * 2,
    products=4,
  )
  return dq, dk, dv, None, None, None


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
  def _add(h, visible):
    v = b.keys("v", h, visible)
    scores = b.scores(h, visible)
    if visible is not None:
      scores = jnp.where(visible, scores, _HIDDEN)
    highest = jnp.maximum(top[h], scores.max(axis=0, keepdims=True))
    weights = jnp.exp2(scores - highest)
    shrink = jnp.exp2(top[h] - highest)
    top[h] = highest
    total[h] = total[h] * shrink + weights.sum(axis=0, keepdims=True)
    if b.rate:
      weights = jnp.where(b.kept(h), weights, 0.0)
    acc[h] = acc[h] * shrink + _dot(v, weights.astype(v.dtype), 0, 0)

  @pl.when(b.step.last)
  def _end():
    for h in range(b.heads):
      seen = total[h] > 0.0  # a query that sees nothing gets zeros
      divisor = jnp.where(seen, total[h] * (1.0 - b.rate), 1.0)
      outs["q"][0, h] = b.ungroup(acc[h] / divisor, outs["q"].dtype)
      lse = jnp.where(seen, top[h] + jnp.log2(total[h]), 0.0)
      b.store_row(outs["lse"], h, lse)


def _query_gradient(b: "_Block", outs, acc):
  @pl.when(b.step.first)
  def _begin():
    acc[...] = jnp.zeros_like(acc)

  @b.visit
  def _add(h, visible):
    k = b.keys("k", h, visible)
    _, gradient = b.weights_and_gradient(h, visible)
    acc[h] += _dot(k, gradient.astype(k.dtype), 0, 0)

  @pl.when(b.step.last)
  def _end():
    for h in range(b.heads):
      dq = acc[h] * b.settings.scale
      outs["q"][0, h] = b.ungroup(dq, outs["q"].dtype)


def _key_gradients(b: "_Block", outs, dk, dv):
  @pl.when(b.step.first)
  def _begin():
    dk[...] = jnp.zeros_like(dk)
    dv[...] = jnp.zeros_like(dv)

  @b.visit
  def _add(h, visible):
    q, do = b.queries("q", h, visible), b.queries("do", h, visible)
    weights, gradient = b.weights_and_gradient(h, visible)
    dv[h] += _dot(weights.astype(do.dtype), do, 1, 0)
    dk[h] += _dot(gradient.astype(q.dtype), q, 1, 0)

  @pl.when(b.step.last)
  def _end():
    for h in range(b.heads):
      outs["k"][0, h] = (dk[h] * b.settings.scale).astype(outs["k"].dtype)
      outs["v"][0, h] = (dv[h] / (1.0 - b.rate)).astype(outs["v"].dtype)


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
  """The block of scores `[keys, heads of the group * queries]` at a step.

  Attributes:
    settings: What is static.
    step: Where the block stands.
    refs: The step's part of the inputs, by name.
    seed: `seed(h, g)` gives the dropout's seed of a head.
    heads: Number of key heads that a step handles, one after another.
    group: Query heads per key head G.
  """

  settings: Settings
  step: Step
  refs: dict
  seed: object
  heads: int
  group: int

  @property
  def rate(self) -> float:
    return self.settings.rate

  def visit(self, add):
    """Calls `add(h, visible)` per head; visible is None if nothing is hidden.

    There are two programs: a block that all its queries see whole goes
    without the mask's arithmetic.
    """

    def plain():
      for h in range(self.heads):
        add(h, None)

    def masked():
      visible = self.visible()
      for h in range(self.heads):
        add(h, visible)

    if self.step.masked is False:
      return plain()
    pl.when(self.step.work & self.step.masked)(masked)
    pl.when(self.step.work & ~self.step.masked)(plain)

  def visible(self) -> jax.Array:
    """Which keys each query sees, bool `[keys, lanes]`."""
    blocks, i = self.settings.blocks, self.query_index(axis=1)
    end = jnp.full_like(i, blocks.keys)
    if self.settings.causal:
      end = jnp.minimum(end, i + 1)
    if "end" in self.refs:
      end = jnp.minimum(
        end, self.side_by_side(self.group * [self.bound("end")])
      )
    if blocks.ragged_q:
      end = jnp.where(i < blocks.queries, end, 0)
    j = self.key_index((blocks.k_size, i.shape[1]))
    visible = j < end
    if "start" in self.refs:
      start = self.side_by_side(self.group * [self.bound("start")])
      visible = visible & (j >= start)
    return visible

  def scores(self, h: int, visible) -> jax.Array:
    """A head's scores in base 2, float32 `[keys, lanes]`, hidden ones too."""
    scores = _dot(
      self.keys("k", h, visible), self.queries("q", h, visible), 1, 1
    )
    return scores * (self.settings.scale * _LOG2E)

  def weights_and_gradient(self, h: int, visible):
    """A head's weights after dropout, and the gradient of its scores.

    The weights lack dropout's scale, the gradient that of the scores.
    """
    weights = jnp.exp2(self.scores(h, visible) - self.row("lse", h))
    gradient = _dot(
      self.keys("v", h, visible), self.queries("do", h, visible), 1, 1
    )
    kept = weights
    if self.rate:
      keep = self.kept(h)
      gradient = jnp.where(keep, gradient / (1.0 - self.rate), 0.0)
      kept = jnp.where(keep, weights, 0.0)
    gradient = weights * (gradient - self.row("delta", h))
    if visible is None:
      return kept, gradient
    return jnp.where(visible, kept, 0.0), jnp.where(visible, gradient, 0.0)

  def kept(self, h: int) -> jax.Array:
    """What dropout keeps of a head's weights, bool `[keys, lanes]`."""
    size = self.settings.blocks.q_size
    seeds = [jnp.full((1, size), self.seed(h, g)) for g in range(self.group)]
    return keep(
      self.rate,
      self.side_by_side(seeds).astype(jnp.uint32),
      self.query_index(axis=1),
      self.key_index((self.settings.blocks.k_size, 1)),
    )

  # What is loaded, and where it stands in its row.

  def keys(self, name: str, h: int, visible) -> jax.Array:
    """A head's part of k or v, `[keys, H]`."""
    x = self.refs[name][0, h]
    if visible is None or not self.settings.blocks.ragged_k:
      return x
    # Over the end there may be anything, and 0 times anything may be NaN.
    inside = self.key_index((x.shape[0], 1)) < self.settings.blocks.keys
    return jnp.where(inside, x, 0)

  def queries(self, name: str, h: int, visible) -> jax.Array:
    """A head's part of q or do, `[lanes, H]`."""
    x = self.refs[name][0, h]
    x = x.reshape(-1, x.shape[-1])
    if visible is None or not self.settings.blocks.ragged_q:
      return x
    inside = self.query_index(axis=0) < self.settings.blocks.queries
    return jnp.where(inside, x, 0)

  def row(self, name: str, h: int) -> jax.Array:
    """A head's part of lse or delta, `[1, lanes]`."""
    x = self.refs[name][0, h]
    return self.side_by_side([x[g : g + 1] for g in range(self.group)])

  def bound(self, name: str) -> jax.Array:
    """A bound of each query, int32 `[1, queries]`."""
    return self.refs[name][0]

  def key_index(self, shape) -> jax.Array:
    """Index in its row of each key, int32, keys along the first axis."""
    at = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return self.step.k * self.settings.blocks.k_size + at

  def query_index(self, axis: int) -> jax.Array:
    """Index in its row of each query, int32 `[1, lanes]` or `[lanes, 1]`."""
    size = self.settings.blocks.q_size
    shape = (1, size) if axis else (size, 1)
    at = self.step.q * size + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return self.side_by_side(self.group * [at], axis)

  def side_by_side(self, parts, axis: int = 1) -> jax.Array:
    """Joins what belongs to the query heads of a group."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)

  def ungroup(self, x: jax.Array, dtype) -> jax.Array:
    """`[H, lanes]` to `[G, queries, H]`."""
    return x.T.reshape(self.group, -1, x.shape[0]).astype(dtype)

  def store_row(self, ref, h: int, row: jax.Array) -> None:
    """Writes `[1, lanes]` to a head's `[G, queries]`."""
    size = self.settings.blocks.q_size
    for g in range(self.group):
      ref[0, h, g : g + 1] = row[:, g * size : (g + 1) * size]


# The call: which part of each array a step sees.


def _call(
  body,
  settings,
  schedule: Schedule,
  arrays,
  seeds,
  *,
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
  rows, kv_heads, group, _, width = arrays["q"].shape
  blocks = settings.blocks
  heads = _heads_of_a_step(kv_heads, group, blocks)
  q_part = (1, heads, group, blocks.q_size, width)
  k_part = (1, heads, blocks.k_size, width)
  row_part = (1, heads, group, blocks.q_size)
  parts = {  # shape of the part, and its index after the batch's row
    "q": (q_part, lambda h, step: (h, 0, step.q, 0)),
    "do": (q_part, lambda h, step: (h, 0, step.q, 0)),
    "k": (k_part, lambda h, step: (h, step.k, 0)),
    "v": (k_part, lambda h, step: (h, step.k, 0)),
    "lse": (row_part, lambda h, step: (h, 0, step.q)),
    "delta": (row_part, lambda h, step: (h, 0, step.q)),
    "start": ((1, 1, blocks.q_size), lambda h, step: (0, step.q)),
    "end": ((1, 1, blocks.q_size), lambda h, step: (0, step.q)),
  }
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
    ins = dict(zip(arrays, refs, strict=False))
    outs = dict(zip(outputs, refs[len(arrays) :], strict=False))
    head, *ids = (pl.program_id(axis) for axis in range(1 + len(grid)))
    step = schedule.at(ids, prefetched)

    def seed(h, g):
      at = (step.row * kv_heads + head * heads + h) * group + g
      return prefetched[-1][at]

    block = _Block(settings, step, ins, seed, heads, group)
    body(block, outs, *refs[len(arrays) + len(outputs) :])

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


def _heads_of_a_step(kv_heads: int, group: int, blocks: Blocks) -> int:
  """Returns how many key heads a step takes, so that it is worth its start."""
  fit = max(1, _SCORES // (group * blocks.q_size * blocks.k_size))
  return max(n for n in range(1, min(fit, kv_heads) + 1) if not kv_heads % n)


def _cost(settings, arrays, outputs, products: int) -> pl.CostEstimate:
  """Counts work and traffic; that of a table as if it hid nothing more."""
  q = arrays["q"]
  scores = q.size // q.shape[-1] * settings.blocks.keys
  if settings.causal:
    scores //= 2
  moved = [*arrays.values(), *outputs.values()]
  return pl.CostEstimate(
    flops=2 * products * scores * q.shape[-1],
    transcendentals=scores,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
  )
