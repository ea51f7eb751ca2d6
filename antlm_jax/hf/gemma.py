"""The gemma encoder in transformers: the text model of Gemma 3."""

from collections.abc import Mapping
from typing import Any

from antlm_jax.hf import llama, rope
from antlm_jax.hf.architecture import (
  Architecture,
  Target,
  auto_classes,
  integer_field,
  tensor_names,
  unsupported_value,
  with_defaults,
)
from antlm_jax.models import encoder

# The only values that our gemma encoder computes.
_ONLY = {
  "hidden_activation": "gelu_pytorch_tanh",
  "attn_logit_softcapping": None,
  "final_logit_softcapping": None,
}
_L = "model.layers.{}"
_BOTH_WAYS = "use_bidirectional_attention"
_WINDOW = "sliding_window"
_PATTERN = "sliding_window_pattern"
_LOCAL = "rope_local_base_freq"
_DEFAULTS = {
  "attention_bias": False,
  "attention_dropout": 0.0,
  "head_dim": 256,
  "initializer_range": 0.02,
  "is_causal": True,
  "max_position_embeddings": 131_072,
  "num_key_value_heads": 4,
  "qk_norm": True,
  "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-6,
  "rope_local_base_freq": 10_000.0,
  "rope_theta": 1e6,
  "sliding_window": 4096,
  "tie_word_embeddings": True,
}


def _gemma_target(both_ways: bool) -> Target:
  """Returns a Gemma 3; a bidirectional masked LM needs code in its folder."""
  tasks = ("MaskedLM",) * both_ways + ("CausalLM",)
  code = {"AutoModelForMaskedLM": "modeling_masked.Gemma3ForMaskedLM"}
  return Target(
    "gemma3_text",
    auto_classes("Gemma3", *tasks, base="TextModel"),
    since="5.4" if both_ways else "4.57",
    ours={"qk_norm": True, "qkv_bias": False},
    settings={**_ONLY, "use_cache": True, _BOTH_WAYS: both_ways}
    | ({"auto_map": code} if both_ways else {}),
    code=("modeling_masked.py", "masked_prediction.py") if both_ways else (),
  )


def _gemma_fields(config, target: Target) -> dict[str, Any]:
  width = target.window(config, default=_DEFAULTS[_WINDOW])
  scaling = rope.rope_field(config.rope_scaling)
  return {
    # A bidirectional Gemma computes our width as this / 2 + 1.
    _WINDOW: 2 * (width - 1) if target.settings[_BOTH_WAYS] else width,
    # Read by transformers 5; version 4 reads rope_scaling and the bases.
    **rope.fields_by_kind(config),
    "rope_scaling": scaling if config.rope_scaling else None,
  }


def _complete_gemma(fields: Mapping, target: Target) -> dict[str, Any]:
  fields = with_defaults(fields, _DEFAULTS, _ONLY | llama.ONLY)
  both_ways = fields.get(_BOTH_WAYS) is True
  bases = {
    rope.FULL: fields.get("rope_theta"),
    rope.SLIDING: fields.get(_LOCAL),
  }
  full, near = rope.by_kind(fields, bases)
  scaled = fields.get("rope_scaling", {})
  if not isinstance(scaled, dict):
    raise unsupported_value("rope_scaling", scaled)
  return fields | {
    "is_causal": fields["is_causal"] and not both_ways,
    "rope_scaling": rope.read_rope_scaling(
      f"rope_parameters.{rope.FULL}", full | scaled
    ),
    "rope_theta": full["rope_theta"],
    _LOCAL: near["rope_theta"],
    _WINDOW: _gemma_windows(fields, both_ways),
  }


def _gemma_windows(fields: Mapping, both_ways: bool) -> tuple[int, ...]:
  width = integer_field(fields, _WINDOW, 1)
  period = integer_field({_PATTERN: 6, **fields}, _PATTERN, 1)
  kinds = rope.layer_kinds(fields, lambda i: rope.KINDS[(i + 1) % period > 0])
  window = width // 2 + 1 if both_ways else width
  # Read both ways, a window of transformers reaches one token further.
  window += not fields["is_causal"]
  return encoder.pattern([window * (kind == rope.SLIDING) for kind in kinds])


GEMMA = Architecture(
  paper="https://arxiv.org/abs/2503.19786",
  settings={
    **llama.LLAMA.settings,
    "window_rope_theta": _LOCAL,
    "query_scalar": "query_pre_attn_scalar",
  },
  weights={
    **llama.LLAMA.weights,
    **tensor_names(
      {
        "blocks/attention_out_norm": f"{_L}.post_attention_layernorm",
        "blocks/mlp_norm": f"{_L}.pre_feedforward_layernorm",
        "blocks/mlp_out_norm": f"{_L}.post_feedforward_layernorm",
      }
    ),
  },
  targets={
    "causal": [_gemma_target(False)],
    "bidirectional": [_gemma_target(True)],
  },
  causal_field="is_causal",
  extra=_gemma_fields,
  complete=_complete_gemma,
)
