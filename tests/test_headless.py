"""Folders with an encoder alone, as AutoModel and sentence-transformers save.

They have no output layer: vectors need none, training makes one, and scores and
masks are refused.
"""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from antlm_jax import embed, fill, generate, models, prepare, score, train
from antlm_jax.commands import import_ as import_command
from antlm_jax.data import toy_english
from antlm_jax.hf import export, import_
from antlm_jax.hf import weights as folders
from antlm_jax.hf.architecture import EXPORT_RECORD
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference.model import load
from tests import helpers, random_models, runs
from tests.hub import import_error

# Encoders with an output layer of their own, and the attention they export.
ENCODERS = {
  name: ({}, "bidirectional")
  for name in random_models.SHAPES
  if name != "gemma"
} | {
  "llama": ({"tied": False}, "causal"),
  "bert, untied": ({"encoder": "bert", "tied": False}, "bidirectional"),
}
TEXTS = ["the dogs sleep", "it rains in the old town"]


def alone(path, prefix: str) -> None:
  """Turns an exported folder into that of an encoder alone."""
  (path / EXPORT_RECORD).unlink()
  file = path / folders.SINGLE
  tensors = safetensors.numpy.load_file(file)
  bare = {
    name.removeprefix(prefix): np.ascontiguousarray(tensor)
    for name, tensor in tensors.items()
    if name.startswith(prefix)
  }
  assert len(bare) < len(tensors)
  safetensors.numpy.save_file(bare, file)


@pytest.fixture(scope="module", params=ENCODERS)
def both(request, tmp_path_factory):
  """A whole model, and the same imported without its output layer."""
  changes, form = ENCODERS[request.param]
  folder = tmp_path_factory.mktemp("headless")
  changes = {"encoder": request.param} | changes
  random_models.save(folder / "whole", random_models.tokenizer(), **changes)
  whole = load(folder / "whole")
  (path,) = export.export_model(whole, folder / "hf", [form])
  target = export.target_of(whole, form)
  names = ARCHITECTURES[whole.config.model.name].names(target)
  prefix = names["embedding"].partition(".")[0] + "."
  alone(path, prefix)
  import_command.import_model(path, folder / "run", boundary="bos_eos")
  return whole, load(folder / "run"), path


@pytest.mark.sample(2, 2)
def test_an_encoder_alone_is_read(both):
  """Catches a folder of AutoModel that import refuses, or reads wrongly."""
  whole, found, path = both
  assert found.headless and not whole.headless
  assert "has no output layer" in " ".join(import_.Imported(path).notes)
  shared = {n: p for n, p in whole.params.items() if not n.startswith("head/")}
  assert helpers.equal(dict(found.params), shared)
  vectors = [
    embed(model, TEXTS, attention="bidirectional") for model in (found, whole)
  ]
  np.testing.assert_array_equal(*vectors)


@pytest.mark.sample(2, 2)
def test_what_needs_an_output_layer_is_refused(both):
  """Catches scores by an output layer that nobody trained."""
  _, found, _ = both
  if found.config.curriculum == "1C":
    calls = [
      lambda: score(found, TEXTS, "causal"),
      lambda: generate(found, "the", tokens=2),
    ]
  else:
    calls = [
      lambda: score(found, TEXTS, "mlm"),
      lambda: fill(found, ["the <mask> sleep"]),
    ]
  for call in calls:
    assert "no output layer" in runs.told(call)


@pytest.fixture(scope="module")
def data(both):
  return prepare(
    toy_english.make_sentences(0, 300),
    tokenizer=both[1].tokenizer,
    boundary="bos_eos",
    seq_len=32,
  )


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("of_run", [False, True])
def test_training_makes_the_output_layer(both, of_run, data, tmp_path):
  """Catches a start that fails, or takes another encoder or output layer."""
  _, bare, path = both
  if of_run and bare.config.curriculum != "1C":
    pytest.skip("one start from a run is enough")
  made = train(
    f"continued:model={bare.path if of_run else path}",
    tmp_path,
    data,
    curriculum=bare.config.curriculum.replace("1", "2"),
    batch_size=4,
    peak_lr=0.0,
    quiet=True,
    **{"eval.rows": 8},
  ).load()
  new = jax.jit(bare.model.init)(made.config.seed)
  _, head = models.divided(new)
  assert helpers.equal(dict(made.params), {**bare.params, **head})
  mode = "causal" if "C" in made.config.curriculum else "mlm"
  assert not made.headless and np.isfinite(score(made, TEXTS, mode)).all()


@pytest.mark.sample(2, 2)
def test_it_goes_out_as_it_came(both, tmp_path):
  """Catches an export that invents an output layer, or loses a tensor."""
  _, found, path = both
  form = export.trained_attentions(found)[0]
  (out,) = export.export_model(found, tmp_path / "hf", [form])
  old, new = (
    safetensors.numpy.load_file(folder / folders.SINGLE)
    for folder in (path, out)
  )
  assert {n.partition(".")[2]: t.tobytes() for n, t in new.items()} == {
    n: t.tobytes() for n, t in old.items()
  }
  config = json.loads((out / "config.json").read_text())
  target = export.target_of(found, form)
  assert config["architectures"] == [target.classes["AutoModel"]]
  assert "AutoModel.from_pretrained" in (out / "README.md").read_text()
  again = import_.Imported(out)
  assert again.lacks_head(found.model.shapes) and helpers.equal(
    again.params, dict(found.params)
  )


def test_half_an_output_layer_is_refused(tmp_path):
  """Catches a damaged folder that is read as an encoder alone."""
  run = random_models.save(tmp_path / "run", random_models.tokenizer(), "bert")
  (path,) = export.export_model(load(run), tmp_path / "hf", ["bidirectional"])
  (path / EXPORT_RECORD).unlink()
  tensors = safetensors.numpy.load_file(path / folders.SINGLE)
  del tensors["cls.predictions.bias"]
  safetensors.numpy.save_file(tensors, path / folders.SINGLE)
  assert "weights are missing: cls" in import_error(path)
