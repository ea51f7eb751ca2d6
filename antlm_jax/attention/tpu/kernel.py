"""Fused attention in Pallas for TPU, forward and backward, for every mask.

The scores exist one block at a time, in vector memory (`tpu.scores` has their
layout), so memory is linear in the length of the rows. The online softmax and
its gradient are those of FlashAttention-2 (arXiv 2307.08691). `tpu.grid`
chooses the blocks to visit.

For a block of queries, over the blocks of keys that it needs:

    forward    m, l, acc  the maximum, sum and weighted values so far
               out = acc / l,  lse = m + log2 l
    backward   delta = sum(out * dout)           a number per query
               p  = exp2(s - lse)                the weights, computed again
               ds = p * (dout v - delta)         gradient of the scores
               dv += p dout,  dk += ds q,  dq += ds k
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from antlm_jax.attention import devices
from antlm_jax.attention.blocks import SAVED, Blocks
from antlm_jax.attention.tpu import diagonals
from antlm_jax.attention.tpu.diagonals import dot
from antlm_jax.attention.tpu.grid import LANES, Schedule
from antlm_jax.attention.tpu.scores import (
  HeadScores,
  KernelSettings,
  ScoreBlock,
  rotated,
)

_HIDDEN = -1e38  # score of a hidden key
_FLOOR = -1e37  # the first maximum: so far over _HIDDEN that exp2 gives 0
_BLOCK = 512  # largest side of a block
# Most of the vector memory for the scores of a step, in float32, and for a
# row's dQ.
_SCORES, _ROW = 1 / 16, 3 / 8


def cut(queries: int, keys: int, group: int, width: int, dtype) -> Blocks:
  """Chooses the blocks for `group` query heads per key head."""
  largest, most = _BLOCK, _most_scores(width, dtype)
  while largest > LANES and group * largest**2 > most:
    largest //= 2
  return Blocks.of(queries, keys, largest)


def obstacle(q, kv_heads: int, dtype, buckets: int = 0) -> str | None:
  """Returns a requirement that queries of shape q do not meet, or None."""
  group = q[2] // kv_heads
  if dtype == "float16":
    return "float32 or bfloat16, not float16"
  if buckets > LANES:
    return f"position terms of at most {LANES} buckets, not {buckets}"
  if buckets and group > 1:
    return f"as many key as query heads with position terms, not {kv_heads}"
  if buckets and "v4" in devices.device().device_kind.lower():
    return "a TPU of generation 5 or later with position terms"
  # The smallest block of a group's queries has all of the group's heads.
  most = 2 * _most_scores(q[3], dtype) // LANES**2
  if group > most:
    return f"at most {most} query heads to a key head; these are {group}"
  return None


def heads_of_a_step(
  kv_heads: int, group: int, width: int, blocks: Blocks, dtype
) -> int:
  """Returns the number of key heads of a step, so that it is worth its start.

  At most half of all heads: v4 and v5p divide the heads between two cores.
  """
  scores = group * blocks.q_size * blocks.k_size
  fit = min(_most_scores(width, dtype) // scores, kv_heads // 2)
  return max(n for n in range(1, max(1, fit) + 1) if not kv_heads % n)


def _most_scores(width: int, dtype) -> int:
  """Most scores of a step: wide heads leave them less vector memory."""
  scores = int(_SCORES * devices.vector_memory()) // 4
  return 2 * scores // (-(-width // LANES) * jnp.dtype(dtype).itemsize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(
  settings: KernelSettings, q, k, v, rope, terms, bounds, seeds, schedules
) -> jax.Array:
  """Runs the kernel; returns `[B, K, G, H, T]`, of q's dtype.

  Args:
    settings: Static settings.
    q: Queries `[B, K, G, H, T]`: G heads for each key head.
    k, v: Keys and values `[B, K, H, S]`.
    rope: Cosines, then sines, that rotate queries and keys, float32
      `[B, H, T]`, or None; they get no gradient.
    terms: Position terms, if there are `settings.edges`: "of_query"
      `[B, K, 1, C, T]` and "of_key" `[B, K, C, S]`; G is 1 then.
    bounds: The mask's "start" and "end", int32 `[B, T]`, if it has them.
    seeds: Dropout's seeds, uint32 `[B, K, G]`, or None.
    schedules: Schedules by queries and by keys, from `grid.make`.
  """
  args = q, k, v, rope, terms, bounds, seeds, schedules
  return _forward(settings, *args)[0]


def _forward(settings, q, k, v, rope, terms, bounds, seeds, schedules):
  cut = _Cut.of(settings.blocks, q)
  lanes = q.shape[2] * settings.blocks.q_size
  lse = jax.ShapeDtypeStruct((*q.shape[:3], q.shape[4]), jnp.float32)
  out, lse = _call(
    settings,
    "attention_output",
    _output,
    schedules[0],
    seeds=seeds,
    inputs=_inputs(settings, cut, q, k, v, rope, terms, bounds),
    outputs={"out": cut.queries(q), "lse": cut.queries(lse)},
    sums=[(q.shape[3], lanes), (1, lanes), (1, lanes)],
    products=2 + len(terms),
  )
  # The backward pass computes the scores again from `lse`. If remat keeps these
  # two by name, this never runs twice.
  out, lse = checkpoint_name(out, SAVED), checkpoint_name(lse, SAVED)
  return out, (q, k, v, rope, terms, bounds, seeds, schedules, out, lse)


def _backward(settings, residuals, grad):
  q, k, v, rope, terms, bounds, seeds, schedules, out, lse = residuals
  by_query, by_key = schedules
  blocks, cut = settings.blocks, _Cut.of(settings.blocks, q)
  delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=3)
  inputs = _inputs(settings, cut, q, k, v, rope, terms, bounds)
  inputs["do"] = cut.queries(grad)
  inputs |= {"lse": cut.queries(lse), "delta": cut.queries(delta)}
  of_queries, of_keys = {"q": q}, {"k": k, "v": v}
  if terms:
    of_queries["of_query"] = terms["of_query"]
    of_keys["of_key"] = terms["of_key"]
  run = functools.partial(_call, settings, seeds=seeds)

  # A head's gradients add up for a block of keys, `[H, k_size]`, and for some
  # blocks of queries, `[blocks, H, lanes]`.
  def query_sums(count):
    return [
      (count, x.shape[3], x.shape[2] * blocks.q_size)
      for x in of_queries.values()
    ]

  key_sums = [(x.shape[2], blocks.k_size) for x in of_keys.values()]
  key_parts = {n: cut.keys(x) for n, x in of_keys.items()}
  # dQ adds up over blocks of keys, dK and dV over blocks of queries: in either
  # order of the blocks one of them is unfinished from block to block. If all of
  # a row's dQ fits into vector memory, it waits there while blocks of keys are
  # done in turn: every score is computed again once. Otherwise there is a pass
  # for each order.
  row_sums = query_sums(blocks.q_count)
  # In float32 to add up, and twice in q's dtype to be written from.
  row_bytes = cut.heads * (4 + 2 * q.dtype.itemsize)
  row_bytes *= sum(map(math.prod, row_sums))
  rows = {}
  if rope is not None:
    rows["rope_row"] = cut.of_rows(rope, blocks.queries, lambda step: 0)
    row_bytes += 2 * 4 * math.prod(rope.shape[1:])
  if row_bytes <= _ROW * devices.vector_memory():
    made = run(
      "attention_gradients",
      functools.partial(_gradients, whole_row=True),
      by_key,
      inputs=inputs | rows,
      outputs={n: cut.row(x) for n, x in of_queries.items()} | key_parts,
      sums=row_sums + key_sums,
      products=5 + 2 * len(terms),
    )
  else:
    made = run(
      "attention_query_gradient",
      _gradients,
      by_query,
      inputs=inputs,
      outputs={n: cut.queries(x) for n, x in of_queries.items()},
      sums=query_sums(1),
      products=3 + 3 * len(terms) // 2,
    )
    made += run(
      "attention_key_gradients",
      _gradients,
      by_key,
      inputs=inputs,
      outputs=key_parts,
      sums=key_sums,
      products=4 + 3 * len(terms) // 2,
    )
  grads = dict(zip(of_queries | of_keys, made, strict=True))
  dq, dk, dv = (grads.pop(n) for n in "qkv")
  return dq, dk, dv, None, grads, None, None, None


flash.defvjp(_forward, _backward)


# The kernels: the work on each block of scores.


def _output(b: ScoreBlock, outs, sums):
  """Attention's output, and the base-2 log-sum-exp of each query's scores."""
  # For each head `[H, lanes]`, and two rows `[1, lanes]`.
  acc, top, total = sums

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
    # The sums so far, relative to the old maximum, are brought to the new one.
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
      b.store_queries(outs["out"], h, acc[h] / divisor)
      lse = jnp.where(seen, top[h] + jnp.log2(total[h]), 0.0)
      b.store_row(outs["lse"], h, lse)


def _gradients(b: ScoreBlock, outs, sums, whole_row: bool = False):
  """The gradients of `outs`; those of queries per block or `whole_row`."""
  sums = dict(zip(outs, sums, strict=True))
  of_keys = {n: x for n, x in sums.items() if n in ("k", "v", "of_key")}
  of_queries = {n: x for n, x in sums.items() if n not in of_keys}

  def clear(sums):
    for x in sums.values():
      x[...] = jnp.zeros_like(x)

  def write_queries():
    rope = b.refs.get("rope_row" if whole_row else "rope_q")
    for name, x in of_queries.items():
      for h in range(b.heads):
        for q in range(x.shape[1]):
          part = x[h, q] * b.settings.scale
          turn = rope if name == "q" else None
          b.store_queries(outs[name], h, part, q, turn)

  def write_keys():
    for name, x in of_keys.items():
      # The factor that `weights_and_gradient` leaves out.
      kept = 1.0 - b.settings.rate
      scale = 1.0 / kept if name == "v" else b.settings.scale
      x = x[...] * scale
      if name == "k" and "rope_k" in b.refs:
        x = rotated(x, b.refs["rope_k"][...], -1)
      outs[name][0] = x.astype(outs[name].dtype)

  begins, ends = b.step.first, b.step.last
  if whole_row:
    begins, ends = b.step.row_first, b.step.row_last
  if of_queries:
    pl.when(begins)(lambda: clear(of_queries))
  if of_keys:
    pl.when(b.step.first)(lambda: clear(of_keys))

  @b.visit
  def _add(p: HeadScores):
    weights, of_scores = p.weights_and_gradient()
    for name, x in sums.items():
      part = p.gradient_of(name, weights, of_scores)
      if name in of_keys:
        x[p.h] += part
      else:
        x[p.h, b.step.q if whole_row else 0] += part

  if of_keys:
    pl.when(b.step.last)(write_keys)
  if of_queries:
    pl.when(ends)(write_queries)


# The call: the part of each array that a step sees.


class _Part(NamedTuple):
  """An array, cut into blocks of which each step sees one."""

  array: jax.Array | jax.ShapeDtypeStruct
  block: tuple[int, ...]  # its shape
  index: Callable  # `index(h, step)` is its index, for the h-th heads


@dataclasses.dataclass(frozen=True)
class _Cut:
  """Cuts arrays `[B, K, ..., positions]` for steps of some heads each."""

  blocks: Blocks
  heads: int  # key heads of a step

  @classmethod
  def of(cls, blocks: Blocks, q) -> "_Cut":
    return cls(blocks, heads_of_a_step(*q.shape[1:4], blocks, q.dtype))

  def queries(self, x) -> _Part:
    return self._part(x, self.blocks.q_size, lambda step: step.q)

  def row(self, x) -> _Part:
    """All of a row's queries."""
    return self._part(x, self.blocks.queries, lambda step: 0)

  def keys(self, x) -> _Part:
    return self._part(x, self.blocks.k_size, lambda step: step.k)

  def of_rows(self, x, size: int, at) -> _Part:
    """An array `[B, _, positions]` that all heads share."""
    block = 1, x.shape[1], size
    return _Part(x, block, lambda h, step: (step.row, 0, at(step)))

  def _part(self, x, size: int, at) -> _Part:
    inner = x.shape[2:-1]

    def index(h, step):
      return step.row, h, *[0] * len(inner), at(step)

    return _Part(x, (1, self.heads, *inner, size), index)


