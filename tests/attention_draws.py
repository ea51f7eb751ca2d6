"""Random calls of attention, for hypothesis."""

import numpy as np
from hypothesis import strategies as st

from antlm_jax.masks import AttentionMask
from tests.attention_cases import MODES, long_mask


@st.composite
def masks(draw, batch, queries, keys):
  """Draws masks as in training, and arbitrary or empty intervals."""
  seed = draw(st.integers(0, 2**16))
  modes = "packed", "mixed", "window", "prefix", "blocks", "any", "any"
  mode = draw(st.sampled_from([*MODES, *modes]))
  if mode != "any":
    return long_mask(mode, batch, queries, keys, seed)
  random = np.random.default_rng(seed)
  start = random.integers(0, keys + 1, (batch, queries), np.int32)
  longest = draw(st.sampled_from([3, keys]))
  length = random.integers(0, longest + 1, start.shape, np.int32)
  end = np.minimum(start + length, keys)
  return AttentionMask(draw(st.booleans()), start, end)


@st.composite
def calls(draw, longest, near, widths, dtypes, kv_heads, group):
  """Draws a shape, a mask, a dtype, a dropout rate and a seed.

  Args:
    draw: Hypothesis's function.
    longest: Largest number of queries and keys.
    near: Numbers of them that are drawn more often.
    widths: Head widths.
    dtypes: Names of dtypes.
    kv_heads: Largest number of key heads.
    group: Largest number of query heads of a key head.
  """
  rows, kv_heads, group = (
    draw(st.integers(1, n)) for n in (2, kv_heads, group)
  )
  lengths = st.sampled_from(near) | st.integers(1, longest)
  queries = draw(lengths)
  keys = queries if draw(st.booleans()) else draw(lengths)
  width = draw(st.sampled_from(widths))
  mask = draw(masks(rows, queries, keys))
  dtype = draw(st.sampled_from(dtypes))
  rate = draw(st.sampled_from([0.0, 0.0, 0.1, 0.5]))
  shape = rows, queries, keys, group * kv_heads, kv_heads, width
  return shape, mask, dtype, rate, draw(st.integers(0, 2**16))
