"""Blocks of attention scores, and the blocks that a mask needs.

Both kernels visit only blocks that some query needs, in the orders that
`attention.tpu.grid` and `attention.gpu.visits` define.
"""

import dataclasses

import jax.numpy as jnp

from antlm_jax.masks import AttentionMask

# Both sides of a block are multiples of this number. It is the number of a
# TPU's lanes, and the block size of the GPU kernel.
UNIT = 128
SAVED = "attention"  # name of the residuals that `jax.checkpoint` may save


@dataclasses.dataclass(frozen=True)
class AttentionBlocks:
  """Division of T queries and S keys into blocks."""

  queries: int  # T
  keys: int  # S
  q_size: int  # queries per block
  k_size: int  # keys per block

  @classmethod
  def of(cls, queries: int, keys: int, largest: int) -> "AttentionBlocks":
    """Chooses the fewest blocks that `largest` allows, of the smallest size."""

    def size(length):
      # For example, 640 queries become two blocks of 384, not of 512, so that
      # the last block computes little beyond the end.
      count = -(-length // largest)
      return -(-length // (count * UNIT)) * UNIT

    return cls(queries, keys, size(queries), size(keys))

  @property
  def q_count(self) -> int:
    return -(-self.queries // self.q_size)

  @property
  def k_count(self) -> int:
    return -(-self.keys // self.k_size)

  @property
  def ragged_q(self) -> bool:
    """Whether the last block of queries extends beyond the end."""
    return self.queries % self.q_size != 0

  @property
  def ragged_k(self) -> bool:
    """Whether the last block of keys extends beyond the end."""
    return self.keys % self.k_size != 0

  def over_the_end(self, q, k):
    """Whether a block extends beyond an end: False, if no block does."""
    over = False
    if self.ragged_q:
      over = over | (q == self.q_count - 1)
    if self.ragged_k:
      over = over | (k == self.k_count - 1)
    return over


def visibility(mask: AttentionMask, rows: int, blocks: AttentionBlocks):
  """Returns whether blocks have a visible score, and whether all are visible.

  Both are bool `[B, query blocks, key blocks]`.
  """
  start, end = mask.bounds(blocks.queries, blocks.keys)
  pad = (0, blocks.q_count * blocks.q_size - blocks.queries)

  def by_block(bound):  # [B, query blocks, queries of a block, 1]
    bound = jnp.broadcast_to(bound, (rows, blocks.queries))
    # Padding queries see nothing, so they need no block, and a block with such
    # queries does not count as wholly visible.
    bound = jnp.pad(bound, ((0, 0), pad))
    return bound.reshape(rows, blocks.q_count, blocks.q_size, 1)

  # Compare each query's interval with each block's keys: [B, q, queries, k].
  start = by_block(start)
  end = by_block(end)
  k_start = blocks.k_size * jnp.arange(blocks.k_count)
  k_end = k_start + blocks.k_size
  needed = (start < end) & (start < k_end) & (end > k_start)
  filled = (start <= k_start) & (end >= k_end)
  return needed.any(axis=2), filled.all(axis=2)