def _inputs(
  settings, cut: _Cut, q, k, v, rope, terms, bounds
) -> dict[str, _Part]:
  """The inputs of every pass, by name."""
  parts = {"q": cut.queries(q), "k": cut.keys(k), "v": cut.keys(v)}
  if terms:
    parts["of_query"] = cut.queries(terms["of_query"])
    parts["of_key"] = cut.keys(terms["of_key"])
  of_q = settings.blocks.q_size, lambda step: step.q
  of_k = settings.blocks.k_size, lambda step: step.k
  for name, bound in bounds.items():
    parts[name] = cut.of_rows(bound[:, None], *of_q)
  if rope is not None:
    parts["rope_q"] = cut.of_rows(rope, *of_q)
    parts["rope_k"] = cut.of_rows(rope, *of_k)
  if terms:
    dtype = terms["of_query"].dtype
    table = diagonals.one_hots(settings.edges, settings.blocks, dtype)
    parts["one_hots"] = _Part(
      table,
      (1, *table.shape[1:]),
      lambda h, step: (diagonals.offset(step, settings.blocks), 0, 0, 0),
    )
  return parts


def _call(
  settings: KernelSettings,
  name: str,
  body: Callable,
  schedule: Schedule,
  *,
  seeds,
  inputs: dict[str, _Part],
  outputs: dict[str, _Part],
  sums: list[tuple[int, ...]],
  products: int,
) -> list[jax.Array]:
  """Runs `body(block, outputs, sums)` over a schedule.

  The sums are float32 scratch memory of these shapes for each head. `products`
  counts products of queries and keys, or of their size.
  """
  rows, kv_heads, group = inputs["q"].array.shape[:3]
  heads = inputs["q"].block[1]
  # Scalars are in scalar memory before the grid begins: a table's steps and
  # the dropout's seeds, which the kernel and its index maps read by program id.
  grid, scalars = schedule.grid(rows), schedule.scalars
  if seeds is not None:
    scalars += (jax.lax.bitcast_convert_type(seeds, jnp.int32).reshape(-1),)

  def spec(part):
    def index(h, *rest):
      return part.index(h, schedule.at(rest[: len(grid)], rest[len(grid) :]))

    return pl.BlockSpec(part.block, index)

  def kernel(*refs):
    refs = iter(refs)
    prefetched = [next(refs) for _ in scalars]
    ins = {name: next(refs) for name in inputs}
    outs = {name: next(refs) for name in outputs}
    head, *ids = (pl.program_id(axis) for axis in range(1 + len(grid)))
    step = schedule.at(ids, prefetched)

    def seed(h, g):
      at = (step.row * kv_heads + head * heads + h) * group + g
      return prefetched[-1][at]

    body(ScoreBlock(settings, step, ins, seed, heads, group), outs, list(refs))

  parts = [*inputs.values(), *outputs.values()]
  return pl.pallas_call(
    kernel,
    out_shape=[
      jax.ShapeDtypeStruct(part.array.shape, part.array.dtype)
      for part in outputs.values()
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(kv_heads // heads, *grid),
      in_specs=[spec(part) for part in inputs.values()],
      out_specs=[spec(part) for part in outputs.values()],
      scratch_shapes=[pltpu.VMEM((heads, *s), jnp.float32) for s in sums],
    ),
    compiler_params=pltpu.CompilerParams(
      # Heads may go to two cores; steps must not: sums wait in scratch.
      dimension_semantics=("parallel", *["arbitrary"] * len(grid)),
      vmem_limit_bytes=devices.kernel_memory(),
    ),
    cost_estimate=_cost(settings, parts, products),
    interpret=settings.interpret,
    name=name,
  )(*scalars, *(part.array for part in inputs.values()))


def _cost(settings, parts, products: int) -> pl.CostEstimate:
  """Work as if a table hid nothing more, and each array moved once."""
  arrays = [part.array for part in parts]
  q = arrays[0]
  scores = q.size // q.shape[3] * settings.blocks.keys
  if settings.causal:
    scores //= 2
  return pl.CostEstimate(
    flops=2 * products * scores * q.shape[3],
    transcendentals=scores,
    bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
  )
