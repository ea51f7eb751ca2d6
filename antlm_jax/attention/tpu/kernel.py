"""Fused attention in Pallas for TPU, forward and backward, for all masks.

Vector memory holds one block of scores at a time (`tpu.scores` has its layout),
so memory is linear in the length of the rows. The online softmax and its
gradient are those of FlashAttention-2 (arXiv 2307.08691). `tpu.grid` chooses
the blocks to visit.

Each block of queries visits the blocks of keys that it needs:

    forward    m, l, acc  the maximum, sum and weighted values so far
               out = acc / l,  lse = m + log2 l
    backward   delta = sum(out * dout)           a number per query
               p  = exp2(s - lse)                the recomputed weights
               ds = p * (dout v - delta)         gradient of the scores
               dv += p dout,  dk += ds q,  dq += ds k
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from antlm_jax import mesh as mesh_lib
from antlm_jax.attention.blocks import SAVED, AttentionBlocks
from antlm_jax.attention.tpu import diagonals
from antlm_jax.attention.tpu.diagonals import dot
from antlm_jax.attention.tpu.grid import LANES, Schedule
from antlm_jax.attention.tpu.scores import (
  HeadScores,
  KernelSettings,
  ScoreBlock,
  rotate_heads,
)

_HIDDEN = -1e38  # score of a hidden key
_FLOOR = -1e37  # first maximum, so far over _HIDDEN that exp2 returns 0
_BLOCK = 512  # largest side of a block
# Largest shares of vector memory for the float32 scores of a step, and for the
# dQ of a row.
_SCORES = 1 / 16
_ROW = 3 / 8


def choose_blocks(
  queries: int, keys: int, group: int, width: int, dtype
) -> AttentionBlocks:
  """Chooses the blocks, with `group` query heads per key head."""
  largest = _BLOCK
  most = _most_scores(width, dtype)
  while largest > LANES and group * largest**2 > most:
    largest //= 2
  return AttentionBlocks.of(queries, keys, largest)


def obstacle(q, kv_heads: int, dtype, buckets: int = 0) -> str | None:
  """Returns a requirement that queries of shape q do not meet, or None."""
  group = q[2] // kv_heads
  if dtype == "float16":
    return "float32 or bfloat16, not float16"
  if buckets > LANES:
    return f"position terms of at most {LANES} buckets, not {buckets}"
  if buckets and group > 1:
    return f"as many key as query heads with position terms, not {kv_heads}"
  if buckets and "v4" in mesh_lib.device().device_kind.lower():
    return "a TPU of generation 5 or later with position terms"
  # The smallest block still has the queries of all heads of a group.
  most = 2 * _most_scores(q[3], dtype) // LANES**2
  if group > most:
    return f"at most {most} query heads per key head, not {group}"
  return None


def heads_of_a_step(
  kv_heads: int, group: int, width: int, blocks: AttentionBlocks, dtype
) -> int:
  """Returns the number of key heads per step, enough to hide its overhead.

  It is at most half of all heads, because v4 and v5p split them over two cores.
  """
  scores = group * blocks.q_size * blocks.k_size
  fit = min(_most_scores(width, dtype) // scores, kv_heads // 2)
  return max(n for n in range(1, max(1, fit) + 1) if not kv_heads % n)


def _most_scores(width: int, dtype) -> int:
  """Returns the largest number of scores per step; fewer for wide heads."""
  scores = int(_SCORES * mesh_lib.vector_memory()) // 4
  return 2 * scores // (-(-width // LANES) * jnp.dtype(dtype).itemsize)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(
  settings: KernelSettings, q, k, v, rope, terms, bounds, seeds, schedules
) -> jax.Array:
  """Runs the kernel and returns `[B, K, G, H, T]` in q's dtype.

  Args:
    settings: Static settings.
    q: Queries `[B, K, G, H, T]`, with G heads for each key head.
    k, v: Keys and values `[B, K, H, S]`.
    rope: Cosines, then sines, that rotate queries and keys, float32
      `[B, H, T]`, or None; without gradient.
    terms: Position terms, if there are `settings.edges`: "query_terms"
      `[B, K, 1, C, T]` and "key_terms" `[B, K, C, S]`, with G = 1.
    bounds: The mask's "start" and "end", int32 `[B, T]`, if it has them.
    seeds: Seeds of dropout, uint32 `[B, K, G]`, or None.
    schedules: Schedules by queries and by keys, from
      `grid.make_grid_schedules`.
  """
  args = q, k, v, rope, terms, bounds, seeds, schedules
  return _pallas_forward(settings, *args)[0]


def _pallas_forward(settings, q, k, v, rope, terms, bounds, seeds, schedules):
  cut = _Cut.of(settings.blocks, q)
  lanes = q.shape[2] * settings.blocks.q_size
  lse = jax.ShapeDtypeStruct((*q.shape[:3], q.shape[4]), jnp.float32)
  out, lse = _call_pallas(
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
  # The backward pass recomputes the scores from `lse`. If remat saves these two
  # by name, the forward kernel never runs twice.
  out = checkpoint_name(out, SAVED)
  lse = checkpoint_name(lse, SAVED)
  return out, (q, k, v, rope, terms, bounds, seeds, schedules, out, lse)


def _pallas_backward(settings, residuals, grad):
  """Returns the gradients of `flash`'s arguments, in one pass or two."""
  q, k, v, rope, terms, bounds, seeds, schedules, out, lse = residuals
  by_query, by_key = schedules
  cut = _Cut.of(settings.blocks, q)
  # `HeadScores.weights_and_gradient` explains `delta`.
  delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=3)
  inputs = _inputs(settings, cut, q, k, v, rope, terms, bounds)
  inputs["do"] = cut.queries(grad)
  inputs["lse"] = cut.queries(lse)
  inputs["delta"] = cut.queries(delta)
  query_inputs = {"q": q}
  key_inputs = {"k": k, "v": v}
  if terms:
    query_inputs["query_terms"] = terms["query_terms"]
    key_inputs["key_terms"] = terms["key_terms"]
  run_pass = functools.partial(_gradient_pass, settings, cut, seeds)
  # dQ is a sum over blocks of keys; dK and dV are sums over blocks of queries.
  # So either order of the blocks leaves a sum unfinished. If a row's dQ fits
  # into vector memory, it stays there during one pass over blocks of keys.
  # Otherwise each order has a pass, and each score is recomputed twice.
  if _row_fits(cut, query_inputs, rope):
    if rope is not None:
      inputs["rope_row"] = cut.shared(rope, cut.blocks.queries, lambda step: 0)
    grads = run_pass(
      "attention_gradients",
      by_key,
      inputs,
      row_inputs=query_inputs,
      key_inputs=key_inputs,
    )
  else:
    grads = run_pass(
      "attention_query_gradient", by_query, inputs, query_inputs=query_inputs
    )
    grads |= run_pass(
      "attention_key_gradients", by_key, inputs, key_inputs=key_inputs
    )
  dq, dk, dv = (grads.pop(name) for name in "qkv")
  # The gradients that remain are those of `terms`.
  return dq, dk, dv, None, grads, None, None, None


