"""config.json of BERT, Gemma 3, ModernBERT and UltraBERT, in all its forms.

test_imported compares the models with transformers.
"""

import pathlib

import pytest

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.hf import config
from antlm_jax.hf.mapping import ARCHITECTURES
from tests import runs

SHAPE = {"width": 32, "heads": 4, "mlp_width": 48, "max_seq_len": 64}
FAMILIES = {
  "bert": {"layers": 2, "max_seq_len": 30},
  "gemma": {
    "layers": 5,
    "kv_heads": 2,
    "windows": (9, 0),
    "rope_scaling": (8.0,),
    "window_rope_theta": 5e3,
  },
  "modernbert": {"layers": 4, "windows": (0, 5, 5)},
  "ultrabert": {
    "layers": 4,
    "kv_heads": 1,
    "windows": (5, 5, 0),
    "head_mlp_width": 24,
  },
}
ROBERTA = {"first_position": 2, "token_types": 1, "tied": False}


def written(name, form="bidirectional", mask_shift=0, **changes) -> dict:
  """Returns the fields of an exported model's config.json."""
  settings = {"name": name, **SHAPE, **FAMILIES[name], **changes}
  model = models.build_model(settings, 400)
  target = ARCHITECTURES[name].target(model.config, form, mask_shift)
  pad = max(0, getattr(model.config, "first_position", 0) - 1)
  special = {"mask": None, "bos": 1, "eos": 2, "pad": pad}
  return config.make_config_json(model, special, target, "float32")


def described(fields, **changes) -> config.ModelDescription:
  return config.describe(pathlib.Path("config.json"), fields | changes)


def read(fields, **changes) -> models.EncoderConfig:
  """Returns the encoder's settings that a config.json describes."""
  meaning = described(fields, **changes)
  settings = {"name": meaning.encoder, **meaning.settings}
  return models.build_model(settings, meaning.embedding_rows).config


@pytest.mark.parametrize("form", ["causal", "bidirectional"])
@pytest.mark.parametrize(
  "name, changes",
  [(name, {}) for name in FAMILIES]
  + [("bert", ROBERTA), ("ultrabert", {"windows": ()})],
  ids=str,
)
def test_a_config_reads_back_the_same(name, changes, form):
  """Catches a window, a base or a number of positions off by some."""
  if (name, form) == ("ultrabert", "causal"):
    runs.refusal("causal: export it as bidirectional", written, name, form)
    return
  fields = written(name, form, **changes)
  settings = {**SHAPE, **FAMILIES[name], **changes}
  encoder = read(fields)
  assert {key: getattr(encoder, key) for key in settings} == settings
  objective = {"causal": "C", "bidirectional": "M"}[form]
  assert described(fields).objective == objective


def test_numbers_that_transformers_counts_in_another_way():
  """Catches two errors of ours that would cancel in reading back."""
  bert, roberta = written("bert"), written("bert", **ROBERTA)
  assert (bert["model_type"], bert["max_position_embeddings"]) == ("bert", 30)
  assert roberta["model_type"] == "roberta"
  assert roberta["max_position_embeddings"] == 32
  assert roberta["pad_token_id"] == 1
  xlm = described({"model_type": "xlm-roberta", "vocab_size": 9}).settings
  assert (xlm["first_position"], xlm["max_seq_len"]) == (2, 510)
  # Bidirectional attention of transformers uses sliding_window / 2 + 1.
  assert written("gemma", "causal")["sliding_window"] == 9
  assert written("gemma")["sliding_window"] == 16


MISTRAL = {
  "model_type": "mistral",
  "vocab_size": 400,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 2,
  "num_attention_heads": 8,
  "sliding_window": 8,
}


@pytest.mark.parametrize(
  ("fields", "windows"),
  [
    (MISTRAL, (9,)),
    (written("gemma", "causal"), (10, 0)),
    (written("modernbert", "causal"), (0, 6, 6)),
    (written("bert", "causal"), ()),
  ],
)
def test_a_causal_model_that_reads_both_ways(fields, windows):
  """Catches an ignored is_causal, and windows that end a token too early.

  transformers 5.24 computes these.
  """
  assert described(fields).objective == "C"
  assert described(fields, is_causal=False).objective == "M"
  assert read(fields, is_causal=False).windows == windows


