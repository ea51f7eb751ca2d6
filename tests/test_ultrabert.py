"""UltraBERT's config.json, its names of tensors, its head and its classifiers.

test_imported compares the encoder with transformers.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from antlm_jax import models, predict
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning.classification import Classifier, LinearHead
from antlm_jax.evals.finetuning.multi_label import MultiLabelLinear
from antlm_jax.evals.finetuning.regression import LinearRegressor
from antlm_jax.hf import export, import_, weights
from antlm_jax.hf.architecture import NATIVE
from antlm_jax.inference.model import FineTuned, load, write_checkpoint
from tests import helpers, hub, random_models

# As in UltraBERT's own code, with a value for each layer.
PUBLISHED = {
  "attention_windows": [4, 4, 0, 4],
  "rope_theta": [10_000.0, 10_000.0, 2_560_000.0, 10_000.0],
}
NEW = "layer_types", "rope_parameters", "sliding_window"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  random_models.save(folder, random_models.tokenizer(), "ultrabert")
  return load(folder)


@pytest.fixture
def folder(loaded, tmp_path):
  """An export, as others write it."""
  (path,) = export.export_model(loaded, tmp_path / "hf", ["bidirectional"])
  (path / NATIVE).unlink()
  return path


@pytest.fixture
def read(folder):
  """Returns a function that changes an exported config.json and reads it."""
  config = json.loads((folder / "config.json").read_text())

  def changed(less=(), **fields):
    left = {k: v for k, v in config.items() if k not in less}
    (folder / "config.json").write_text(json.dumps(left | fields))
    return import_.Imported(folder)

  return changed


def test_both_forms_of_its_config_say_the_same(loaded, read):
  """Catches a window, a base or a default pattern read from the wrong field."""
  ours = loaded.config.model
  assert read().meta.config.model == ours
  assert read(NEW, **PUBLISHED).meta.config.model == ours
  by_default = read(NEW).meta.config.model
  assert by_default.windows == (129, 129, 0)
  assert by_default.rope_theta == 2_560_000.0
  assert by_default.window_rope_theta == 10_000.0
  linear = {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0}
  both = {"full_attention": linear}
  both["sliding_attention"] = {"rope_type": "default", "rope_theta": 3e4}
  found = read(rope_parameters=both).meta.config.model
  assert (found.rope_theta, found.rope_scaling) == (5e4, (8.0,))
  assert found.window_rope_theta == 3e4


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"sliding_window": -1}, "sliding_window is -1"),
    ({"layer_types": ["full_attention"]}, "layer_types is ['full"),
    ({"attention_windows": [4, 8, 0, 4]}, "attention_windows is [4, 8"),
    ({"attention_windows": 4}, "attention_windows is 4"),
    ({"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters is {"),
    ({"rope_parameters": None, "rope_theta": 5.0}, "rope_theta is 5.0"),
    (
      {"rope_parameters": None, "rope_theta": [1.0, 2.0, 3.0, 4.0]},
      "rope_theta is [1.0",
    ),
    (
      {
        "rope_parameters": {
          "sliding_attention": {"rope_type": "linear", "factor": 2.0}
        }
      },
      "rope_parameters.sliding_attention is",
    ),
  ],
)
def test_what_it_would_compute_differently_is_refused(read, fields, said):
  """Catches a model of other windows or bases that is read in silence."""
  with pytest.raises(UserError) as error:
    _ = read(**fields).meta
  assert said in str(error.value)


@pytest.mark.parametrize("head", [True, False])
def test_its_own_names_of_tensors_are_read(loaded, folder, head):
  """The files on the Hub have these names; AutoModel's lack the head."""
  file = folder / weights.SINGLE
  tensors = safetensors.numpy.load_file(file)
  theirs = {
    name.replace("model.", "ultrabert.").replace("head.decoder.", "cls."): x
    for name, x in tensors.items()
    if head or not name.startswith("head.")
  }
  assert set(theirs) != set(tensors)
  safetensors.numpy.save_file(theirs, file)
  again = dict(import_.Imported(folder).params)
  expected = {
    n: p for n, p in loaded.params.items() if head or "head/" not in n
  }
  assert helpers.equal(again, expected)


