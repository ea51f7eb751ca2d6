"""Writes and reads config.json and generation_config.json.

Reading raises an error for a model that our encoders compute differently.
"""

import dataclasses
import pathlib
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.hf import mapping
from antlm_jax.hf.architecture import Architecture, Target, unsupported_value
from antlm_jax.hf.tokenizer import ROLES
from antlm_jax.runtime import files

CONFIG = "config.json"
GENERATION = "generation_config.json"


def make_config_json(
  model: models.Model,
  special: Mapping[str, int | None],
  target: Target,
  dtype: str,
) -> dict[str, Any]:
  """Returns a model's config.json, with the ids of `tokenizer.special_ids`.

  It has all fields, because transformers' defaults differ by architecture.
  Raises a UserError if transformers has no such model.
  """
  ours = model.config
  architecture = mapping.ARCHITECTURES[ours.name]
  if ours.width % ours.heads:
    raise UserError(
      f"model.width={ours.width} is not a multiple of model.heads={ours.heads},"
      " which transformers needs"
    )
  out = {"architectures": [next(iter(target.classes.values()))]}
  out |= {"model_type": target.model_type, **target.settings}
  out |= {t: getattr(ours, o) for o, t in architecture.settings.items()}
  out |= {f"{role}_token_id": index for role, index in special.items()}
  if out["mask_token_id"] is None:  # an error in EuroBERT's config
    del out["mask_token_id"]
  for name, roles in target.ids.items():
    indices = (special[role] for role in roles if special[role] is not None)
    out[f"{name}_token_id"] = next(indices, None)
  out |= architecture.extra(ours, target)
  if (pad := out.get("pad_token_id")) != special.get("pad"):
    raise UserError(
      f"transformers' {target.model_type} finds positions by the padding token,"
      f" here token {pad}, but the tokenizer pads with {special.get('pad')}:"
      " transformers has no such model"
    )
  # transformers up to 4.56 reads torch_dtype.
  return out | {"dtype": dtype, "torch_dtype": dtype}


def generation_config(
  special: Mapping[str, int | None], ends: np.ndarray, never_drawn: np.ndarray
) -> dict[str, Any]:
  """Returns generation_config.json.

  Args:
    special: Token ids by role.
    ends: Tokens that end a text; -1 for none.
    never_drawn: Whether generation must not draw a token, bool `[V]`.
  """
  out = {
    f"{role}_token_id": index
    for role, index in special.items()
    if role != "mask" and index is not None
  }
  if len(ends) > 1:
    out["eos_token_id"] = ends.tolist()
  elif ends[0] >= 0:
    out["eos_token_id"] = int(ends[0])
  banned = np.flatnonzero(never_drawn).tolist()
  return out | ({"suppress_tokens": banned} if banned else {})


class ModelDescription(NamedTuple):
  """Meaning of a config.json."""

  encoder: str  # name of our encoder
  weights: Mapping[str, str]  # tensors, as in `Architecture.weights`
  settings: dict[str, Any]  # settings of the encoder
  embedding_rows: int
  objective: str  # letter of the objective that fits the model
  special: dict[str, int]  # known token ids by role in `ROLES`


def describe(path: pathlib.Path, fields: Mapping[str, Any]) -> ModelDescription:
  """Interprets the fields of a config.json.

  Raises a UserError that names the path if no encoder computes such a model.
  """
  try:
    model_type = fields.get("model_type")
    encoder, architecture, target = mapping.of_model_type(model_type)
    fields = architecture.complete(fields, target)
    settings = _settings_of_fields(encoder, architecture, fields)
    embedding_rows = settings.pop("vocab_size")
    if embedding_rows < 1:
      raise unsupported_value("vocab_size", embedding_rows)
  except ValueError as error:
    raise UserError(f"{path}: {error}") from error
  objective = "N" if fields.get("mask_shift") else "M"
  if fields.get(architecture.causal_field):
    objective = "C"
  special = {}
  for role in ROLES:
    index = fields.get(f"{role}_token_id")
    if isinstance(index, list) and index:  # several tokens end a text
      index = index[0]
    if isinstance(index, int):
      special[role] = index
  names = architecture.names(target)
  return ModelDescription(
    encoder, names, settings, embedding_rows, objective, special
  )


def end_ids(
  folder: pathlib.Path, fields: Mapping, rows: int
) -> tuple[int, ...]:
  """Returns the tokens under `rows` that end a generated text."""
  path = folder / GENERATION
  generation = files.read_json(path, "the model's") if path.exists() else {}
  ends = generation.get("eos_token_id", fields.get("eos_token_id"))
  ends = ends if isinstance(ends, list) else [ends]
  return tuple(i for i in ends if type(i) is int and 0 <= i < rows)


def _settings_of_fields(
  encoder: str, architecture: Architecture, fields: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns our settings for the fields.

  Raises a ValueError if a field is missing or has another type.
  """
  settings = dataclasses.fields(models.ENCODERS[encoder])
  types = {setting.name: setting.type for setting in settings}
  out = {}
  for ours, theirs in architecture.settings.items():
    # Export writes the property `head_dim`, which import sets as `head_width`.
    ours = "head_width" if ours == "head_dim" else ours
    if ours not in types:  # another property, computed from other settings
      continue
    value = fields.get(theirs)
    # `tuple` for tuple[float, ...], or else the type itself.
    kind = typing.get_origin(types[ours]) or types[ours]
    if value is None:
      raise ValueError(f"{theirs} is missing")
    kinds = (int, float) if kind is float else kind
    # In Python, a bool is also an int.
    if not isinstance(value, kinds) or (type(value) is bool) != (kind is bool):
      raise ValueError(f"{theirs}={value!r} is not of type {kind.__name__}")
    out[ours] = kind(value)
  return out
