"""Blocks of scores that the TPU kernel visits, in order.

A schedule maps the kernel's program ids to a `Step`, one block of queries and
one block of keys. It visits the blocks that some query needs, and finishes one
output block before the next. For a full or causal mask, arithmetic finds the
blocks. For a mask with bounds, a table lists them. Each training step builds
the table once, and scalar prefetch passes it to the kernel.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from antlm_jax.attention.blocks import AttentionBlocks, visibility
from antlm_jax.masks import AttentionMask

LANES = 128  # number of lanes of a register
# Bits of a code in a table, in the order of the last six fields of `Step`.
_FIRST, _LAST, _ROW_FIRST, _ROW_LAST, _WORK, _MASKED = (
  1 << bit for bit in range(6)
)
_FLAG_BITS = 6


class Step(NamedTuple):
  """Work of the kernel at one point of its grid.

  Consecutive steps add up an output block in scratch memory. The `first` step
  clears it and the `last` step writes it. In the same way, the steps from
  `row_first` to `row_last` add up the gradient of a row's queries.
  """

  row: jax.Array  # row of the batch
  q: jax.Array  # block of queries
  k: jax.Array  # block of keys
  first: jax.Array  # whether this is the output block's first step
  last: jax.Array
  row_first: jax.Array  # whether this is the row's first step
  row_last: jax.Array
  work: jax.Array | bool  # False if the step only clears the output block
  masked: jax.Array | bool  # whether a key is hidden from some query


@dataclasses.dataclass(frozen=True)
class _Base:
  """Base class; `grid(rows)` is the grid's shape, `at(ids, scalars)` a step."""

  blocks: AttentionBlocks = dataclasses.field(metadata={"static": True})
  # Whether output blocks are blocks of keys, with an inner loop over queries.
  by_key: bool = dataclasses.field(metadata={"static": True})

  scalars = ()  # arrays that scalar prefetch passes to the kernel


@jax.tree_util.register_dataclass
class Full(_Base):
  """All blocks, for a mask that hides nothing."""

  def grid(self, rows: int) -> tuple[int, ...]:
    counts = self.blocks.q_count, self.blocks.k_count
    return (rows, *(counts[::-1] if self.by_key else counts))

  def at(self, ids, scalars) -> Step:
    row, outer, inner = ids
    q, k = (inner, outer) if self.by_key else (outer, inner)
    _, outers, inners = self.grid(1)
    first = inner == 0
    last = inner == inners - 1
    ends = first & (outer == 0), last & (outer == outers - 1)
    masked = self.blocks.over_the_end(q, k)
    return Step(row, q, k, first, last, *ends, True, masked)


