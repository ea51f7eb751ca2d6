"""Published LTG-BERT and GPT-BERT checkpoints, read here.

Their network is stated anew in NumPy, over the names and the layout of tensors
that their programs save (ltgoslo/ltg-bert, babylm/train/model.py, and
ltgoslo/gpt-bert, pretraining/model_extra.py); weights are drawn.
"""

import argparse
import json
import math

import numpy as np
import pytest
import safetensors.numpy

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import import_
from antlm_jax.inference.model import load
from antlm_jax.masks import AttentionMask
from tests import random_models

CONFIG = {
  "attention_probs_dropout_prob": 0.1,
  "hidden_dropout_prob": 0.1,
  "hidden_size": 32,
  "intermediate_size": 48,
  "max_position_embeddings": 24,
  "position_bucket_size": 8,
  "num_attention_heads": 4,
  "num_hidden_layers": 2,
  "vocab_size": 400,
  "layer_norm_eps": 1.0e-5,
}
D, INNER, LAYERS, HEADS = 32, 48, 2, 4
T = 24
KINDS = ("ltg", "gpt")


def places(kind, i):
  """Where a layer's attention and MLP are."""
  if kind == "ltg":
    layer = f"transformer.layers.{i}"
    return f"{layer}.attention", f"{layer}.mlp.mlp"
  return f"transformer.attention_layers.{i}", f"transformer.mlp_layers.{i}.mlp"


def shapes(kind):
  out = {
    "embedding.word_embedding.weight": (400, D),
    "embedding.relative_embedding": (15, D),
    "embedding.relative_layer_norm.weight": (D,),
    "embedding.relative_layer_norm.bias": (D,),
    "classifier.nonlinearity.1.weight": (D, D),
    "classifier.nonlinearity.1.bias": (D,),
    "classifier.nonlinearity.5.bias": (400,),
  }
  values = "in_proj_v" if kind == "ltg" else "in_proj_vg"
  for i in range(LAYERS):
    attention, mlp = places(kind, i)
    for name, size in (
      ("in_proj_qk", 2 * D),
      (values, D if kind == "ltg" else 2 * D),
      ("out_proj", D),
    ):
      out[f"{attention}.{name}.weight"] = (size, D)
      out[f"{attention}.{name}.bias"] = (size,)
    if kind == "ltg":
      out[f"{attention}.post_layer_norm.weight"] = (D,)
      out[f"{attention}.post_layer_norm.bias"] = (D,)
    out[f"{mlp}.1.weight"] = (2 * INNER, D)
    out[f"{mlp}.4.weight"] = (D, INNER)
  if kind == "gpt":
    for i in range(2 * LAYERS):
      out[f"transformer.dwa_modules.alphas.{i}"] = (i + 2,)
  return out


def drawn(kind):
  """A state dict, with the buffers and the tied tensor that are saved too."""
  draw = np.random.default_rng(0)
  state = {
    name: draw.normal(0, 0.4, shape).astype(np.float32)
    for name, shape in shapes(kind).items()
  }
  embedding = state["embedding.word_embedding.weight"]
  state["classifier.nonlinearity.5.weight"] = embedding.copy()
  for i in range(LAYERS):
    buffer = f"{places(kind, i)[0]}.position_indices"
    state[buffer] = np.zeros((24, 24), np.int64)
  return state


# ---------------------------------------------------------- their network anew


def norm(x, scale=1.0, bias=0.0):
  x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def gelu(x):
  return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def tanh_gelu(x):
  return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def bucket(distance):
  """The row of the relative embedding for a query's distance to a key."""
  far, middle = min(abs(distance), 23), 4
  if far > middle:
    share = math.log(far / middle) / math.log(23 / middle)
    far = middle + math.ceil(share * (middle - 1))
  return 7 + int(math.copysign(far, distance))


