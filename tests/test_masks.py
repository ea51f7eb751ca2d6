"""Attention masks against their definition."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from antlm_jax.masks import AttentionMask
from antlm_jax.training import flops
from tests import reference

SHAPES = (1, 1, 1), (2, 3, 7), (3, 6, 5)


@st.composite
def masks(draw):
  # JAX compiles programs for each shape.
  batch, queries, keys = draw(st.sampled_from(SHAPES))

  def bound():
    numbers = st.integers(-1, keys + 1)
    row = st.lists(numbers, min_size=queries, max_size=queries)
    rows = st.lists(row, min_size=batch, max_size=batch)
    found = draw(st.none() | rows)
    return None if found is None else np.array(found, np.int32)

  mask = AttentionMask(draw(st.booleans()), bound(), bound())
  return mask, batch, queries, keys


few = hypothesis.settings(max_examples=25)


@hypothesis.given(masks())
@few
def test_a_mask_is_its_definition_dense_as_bounds_and_in_number(case):
  mask, batch, queries, keys = case
  expected = reference.visible(mask, batch, queries, keys)
  start, end = mask.bounds(queries, keys)
  assert (start >= 0).all() and (end <= keys).all()
  for same in (mask, AttentionMask(False, start, end)):
    found = same.dense(queries, keys)
    if found is None:
      assert expected.all()
      assert not same.causal and same.k_start is None and same.k_end is None
    else:
      assert (np.broadcast_to(found, expected.shape) == expected).all()
  expected = reference.visible(mask, batch, queries, queries).sum()
  assert sum(flops.visible_pairs(mask, (batch, queries))) == expected


@hypothesis.given(masks(), st.integers(1, 8))
@few
def test_a_window_hides_what_is_further_away(case, window):
  mask, batch, length, _ = case
  index = np.arange(length)
  near = np.abs(index[:, None] - index) < window
  found = mask.within(window, (batch, length), np)
  assert (found.k_start <= found.k_end).all()
  seen = reference.visible(found, batch, length, length)
  assert (seen == reference.visible(mask, batch, length, length) & near).all()
