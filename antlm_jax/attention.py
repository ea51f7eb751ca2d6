"""Attention through one function, for every mask."""

import jax
import jax.numpy as jnp

from antlm_jax.masks import AttentionMask


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, mask: AttentionMask
) -> jax.Array:
  """Scaled dot-product attention with grouped queries.

  Query head n reads key/value head n // (N / K). The softmax is in float32. A
  query that sees no key returns zeros.

  Args:
    q: Queries `[B, T, N, H]`.
    k: Keys `[B, S, K, H]`, with K dividing N.
    v: Values `[B, S, K, H]`.
    mask: Which keys each query sees.

  Returns:
    `[B, T, N, H]`, of q's dtype.
  """
  batch, queries, heads, width = q.shape
  keys, kv_heads = k.shape[1:3]
  if heads % kv_heads:
    raise ValueError(f"{heads} query heads over {kv_heads} key/value heads")
  q = q.reshape(batch, queries, kv_heads, heads // kv_heads, width)
  scores = jnp.einsum(
    "btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32
  )
  scores = scores * width**-0.5
  visible = mask.dense(queries, keys)
  if visible is None:
    weights = jax.nn.softmax(scores, axis=-1)
  else:
    visible = visible[:, None, None]
    # A finite fill keeps a query that sees nothing free of NaN, in the
    # gradient too; its weights are then set to zero.
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0.0)
  out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v)
  return out.reshape(batch, queries, heads, width)
