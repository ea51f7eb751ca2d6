"""Attention in plain XLA, for all queries at once or in chunks."""

import functools

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

  `attention.attend` documents the arguments. If the queries are a part of their
  row, `first` is the index of the first query. Without dropout, it may have a
  value for each row, `[B]`.
  """
  batch, queries, heads, width = q.shape
  keys, kv_heads = k.shape[1:3]
  q = q.reshape(batch, queries, kv_heads, heads // kv_heads, width)
  shape = batch, *q.shape[2:4], queries, keys
  terms = None
  keep_mask = None
  keep_scale = 1.0
  if relative is not None:
    terms = relative.scores(first).reshape(shape)
  visible = mask.dense(queries, keys)
  if visible is not None:
    visible = visible[:, None, None]
  if dropout is not None:
    keep_mask = dropout.kept(
      heads, first + jnp.arange(queries), jnp.arange(keys)
    )
    keep_mask = keep_mask.reshape(shape)
    keep_scale = dropout.scale
  q = q.transpose(0, 2, 3, 1, 4)
  k = k.transpose(0, 2, 1, 3)
  v = v.transpose(0, 2, 1, 3)
  out = _weighted(scale, keep_scale, q, k, v, terms, visible, keep_mask)
  return out.transpose(0, 3, 1, 2, 4).reshape(batch, queries, heads, width)


# On CPU, this backward pass takes two thirds of the time of JAX's gradient.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weighted(
  scale, keep_scale, q, k, v, terms, visible, keep_mask
) -> jax.Array:
  # q is `[B, K, G, T, H]`; k and v are `[B, K, S, H]`. `terms`, `visible` and
  # `keep_mask` broadcast to `[B, K, G, T, S]`, or are None.
  return _reference_forward(
    scale, keep_scale, q, k, v, terms, visible, keep_mask
  )[0]


def _reference_forward(scale, keep_scale, q, k, v, terms, visible, keep_mask):
  scores = _float32_einsum("bkgth,bksh->bkgts", q, k)
  scores = (scores if terms is None else scores + terms) * scale
  if visible is not None:
    # With -inf, a query that sees no key would get NaN.
    scores = jnp.where(visible, scores, jnp.finfo(scores.dtype).min)
  weights = jax.nn.softmax(scores, axis=-1)
  if visible is not None:
    weights = jnp.where(visible, weights, 0.0)
  dropped = _dropped(weights, keep_scale, keep_mask).astype(v.dtype)
  out = jnp.einsum("bkgts,bksh->bkgth", dropped, v)
  return out, (q, k, v, terms, keep_mask, weights, out)


def _reference_backward(scale, keep_scale, residual, grad):
  q, k, v, terms, keep_mask, weights, out = residual
  dropped = _dropped(weights, keep_scale, keep_mask).astype(v.dtype)
  grad_v = _float32_einsum("bkgts,bkgth->bksh", dropped, grad)
  grad_weights = _float32_einsum("bkgth,bksh->bkgts", grad, v)
  grad_weights = _dropped(grad_weights, keep_scale, keep_mask)
  # Equal to the sum over a query's keys of weight times gradient.
  total = jnp.sum(grad.astype(jnp.float32) * out, axis=-1, keepdims=True)
  grad_scores = weights * (grad_weights - total) * scale
  grad_terms = None if terms is None else grad_scores.astype(terms.dtype)
  grad_scores = grad_scores.astype(q.dtype)
  grad_q = _float32_einsum("bkgts,bksh->bkgth", grad_scores, k)
  grad_k = _float32_einsum("bkgts,bkgth->bksh", grad_scores, q)
  grad_q, grad_k, grad_v = (x.astype(q.dtype) for x in (grad_q, grad_k, grad_v))
  return grad_q, grad_k, grad_v, grad_terms, None, None


_weighted.defvjp(_reference_forward, _reference_backward)


def _float32_einsum(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)


def _dropped(weights: jax.Array, scale: float, keep_mask) -> jax.Array:
  if keep_mask is None:
    return weights
  return scale * jnp.where(keep_mask, weights, 0.0)


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
  """Like `reference` for `chunk` queries at a time, in memory linear in T.

  The backward pass recomputes the scores of each chunk.
  """
  queries = q.shape[1]
  keys = k.shape[1]
  if queries <= chunk:
    return reference(q, k, v, mask, scale, dropout, relative)
  count = -(-queries // chunk)

  def split(x):  # [B or 1, T, ...] to [count, B or 1, chunk, ...]
    pad = [(0, 0), (0, count * chunk - queries)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad)
    return jnp.moveaxis(x.reshape(x.shape[0], count, chunk, *x.shape[2:]), 1, 0)

  # Cast to float32, so that the gradients of chunks add up in float32.
  query_terms = None
  key_terms = None
  edges = ()
  if relative is not None:
    query_terms = relative.query
    key_terms = relative.key
    edges = relative.edges
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), (k, v, key_terms))

  @jax.checkpoint
  def body(start, part):
    q, query_terms, bounds = part
    k, v, key_terms = jax.tree.map(lambda x: x.astype(q.dtype), wide)
    mask = AttentionMask(False, *bounds)
    terms = None
    if key_terms is not None:
      terms = Relative(query_terms, key_terms, edges)
    out = reference(q, k, v, mask, scale, dropout, terms, start)
    return start + chunk, out

  # Bounds must express causality, because chunks do not start at query 0.
  bounds = mask.bounds(queries, keys)
  parts = jax.tree.map(split, (q, query_terms, bounds))
  _, out = jax.lax.scan(body, 0, parts)
  out = jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])
  return out[:, :queries]
