"""Our llama in transformers: a Llama, or bidirectionally a EuroBERT."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.hf.architecture import SETTINGS, Architecture, Target

# What our llama computes, and so must any Llama that is read.
_COMPUTES = {
  "hidden_act": "silu",
  "attention_bias": False,
  "mlp_bias": False,
}
# The only values under which transformers computes what our llama does; None
# and an absent field are fine.
_ONLY: dict[str, Any] = {
  **_COMPUTES,
  "sliding_window": None,
  "quantization_config": None,
  "partial_rotary_factor": 1.0,
}
_DEFAULTS = {
  "attention_dropout": 0.0,
  "initializer_range": 0.02,
  "tie_word_embeddings": False,
}
_EUROBERT = {
  "AutoModelForMaskedLM": "EuroBertForMaskedLM",
  "AutoModelForSequenceClassification": "EuroBertForSequenceClassification",
  "AutoModelForTokenClassification": "EuroBertForTokenClassification",
  "AutoModel": "EuroBertModel",
}
_MNTP = {
  auto: name.replace("EuroBert", "EuroBertMntp")
  for auto, name in _EUROBERT.items()
}
_MNTP_CODE = {
  auto: f"modeling_eurobert_mntp.{name}"
  for auto, name in {"AutoConfig": "EuroBertMntpConfig", **_MNTP}.items()
}
_EUROBERT_SETTINGS = _COMPUTES | {"classifier_pooling": "mean"}
_EUROBERT_DEFAULTS = {
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 8192,
  "rope_theta": 250_000.0,
  "is_causal": False,
}
_ROPES = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5


def _extra(config) -> dict[str, Any]:
  if config.width % config.heads:
    raise UserError(
      f"transformers' Llama has no width ({config.width}) that is not a"
      f" multiple of the heads ({config.heads})"
    )
  # Beside the field rope_theta, which was the form until transformers 5.
  rope = {"rope_type": "default", "rope_theta": config.rope_theta}
  return {"rope_parameters": rope}


def _complete(fields: Mapping, target: Target) -> dict[str, Any]:
  for name, found in _different(fields):
    shown = json.dumps(found) if isinstance(found, dict) else repr(found)
    raise ValueError(
      f"{name} is {shown[:60]}, which this library's llama does not compute"
    )
  given = {k: v for k, v in fields.items() if v is not None}
  heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
  given.setdefault("num_key_value_heads", heads)
  if isinstance(heads, int) and isinstance(width, int) and heads > 0:
    given.setdefault("head_dim", width // heads)
  for name in _ROPES:
    given |= {k: v for k, v in given.get(name, {}).items() if k == "rope_theta"}
  return {**_DEFAULTS, **target.defaults, **given}


def _different(fields: Mapping) -> Iterator[tuple[str, Any]]:
  """Yields what our llama would compute differently, by name."""
  for name, right in _ONLY.items():
    found = fields.get(name)
    if found is not None and found != right:
      yield name, found
  for name in _ROPES:
    rope = fields.get(name) or {}
    if not isinstance(rope, dict):
      yield name, rope
      return
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
      yield f"{name}.rope_type", kind
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
      yield f"{name}.partial_rotary_factor", part
  layers = fields.get("layer_types") or []
  if not isinstance(layers, list) or any(t != "full_attention" for t in layers):
    yield "layer_types", layers


LLAMA = Architecture(
  paper="https://arxiv.org/abs/2307.09288",
  settings={
    **SETTINGS,
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
  targets={
    "causal": Target(
      "llama",
      {
        "AutoModelForCausalLM": "LlamaForCausalLM",
        "AutoModel": "LlamaModel",
      },
      _COMPUTES | {"use_cache": True},
      {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "is_causal": True,
      },
    ),
    # Llama with bidirectional attention, under the same names of everything.
    "bidirectional": Target(
      "eurobert", _EUROBERT, _EUROBERT_SETTINGS, _EUROBERT_DEFAULTS
    ),
    # A type of its own: without the code that moves the masks' scores nothing
    # opens it, rather than transformers' EuroBERT with other scores.
    "mntp": Target(
      "eurobert_mntp",
      _MNTP,
      _EUROBERT_SETTINGS | {"auto_map": _MNTP_CODE},
      _EUROBERT_DEFAULTS,
      code=("modeling_eurobert_mntp.py",),
    ),
  },
  causal_field="is_causal",
  extra=_extra,
  complete=_complete,
)
