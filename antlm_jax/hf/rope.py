"""RoPE in config.json, for all layers or for one kind of layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from antlm_jax.hf.architecture import unsupported_value

# Fields of each rope_type, in the order of our `rope_scaling`.
_KINDS = {
  "default": (),
  "linear": ("factor",),
  "llama3": (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  ),
}


def rope_field(scaling: Sequence[float] = ()) -> dict[str, Any]:
  """Returns the field of config.json for our `rope_scaling`."""
  kind, parts = next(x for x in _KINDS.items() if len(x[1]) == len(scaling))
  out = {"rope_type": kind, **dict(zip(parts, scaling, strict=True))}
  length = "original_max_position_embeddings"
  return out | ({length: int(out[length])} if length in out else {})


def by_kind(
  fields: Mapping, bases: Mapping[str, float]
) -> list[dict[str, Any]]:
  """Returns the fields of RoPE for each kind of layer, with `rope_theta`.

  `bases` are the fields of transformers 4 by kind. Transformers 5 has
  `rope_parameters`. Raises a ValueError if its value is invalid.
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
  return [{"rope_theta": bases[kind], **rope} for kind, rope in ropes.items()]


def read_rope_scaling(name: str, rope: Any) -> tuple[float, ...]:
  """Returns `rope_scaling` for a field; ValueError for an unknown kind."""
  if not isinstance(rope, dict) or dict in map(type, rope.values()):
    raise unsupported_value(name, rope)
  kind = rope.get("rope_type", rope.get("type", "default"))
  if not isinstance(kind, str) or kind not in _KINDS:
    raise unsupported_value(f"{name}.rope_type", kind)
  if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
    raise unsupported_value(f"{name}.partial_rotary_factor", part)
  for part in _KINDS[kind]:
    if type(rope.get(part)) not in (int, float):
      raise unsupported_value(f"{name}.{part}", rope.get(part))
  return tuple(float(rope[part]) for part in _KINDS[kind])
