"""The llama encoder in transformers: Llama, similar models and EuroBERT."""

from collections.abc import Mapping
from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.hf import rope
from antlm_jax.hf.architecture import (
  SETTINGS,
  Architecture,
  Target,
  auto_classes,
  tensor_names,
  unsupported_value,
  with_defaults,
)

# The only values that our llama encoder computes.
COMPUTES = {"hidden_act": "silu", "mlp_bias": False}
# The only values that encoders with RoPE compute. Export omits these fields.
ONLY: dict[str, Any] = {
  "quantization_config": None,
  "partial_rotary_factor": 1.0,
}
_DEFAULTS = {
  "attention_bias": False,
  "qk_norm": False,
  "attention_dropout": 0.0,
  "initializer_range": 0.02,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": False,
}
_WINDOW = "sliding_window"  # window of all layers
_LAYER = "model.layers.{}"
OUT_BIAS = (f"{_LAYER}.self_attn.o_proj.bias",)


def _causal(
  family: str,
  ours: Mapping[str, Any],
  since: str = "4.45",  # first version that reads the tokenizer
  zeros: tuple[str, ...] = (),
  **defaults,
) -> Target:
  """Returns a causal model family of transformers."""
  return Target(
    family.lower(),
    auto_classes(family, "CausalLM", "SequenceClassification"),
    since,
    ours,
    COMPUTES | {"use_cache": True},
    {"is_causal": True, **defaults},
    zeros,
    head={"classes/kernel": "score.weight", "classes/bias": ""},
    note=(
      f"Do not use `{family}ForQuestionAnswering`. It expects the weights under"
      " another name, and starts from random weights without a warning."
    ),
  )


def _eurobert(bias: bool, ours: Mapping[str, Any], plus: bool) -> Target:
  """Returns a EuroBERT, a bidirectional Llama; `plus` adds code files."""
  # Under the same type, transformers would open it with its own EuroBERT and
  # compute other scores.
  family = "EuroBertPlus" if plus else "EuroBert"
  tasks = "MaskedLM", "SequenceClassification", "TokenClassification"
  classes = auto_classes(family, *tasks)
  code = {"AutoConfig": f"{family}Config", **classes}
  code = {auto: f"modeling_masked.{name}" for auto, name in code.items()}
  return Target(
    "eurobert_plus" if plus else "eurobert",
    classes,
    since="5.4" if plus else "5.3",
    ours={"qkv_bias": bias, **ours},
    settings=COMPUTES
    | {"classifier_pooling": "mean"}
    | ({"auto_map": code} if plus else {}),
    defaults={
      "rms_norm_eps": 1e-5,
      "max_position_embeddings": 8192,
      "rope_theta": 250_000.0,
      "is_causal": False,
    },
    zeros=OUT_BIAS if bias else (),  # its biases include this bias
    code=("modeling_masked.py", "masked_prediction.py") if plus else (),
  )


_BIASES = (False, True)


def _llama_fields(config, target: Target) -> dict[str, Any]:
  windows = config.windows
  if windows and (len(windows) > 1 or _WINDOW not in target.defaults):
    raise UserError(
      f"transformers has no {target.model_type} with model.windows={windows}"
    )
  scaling = rope.rope_field(config.rope_scaling)
  return {
    _WINDOW: windows[0] if windows else None,
    # Read by transformers 5; version 4 reads rope_scaling and rope_theta.
    "rope_parameters": scaling | {"rope_theta": config.rope_theta},
    "rope_scaling": scaling if config.rope_scaling else None,
  }


def _complete_llama(fields: Mapping, target: Target) -> dict[str, Any]:
  fields = with_defaults(fields, _DEFAULTS | target.defaults, ONLY | COMPUTES)
  # Qwen2 sets an unused window. Mistral does not read this field.
  unused = fields.get("use_sliding_window") is False
  if unused and _WINDOW not in target.defaults:
    fields.pop(_WINDOW, None)
  fields = with_heads(fields)
  # transformers 4 writes the first field, and version 5 the second.
  name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
  rotation = fields.get(name) or {}
  return fields | {
    "rope_scaling": rope.read_rope_scaling(name, rotation),
    "rope_theta": rotation.get("rope_theta", fields.get("rope_theta")),
    _WINDOW: _llama_windows(fields, target),
  }


