"""RoPE in config.json, of all layers or of one kind of layer."""

from collections.abc import Sequence
from typing import Any

from antlm_jax.hf.architecture import differs

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


def field(scaling: Sequence[float] = ()) -> dict[str, Any]:
  """Returns the field of config.json for our `rope_scaling`."""
  kind, parts = next(x for x in _KINDS.items() if len(x[1]) == len(scaling))
  out = {"rope_type": kind, **dict(zip(parts, scaling, strict=True))}
  length = "original_max_position_embeddings"
  return out | ({length: int(out[length])} if length in out else {})


def scaling(name: str, rope: Any) -> tuple[float, ...]:
  """Returns our `rope_scaling` for a field; ValueError for another kind."""
  if not isinstance(rope, dict) or dict in map(type, rope.values()):
    raise differs(name, rope)
  kind = rope.get("rope_type", rope.get("type", "default"))
  if not isinstance(kind, str) or kind not in _KINDS:
    raise differs(f"{name}.rope_type", kind)
  if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
    raise differs(f"{name}.partial_rotary_factor", part)
  for part in _KINDS[kind]:
    if type(rope.get(part)) not in (int, float):
      raise differs(f"{name}.{part}", rope.get(part))
  return tuple(float(rope[part]) for part in _KINDS[kind])
