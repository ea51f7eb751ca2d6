"""The plugin's encoder passes the leak test of the library's encoders."""

import functools

import jax
import numpy as np
import pytest

from antlm_jax import models
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from tests import helpers, reference
from tests.plugins.encoder import GptConfig

T = 12

SMALL = {name: n for name, n in helpers.TINY.items() if name != "kv_heads"}
SMALL["name"] = GptConfig.name

TWO = (  # bounds of each token's document
  np.repeat([ends], [5, T - 5], 1).astype(np.int32).repeat(2, 0)
  for ends in ([0, 5], [5, T])
)
MASKS = CAUSAL, BIDIRECTIONAL, AttentionMask(False, *TWO)


@pytest.mark.sample(1)
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_only_what_is_seen_changes_a_logit(implementation):
  changes = {"attention": implementation, "layers": 1}
  of = models.build(SMALL | changes, helpers.VOCAB)
  params = helpers.random_params(of)
  positions = np.arange(T, dtype=np.int32)[None].repeat(2, 0)

  @jax.jit
  def run(tokens, mask):
    return of.logits(params, of.encode(params, tokens, positions, mask))

  for mask in MASKS:
    seen = reference.visible(mask, 2, T, T)[0]
    masked = functools.partial(run, mask=mask)
    helpers.check_leaks(masked, seen, (0, 4, 5, T - 1))
