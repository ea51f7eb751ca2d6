"""Encoders of ours as models of transformers: one table for both directions.

An `Architecture` pairs our settings and parameters with those of a model of
transformers. Export reads it from left to right, import from right to left. A
name with `{}` is numbered by layer there, and the layers are stacked here.
Kernels are `[in, out]` here and `[out, in]` there.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from antlm_jax.errors import UserError

ATTENTIONS = ("causal", "bidirectional")
NATIVE = "antlm_jax.json"  # lets import restore the same checkpoint
# Settings of all encoders, by their usual names in transformers.
SETTINGS = {
  "vocab_size": "vocab_size",
  "width": "hidden_size",
  "layers": "num_hidden_layers",
  "heads": "num_attention_heads",
  "mlp_width": "intermediate_size",
  "max_seq_len": "max_position_embeddings",
  "init_std": "initializer_range",
}


def classes(family: str, *tasks: str, base: str = "Model") -> dict[str, str]:
  """Returns a family's classes by auto class; its own is the first."""
  named = {f"AutoModelFor{task}": f"{family}For{task}" for task in tasks}
  return named | {"AutoModel": family + base}


def tensors(modules: Mapping[str, str]) -> dict[str, str]:
  """Returns the tensors of modules' possible parameters, by our paths."""
  parts = {"kernel": "weight", "scale": "weight", "bias": "bias"}
  return {
    f"{ours}/{part}": f"{theirs}.{name}"
    for ours, theirs in modules.items()
    for part, name in parts.items()
  }


@dataclasses.dataclass(frozen=True)
class Target:
  """A model of transformers that reads the weights with one attention."""

  model_type: str  # its config's type
  classes: Mapping[str, str]  # by auto class; its own first
  since: str  # first version of transformers that opens it
  # Settings that our encoder must have.
  ours: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Further fields of its config.
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Defaults of transformers for absent fields.
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  zeros: tuple[str, ...] = ()  # biases `[D]` of each layer that ours lacks
  # Tensors with other names than in `Architecture.weights`.
  weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Our roles, the first known, for token ids that it has by default.
  ids: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
  # Tensors with other names than in `heads.HEADS`.
  head: Mapping[str, str] = dataclasses.field(default_factory=dict)
  code: tuple[str, ...] = ()  # Python files of its folder, in hf/remote
  note: str = ""  # for its card

  def window(self, config, default: int) -> int:
    """Returns the window of all local layers; UserError if theirs differ."""
    widths = set(config.layer_windows) - {0} or {default}
    if len(widths) > 1:
      raise UserError(
        f"transformers has no {self.model_type} with windows of several widths:"
        f" model.windows={config.windows}"
      )
    return widths.pop()


@dataclasses.dataclass(frozen=True)
class Architecture:
  """An encoder of ours in transformers."""

  paper: str  # URL
  settings: Mapping[str, str]  # our settings to fields of config.json
  # Our parameters to tensors. Parameters of one tensor are joined along its
  # first axis, in this order.
  weights: Mapping[str, str]
  # Its models, by attention; the first that fits is used. `mntp` has those for
  # bidirectional models that predict masks one position before (by default
  # `bidirectional`).
  targets: Mapping[str, Sequence[Target]]
  causal_field: str  # field of config.json that makes a model causal
  # Returns further fields of config.json for our configuration and a target.
  # Raises UserError if transformers has no such model.
  extra: Callable[[Any, Target], Mapping[str, Any]] = lambda config, target: {}
  # Returns the fields of a config.json with defaults for absent ones. Raises
  # ValueError if our encoder would compute something else.
  complete: Callable[[Mapping, Target], Mapping] = lambda fields, target: fields
  unused: Sequence[str] = ()  # tensors that transformers lacks, without effect

  def target(self, config, attention: str, mask_shift: int) -> Target:
    """Returns the model for a configuration, an attention and a mask_shift.

    Raises a UserError if transformers has no such model.
    """
    rows = self.targets[attention]
    if mask_shift and attention == "bidirectional":
      rows = self.targets.get("mntp", rows)
    for row in rows:
      differing = [n for n, v in row.ours.items() if getattr(config, n) != v]
      if not differing:
        return row
    if not rows:
      raise UserError(
        "transformers has no such model that predicts a mask one position"
        " before it: train with M, or export with --as=causal"
      )
    own = ", ".join(f"model.{n}={getattr(config, n)}" for n in differing)
    raise UserError(f"transformers has no {row.model_type} with {own}")

  def names(self, target: Target) -> dict[str, str]:
    """Returns our parameters to the target's tensors, as `weights`."""
    return {**self.weights, **target.weights}


def completed(fields: Mapping, defaults: Mapping, only: Mapping) -> dict:
  """Returns the fields of a config.json with defaults for absent ones.

  A null field is absent and gets no default. Raises a ValueError if a field
  differs from `only`, the values that ours compute.
  """
  given = {k: v for k, v in {**defaults, **fields}.items() if v is not None}
  for name, right in only.items():
    if given.get(name, right) != right:
      raise differs(name, given[name])
  return given


def whole(fields: Mapping, name: str, least: int) -> int:
  """Returns a field that is an integer; ValueError if it is none, or small."""
  found = fields.get(name)
  if type(found) is not int or not least <= found < 2**20:
    raise differs(name, found)
  return found


def layer_kinds(
  given: Mapping, default: Callable[[int], str], known: Sequence[str]
) -> list[str]:
  """Returns the kind of each layer, by default a function of its index.

  Raises a ValueError if a kind is not `known`, or there is not one a layer.
  """
  layers = whole(given, "num_hidden_layers", 1)
  kinds = given.get("layer_types") or [default(i) for i in range(layers)]
  complete = isinstance(kinds, list) and len(kinds) == layers
  if not complete or any(kind not in known for kind in kinds):
    raise differs("layer_types", kinds)
  return kinds


def differs(name: str, found: Any) -> ValueError:
  """Returns the error for a field that our encoders do not implement."""
  shown = json.dumps(found) if isinstance(found, dict) else repr(found)
  return ValueError(
    f"{name} is {shown[:60]}, which this library does not compute"
  )
