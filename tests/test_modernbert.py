"""ModernBERT's config.json of transformers 4 and 5, and its first layer.

test_imported compares the encoder with transformers.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest

from antlm_jax import config, models
from antlm_jax.errors import UserError
from antlm_jax.hf import export, import_
from antlm_jax.hf.architecture import NATIVE
from antlm_jax.inference.model import load
from antlm_jax.masks import BIDIRECTIONAL
from tests import helpers, random_models

# The fields of ModernBERT-base that do not describe its shape
PUBLISHED = {
  "global_attn_every_n_layers": 3,
  "global_rope_theta": 160000.0,
  "local_attention": 8,
  "local_rope_theta": 10000.0,
  "hidden_activation": "gelu",
  "classifier_pooling": "mean",
  "position_embedding_type": "absolute",
  "reference_compile": None,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  random_models.save(folder, random_models.tokenizer(), "modernbert", layers=4)
  return load(folder)


@pytest.fixture
def read(loaded, tmp_path):
  """Returns a function that changes an exported config.json and reads it."""
  (path,) = export.export_model(loaded, tmp_path / "hf", ["bidirectional"])
  (path / NATIVE).unlink()
  config = json.loads((path / "config.json").read_text())

  def changed(less=(), **fields):
    left = {k: v for k, v in config.items() if k not in less}
    (path / "config.json").write_text(json.dumps(left | fields))
    return import_.Imported(path).meta

  return changed


def test_both_forms_of_its_config_say_the_same(loaded, read):
  new = ("layer_types", "rope_parameters", "is_causal")
  found = read(new, **PUBLISHED).config.model
  assert found == read().config.model == loaded.config.model
  older = read(new, **PUBLISHED | {"local_rope_theta": None})
  assert older.config.model.window_rope_theta == 160000.0
  kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
  assert read(layer_types=kinds).config.model.windows == (0, 0, 5, 5)


@pytest.mark.parametrize(
  ("fields", "said"),
  [
    ({"norm_bias": True}, "norm_bias is True"),
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ({"embedding_dropout": 0.1}, "embedding_dropout is 0.1"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is"),
    ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "yarn"),
    ({"rope_parameters": 3}, "rope_parameters is 3"),
    ({"layer_types": ["full_attention"]}, "layer_types is ['full"),
    ({"layer_types": 3}, "layer_types is 3"),
    ({"local_attention": -1}, "local_attention is -1"),
    ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776"),
  ],
)
def test_what_it_would_compute_differently_is_refused(read, fields, said):
  with pytest.raises(UserError) as error:
    read(**fields)
  assert said in str(error.value)


def test_what_transformers_has_not_is_not_exported(loaded, tmp_path):
  shifted = random_models.with_curriculum(loaded, "24N")
  with pytest.raises(UserError, match="export it as causal"):
    export.export_model(shifted, tmp_path / "a")
  assert export.export_model(shifted, tmp_path / "b", ["causal"])
  other = models.build_model(
    dataclasses.replace(loaded.config.model, windows=(3, 5)), 400
  )
  with pytest.raises(UserError, match="windows of several widths"):
    export.export_model(
      dataclasses.replace(loaded, model=other), tmp_path / "c"
    )


def test_the_first_layer_has_no_norm_of_its_own(loaded):
  of = models.build_model(
    dataclasses.replace(loaded.config.model, scan_layers="yes"), 400
  )
  tokens = helpers.tokens(1, 12)
  positions = np.arange(12)[None]

  def total(params):
    hidden = of.encode(params, tokens, positions, BIDIRECTIONAL)
    return (hidden**2)[..., :3].sum()

  grads = jax.grad(total)(helpers.random_params(of))
  norms = np.abs(grads["blocks/attention_norm/scale"]).max(axis=1)
  assert norms[0] == 0 and (norms[1:] > 0).all()


@pytest.mark.parametrize(
  "size, count", [("17M", 16_913_600), ("150M", 149_655_232)]
)
def test_sizes_have_as_many_parameters_as_transformers(size, count):
  """Catches a wrong shape in the config. Our first norm is not in theirs."""
  made = config.load_config(f"modernbert:size={size}").model
  assert models.build_model(made, 50_368).size == count + made.width
