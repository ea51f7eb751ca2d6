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

from antlm_jax.masks import AttentionMask

LANES = 128
_FIRST, _LAST, _WORK, _MASKED = 1, 2, 4, 8
_FLAGS = 16


class Step(NamedTuple):
  """What the kernel does at one point of its grid.

  Attributes:
    row: Row of the batch.
    q: Block of queries.
    k: Block of keys.
    first: Whether the output block begins here.
    last: Whether it ends here.
    work: Whether there is anything to compute; False where an output block is
      only to be zeroed.
    masked: Whether some query does not see some key of the block.
  """

  row: jax.Array
  q: jax.Array
  k: jax.Array
  first: jax.Array
  last: jax.Array
  work: jax.Array | bool
  masked: jax.Array | bool


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How T queries and S keys are cut into blocks.

  Attributes:
    queries: Number of queries T.
    keys: Number of keys S.
    q_size: Queries of a block.
    k_size: Keys of a block.
  """

  queries: int
  keys: int
  q_size: int
  k_size: int

  @classmethod
  def of(cls, queries: int, keys: int, largest: int) -> "Blocks":
    """Chooses as few blocks as `largest` allows, then as small as they fit."""
    return cls(queries, keys, _size(queries, largest), _size(keys, largest))

  @property
  def q_count(self) -> int:
    """Number of blocks of queries."""
    return -(-self.queries // self.q_size)

  @property
  def k_count(self) -> int:
    """Number of blocks of keys."""
    return -(-self.keys // self.k_size)

  @property
  def ragged_q(self) -> bool:
    """Whether the last block of queries reaches over the end."""
    return self.queries % self.q_size != 0

  @property
  def ragged_k(self) -> bool:
    """Whether the last block of keys reaches over the end."""
    return self.keys % self.k_size != 0

  def over_the_end(self, q, k):
    """Whether a block reaches over either end; False if none ever does."""
    over = False
    if self.ragged_q:
      over = over | (q == self.q_count - 1)
    if self.ragged_k:
      over = over | (k == self.k_count - 1)
    return over


def _size(length: int, largest: int) -> int:
  count = -(-length // largest)
  return -(-length // (count * LANES)) * LANES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Full:
  """Every block, for a mask that hides nothing."""

  blocks: Blocks = dataclasses.field(metadata={"static": True})
  by_key: bool = dataclasses.field(metadata={"static": True})

  scalars = ()

  def grid(self, rows: int) -> tuple[int, ...]:
    """Returns the sizes of the grid."""
    counts = self.blocks.q_count, self.blocks.k_count
    return (rows, *(counts[::-1] if self.by_key else counts))

  def at(self, ids, scalars) -> Step:
    """Returns the step at a point of the grid."""
    row, outer, inner = ids
    q, k = (inner, outer) if self.by_key else (outer, inner)
    count = self.blocks.q_count if self.by_key else self.blocks.k_count
    masked = self.blocks.over_the_end(q, k)
    return Step(row, q, k, inner == 0, inner == count - 1, True, masked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Triangle:
  """The blocks on and below the diagonal, for a causal square mask.

  The triangle's rows of 1, 2, ..., n blocks are folded into a rectangle: a
  short row and a long one fill each of its rows, so that no step is idle.
  """

  blocks: Blocks = dataclasses.field(metadata={"static": True})
  by_key: bool = dataclasses.field(metadata={"static": True})

  scalars = ()

  def grid(self, rows: int) -> tuple[int, ...]:
    """Returns the sizes of the grid."""
    count = self.blocks.q_count
    return (rows, (count + 1) // 2, count + 1 - count % 2)

  def at(self, ids, scalars) -> Step:
    """Returns the step at a point of the grid."""
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
    masked = (q == k) | self.blocks.over_the_end(q, k)
    return Step(row, q, k, inner == 0, inner == outer, True, masked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Table:
  """A list of blocks, for a mask with bounds.

  Attributes:
    blocks: The blocks.
    by_key: Whether an output block is one of keys.
    codes: The steps, int32 `[steps at most]`: index of (row, outer, inner)
      times 16 plus the flags.
    total: Number of steps, int32 `[1]`: the size of the grid.
  """

  blocks: Blocks = dataclasses.field(metadata={"static": True})
  by_key: bool = dataclasses.field(metadata={"static": True})
  codes: jax.Array
  total: jax.Array

  @property
  def scalars(self):
    """What the kernel gets by scalar prefetch."""
    return (self.codes,)

  def grid(self, rows: int) -> tuple[jax.Array, ...]:
    """Returns the sizes of the grid."""
    return (self.total[0],)

  def at(self, ids, scalars) -> Step:
    """Returns the step at a point of the grid."""
    code = scalars[0][ids[0]]
    flag = lambda bit: (code & bit) != 0  # noqa: E731
    outers, inners = self.blocks.q_count, self.blocks.k_count
    if self.by_key:
      outers, inners = inners, outers
    # lax.div: `//` in an index map asks for a default device.
    place = jax.lax.div(code, _FLAGS)
    group, inner = jax.lax.div(place, inners), jax.lax.rem(place, inners)
    row, outer = jax.lax.div(group, outers), jax.lax.rem(group, outers)
    q, k = (inner, outer) if self.by_key else (outer, inner)
    flags = (flag(bit) for bit in (_FIRST, _LAST, _WORK, _MASKED))
    return Step(row, q, k, *flags)


Schedule = Full | Triangle | Table


def make(
  mask: AttentionMask, rows: int, blocks: Blocks
) -> tuple[Schedule, ...]:
  """Returns the schedules by blocks of queries, and by blocks of keys.

  Args:
    mask: The mask, its bounds `[rows, T]` if it has any.
    rows: Rows of the batch B.
    blocks: The blocks.
  """
  bare = mask.k_start is None and mask.k_end is None
  if bare and not mask.causal:
    return Full(blocks, False), Full(blocks, True)
  if bare and blocks.queries == blocks.keys:
    return Triangle(blocks, False), Triangle(blocks, True)
  needed, whole = _block_visibility(mask, rows, blocks)
  return (
    Table(blocks, False, *_table(needed, whole)),
    Table(blocks, True, *_table(needed.swapaxes(1, 2), whole.swapaxes(1, 2))),
  )


def table_size(mask: AttentionMask, rows: int, blocks: Blocks) -> int:
  """Returns how many entries the longest table has; 0 without tables."""
  if isinstance(
    jax.eval_shape(lambda m: make(m, rows, blocks)[0], mask), Table
  ):
    return rows * blocks.q_count * blocks.k_count
  return 0


def _block_visibility(mask: AttentionMask, rows: int, blocks: Blocks):
  """Returns whether any, and whether every, query of a block sees any, or
  every, key of another: two bool `[B, query blocks, key blocks]`."""
  start, end = mask.bounds(blocks.queries, blocks.keys)
  pad = (0, blocks.q_count * blocks.q_size - blocks.queries)

  def by_block(bound):  # [B, query blocks, queries of a block, 1]
    bound = jnp.broadcast_to(bound, (rows, blocks.queries))
    bound = jnp.pad(bound, ((0, 0), pad))  # empty intervals over the end
    return bound.reshape(rows, blocks.q_count, blocks.q_size, 1)

  start, end = by_block(start), by_block(end)
  k_start = blocks.k_size * jnp.arange(blocks.k_count)
  k_end = k_start + blocks.k_size
  seen = (start < end) & (start < k_end) & (end > k_start)
  filled = (start <= k_start) & (end >= k_end)
  return seen.any(axis=2), filled.all(axis=2)


def _table(needed: jax.Array, whole: jax.Array):
  """Lists the needed blocks, or one to zero an output that needs none.

  Args:
    needed: bool `[B, outer blocks, inner blocks]`.
    whole: Whether nothing of a block is hidden, of the same shape.

  Returns:
    `Table.codes` and `Table.total`.
  """
  size, inners = needed.size, needed.shape[-1]
  idle = ~needed.any(axis=-1, keepdims=True) & (jnp.arange(inners) == 0)
  visited = needed | idle
  at = jnp.arange(inners)
  first = at == jnp.argmax(visited, axis=-1, keepdims=True)
  last = at == inners - 1 - jnp.argmax(visited[..., ::-1], -1, keepdims=True)
  flags = (
    first * _FIRST + last * _LAST + needed * _WORK + (needed & ~whole) * _MASKED
  )
  codes = jnp.arange(size) * _FLAGS + flags.reshape(-1)
  (order,) = jnp.nonzero(visited.reshape(-1), size=size, fill_value=0)
  return codes[order].astype(jnp.int32), visited.sum(dtype=jnp.int32)[None]
