"""How the kernels cut scores into blocks, and which blocks a mask needs.

Both kernels visit the blocks that some query needs and no others; in which
order, and how they are told, is each one's own: `attention.tpu.grid`,
`attention.gpu.visits`.
"""

import dataclasses

import jax.numpy as jnp

from antlm_jax.masks import AttentionMask

# A block's sides are multiples of it: the lanes of a TPU, and the queries or
# keys that a GPU's multiprocessor works on at a time.
UNIT = 128
SAVED = "attention"  # `jax.checkpoint` may keep the residuals by this name


@dataclasses.dataclass(frozen=True)
class Blocks:
  """How T queries and S keys are cut into blocks."""

  queries: int  # T
  keys: int  # S
  q_size: int  # queries of a block
  k_size: int  # keys of a block

  @classmethod
  def of(cls, queries: int, keys: int, largest: int) -> "Blocks":
    """Chooses as few blocks as `largest` allows, then as small as they fit."""
    return cls(queries, keys, _size(queries, largest), _size(keys, largest))

  @property
  def q_count(self) -> int:
    return -(-self.queries // self.q_size)

  @property
  def k_count(self) -> int:
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
  # 640 in blocks of at most 512 are two of 384, not one of 512 and a rest: the
  # last block then computes the least beyond the end.
  count = -(-length // largest)
  return -(-length // (count * UNIT)) * UNIT


def visibility(mask: AttentionMask, rows: int, blocks: Blocks):
  """Returns which blocks have a visible score, and which no hidden one.

  Both are bool `[B, query blocks, key blocks]`.
  """
  start, end = mask.bounds(blocks.queries, blocks.keys)
  pad = (0, blocks.q_count * blocks.q_size - blocks.queries)

  def by_block(bound):  # [B, query blocks, queries of a block, 1]
    bound = jnp.broadcast_to(bound, (rows, blocks.queries))
    # Over the end intervals are empty: they need no block, and no block that
    # reaches there counts as whole.
    bound = jnp.pad(bound, ((0, 0), pad))
    return bound.reshape(rows, blocks.q_count, blocks.q_size, 1)

  # Each query's interval against each block's keys: [B, q, queries, k].
  start, end = by_block(start), by_block(end)
  k_start = blocks.k_size * jnp.arange(blocks.k_count)
  k_end = k_start + blocks.k_size
  seen = (start < end) & (start < k_end) & (end > k_start)
  filled = (start <= k_start) & (end >= k_end)
  return seen.any(axis=2), filled.all(axis=2)
