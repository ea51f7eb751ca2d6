"""Import of published LTG-BERT and GPT-BERT checkpoints.

Tensors have the names and layout of the published code (ltgoslo/ltg-bert,
babylm/train/model.py, and ltgoslo/gpt-bert, pretraining/model_extra.py).
Weights are random. This file converts them for the equations of test_ltg_bert.
"""

import argparse
import json
import types

import numpy as np
import pytest
import safetensors.numpy

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.hf import import_
from antlm_jax.inference.model import load
from antlm_jax.masks import AttentionMask
from tests import random_models
from tests.hub import import_error
from tests.test_ltg_bert import scores_by_definition

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
  """Returns the prefixes of a layer's attention and MLP."""
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
  """Returns a random state dict, with buffers and the tied tensor."""
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


def ours(state, kind):
  """Returns a state dict as our parameters."""
  state = {name: value.astype(np.float64) for name, value in state.items()}
  relative, head = "embedding.relative", "classifier.nonlinearity"
  out = {
    "embedding": state["embedding.word_embedding.weight"],
    "relative": state[f"{relative}_embedding"],
    "relative_norm/scale": state[f"{relative}_layer_norm.weight"],
    "relative_norm/bias": state[f"{relative}_layer_norm.bias"],
    "head/linear/kernel": state[f"{head}.1.weight"].T,
    "head/linear/bias": state[f"{head}.1.bias"],
    "head/bias": state[f"{head}.5.bias"],
  }
  layers = []
  for i in range(LAYERS):
    at, mlp = places(kind, i)
    up, gate = np.split(state[f"{mlp}.1.weight"], 2)
    layer = {"mlp/up/kernel": up.T, "mlp/gate/kernel": gate.T}
    layer["mlp/down/kernel"] = state[f"{mlp}.4.weight"].T
    values = ("v",) if kind == "ltg" else ("v", "gate")
    for theirs, names in (
      ("in_proj_qk", ("q", "k")),
      (f"in_proj_v{'g' * (kind == 'gpt')}", values),
      ("out_proj", ("out",)),
    ):
      kernels = np.split(state[f"{at}.{theirs}.weight"], len(names))
      biases = np.split(state[f"{at}.{theirs}.bias"], len(names))
      for name, kernel, bias in zip(names, kernels, biases, strict=True):
        layer[f"attention/{name}/kernel"] = kernel.T
        layer[f"attention/{name}/bias"] = bias
    if kind == "ltg":
      norm = f"{at}.post_layer_norm"
      layer["attention/out_norm/scale"] = state[f"{norm}.weight"]
      layer["attention/out_norm/bias"] = state[f"{norm}.bias"]
    layers.append(layer)
  for name in layers[0]:
    out[f"blocks/{name}"] = np.stack([layer[name] for layer in layers])
  if kind == "gpt":
    alphas = "transformer.dwa_modules.alphas"
    depth = [state[f"{alphas}.{i}"] for i in range(2 * LAYERS)]
    out["depth_weights"] = np.concatenate(depth)
  return out


def logits(state, kind, ids, causal):
  """Returns the logits of one row of tokens, `[T, V]`."""
  settings = types.SimpleNamespace(
    layers=LAYERS,
    heads=HEADS,
    head_dim=D // HEADS,
    position_buckets=8,
    longest_distance=24,
    norm_eps=1e-5,
    attention_gate=kind == "gpt",
    depth_weights=kind == "gpt",
  )
  seen = np.tri(T, dtype=bool) | (not causal)
  return scores_by_definition(ours(state, kind), settings, ids, seen)


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
  """A folder without weights."""
  path = tmp_path / "theirs"
  path.mkdir()
  (path / "config.json").write_text(json.dumps(CONFIG))
  (path / "tokenizer.json").write_text(tokenizer(kind))
  return path


def as_safetensors(state, path):
  del state["classifier.nonlinearity.5.weight"]  # tied
  safetensors.numpy.save_file(state, path / "model.safetensors")


def as_a_baseline(state, path):
  """Saves tensors under the names of BabyLM's GPT-BERT baselines."""
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
  """Saves a distributed model with the optimizer's state and arguments."""
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
  imported = import_.Imported(folder)
  loaded = load(import_.write_imported_run(imported, tmp_path / "run"))
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
  assert (loaded.config.curriculum, loaded.meta.boundary) == expected
  assert loaded.config.model.longest_distance == 24
  assert (loaded.tokenizer.bos_id, loaded.tokenizer.mask_id) == (1, 3)
  assert Tokenizer.load(tmp_path / "run/tokenizer.json").mask_id == 3
  noted = any("distances follow BabyLM's LTG-BERT" in n for n in imported.notes)
  assert noted == (kind == "ltg")


def test_a_distance_that_would_fill_the_memory_is_refused(kind, folder):
  as_safetensors(drawn(kind), folder)
  config = json.dumps(CONFIG | {"max_position_embeddings": 10**9})
  (folder / "config.json").write_text(config)
  assert "longest_distance=1000000000 is not" in import_error(folder)


def test_what_does_not_fit_is_named(kind, folder):
  state = drawn(kind)
  at = places(kind, 1)[0]
  del state[f"{at}.in_proj_qk.weight"]
  state["head.nonlinearity.1.bias"] = state.pop(f"{at}.out_proj.bias")
  as_safetensors(state, folder)
  line, inner = import_error(folder), at.removeprefix("transformer.")
  for name in ("in_proj_qk.weight", "out_proj.bias"):
    assert f"{inner}.{name}" in line
  assert "no place for head.nonlinearity.1.bias" in line


def test_parts_that_do_not_fit_are_named(kind, folder):
  state = drawn(kind)
  at = places(kind, 0)[0]
  # A row more than twice the width, and a scalar, which cannot be concatenated.
  state[f"{at}.in_proj_qk.weight"] = np.zeros((2 * D + 1, D), np.float32)
  if kind == "gpt":
    state["transformer.dwa_modules.alphas.0"] = np.zeros((), np.float32)
  as_safetensors(state, folder)
  words = {"ltg": "proj_qk.weight [65, 32]", "gpt": "dwa_modules.alphas"}
  assert words[kind] in import_error(folder)


def test_a_head_that_is_not_tied_is_refused(kind, folder):
  state = drawn(kind)
  state["classifier.nonlinearity.5.weight"] += 1
  as_a_baseline(state, folder)
  assert "nonlinearity.5.weight differs" in import_error(folder)
