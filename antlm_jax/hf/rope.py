"""Kinds of layers and their RoPE in config.json."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from antlm_jax.hf.architecture import integer_field, unsupported_value

# Kinds of layers in `layer_types`, without and with a window.
FULL = "full_attention"
SLIDING = "sliding_attention"
KINDS = FULL, SLIDING
# Fields of each rope_type, in the order of our `rope_scaling`.
_SCALINGS = {
  "default": (),
  "linear": ("factor",),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
}


def layer_kinds(fields: Mapping, default: Callable[[int], str]) -> list[str]:
  """Returns the kind of each layer; `default` maps an index to a kind.

  Raises a ValueError if a kind is not in `KINDS`, or the number of kinds is not
  the number of layers.
  """
  layers = integer_field(fields, "num_hidden_layers", 1)
  kinds = fields.get("layer_types") or [default(i) for i in range(layers)]
  complete = isinstance(kinds, list) and len(kinds) == layers
  if not complete or any(kind not in KINDS for kind in kinds):
    raise unsupported_value("layer_types", kinds)
  return kinds


def rope_field(scaling: Sequence[float] = ()) -> dict[str, Any]:
  """Returns the field of config.json for our `rope_scaling`."""
  kind, parts = next(x for x in _SCALINGS.items() if len(x[1]) == len(scaling))
  out = {"rope_type": kind, **dict(zip(parts, scaling, strict=True))}
  length = "original_max_position_embeddings"
  return out | ({length: int(out[length])} if length in out else {})


def fields_by_kind(config) -> dict[str, Any]:
  """Returns the kinds of our configuration's layers, and the RoPE of each.

  Its `rope_scaling` is that of layers without a window.
  """
  near = rope_field() | {"rope_theta": config.window_rope_theta}
  full = rope_field(config.rope_scaling) | {"rope_theta": config.rope_theta}
  return {
    "layer_types": [KINDS[window > 0] for window in config.layer_windows],
    "rope_parameters": {FULL: full, SLIDING: near},
  }


def by_kind(
  fields: Mapping, bases: Mapping[str, float]
) -> list[dict[str, Any]]:
  """Returns the fields of RoPE for each kind of layer, with `rope_theta`.

  `bases` are the fields of transformers 4 by kind, `FULL` first. Transformers 5
  has `rope_parameters`. Raises a ValueError if its value is invalid, or scales
  layers with a window.
  """
  name = "rope_parameters"
  parameters = fields.get(name, {})
  if not isinstance(parameters, dict):
    raise unsupported_value(name, parameters)
  # transformers would fail if no kind of layer is there.
  if parameters and not parameters.keys() & bases.keys():
    raise unsupported_value(name, parameters)
  ropes = {kind: parameters.get(kind) or {} for kind in bases}
  if any(not isinstance(rope, dict) for rope in ropes.values()):
    raise unsupported_value(name, parameters)
  ropes = {kind: {"rope_theta": bases[kind], **ropes[kind]} for kind in bases}
  if read_rope_scaling(f"{name}.{SLIDING}", ropes[SLIDING]):
    raise unsupported_value(f"{name}.{SLIDING}", ropes[SLIDING])
  return [*ropes.values()]


def read_rope_scaling(name: str, rope: Any) -> tuple[float, ...]:
  """Returns `rope_scaling` for a field; ValueError for an unknown kind."""
  if not isinstance(rope, dict) or dict in map(type, rope.values()):
    raise unsupported_value(name, rope)
  kind = rope.get("rope_type", rope.get("type", "default"))
  if not isinstance(kind, str) or kind not in _SCALINGS:
    raise unsupported_value(f"{name}.rope_type", kind)
  if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
    raise unsupported_value(f"{name}.partial_rotary_factor", part)
  for part in _SCALINGS[kind]:
    if type(rope.get(part)) not in (int, float):
      raise unsupported_value(f"{name}.{part}", rope.get(part))
  return tuple(float(rope[part]) for part in _SCALINGS[kind])
