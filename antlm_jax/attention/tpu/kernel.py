"""Fused attention in Pallas for TPU, forward and backward, for every mask.

The scores exist one block at a time, in vector memory (`scores` says how they
lie there), so that memory is linear in the rows' length. The online softmax
and its gradient are those of FlashAttention-2 (arXiv 2307.08691). Which blocks
are visited: `antlm_jax.attention.tpu.grid`.

In short, of a row's block of queries, over the blocks of keys that it needs:

    forward    m, l, acc  the maximum, sum and weighted values so far
               out = acc / l,  lse = m + log2 l
    backward   delta = sum(out * dout)           a number per query
               p  = exp2(s - lse)                the weights, computed again
               ds = p * (dout v - delta)         gradient of the scores
               dv += p dout,  dk += ds q,  dq += ds k
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from antlm_jax.attention.blocks import SAVED, Blocks
from antlm_jax.attention.devices import device
from antlm_jax.attention.tpu import diagonals
from antlm_jax.attention.tpu.diagonals import dot
from antlm_jax.attention.tpu.grid import LANES, Schedule
from antlm_jax.attention.tpu.scores import (
  HeadScores,
  KernelSettings,
  ScoreBlock,
)

_OF_KEYS = ("k", "v", "of_key")  # the others are cut by queries
_ROW = "_row"  # ends the name of an output that is not cut, but a whole row
_HIDDEN = -1e38  # score of a hidden key
_FLOOR = -1e37  # the first maximum: so far over _HIDDEN that exp2 gives 0
_BLOCK = 512  # largest side of a block
_SCORES = 2**18  # most scores of a step in bfloat16: 1 MiB of the 16
_ROW_BYTES = 6 * 2**20  # most for a row's dQ, of v4's 16 MiB vector memory


def cut(queries: int, keys: int, group: int, width: int, dtype) -> Blocks:
  """Chooses the blocks for `group` query heads per key head."""
  largest, most = _BLOCK, _most_scores(width, dtype)
  while largest > LANES and group * largest**2 > most:
    largest //= 2
  return Blocks.of(queries, keys, largest)


def obstacle(q, kv_heads: int, buckets: int = 0) -> str | None:
  """Returns what the kernel would need for queries q `[B, T, N, H]`."""
  group = q.shape[2] // kv_heads
  if q.dtype == jnp.float16:
    return "float32 or bfloat16, not float16"
  if buckets > LANES:
    return f"position terms of at most {LANES} buckets, not {buckets}"
  if buckets and group > 1:
    return f"as many key as query heads with position terms, not {kv_heads}"
  if buckets and "v4" in device().device_kind.lower():
    return "a TPU of generation 5 or later with position terms"
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
def flash(
  settings: KernelSettings, q, k, v, terms, bounds, seeds, schedules
) -> jax.Array:
  """Runs the kernel.

  Args:
    settings: What is static.
    q: Queries `[B, K, G, H, T]`: G heads for each key head.
    k: Keys `[B, K, H, S]`.
    v: Values `[B, K, H, S]`.
    terms: Those of the positions, if `settings.edges` are there: "of_query"
      `[B, K, 1, C, T]` and "of_key" `[B, K, C, S]`; G is 1 then.
    bounds: The mask's: "start" and "end", int32 `[B, T]`, those it has.
    seeds: The dropout's, uint32 `[B, K, G]`, or None.
    schedules: By queries and by keys, from `grid.make`.

  Returns:
    `[B, K, G, H, T]`, of q's dtype.
  """
  return _flash_forward(settings, q, k, v, terms, bounds, seeds, schedules)[0]


def _flash_forward(settings, q, k, v, terms, bounds, seeds, schedules):
  lanes = q.shape[2] * settings.blocks.q_size
  out, lse = _call(
    _output,
    "attention_output",
    settings=settings,
    schedule=schedules[0],
    arrays={"q": q, "k": k, "v": v} | terms | bounds,
    seeds=seeds,
    outputs={"q": q, "lse": jax.ShapeDtypeStruct(_rows(q), jnp.float32)},
    scratch=((q.shape[3], lanes), (1, lanes), (1, lanes)),
    products=2,
  )
  # Of the scores the backward pass needs only `lse`, from which it computes
  # them again; remat that keeps these two by name never runs this twice.
  out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
  return out, (q, k, v, terms, bounds, seeds, schedules, out, lse)


def _flash_backward(settings, residuals, grad):
  q, k, v, terms, bounds, seeds, (by_query, by_key), out, lse = residuals
  delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=3)
  arrays = {"q": q, "k": k, "v": v, "do": grad, "lse": lse, "delta": delta}
  wanted = {"q": q, "k": k, "v": v} | terms
  of_keys = {n: x for n, x in wanted.items() if n in _OF_KEYS}
  of_queries = {n: x for n, x in wanted.items() if n not in _OF_KEYS}
  # dQ adds up over blocks of keys, dK and dV over blocks of queries: in either
  # order of the blocks, one of them is unfinished from block to block. Going
  # by keys, all of a row's dQ waits in vector memory, if it fits: then every
  # score is computed again but once. If not, there is a pass for each order.
  if _row_bytes(settings, *of_queries.values()) <= _ROW_BYTES:
    of_rows = {f"{n}{_ROW}": x for n, x in of_queries.items()}
    passes = [("attention_gradients", by_key, of_rows | of_keys, 5)]
  else:
    passes = [
      ("attention_query_gradient", by_query, of_queries, 3),
      ("attention_key_gradients", by_key, of_keys, 4),
    ]
  grads = {}
  for name, schedule, outputs, products in passes:
    made = _call(
      _gradients,
      name,
      settings=settings,
      schedule=schedule,
      arrays=arrays | terms | bounds,
      seeds=seeds,
      outputs=outputs,
      scratch=[_sum_shape(n, x, settings) for n, x in outputs.items()],
      products=products,
    )
    names = (n.removesuffix(_ROW) for n in outputs)
    grads |= dict(zip(names, made, strict=True))
  dq, dk, dv = (grads.pop(n) for n in "qkv")
  return dq, dk, dv, grads, None, None, None


def _sum_shape(name: str, x, settings: KernelSettings) -> tuple[int, ...]:
  """The shape in which a head's gradient adds up."""
  blocks = settings.blocks
  if name in _OF_KEYS:
    return x.shape[2], blocks.k_size
  count = blocks.q_count if name.endswith(_ROW) else 1
  return count, x.shape[3], x.shape[2] * blocks.q_size