def attention(state, at, kind, x, relative, causal):
  def linear(name, value):
    return value @ state[f"{at}.{name}.weight"].T + state[f"{at}.{name}.bias"]

  def heads(value):
    return value.reshape(*value.shape[:-1], HEADS, D // HEADS)

  x = norm(x)
  q, k = map(heads, np.split(linear("in_proj_qk", x), 2, -1))
  where = [[bucket(i - j) for j in range(len(x))] for i in range(len(x))]
  around = linear("in_proj_qk", relative)[np.array(where)]
  q_at, k_at = map(heads, np.split(around, 2, -1))
  scores = (
    np.einsum("inh,jnh->nij", q, k)
    + np.einsum("inh,ijnh->nij", q, k_at)
    + np.einsum("jnh,ijnh->nij", k, q_at)
  ) / math.sqrt(3 * D // HEADS)
  if causal:
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)

  def mix(v):
    return np.einsum("nij,jnh->inh", weights, heads(v)).reshape(x.shape)

  if kind == "ltg":
    scale = state[f"{at}.post_layer_norm.weight"]
    out = linear("out_proj", mix(linear("in_proj_v", x)))
    return norm(out, scale, state[f"{at}.post_layer_norm.bias"])
  v, gate = np.split(linear("in_proj_vg", x), 2, -1)
  return linear("out_proj", norm(mix(v) * gelu(gate)))


def logits(state, kind, ids, causal):
  """Of one row of tokens, `[T, V]`."""
  state = {name: value.astype(np.float64) for name, value in state.items()}
  embedding = state["embedding.word_embedding.weight"]
  relative = norm(
    state["embedding.relative_embedding"],
    state["embedding.relative_layer_norm.weight"],
    state["embedding.relative_layer_norm.bias"],
  )
  x = norm(embedding[ids])
  outputs = [x]

  def passed_on(x):
    outputs.append(x)
    if kind == "ltg":
      return x
    alphas = state[f"transformer.dwa_modules.alphas.{len(outputs) - 2}"]
    return np.tensordot(alphas, outputs, 1)

  for i in range(LAYERS):
    at, mlp = places(kind, i)
    x = passed_on(x + attention(state, at, kind, x, relative, causal))
    value, gate = np.split(norm(x) @ state[f"{mlp}.1.weight"].T, 2, -1)
    x = passed_on(
      x + norm(value * tanh_gelu(gate)) @ state[f"{mlp}.4.weight"].T
    )
  head = "classifier.nonlinearity"
  x = norm(x) @ state[f"{head}.1.weight"].T + state[f"{head}.1.bias"]
  return norm(gelu(x)) @ embedding.T + state[f"{head}.5.bias"]


# ---------------------------------------------------------------- their folders


def tokenizer(kind):
  text = random_models.tokenizer().to_json()
  if kind == "gpt":
    return text
  for ours, theirs in (
    ("<s>", "[CLS]"),
    ("</s>", "[SEP]"),
    ("<mask>", "[MASK]"),
  ):
    text = text.replace(json.dumps(ours), json.dumps(theirs))
  return text


@pytest.fixture(params=KINDS)
def kind(request):
  return request.param


@pytest.fixture
def folder(kind, tmp_path):
  """Without weights."""
  path = tmp_path / "theirs"
  path.mkdir()
  (path / "config.json").write_text(json.dumps(CONFIG))
  (path / "tokenizer.json").write_text(tokenizer(kind))
  return path


def as_safetensors(state, path):
  del state["classifier.nonlinearity.5.weight"]  # tied, and so left out
  safetensors.numpy.save_file(state, path / "model.safetensors")


def as_a_baseline(state, path):
  """As BabyLM's baselines of GPT-BERT name them."""
  named = {
    name.replace("classifier.", "lm_head.")
    if name.startswith("classifier")
    else "model." + name.removeprefix("transformer."): value
    for name, value in state.items()
  }
  safetensors.numpy.save_file(named, path / "model.safetensors")


def pickled(value, path, name):
  torch = pytest.importorskip("torch")
  state = {n: torch.tensor(v) for n, v in value.items()}
  torch.save(state, path / name)
  return torch, state


def as_a_pickle(state, path):
  pickled(state, path, "pytorch_model.bin")


def as_training_left_it(state, path):
  """Distributed, beside the optimizer's state and the arguments."""
  torch, state = pickled(state, path, "checkpoint.bin")
  saved = {
    "model": {f"module.{name}": value for name, value in state.items()},
    "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []},
    "args": argparse.Namespace(mask_p=0.15, seq_length=128),
    "epoch": 3,
  }
  torch.save(saved, path / "checkpoint.bin")


@pytest.mark.parametrize(
  "save", [as_safetensors, as_a_baseline, as_a_pickle, as_training_left_it]
)
def test_logits_are_theirs(kind, folder, save, tmp_path):
  save(drawn(kind), folder)
  imported = import_.read(folder)
  loaded = load(import_.write(imported, tmp_path / "run"))
  ids = np.random.default_rng(1).integers(5, 400, T)
  for causal in (False, True):
    hidden = loaded.model.encode(
      loaded.params, ids[None], np.arange(T)[None], AttentionMask(causal)
    )
    ours = np.asarray(loaded.model.logits(loaded.params, hidden))[0]
    theirs = logits(drawn(kind), kind, ids, causal)
    difference = np.abs(ours - theirs).max()
    print(f"{kind}, {save.__name__}: {difference:.1e} of {np.ptp(theirs):.0f}")
    assert np.ptp(theirs) > 10 and difference < 1e-4
  expected = {"ltg": ("1M", "bos_eos"), "gpt": ("C:N=1:15", "bos")}[kind]
  assert (loaded.config.curriculum, loaded.boundary) == expected
  assert loaded.config.model.longest_distance == 24
  assert (loaded.tokenizer.bos_id, loaded.tokenizer.mask_id) == (1, 3)
  assert Tokenizer.load(tmp_path / "run/tokenizer.json").mask_id == 3
  noted = any("distances follow BabyLM's LTG-BERT" in n for n in imported.notes)
  assert noted == (kind == "ltg")


def test_a_distance_that_would_fill_the_memory_is_refused(kind, folder):
  as_safetensors(drawn(kind), folder)
  config = json.dumps(CONFIG | {"max_position_embeddings": 10**9})
  (folder / "config.json").write_text(config)
  with pytest.raises(UserError, match="longest_distance=1000000000 is not"):
    import_.read(folder)


def test_what_does_not_fit_is_named(kind, folder):
  state = drawn(kind)
  at = places(kind, 1)[0]
  del state[f"{at}.in_proj_qk.weight"]
  state["head.nonlinearity.1.bias"] = state.pop(f"{at}.out_proj.bias")
  as_safetensors(state, folder)
  with pytest.raises(UserError) as error:
    import_.read(folder)
  for name in ("q_proj.weight", "k_proj.weight", "o_proj.bias"):
    assert f"model.layers.1.self_attn.{name}" in str(error.value)
  assert "no place for head.nonlinearity.1.bias" in str(error.value)


def test_parts_that_do_not_fit_are_named(kind, folder):
  state = drawn(kind)
  at = places(kind, 0)[0]
  # One row over twice the width, and what cannot stand behind one another.
  state[f"{at}.in_proj_qk.weight"] = np.zeros((2 * D + 1, D), np.float32)
  if kind == "gpt":
    state["transformer.dwa_modules.alphas.0"] = np.zeros((), np.float32)
  as_safetensors(state, folder)
  words = {"ltg": r"k_proj.weight \[33, 32\]", "gpt": "model.depth_weights"}
  with pytest.raises(UserError, match=words[kind]):
    import_.read(folder)


def test_a_head_that_is_not_tied_is_refused(kind, folder):
  state = drawn(kind)
  state["classifier.nonlinearity.5.weight"] += 1
  as_a_baseline(state, folder)
  with pytest.raises(UserError, match=r"lm_head.weight differs"):
    import_.read(folder)