@jax.tree_util.register_dataclass
class Triangle(_Base):
  """Blocks on and below the diagonal, for a causal square mask.

  The triangle has rows of 1, 2, ..., n blocks. It is folded into a rectangle,
  with a short and a long row in each row, so that no step is idle.
  """

  def grid(self, rows: int) -> tuple[int, ...]:
    # If n is even, there are n / 2 pairs of rows, with n + 1 blocks each. If n
    # is odd, the longest row is alone, and the pairs have n blocks too.
    count = self.blocks.q_count
    return (rows, (count + 1) // 2, count + 1 - count % 2)

  def at(self, ids, scalars) -> Step:
    row, pair, place = ids
    count = self.blocks.q_count
    short = pair - count % 2  # index of the short row; -1 for no row
    is_short = place <= short
    outer = jnp.where(is_short, short, count - 1 - pair)
    inner = jnp.where(is_short, place, place - short - 1)
    # A mirror image at the second diagonal orders the triangle by keys.
    q = outer
    k = inner
    if self.by_key:
      q = count - 1 - inner
      k = count - 1 - outer
    _, pairs, places = self.grid(1)
    row_first = (pair == 0) & (place == 0)
    ends = row_first, (pair == pairs - 1) & (place == places - 1)
    # Below the diagonal every query sees every key.
    masked = (q == k) | self.blocks.over_the_end(q, k)
    return Step(row, q, k, inner == 0, inner == outer, *ends, True, masked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table(_Base):
  """A list of blocks, for a mask with bounds."""

  # Row, outer block, inner block and flags of each step, int32 `[most steps]`.
  # They are bit fields, because the scalar core divides slowly.
  codes: jax.Array
  total: jax.Array  # number of steps and size of the grid, int32 `[1]`

  @property
  def scalars(self):
    # Scalar memory has the codes before the grid begins, so that each step can
    # load the next step's block from HBM.
    return (self.codes,)

  def grid(self, rows: int) -> tuple[jax.Array, ...]:
    # The size is dynamic, because blocks that no query needs have no step.
    return (self.total[0],)

  def at(self, ids, scalars) -> Step:
    code = scalars[0][ids[0]]
    outer_bits, inner_bits = _block_bits(self.blocks, self.by_key)
    group = code >> (inner_bits + _FLAG_BITS)
    outer = group & ((1 << outer_bits) - 1)
    inner = (code >> _FLAG_BITS) & ((1 << inner_bits) - 1)
    q, k = (inner, outer) if self.by_key else (outer, inner)
    flags = ((code & (1 << bit)) != 0 for bit in range(_FLAG_BITS))
    return Step(group >> outer_bits, q, k, *flags)


def _block_bits(blocks: AttentionBlocks, by_key: bool) -> tuple[int, int]:
  """Returns the number of bits of an outer and of an inner block."""
  bits = (blocks.q_count - 1).bit_length(), (blocks.k_count - 1).bit_length()
  return bits[::-1] if by_key else bits


Schedule = Full | Triangle | Table


def make_grid_schedules(
  mask: AttentionMask, rows: int, blocks: AttentionBlocks
):
  """Returns the schedules by blocks of queries and by blocks of keys.

  The mask's bounds, if any, are `[rows, T]`.
  """
  if _is_plain(mask, blocks):
    kind = Triangle if mask.causal else Full
    return kind(blocks, False), kind(blocks, True)
  needed, unmasked = visibility(mask, rows, blocks)
  by_query = _list_blocks(needed, unmasked, *_block_bits(blocks, False))
  needed = needed.swapaxes(1, 2)
  unmasked = unmasked.swapaxes(1, 2)
  by_key = _list_blocks(needed, unmasked, *_block_bits(blocks, True))
  return Table(blocks, False, *by_query), Table(blocks, True, *by_key)


def table_size(mask: AttentionMask, rows: int, blocks: AttentionBlocks) -> int:
  """Returns the maximum number of entries of a table; 0 without tables."""
  if _is_plain(mask, blocks):
    return 0
  return rows * blocks.q_count * blocks.k_count


def _is_plain(mask: AttentionMask, blocks: AttentionBlocks) -> bool:
  """Whether arithmetic finds the blocks, without a table."""
  square = blocks.queries == blocks.keys
  return not mask.bounded and (square or not mask.causal)


def _list_blocks(
  needed: jax.Array, unmasked: jax.Array, outer_bits, inner_bits: int
):
  """Returns a table's arrays for needed blocks, bool `[B, outer, inner]`."""
  row, outer, inner = (jnp.arange(n) for n in needed.shape)
  # If an output needs no block, an idle step clears it.
  idle = ~needed.any(axis=-1, keepdims=True) & (inner == 0)
  visited = needed | idle
  # argmax returns the index of the first True.
  first = inner == jnp.argmax(visited, axis=-1, keepdims=True)
  end = len(inner) - jnp.argmax(visited[..., ::-1], axis=-1, keepdims=True)
  last = inner + 1 == end
  outer = outer[:, None]
  flags = first * _FIRST | last * _LAST
  flags |= (first & (outer == 0)) * _ROW_FIRST
  flags |= (last & (outer == needed.shape[1] - 1)) * _ROW_LAST
  flags |= needed * _WORK | (needed & ~unmasked) * _MASKED
  codes = (row[:, None, None] << outer_bits) | outer
  codes = (((codes << inner_bits) | inner) << _FLAG_BITS) | flags
  # Since shapes are static, visited blocks move to the front in order, and the
  # grid ends at `total`, before the rest of the table.
  (order,) = jnp.nonzero(visited.reshape(-1), size=visited.size, fill_value=0)
  total = visited.sum(dtype=jnp.int32)[None]
  return codes.reshape(-1)[order].astype(jnp.int32), total
