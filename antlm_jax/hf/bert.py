"""The bert encoder in transformers: BERT, RoBERTa, XLM-R and CamemBERT."""

from collections.abc import Mapping
from typing import Any

from antlm_jax.hf.architecture import (
  SETTINGS,
  Architecture,
  Target,
  integer_field,
  tensor_names,
  with_defaults,
)

# The only values that our bert encoder computes.
_COMPUTES = {
  "hidden_act": "gelu",
  "position_embedding_type": "absolute",
  "add_cross_attention": False,
}
_ONLY = {**_COMPUTES, "quantization_config": None}
# Defaults of transformers; the vocabulary's depends on the model_type.
_DEFAULTS = {
  "hidden_size": 768,
  "intermediate_size": 3072,
  "num_hidden_layers": 12,
  "num_attention_heads": 12,
  "max_position_embeddings": 512,
  "type_vocab_size": 2,
  "initializer_range": 0.02,
  "layer_norm_eps": 1e-12,
  "hidden_dropout_prob": 0.1,
  "attention_probs_dropout_prob": 0.1,
  "tie_word_embeddings": True,
}
_BERT = "bert"
_ROBERTA = "roberta"
_ROWS = "max_position_embeddings"


def _tensors(base: str, head: str, transform: str, norm: str) -> dict[str, str]:
  """Returns the tensors, given the names of the encoder and of the head."""
  layer = f"{base}.encoder.layer.{{}}"
  tables = {
    "embedding": "word",
    "positions": "position",
    "token_types": "token_type",
  }
  return {
    **{
      ours: f"{base}.embeddings.{theirs}_embeddings.weight"
      for ours, theirs in tables.items()
    },
    **tensor_names(
      {
        "embedding_norm": f"{base}.embeddings.LayerNorm",
        "blocks/attention/q": f"{layer}.attention.self.query",
        "blocks/attention/k": f"{layer}.attention.self.key",
        "blocks/attention/v": f"{layer}.attention.self.value",
        "blocks/attention/out": f"{layer}.attention.output.dense",
        "blocks/attention_norm": f"{layer}.attention.output.LayerNorm",
        "blocks/mlp/up": f"{layer}.intermediate.dense",
        "blocks/mlp/down": f"{layer}.output.dense",
        "blocks/mlp_norm": f"{layer}.output.LayerNorm",
        "head/linear": f"{transform}.dense",
        "head/norm": f"{transform}.{norm}",
      }
    ),
    "head/kernel": f"{head}.decoder.weight",
    "head/bias": f"{head}.bias",
  }


def _targets(causal: bool) -> list[Target]:
  """Returns the models of an attention.

  Import uses the last model of each model_type, which is tied.
  """
  out = []
  # In transformers, BERT's causal model has an unusual name.
  for model_type, family, head, vocab_size, generator in (
    (_BERT, "Bert", "cls.predictions", 30_522, "LMHeadModel"),
    (_ROBERTA, "Roberta", "lm_head", 50_265, "ForCausalLM"),
    # These compute the same as RoBERTa, so export writes RoBERTa.
    ("xlm-roberta", "XLMRoberta", "lm_head", 30_522, "ForCausalLM"),
    ("camembert", "Camembert", "lm_head", 30_522, "ForCausalLM"),
  ):
    first = {"first_position": 0} if model_type == _BERT else {}
    names = {} if model_type == _BERT else _ROBERTA_TENSORS
    tasks = {
      "AutoModelForMaskedLM": f"{family}ForMaskedLM",
      "AutoModelForTokenClassification": f"{family}ForTokenClassification",
    }
    classes = {"AutoModelForCausalLM": f"{family}{generator}"}
    for tied in (False, True):
      bias = {f"{head}.decoder.bias": f"{head}.bias"}
      target = Target(
        model_type,
        {**(classes if causal else tasks), "AutoModel": f"{family}Model"},
        since="4.46",
        ours=first | {"tied": tied},
        settings=_COMPUTES | {"is_decoder": causal, "use_cache": True},
        defaults={"vocab_size": vocab_size, "pad_token_id": int(not first)},
        weights=names,
        copies={} if tied else bias,
      )
      out.append(target)
  return out


def _bert_fields(config, target: Target) -> dict[str, Any]:
  rows = {_ROWS: config.first_position + config.max_seq_len}
  if target.model_type == _BERT:
    return rows
  return rows | {"pad_token_id": config.first_position - 1}


def _complete_bert(fields: Mapping, target: Target) -> dict[str, Any]:
  defaults = {"is_causal": bool(fields.get("is_decoder")), **target.defaults}
  fields = with_defaults(fields, _DEFAULTS | defaults, _ONLY)
  first = 0
  if target.model_type != _BERT:  # its positions follow that of padding
    first = integer_field(fields, "pad_token_id", 0) + 1
  rows = integer_field(fields, _ROWS, first + 1)
  return fields | {
    "first_position": first,
    _ROWS: rows - first,
    "is_decoder": fields["is_causal"],
  }


_ROBERTA_TENSORS = _tensors("roberta", "lm_head", "lm_head", "layer_norm")
_TRANSFORM = "cls.predictions.transform"
BERT = Architecture(
  paper="https://arxiv.org/abs/1810.04805",
  settings={
    **SETTINGS,
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "first_position": "first_position",  # only we read it
    "token_types": "type_vocab_size",
    "tied": "tie_word_embeddings",
  },
  weights=_tensors("bert", "cls.predictions", _TRANSFORM, "LayerNorm"),
  targets={
    "causal": _targets(True),
    "bidirectional": _targets(False),
    "mntp": [],
  },
  causal_field="is_decoder",
  extra=_bert_fields,
  complete=_complete_bert,
  older=(
    (r"\.gamma$", ".weight"),
    (r"\.beta$", ".bias"),
    # transformers adds this one, if a file has both.
    (r"^(cls\.predictions|lm_head)\.decoder\.bias$", r"\1.bias"),
  ),
  dropped={
    r"^(bert|roberta)\.pooler\.": "the pooler of the first token",
    r"^cls\.seq_relationship\.": "the head that predicts the next sentence",
  },
)