def _row_fits(cut: "_Cut", query_inputs: dict[str, jax.Array], rope) -> bool:
  """Whether vector memory holds the gradients of all queries of a row."""
  sums = (math.prod(cut.row_sum(x)) for x in query_inputs.values())
  # The sum is float32, and its two output buffers have q's dtype.
  itemsize = query_inputs["q"].dtype.itemsize
  size = cut.heads * (4 + 2 * itemsize) * sum(sums)
  if rope is not None:  # float32, in two buffers
    size += 2 * 4 * math.prod(rope.shape[1:])
  return size <= _ROW * mesh_lib.vector_memory()


def _gradient_pass(
  settings: KernelSettings,
  cut: "_Cut",
  seeds,
  name: str,
  schedule: Schedule,
  inputs: dict[str, "_BlockedArray"],
  *,
  query_inputs: Mapping[str, jax.Array] = {},
  row_inputs: Mapping[str, jax.Array] = {},
  key_inputs: Mapping[str, jax.Array] = {},
) -> dict[str, jax.Array]:
  """Returns the gradients of some inputs, in one pass over a schedule.

  Scratch memory holds sums for one block of queries (`query_inputs`), for all
  queries of a row (`row_inputs`), or for one block of keys (`key_inputs`).
  """
  outputs = {n: cut.queries(x) for n, x in query_inputs.items()}
  outputs |= {n: cut.row(x) for n, x in row_inputs.items()}
  outputs |= {n: cut.keys(x) for n, x in key_inputs.items()}
  sums = [cut.query_sum(x) for x in query_inputs.values()]
  sums += [cut.row_sum(x) for x in row_inputs.values()]
  sums += [cut.key_sum(x) for x in key_inputs.values()]
  # Each pass recomputes the scores, with two position terms if there are any,
  # and the gradient of the weights.
  recomputed = 2 if settings.edges is None else 4
  grads = _call_pallas(
    settings,
    name,
    functools.partial(_gradients, whole_row=bool(row_inputs)),
    schedule,
    seeds=seeds,
    inputs=inputs,
    outputs=outputs,
    sums=sums,
    products=recomputed + len(outputs),
  )
  return dict(zip(outputs, grads, strict=True))


