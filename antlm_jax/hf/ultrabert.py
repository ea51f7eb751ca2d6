"""The ultrabert encoder in transformers: UltraBERT."""

from collections.abc import Mapping, Sequence
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

_WINDOW = "sliding_window"  # tokens that a query sees on each side
_DEFAULTS = {
  "attention_bias": False,
  "attention_dropout": 0.0,
  "initializer_range": 0.02,
  "max_position_embeddings": 32_768,
  "prediction_head_size": 768,
  "rms_norm_eps": 1e-6,
  _WINDOW: 128,
  "tie_word_embeddings": False,
}
_BASES = {rope.FULL: 2_560_000.0, rope.SLIDING: 10_000.0}
_TASKS = "MaskedLM", "SequenceClassification", "TokenClassification"


def _ultrabert_target(bias: bool) -> Target:
  return Target(
    "ultrabert",
    auto_classes("Ultrabert", *_TASKS),
    since="5.23",
    ours={"qk_norm": False, "qkv_bias": bias},
    settings=llama.COMPUTES,
    defaults={"is_causal": False},
    zeros=llama.OUT_BIAS if bias else (),  # its biases include this bias
  )


def _ultrabert_fields(config, target: Target) -> dict[str, Any]:
  width = target.window(config, default=_DEFAULTS[_WINDOW] + 1)
  return {
    _WINDOW: width - 1,
    **rope.fields_by_kind(config),
    # Fields of transformers 4, which has no UltraBERT.
    "rope_scaling": None,
    "rope_theta": None,
  }


def _complete_ultrabert(fields: Mapping, target: Target) -> dict[str, Any]:
  only = llama.ONLY | llama.COMPUTES | {"rope_scaling": None}
  fields = with_defaults(fields, _DEFAULTS | target.defaults, only)
  fields = llama.with_heads(_with_window(fields))
  kinds = rope.layer_kinds(fields, lambda i: rope.KINDS[(i + 1) % 3 > 0])
  width = integer_field(fields, _WINDOW, 0) + 1
  windows = encoder.pattern([width * (kind == rope.SLIDING) for kind in kinds])
  full, near = rope.by_kind(fields, _bases(fields, kinds))
  return fields | {
    "layer_types": windows if any(windows) else (),
    "rope_theta": full["rope_theta"],
    "rope_parameters": near["rope_theta"],
    "rope_scaling": rope.read_rope_scaling(
      f"rope_parameters.{rope.FULL}", full
    ),
  }


def _with_window(fields: Mapping) -> dict[str, Any]:
  """Fills in the kinds of layers, and their window, of UltraBERT's own code."""
  layer_windows = fields.get("attention_windows")
  if layer_windows is None:
    return dict(fields)
  widths = ()
  if isinstance(layer_windows, list):
    widths = set(layer_windows) - {0, None}
  if len(widths) != 1:  # transformers would use the first
    raise unsupported_value("attention_windows", layer_windows)
  kinds = [rope.KINDS[bool(width)] for width in layer_windows]
  return {"layer_types": kinds, **fields, _WINDOW: widths.pop()}


def _bases(fields: Mapping, kinds: Sequence[str]) -> dict[str, float]:
  """Returns the RoPE base of each kind of layer, without `rope_parameters`."""
  layer_bases = fields.get("rope_theta")
  if layer_bases is None or "rope_parameters" in fields:
    return _BASES
  if not isinstance(layer_bases, list) or len(layer_bases) != len(kinds):
    raise unsupported_value("rope_theta", layer_bases)
  bases = dict(_BASES)
  for kind in _BASES:
    values = {
      base
      for layer, base in zip(kinds, layer_bases, strict=True)
      if layer == kind
    }
    if len(values) > 1:
      raise unsupported_value("rope_theta", layer_bases)
    if values:
      bases[kind] = values.pop()
  return bases


ULTRABERT = Architecture(
  paper="https://huggingface.co/dmis-lab/UltraBERT-150M",
  settings={
    **{o: t for o, t in llama.LLAMA.settings.items() if o != "qk_norm"},
    "windows": "layer_types",
    "window_rope_theta": "rope_parameters",
    "head_mlp_width": "prediction_head_size",
  },
  weights={
    **llama.LLAMA.weights,
    **tensor_names(
      {
        "head/up": "head.linear1",
        "head/down": "head.linear2",
        "head": "head.decoder",
      }
    ),
  },
  targets={
    "causal": [],
    "bidirectional": [_ultrabert_target(bias) for bias in (False, True)],
    "mntp": [],
  },
  causal_field="is_causal",
  extra=_ultrabert_fields,
  complete=_complete_ultrabert,
  # Names of its files on the Hub, which transformers also writes.
  older=((r"^ultrabert\.", "model."), (r"^cls\.", "head.decoder.")),
)
