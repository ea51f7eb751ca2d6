"""Shapes, masks, arrays and checks for the tests of attention.

test_gpu imports them where pytest is absent.
"""

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import attention
from antlm_jax.attention.reference import chunked
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from tests import reference

CASES = {  # batch, queries, keys, heads, kv_heads, width
  "square": (2, 9, 9, 4, 4, 8),
  "grouped": (3, 7, 7, 6, 2, 4),
  "one key head": (1, 12, 12, 5, 1, 16),
  "more keys": (2, 5, 11, 4, 2, 8),
  "one token": (2, 1, 1, 2, 1, 2),
}
MODES = ("causal", "full", "bounds", "causal bounds", "only start", "only end")
EDGES = attention.log_edges(8, 40)
GAP = slice(7, -10)
LTG_BERTS = attention.log_edges(32, 512)


def make_mask(mode, batch, queries, keys, seed=0):
  draw = np.random.default_rng(seed)
  start = draw.integers(0, keys, (batch, queries), np.int32)
  end = start + draw.integers(1, keys + 1, (batch, queries), np.int32)
  end = np.minimum(end, keys)
  i = np.arange(queries, dtype=np.int32)
  return {
    "causal": CAUSAL,
    "full": BIDIRECTIONAL,
    "bounds": AttentionMask(False, start, end),
    "causal bounds": AttentionMask(True, np.minimum(start, i), end),
    "only start": AttentionMask(False, start, None),
    "only end": AttentionMask(False, None, end),
  }[mode]


def inputs(shape, seed=0, dtype=np.float32):
  batch, queries, keys, heads, kv_heads, width = shape
  draw = np.random.default_rng(seed)
  q = draw.normal(size=(batch, queries, heads, width))
  k = draw.normal(size=(batch, keys, kv_heads, width))
  v = draw.normal(size=(batch, keys, kv_heads, width))
  g = draw.normal(size=q.shape)
  return [jnp.asarray(x, dtype) for x in (q, k, v, g)]


def check_errors(found, expected, limit):
  """Compares results with those of `reference.attention`."""
  exact, floors = (dict(x._asdict()) for x in expected)
  for name, x in zip(exact, found, strict=False):
    error = reference.relative_error(x, exact[name], floors[name])
    assert error < limit, name


def position_terms(shape, edges=EDGES, seed=0, dtype=np.float32):
  batch, queries, keys, heads, *_ = shape
  draw = np.random.default_rng(seed + 1)
  sizes = (batch, queries), (batch, keys)
  return [
    jnp.asarray(draw.normal(size=(*n, heads, len(edges) + 1)), dtype)
    for n in sizes
  ]


def attend(q, k, v, mask, g, implementation, terms=(), edges=EDGES, **options):
  """Returns the output and the gradients by q, k, v and any position terms.

  An integer `implementation` is the number of queries in a chunk.
  """

  def run(q, k, v, *terms):
    relative = attention.Relative(*terms, edges) if terms else None
    if isinstance(implementation, int):
      scale, dropout = options["scale"], options["dropout"]
      return chunked(q, k, v, mask, scale, dropout, relative, implementation)
    return attention.attend(
      *(q, k, v, mask),
      relative=relative,
      implementation=implementation,
      **options,
    )

  out, pull = jax.vjp(run, q, k, v, *terms)
  return out, *pull(g)


def expected(shape, mask, arrays, terms=(), edges=EDGES, dropout=None, **scale):
  """Returns the same by `reference.attention`, with its error floors."""
  batch, queries, keys, heads, *_ = shape
  relative = kept = None
  if dropout is not None:
    kept = dropout.kept(heads, np.arange(queries), np.arange(keys))
    kept = np.asarray(kept) * dropout.scale
  if terms:  # the bucket of each pair, by counting the edges, [T, S]
    distance = np.subtract.outer(np.arange(queries), np.arange(keys))
    bucket = sum((distance >= edge).astype(int) for edge in edges)
    relative = (*terms, bucket + 0 * distance)
  *qkv, g = arrays
  visible = reference.visible(mask, batch, queries, keys)
  return reference.attention(
    *qkv, visible, g, kept=kept, relative=relative, **scale
  )


def long_mask(mode, batch, queries, keys, seed):
  """Returns a mask as in training, made for queries = keys and then cut."""
  draw = np.random.default_rng(seed)
  at = np.arange(queries, dtype=np.int32)[None].repeat(batch, 0)
  if mode in MODES:
    return make_mask(mode, batch, queries, keys, seed)
  cuts = np.sort(draw.integers(0, queries + 1, (batch, 4)), axis=1)
  document = (at[:, :, None] >= cuts[:, None]).sum(-1)
  edges = np.concatenate(
    [np.zeros((batch, 1)), cuts, np.full((batch, 1), queries)], 1
  )
  start = np.take_along_axis(edges, document, 1)
  end = np.take_along_axis(edges, document + 1, 1)
  if mode == "blocks":
    end = np.minimum(end, start + ((at - start) // 48 + 1) * 48)
  causal = {
    "packed": False,
    "blocks": False,
    "mixed": (np.arange(batch) % 2 == 0)[:, None],
    "window": True,
    "prefix": at >= draw.integers(0, queries, (batch, 1)),
  }[mode]
  end = np.where(causal, at + 1, end)
  if mode == "window":
    start = np.maximum(at - 40, 0)
  start, end = (np.minimum(x, keys).astype(np.int32) for x in (start, end))
  return AttentionMask(False, start, end)


def mask_with_gaps(rows, length) -> AttentionMask:
  """Returns a mask in which some queries of row 0, and all of row 1, see none.

  The queries that see nothing are `GAP`.
  """
  start = np.zeros((rows, length), np.int32)
  end = np.full_like(start, length)
  start[0, GAP] = end[0, GAP] = 40
  end[1] = 0
  return AttentionMask(False, start, end)


def check_gaps(results):
  """Checks outputs and gradients with `mask_with_gaps`."""
  assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in results)
  out, dq, dk, dv, *terms = results
  for x in (out, dq, *terms[:1]):
    assert not x[0, GAP].any() and not x[1].any()
    assert x[0, : GAP.start].any() and x[0, GAP.stop :].any()
  assert not any(x[1].any() for x in (dk, dv, *terms[1:]))
