"""config.json and generation_config.json: written, and read with care.

Reading refuses what our encoders would compute differently: better no model
than one that is silently another.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from antlm_jax import models
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf.mapping import (
  ARCHITECTURES,
  LLAMA_COMPUTES,
  Architecture,
  Form,
)
from antlm_jax.hf.tokenizer import ROLES, special_ids

CONFIG = "config.json"


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
  for role, index in special_ids(tokenizer).items():
    out[f"{role}_token_id"] = index
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
  out = {
    f"{role}_token_id": index
    for role, index in special_ids(tokenizer).items()
    if role != "mask" and index is not None
  }
  special = tokenizer.special.copy()
  if tokenizer.eos_id is not None:
    special[tokenizer.eos_id] = False
  banned = np.flatnonzero(special).tolist()
  return out | ({"suppress_tokens": banned} if banned else {})


# ------------------------------------------------------------------- reading

_MODEL_TYPES = {
  "llama": "llama",
  "eurobert": "llama",
  "ltg_bert": "ltg_bert",
}
# What transformers takes where a EuroBERT or a Llama does not say.
_EUROBERT = {
  "rms_norm_eps": 1e-5,
  "max_position_embeddings": 8192,
  "rope_theta": 250_000.0,
}
_LLAMA = {
  "rms_norm_eps": 1e-6,
  "max_position_embeddings": 2048,
  "rope_theta": 10_000.0,
}
_BOTH = {
  "attention_dropout": 0.0,
  "initializer_range": 0.02,
  "tie_word_embeddings": False,
}
# The only values under which transformers computes what our llama does; None
# and an absent field are fine.
_ONLY: dict[str, Any] = {
  **LLAMA_COMPUTES,
  "sliding_window": None,
  "quantization_config": None,
  "partial_rotary_factor": 1.0,
}
_ROPES = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5


class Described(NamedTuple):
  """What a config.json says.

  Attributes:
    encoder: The name of our encoder.
    settings: Its settings, with `vocab_size`.
    objective: The curriculum's letter for what it was made to do.
    special: Token ids by role: pad, bos, eos, mask; where it says them.
  """

  encoder: str
  settings: dict[str, Any]
  objective: str
  special: dict[str, int]


def read(folder: pathlib.Path) -> Described:
  """Reads a model folder's config.json.

  Raises:
    UserError: if it is no model folder, or not a model of ours.
  """
  path = folder / CONFIG
  fields = read_json(path, "not a folder of a transformers model")
  model_type = fields.get("model_type")
  if not isinstance(model_type, str) or model_type not in _MODEL_TYPES:
    raise UserError(
      f"{path}: model_type={model_type!r} is not one of"
      f" {', '.join(_MODEL_TYPES)}"
    )
  encoder = _MODEL_TYPES[model_type]
  if encoder == "llama":
    _refuse(path, fields)
    fields = _filled(fields, model_type)
  return Described(
    encoder,
    _settings(path, encoder, fields),
    _objective(model_type, fields),
    _special(fields),
  )


def _objective(model_type: str, fields: Mapping) -> str:
  causal = fields.get("is_decoder" if model_type == "ltg_bert" else "is_causal")
  if causal is None:
    causal = model_type == "llama"
  return "C" if causal else "N" if fields.get("mask_shift") else "M"


def _special(fields: Mapping) -> dict[str, int]:
  out = {}
  for role in ROLES:
    index = fields.get(f"{role}_token_id")
    if isinstance(index, list) and index:  # several ends; the first is theirs
      index = index[0]
    if isinstance(index, int):
      out[role] = index
  return out


def _settings(path, encoder: str, fields: Mapping) -> dict[str, Any]:
  config_type = models.ENCODERS[encoder][1]
  types = {field.name: field.type for field in dataclasses.fields(config_type)}
  out = {}
  for ours, theirs in ARCHITECTURES[encoder].settings.items():
    if ours not in types:  # follows from the others
      continue
    found = fields.get(theirs)
    if found is None:
      raise UserError(f"{path} does not say {theirs}")
    fine = (int, float) if types[ours] is float else types[ours]
    if not isinstance(found, fine) or (type(found) is bool) > (fine is bool):
      raise UserError(
        f"{path}: {theirs}={found!r} is not of type {types[ours].__name__}"
      )
    out[ours] = types[ours](found)
  return out


def _filled(fields: Mapping, model_type: str) -> dict[str, Any]:
  """Says what the fields of a Llama leave out."""
  given = {k: v for k, v in fields.items() if v is not None}
  heads, width = fields.get("num_attention_heads"), fields.get("hidden_size")
  given.setdefault("num_key_value_heads", heads)
  if isinstance(heads, int) and isinstance(width, int) and heads > 0:
    given.setdefault("head_dim", width // heads)
  for name in _ROPES:
    given |= {k: v for k, v in given.get(name, {}).items() if k == "rope_theta"}
  own = _EUROBERT if model_type == "eurobert" else _LLAMA
  return {**_BOTH, **own, **given}


def _refuse(path: pathlib.Path, fields: Mapping) -> None:
  """Refuses, by name, what our llama would compute differently."""
  for name, right in _ONLY.items():
    found = fields.get(name)
    if found is not None and found != right:
      raise _other(path, name, found)
  for name in _ROPES:
    rope = fields.get(name) or {}
    if not isinstance(rope, dict):
      raise _other(path, name, rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
      raise _other(path, f"{name}.rope_type", kind)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
      raise _other(path, f"{name}.partial_rotary_factor", "not 1")
  layers = fields.get("layer_types") or []
  if not isinstance(layers, list) or set(layers) - {"full_attention"}:
    raise _other(path, "layer_types", layers)


def _other(path, name: str, found) -> UserError:
  shown = json.dumps(found) if isinstance(found, dict) else repr(found)
  return UserError(
    f"{path}: {name} is {shown[:60]}, which this library's llama does not"
    " compute"
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
