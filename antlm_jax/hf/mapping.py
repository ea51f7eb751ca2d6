"""What our encoders are called in transformers: one table, both directions.

An `Architecture` pairs the settings and parameters of an encoder of ours with
those of a model there. Export reads it from left to right, import from right to
left. A name with `{}` is numbered by layer: there the layers' parameters stand
one by one, here stacked. Kernels are `[in, out]` here and `[out, in]` there.
"""

import dataclasses
from collections.abc import Mapping

FORMS = ("causal", "bidirectional")


@dataclasses.dataclass(frozen=True)
class Form:
  """A way of reading the same weights, as a model of transformers.

  Attributes:
    model_type: Its config's.
    classes: What opens it, by auto class; the first one is its own.
    settings: What else its config says.
  """

  model_type: str
  classes: Mapping[str, str]
  settings: Mapping[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Architecture:
  """An encoder of ours in transformers.

  Attributes:
    settings: Our settings and those of its config.json.
    weights: Our parameters and its tensors.
    forms: By name, one of `FORMS`.
    code: Python files that its folder brings along, in `antlm_jax/hf/remote`.
  """

  settings: Mapping[str, str]
  weights: Mapping[str, str]
  forms: Mapping[str, Form]
  code: tuple[str, ...] = ()


_SETTINGS = {
  "vocab_size": "vocab_size",
  "width": "hidden_size",
  "layers": "num_hidden_layers",
  "heads": "num_attention_heads",
  "mlp_width": "intermediate_size",
  "max_seq_len": "max_position_embeddings",
  "init_std": "initializer_range",
}
# What the llama encoder computes, and so must any Llama that is read.
LLAMA_COMPUTES = {
  "hidden_act": "silu",
  "attention_bias": False,
  "mlp_bias": False,
}

LLAMA = Architecture(
  settings={
    **_SETTINGS,
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "norm_eps": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "rope_theta": "rope_theta",
    "tied": "tie_word_embeddings",
  },
  weights={
    "embedding": "model.embed_tokens.weight",
    "blocks/attention_norm/scale": "model.layers.{}.input_layernorm.weight",
    "blocks/attention/q/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "blocks/attention/k/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "blocks/attention/v/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "blocks/attention/out/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "blocks/mlp_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "blocks/mlp/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "blocks/mlp/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "blocks/mlp/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "norm/scale": "model.norm.weight",
    "head/kernel": "lm_head.weight",
  },
  forms={
    "causal": Form(
      "llama",
      {
        "AutoModelForCausalLM": "LlamaForCausalLM",
        "AutoModel": "LlamaModel",
      },
      LLAMA_COMPUTES | {"use_cache": True},
    ),
    # Llama with bidirectional attention, under the same names of everything.
    "bidirectional": Form(
      "eurobert",
      {
        "AutoModelForMaskedLM": "EuroBertForMaskedLM",
        "AutoModelForSequenceClassification": (
          "EuroBertForSequenceClassification"
        ),
        "AutoModelForTokenClassification": "EuroBertForTokenClassification",
        "AutoModel": "EuroBertModel",
      },
      LLAMA_COMPUTES | {"classifier_pooling": "mean"},
    ),
  },
)

_LTG_BERT_CLASSES = {
  "AutoModelForCausalLM": "LtgBertForCausalLM",
  "AutoModelForMaskedLM": "LtgBertForMaskedLM",
  "AutoModelForSequenceClassification": "LtgBertForSequenceClassification",
  "AutoModelForTokenClassification": "LtgBertForTokenClassification",
  "AutoModel": "LtgBertModel",
}
_LTG_BERT_SETTINGS = {
  "tie_word_embeddings": True,
  "auto_map": {
    "AutoConfig": "configuration_ltg_bert.LtgBertConfig",
    **{a: f"modeling_ltg_bert.{c}" for a, c in _LTG_BERT_CLASSES.items()},
  },
}

LTG_BERT = Architecture(
  settings={
    **_SETTINGS,
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "position_buckets": "position_buckets",
    "longest_distance": "longest_distance",
    "attention_gate": "attention_gate",
    "depth_weights": "depth_weights",
  },
  weights={
    "embedding": "model.embed_tokens.weight",
    "relative": "model.relative_embedding.weight",
    "relative_norm/scale": "model.relative_norm.weight",
    "relative_norm/bias": "model.relative_norm.bias",
    **{
      f"blocks/attention/{ours}/{part}": (
        f"model.layers.{{}}.self_attn.{theirs}_proj.{of_torch}"
      )
      for ours, theirs in (
        *(("q", "q"), ("k", "k"), ("v", "v")),
        *(("gate", "g"), ("out", "o")),
      )
      for part, of_torch in (("kernel", "weight"), ("bias", "bias"))
    },
    "blocks/attention/out_norm/scale": (
      "model.layers.{}.self_attn.out_norm.weight"
    ),
    "blocks/attention/out_norm/bias": (
      "model.layers.{}.self_attn.out_norm.bias"
    ),
    "blocks/mlp/gate/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "blocks/mlp/up/kernel": "model.layers.{}.mlp.up_proj.weight",
    "blocks/mlp/down/kernel": "model.layers.{}.mlp.down_proj.weight",
    "depth_weights": "model.depth_weights",
    "head/linear/kernel": "lm_head.dense.weight",
    "head/linear/bias": "lm_head.dense.bias",
    "head/bias": "lm_head.bias",
  },
  forms={
    "causal": Form(
      "ltg_bert", _LTG_BERT_CLASSES, _LTG_BERT_SETTINGS | {"is_decoder": True}
    ),
    "bidirectional": Form(
      "ltg_bert",
      {"AutoModelForMaskedLM": "LtgBertForMaskedLM", **_LTG_BERT_CLASSES},
      _LTG_BERT_SETTINGS | {"is_decoder": False},
    ),
  },
  code=("configuration_ltg_bert.py", "modeling_ltg_bert.py"),
)

ARCHITECTURES = {"llama": LLAMA, "ltg_bert": LTG_BERT}  # by encoder of ours
