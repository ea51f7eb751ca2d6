"""Fused attention in Pallas Mosaic GPU for Hopper, for all masks.

The algorithm is that of the TPU kernel (`attention.tpu.kernel`). Only one block
of scores exists at a time, and the backward pass recomputes the scores from
each query's log-sum-exp. `attention.gpu.visits` lists the blocks to visit.

A thread block has three warpgroups. Two compute parts of a block: 64 queries
each, or 64 keys each in the gradients of keys and values. The third loads the
other operands from global memory into slots of shared memory, in blocks of 128.
The barrier `ready` signals that a slot is filled. The barrier `free` signals
that both parts have used it. FlashAttention-3 (arXiv 2407.08608) divides the
work in the same way.

    kernel     loaded once (stay)    loaded in blocks (come)
    output     q                     k, v
    dQ         q, do                 k, v
    dK, dV     k, v                  q, do, for each head of a group
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from antlm_jax import hashing
from antlm_jax.attention.blocks import SAVED, UNIT
from antlm_jax.attention.dropout import keep_of
from antlm_jax.attention.gpu.visits import VisitSchedule

_LOG2E = math.log2(math.e)
_FLOOR = -1e37  # first maximum, under any score except a hidden key's -inf
_PART = 64  # number of queries or keys per warpgroup
_PARTS = UNIT // _PART
_SLOTS = 2  # number of slots, to load one while the other is in use
# Number of registers of a thread that computes, and of a thread that loads. The
# hardware has 65,536, and 2 * 240 + 24 is three times the initial 168.
_MANY = 240
_FEW = 24
_TILE = plgpu.Layout.WGMMA  # layout of a product in a warpgroup's registers


@dataclasses.dataclass(frozen=True)
class GpuKernelSettings:
  """Static settings of a kernel."""

  scale: float  # factor of the scores
  rate: float = 0.0  # dropout rate of attention weights
  interpret: bool = False  # interpret the kernel on CPU and detect races


def mosaic_attention(
  settings: GpuKernelSettings, q, k, v, seeds, schedule: VisitSchedule
) -> jax.Array:
  """Runs the kernels and returns `[B, T, N, H]` in q's dtype.

  Args:
    settings: Static settings.
    q: Queries `[B, T, N, H]`, bfloat16 or float16.
    k, v: Keys and values `[B, S, K, H]`.
    seeds: Seeds of dropout, uint32 `[B, N]`, or None.
    schedule: Schedule of the mask, from `visits.make_visit_schedule`.
  """
  if settings.scale <= 0:  # because kernels scale after they take the maximum
    q = q * settings.scale
    settings = dataclasses.replace(settings, scale=1.0)
  # Pad the last block with zeros, which the schedule hides.
  padded = (
    jnp.pad(x, ((0, 0), (0, -x.shape[1] % UNIT), (0, 0), (0, 0)))
    for x in (q, k, v)
  )
  return _mosaic_flash(settings, *padded, seeds, schedule)[:, : q.shape[1]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mosaic_flash(settings, q, k, v, seeds, schedule):
  return _mosaic_forward(settings, q, k, v, seeds, schedule)[0]


# Compiled once for all layers: a kernel takes seconds.
@functools.partial(jax.jit, static_argnums=0)
def _mosaic_forward(settings, q, k, v, seeds, schedule):
  rows, queries, heads, _ = q.shape
  out, lse = _call_mosaic(
    _output,
    settings,
    grid=(heads, queries // UNIT, rows),
    arrays={"q": q, "k": k, "v": v, "bounds": schedule.bounds, "seeds": seeds},
    visits=schedule.by_query,
    outputs={"out": q, "lse": _like((rows, heads, queries), jnp.float32)},
    stay={"q_s": _tiles(_PARTS, _PART, q)},
    come={"k_s": _tiles(_SLOTS, UNIT, k), "v_s": _tiles(_SLOTS, UNIT, v)},
    scratch={"lse_s": plgpu.SMEM((_PARTS, _PART), jnp.float32)},
  )
  # The backward pass recomputes the scores from `lse`. If remat saves these two
  # by name, the forward kernel never runs twice.
  out = checkpoint_name(out, SAVED)
  lse = checkpoint_name(lse, SAVED)
  return out, (q, k, v, seeds, schedule, out, lse)


@functools.partial(jax.jit, static_argnums=0)
def _mosaic_backward(settings, residuals, grad):
  q, k, v, seeds, schedule, out, lse = residuals
  rows, queries, heads, _ = q.shape
  delta = jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32), axis=3)
  arrays = {"q": q, "k": k, "v": v, "do": grad, "bounds": schedule.bounds}
  # Stack the two numbers of each query, `[B, N, 2, T]`.
  arrays["sums"] = jnp.stack([lse, delta.swapaxes(1, 2)], axis=2)
  arrays["seeds"] = seeds
  (dq,) = _call_mosaic(
    _query_gradient,
    settings,
    grid=(heads, queries // UNIT, rows),
    arrays=arrays,
    visits=schedule.by_query,
    outputs={"dq": q},
    stay={"q_s": _tiles(_PARTS, _PART, q), "do_s": _tiles(_PARTS, _PART, q)},
    come={"k_s": _tiles(_SLOTS, UNIT, k), "v_s": _tiles(_SLOTS, UNIT, v)},
  )
  of_queries = (_SLOTS, 2, UNIT)
  dk, dv = _call_mosaic(
    _key_gradients,
    settings,
    grid=(k.shape[2], k.shape[1] // UNIT, rows),
    arrays=arrays,
    visits=schedule.by_key,
    outputs={"dk": k, "dv": v},
    stay={"k_s": _tiles(_PARTS, _PART, k), "v_s": _tiles(_PARTS, _PART, v)},
    come={
      "q_s": _tiles(_SLOTS, UNIT, q),
      "do_s": _tiles(_SLOTS, UNIT, q),
      "sums_s": plgpu.SMEM(of_queries, jnp.float32),
      "bounds_s": plgpu.SMEM(of_queries, jnp.int32),
    },
    group=heads // k.shape[2],
  )
  return dq, dk, dv, None, None


_mosaic_flash.defvjp(_mosaic_forward, _mosaic_backward)


# Array of each value per query, and the value's index in it.
_QUERY_VALUES = {
  "start": ("bounds", 0),  # first visible key
  "end": ("bounds", 1),  # last visible key plus 1
  "lse": ("sums", 0),  # base-2 log-sum-exp of the scores
  "delta": ("sums", 1),  # product of the output and its gradient
}

# The kernels, which do the work of a thread block. `r` has the references by
# name, and names of shared memory end in _s.


def _output(b: "_ThreadBlock", r):
  """Computes the output, and the base-2 log-sum-exp of each query's scores."""
  kv_head = lax.div(b.head, jnp.int32(r.q.shape[2] // r.k.shape[2]))
  width = r.q.shape[3]
  dtype = r.q.dtype

  @b.load
  def _keys_of_block(block, _):
    keys = b.row, pl.ds(block * UNIT, UNIT), kv_head
    return {"k_s": r.k.at[keys], "v_s": r.v.at[keys]}

  @b.compute
  def _compute(part):
    first = b.tile * UNIT + part * _PART
    queries = b.row, pl.ds(first, _PART), b.head
    b.bring(part, {"q_s": r.q.at[queries]})
    bounds = r.bounds.at[b.row]
    bound_values = {
      n: _read_value(n, bounds, None, queries[1], axis=0)
      for n in ("start", "end")
    }

    def step(masked, slot, block, _, carry):
      acc, top, total = carry
      p = _Scores(
        b, (_PART, UNIT), 0, first, block * UNIT, bound_values.get, b.head
      )
      k = r.k_s.at[slot]
      v = r.v_s.at[slot]
      (scores,) = _products((r.q_s.at[part], k.transpose((1, 0))))
      if masked:
        scores = jnp.where(p.visible(), scores, -jnp.inf)
      # Since e^x = 2^(x log2 e), base 2 needs one multiplication in all, which
      # is one instruction with the subtraction.
      scale = b.settings.scale * _LOG2E
      highest = jnp.maximum(top, scores.max(axis=1) * scale)
      weights = jnp.exp2(scores * scale - p.spread(highest))
      # The softmax includes all keys, so dropout follows it.
      shrink = jnp.exp2(top - highest)
      total = total * shrink + weights.sum(axis=1)
      weights = b.operand(part, 0, p.drop(weights), dtype)
      (weighted,) = _products((weights, v))
      return acc * _rows(shrink, width) + weighted, highest, total

    acc, top, total = b.visit(
      step,
      (
        _full((_PART, width), 0.0, _TILE),
        _full((_PART,), _FLOOR, _TILE.reduce(1)),
        _full((_PART,), 0.0, _TILE.reduce(1)),
      ),
    )
    has_keys = total > 0.0  # False for a query that sees no key
    total = jnp.where(has_keys, total, 1.0)
    inverse = 1.0 / (total * (1.0 - b.settings.rate))
    r.q_s[part] = (acc * _rows(inverse, width)).astype(dtype)
    r.lse_s[part] = jnp.where(has_keys, top + jnp.log2(total), 0.0)
    lse = r.lse.at[b.row, b.head, pl.ds(first, _PART)]
    _send((r.q_s.at[part], r.out.at[queries]), (r.lse_s.at[part], lse))


def _query_gradient(b: "_ThreadBlock", r):
  kv_head = lax.div(b.head, jnp.int32(r.q.shape[2] // r.k.shape[2]))
  width = r.q.shape[3]
  dtype = r.q.dtype

  @b.load
  def _keys_of_block(block, _):
    keys = b.row, pl.ds(block * UNIT, UNIT), kv_head
    return {"k_s": r.k.at[keys], "v_s": r.v.at[keys]}

  @b.compute
  def _compute(part):
    first = b.tile * UNIT + part * _PART
    queries = b.row, pl.ds(first, _PART), b.head
    b.bring(part, {"q_s": r.q.at[queries], "do_s": r.do.at[queries]})
    bounds = r.bounds.at[b.row]
    sums = r.sums.at[b.row, b.head]
    query_values = {
      n: _read_value(n, bounds, sums, queries[1], axis=0) for n in _QUERY_VALUES
    }

    def run(dq):
      def step(masked, slot, block, _, carry):
        for offset in range(0, UNIT, _PART):
          keys = slot, pl.ds(offset, _PART)
          key = block * UNIT + offset
          p = _Scores(
            b, (_PART, _PART), 0, first, key, query_values.get, b.head
          )
          scores, grad_weights = _products(
            (r.q_s.at[part], r.k_s.at[keys].transpose((1, 0))),
            (r.do_s.at[part], r.v_s.at[keys].transpose((1, 0))),
          )
          ds = p.gradient(p.weights(masked, scores), grad_weights)
          plgpu.wgmma(dq, b.operand(part, 0, ds, dtype), r.k_s.at[keys])
          plgpu.wgmma_wait(0)
        return carry

      b.visit(step, None)
      return dq[...]

    dq = pl.run_scoped(run, plgpu.ACC((_PART, width), jnp.float32))
    r.q_s[part] = (dq * b.settings.scale).astype(dtype)
    _send((r.q_s.at[part], r.dq.at[queries]))


def _key_gradients(b: "_ThreadBlock", r):
  width = r.k.shape[3]
  dtype = r.k.dtype
  # `b.head` is a key head here, and the kernel visits its query heads in turn.

  @b.load
  def _queries_of_block(block, head):
    positions = pl.ds(block * UNIT, UNIT)
    queries = b.row, positions, head
    return {
      "q_s": r.q.at[queries],
      "do_s": r.do.at[queries],
      "sums_s": r.sums.at[b.row, head, :, positions],
      "bounds_s": r.bounds.at[b.row, :, positions],
    }

  @b.compute
  def _compute(part):
    first = b.tile * UNIT + part * _PART
    keys = b.row, pl.ds(first, _PART), b.head
    b.bring(part, {"k_s": r.k.at[keys], "v_s": r.v.at[keys]})

    def run(dk, dv):
      def step(masked, slot, block, head, carry):
        for offset in range(0, UNIT, _PART):
          queries = slot, pl.ds(offset, _PART)
          query = block * UNIT + offset
          # The sums leave few registers, and a thread has 16 queries in this
          # layout. So read values per query only when they are needed, and
          # finish each product before the next begins.
          read = functools.partial(
            _read_value,
            bounds=r.bounds_s.at[slot],
            sums=r.sums_s.at[slot],
            queries=queries[1],
            axis=1,
          )
          p = _Scores(b, (_PART, _PART), 1, query, first, read, head)
          # Transpose the scores, because the sums belong to keys.
          q = r.q_s.at[queries]
          do = r.do_s.at[queries]
          (scores,) = _products((r.k_s.at[part], q.transpose((1, 0))))
          weights = p.weights(masked, scores)
          plgpu.wgmma(dv, b.operand(part, 0, p.drop(weights), dtype), do)
          plgpu.wgmma_wait(0)
          (grad_weights,) = _products((r.v_s.at[part], do.transpose((1, 0))))
          ds = p.gradient(weights, grad_weights)
          plgpu.wgmma(dk, b.operand(part, 1, ds, dtype), q)
          plgpu.wgmma_wait(0)
        return carry

      b.visit(step, None)
      return dk[...], dv[...]

    sums = plgpu.ACC((_PART, width), jnp.float32)
    dk, dv = pl.run_scoped(run, sums, sums)
    r.k_s[part] = (dk * b.settings.scale).astype(dtype)
    r.v_s[part] = (dv / (1.0 - b.settings.rate)).astype(dtype)
    _send((r.k_s.at[part], r.dk.at[keys]), (r.v_s.at[part], r.dv.at[keys]))


@dataclasses.dataclass(frozen=True)
class _Scores:
  """Scores of some queries and keys in a warpgroup's registers."""

  block: "_ThreadBlock"
  shape: tuple[int, int]
  axis: int  # axis of the queries
  query: jax.Array  # index of the first query in its row
  key: jax.Array  # index of the first key in its row
  read: Callable  # `read(name)` returns a value of `_QUERY_VALUES`
  head: jax.Array  # query head

  def spread(self, row: jax.Array) -> jax.Array:
    """Broadcasts a value per query to all its scores."""
    return lax.broadcast_in_dim(row, self.shape, [self.axis])

  def keys(self) -> jax.Array:
    """Returns the index of each score's key in its row."""
    index = plgpu.broadcasted_iota(
      jnp.int32, self.shape, 1 - self.axis, layout=_TILE
    )
    return self.key + index

  def visible(self) -> jax.Array:
    start, end = (self.spread(self.read(n)) for n in ("start", "end"))
    keys = self.keys()
    return (keys >= start) & (keys < end)

  @functools.cached_property
  def kept(self) -> jax.Array:
    """Whether dropout keeps each weight, by the hash of all implementations."""
    b = self.block
    size = (self.shape[self.axis],)
    layout = _TILE.reduce(1 - self.axis)
    query = plgpu.broadcasted_iota(jnp.int32, size, 0, layout=layout)
    query = (self.query + query).astype(jnp.uint32)
    state = hashing.mix_counter(b.refs.seeds[b.row, self.head], query)
    return keep_of(b.settings.rate, self.spread(state), self.keys())

  def drop(self, x: jax.Array) -> jax.Array:
    return jnp.where(self.kept, x, 0.0) if self.block.settings.rate else x

  # The weights lack dropout's scale, and the gradient lacks the scale of the
  # scores. The kernels multiply the sums by it when they write them.

  def weights(self, masked: bool, scores: jax.Array) -> jax.Array:
    """Returns the weights before dropout."""
    scores = scores * (self.block.settings.scale * _LOG2E)
    weights = jnp.exp2(scores - self.spread(self.read("lse")))
    # Weights of hidden scores may be infinite until they are replaced.
    return jnp.where(self.visible(), weights, 0.0) if masked else weights

  def gradient(self, weights: jax.Array, grad_weights: jax.Array) -> jax.Array:
    """Returns the gradient of the scores from that of the dropped weights."""
    if rate := self.block.settings.rate:
      grad_weights = self.drop(grad_weights * (1.0 / (1.0 - rate)))
    return weights * (grad_weights - self.spread(self.read("delta")))


# Code that the kernels share.


def _call_mosaic(
  body,
  settings,
  *,
  grid,
  arrays,
  visits,
  outputs,
  stay,
  come,
  scratch=None,
  group=1,
):
  """Runs `body(_Block, references)` on a grid of heads, owned blocks and rows.

  In shared memory, each part fills `stay` once, and `come` has the slots for
  blocks. A head of the grid has `group` query heads.
  """
  arrays = {n: x for n, x in arrays.items() if n != "seeds" or settings.rate}
  arrays |= {"blocks": visits.blocks, "counts": visits.counts}
  scratch = {**stay, **come, **(scratch or {})}
  scratch["staying"] = plgpu.Barrier(
    num_arrivals=len(stay), num_barriers=_PARTS
  )
  scratch["ready"] = plgpu.Barrier(num_arrivals=len(come), num_barriers=_SLOTS)
  scratch["free"] = plgpu.Barrier(num_arrivals=_PARTS, num_barriers=_SLOTS)
  interpret = None
  if settings.interpret:
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    dtype = arrays["q"].dtype
    scratch["spare_s"] = plgpu.SMEM((_PARTS, 2, _PART, UNIT), dtype)

  def kernel(*refs, **shared):
    named = dict(zip((*arrays, *outputs), refs, strict=True))
    refs = types.SimpleNamespace(**named, **shared)
    head, tile, row = (lax.axis_index(name) for name in _GRID)
    body(_ThreadBlock(settings, refs, row, head, tile, group), refs)

  kernel.__name__ = f"attention{body.__name__}"
  return plgpu.kernel(
    kernel,
    out_type=[_like(x.shape, x.dtype) for x in outputs.values()],
    scratch_types=scratch,
    grid=grid,
    grid_names=_GRID,
    num_threads=_PARTS + 1,
    thread_name="warpgroup",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
  )(*arrays.values())


_GRID = ("head", "tile", "row")


@dataclasses.dataclass(frozen=True)
class _ThreadBlock:
  """A thread block, the tile that it owns, and its warpgroups' loops."""

  settings: GpuKernelSettings
  refs: types.SimpleNamespace
  row: jax.Array
  head: jax.Array  # query head, or key head if the tile has keys
  tile: jax.Array  # index of the owned block of queries or keys
  group: int  # number of query heads to visit for the tile

  def load(self, sources: Callable) -> None:
    """Runs the warpgroup that loads the arrays `sources(block, head)`."""
    r = self.refs

    @pl.when(lax.axis_index("warpgroup") == _PARTS)
    def _load_blocks():
      plgpu.set_max_registers(_FEW, action="decrease")
      needed = r.counts[self.row, self.tile, 1]

      def of_head(g, _):
        @pl.loop(0, needed)
        def _load_block(n):
          block = r.blocks[self.row, self.tile, n]
          index = g * needed + n
          slot = _slot(index)
          reused = index >= _SLOTS
          pl.when(reused)(lambda: plgpu.barrier_wait(r.free.at[slot]))
          for name, source in sources(
            block, self.head * self.group + g
          ).items():
            target = getattr(r, name).at[slot]
            plgpu.copy_gmem_to_smem(source, target, r.ready.at[slot])

      self._each_head(of_head, None)

  def compute(self, run: Callable) -> None:
    """Runs the warpgroups that compute, each with the index of its part."""

    @pl.when(lax.axis_index("warpgroup") < _PARTS)
    def _compute_part():
      plgpu.set_max_registers(_MANY, action="increase")
      run(lax.axis_index("warpgroup"))

  def bring(self, part, sources: dict) -> None:
    """Loads the arrays that stay in a part's shared memory."""
    r = self.refs
    for name, source in sources.items():
      target = getattr(r, name).at[part]
      plgpu.copy_gmem_to_smem(source, target, r.staying.at[part])
    plgpu.barrier_wait(r.staying.at[part])

  def visit(self, step: Callable, carry):
    """Calls `step(masked, slot, block, head, carry)` for each block."""
    r = self.refs
    unmasked, needed = (r.counts[self.row, self.tile, i] for i in range(2))

    def of_head(g, carry):
      def of_block(masked, n, carry):
        block = r.blocks[self.row, self.tile, n]
        slot = _slot(g * needed + n)
        plgpu.barrier_wait(r.ready.at[slot])
        head = self.head * self.group + g
        carry = step(masked, slot, block, head, carry)
        plgpu.barrier_arrive(r.free.at[slot])
        return carry

      # Compile two loops, because wholly visible blocks need no mask.
      without_mask = functools.partial(of_block, False)
      with_mask = functools.partial(of_block, True)
      carry = lax.fori_loop(jnp.int32(0), unmasked, without_mask, carry)
      return lax.fori_loop(unmasked, needed, with_mask, carry)

    return self._each_head(of_head, carry)

  def _each_head(self, run: Callable, carry):
    if self.group == 1:
      return run(jnp.int32(0), carry)
    return lax.fori_loop(jnp.int32(0), jnp.int32(self.group), run, carry)

  def operand(self, part, buffer: int, x: jax.Array, dtype) -> jax.Array:
    """Rounds x to the dtype of products."""
    x = x.astype(dtype)
    if not self.settings.interpret:
      return x  # from registers
    # The interpreter can multiply only operands in shared memory.
    spare = self.refs.spare_s.at[part, buffer, :, pl.ds(0, x.shape[1])]
    spare[...] = x
    plgpu.commit_smem()
    return spare


def _products(*pairs) -> list[jax.Array]:
  """Multiplies pairs of matrices, all at once, to float32."""

  def run(*sums):
    for total, (a, b) in zip(sums, pairs, strict=True):
      plgpu.wgmma(total, a, b)
    plgpu.wgmma_wait(0)
    return [total[...] for total in sums]

  shapes = [(a.shape[0], b.shape[1]) for a, b in pairs]
  return pl.run_scoped(run, *[plgpu.ACC(s, jnp.float32) for s in shapes])


def _slot(n: jax.Array) -> jax.Array:
  """Returns the slot of the n-th block."""
  return lax.rem(n, jnp.int32(_SLOTS))


def _send(*pairs) -> None:
  """Copies from shared to global memory."""
  plgpu.commit_smem()
  for source, target in pairs:
    plgpu.copy_smem_to_gmem(source, target)
  plgpu.wait_smem_to_gmem(0)


def _read_value(name: str, bounds, sums, queries, axis: int) -> jax.Array:
  """Reads a value per query, along an axis of scores."""
  array, index = _QUERY_VALUES[name]
  ref = {"bounds": bounds, "sums": sums}[array].at[index, queries]
  return plgpu.load(ref, layout=_TILE.reduce(1 - axis), optimized=False)


def _rows(x: jax.Array, width: int) -> jax.Array:
  return lax.broadcast_in_dim(x, (len(x), width), [0])


def _full(shape: tuple[int, ...], value: float, layout) -> jax.Array:
  return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _like(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def _tiles(count: int, size: int, like: jax.Array):
  """Returns shared memory for rows of a head, in the layout of products."""
  swizzle = plgpu.find_swizzle(like.shape[3] * 8 * like.dtype.itemsize)
  tiling = plgpu.TilingTransform((8, swizzle // like.dtype.itemsize))
  return plgpu.SMEM(
    (count, size, like.shape[3]),
    like.dtype,
    transforms=(tiling, plgpu.SwizzleTransform(swizzle)),
  )
