"""Rows that grow with a cache, compared with the same rows encoded whole."""

import functools

import jax
import numpy as np
import pytest

from antlm_jax.masks import CAUSAL
from tests import helpers

SLOTS, NEW = 32, 4  # NEW tokens at once
MODELS = {
  "llama": helpers.model,
  "windows": functools.partial(helpers.model, windows=(7, 0)),
  "gpt_bert": lambda **changes: helpers.ltg_bert(
    attention_gate=True, depth_weights=True, **changes
  ),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_grow_as_they_are_encoded_whole(name):
  of = MODELS[name](scan_layers="no")
  params, tokens = helpers.random_params(of), helpers.tokens(3, SLOTS)
  positions = np.broadcast_to(np.arange(SLOTS), tokens.shape)
  whole = np.asarray(jax.jit(of.encode)(params, tokens, positions, CAUSAL))
  # Prompts have unequal lengths; other tokens fill the rest of their rows.
  begin = np.array([9, 1, 16], np.int32)
  filled = np.where(positions < begin[:, None], tokens, 5)
  extend = jax.jit(of.extend)
  # No query may see these tokens, or the earlier contents of the slots.
  cache = jax.tree.map(lambda x: x + 7, of.cache(3, SLOTS))
  found = np.zeros_like(whole)
  rows, new = np.arange(3)[:, None], np.arange(NEW)
  for tokens_of, starts in (
    (filled, np.broadcast_to(np.arange(0, 16, NEW)[:, None], (4, 3))),
    (tokens, begin + np.arange(0, SLOTS, NEW)[:, None]),
  ):
    for start in np.minimum(starts, SLOTS - NEW).astype(np.int32):
      at = start[:, None] + new
      hidden, cache = extend(params, tokens_of[rows, at], start, cache)
      found[rows, at] = hidden
  assert helpers.closest(found, whole) < 1e-5
