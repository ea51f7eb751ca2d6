"""Rows that grow with a cache, beside the same rows encoded whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax.masks import CAUSAL
from tests import helpers

LENGTH, SLOTS = 24, 32
MODELS = {
  "llama": helpers.model,
  "ltg_bert": helpers.ltg_bert,
  "gpt_bert": lambda **changes: helpers.ltg_bert(
    attention_gate=True, depth_weights=True, **changes
  ),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_grow_as_they_are_encoded_whole(name):
  of = MODELS[name](scan_layers="no")
  params, tokens = helpers.random_params(of), helpers.tokens(3, LENGTH)
  positions = np.broadcast_to(np.arange(LENGTH), tokens.shape)
  whole = np.asarray(jax.jit(of.encode)(params, tokens, positions, CAUSAL))
  # Rows of unlike lengths, filled up with tokens that are not theirs.
  rows, begin = np.arange(3), np.array([9, 1, 16])
  filled = np.where(np.arange(16) < begin[:, None], tokens[:, :16], 5)
  extend = jax.jit(of.extend)
  # Neither what slots held before, nor what stood behind a row's end, is seen.
  cache = jax.tree.map(lambda x: x + 7, of.cache(3, SLOTS))
  hidden, cache = extend(params, filled, jnp.zeros(3, jnp.int32), cache)
  found = np.zeros_like(whole)
  found[:, :16] = hidden
  for step in range(LENGTH):
    at = np.minimum(begin + step, LENGTH - 1).astype(np.int32)
    hidden, cache = extend(params, tokens[rows, at][:, None], at, cache)
    found[rows, at] = hidden[:, 0]
  assert helpers.closest(found, whole) < 1e-5
