"""UltraBERT's names of tensors, its head and its classifiers.

test_imported compares the encoder with transformers.
"""

import numpy as np
import pytest
import safetensors.numpy

from antlm_jax import predict
from antlm_jax.evals.finetuning.classification import Classifier, LinearHead
from antlm_jax.evals.finetuning.multi_label import MultiLabelLinear
from antlm_jax.evals.finetuning.regression import LinearRegressor
from antlm_jax.hf import export, import_, weights
from antlm_jax.hf.architecture import EXPORT_RECORD
from tests import helpers, hub, random_models, runs
from tests.reference import gelu_tanh

run = random_models.run(encoder="ultrabert")


@pytest.fixture
def folder(loaded, tmp_path):
  """An export, as others write it."""
  (path,) = export.export_model(loaded, tmp_path / "hf", ["bidirectional"])
  (path / EXPORT_RECORD).unlink()
  return path


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


def test_its_head_is_two_layers_with_gelu(loaded):
  """Catches another GELU or an activation too few, without transformers."""
  params = {name: np.asarray(value) for name, value in loaded.params.items()}
  hidden = np.random.default_rng(0).normal(size=(3, 32))
  inner = gelu_tanh(hidden @ params["head/up/kernel"])
  states = gelu_tanh(inner @ params["head/down/kernel"])
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
  return random_models.saved(
    random_models.with_head(loaded, HEADS[kind]), folder
  )


def test_only_its_own_head_is_exported(loaded, tmp_path):
  """Catches a deeper head whose layers transformers would not have."""
  runs.refusal(
    r"UltraBERT has no head.*head=linear",
    lambda: export.export_model(
      tuned(loaded, tmp_path / "run", "classifier"), tmp_path / "hf"
    ),
  )


@hub.opens
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