def test_what_transformers_has_not_is_not_exported(loaded, tmp_path):
  """Catches an export that transformers would compute otherwise."""
  shifted = random_models.with_curriculum(loaded, "24N")
  with pytest.raises(UserError, match=r"before it: train with M$"):
    export.export_model(shifted, tmp_path / "a")
  both = random_models.with_curriculum(loaded, "4C+4M")
  with pytest.raises(UserError, match="causal: export it as bidirectional"):
    export.export_model(both, tmp_path / "b")
  for windows, said in (((3, 5), "several widths"), ((), None)):
    settings = dataclasses.replace(loaded.config.model, windows=windows)
    other = dataclasses.replace(loaded, model=models.build_model(settings, 400))
    if said:
      with pytest.raises(UserError, match=said):
        export.export_model(other, tmp_path / "c", ["bidirectional"])
    else:
      export.export_model(other, tmp_path / "c", ["bidirectional"])
      (tmp_path / "c" / NATIVE).unlink()
      again = import_.Imported(tmp_path / "c").meta.config.model
      assert again.windows == ()


def test_its_head_is_two_layers_with_gelu(loaded):
  """Catches another GELU or an activation too few, without transformers."""

  def gelu(x):
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))

  params = {name: np.asarray(value) for name, value in loaded.params.items()}
  hidden = np.random.default_rng(0).normal(size=(3, 32))
  inner = gelu(hidden @ params["head/up/kernel"])
  states = gelu(inner @ params["head/down/kernel"])
  expected = states @ params["head/kernel"]
  found = loaded.model.logits(loaded.params, hidden.astype(np.float32))
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


HEADS = {
  "linear": LinearHead(("a", "b", "c"), "first"),
  "multi_label_linear": MultiLabelLinear(("a", "b", "c"), "mean"),
  "linear_regressor": LinearRegressor(("x",), "mean", mean=2.5, deviation=40.0),
  "classifier": Classifier(("a", "b"), "mean", norms=False),
}


def tuned(loaded, folder, kind):
  """Returns the model with a random head."""
  head = HEADS[kind]
  own = head.init(jax.random.key(0), loaded.model.config.width)
  task = FineTuned("own", "bidirectional", head.kind, head.settings, own)
  return load(write_checkpoint(folder, 7, loaded.params, loaded.meta, task))


def test_only_its_own_head_is_exported(loaded, tmp_path):
  """Catches a deeper head whose layers transformers would not have."""
  with pytest.raises(UserError, match=r"UltraBERT has no head.*head=linear"):
    export.export_model(
      tuned(loaded, tmp_path / "run", "classifier"), tmp_path / "hf"
    )


def marked(test):
  for mark in hub.MARKS:
    test = mark(test)
  return test


@marked
@pytest.mark.parametrize("kind", [k for k in HEADS if k != "classifier"])
def test_transformers_classifies_as_we_do(loaded, kind, tmp_path):
  """Catches another pooling, a bias or a scale in the exported head."""
  transformers = pytest.importorskip("transformers")
  model = tuned(loaded, tmp_path / "run", kind)
  (path,) = export.export_model(model, tmp_path / "hf")
  pipeline = transformers.pipeline(
    "text-classification", model=str(path), top_k=None
  )
  texts = ["the dogs rest .", "a cat near the hills", "Ann sat ."]
  found, every = predict(model, texts, quiet=True), []
  for one, theirs in zip(found, pipeline(texts), strict=True):
    ours = one.probabilities or {"x": one.value}
    scores = {each["label"]: each["score"] for each in theirs}
    assert scores == pytest.approx(ours, rel=1e-4, abs=1e-5)
    every.append([*ours.values()])
  assert np.ptp(every, axis=0).min() > 1e-3  # the texts differ