def test_fields_that_a_model_does_not_read():
  """Catches Qwen2's field that drops Mistral's window, and a KeyError for a
  base that only rope_parameters has."""
  assert read(MISTRAL, use_sliding_window=False).windows == (8,)
  base = {"rope_theta": None, "rope_parameters": {"rope_theta": 5.0}}
  assert read(MISTRAL, **base).rope_theta == 5.0
  gemma = written("gemma", "causal")
  bases = {"rope_theta": None, "rope_local_base_freq": None}
  assert read(gemma, **bases) == read(gemma)


def without(fields, *names) -> dict:
  return {name: value for name, value in fields.items() if name not in names}


NEW = "layer_types", "rope_parameters"


def test_gemma_of_transformers_4_says_the_same():
  new = without(
    written("gemma", "causal"),
    *("rope_theta", "rope_local_base_freq", "rope_scaling"),
  )
  old = without(written("gemma", "causal"), *NEW)
  assert read(old, sliding_window_pattern=2) == read(new)
  assert read(new).rope_scaling == (8.0,)
  assert read(new).window_rope_theta == 5e3


def test_modernbert_of_transformers_4_says_the_same():
  new = written("modernbert")
  old = without(new, *NEW, "is_causal") | {
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_attention": 8,
    "local_rope_theta": 10000.0,
    "hidden_activation": "gelu",
    "classifier_pooling": "mean",
    "position_embedding_type": "absolute",
    "reference_compile": None,
  }
  assert read(old) == read(new)
  assert read(old, local_rope_theta=None).window_rope_theta == 160000.0
  kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
  assert read(new, layer_types=kinds).windows == (0, 0, 5, 5)


@pytest.mark.parametrize(
  ("windows", "form", "period", "since"),
  [
    ((0, 5, 5), "bidirectional", 3, "4.48"),
    ((0, 5), "bidirectional", 2, "4.48"),
    ((), "bidirectional", 1, "4.48"),
    ((0, 5, 5, 5), "bidirectional", 4, "4.48"),
    ((5, 0), "bidirectional", None, "5.3"),
    ((0, 0, 5, 5), "bidirectional", None, "5.3"),
    ((5,), "bidirectional", None, "5.3"),
    ((0, 5, 5), "causal", None, "5.0"),  # one RoPE base in version 4
  ],
)
def test_older_versions_compute_a_modernbert_or_refuse(
  windows, form, period, since
):
  """Catches a folder in which an older version computes other logits."""
  architecture = ARCHITECTURES["modernbert"]
  settings = {"name": "modernbert", **SHAPE, "layers": 4, "windows": windows}
  encoder = models.build_model(settings, 400).config
  target = architecture.target(encoder, form, 0)
  assert architecture.since(encoder, target) == since
  fields = written("modernbert", form, windows=windows)
  assert fields["global_attn_every_n_layers"] == period
  assert (fields["global_rope_theta"] is None) == (period is None)
  # Text Embeddings Inference has no default for it.
  assert fields["initializer_cutoff_factor"] == 2.0
  if period:
    old = without(fields, *NEW)
    assert read(old) == read(fields)


def test_ultrabert_of_its_own_code_says_the_same():
  """Catches a window, a base or a default pattern read from the wrong field."""
  new = written("ultrabert")
  bare = without(new, *NEW, "sliding_window")
  old = bare | {
    "attention_windows": [4, 4, 0, 4],
    "rope_theta": [10_000.0, 10_000.0, 2_560_000.0, 10_000.0],
  }
  assert read(old) == read(new)
  default = read(bare)
  assert default.windows == (129, 129, 0)
  assert default.rope_theta == 2_560_000.0
  assert default.window_rope_theta == 10_000.0
  both = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
  }
  scaled = read(new, rope_parameters=both)
  assert (scaled.rope_theta, scaled.rope_scaling) == (5e4, (8.0,))
  assert scaled.window_rope_theta == 3e4


def rope(kind="full_attention", **parameters) -> dict:
  return {"rope_parameters": {kind: parameters}}