flash.defvjp(_pallas_forward, _pallas_backward)


# The kernels, which work on one block of scores.


def _output(b: ScoreBlock, outs, sums):
  """Computes the output, and the base-2 log-sum-exp of each query's scores."""
  # Each head has `[H, lanes]`, and two rows `[1, lanes]`.
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
    # Rescale the sums from the old maximum to the new maximum. A row
    # `[1, lanes]` multiplies `[H, lanes]` without moving between lanes.
    shrink = jnp.exp2(top[p.h] - highest)
    top[p.h] = highest
    # The softmax includes all keys, so dropout follows it.
    total[p.h] = total[p.h] * shrink + weights.sum(axis=0, keepdims=True)
    v = p.keys("v")
    weights = p.drop(weights)
    acc[p.h] = acc[p.h] * shrink + dot(v, weights.astype(v.dtype), 1, 0)

  @pl.when(b.step.last)
  def _end():
    for h in range(b.heads):
      has_keys = total[h] > 0.0  # False for a query that sees no key
      divisor = jnp.where(has_keys, total[h] * (1.0 - b.settings.rate), 1.0)
      b.store_queries(outs["out"], h, acc[h] / divisor)
      lse = jnp.where(has_keys, top[h] + jnp.log2(total[h]), 0.0)
      b.store_row(outs["lse"], h, lse)


def _gradients(b: ScoreBlock, outs, sums, whole_row: bool = False):
  """Computes the gradients `outs`, of queries by block or for a whole row."""
  sums = dict(zip(outs, sums, strict=True))
  key_sums = {n: x for n, x in sums.items() if n in ("k", "v", "key_terms")}
  query_sums = {n: x for n, x in sums.items() if n not in key_sums}
  parts = []
  if query_sums:
    parts.append(_QueryGradients(b, query_sums, outs, whole_row))
  if key_sums:
    parts.append(_KeyGradients(b, key_sums, outs))
  for part in parts:
    pl.when(part.first)(part.clear)

  @b.visit
  def _add(p: HeadScores):
    weights, grad_scores = p.weights_and_gradient()
    for part in parts:
      part.add(p, weights, grad_scores)

  for part in parts:
    pl.when(part.last)(part.write)


@dataclasses.dataclass(frozen=True)
class _GradientSums:
  """Gradients that add up in scratch memory; from `first` to `last` step."""

  block: ScoreBlock
  sums: dict  # sums by the name of the input, in scratch memory
  outs: dict  # references to the gradients of all inputs, by name

  def clear(self) -> None:
    for x in self.sums.values():
      x[...] = jnp.zeros_like(x)


@dataclasses.dataclass(frozen=True)
class _QueryGradients(_GradientSums):
  """Gradients of one block of queries, or of all queries of a row."""

  whole_row: bool

  @property
  def first(self) -> jax.Array:
    step = self.block.step
    return step.row_first if self.whole_row else step.first

  @property
  def last(self) -> jax.Array:
    step = self.block.step
    return step.row_last if self.whole_row else step.last

  def add(self, p: HeadScores, weights, grad_scores) -> None:
    q_block = self.block.step.q if self.whole_row else 0
    for name, x in self.sums.items():
      x[p.h, q_block] += p.gradient_of(name, weights, grad_scores)

  def write(self) -> None:
    b = self.block
    rope = b.refs.get("rope_row" if self.whole_row else "rope_q")
    for name, x in self.sums.items():
      for h in range(b.heads):
        for q in range(x.shape[1]):
          part = x[h, q] * b.settings.scale
          turn = rope if name == "q" else None
          b.store_queries(self.outs[name], h, part, q, turn)


