"""Attention to a cache of a row's earlier tokens.

With causal attention, later tokens do not change earlier ones. So only the new
tokens of a growing text are encoded: each layer keeps the keys and values of
the others.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from antlm_jax.attention.reference import reference
from antlm_jax.attention.relative import Relative
from antlm_jax.masks import AttentionMask

# For each layer, arrays `[B, heads, S, width]` of S slots a row: keys, values,
# and with relative positions the keys' terms.
Cache = tuple[tuple[jax.Array, ...], ...]


@dataclasses.dataclass(frozen=True)
class Cached:
  """A cache in place of a mask: each of T new tokens sees those before it.

  `attend` writes the new tokens into their slots, and each then sees its row's
  slots up to its own. Rows may be at different slots, without padding.
  """

  start: jax.Array  # slot of each row's first new token, int32 `[B]`
  layers: tuple[tuple[jax.Ref, ...], ...]  # the cache as mutable refs
  windows: tuple[int, ...]  # each layer's, as in `AttentionMask.within`

  def of_layer(self, layer: int) -> "Cached":
    """Returns the cache of one layer."""
    return dataclasses.replace(
      self, layers=(self.layers[layer],), windows=(self.windows[layer],)
    )

  def attend(
    self,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    relative: Relative | None,
  ) -> jax.Array:
    """Like `attention.attend`, for the new tokens `[B, T, ...]`."""
    (refs,), (window,) = self.layers, self.windows
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    new = (k, v) if relative is None else (k, v, relative.key)
    for ref, x in zip(refs, new, strict=True):
      ref[...] = jax.vmap(update)(ref[...], x.swapaxes(1, 2), self.start)
    k, v, *terms = (ref[...].swapaxes(1, 2) for ref in refs)
    if relative is not None:
      relative = dataclasses.replace(relative, key=terms[0])
    end = self.start[:, None] + jnp.arange(1, q.shape[1] + 1)
    # With few queries the scores are small, and no kernel fills a block.
    mask = AttentionMask(k_start=end - window, k_end=end)
    return reference(q, k, v, mask, scale, None, relative, self.start)
