"""The llama encoder: size, equations, and no leaks of hidden tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from antlm_jax import config, models
from antlm_jax.errors import UserError
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models import encoder, layers
from antlm_jax.objectives.corruption import Segments
from tests import helpers
from tests import reference as definition
from tests.plugins.encoder import GptConfig

T = 24  # over helpers.ltg_bert's longest distance, 20
DTYPES = ("float32", "bfloat16")
ATTENTION = ("reference", "pallas")
POSITIONS = np.arange(T, dtype=np.int32)[None]
TWO = POSITIONS.repeat(2, 0)


# Sizes


def test_babyllama_has_its_97_million_parameters():
  settings = config.load_config("configs/antlm_babyllama.py")
  assert models.build_model(settings.model, 16_000).size == 97_241_856


@pytest.mark.parametrize(
  "size, millions", [("210M", 310.3), ("610M", 755.6), ("1B", 1409.0)]
)
def test_encoders_have_the_papers_parameters(size, millions):
  settings = config.load_config(f"configs/encoders.py:size={size}")
  model = models.build_model(settings.model, 128_256)
  assert model.size / 1e6 == pytest.approx(millions, abs=0.5)
  if size != "1B":  # Table 1 gives 1B without decimals
    assert round(model.size / 1e6, 1) == millions
  assert sum(np.prod(s.shape) for s in model.shapes.values()) == model.size


# Leaks


GPT_BERT = {"attention_gate": True, "depth_weights": True}
TOY = {n: v for n, v in helpers.TINY.items() if n != "kv_heads"}
ENCODERS = {
  "llama": helpers.model,
  "ltg_bert": helpers.ltg_bert,
  "gpt_bert": functools.partial(helpers.ltg_bert, **GPT_BERT),
  "toy_gpt": lambda **changes: models.build_model(
    TOY | {"name": GptConfig.name} | changes, helpers.VOCAB
  ),
}


@functools.cache
def scores(dtype, attention="auto", encoder="llama"):
  """Returns a jitted encoder, from `(tokens, positions, mask)` to logits."""
  model = ENCODERS[encoder](dtype=dtype, attention=attention)
  params = helpers.random_params(model)

  @jax.jit
  def run(tokens, positions, mask):
    return model.logits(params, model.encode(params, tokens, positions, mask))

  return lambda *args: np.asarray(run(*args))


def packed(lengths, causal):
  """Returns the positions and the mask of one row of documents."""
  starts = np.zeros((1, sum(lengths)), bool)
  starts[0, np.cumsum([0, *lengths[:-1]])] = True
  found = Segments.of(starts)
  at = np.arange(sum(lengths), dtype=np.int32)
  end = None if causal else found.end
  return at - found.start, AttentionMask(causal, found.start, end)


MASKS = {
  "causal": (POSITIONS, CAUSAL),
  "bidirectional": (POSITIONS, BIDIRECTIONAL),
  "packed causal": packed([9, 3, T - 12], causal=True),
  "packed": packed([9, 3, T - 12], causal=False),
}


@pytest.mark.sample(18)
@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASKS)
def test_only_what_is_seen_changes_a_logit(name, dtype, attention, encoder):
  positions, mask = MASKS[name]
  seen = definition.visible(mask, 1, T, T)[0]
  positions, mask = jax.tree.map(lambda x: x.repeat(2, 0), (positions, mask))
  run = scores(dtype, attention, encoder)
  helpers.check_leaks(lambda tokens: run(tokens, positions, mask), seen)


# Equations


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
    root = np.sqrt(gemma.query_scalar if gemma else c.head_dim)

    def split(y):
      return y.reshape(*y.shape[:2], -1, c.head_dim)

    q, k = (split(x @ w(f"attention/{n}/kernel")) for n in "qk")
    if c.qk_norm:
      q = norm(q, w("attention/q_norm/scale"))
      k = norm(k, w("attention/k_norm/scale"))
    q, k = rope(q, theta), rope(k, theta)
    v = split(x @ w("attention/v/kernel"))
    heads = []
    for n in range(c.heads):
      m = n // (c.heads // c.kv_heads)
      s = q[:, :, n] @ k[:, :, m].swapaxes(1, 2) / root
      e = np.where(visible & near, np.exp(s), 0)
      heads.append(e / e.sum(-1, keepdims=True) @ v[:, :, m])
    return np.concatenate(heads, -1) @ w("attention/out/kernel")

  def mlp(x, w):
    gate = x @ w("mlp/gate/kernel")
    up = x @ w("mlp/up/kernel")
    # GELU's tanh form is a sigmoid of twice the argument.
    cubic = np.sqrt(8 / np.pi) * (gate + 0.044715 * gate**3)
    gate = gate / (1 + np.exp(-(cubic if gemma else gate)))
    return (gate * up) @ w("mlp/down/kernel")

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
  tokens = helpers.tokens(1, T)
  positions, mask = packed([5, T - 5], causal=True)
  visible = np.asarray(mask.dense(T, T))
  expected = reference(model.config, params, tokens, positions, visible)
  hidden = model.encode(params, tokens, positions, mask)
  assert helpers.closest(hidden, expected[0]) < 1e-4
  assert helpers.closest(model.logits(params, hidden), expected[1]) < 1e-4


def test_bfloat16_computes_near_float32_and_scores_in_float32():
  tokens = helpers.tokens(2, T)
  a, b = (scores(dtype)(tokens, TWO, CAUSAL) for dtype in DTYPES)
  assert a.dtype == b.dtype == np.float32
  assert 1e-4 < helpers.closest(b, a) < 0.1


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


# Ways to run


@functools.cache
def way(scan, remat, rate=0.0):
  """Returns states and gradients of one way to run the blocks."""
  model = helpers.model(scan_layers=scan, remat=remat, dropout=rate)
  params, tokens = helpers.random_params(model), helpers.tokens(2, T)
  key = jax.random.key(3)

  @jax.jit
  def run(params):
    hidden = model.encode(params, tokens, TWO, CAUSAL, key)
    return jnp.sum(jnp.sin(hidden)), hidden

  grads, hidden = jax.grad(run, has_aux=True)(params)
  return hidden, grads


@pytest.mark.sample(2)
@pytest.mark.parametrize(
  "ways", ["yes none", "no block", "yes block", "yes dots", "auto none"]
)
def test_ways_to_run_give_the_same_values_and_gradients(ways):
  hidden, grads = way("no", "none")
  again, grads_again = way(*ways.split())
  assert helpers.closest(again, hidden) < 1e-5
  assert grads.keys() == grads_again.keys()
  for path in grads:
    assert np.abs(grads[path]).max() > 0
    assert helpers.closest(grads_again[path], grads[path]) < 1e-5


def test_remat_dots_computes_no_product_with_weights_again():
  counts = {}
  for remat in ("none", "dots", "block"):
    model = helpers.model(scan_layers="yes", remat=remat, attention="reference")
    tokens = helpers.tokens(2, T)

    def total(params, of=model, tokens=tokens):
      return of.encode(params, tokens, TWO, CAUSAL).sum()

    program = jax.make_jaxpr(jax.grad(total))(helpers.random_params(model))
    counts[remat] = str(program).count("dot_general[")
  # The backward pass recomputes attention's two products. With "block", it also
  # recomputes six of seven others: no gradient needs the last.
  assert counts["dots"] == counts["none"] + 2
  assert counts["block"] == counts["none"] + 2 + 6


@pytest.mark.slow
def test_remat_dots_computes_cudnns_attention_once(monkeypatch):
  """The policy finds the plan's stand-in by name; cuDNN's call has no name."""
  for check in ("check_cudnn_version", "check_compute_capability"):
    monkeypatch.setattr(fused_attention_stablehlo, check, lambda *_: 91_000)

  def layer(w, x):
    q = (x @ w).reshape(2, 128, 4, 64)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    return x + attend(q, q, q, implementation="cudnn").reshape(x.shape)

  def loss(w, x, policy):
    layers = jax.checkpoint(layer, policy=policy)
    return jnp.sum(layers(w, layers(w, x)).astype(jnp.float32))

  w, x = (
    jnp.zeros((256, 256), jnp.bfloat16),
    jnp.zeros((2, 128, 256), "bfloat16"),
  )
  runs = {
    name: str(jax.make_jaxpr(jax.grad(loss), static_argnums=2)(w, x, policy))
    for name, policy in encoder.REMAT_POLICIES.items()
    if policy
  }
  counts = {n: p.count("attention_fwd_wrapper[") for n, p in runs.items()}
  assert counts == {"dots": 2, "block": 4}


def test_a_loop_and_rematerialising_drop_the_same_units():
  hidden, grads = way("no", "none", 0.3)
  again, grads_again = way("yes", "block", 0.3)
  assert helpers.closest(again, hidden) < 1e-5
  assert helpers.closest(grads_again, grads) < 1e-5
  assert helpers.closest(hidden, way("no", "none")[0]) > 1e-2


# Dropout


@pytest.fixture(scope="module")
def dropping():
  model = helpers.model(dropout=0.4)
  params, tokens = helpers.random_params(model), helpers.tokens(2, T)

  @jax.jit
  def run(key):
    return model.encode(params, tokens, TWO, CAUSAL, key)

  return run


def test_dropout_needs_a_key_and_follows_it(dropping):
  model = helpers.model()
  tokens = helpers.tokens(2, T)
  plain = model.encode(helpers.random_params(model), tokens, TWO, CAUSAL)
  assert helpers.closest(dropping(None), plain) < 1e-5
  keys = [jax.random.key(seed) for seed in (0, 0, 1)]
  a, again, b = (dropping(key) for key in keys)
  assert np.array_equal(a, again)
  assert (a != b).any(axis=-1).all()
  assert (a != plain).any(axis=-1).all()


def test_dropout_keeps_the_expectation():
  x = 1.0 + jnp.arange(4.0)
  keys = jax.random.split(jax.random.key(0), 20_000)
  out = np.asarray(jax.vmap(lambda key: layers.dropout(x, 0.3, key))(keys))
  kept = out != 0
  assert np.allclose(out, np.where(kept, x / 0.7, 0))
  assert np.abs(1 - kept.mean(axis=0) - 0.3).max() < 0.02
  assert np.allclose(out.mean(axis=0), x, rtol=0.02)


# First values


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


# Settings


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"kv_heads": 3}, "model.kv_heads"),
    ({"width": 30}, "model.width"),
    ({"width": 36, "heads": 4, "kv_heads": 4}, "model.head_width"),
    ({"dtype": "float16"}, "model.dtype"),
  ],
  ids=str,
)
def test_bad_settings_are_named(changes, words):
  with pytest.raises(UserError, match=words):
    helpers.model(**changes)
