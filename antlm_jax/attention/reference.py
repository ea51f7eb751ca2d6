"""Attention in plain XLA: whole, and in chunks of queries."""

import jax
import jax.numpy as jnp

from antlm_jax.attention.dropout import Dropout
from antlm_jax.attention.relative import Relative
from antlm_jax.masks import AttentionMask


def reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: AttentionMask,
  scale: float,
  dropout: Dropout | None,
  relative: Relative | None = None,
  first: jax.Array | int = 0,
) -> jax.Array:
  """Attention with all scores in memory at once.

  The arguments are those of `attention.attend`, and `first` is the index in
  its row of the first query: they may be some of the row's. Without dropout,
  rows may have each their own, `[B]`.
  """
  batch, queries, heads, width = q.shape
  keys, kv_heads = k.shape[1:3]
  q = q.reshape(batch, queries, kv_heads, heads // kv_heads, width)
  scores = jnp.einsum(
    "btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32
  )
  if relative is not None:
    scores = scores + relative.scores(first).reshape(scores.shape)
  scores = scores * scale
  visible = mask.dense(queries, keys)
  if visible is None:
    weights = jax.nn.softmax(scores, axis=-1)
  else:
    visible = visible[:, None, None]
    # A finite fill keeps a query that sees nothing free of NaN, in the
    # gradient too; its weights are then set to zero.
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
    weights = jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0.0)
  if dropout is not None:
    kept = dropout.kept(heads, first + jnp.arange(queries), jnp.arange(keys))
    weights = dropout.scale * jnp.where(
      kept.reshape(weights.shape), weights, 0.0
    )
  out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v)
  return out.reshape(batch, queries, heads, width)


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  mask: AttentionMask,
  scale: float,
  dropout: Dropout | None,
  relative: Relative | None = None,
  chunk: int = 256,
) -> jax.Array:
  """Like `reference`, in memory linear in T: `chunk` queries at a time.

  The backward pass computes each chunk's scores again.
  """
  queries, keys = q.shape[1], k.shape[1]
  if queries <= chunk:
    return reference(q, k, v, mask, scale, dropout, relative)
  count = -(-queries // chunk)

  def split(x):  # [B or 1, T, ...] to [count, B or 1, chunk, ...]
    pad = [(0, 0), (0, count * chunk - queries)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad)
    return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

  # In float32, so that the chunks' gradients for them are added up in it.
  of_query, of_key, edges = None, None, ()
  if relative is not None:
    of_query, of_key, edges = relative.query, relative.key, relative.edges
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), (k, v, of_key))

  @jax.checkpoint
  def body(start, part):
    q, of_query, bounds = part
    k, v, of_key = jax.tree.map(lambda x: x.astype(q.dtype), wide)
    mask = AttentionMask(False, *bounds)
    terms = None if of_key is None else Relative(of_query, of_key, edges)
    out = reference(q, k, v, mask, scale, dropout, terms, start)
    return start + chunk, out

  # The bounds hold what causality hides: a chunk does not start at query 0.
  bounds = mask.bounds(queries, keys)
  parts = jax.tree.map(split, (q, of_query, bounds))
  _, out = jax.lax.scan(body, 0, parts)
  out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])
  return out[:, :queries]