@dataclasses.dataclass(frozen=True)
class _KeyGradients(_GradientSums):
  """Gradients of one block of keys and values."""

  @property
  def first(self) -> jax.Array:
    return self.block.step.first

  @property
  def last(self) -> jax.Array:
    return self.block.step.last

  def add(self, p: HeadScores, weights, grad_scores) -> None:
    for name, x in self.sums.items():
      x[p.h] += p.gradient_of(name, weights, grad_scores)

  def write(self) -> None:
    b = self.block
    for name, x in self.sums.items():
      # Multiply by the factor that `weights_and_gradient` omits.
      keep_rate = 1.0 - b.settings.rate
      scale = 1.0 / keep_rate if name == "v" else b.settings.scale
      x = x[...] * scale
      if name == "k" and "rope_k" in b.refs:
        x = rotate_heads(x, b.refs["rope_k"][...], -1)
      self.outs[name][0] = x.astype(self.outs[name].dtype)


# The call, and the part of each array that a step reads or writes.


class _BlockedArray(NamedTuple):
  """An array in blocks; each step reads or writes a block."""

  array: jax.Array | jax.ShapeDtypeStruct
  block: tuple[int, ...]  # shape of a block
  index: Callable  # `index(h, step)` is the block's index for the h-th heads


@dataclasses.dataclass(frozen=True)
class _Cut:
  """Cuts arrays `[B, K, ..., positions]` into blocks for steps."""

  blocks: AttentionBlocks
  heads: int  # number of key heads per step

  @classmethod
  def of(cls, blocks: AttentionBlocks, q) -> "_Cut":
    return cls(blocks, heads_of_a_step(*q.shape[1:4], blocks, q.dtype))

  def queries(self, x) -> _BlockedArray:
    return self._part(x, self.blocks.q_size, lambda step: step.q)

  def row(self, x) -> _BlockedArray:
    """Cuts out all queries of a row."""
    return self._part(x, self.blocks.queries, lambda step: 0)

  def keys(self, x) -> _BlockedArray:
    return self._part(x, self.blocks.k_size, lambda step: step.k)

  def query_sum(self, x) -> tuple[int, ...]:
    """Returns the shape of a head's sum for a block of queries."""
    return 1, x.shape[3], x.shape[2] * self.blocks.q_size

  def row_sum(self, x) -> tuple[int, ...]:
    """Returns the shape of a head's sums for all blocks of queries."""
    _, width, lanes = self.query_sum(x)
    return self.blocks.q_count, width, lanes

  def key_sum(self, x) -> tuple[int, ...]:
    """Returns the shape of a head's sum for a block of keys."""
    return x.shape[2], self.blocks.k_size

  def shared(self, x, size: int, block_of: Callable) -> _BlockedArray:
    """Cuts an array `[B, _, positions]` that all heads share.

    `block_of(step)` is the index of the step's block of `size` positions.
    """
    block = 1, x.shape[1], size
    return _BlockedArray(
      x, block, lambda h, step: (step.row, 0, block_of(step))
    )

  def _part(self, x, size: int, block_of: Callable) -> _BlockedArray:
    inner = x.shape[2:-1]

    def index(h, step):
      return step.row, h, *[0] * len(inner), block_of(step)

    return _BlockedArray(x, (1, self.heads, *inner, size), index)


