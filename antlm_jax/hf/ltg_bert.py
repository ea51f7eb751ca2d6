"""The ltg_bert encoder in transformers: a model with code in its folder."""

from antlm_jax.hf.architecture import (
  SETTINGS,
  Architecture,
  Target,
  auto_classes,
  tensor_names,
)

_LAYER = "model.layers.{}"
_TASKS = "SequenceClassification", "TokenClassification"
_CLASSES = auto_classes("LtgBert", "CausalLM", "MaskedLM", *_TASKS)
_SETTINGS = {
  "tie_word_embeddings": True,
  "auto_map": {
    "AutoConfig": "configuration_ltg_bert.LtgBertConfig",
    **{a: f"modeling_ltg_bert.{c}" for a, c in _CLASSES.items()},
  },
}


def _ltg_bert_target(masked: bool, classes: dict[str, str]) -> Target:
  return Target(
    "ltg_bert",
    classes,
    since="4.46",
    settings=_SETTINGS | {"is_decoder": not masked},
    code=(
      "configuration_ltg_bert.py",
      "modeling_ltg_bert.py",
      "masked_prediction.py",
    ),
  )


LTG_BERT = Architecture(
  paper="https://arxiv.org/abs/2303.09859",
  settings={
    **SETTINGS,
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
    **tensor_names(
      {
        "relative_norm": "model.relative_norm",
        "blocks/attention/q": f"{_LAYER}.self_attn.q_proj",
        "blocks/attention/k": f"{_LAYER}.self_attn.k_proj",
        "blocks/attention/v": f"{_LAYER}.self_attn.v_proj",
        "blocks/attention/gate": f"{_LAYER}.self_attn.g_proj",
        "blocks/attention/out": f"{_LAYER}.self_attn.o_proj",
        "blocks/attention/out_norm": f"{_LAYER}.self_attn.out_norm",
        "blocks/mlp/gate": f"{_LAYER}.mlp.gate_proj",
        "blocks/mlp/up": f"{_LAYER}.mlp.up_proj",
        "blocks/mlp/down": f"{_LAYER}.mlp.down_proj",
      }
    ),
    "depth_weights": "model.depth_weights",
    **tensor_names({"head/linear": "lm_head.dense", "head": "lm_head"}),
  },
  targets={
    "causal": [_ltg_bert_target(False, _CLASSES)],
    "bidirectional": [
      _ltg_bert_target(
        True, auto_classes("LtgBert", "MaskedLM", "CausalLM", *_TASKS)
      )
    ],
  },
  causal_field="is_decoder",
)
