"""Properties of every encoder: no leaks, and equal results in each way to run.

test_llama and test_ltg_bert have equations, test_imported compares the others
with transformers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from antlm_jax import config, models
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models import encoder, layers, ltg_bert
from tests import helpers, reference, runs
from tests.plugins.encoder import GatedConfig

T = 24  # over the longest distance of LTG-BERT's buckets here, 20
SHAPE = {"layers": 2, "width": 32, "heads": 4, "mlp_width": 48}
SHAPE |= {"max_seq_len": 64, "dropout": 0.0, "attention_dropout": 0.0}
LTG_BERT = {"name": "ltg_bert", "position_buckets": 8, "longest_distance": 20}
GATES = {"attention_gate": True, "depth_weights": True, "norm_eps": 1e-5}
# Four layers see two, all, three and two keys.
WINDOWS = {"layers": 4, "windows": (2, 0, 3)}
ENCODERS = {
  "llama": {"kv_heads": 2},
  "windows": {"name": "llama", "kv_heads": 2, **WINDOWS},
  "gemma": {"kv_heads": 2, "windows": (5, 0)},
  "modernbert": {"windows": (0, 5)},
  "ultrabert": {"kv_heads": 2, "windows": (5, 0), "head_mlp_width": 24},
  "bert": {"first_position": 2},
  "ltg_bert": LTG_BERT,
  "gpt_bert": LTG_BERT | GATES,
  GatedConfig.name: {"kv_heads": 2},  # a plugin
}


def make(name, **changes) -> models.Model:
  settings = {"name": name, **SHAPE, **ENCODERS[name], **changes}
  return models.build_model(settings, helpers.VOCAB)


def positions_of(rows: int, length: int):
  return np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))


def test_the_table_has_every_encoder():
  assert {make(name).config.name for name in ENCODERS} >= {*models.ENCODERS}


# Leaks


def bounds(*pieces):
  """Returns the bounds of two rows of documents of these lengths."""
  ends = np.cumsum(pieces)
  rows = np.repeat([ends - pieces, ends], pieces, axis=1).astype(np.int32)
  return rows[:, None].repeat(2, 1)


PREFIXES = np.maximum(np.arange(1, T + 1), [[4], [15]]).astype(np.int32)
MASKS = {
  "causal": CAUSAL,
  "bidirectional": BIDIRECTIONAL,
  "packed causal": AttentionMask(True, *bounds(9, 3, T - 12)),
  "packed": AttentionMask(False, *bounds(9, 3, T - 12)),
  "prefix": AttentionMask(False, None, PREFIXES),
}


@functools.cache
def scores(name, attention, dtype):
  """Returns a jitted encoder, from `(tokens, positions, mask)` to logits."""
  model = make(name, attention=attention, dtype=dtype)
  params = helpers.random_params(model)
  return jax.jit(lambda *row: model.logits(params, model.encode(params, *row)))


# test_objectives has the other dtypes, from rows to logits.
CALLS = [("reference", "bfloat16", mask) for mask in MASKS]
CALLS += [("pallas", "float32", mask) for mask in ("packed causal", "prefix")]


@pytest.mark.sample(6, 20)
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("attention, dtype, mask", CALLS)
def test_only_what_is_seen_through_the_layers_changes_a_logit(
  attention, dtype, mask, name
):
  """Bit for bit."""
  mask, run = MASKS[mask], scores(name, attention, dtype)
  visible = reference.visible(mask, 2, T, T)[0]  # of the row that changes
  itself = np.eye(T, dtype=bool)
  distance = np.abs(np.arange(T)[:, None] - np.arange(T))
  positions = positions_of(2, T)
  if mask.k_start is not None:
    positions = positions - mask.k_start
  through = itself.astype(int)
  for window in make(name).config.layer_windows:
    near = distance < (window or T)
    through = ((visible & near) | itself).astype(int) @ through
  helpers.check_leaks(lambda tokens: run(tokens, positions, mask), through > 0)


# Ways to run


@functools.cache
def outcome(name, **changes):
  """Returns states and gradients with dropout."""
  rates = {"dropout": 0.1, "attention_dropout": 0.1}
  model = make(name, **rates, **changes)
  params, tokens = helpers.random_params(model), helpers.tokens(2, T)
  mask, key = MASKS["packed causal"], jax.random.key(3)

  @jax.jit
  def run(params):
    hidden = model.encode(params, tokens, positions_of(2, T), mask, key)
    return jnp.sum(jnp.sin(model.logits(params, hidden))), hidden

  grads, hidden = jax.grad(run, has_aux=True)(params)
  if not model.config.buckets:
    # The softmax does not depend on it, so its gradient is rounding error.
    grads = {n: x for n, x in grads.items() if not n.endswith("k/bias")}
  return {"hidden": hidden, **grads}


OTHERS = [name for name in ENCODERS if name != "windows"]
WAYS = [
  {"scan_layers": "yes", "remat": "block"},
  {"remat": "dots"},
  {"scan_layers": "yes"},
  {"remat": "block"},
  {"attention": "pallas"},
  {"attention": "chunked"},
  {"scan_layers": "yes", "attention": "pallas"},
]


@pytest.mark.sample(2, 3)
@pytest.mark.parametrize(
  "name, changes",
  [("windows", way) for way in WAYS]
  + [(name, way) for name in OTHERS for way in WAYS[:2]],
  ids=str,
)
def test_ways_to_run_give_the_same_values_and_gradients(name, changes):
  """Also catches other units that are dropped, or other windows in a loop."""
  if "scan_layers" in changes and "depth_weights" in ENCODERS[name]:
    runs.refusal("scan_layers=yes cannot loop", make, name, **changes)
    return
  assert make(name, **changes).config.loops == ("scan_layers" in changes)
  expected, results = outcome(name, scan_layers="no"), outcome(name, **changes)
  assert results.keys() == expected.keys()
  for path, value in expected.items():
    assert np.abs(value).max() > 0, path
    assert helpers.closest(results[path], value) < 1e-5, path


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("name", ENCODERS)
def test_dropout_needs_a_key_and_follows_it(name):
  model, plain = make(name, dropout=0.4), make(name)
  params, tokens = helpers.random_params(model), helpers.tokens(2, T)

  @jax.jit
  def run(key):
    return model.encode(params, tokens, positions_of(2, T), CAUSAL, key)

  whole = jax.jit(plain.encode)(params, tokens, positions_of(2, T), CAUSAL)
  expected = np.asarray(whole)
  assert helpers.closest(run(None), expected) < 1e-5
  keys = [jax.random.key(seed) for seed in (0, 0, 1)]
  first, again, other = (np.asarray(run(key)) for key in keys)
  assert np.array_equal(first, again)
  assert (first != other).any(axis=-1).all()
  assert (first != expected).any(axis=-1).all()


SLOTS, NEW = 32, 4  # NEW tokens at once


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("name", ENCODERS)
def test_rows_grow_with_a_cache_as_they_are_encoded_whole(name):
  model = make(name, scan_layers="no")
  params, tokens = helpers.random_params(model), helpers.tokens(3, SLOTS)
  positions = positions_of(3, SLOTS)
  whole = np.asarray(jax.jit(model.encode)(params, tokens, positions, CAUSAL))
  # Prompts have unequal lengths; other tokens fill the rest of their rows.
  begin = np.array([9, 1, 16], np.int32)
  filled = np.where(positions < begin[:, None], tokens, 5)
  extend = jax.jit(model.extend)
  # No query may see these tokens, or the earlier contents of the slots.
  cache = jax.tree.map(lambda x: x + 7, model.cache(3, SLOTS))
  states = np.zeros_like(whole)
  rows, new = np.arange(3)[:, None], np.arange(NEW)
  for inputs, starts in (
    (filled, np.broadcast_to(np.arange(0, 16, NEW)[:, None], (4, 3))),
    (tokens, begin + np.arange(0, SLOTS, NEW)[:, None]),
  ):
    for start in np.minimum(starts, SLOTS - NEW).astype(np.int32):
      at = start[:, None] + new
      hidden, cache = extend(params, inputs[rows, at], start, cache)
      states[rows, at] = hidden
  assert helpers.closest(states, whole) < 1e-5


def test_remat_dots_computes_no_product_with_weights_again():
  counts = {}
  for remat in ("none", "dots", "block"):
    model = make("llama", scan_layers="yes", remat=remat, attention="reference")
    row = helpers.tokens(2, T), positions_of(2, T), CAUSAL

    def total(params, model=model, row=row):
      return model.encode(params, *row).sum()

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

  w, x = (jnp.zeros(n, jnp.bfloat16) for n in ((256, 256), (2, 128, 256)))
  counts = {}
  for name in ("dots", "block"):
    policy = encoder.REMAT_POLICIES[name]
    program = jax.make_jaxpr(jax.grad(loss), static_argnums=2)(w, x, policy)
    counts[name] = str(program).count("attention_fwd_wrapper[")
  assert counts == {"dots": 2, "block": 4}


def test_modernberts_first_layer_has_no_norm_of_its_own():
  model = make("modernbert", scan_layers="yes")
  row = helpers.tokens(1, 12), positions_of(1, 12), BIDIRECTIONAL

  def total(params):
    return (model.encode(params, *row) ** 2)[..., :3].sum()

  grads = jax.jit(jax.grad(total))(helpers.random_params(model))
  norms = np.abs(grads["blocks/attention_norm/scale"]).max(axis=1)
  assert norms[0] == 0 and (norms[1:] > 0).all()


def test_dropout_keeps_the_expectation():
  x = 1.0 + jnp.arange(4.0)
  keys = jax.random.split(jax.random.key(0), 20_000)
  out = np.asarray(jax.vmap(lambda key: layers.dropout(x, 0.3, key))(keys))
  kept = out != 0
  assert np.allclose(out, np.where(kept, x / 0.7, 0))
  assert np.abs(1 - kept.mean(axis=0) - 0.3).max() < 0.02
  assert np.allclose(out.mean(axis=0), x, rtol=0.02)


# Settings


def loaded(spec: str):
  return config.load_config(spec).model


def published(size: str) -> dict:
  return {"name": "ltg_bert", **ltg_bert.SHAPES[size]}


@pytest.mark.parametrize(
  "settings, vocab_size, parameters",
  [
    (lambda: loaded("configs/antlm_babyllama.py"), 16_000, 97_241_856),
    # The study's Table 1 has 310.3M, 755.6M and 1.4B.
    (lambda: loaded("configs/encoders.py:size=210M"), 128_256, 310_266_624),
    (lambda: loaded("configs/encoders.py:size=610M"), 128_256, 755_625_600),
    (lambda: loaded("configs/encoders.py:size=1B"), 128_256, 1_409_482_944),
    (lambda: published("base"), 16_384, 98_229_760),
    (lambda: published("gpt_bert_base"), 16_384, 119_454_532),
    (lambda: published("gpt_bert_small"), 8_192, 29_892_164),
    # As many as in transformers, and our first norm, which theirs lack.
    (lambda: loaded("modernbert:size=17M"), 50_368, 16_913_600 + 256),
    (lambda: loaded("modernbert:size=150M"), 50_368, 149_655_232 + 768),
  ],
)
def test_encoders_have_the_published_numbers_of_parameters(
  settings, vocab_size, parameters
):
  model = models.build_model(settings(), vocab_size)
  assert model.size == parameters
  assert sum(np.prod(x.shape) for x in model.shapes.values()) == parameters


@pytest.mark.parametrize(
  "name, changes, words",
  [
    ("llama", {"kv_heads": 3}, "model.kv_heads"),
    ("llama", {"width": 36, "heads": 4}, "model.head_width"),
    ("llama", {"dtype": "float16"}, "model.dtype"),
    ("ltg_bert", {"heads": 5}, "model.width=32 is not a multiple of .*heads=5"),
    ("ltg_bert", {"position_buckets": 7}, "model.position_buckets=7 is odd"),
    ("ltg_bert", {"longest_distance": 8}, "longest_distance=8 is not over"),
    ("ltg_bert", {"kv_heads": 2}, "kv_heads is no setting of ltg_bert"),
  ],
  ids=str,
)
def test_settings_that_do_not_fit_are_refused(name, changes, words):
  runs.refusal(words, make, name, **changes)
