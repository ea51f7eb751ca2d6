"""Dropout of attention weights as a function of their positions."""

import dataclasses

import jax
import jax.numpy as jnp

from antlm_jax import hashing

_BITS = 24  # of 32, to fit a signed integer, which every chip can compare


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
  """Dropout of attention weights by a hash of (row, head, query, key).

  No mask is stored, because both passes, all implementations and all shardings
  compute the same bits.
  """

  # Share of the weights to drop.
  rate: float = dataclasses.field(metadata={"static": True})
  row_keys: jax.Array  # random key of each row, uint32 `[B]`

  @property
  def scale(self) -> float:
    """Factor of the kept weights."""
    return 1.0 / (1.0 - self.rate)

  def seeds(self, heads: int) -> jax.Array:
    """Returns the seed of each row and head, uint32 `[B, N]`."""
    head = jnp.arange(heads, dtype=jnp.uint32)
    return hashing.mix_counter(self.row_keys[:, None], head)

  def kept(self, heads: int, queries, keys) -> jax.Array:
    """Returns whether weights are kept, bool `[B, N, T, S]`."""
    seeds = self.seeds(heads)[:, :, None, None]
    return keep(self.rate, seeds, queries[:, None], keys)


def keep(rate: float, seed, queries, keys) -> jax.Array:
  """Returns whether weights are kept; the arguments broadcast.

  `seed` is the uint32 seed of a row and head. Queries and keys are indices.
  """
  return keep_of(
    rate, hashing.mix_counter(seed, queries.astype(jnp.uint32)), keys
  )


def keep_of(rate: float, state, keys) -> jax.Array:
  """Like `keep`, but `state` is the hash of a seed and a query."""
  state = hashing.mix_counter(state, keys.astype(jnp.uint32))
  return (state >> (32 - _BITS)).astype(jnp.int32) >= round(rate * 2**_BITS)
