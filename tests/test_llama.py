"""The equations of llama and Gemma, their precision and their first values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax import models
from antlm_jax.masks import CAUSAL, AttentionMask
from tests import helpers
from tests import reference as definition

T = 24


def reference(c, params, tokens, positions, visible):
  """Computes Llama (RMSNorm, half-split RoPE, GQA, SwiGLU) or Gemma 3."""
  gemma = c if isinstance(c, models.ENCODERS["gemma"]) else None
  p = {path: np.asarray(v, np.float64) for path, v in params.items()}

  def norm(x, scale):
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps)
    return x * (scale + bool(gemma))

  # Rotates (h, h + H/2), a complex number, by position * theta^(-2h/H).
  def rope(x, theta):
    half = c.head_dim // 2
    angle = positions[..., None] * theta ** (-np.arange(half) / half)
    turn = np.exp(1j * angle)[:, :, None]
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], -1)

  def attention(x, w, window):
    near = abs(np.arange(T)[:, None] - np.arange(T)) < (window or T)
    theta = gemma.window_rope_theta if gemma and window else c.rope_theta
    scale = (gemma.query_scalar if gemma else c.head_dim) ** -0.5

    def split(y):
      return y.reshape(*y.shape[:2], -1, c.head_dim)

    q, k = (split(x @ w(f"attention/{n}/kernel")) for n in "qk")
    if c.qk_norm:
      q = norm(q, w("attention/q_norm/scale"))
      k = norm(k, w("attention/k_norm/scale"))
    q, k = rope(q, theta), rope(k, theta)
    v = split(x @ w("attention/v/kernel"))
    results, _ = definition.attention(q, k, v, visible & near, q, scale=scale)
    heads = results.out.reshape(*x.shape[:2], -1)
    return heads @ w("attention/out/kernel")

  def mlp(x, w):
    gate = x @ w("mlp/gate/kernel")
    up = x @ w("mlp/up/kernel")
    act = definition.gelu_tanh(gate) if gemma else gate / (1 + np.exp(-gate))
    return (act * up) @ w("mlp/down/kernel")

  x = p["embedding"][tokens] * (np.sqrt(c.width) if gemma else 1)
  for layer in range(c.layers):

    def w(name, layer=layer):
      return p["blocks/" + name][layer]

    def after(y, name, w=w):
      return norm(y, w(f"{name}_out_norm/scale")) if gemma else y

    window = c.layer_windows[layer]
    y = attention(norm(x, w("attention_norm/scale")), w, window)
    x = x + after(y, "attention")
    x = x + after(mlp(norm(x, w("mlp_norm/scale")), w), "mlp")
  hidden = norm(x, p["norm/scale"])
  head = p["embedding"].T if c.tied else p["head/kernel"]
  return hidden, hidden @ head


@pytest.mark.sample(3)
@pytest.mark.parametrize(
  "changes",
  [
    {"tied": True},
    {"tied": False, "rope_theta": 500.0, "norm_eps": 1e-2},
    {"tied": True, "kv_heads": 4, "head_width": 6, "layers": 1},
    {"tied": False, "kv_heads": 1, "layers": 3, "qk_norm": True},
    {"tied": True, "windows": [3]},
    {"tied": True, "name": "gemma", "windows": [2, 2, 0], "layers": 4},
  ],
  ids=str,
)
def test_the_encoder_is_the_familys_equations(changes):
  model = helpers.model(**changes)
  assert ("head/kernel" in model.shapes) == (not changes["tied"])
  params = helpers.random_params(model)
  tokens, at = helpers.tokens(1, T), np.arange(T, dtype=np.int32)[None]
  mask = AttentionMask(True, np.where(at < 5, 0, 5).astype(np.int32))
  positions = at - mask.k_start
  visible = definition.visible(mask, 1, T, T)
  expected = reference(model.config, params, tokens, positions, visible)
  hidden = model.encode(params, tokens, positions, mask)
  assert helpers.closest(hidden, expected[0]) < 1e-4
  assert helpers.closest(model.logits(params, hidden), expected[1]) < 1e-4


def test_bfloat16_computes_near_float32_and_scores_in_float32():
  row = helpers.tokens(2, T), np.arange(T)[None].repeat(2, 0), CAUSAL
  scores = []
  for dtype in ("float32", "bfloat16"):
    model = helpers.model(dtype=dtype)
    params = helpers.random_params(model)
    scores.append(model.logits(params, model.encode(params, *row)))
  assert scores[0].dtype == scores[1].dtype == np.float32
  assert 1e-4 < helpers.closest(scores[1], scores[0]) < 0.1


@pytest.mark.slow
def test_in_bfloat16_the_gradient_of_a_frequent_token_is_added_up_in_float32():
  model = helpers.model(dtype="bfloat16")
  upstream = np.random.default_rng(0).random((64, 1)).astype(np.float32)

  def gradient(copies):
    tokens = np.full((copies, 64), 7, np.int32)
    positions = np.broadcast_to(np.arange(64), tokens.shape)

    def total(params):
      hidden = model.encode(params, tokens, positions, CAUSAL)
      return (hidden.astype(jnp.float32) * upstream)[..., :3].sum()

    grads = jax.jit(jax.grad(total))(helpers.random_params(model))
    return grads["embedding"][7]

  assert helpers.closest(gradient(64), 64 * gradient(1)) < 1e-3


def test_first_values_are_normal_and_norms_are_one():
  model = helpers.model(init_std=0.05, width=64, mlp_width=256)
  params = model.init(0)
  found = {path: value.shape for path, value in params.items()}
  assert found == {path: value.shape for path, value in model.shapes.items()}
  for path, value in params.items():
    if "norm" in path:
      assert (value == 1).all()
    else:
      assert np.std(value) == pytest.approx(0.05, rel=0.06)
      assert abs(np.mean(value)) < 0.005
  up = params["blocks/mlp/up/kernel"]
  assert not np.array_equal(up[0], up[1])  # layers differ
  assert not np.array_equal(up, params["blocks/mlp/gate/kernel"])
  assert helpers.equal(params, model.init(0))
  assert not helpers.equal(params, model.init(1))
