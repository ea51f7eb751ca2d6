"""The ultrabert encoder in transformers: UltraBERT."""

from collections.abc import Mapping, Sequence
from typing import Any

from antlm_jax.hf import llama, rope
from antlm_jax.hf.architecture import (
  Architecture,
  Target,
  auto_classes,
  completed,
  differs,
  integer_field,
  layer_kinds,
  tensor_names,
)
from antlm_jax.models import encoder

_WINDOW = "sliding_window"  # tokens that a query sees on each side
_FULL, _SLIDING = "full_attention", "sliding_attention"
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
_BASES = {_FULL: 2_560_000.0, _SLIDING: 10_000.0}
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
  scaling = rope.rope_field(config.rope_scaling)
  return {
    _WINDOW: width - 1,
    "layer_types": [_SLIDING if w else _FULL for w in config.layer_windows],
    "rope_parameters": {
      _FULL: scaling | {"rope_theta": config.rope_theta},
      _SLIDING: rope.rope_field() | {"rope_theta": config.window_rope_theta},
    },
    # Fields of transformers 4, which has no UltraBERT.
    "rope_scaling": None,
    "rope_theta": None,
  }


def _complete_ultrabert(fields: Mapping, target: Target) -> dict[str, Any]:
  only = llama.ONLY | llama.COMPUTES | {"rope_scaling": None}
  given = completed(fields, _DEFAULTS | target.defaults, only)
  given = llama.with_heads(_with_window(given))
  kinds = layer_kinds(
    given, lambda i: _SLIDING if (i + 1) % 3 else _FULL, (_FULL, _SLIDING)
  )
  width = integer_field(given, _WINDOW, 0) + 1
  windows = encoder.pattern([width * (kind == _SLIDING) for kind in kinds])
  full, near = rope.by_kind(given, _bases(given, kinds))
  if rope.read_rope_scaling(f"rope_parameters.{_SLIDING}", near):
    raise differs(f"rope_parameters.{_SLIDING}", near)
  return given | {
    "layer_types": windows if any(windows) else (),
    "rope_theta": full["rope_theta"],
    "rope_parameters": near["rope_theta"],
    "rope_scaling": rope.read_rope_scaling(f"rope_parameters.{_FULL}", full),
  }


def _with_window(given: Mapping) -> dict[str, Any]:
  """Fills in the kinds of layers, and their window, of UltraBERT's own code."""
  own = given.get("attention_windows")
  if own is None:
    return dict(given)
  widths = set(own) - {0, None} if isinstance(own, list) else ()
  if len(widths) != 1:  # transformers would use the first
    raise differs("attention_windows", own)
  kinds = [_SLIDING if width else _FULL for width in own]
  return {"layer_types": kinds, **given, _WINDOW: widths.pop()}


def _bases(given: Mapping, kinds: Sequence[str]) -> dict[str, float]:
  """Returns the RoPE base of each kind of layer, without `rope_parameters`."""
  own = given.get("rope_theta")  # a base for each layer
  if own is None or "rope_parameters" in given:
    return _BASES
  if not isinstance(own, list) or len(own) != len(kinds):
    raise differs("rope_theta", own)
  found = {
    kind: {x for k, x in zip(kinds, own, strict=True) if k == kind}
    for kind in _BASES
  }
  if any(len(bases) > 1 for bases in found.values()):
    raise differs("rope_theta", own)
  return {kind: next(iter(found[kind]), base) for kind, base in _BASES.items()}


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