def _row_bytes(settings: KernelSettings, q, *of_query) -> int:
  """Vector memory for dQ of a step's heads and all their queries."""
  heads = heads_of_a_step(*q.shape[1:4], settings.blocks, q.dtype)
  queries = settings.blocks.q_count * settings.blocks.q_size
  columns = sum(math.prod(x.shape[2:4]) for x in (q, *of_query))
  # In float32 to add up, and twice in q's dtype to be written from.
  size = 4 + 2 * q.dtype.itemsize
  return heads * columns * queries * size


def _rows(q):
  """The shape of what there is one of per query, `[B, K, G, T]`."""
  return (*q.shape[:3], q.shape[4])


flash.defvjp(_flash_forward, _flash_backward)


# The kernels: what is done with each block of scores.


def _output(b: ScoreBlock, outs, acc, top, total):
  """Attention's output, and the base-2 log-sum-exp of each query's scores.

  Accumulated are `acc`, `[H, lanes]`, and a row of `top` and of `total`.
  """

  @pl.when(b.step.first)
  def _begin():
    acc[...] = jnp.zeros_like(acc)
    top[...] = jnp.full_like(top, _FLOOR)
    total[...] = jnp.zeros_like(total)

  @b.visit
  def _add(p: HeadScores):
    scores = p.hide(p.scores(), _HIDDEN)
    highest = jnp.maximum(top[p.h], scores.max(axis=0, keepdims=True))
    weights = jnp.exp2(scores - highest)
    # What was added up relative to the old maximum is brought to the new one.
    # A row `[1, lanes]` scales `[H, lanes]` without leaving its lanes.
    shrink = jnp.exp2(top[p.h] - highest)
    top[p.h] = highest
    # The softmax is over all keys; dropout comes after it.
    total[p.h] = total[p.h] * shrink + weights.sum(axis=0, keepdims=True)
    v, weights = p.keys("v"), p.drop(weights)
    acc[p.h] = acc[p.h] * shrink + dot(v, weights.astype(v.dtype), 1, 0)

  @pl.when(b.step.last)
  def _end():
    for h in range(b.heads):
      seen = total[h] > 0.0  # a query that sees nothing gets zeros
      divisor = jnp.where(seen, total[h] * (1.0 - b.settings.rate), 1.0)
      b.store_queries(outs["q"], h, acc[h] / divisor)
      lse = jnp.where(seen, top[h] + jnp.log2(total[h]), 0.0)
      b.store_row(outs["lse"], h, lse)


