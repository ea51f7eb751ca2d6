"""The modernbert encoder in transformers: ModernBERT and its decoder."""

from collections.abc import Mapping
from typing import Any

from antlm_jax.hf import rope
from antlm_jax.hf.architecture import (
  SETTINGS,
  Architecture,
  Target,
  auto_classes,
  integer_field,
  tensor_names,
  unsupported_value,
  with_defaults,
)
from antlm_jax.models import encoder

_PERIOD = "global_attn_every_n_layers"  # distance of layers without a window
_BASE = "global_rope_theta"
# The only values that our modernbert encoder computes.
_COMPUTES = {
  "hidden_activation": "gelu",
  "norm_bias": False,
  "attention_bias": False,
  "mlp_bias": False,
  "decoder_bias": True,
  "classifier_activation": "gelu",
  "classifier_bias": False,
  "tie_word_embeddings": True,
}
_ONLY = {
  # Tensors tell whether an output layer has this bias. Classifiers have it.
  **{name: _COMPUTES[name] for name in _COMPUTES if name != "classifier_bias"},
  "quantization_config": None,
  "rope_scaling": None,
}
# Defaults of transformers.
_DEFAULTS = {
  "vocab_size": 50_368,
  "hidden_size": 768,
  "intermediate_size": 1152,
  "num_hidden_layers": 22,
  "num_attention_heads": 12,
  "max_position_embeddings": 8192,
  "initializer_range": 0.02,
  "norm_eps": 1e-5,
  "attention_dropout": 0.0,
  "embedding_dropout": 0.0,
  "mlp_dropout": 0.0,
  "local_attention": 128,
  _PERIOD: 3,
  _BASE: 160_000.0,
  "local_rope_theta": 10_000.0,
}
_CAUSAL = "modernbert-decoder"
_BIDIRECTIONAL = "modernbert"
_BLOCK = "model.layers.{}"
# The default token ids of its config belong to another vocabulary. These roles
# replace them; the first known role is used.
_BEGIN = ("bos", "pad")
_END = ("eos", "pad")
_IDS = {"bos": _BEGIN, "eos": _END, "cls": _BEGIN, "sep": _END}


def _period(config, target: Target) -> int | None:
  """Returns the distance of layers without a window; None if it varies.

  transformers before 5.3 and Text Embeddings Inference read it, not the layers'
  kinds. Decoders in transformers 4 have one RoPE base, so they get None.
  """
  windows = config.layer_windows
  full = [layer for layer, window in enumerate(windows) if not window]
  period = full[1] if len(full) > 1 else len(windows)
  is_periodic = full == [*range(0, len(windows), period)]
  return period if is_periodic and target.model_type == _BIDIRECTIONAL else None


def _modernbert_fields(config, target: Target) -> dict[str, Any]:
  period = _period(config, target)
  width = target.window(config, default=65)
  return {
    # Sum of both directions; the decoder also counts the token itself.
    "local_attention": 2 * (width - (target.model_type == _BIDIRECTIONAL)),
    **rope.fields_by_kind(config),
    "embedding_dropout": config.dropout,
    "initializer_cutoff_factor": 2.0,
    # Null is an error in versions that would compute other logits.
    _PERIOD: period,
    **({} if period else {_BASE: None}),
  }


def _since(config, target: Target) -> str:
  """Returns the first version of transformers that reads the layers' kinds."""
  is_old = target.model_type == _CAUSAL or _period(config, target)
  return target.since if is_old else "5.3"


def _complete_modernbert(fields: Mapping, target: Target) -> dict[str, Any]:
  # Export writes null for them, and `layer_types` and `rope_parameters`.
  nulls = {name for name in (_PERIOD, _BASE) if fields.get(name, 0) is None}
  fields = {name: fields[name] for name in fields if name not in nulls}
  values = with_defaults(fields, _DEFAULTS | target.defaults, _ONLY)
  dropout = values.get("embedding_dropout")
  if dropout != values.get("mlp_dropout"):
    raise unsupported_value("embedding_dropout", dropout)
  period = integer_field(values, _PERIOD, 1)
  window = integer_field(values, "local_attention", 0) // 2
  # Read both ways, a window of transformers reaches one token further.
  window += not values["is_causal"]
  kinds = rope.layer_kinds(values, lambda i: rope.KINDS[i % period > 0])
  windows = encoder.pattern([window * (kind == rope.SLIDING) for kind in kinds])
  base = values[_BASE]
  if fields.get("local_rope_theta", 0) is None:  # null for the global base
    values["local_rope_theta"] = base
  bases = {rope.FULL: base, rope.SLIDING: values["local_rope_theta"]}
  full, near = rope.by_kind(values, bases)
  name = f"rope_parameters.{rope.FULL}"
  if rope.read_rope_scaling(name, full):
    raise unsupported_value(name, full)
  return values | {
    "layer_types": windows if any(windows) else (),
    _BASE: full["rope_theta"],
    "local_rope_theta": near["rope_theta"],
  }


MODERNBERT = Architecture(
  paper="https://arxiv.org/abs/2412.13663",
  settings={
    **SETTINGS,
    "norm_eps": "norm_eps",
    "dropout": "mlp_dropout",
    "attention_dropout": "attention_dropout",
    "windows": "layer_types",
    "rope_theta": _BASE,
    "window_rope_theta": "local_rope_theta",
  },
  weights={
    "embedding": "model.embeddings.tok_embeddings.weight",
    **tensor_names(
      {
        "embedding_norm": "model.embeddings.norm",
        "blocks/attention_norm": f"{_BLOCK}.attn_norm",
        **{f"blocks/attention/{x}": f"{_BLOCK}.attn.Wqkv" for x in "qkv"},
        "blocks/attention/out": f"{_BLOCK}.attn.Wo",
        "blocks/mlp_norm": f"{_BLOCK}.mlp_norm",
        "blocks/mlp/gate": f"{_BLOCK}.mlp.Wi",
        "blocks/mlp/up": f"{_BLOCK}.mlp.Wi",
        "blocks/mlp/down": f"{_BLOCK}.mlp.Wo",
        "norm": "model.final_norm",
        "head/linear": "head.dense",
        "head/norm": "head.norm",
        "head": "decoder",  # tied
      }
    ),
  },
  unused=(f"{_BLOCK.format(0)}.attn_norm.weight",),
  targets={
    "causal": [
      Target(
        _CAUSAL,
        auto_classes("ModernBertDecoder", "CausalLM"),
        since="5.0",  # version 4.57 uses one base for all layers
        settings=_COMPUTES | {"use_cache": True},
        defaults={"is_causal": True},
        ids=_IDS,
        weights=tensor_names(
          {
            "blocks/attention/q": f"{_BLOCK}.attn.q_proj",
            "blocks/attention/k": f"{_BLOCK}.attn.k_proj",
            "blocks/attention/v": f"{_BLOCK}.attn.v_proj",
            "head/linear": "lm_head.dense",
            "head/norm": "lm_head.norm",
          }
        ),
      )
    ],
    "bidirectional": [
      Target(
        _BIDIRECTIONAL,
        auto_classes("ModernBert", "MaskedLM", "SequenceClassification"),
        since="4.48",
        settings=_COMPUTES,
        defaults={"is_causal": False},
        ids=_IDS,
        head=tensor_names({"norm": "head.norm", "dense": "head.dense"}),
      )
    ],
    "mntp": [],
  },
  causal_field="is_causal",
  extra=_modernbert_fields,
  since=_since,
  complete=_complete_modernbert,
)
