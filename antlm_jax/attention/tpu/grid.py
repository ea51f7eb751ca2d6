"""Which blocks of the score matrix the kernel visits, in which order.

A schedule turns the kernel's program ids into a `Step`: one block of queries
against one block of keys. It visits the blocks that some query needs and no
others, those of one output block after another. A plain full or causal mask
needs no more than arithmetic; a mask with bounds is listed in a table, made
once per step of training and handed to the kernel by scalar prefetch.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from antlm_jax.attention.blocks import Blocks, visibility
from antlm_jax.masks import AttentionMask

LANES = 128  # of a register
# What a table's code says of a step beside its place: the last six fields of
# `Step`, in their order, one bit each.
_FIRST, _LAST, _ROW_FIRST, _ROW_LAST, _WORK, _MASKED = (
  1 << bit for bit in range(6)
)
_FLAG_BITS = 6


class Step(NamedTuple):
  """What the kernel does at one point of its grid.

  An output block is accumulated in scratch memory over consecutive steps:
  `first` is where it is cleared, `last` where it is written out. The gradient
  of a whole row's queries is accumulated likewise from `row_first` to
  `row_last`.
  """

  row: jax.Array  # of the batch
  q: jax.Array  # block of queries
  k: jax.Array  # block of keys
  first: jax.Array  # whether the output block begins here
  last: jax.Array  # whether it ends here
  row_first: jax.Array  # whether the row begins here
  row_last: jax.Array  # whether it ends here
  work: jax.Array | bool  # False where an output block is only to be zeroed
  masked: jax.Array | bool  # whether some query does not see some key


@dataclasses.dataclass(frozen=True)
class _Base:
  """What all schedules have.

  `grid(rows)` gives the sizes of the grid, and `at(ids, scalars)` the step at
  a point of it, from what the kernel gets by scalar prefetch.

  An output block is one of queries, or if `by_key` one of keys: the loop over
  the inner blocks is then over queries.
  """

  blocks: Blocks = dataclasses.field(metadata={"static": True})
  by_key: bool = dataclasses.field(metadata={"static": True})

  scalars = ()  # what the kernel gets by scalar prefetch


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
  short row and a long one fill each of its rows, so that no step is idle.
  """

  def grid(self, rows: int) -> tuple[int, ...]:
    # n even: n / 2 pairs of n + 1 blocks. n odd: the longest row is alone,
    # and the others pair up to its length n.
    count = self.blocks.q_count
    return (rows, (count + 1) // 2, count + 1 - count % 2)

  def at(self, ids, scalars) -> Step:
    row, pair, place = ids
    count = self.blocks.q_count
    short = pair - count % 2  # has short + 1 blocks: none, if it is -1
    is_short = place <= short
    outer = jnp.where(is_short, short, count - 1 - pair)
    inner = jnp.where(is_short, place, place - short - 1)
    # Mirrored at the second diagonal, the same triangle goes by keys.
    q, k = outer, inner
    if self.by_key:
      q, k = count - 1 - inner, count - 1 - outer
    _, pairs, places = self.grid(1)
    ends = (
      (pair == 0) & (place == 0),
      (pair == pairs - 1) & (place == places - 1),
    )
    # Below the diagonal every query sees every key.
    masked = (q == k) | self.blocks.over_the_end(q, k)
    return Step(row, q, k, inner == 0, inner == outer, *ends, True, masked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table(_Base):
  """A list of blocks, for a mask with bounds."""

  # The steps, int32 `[steps at most]`: row, outer block, inner block and flags
  # in bit fields, since the scalar core divides slowly.
  codes: jax.Array
  total: jax.Array  # number of steps, int32 `[1]`: the size of the grid

  @property
  def scalars(self):
    # In scalar memory before the grid begins, so that a step's block is known,
    # and on its way from HBM, while the step before is computed.
    return (self.codes,)

  def grid(self, rows: int) -> tuple[jax.Array, ...]:
    # Known only when it runs: blocks that no query needs are not even steps.
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
  """Returns how many bits an outer and an inner block take."""
  bits = (blocks.q_count - 1).bit_length(), (blocks.k_count - 1).bit_length()
  return bits[::-1] if by_key else bits


Schedule = Full | Triangle | Table


def make(
  mask: AttentionMask, rows: int, blocks: Blocks
) -> tuple[Schedule, ...]:
  """Returns the schedules by blocks of queries, and by blocks of keys.

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
  """Returns how many entries the longest table has; 0 without tables."""
  if _is_plain(mask, blocks):
    return 0
  return rows * blocks.q_count * blocks.k_count


def _is_plain(mask: AttentionMask, blocks: Blocks) -> bool:
  """Whether arithmetic is enough to find the blocks."""
  square = blocks.queries == blocks.keys
  return not mask.bounded and (square or not mask.causal)


def _list(needed: jax.Array, whole: jax.Array, outer_bits, inner_bits: int):
  """Lists what is needed, bool `[B, outer, inner]`: `Table.codes`, `.total`."""
  row, outer, inner = (jnp.arange(n) for n in needed.shape)
  # An output that needs no block still has to be zeroed: it gets one idle step.
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
  # Shapes are static: the visited ones move to the front, in their order, and
  # the rest of the table is never reached, since the grid ends at `total`.
  (order,) = jnp.nonzero(visited.reshape(-1), size=visited.size, fill_value=0)
  total = visited.sum(dtype=jnp.int32)[None]
  return codes.reshape(-1)[order].astype(jnp.int32), total