def with_heads(fields: Mapping) -> dict[str, Any]:
  """Fills in the number of key/value heads and the width of a head."""
  heads = fields.get("num_attention_heads")
  width = fields.get("hidden_size")
  out = {"num_key_value_heads": heads, **fields}
  if isinstance(heads, int) and isinstance(width, int) and heads > 0:
    out.setdefault("head_dim", width // heads)
  return out


def _llama_windows(fields: Mapping, target: Target) -> tuple[int, ...]:
  """Returns `windows`, with a window for all layers or empty."""
  kinds = fields.get("layer_types", [])
  if not isinstance(kinds, list) or any(t != "full_attention" for t in kinds):
    raise unsupported_value("layer_types", kinds)
  # A window as long as the longest row has no effect.
  longest = fields.get("max_position_embeddings")
  window = fields.get(_WINDOW, longest)
  fits = type(window) is type(longest) is int
  if window == longest or (fits and window > longest):
    return ()
  if not fits or _WINDOW not in target.defaults or window < 1:
    raise unsupported_value(_WINDOW, window)
  # Read both ways, a window of transformers reaches one token further.
  return (window + (not fields["is_causal"]),)


LLAMA = Architecture(
  paper="https://arxiv.org/abs/2307.09288",
  settings={
    **SETTINGS,
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "windows": _WINDOW,
    "qkv_bias": "attention_bias",
    "qk_norm": "qk_norm",  # a field that only our code reads
    "tied": "tie_word_embeddings",
  },
  weights={
    "embedding": "model.embed_tokens.weight",
    **tensor_names(
      {
        "blocks/attention_norm": f"{_LAYER}.input_layernorm",
        "blocks/attention/q": f"{_LAYER}.self_attn.q_proj",
        "blocks/attention/k": f"{_LAYER}.self_attn.k_proj",
        "blocks/attention/v": f"{_LAYER}.self_attn.v_proj",
        "blocks/attention/q_norm": f"{_LAYER}.self_attn.q_norm",
        "blocks/attention/k_norm": f"{_LAYER}.self_attn.k_norm",
        "blocks/attention/out": f"{_LAYER}.self_attn.o_proj",
        "blocks/mlp_norm": f"{_LAYER}.post_attention_layernorm",
        "blocks/mlp/gate": f"{_LAYER}.mlp.gate_proj",
        "blocks/mlp/up": f"{_LAYER}.mlp.up_proj",
        "blocks/mlp/down": f"{_LAYER}.mlp.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
      }
    ),
  },
  targets={
    "causal": [
      *(
        _causal(
          "Llama",
          {"qkv_bias": bias, "qk_norm": False, "windows": ()},
          zeros=OUT_BIAS if bias else (),  # its biases include this bias
          max_position_embeddings=2048,
        )
        for bias in _BIASES
      ),
      # For import: transformers reads an exported tokenizer of this type
      # otherwise, so Llama, which fits first, is exported.
      _causal(
        "Qwen2",
        {"qkv_bias": True, "qk_norm": False},
        attention_bias=True,
        max_position_embeddings=32_768,
        num_key_value_heads=32,
        use_sliding_window=False,
      ),
      *(
        _causal(
          "Qwen3",
          {"qk_norm": True, "qkv_bias": bias},
          since="4.51",
          zeros=OUT_BIAS if bias else (),  # its biases include this bias
          qk_norm=True,
          head_dim=128,
          max_position_embeddings=32_768,
          num_key_value_heads=32,
          use_sliding_window=False,
        )
        for bias in _BIASES
      ),
      # Without a window, the model above, Llama, fits first.
      _causal(
        "Mistral",
        {"qkv_bias": False, "qk_norm": False},
        max_position_embeddings=131_072,
        num_key_value_heads=8,
        sliding_window=4096,
      ),
    ],
    "bidirectional": [
      _eurobert(bias, {"qk_norm": norm}, plus=norm)
      for norm in (False, True)
      for bias in _BIASES
    ],
    "mntp": [_eurobert(bias, {}, plus=True) for bias in _BIASES],
  },
  causal_field="is_causal",
  extra=_llama_fields,
  complete=_complete_llama,
)
