"""config.json and generation_config.json: written, and read with care.

Reading refuses what our encoders would compute differently: better no model
than one that is silently another.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from antlm_jax import models
from antlm_jax.cli import UserError
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.hf.names import (
  ARCHITECTURES,
  LLAMA_COMPUTES,
  Architecture,
  Form,
)

CONFIG = "config.json"
_ROLES = ("pad", "bos", "eos", "mask")


# ------------------------------------------------------------------- writing


def config(
  model: models.Model,
  tokenizer: Tokenizer,
  architecture: Architecture,
  form: Form,
  dtype: str,
) -> dict[str, Any]:
  """Returns a model's config.json.

  Every field is written, since transformers' defaults differ by architecture.

  Raises:
    UserError: if transformers has no such model.
  """
  c = model.config
  out = {"architectures": [next(iter(form.classes.values()))]}
  out |= {"model_type": form.model_type, **form.settings}
  out |= {t: getattr(c, ours) for ours, t in architecture.settings.items()}
  for role in _ROLES:
    out[f"{role}_token_id"] = getattr(tokenizer, f"{role}_id")
  if form.model_type != "ltg_bert":
    if c.width % c.heads:
      raise UserError(
        f"transformers' Llama has no width ({c.width}) that is not a multiple"
        f" of the heads ({c.heads})"
      )
    # Beside the field rope_theta, which was the form until transformers 5.
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    out["rope_parameters"] = rope
  # The second is the name until transformers 4.56.
  return out | {"dtype": dtype, "torch_dtype": dtype}


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
  """Returns generation_config.json: nothing special is drawn but the end."""
  ids = {f"{r}_token_id": getattr(tokenizer, f"{r}_id") for r in _ROLES[:3]}
  banned = [
    i for i, special in enumerate(tokenizer.special.tolist())
    if special and i != tokenizer.eos_id
  ]  # fmt: skip
  out = {name: i for name, i in ids.items() if i is not None}
  return out | ({"suppress_tokens": banned} if banned else {})


# ------------------------------------------------------------------- reading

_MODEL_TYPES = {
  "llama": "llama",
  "eurobert": "llama",
  "mistral": "llama",  # without its window it is Llama
  "ltg_bert": "ltg_bert",
}
# What transformers takes where a config.json does not say; these differ.
_EPS = {"eurobert": 1e-5}
_POSITIONS = {"llama": 2048, "eurobert": 8192, "mistral": 131072}
# The only values under which transformers computes what our llama does; None
# and an absent field are fine.
_ONLY: dict[str, Any] = {
  **LLAMA_COMPUTES,
  "sliding_window": None,
  "quantization_config": None,
  "partial_rotary_factor": 1.0,
  "use_sliding_window": False,
}


def read(folder: pathlib.Path) -> tuple[str, dict[str, Any]]:
  """Reads a model folder's config.json.

  Returns:
    The name of our encoder, and its settings with `vocab_size`.

  Raises:
    UserError: if it is no model folder, or not a model of ours.
  """
  fields = read_json(folder / CONFIG, "not a folder of a transformers model")
  model_type = fields.get("model_type")
  if model_type not in _MODEL_TYPES:
    raise UserError(
      f"{folder / CONFIG}: model_type={model_type!r} is not one of"
      f" {', '.join(_MODEL_TYPES)}"
    )
  encoder = _MODEL_TYPES[model_type]
  if encoder == "llama":
    _refuse(folder, fields)
    fields = _filled(fields, model_type)
  return encoder, _settings(folder, encoder, fields)


def _settings(folder, encoder: str, fields: Mapping) -> dict[str, Any]:
  config_type = models.ENCODERS[encoder][1]
  known = {field.name for field in dataclasses.fields(config_type)}
  out = {}
  for ours, theirs in ARCHITECTURES[encoder].settings.items():
    if ours not in known:  # follows from the others
      continue
    if fields.get(theirs) is None:
      raise UserError(f"{folder / CONFIG} does not say {theirs}")
    out[ours] = fields[theirs]
  return out


def _filled(fields: Mapping, model_type: str) -> dict[str, Any]:
  """Says what the fields of a Llama leave out."""
  rope = fields.get("rope_parameters") or {}
  theta = rope.get("rope_theta", fields.get("rope_theta"))
  heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
  defaults = {
    "num_key_value_heads": heads,
    "head_dim": width // heads if heads and width else None,
    "rms_norm_eps": _EPS.get(model_type, 1e-6),
    "max_position_embeddings": _POSITIONS[model_type],
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 250_000.0 if model_type == "eurobert" else 10_000.0,
  }
  given = {k: v for k, v in fields.items() if v is not None}
  if theta is not None:
    given["rope_theta"] = float(theta)
  return defaults | given


def _refuse(folder: pathlib.Path, fields: Mapping) -> None:
  """Refuses, by name, what our llama would compute differently."""
  for name, right in _ONLY.items():
    found = fields.get(name)
    if found is not None and found != right:
      raise _other(folder, name, found)
  for name in ("rope_scaling", "rope_parameters"):
    rope = fields.get(name) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
      raise _other(folder, f"{name}.rope_type", kind)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
      raise _other(folder, f"{name}.partial_rotary_factor", "not 1")
  if set(fields.get("layer_types") or ()) - {"full_attention"}:
    raise _other(folder, "layer_types", "not all full_attention")


def _other(folder, name: str, found) -> UserError:
  found = json.dumps(found) if isinstance(found, dict) else repr(found)
  return UserError(
    f"{folder / CONFIG}: {name} is {found[:60]}, which this library's llama"
    " does not compute"
  )


def read_json(path: pathlib.Path, otherwise: str) -> dict[str, Any]:
  """Reads a JSON object; `otherwise` says what its absence means."""
  try:
    found = json.loads(path.read_text("utf-8"))
  except OSError as error:
    raise UserError(
      f"{path.parent} is {otherwise}: {path.name}: {error.strerror}"
    ) from error
  except ValueError as error:
    raise UserError(f"{path} is not JSON: {error}") from error
  if not isinstance(found, dict):
    raise UserError(f"{path} is not a JSON object")
  return found