def _inputs(
  settings, cut: _Cut, q, k, v, rope, terms, bounds
) -> dict[str, _BlockedArray]:
  """Returns the inputs of every pass by name."""
  parts = {"q": cut.queries(q), "k": cut.keys(k), "v": cut.keys(v)}
  if terms:
    parts["query_terms"] = cut.queries(terms["query_terms"])
    parts["key_terms"] = cut.keys(terms["key_terms"])
  query_block = settings.blocks.q_size, lambda step: step.q
  key_block = settings.blocks.k_size, lambda step: step.k
  for name, bound in bounds.items():
    parts[name] = cut.shared(bound[:, None], *query_block)
  if rope is not None:
    parts["rope_q"] = cut.shared(rope, *query_block)
    parts["rope_k"] = cut.shared(rope, *key_block)
  if terms:
    dtype = terms["query_terms"].dtype
    table = diagonals.one_hots(settings.edges, settings.blocks, dtype)
    parts["one_hots"] = _BlockedArray(
      table,
      (1, *table.shape[1:]),
      lambda h, step: (
        diagonals.one_hot_offset(step, settings.blocks),
        0,
        0,
        0,
      ),
    )
  return parts


class _Refs(NamedTuple):
  """References of a kernel, in the order in which Pallas passes them."""

  prefetched: Sequence  # scalars
  inputs: dict[str, Any]
  outputs: dict[str, Any]
  sums: Sequence  # scratch memory

  @classmethod
  def of(cls, refs: Sequence, scalars: int, inputs, outputs) -> "_Refs":
    """Divides them by the number of scalars and the names of the arrays."""
    first_output = scalars + len(inputs)
    first_sum = first_output + len(outputs)
    return cls(
      refs[:scalars],
      dict(zip(inputs, refs[scalars:first_output], strict=True)),
      dict(zip(outputs, refs[first_output:first_sum], strict=True)),
      refs[first_sum:],
    )


def _call_pallas(
  settings: KernelSettings,
  name: str,
  body: Callable,
  schedule: Schedule,
  *,
  seeds,
  inputs: dict[str, _BlockedArray],
  outputs: dict[str, _BlockedArray],
  sums: list[tuple[int, ...]],
  products: int,
) -> list[jax.Array]:
  """Runs `body(block, outputs, sums)` over a schedule.

  `sums` are the shapes of float32 scratch memory for each head. `products` is
  the number of products of the size of queries times keys.
  """
  rows, kv_heads, group = inputs["q"].array.shape[:3]
  heads = inputs["q"].block[1]
  # Scalar memory holds the scalars before the grid begins. They are the steps
  # of a table and dropout's seeds. The kernel and its index maps read them.
  grid = schedule.grid(rows)
  scalars = schedule.scalars
  if seeds is not None:
    scalars += (jax.lax.bitcast_convert_type(seeds, jnp.int32).reshape(-1),)

  def kernel(*refs):
    refs = _Refs.of(refs, len(scalars), inputs, outputs)
    heads_id, *ids = (pl.program_id(axis) for axis in range(1 + len(grid)))
    step = schedule.at(ids, refs.prefetched)
    block = ScoreBlock(
      settings,
      step,
      refs.inputs,
      seeds=None if seeds is None else refs.prefetched[-1],
      first_head=step.row * kv_heads + heads_id * heads,
      heads=heads,
      group=group,
    )
    body(block, refs.outputs, refs.sums)

  def spec(part: _BlockedArray) -> pl.BlockSpec:
    return _block_spec(part, schedule, len(grid))

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
      # Two cores may share the heads, but not the steps, whose sums are in
      # scratch memory.
      dimension_semantics=("parallel", *["arbitrary"] * len(grid)),
      vmem_limit_bytes=mesh_lib.kernel_memory(),
    ),
    cost_estimate=_pallas_cost(settings, parts, products),
    interpret=settings.interpret,
    name=name,
  )(*scalars, *(part.array for part in inputs.values()))


def _block_spec(
  part: _BlockedArray, schedule: Schedule, axes: int
) -> pl.BlockSpec:
  """Returns the block of an array at each point of a grid of heads and axes."""

  def index(h, *ids_and_scalars):
    ids = ids_and_scalars[:axes]
    scalars = ids_and_scalars[axes:]
    return part.index(h, schedule.at(ids, scalars))

  return pl.BlockSpec(part.block, index)


def _pallas_cost(settings, parts, products: int) -> pl.CostEstimate:
  """Estimates work as if tables hid nothing and each array moved once."""
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
