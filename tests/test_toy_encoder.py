"""The encoder of plugins/encoder.py is held to what the others are."""

import functools
import json

import jax
import numpy as np
import pytest

from antlm_jax import models
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from tests import helpers, reference, runs
from tests.plugins.encoder import GptConfig

T = 12

SMALL = {name: n for name, n in helpers.TINY.items() if name != "kv_heads"}
SMALL["name"] = GptConfig.name

TWO = (  # where each token's document begins and ends
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


# Two devices


def trained(**shape) -> dict:
  """What training on a mesh gives, in a process of its own."""
  of = models.build(SMALL | {"layers": 1, "dropout": 0.1}, helpers.VOCAB)
  return helpers.trained(of, **shape)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_devices_train_it_as_one_and_hold_their_shares():
  code = "import json; from tests.test_toy_encoder import trained as of\n"
  code += "print(json.dumps([of(), of(fsdp=2), of(tensor=2)]))"
  one, fsdp, tensor = json.loads(runs.run_code(code, devices=2))
  assert one["losses"][0] != one["losses"][-1]
  for other in (fsdp, tensor):
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
  small = {path for path in one["parts"] if "norm" in path or "bias" in path}
  for path, parts in fsdp["parts"].items():
    assert parts == (1 if path in small else 2), path
  for path, parts in tensor["parts"].items():
    # Its own axis has no rule: the table of positions is whole.
    assert parts == (1 if path in {*small, "places"} else 2), path
