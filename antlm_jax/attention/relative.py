"""Relative position terms of attention scores.

The score of query i and key j adds a term of the query and a term of the key.
The bucket of the distance i - j chooses both. They are DeBERTa's
content-to-position and position-to-content terms (arXiv 2006.03654, section
3.1).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Relative:
  """Position terms of queries and keys for each of C buckets."""

  query: jax.Array  # `[B, T, N, C]`
  key: jax.Array  # `[B, S, N, C]`
  # C - 1 ascending distances. The bucket of a distance is the number of edges
  # at or below it.
  edges: tuple[int, ...] = dataclasses.field(metadata={"static": True})

  def scores(self, first: jax.Array | int = 0) -> jax.Array:
    """Returns the terms of all scores, float32 `[B, N, T, S]`.

    `first` is the index of the first query in its row, or in each row, `[B]`.
    """
    # A product with a one-hot matrix spreads each row over its diagonals, and a
    # reshape moves it into place. A gather would need a scatter in backward.
    if jnp.ndim(first):
      return self._scores_of_few(first)
    queries = self.query.shape[1]
    keys = self.key.shape[1]
    diagonal = jnp.arange(queries + keys)
    query_terms = _terms_by_distance(
      self.query, self.edges, first + queries - 1 - diagonal
    )
    key_terms = _terms_by_distance(
      self.key, self.edges, first - (keys - 1) + diagonal
    )
    return _skew(query_terms, keys) + _skew(key_terms, queries).swapaxes(-1, -2)

  def _scores_of_few(self, first: jax.Array) -> jax.Array:
    """Computes `scores` by a gather, if rows do not share diagonals."""
    index = first[:, None] + jnp.arange(self.query.shape[1])
    distance = index[:, :, None] - jnp.arange(self.key.shape[1])
    bucket = bucket_of(distance, self.edges)[:, None]  # [B, 1, T, S]
    query = self.query.swapaxes(1, 2).astype(jnp.float32)
    key = self.key.swapaxes(1, 2).astype(jnp.float32)
    query_terms = jnp.take_along_axis(query, bucket, axis=-1)
    key_terms = jnp.take_along_axis(key, bucket.swapaxes(-1, -2), axis=-1)
    return query_terms + key_terms.swapaxes(-1, -2)


def log_edges(size: int, longest: int) -> tuple[int, ...]:
  """Returns the edges of LTG-BERT's 2 x size - 1 buckets (arXiv 2303.09859).

  Each distance up to size / 2 has a bucket. Longer distances share logarithmic
  buckets, and all distances from `longest` - 1 on share the last bucket.
  """
  middle = size // 2
  last = longest - 1
  distance = np.arange(longest)
  scaled = np.log(np.maximum(distance, 1) / middle) / math.log(last / middle)
  bucket = np.where(
    distance <= middle, distance, middle + np.ceil(scaled * (middle - 1))
  )
  # Edges are the distances, from 1 - longest on, at which the bucket rises.
  rises = np.flatnonzero(np.diff(np.concatenate([-bucket[:0:-1], bucket])))
  return tuple(int(2 - longest + index) for index in rises)


def bucket_of(distance, edges: tuple[int, ...]):
  """Returns the bucket of each distance."""
  edges = jnp.asarray(edges, jnp.int32)
  return jnp.searchsorted(edges, distance, side="right", method="compare_all")


def _terms_by_distance(terms, edges: tuple[int, ...], distances) -> jax.Array:
  """Maps `[B, R, N, C]` by bucket to float32 `[B, N, R, W]` by distance."""
  chosen = jax.nn.one_hot(
    bucket_of(distances, edges), len(edges) + 1, dtype=terms.dtype, axis=0
  )
  # Products with a one-hot matrix are exact, unless float32 is rounded.
  exact = jax.lax.Precision.HIGHEST if terms.dtype == jnp.float32 else None
  spread = jnp.einsum("brnc,cw->bnrw", terms, chosen, precision=exact)
  return spread.astype(jnp.float32)


def _skew(x: jax.Array, columns: int) -> jax.Array:
  """Returns y[r, c] = x[r, R - 1 - r + c] for x `[..., R, W = R + columns]`."""
  # In the flat array, y[r, c] is at R - 1 + r (W - 1) + c.
  *batch, rows, width = x.shape
  flat = x.reshape(*batch, rows * width)
  flat = flat[..., rows - 1 : rows - 1 + rows * (width - 1)]
  return flat.reshape(*batch, rows, width - 1)[..., :columns]
