"""Blocks of scores in the kernels, and the blocks that a mask needs.

Both kernels visit only blocks that some query needs. `attention.tpu.grid` and
`attention.gpu.visits` have the order of their visits.
"""

import dataclasses

import jax.numpy as jnp

from antlm_jax.masks import AttentionMask

# A block's sides are multiples of this: a TPU's lanes, and the queries or keys
# that a GPU's multiprocessor works on at a time.
UNIT = 128
SAVED = "attention"  # `jax.checkpoint` may keep the residuals by this name


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Division of T queries and S keys into blocks."""

  queries: int  # T
  keys: int  # S
  q_size: int  # queries of a block
  k_size: int  # keys of a block

  @classmethod
  def of(cls, queries: int, keys: int, largest: int) -> "Blocks":
    """Chooses as few blocks as `largest` allows, then the smallest size."""

    def size(length):
      # 640 in blocks of at most 512 are two of 384, not 512 and a rest, so that
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
    """Whether a block extends beyond an end; False if no block does."""
    over = False
    if self.ragged_q:
      over = over | (q == self.q_count - 1)
    if self.ragged_k:
      over = over | (k == self.k_count - 1)
    return over


def visibility(mask: AttentionMask, rows: int, blocks: Blocks):
  """Returns the blocks with a visible score, and those without a hidden one.

  Both are bool `[B, query blocks, key blocks]`.
  """
  start, end = mask.bounds(blocks.queries, blocks.keys)
  pad = (0, blocks.q_count * blocks.q_size - blocks.queries)

  def by_block(bound):  # [B, query blocks, queries of a block, 1]
    bound = jnp.broadcast_to(bound, (rows, blocks.queries))
    # Beyond the end intervals are empty: they need no block, and no block
    # there counts as whole.
    bound = jnp.pad(bound, ((0, 0), pad))
    return bound.reshape(rows, blocks.q_count, blocks.q_size, 1)

  # Each query's interval against each block's keys: [B, q, queries, k].
  start, end = by_block(start), by_block(end)
  k_start = blocks.k_size * jnp.arange(blocks.k_count)
  k_end = k_start + blocks.k_size
  seen = (start < end) & (start < k_end) & (end > k_start)
  filled = (start <= k_start) & (end >= k_end)
  return seen.any(axis=2), filled.all(axis=2)
