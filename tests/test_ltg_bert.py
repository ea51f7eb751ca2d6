"""LTG-BERT and GPT-BERT: equations, first weights, and the head's dropout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models.layers import DropoutPlaces
from tests import helpers, reference
from tests.helpers import ltg_bert as model
from tests.reference import gelu, gelu_tanh

T = 24
VARIANTS = {
  "ltg_bert": {},
  "gate": {"attention_gate": True},
  "depth": {"depth_weights": True},
  "gpt_bert": {"attention_gate": True, "depth_weights": True, "norm_eps": 1e-5},
}
MASKS = {
  "causal": CAUSAL,
  "bidirectional": BIDIRECTIONAL,
  "packed": AttentionMask(
    False,
    np.repeat([[0, 9]], [9, T - 9], 1).astype(np.int32).repeat(2, 0),
    np.repeat([[9, T]], [9, T - 9], 1).astype(np.int32).repeat(2, 0),
  ),
}


@pytest.mark.slow
def test_the_first_weights():
  """Normals truncated at two deviations, smaller in MLPs of deeper layers."""
  of = model(layers=6, width=128, mlp_width=256)
  params = jax.jit(of.init)(0)
  std = math.sqrt(2 / (5 * 128))
  for path, value in params.items():
    if "mlp" in path:
      limits = 2 * std * np.sqrt(0.5 / (1 + np.arange(6)))
      found = np.abs(value).max(axis=(1, 2))
      assert (found <= limits * (1 + 1e-6)).all(), path
      assert (found > 0.99 * limits).all(), path
    elif path.endswith("bias"):
      assert not value.any(), path
    elif path.endswith("scale"):
      assert (value == 1).all(), path
    else:
      assert 1.95 * std < np.abs(value).max() <= 2 * std * (1 + 1e-6), path


# The equations in float64


def norm(x, eps, params=None, path=None):
  x = reference.layer_norm(x, eps)
  if path is None:
    return x
  return x * params[f"{path}/scale"] + params[f"{path}/bias"]


def bucket(distance, size, longest):
  """Returns the bucket by the original formula, in float64."""
  middle = size // 2
  if abs(distance) <= middle:
    return size - 1 + distance
  far = min(abs(distance), longest - 1)
  steps = math.log(far / middle) / math.log((longest - 1) / middle)
  steps = math.ceil(steps * (middle - 1) - 1e-12)
  return size - 1 + int(math.copysign(middle + steps, distance))


def attention(x, p, c, relative, seen):
  x = norm(x, c.norm_eps)

  def project(y, name):
    return y @ p[f"{name}/kernel"] + p[f"{name}/bias"]

  def heads(y, name):
    return project(y, name).reshape(1, len(y), c.heads, c.head_dim)

  q, k, v = (heads(x, name) for name in "qkv")
  terms = [
    np.einsum("btnh,bcnh->btnc", states, heads(relative, name))
    for states, name in ((q, "k"), (k, "q"))
  ]
  places = range(len(x))
  buckets = [
    [bucket(i - j, c.position_buckets, c.longest_distance) for j in places]
    for i in places
  ]
  results, _ = reference.attention(
    *(q, k, v, seen[None], q),
    relative=(*terms, buckets),
    scale=(3 * c.head_dim) ** -0.5,
  )
  out = results.out.reshape(x.shape)
  if c.attention_gate:
    return project(norm(out * gelu(project(x, "gate")), c.norm_eps), "out")
  return norm(project(out, "out"), c.norm_eps, p, "out_norm")


def mlp(x, p, c):
  x = norm(x, c.norm_eps)
  x = (x @ p["up/kernel"]) * gelu_tanh(x @ p["gate/kernel"])
  return norm(x, c.norm_eps) @ p["down/kernel"]


def scores_by_definition(params, c, tokens, seen):
  """Returns the logits of one row, `[T, V]`."""
  x = norm(params["embedding"][tokens], c.norm_eps)
  relative = norm(params["relative"], c.norm_eps, params, "relative_norm")
  outputs, weights = [x], list(params.get("depth_weights", ()))
  for layer in range(c.layers):
    for sublayer in ("attention", "mlp"):
      prefix = f"blocks/{sublayer}/"
      p = {
        path.removeprefix(prefix): value[layer]
        for path, value in params.items()
        if path.startswith(prefix)
      }
      if sublayer == "attention":
        x = x + attention(x, p, c, relative, seen)
      else:
        x = x + mlp(x, p, c)
      outputs.append(x)
      if c.depth_weights:
        mine, weights = weights[: len(outputs)], weights[len(outputs) :]
        x = sum(w * y for w, y in zip(mine, outputs, strict=True))
  x = norm(x, c.norm_eps) @ params["head/linear/kernel"]
  x = norm(gelu(x + params["head/linear/bias"]), c.norm_eps)
  return x @ params["embedding"].T + params["head/bias"]


@pytest.mark.sample(3, 3)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_encoder_is_its_equations(variant, mask):
  of = model(**VARIANTS[variant])
  params, tokens = helpers.random_params(of), helpers.tokens(2, T)
  hidden = of.encode(params, tokens, None, MASKS[mask])
  found = of.logits(params, hidden)
  seen = reference.visible(MASKS[mask], 2, T, T)
  wide = {path: np.asarray(x, np.float64) for path, x in params.items()}
  for row in range(2):
    expected = scores_by_definition(wide, of.config, tokens[row], seen[row])
    assert helpers.closest(found[row], expected) < 1e-5


def test_the_heads_dropout_is_by_place():
  of = model(dropout=0.5)
  params = helpers.random_params(of)
  hidden = jnp.asarray(np.random.default_rng(0).normal(size=(6, 32)))
  seed = jnp.uint32(7)

  head = of.output_head(params)

  def states(hidden, places):
    return head.transform(hidden, DropoutPlaces(seed, jnp.asarray(places)))

  together = states(hidden, range(6))
  parts = [states(hidden[3:], range(3, 6)), states(hidden[:3], range(3))]
  assert np.array_equal(together, np.concatenate(parts[::-1]))
  assert not np.array_equal(together, head.transform(hidden, None))
  assert not np.array_equal(together[:3], states(hidden[:3], range(3, 6)))
