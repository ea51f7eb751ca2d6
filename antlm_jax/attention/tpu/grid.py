"""Blocks of the score matrix that the TPU's kernel visits, in order.

A schedule turns the kernel's program ids into a `Step`: one block of queries
against one block of keys. It visits the blocks that some query needs, one
output block after another. A plain full or causal mask needs only arithmetic.
A mask with bounds has a table of blocks, made once per training step and passed
to the kernel by scalar prefetch.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from antlm_jax.attention.blocks import Blocks, visibility
from antlm_jax.masks import AttentionMask

LANES = 128  # of a register
# Bits of a table's code, in the order of the last six fields of `Step`.
_FIRST, _LAST, _ROW_FIRST, _ROW_LAST, _WORK, _MASKED = (
  1 << bit for bit in range(6)
)
_FLAG_BITS = 6


class Step(NamedTuple):
  """The kernel's work at one point of its grid.

  An output block adds up in scratch memory over consecutive steps. The `first`
  step clears it and the `last` step writes it. The gradient of a whole row's
  queries adds up likewise from `row_first` to `row_last`.
  """

  row: jax.Array  # of the batch
  q: jax.Array  # block of queries
  k: jax.Array  # block of keys
  first: jax.Array  # whether this is the output block's first step
  last: jax.Array
  row_first: jax.Array  # whether this is the row's first step
  row_last: jax.Array
  work: jax.Array | bool  # False if the output block is only to be zeroed
  masked: jax.Array | bool  # whether some query does not see some key


@dataclasses.dataclass(frozen=True)
class _Base:
  """Base of schedules: `grid(rows)`, its sizes; `at(ids, scalars)`, a step."""

  blocks: Blocks = dataclasses.field(metadata={"static": True})
  # Output blocks are those of keys: the inner loop is over blocks of queries.
  by_key: bool = dataclasses.field(metadata={"static": True})

  scalars = ()  # arrays that the kernel gets by scalar prefetch


@jax.tree_util.register_dataclass
class Full(_Base):
  """Every block, for a mask that hides nothing."""

  def grid(self, rows: int) -> tuple[int, ...]:
    counts = self.blocks.q_count, self.blocks.k_count
    return (rows, *(counts[::-1] if self.by_key else counts))

  def at(self, ids, scalars) -> Step:
    row, outer, inner = ids
    q, k = (inner, outer) if self.by_key else (outer, inner)
    _, outers, inners = self.grid(1)
    first, last = inner == 0, inner == inners - 1
    ends = first & (outer == 0), last & (outer == outers - 1)
    masked = self.blocks.over_the_end(q, k)
    return Step(row, q, k, first, last, *ends, True, masked)


@jax.tree_util.register_dataclass
class Triangle(_Base):
  """The blocks on and below the diagonal, for a causal square mask.

  The triangle's rows of 1, 2, ..., n blocks are folded into a rectangle: a
  short and a long row fill each of its rows, so that no step is idle.
  """

  def grid(self, rows: int) -> tuple[int, ...]:
    # n even: n / 2 pairs of n + 1 blocks. n odd: the longest row is alone,
    # and pairs of the others have its length n.
    count = self.blocks.q_count
    return (rows, (count + 1) // 2, count + 1 - count % 2)

  def at(self, ids, scalars) -> Step:
    row, pair, place = ids
    count = self.blocks.q_count
    short = pair - count % 2  # has short + 1 blocks: none, if it is -1
    is_short = place <= short
    outer = jnp.where(is_short, short, count - 1 - pair)
    inner = jnp.where(is_short, place, place - short - 1)
    # Mirrored at the second diagonal, the triangle is ordered by keys.
    q, k = outer, inner
    if self.by_key:
      q, k = count - 1 - inner, count - 1 - outer
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

  # Steps, int32 `[most steps]`: row, outer block, inner block and flags in bit
  # fields, since the scalar core divides slowly.
  codes: jax.Array
  total: jax.Array  # number of steps, int32 `[1]`: the size of the grid

  @property
  def scalars(self):
    # In scalar memory before the grid begins, so that a step's block is loaded
    # from HBM during the step before.
    return (self.codes,)

  def grid(self, rows: int) -> tuple[jax.Array, ...]:
    # Known only at run time: blocks that no query needs are no steps.
    return (self.total[0],)

  def at(self, ids, scalars) -> Step:
    code = scalars[0][ids[0]]
    outer_bits, inner_bits = _bits(self.blocks, self.by_key)
    group = code >> (inner_bits + _FLAG_BITS)
    outer = group & ((1 << outer_bits) - 1)
    inner = (code >> _FLAG_BITS) & ((1 << inner_bits) - 1)
    q, k = (inner, outer) if self.by_key else (outer, inner)
    flags = ((code & (1 << bit)) != 0 for bit in range(_FLAG_BITS))
    return Step(group >> outer_bits, q, k, *flags)


def _bits(blocks: Blocks, by_key: bool) -> tuple[int, int]:
  """Number of bits of an outer and of an inner block."""
  bits = (blocks.q_count - 1).bit_length(), (blocks.k_count - 1).bit_length()
  return bits[::-1] if by_key else bits


Schedule = Full | Triangle | Table


def make(mask: AttentionMask, rows: int, blocks: Blocks):
  """Returns the `Schedule` by blocks of queries, and that by blocks of keys.

  The mask's bounds, if it has any, are `[rows, T]`.
  """
  if _is_plain(mask, blocks):
    kind = Triangle if mask.causal else Full
    return kind(blocks, False), kind(blocks, True)
  needed, whole = visibility(mask, rows, blocks)
  by_query = _list(needed, whole, *_bits(blocks, False))
  needed, whole = needed.swapaxes(1, 2), whole.swapaxes(1, 2)
  by_key = _list(needed, whole, *_bits(blocks, True))
  return Table(blocks, False, *by_query), Table(blocks, True, *by_key)


def table_size(mask: AttentionMask, rows: int, blocks: Blocks) -> int:
  """Returns the most entries of a table; 0 without tables."""
  if _is_plain(mask, blocks):
    return 0
  return rows * blocks.q_count * blocks.k_count


def _is_plain(mask: AttentionMask, blocks: Blocks) -> bool:
  """Whether arithmetic is enough to find the blocks."""
  square = blocks.queries == blocks.keys
  return not mask.bounded and (square or not mask.causal)


def _list(needed: jax.Array, whole: jax.Array, outer_bits, inner_bits: int):
  """Lists needed blocks, bool `[B, outer, inner]`, as a table's arrays."""
  row, outer, inner = (jnp.arange(n) for n in needed.shape)
  # An output that needs no block is zeroed in one idle step.
  idle = ~needed.any(axis=-1, keepdims=True) & (inner == 0)
  visited = needed | idle
  # argmax is the first True: the first and the last inner block visited.
  first = inner == jnp.argmax(visited, axis=-1, keepdims=True)
  end = len(inner) - jnp.argmax(visited[..., ::-1], axis=-1, keepdims=True)
  last, outer = inner + 1 == end, outer[:, None]
  flags = first * _FIRST | last * _LAST
  flags |= (first & (outer == 0)) * _ROW_FIRST
  flags |= (last & (outer == needed.shape[1] - 1)) * _ROW_LAST
  flags |= needed * _WORK | (needed & ~whole) * _MASKED
  codes = (row[:, None, None] << outer_bits) | outer
  codes = (((codes << inner_bits) | inner) << _FLAG_BITS) | flags
  # Shapes are static: visited blocks move to the front, in their order. The
  # grid ends at `total`, before the rest of the table.
  (order,) = jnp.nonzero(visited.reshape(-1), size=visited.size, fill_value=0)
  total = visited.sum(dtype=jnp.int32)[None]
  return codes.reshape(-1)[order].astype(jnp.int32), total
