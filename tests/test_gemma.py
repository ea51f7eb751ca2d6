"""Gemma 3's config.json as transformers 4 and 5 write it.

test_llama has its equations, test_imported its weights and texts.
"""

import pathlib

import pytest

from antlm_jax.errors import UserError
from antlm_jax.hf import config
from antlm_jax.hf.gemma import GEMMA
from tests import helpers

HERE = pathlib.Path("config.json")
SHAPE = {
  "name": "gemma",
  "layers": 5,
  "windows": (9, 0),
  "rope_scaling": (8.0,),
  "window_rope_theta": 5e3,
}


def written(form, **changes):
  """Returns the fields of a model's config.json."""
  model = helpers.model(**SHAPE | changes)
  target = GEMMA.target(model.config, form, 0)
  return config.make_config_json(
    model, {"mask": None}, GEMMA, target, "float32"
  )


def read(fields):
  return config.describe(HERE, fields)


@pytest.mark.parametrize("form", ["causal", "bidirectional"])
def test_a_window_reads_back_the_same_both_ways(form):
  fields = written(form)
  # Bidirectional attention of transformers uses sliding_window / 2 + 1.
  assert fields["sliding_window"] == {"causal": 9, "bidirectional": 16}[form]
  described = read(fields)
  assert described.settings["windows"] == (9, 0)
  assert described.objective == {"causal": "C", "bidirectional": "M"}[form]


def test_transformers_4_says_the_same_in_other_fields():
  new = written("causal")
  old = new | {"sliding_window_pattern": 2}
  del old["layer_types"], old["rope_parameters"]
  del new["rope_theta"], new["rope_local_base_freq"], new["rope_scaling"]
  assert read(old) == read(new)
  assert read(new).settings["rope_scaling"] == (8.0,)
  assert read(new).settings["window_rope_theta"] == 5e3


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    ({"layer_types": ["full_attention"]}, "layer_types is"),
    ({"layer_types": ["chunked_attention"] * 5}, "layer_types is"),
    ({"sliding_window": -1}, "sliding_window is -1"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ({"rope_parameters": {"full_attention": 3}}, "rope_parameters is"),
    (
      {"rope_parameters": {"sliding_attention": {"rope_type": "dynamic"}}},
      "sliding_attention.rope_type is 'dynamic'",
    ),
    ({"query_pre_attn_scalar": 0.5}, "query_pre_attn_scalar=0.5 is not"),
  ],
)
def test_what_ours_would_compute_differently_is_refused(changes, said):
  with pytest.raises(UserError) as error:
    read(written("causal") | changes)
  assert said in str(error.value)


@pytest.mark.parametrize(
  ("changes", "said"),
  [
    ({"windows": (9, 5)}, r"windows of several widths: model.windows=\(9, 5\)"),
    ({"qk_norm": False}, "no gemma3_text with model.qk_norm=False"),
    ({"qkv_bias": True}, "no gemma3_text with model.qkv_bias=True"),
  ],
)
def test_what_transformers_lacks_is_not_exported(changes, said):
  with pytest.raises(UserError, match=said):
    written("causal", **changes)
