"""What an encoder of ours is in transformers: one value, both directions.

An `Architecture` pairs the settings and parameters of an encoder of ours with
those of a model there. Export reads it from left to right, import from right to
left. A name with `{}` is numbered by layer: there the layers' parameters stand
one by one, here stacked. Kernels are `[in, out]` here and `[out, in]` there.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ATTENTIONS = ("causal", "bidirectional")
NATIVE = "antlm_jax.json"  # what import needs to give back the same checkpoint
# The settings that all encoders have, by the names that most models there use.
SETTINGS = {
  "vocab_size": "vocab_size",
  "width": "hidden_size",
  "layers": "num_hidden_layers",
  "heads": "num_attention_heads",
  "mlp_width": "intermediate_size",
  "max_seq_len": "max_position_embeddings",
  "init_std": "initializer_range",
}


@dataclasses.dataclass(frozen=True)
class Target:
  """A model of transformers that reads the same weights with one attention."""

  model_type: str  # its config's
  classes: Mapping[str, str]  # what opens it, by auto class; first its own
  since: str  # the first version of transformers that was seen to open it
  # Settings that ours must have to be this.
  ours: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # What else its config says.
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # What transformers takes where a config.json does not say.
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  # Biases `[D]` of each layer that it has and ours has not, by tensor: zeros.
  zeros: tuple[str, ...] = ()
  # Python files that its folder brings along, in `antlm_jax/hf/remote`.
  code: tuple[str, ...] = ()
  note: str = ""  # what else its card says


@dataclasses.dataclass(frozen=True)
class Architecture:
  """An encoder of ours in transformers.

  Attributes:
    paper: Where it is described.
    settings: Our settings and those of its config.json.
    weights: Our parameters and its tensors.
    targets: What it may become, by its attention, one of `ATTENTIONS`, the
      first that fits; as `mntp`, likewise if it predicts masks one position
      before, where what reads bidirectionally does not do both.
    causal_field: The field of a config.json that says whether it reads
      causally.
    extra: The encoder's configuration to further fields of config.json.
      Raises UserError where transformers has no such model.
    complete: The fields of a config.json, and the target of its model_type, to
      fields with nothing left out. Raises ValueError, which says what our
      encoder would compute differently.
  """

  paper: str
  settings: Mapping[str, str]
  weights: Mapping[str, str]
  targets: Mapping[str, Sequence[Target]]
  causal_field: str
  extra: Callable[[Any], Mapping[str, Any]] = lambda config: {}
  complete: Callable[[Mapping, Target], Mapping] = lambda fields, target: fields

  def target(self, config, attention: str, mask_shift: int) -> Target:
    """Returns what an encoder of this configuration becomes.

    By how it reads and where it predicts masks.
    """
    rows = self.targets[attention]
    if mask_shift and attention == "bidirectional":
      rows = self.targets.get("mntp", rows)
    return next(row for row in rows if _fits(config, row.ours))


def _fits(config, ours: Mapping[str, Any]) -> bool:
  return all(getattr(config, name) == value for name, value in ours.items())