def _gradients(b: ScoreBlock, outs, *sums):
  """The gradients that `outs` has, by name; those of a whole row end in _ROW.

  Accumulated are `[H, k_size]` of keys, and of queries a `[H, lanes]` for the
  block at hand, or for each of the row's.
  """
  sums = dict(zip(outs, sums, strict=True))
  of_rows = {n: x for n, x in sums.items() if n.endswith(_ROW)}
  of_blocks = {n: x for n, x in sums.items() if n not in of_rows}

  def begin(sums):
    for x in sums.values():
      x[...] = jnp.zeros_like(x)

  def end(sums):
    for name, x in sums.items():
      out = outs[name]
      if name in _OF_KEYS:
        # What `weights_and_gradient` left out.
        kept = 1.0 - b.settings.rate
        scale = 1.0 / kept if name == "v" else b.settings.scale
        out[0] = (x[...] * scale).astype(out.dtype)
        continue
      for h in range(b.heads):
        for q in range(x.shape[1]):
          b.store_queries(out, h, x[h, q] * b.settings.scale, q)

  if of_rows:
    pl.when(b.step.row_first)(lambda: begin(of_rows))
  pl.when(b.step.first)(lambda: begin(of_blocks))

  @b.visit
  def _add(p: HeadScores):
    weights, of_scores = p.weights_and_gradient()
    for name, x in sums.items():
      part = p.gradient_of(name.removesuffix(_ROW), weights, of_scores)
      if name in _OF_KEYS:
        x[p.h] += part
      else:
        x[p.h, b.step.q if name in of_rows else 0] += part

  pl.when(b.step.last)(lambda: end(of_blocks))
  if of_rows:
    pl.when(b.step.row_last)(lambda: end(of_rows))


# The call: which part of each array a step sees.


def _call(
  body,
  name: str,
  *,
  settings,
  schedule: Schedule,
  arrays,
  seeds,
  outputs,
  scratch,
  products,
):
  """Runs a kernel over a schedule; scratch is per head, and float32."""
  rows, kv_heads, group, width, _ = arrays["q"].shape
  blocks = settings.blocks
  heads = heads_of_a_step(kv_heads, group, width, blocks, arrays["q"].dtype)
  arrays = {n: x[:, None] if x.ndim == 2 else x for n, x in arrays.items()}
  if settings.edges is not None:
    dtype = arrays["of_query"].dtype
    arrays["one_hots"] = diagonals.one_hots(settings.edges, blocks, dtype)
  # Scalars are in scalar memory before the grid begins: a table's steps and
  # the dropout's seeds, which the kernel and its index maps read by program id.
  grid, scalars = schedule.grid(rows), schedule.scalars
  if seeds is not None:
    scalars += (jax.lax.bitcast_convert_type(seeds, jnp.int32).reshape(-1),)

  def spec(name, x):
    shape, index = _part(name, x.shape, heads, blocks)

    def index_map(h, *rest):
      return index(h, schedule.at(rest[: len(grid)], rest[len(grid) :]))

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

    block = ScoreBlock(settings, step, ins, seed, heads, group)
    body(block, outs, *refs[len(outputs) :])

  return pl.pallas_call(
    kernel,
    out_shape=[
      jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs.values()
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(kv_heads // heads, *grid),
      in_specs=[spec(*item) for item in arrays.items()],
      out_specs=[spec(*item) for item in outputs.items()],
      scratch_shapes=[pltpu.VMEM((heads, *s), jnp.float32) for s in scratch],
    ),
    compiler_params=pltpu.CompilerParams(
      # Heads may go to two cores; steps must not: sums wait in scratch.
      dimension_semantics=("parallel", *["arbitrary"] * len(grid))
    ),
    cost_estimate=_cost(settings, arrays, outputs, products),
    interpret=settings.interpret,
    name=name,
  )(*scalars, *arrays.values())


def _part(name: str, shape, heads: int, blocks: Blocks) -> tuple:
  """Returns the shape of an array's part, and `index(h, step)`: where it is."""
  if name == "one_hots":
    at = functools.partial(diagonals.offset, blocks=blocks)
    return (1, *shape[1:]), lambda h, step: (at(step), 0, 0, 0)
  if name in ("start", "end"):
    return (1, 1, blocks.q_size), lambda h, step: (step.row, 0, step.q)
  if name in _OF_KEYS:
    size, at = blocks.k_size, lambda step: step.k
  elif name.endswith(_ROW):
    size, at = blocks.queries, lambda step: 0
  else:
    size, at = blocks.q_size, lambda step: step.q
  whole = shape[2:-1]

  def index(h, step):
    return step.row, h, *[0] * len(whole), at(step)

  return (1, heads, *whole, size), index


def _cost(settings, arrays, outputs, products: int) -> pl.CostEstimate:
  """Counts work, of a table as if it hid nothing more, and each array once."""
  q = arrays["q"]
  scores = math.prod(_rows(q)) * settings.blocks.keys
  if settings.causal:
    scores //= 2
  if settings.edges is not None:
    products += 2 + sum(name.startswith("of_") for name in outputs)
  moved = [*arrays.values(), *outputs.values()]
  return pl.CostEstimate(
    flops=2 * products * scores * q.shape[3],
    transcendentals=scores,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in moved),
  )
