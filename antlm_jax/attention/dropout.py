"""Dropout of attention weights, as a function of where they stand."""

import dataclasses

import jax
import jax.numpy as jnp

from antlm_jax import hashing

_BITS = 24  # of 32: they fit a signed integer, which every chip compares


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropout:
  """Which attention weights are dropped: a hash of (row, head, query, key).

  No mask is stored, and none is drawn: forward and backward pass, kernel and
  reference, and every sharding compute the same bits.

  Attributes:
    rate: Share of the weights that is dropped. Static.
    row_keys: One key per row, uint32 `[B]`.
  """

  rate: float = dataclasses.field(metadata={"static": True})
  row_keys: jax.Array

  @property
  def scale(self) -> float:
    """What the kept weights are multiplied by."""
    return 1.0 / (1.0 - self.rate)

  def seeds(self, heads: int) -> jax.Array:
    """Returns one seed per row and head, uint32 `[B, N]`."""
    head = jnp.arange(heads, dtype=jnp.uint32)
    return hashing.mix(self.row_keys[:, None], head)

  def kept(self, heads: int, queries, keys) -> jax.Array:
    """Returns what is kept, bool `[B, N, T, S]`, of these indices."""
    seeds = self.seeds(heads)[:, :, None, None]
    return keep(self.rate, seeds, queries[:, None], keys)


def keep(rate: float, seed, queries, keys) -> jax.Array:
  """Decides one weight each; the arguments are broadcast together.

  A share `rate` is dropped. The seed is uint32, of the row and head; queries
  and keys are indices in their row.
  """
  return keep_of(rate, hashing.mix(seed, queries.astype(jnp.uint32)), keys)


def keep_of(rate: float, state, keys) -> jax.Array:
  """Like `keep`, of a seed and a query that are mixed already."""
  state = hashing.mix(state, keys.astype(jnp.uint32))
  return (state >> (32 - _BITS)).astype(jnp.int32) >= round(rate * 2**_BITS)
