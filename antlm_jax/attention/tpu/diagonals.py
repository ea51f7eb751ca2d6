"""Scores by relative position, inside the kernel, one block at a time.

A bucket covers whole diagonals of a block. So a query's terms are spread over
the diagonals that it meets, by a product with a one-hot matrix, and its column
is moved so far that each diagonal comes to lie at the query's key there. The
terms of the keys take the same way with keys and queries exchanged, and are
transposed. All of it is exact, and the gradients take the same way back.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from antlm_jax.attention.blocks import Blocks
from antlm_jax.attention.relative import bucket_of
from antlm_jax.attention.tpu.grid import LANES, Step

_SUBLANES = 8


def one_hots(edges: tuple[int, ...], blocks: Blocks, dtype) -> jax.Array:
  """Returns which bucket covers which diagonal, for every offset of a block.

  Blocks as far from the main diagonal as each other share theirs, `offset`
  says which. The diagonals are in the order that falls from query to key, and
  in the one that rises: for the terms of the queries, and of the keys.

  Returns:
    `[offsets, 2, q_size + k_size, C]`.
  """
  # An offset is the distance, query minus key, of a block's first of each.
  step, first = _offsets(blocks)
  last = (blocks.q_count - 1) * blocks.q_size
  offset = jnp.arange(first, last + 1, step)[:, None]
  # R queries and R' keys meet in R + R' - 1 diagonals; one more makes the
  # number a multiple of 128, and is cut off as soon as it is in its place.
  diagonal = jnp.arange(blocks.q_size + blocks.k_size)
  falling = offset + blocks.q_size - diagonal
  rising = offset - blocks.k_size + diagonal
  buckets = bucket_of(jnp.stack([falling, rising], axis=1), edges)
  return jax.nn.one_hot(buckets, len(edges) + 1, dtype=dtype)


def offset(step: Step, blocks: Blocks) -> jax.Array:
  """Returns which of the `one_hots` are a block's."""
  # (q * q_size - k * k_size - first) / unit, without a division at run time.
  unit, _ = _offsets(blocks)
  q, k = blocks.q_size // unit, blocks.k_size // unit
  return step.q * q + (blocks.k_count - 1 - step.k) * k


def _offsets(blocks: Blocks) -> tuple[int, int]:
  """How far offsets are apart, and the first: that of the last keys."""
  unit = math.gcd(blocks.q_size, blocks.k_size)
  return unit, -(blocks.k_count - 1) * blocks.k_size


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
  """Multiplies matrices over one axis of each; float32 is not rounded."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    a,
    b,
    (((a_axis,), (b_axis,)), ((), ())),
    precision=exact,
    preferred_element_type=jnp.float32,
  )


@dataclasses.dataclass(frozen=True)
class Diagonals:
  """A block's diagonals as R queries or keys meet them, to R' of the others.

  It goes by `LANES` of the R at a time: each column of such a part meets R'
  diagonals, and all of them together R' + LANES, whatever R is.

  Attributes:
    one_hot: The buckets, a reference to `[R + R', C]`.
  """

  one_hot: jax.Array

  def scores(self, terms: jax.Array) -> jax.Array:
    """Returns float32 `[R', R]` of the terms `[C, R]`."""
    size, parts = terms.shape[1], []
    for at in range(0, size, LANES):
      # [R' + LANES, LANES]: what each of the part would add on each diagonal.
      met = dot(self._met(size, at), terms[:, at : at + LANES], 1, 0)
      # Column c moves down by c, and what it meets begins at row LANES; above
      # it are the diagonals that only its neighbours meet.
      parts.append(_shear(met, 1)[LANES:])
    return jnp.concatenate(parts, axis=1)

  def gradient(self, scores: jax.Array) -> jax.Array:
    """Returns the terms' gradient, float32 `[C, R]`, from that of scores."""
    size, parts = scores.shape[1], []
    for at in range(0, size, LANES):
      # `scores` backwards: padded where it cuts, sheared the other way, and
      # multiplied by the same ones, which adds up each bucket.
      met = self._met(size, at)
      part = jnp.pad(scores[:, at : at + LANES], ((LANES, 0), (0, 0)))
      parts.append(dot(met, _shear(part, -1).astype(met.dtype), 0, 0))
    return jnp.concatenate(parts, axis=1)

  def _met(self, size: int, at: int) -> jax.Array:
    """What `LANES` of R = `size` queries or keys meet, from the one `at` on."""
    first = size - at - LANES
    return self.one_hot[first : self.one_hot.shape[0] - at]


def _shear(x: jax.Array, sign: int) -> jax.Array:
  """Returns y[r + sign * c, c] = x[r, c], of x `[R, LANES]`, r modulo R."""
  # Column c moves by the sum of c's bits: 64, 32, 16 and 8 are rolls of whole
  # registers of 8 sublanes, kept by the columns that have the bit.
  lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  bit = LANES // 2
  while bit >= _SUBLANES:
    x = jnp.where((lane & bit) != 0, _roll(x, sign * bit), x)
    bit //= 2
  # What is left of c is under 8: a permutation of the sublanes within each
  # register, and for what leaves its register, within the neighbour.
  tiles = x.reshape(-1, _SUBLANES, LANES)
  sublane = jax.lax.broadcasted_iota(jnp.int32, tiles.shape, 1)
  source = sublane - sign * (lane & (_SUBLANES - 1))
  inside = source & (_SUBLANES - 1)
  tiles = jnp.take_along_axis(tiles, inside, axis=1, mode="promise_in_bounds")
  y = jnp.where(source == inside, tiles, _roll(tiles, sign))
  return y.reshape(x.shape)


def _roll(x: jax.Array, by: int) -> jax.Array:
  return pltpu.roll(x, by % x.shape[0], 0)
