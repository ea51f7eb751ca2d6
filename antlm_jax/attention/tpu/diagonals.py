"""Relative position terms inside the TPU kernel, one block at a time.

A bucket covers whole diagonals of a block. A product with a one-hot matrix
spreads a query's terms over the query's diagonals. Then a shift of the query's
column moves each diagonal to its key. The terms of the keys follow the same
steps with keys and queries exchanged, and are transposed. All steps are exact,
and the gradients reverse them.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from antlm_jax.attention.blocks import AttentionBlocks
from antlm_jax.attention.relative import bucket_of
from antlm_jax.attention.tpu.grid import LANES, Step

_SUBLANES = 8


def one_hots(
  edges: tuple[int, ...], blocks: AttentionBlocks, dtype
) -> jax.Array:
  """Returns one-hot buckets of all blocks, `[offsets, 2, R + R', C]`.

  A block has R queries and R' keys, and there are C buckets. Blocks at the same
  distance from the main diagonal share an offset: the distance between their
  first query and first key. Axis 1 has the diagonals in the order of the
  queries' terms, in which distances fall, and of the keys', in which they rise.
  """
  unit, first = _offsets(blocks)
  last = (blocks.q_count - 1) * blocks.q_size
  offset = jnp.arange(first, last + 1, unit)[:, None]
  # A block has R + R' - 1 diagonals. An unused one makes the number a multiple
  # of 128; `Diagonals.scores` cuts it off.
  diagonal = jnp.arange(blocks.q_size + blocks.k_size)
  falling = offset + blocks.q_size - diagonal
  rising = offset - blocks.k_size + diagonal
  buckets = bucket_of(jnp.stack([falling, rising], axis=1), edges)
  return jax.nn.one_hot(buckets, len(edges) + 1, dtype=dtype)


def one_hot_offset(step: Step, blocks: AttentionBlocks) -> jax.Array:
  """Returns the index of a block's `one_hots`."""
  # (q * q_size - k * k_size - first) / unit, without a division at run time.
  unit, _ = _offsets(blocks)
  q = blocks.q_size // unit
  k = blocks.k_size // unit
  return step.q * q + (blocks.k_count - 1 - step.k) * k


def _offsets(blocks: AttentionBlocks) -> tuple[int, int]:
  """Returns the distance between offsets, and the first (the last keys')."""
  unit = math.gcd(blocks.q_size, blocks.k_size)
  return unit, -(blocks.k_count - 1) * blocks.k_size


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
  """Multiplies matrices over one axis of each, without rounding float32."""
  exact = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  axes = ((a_axis,), (b_axis,)), ((), ())
  return jax.lax.dot_general(
    a, b, axes, precision=exact, preferred_element_type=jnp.float32
  )


@dataclasses.dataclass(frozen=True)
class Diagonals:
  """Diagonals of a block, for R queries and R' keys or vice versa.

  `LANES` of the R columns are computed at a time. Each column has R' diagonals,
  and `LANES` columns together have R' + LANES diagonals, for every R.
  """

  one_hot: jax.Array  # the buckets, a reference to `[R + R', C]`

  def scores(self, terms: jax.Array) -> jax.Array:
    """Maps terms `[C, R]` to their part of the scores, float32 `[R', R]`."""
    size = terms.shape[1]
    parts = []
    for column in range(0, size, LANES):
      # Term of each column on each diagonal, [R' + LANES, LANES].
      columns = terms[:, column : column + LANES]
      spread = dot(self._buckets(size, column), columns, 1, 0)
      # Column c moves down by c, so its diagonals begin at row LANES. The rows
      # above belong to diagonals of other columns only.
      parts.append(_shear(spread, 1)[LANES:])
    return jnp.concatenate(parts, axis=1)

  def gradient(self, scores: jax.Array) -> jax.Array:
    """Maps the gradient of scores to that of terms, float32 `[C, R]`."""
    size = scores.shape[1]
    parts = []
    for column in range(0, size, LANES):
      # Reverse `scores`: pad, shear the other way, and add up each bucket in a
      # product with the same one-hot matrix.
      buckets = self._buckets(size, column)
      columns = scores[:, column : column + LANES]
      spread = _shear(jnp.pad(columns, ((LANES, 0), (0, 0))), -1)
      parts.append(dot(buckets, spread.astype(buckets.dtype), 0, 0))
    return jnp.concatenate(parts, axis=1)

  def _buckets(self, size: int, column: int) -> jax.Array:
    """Returns the buckets of `LANES` columns of R = `size`, from a column."""
    first = size - column - LANES
    return self.one_hot[first : self.one_hot.shape[0] - column]


def _shear(x: jax.Array, sign: int) -> jax.Array:
  """Returns y[r + sign * c, c] = x[r, c] for x `[R, LANES]`, r modulo R."""
  # Column c moves by each bit of c in turn. The bits 64, 32, 16 and 8 roll
  # whole registers of 8 sublanes, and columns that have the bit keep the roll.
  lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  bit = LANES // 2
  while bit >= _SUBLANES:
    x = jnp.where((lane & bit) != 0, _roll(x, sign * bit), x)
    bit //= 2
  # The rest of c is under 8. It permutes the sublanes in each register, and
  # moves values that leave their register to the next register.
  tiles = x.reshape(-1, _SUBLANES, LANES)
  sublane = jax.lax.broadcasted_iota(jnp.int32, tiles.shape, 1)
  source = sublane - sign * (lane & (_SUBLANES - 1))
  inside = source & (_SUBLANES - 1)
  tiles = jnp.take_along_axis(tiles, inside, axis=1, mode="promise_in_bounds")
  y = jnp.where(source == inside, tiles, _roll(tiles, sign))
  return y.reshape(x.shape)


def _roll(x: jax.Array, shift: int) -> jax.Array:
  return pltpu.roll(x, shift % x.shape[0], 0)
