"""Shapes, masks, arrays and checks for the tests of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax import attention
from antlm_jax.attention.reference import chunked
from antlm_jax.attention.tpu import kernel
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


def check_kernel(case):
  """Compares a case of `kernel_cases` with the float64 reference."""
  shape, mask, sizes, rate, dtype, seed, edges = case
  arrays = inputs(shape, seed, dtype)
  terms = () if edges is None else position_terms(shape, edges, seed, dtype)
  options = {"edges": edges, "scale": shape[-1] ** -0.5, "dropout": None}
  if rate:
    row_keys = jnp.asarray(np.arange(shape[0]) + seed, jnp.uint32)
    options["dropout"] = attention.Dropout(rate, row_keys)
  with pytest.MonkeyPatch.context() as patch:
    for name, size in sizes.items():
      patch.setattr(kernel, name, size)
    # A new function, because jit's cache does not depend on the sizes.
    *qkv, g = arrays
    run = jax.jit(lambda *args: attend(*args[:5], "pallas", args[5], **options))
    found = run(*qkv, mask, g, terms)
  assert all(x.dtype == dtype for x in found)
  exact = expected(shape, mask, arrays, terms, **options)
  check_errors(found, exact, 1e-5 if dtype == "float32" else 1e-2)


def check_leaks(mode, implementation, dtype, patch, edges=None, heads=(2, 1)):
  """Asserts that a changed key changes only the queries that see it."""
  patch.setattr(kernel, "_BLOCK", 128)
  shape = batch, length, *_ = (2, 400, 400, *heads, 16)
  mask = CAUSAL if mode == "causal" else long_mask(mode, 2, 400, 400, seed=1)
  q, k, v, _ = inputs(shape, dtype=dtype)
  of_query = of_key = None
  if edges:
    of_query, of_key = position_terms(shape, edges, dtype=dtype)

  @jax.jit
  def run(k, v, of_key):
    relative = attention.Relative(of_query, of_key, edges) if edges else None
    return attention.attend(
      *(q, k, v, mask), relative=relative, implementation=implementation
    )

  def changed(at):
    plus = functools.partial(jax.tree.map, lambda x: x.at[0, at].add(3))
    return (before != np.asarray(run(*plus((k, v, of_key))))).any(axis=(2, 3))

  before = np.asarray(run(k, v, of_key))
  visible = reference.visible(mask, batch, length, length)
  for at in (0, 127, 128, 200, 399):
    found = changed(at)
    assert not found[1].any()
    assert (found[0] == visible[0, :, at]).all()


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


@st.composite
def kernel_cases(draw):
  """Draws arguments of `check_kernel`.

  Position terms need as many key heads as query heads.
  """
  edges = st.lists(st.integers(-420, 420), max_size=62, unique=True)
  edges = edges.map(lambda found: tuple(sorted(found)))
  edges = draw(st.none() | st.just(LTG_BERTS) | edges)
  group = 3 if edges is None else 1
  batch, kv_heads, group = (draw(st.integers(1, n)) for n in (2, 3, group))
  # Small blocks; `_ROW` chooses one or two kernels for the gradients.
  sizes = {
    "_BLOCK": draw(st.sampled_from([128, 256])),
    "_ROW": draw(st.sampled_from([0, kernel._ROW])),
  }
  near = st.sampled_from([1, 2, 127, 128, 129, 255, 256, 257, 300, 384])
  queries = draw(near | st.integers(1, 400))
  keys = queries if draw(st.booleans()) else draw(near | st.integers(1, 400))
  width = draw(st.sampled_from([8, 16, 24, 64]))
  modes = "packed", "mixed", "window", "prefix", "blocks"
  mode = draw(st.sampled_from([*MODES, *modes]))
  seed = draw(st.integers(0, 2**16))
  mask = long_mask(mode, batch, queries, keys, seed)
  rate = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5]))
  dtype = draw(st.sampled_from(["float32", "bfloat16"]))
  shape = batch, queries, keys, group * kv_heads, kv_heads, width
  return shape, mask, sizes, rate, dtype, seed, edges
