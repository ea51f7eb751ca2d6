"""Attention to a cache of earlier tokens.

In causal attention, later tokens do not change the states of earlier tokens. So
generation encodes only new tokens, and each layer caches keys and values.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from antlm_jax.attention.reference import reference
from antlm_jax.attention.relative import Relative
from antlm_jax.errors import UserError
from antlm_jax.masks import AttentionMask

# For each layer, arrays `[B, heads, S, width]` with S slots per row: keys,
# values and, with relative positions, the terms of the keys.
Cache = tuple[tuple[jax.Array, ...], ...]


@dataclasses.dataclass(frozen=True)
class Cached:
  """A cache in place of a mask, for T new tokens that follow cached tokens.

  `attend` writes the new tokens into their slots. Each new token then sees its
  row's slots up to its own slot. Rows may be at different slots.
  """

  start: jax.Array  # slot of each row's first new token, int32 `[B]`
  layers: tuple[tuple[jax.Ref, ...], ...]  # the cache as mutable refs
  windows: tuple[int, ...]  # window of each layer, for `AttentionMask.within`

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
    """Computes `attention.attend` for the new tokens `[B, T, ...]`."""
    if len(self.layers) > 1:
      raise UserError(
        "attend got the caches of all layers: give it mask.of_layer(layer), as"
        " antlm_jax.models.encoder.run_blocks does"
      )
    (refs,) = self.layers
    (window,) = self.windows
    update = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=1)
    new = (k, v) if relative is None else (k, v, relative.key)
    for ref, x in zip(refs, new, strict=True):
      ref[...] = jax.vmap(update)(ref[...], x.swapaxes(1, 2), self.start)
    k, v, *terms = (ref[...].swapaxes(1, 2) for ref in refs)
    if relative is not None:
      relative = dataclasses.replace(relative, key=terms[0])
    end = self.start[:, None] + jnp.arange(1, q.shape[1] + 1)
    # Few queries have few scores, and could not fill a kernel's block.
    mask = AttentionMask(k_start=end - window, k_end=end)
    return reference(q, k, v, mask, scale, None, relative, self.start)
