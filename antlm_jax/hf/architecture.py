"""Tables that map our encoders to models of transformers.

An `Architecture` maps our settings and parameters to those of a transformers
model. Export and import use the same table in opposite directions. In
transformers, layers are separate tensors, whose number replaces `{}` in a name;
our layers are stacked. Our kernels are `[in, out]`, and theirs `[out, in]`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from antlm_jax.errors import UserError

ATTENTIONS = ("causal", "bidirectional")
# The run's metadata, with which import restores the checkpoint.
EXPORT_RECORD = "antlm_jax.json"
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


def auto_classes(
  family: str, *tasks: str, base: str = "Model"
) -> dict[str, str]:
  """Returns a family's classes by auto class, beginning with the main class."""
  named = {f"AutoModelFor{task}": f"{family}For{task}" for task in tasks}
  return named | {"AutoModel": family + base}


def tensor_names(modules: Mapping[str, str]) -> dict[str, str]:
  """Returns the tensors of all possible parameters of modules by our paths."""
  parts = {"kernel": "weight", "scale": "weight", "bias": "bias"}
  return {
    f"{ours}/{part}": f"{theirs}.{name}"
    for ours, theirs in modules.items()
    for part, name in parts.items()
  }


@dataclasses.dataclass(frozen=True)
class Target:
  """A model of transformers that uses the weights with one attention."""

  model_type: str  # model_type of its config
  classes: Mapping[str, str]  # by auto class, beginning with the main class
  since: str  # first version of transformers that opens it
  # Settings that our encoder must have.
  ours: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Further fields of its config.
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Defaults of transformers for absent fields.
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  zeros: tuple[str, ...] = ()  # biases `[D]` per layer that our encoder lacks
  # Tensors that its files have under two names: the original's, by the copy's.
  copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Tensors whose names differ from `Architecture.weights`.
  weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Roles that replace default token ids; the first known role is used.
  ids: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
  # Tensors whose names differ from `heads.HEADS`; "" for no such tensor.
  head: Mapping[str, str] = dataclasses.field(default_factory=dict)
  code: tuple[str, ...] = ()  # Python files from hf/remote for its folder
  note: str = ""  # note for its card

  def has_weights_of(self, other: "Target") -> bool:
    """Whether both have the same tensors of the encoder."""
    return self.zeros == other.zeros and self.weights == other.weights

  def window(self, config, default: int) -> int:
    """Returns the window of all local layers; UserError if they differ."""
    widths = set(config.layer_windows) - {0} or {default}
    if len(widths) > 1:
      raise UserError(
        f"transformers has no {self.model_type} with windows of several widths:"
        f" model.windows={config.windows}"
      )
    return widths.pop()


@dataclasses.dataclass(frozen=True)
class Architecture:
  """One of our encoders in transformers."""

  paper: str  # URL
  settings: Mapping[str, str]  # our settings to fields of config.json
  # Our parameters to tensors. A tensor of several parameters concatenates them
  # along its first axis, in this order.
  weights: Mapping[str, str]
  # Models by attention; the first that fits is used. `mntp` has the models that
  # predict a mask one position before it. Its default is `bidirectional`.
  targets: Mapping[str, Sequence[Target]]
  causal_field: str  # field of config.json that makes a model causal
  # Returns further fields of config.json for our configuration and a target.
  # Raises UserError if transformers has no such model.
  extra: Callable[[Any, Target], Mapping[str, Any]] = lambda config, target: {}
  # Returns the first version of transformers that computes the same.
  since: Callable[[Any, Target], str] = lambda config, target: target.since
  # Fills in defaults for absent fields of a config.json. Raises ValueError if
  # our encoder would compute something else.
  complete: Callable[[Mapping, Target], Mapping] = lambda fields, target: fields
  unused: Sequence[str] = ()  # tensors that only we have, without effect
  # Other names in files, as patterns and replacements. If a file has both
  # names, the tensor with the other name counts.
  older: Sequence[tuple[str, str]] = ()
  # Patterns of tensors that our encoder lacks, and their names in a note.
  # Import leaves these tensors out.
  dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def target(self, config, attention: str, mask_shift: int) -> Target:
    """Returns the model for a configuration, attention and mask shift.

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
      raise UserError(self._absent(attention))
    settings = ", ".join(f"model.{n}={getattr(config, n)}" for n in differing)
    raise UserError(f"transformers has no {row.model_type} with {settings}")

  def _absent(self, attention: str) -> str:
    """Returns the error for an attention, or MNTP, without any model."""
    if attention == "causal":
      lacks = "is causal"
      remedies = ["export it as bidirectional"]
    else:
      lacks = "predicts a mask one position before it"
      remedies = ["train with M"]
      remedies += ["export it as causal"] * bool(self.targets["causal"])
    return (
      f"transformers has no model of this type that {lacks}:"
      f" {', or '.join(remedies)}"
    )

  def names(self, target: Target) -> dict[str, str]:
    """Returns `weights` with the names that differ in the target."""
    return {**self.weights, **target.weights}


def with_defaults(fields: Mapping, defaults: Mapping, only: Mapping) -> dict:
  """Fills in defaults for absent fields of a config.json.

  Null fields are removed and get no default. Raises a ValueError if a field
  differs from `only`, the values that our encoders compute, or if `is_causal`
  makes a bidirectional model causal.
  """
  values = {k: v for k, v in {**defaults, **fields}.items() if v is not None}
  causal = values.get("is_causal")
  # transformers would make it causal only in batches without padding.
  if causal not in (False, defaults["is_causal"]):
    raise unsupported_value("is_causal", causal)
  for name, right in only.items():
    if values.get(name, right) != right:
      raise unsupported_value(name, values[name])
  return values


def integer_field(fields: Mapping, name: str, least: int) -> int:
  """Returns an integer field; ValueError if it is no integer or too small."""
  value = fields.get(name)
  if type(value) is not int or not least <= value < 2**20:
    raise unsupported_value(name, value)
  return value


def unsupported_value(name: str, value: Any) -> ValueError:
  """Returns the error for a field that our encoders do not implement."""
  shown = json.dumps(value) if isinstance(value, dict) else repr(value)
  return ValueError(
    f"{name} is {shown[:60]}, which this library does not support"
  )