FEW = {"layer_types": ["full_attention"]}
REFUSED = {  # changed fields, and the beginning of the reason
  "bert": [
    ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
    ({"position_embedding_type": "relative_key"}, "position_embedding_type is"),
    ({"add_cross_attention": True}, "add_cross_attention is True"),
    ({"pad_token_id": -5, "model_type": "roberta"}, "pad_token_id is -5"),
    (
      {"model_type": "roberta", "max_position_embeddings": 1},
      "max_position_embeddings is 1",
    ),
    ({"model_type": "distilbert"}, "model_type='distilbert' is not one of"),
    ({"is_causal": True}, "is_causal is True"),
  ],
  "gemma": [
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    ({"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
    (FEW, "layer_types is"),
    ({"layer_types": ["chunked_attention"] * 5}, "layer_types is"),
    ({"sliding_window": -1}, "sliding_window is -1"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ({"rope_parameters": {"full_attention": 3}}, "rope_parameters is"),
    (
      rope("sliding_attention", rope_type="dynamic"),
      "sliding_attention.rope_type is 'dynamic'",
    ),
    ({"query_pre_attn_scalar": 0.5}, "query_pre_attn_scalar=0.5 is not"),
    ({"is_causal": None}, "is_causal is None"),
    (
      {"rope_parameters": {}, "rope_local_base_freq": None},
      "rope_local_base_freq is missing",
    ),
  ],
  "modernbert": [
    ({"norm_bias": True}, "norm_bias is True"),
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ({"embedding_dropout": 0.1}, "embedding_dropout is 0.1"),
    ({"embedding_dropout": None}, "embedding_dropout is None"),
    ({"is_causal": True}, "is_causal is True"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is"),
    (rope(rope_type="yarn"), "yarn"),
    ({"rope_parameters": 3}, "rope_parameters is 3"),
    (FEW, "layer_types is ['full"),
    ({"layer_types": 3}, "layer_types is 3"),
    ({"local_attention": -1}, "local_attention is -1"),
    ({"num_hidden_layers": 2**40}, "num_hidden_layers is 1099511627776"),
  ],
  "ultrabert": [
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"is_causal": True}, "is_causal is True"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"sliding_window": -1}, "sliding_window is -1"),
    (FEW, "layer_types is ['full"),
    ({"attention_windows": [4, 8, 0, 4]}, "attention_windows is [4, 8"),
    ({"attention_windows": 4}, "attention_windows is 4"),
    ({"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters is {"),
    ({"rope_parameters": None, "rope_theta": 5.0}, "rope_theta is 5.0"),
    (
      {"rope_parameters": None, "rope_theta": [1.0, 2.0, 3.0, 4.0]},
      "rope_theta is [1.0",
    ),
    (
      rope("sliding_attention", rope_type="linear", factor=2.0),
      "rope_parameters.sliding_attention is",
    ),
  ],
}


@pytest.mark.parametrize(
  "name, changes, reason",
  [(name, *case) for name, cases in REFUSED.items() for case in cases],
)
def test_what_ours_would_compute_differently_is_refused(name, changes, reason):
  """Catches a model that is read in silence with other windows or bases."""
  form = "causal" if name == "gemma" else "bidirectional"
  with pytest.raises(UserError) as error:
    read(written(name, form), **changes)
  assert reason in str(error.value)


WIDTHS = "windows of several widths"


@pytest.mark.parametrize(
  "name, form, mask_shift, changes, reason",
  [
    ("bert", "bidirectional", 1, {}, "predicts a mask one position before it"),
    ("modernbert", "bidirectional", 1, {}, "export it as causal"),
    ("ultrabert", "bidirectional", 1, {}, r"before it: train with M$"),
    ("modernbert", "bidirectional", 0, {"windows": (3, 5)}, WIDTHS),
    ("ultrabert", "bidirectional", 0, {"windows": (3, 5)}, WIDTHS),
    ("gemma", "causal", 0, {"windows": (9, 5)}, WIDTHS),
    ("gemma", "causal", 0, {"qk_norm": False}, "text with model.qk_norm"),
    ("gemma", "causal", 0, {"qkv_bias": True}, "text with model.qkv_bias"),
  ],
)
def test_what_transformers_lacks_is_not_exported(
  name, form, mask_shift, changes, reason
):
  """Catches an export that transformers would compute otherwise."""
  runs.refusal(reason, written, name, form, mask_shift, **changes)
  assert mask_shift == 0 or written("modernbert", "causal", mask_shift)
