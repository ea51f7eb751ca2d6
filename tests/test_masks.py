"""The mask's definition, and attention against float64 NumPy."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax import attention
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from tests.helpers import closest

CASES = {  # batch, queries, keys, heads, kv_heads, width
  "square": (2, 9, 9, 4, 4, 8),
  "grouped": (3, 7, 7, 6, 2, 4),
  "one key head": (1, 12, 12, 5, 1, 16),
  "more keys": (2, 5, 11, 4, 2, 8),
  "one token": (2, 1, 1, 2, 1, 2),
}
MODES = ("causal", "full", "bounds", "causal bounds", "only start", "only end")

attend = jax.jit(attention.attend)


@jax.jit
def attend_with_gradients(q, k, v, mask, g):
  out, pull = jax.vjp(lambda q, k, v: attention.attend(q, k, v, mask), q, k, v)
  return out, *pull(g)


def visible_by_definition(mask, batch, queries, keys):
  out = np.zeros((batch, queries, keys), bool)
  for b, i, j in np.ndindex(out.shape):
    start = 0 if mask.k_start is None else int(mask.k_start[b, i])
    end = keys if mask.k_end is None else int(mask.k_end[b, i])
    out[b, i, j] = start <= j < end and (j <= i or not mask.causal)
  return out


@st.composite
def masks(draw):
  batch, queries, keys = (draw(st.integers(1, n)) for n in (3, 6, 7))

  def bound():
    numbers = st.integers(-1, keys + 1)
    row = st.lists(numbers, min_size=queries, max_size=queries)
    rows = st.lists(row, min_size=batch, max_size=batch)
    found = draw(st.none() | rows)
    return None if found is None else np.array(found, np.int32)

  mask = AttentionMask(draw(st.booleans()), bound(), bound())
  return mask, batch, queries, keys


@hypothesis.given(masks())
@hypothesis.settings(max_examples=80, deadline=None)
def test_dense_is_the_definition(case):
  mask, batch, queries, keys = case
  expected = visible_by_definition(mask, batch, queries, keys)
  found = mask.dense(queries, keys)
  if found is None:
    assert expected.all()
    assert not mask.causal and mask.k_start is None and mask.k_end is None
  else:
    assert (np.broadcast_to(found, expected.shape) == expected).all()


def test_constants_are_causal_and_bidirectional():
  assert (CAUSAL.dense(3, 3)[0] == np.tri(3, dtype=bool)).all()
  assert BIDIRECTIONAL.dense(3, 3) is None


def make_mask(mode, batch, queries, keys, seed=0):
  draw = np.random.default_rng(seed)
  start = draw.integers(0, keys, (batch, queries), np.int32)
  end = start + draw.integers(1, keys + 1, (batch, queries), np.int32)
  i = np.arange(queries, dtype=np.int32)
  return {
    "causal": CAUSAL,
    "full": BIDIRECTIONAL,
    "bounds": AttentionMask(False, start, end),
    "causal bounds": AttentionMask(True, np.minimum(start, i), end),
    "only start": AttentionMask(False, start, None),
    "only end": AttentionMask(False, None, end),
  }[mode]


def reference(q, k, v, visible, g):
  """Attention and its gradients for an upstream gradient g, in float64."""
  q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
  out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
  group, scale = q.shape[2] // k.shape[2], 1 / np.sqrt(q.shape[3])
  for b, t, n in np.ndindex(q.shape[:3]):
    see, m = visible[b, t], n // group
    if not see.any():
      continue
    keys, values = k[b, see, m], v[b, see, m]
    scores = keys @ q[b, t, n] * scale
    p = np.exp(scores - scores.max())
    p /= p.sum()
    out[b, t, n] = p @ values
    dp = values @ g[b, t, n]
    ds = p * (dp - p @ dp) * scale
    dq[b, t, n] = ds @ keys
    dk[b, see, m] += np.outer(ds, q[b, t, n])
    dv[b, see, m] += np.outer(p, g[b, t, n])
  return out, dq, dk, dv


def inputs(case, seed=0, dtype=np.float32):
  batch, queries, keys, heads, kv_heads, width = CASES[case]
  draw = np.random.default_rng(seed)
  q = draw.normal(size=(batch, queries, heads, width))
  k = draw.normal(size=(batch, keys, kv_heads, width))
  v = draw.normal(size=(batch, keys, kv_heads, width))
  g = draw.normal(size=q.shape)
  return [jnp.asarray(x, dtype) for x in (q, k, v, g)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_attention_and_its_gradients_are_the_reference(case, mode):
  batch, queries, keys = CASES[case][:3]
  mask = make_mask(mode, batch, queries, keys)
  q, k, v, g = inputs(case)
  expected = reference(
    q, k, v, visible_by_definition(mask, batch, queries, keys), g
  )
  found = attend_with_gradients(q, k, v, mask, g)
  for x, y in zip(found, expected, strict=True):
    # A single visible key has a zero gradient: then rounding is all there is.
    assert np.abs(x - y).max() <= 1e-5 * max(np.abs(y).max(), 1e-1)


def test_query_that_sees_nothing_is_zero_with_zero_gradients():
  q, k, v, g = inputs("grouped")
  batch, queries, keys = CASES["grouped"][:3]
  start = np.zeros((batch, queries), np.int32)
  end = np.full((batch, queries), keys, np.int32)
  end[0, 2] = 0  # an empty interval
  start[1] = keys  # a whole row that sees nothing
  mask = AttentionMask(False, start, end)
  out, dq, dk, dv = attend_with_gradients(q, k, v, mask, g)
  for x in (out, dq, dk, dv):
    assert np.isfinite(x).all()
  for x in (out, dq):
    assert not x[0, 2].any() and not x[1].any()
    assert x[0, 1].any()
  assert not dk[1].any() and not dv[1].any()
  # Its own upstream gradient must not reach the keys of others either.
  again = attend_with_gradients(q, k, v, mask, g.at[0, 2].set(1e3))
  assert np.array_equal(dk, again[2]) and np.array_equal(dv, again[3])


def test_hidden_keys_have_no_influence_at_all():
  q, k, v, g = inputs("grouped")
  shape = CASES["grouped"][:2]
  mask = AttentionMask(False, None, np.full(shape, 4, np.int32))
  other = k.at[:, 4:].set(1e4), v.at[:, 4:].set(-1e4)
  before = attend_with_gradients(q, k, v, mask, g)
  after = attend_with_gradients(q, *other, mask, g)
  for x, y in zip(before, after, strict=True):
    assert np.array_equal(x, y)


def test_large_scores_do_not_overflow():
  q, k, v, g = inputs("square")
  visible = visible_by_definition(CAUSAL, 2, 9, 9)
  expected = reference(100 * q, 100 * k, v, visible, g)[0]
  assert closest(attend(100 * q, 100 * k, v, CAUSAL), expected) < 1e-4


@pytest.mark.parametrize("mode", ["causal", "bounds"])
def test_bfloat16_rounds_only_in_and_out(mode):
  q, k, v, g = inputs("grouped", dtype=jnp.bfloat16)
  batch, queries, keys = CASES["grouped"][:3]
  mask = make_mask(mode, batch, queries, keys)
  expected = reference(
    q, k, v, visible_by_definition(mask, batch, queries, keys), g
  )
  found = attend_with_gradients(q, k, v, mask, g)
  for x, y in zip(found, expected, strict=True):
    assert x.dtype == jnp.bfloat16
    assert closest(x, y) < 1.5e-2


def test_heads_that_do_not_divide_are_refused():
  with pytest.raises(ValueError, match="5 query heads over 2"):
    attention.attend(
      jnp.ones((1, 2, 5, 4)), *[jnp.ones((1, 2, 2, 4))] * 2, CAUSAL
    )
