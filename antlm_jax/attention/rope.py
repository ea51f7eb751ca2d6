"""Rotary position embeddings (RoPE, arXiv 2104.09864, section 3.2)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rope(NamedTuple):
  """Rotations of queries and keys by their position in their document."""

  cos: jax.Array  # float32 `[B, T, 1, H/2]`
  sin: jax.Array

  @classmethod
  @jax.named_scope("rope")
  def of(
    cls,
    positions: jax.Array,
    width: int,
    theta: float,
    scaling: Sequence[float] = (),
  ) -> "Rope":
    """Returns the rotations of heads of a width, by positions `[B, T]`.

    `scaling` is a factor that divides all frequencies, or Llama 3's: factor,
    low, high and length. Frequencies that turn less than `low` times in the
    length are divided by the factor, those that turn more than `high` times
    stay, and those between are interpolated.
    """
    frequencies = theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    if scaling:
      factor, *bounds = scaling
      stays = 0.0
      if bounds:
        low, high, length = bounds
        turns = length * frequencies / (2 * jnp.pi)
        stays = jnp.clip((turns - low) / (high - low), 0, 1)
      frequencies *= stays + (1 - stays) / factor
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return cls(jnp.cos(angles), jnp.sin(angles))

  def rotate(self, x: jax.Array) -> jax.Array:
    """Rotates `[B, T, N, H]`; the pairs are (h, h + H/2)."""
    return rotated(x, self.cos, self.sin, axis=-1)


def turned(rope: Rope | None, q: jax.Array, k: jax.Array):
  """Returns queries and keys, rotated if there is a `rope`."""
  return (q, k) if rope is None else (rope.rotate(q), rope.rotate(k))


@jax.named_scope("rope")
def rotated(x: jax.Array, cos, sin, axis: int) -> jax.Array:
  """Rotates the two halves of x along an axis, in float32."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=axis)
  halves = [a * cos - b * sin, b * cos + a * sin]
  return jnp.concatenate(halves, axis=axis).astype(x.dtype)
