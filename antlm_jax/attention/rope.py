"""Rotary position embeddings (RoPE, arXiv 2104.09864, section 3.2)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rope(NamedTuple):
  """Rotations of queries and keys by their positions in their documents."""

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
    """Returns the rotations of heads of a width at positions `[B, T]`.

    `scaling` is a factor that divides all frequencies, or Llama 3's factor,
    low, high and length. Llama 3 divides frequencies that turn less than `low`
    times in the length. It keeps frequencies that turn more than `high` times,
    and interpolates between them.
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
    """Rotates the pairs (h, h + H/2) of x, `[B, T, N, H]`."""
    return rotate_halves(x, self.cos, self.sin, axis=-1)


def turned(rope: Rope | None, q: jax.Array, k: jax.Array):
  """Rotates queries and keys, unless `rope` is None."""
  return (q, k) if rope is None else (rope.rotate(q), rope.rotate(k))


@jax.named_scope("rope")
def rotate_halves(x: jax.Array, cos, sin, axis: int) -> jax.Array:
  """Rotates the two halves of x along an axis, in float32."""
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=axis)
  halves = [a * cos - b * sin, b * cos + a * sin]
  return jnp.concatenate(halves, axis=axis).astype(x.dtype)
