"""Our LTG-BERT in transformers: a model with its own code."""

from antlm_jax.hf.architecture import SETTINGS, Architecture, Target

_LAYER = "model.layers.{}"
_CLASSES = {
  "AutoModelForCausalLM": "LtgBertForCausalLM",
  "AutoModelForMaskedLM": "LtgBertForMaskedLM",
  "AutoModelForSequenceClassification": "LtgBertForSequenceClassification",
  "AutoModelForTokenClassification": "LtgBertForTokenClassification",
  "AutoModel": "LtgBertModel",
}
_SETTINGS = {
  "tie_word_embeddings": True,
  "auto_map": {
    "AutoConfig": "configuration_ltg_bert.LtgBertConfig",
    **{a: f"modeling_ltg_bert.{c}" for a, c in _CLASSES.items()},
  },
}


def _target(masked: bool, classes: dict[str, str]) -> Target:
  return Target(
    "ltg_bert",
    classes,
    since="4.45",
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
    "relative_norm/scale": "model.relative_norm.weight",
    "relative_norm/bias": "model.relative_norm.bias",
    "blocks/attention/q/kernel": f"{_LAYER}.self_attn.q_proj.weight",
    "blocks/attention/q/bias": f"{_LAYER}.self_attn.q_proj.bias",
    "blocks/attention/k/kernel": f"{_LAYER}.self_attn.k_proj.weight",
    "blocks/attention/k/bias": f"{_LAYER}.self_attn.k_proj.bias",
    "blocks/attention/v/kernel": f"{_LAYER}.self_attn.v_proj.weight",
    "blocks/attention/v/bias": f"{_LAYER}.self_attn.v_proj.bias",
    "blocks/attention/gate/kernel": f"{_LAYER}.self_attn.g_proj.weight",
    "blocks/attention/gate/bias": f"{_LAYER}.self_attn.g_proj.bias",
    "blocks/attention/out/kernel": f"{_LAYER}.self_attn.o_proj.weight",
    "blocks/attention/out/bias": f"{_LAYER}.self_attn.o_proj.bias",
    "blocks/attention/out_norm/scale": f"{_LAYER}.self_attn.out_norm.weight",
    "blocks/attention/out_norm/bias": f"{_LAYER}.self_attn.out_norm.bias",
    "blocks/mlp/gate/kernel": f"{_LAYER}.mlp.gate_proj.weight",
    "blocks/mlp/up/kernel": f"{_LAYER}.mlp.up_proj.weight",
    "blocks/mlp/down/kernel": f"{_LAYER}.mlp.down_proj.weight",
    "depth_weights": "model.depth_weights",
    "head/linear/kernel": "lm_head.dense.weight",
    "head/linear/bias": "lm_head.dense.bias",
    "head/bias": "lm_head.bias",
    # Tied: only other programs' files have it.
    "head/kernel": "lm_head.weight",
  },
  targets={
    "causal": [_target(False, _CLASSES)],
    "bidirectional": [
      _target(True, {"AutoModelForMaskedLM": "LtgBertForMaskedLM", **_CLASSES})
    ],
  },
  causal_field="is_decoder",
)
