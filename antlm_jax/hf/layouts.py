"""Layouts of checkpoints of our encoders that other programs write.

A `TensorLayout` has the names of tensors and of fields of config.json.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.hf.architecture import tensor_names
from antlm_jax.hf.weights import StoredTensor, Weights

# Names of modules that wrap the encoder in other programs.
_WRAPPERS = re.compile(r"((module|model|transformer|classifier|lm_head)\.)*")


@dataclasses.dataclass(frozen=True)
class TensorLayout:
  """Names in the checkpoints of another program."""

  mark: str  # tensor that identifies the layout, without wrappers
  # Our parameters to its tensors, as in `Architecture.weights`; empty for the
  # names that export writes.
  weights: Mapping[str, str]
  fields: Mapping[str, str]  # its fields of config.json to ours
  settings: Mapping[str, Any]  # fields that only our config.json has
  curriculum: str = ""  # objective of training; empty to use config.json
  boundary: str = ""  # tokens around texts; empty to use the tokenizer
  notes: tuple[str, ...] = ()  # notes for the user
  numbered: str = ""  # tensor of `weights` that files split: NAME.0, NAME.1

  def fields_of(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json under our names."""
    named = {o: fields[t] for t, o in self.fields.items() if t in fields}
    return {**fields, **named, **self.settings}

  def tensors_of(self, weights: Weights) -> Weights:
    """Returns the weights without the prefixes of wrappers.

    The numbered tensors NAME.0, NAME.1 and so on become one, NAME. Raises a
    UserError if their shapes are incompatible.
    """
    tensors = dict(weights.tensors)
    if self.weights:
      tensors = {_inner(name): t for name, t in tensors.items()}
    if not self.numbered:
      return dataclasses.replace(weights, tensors=tensors)
    pattern = re.compile(rf"{re.escape(self.numbered)}\.(\d+)")
    matches = [*filter(None, map(pattern.fullmatch, tensors))]
    matches.sort(key=lambda match: int(match[1]))
    pieces = [tensors.pop(match[0]) for match in matches]
    if pieces:
      label = f"{weights.folder}: {self.numbered}"
      tensors[self.numbered] = _concatenate_tensors(label, pieces)
    return dataclasses.replace(weights, tensors=tensors)


def _inner(name: str) -> str:
  return _WRAPPERS.sub("", name, count=1)


def _concatenate_tensors(
  name: str, pieces: Sequence[StoredTensor]
) -> StoredTensor:
  """Concatenates tensors along the first axis."""
  shapes = [piece.shape for piece in pieces]
  if () in shapes or len({shape[1:] for shape in shapes}) > 1:
    listed = ", ".join(str(list(shape)) for shape in shapes)
    raise UserError(f"{name} has parts with different shapes: {listed}")
  return StoredTensor(
    (sum(shape[0] for shape in shapes), *shapes[0][1:]),
    pieces[0].dtype,
    lambda: np.concatenate([piece.read() for piece in pieces]),
  )


def _ltg_bert(attention: str, mlp: str, **values: str) -> dict[str, str]:
  """Returns the tensors of LTG-BERT or GPT-BERT, given names of sublayers.

  `values` are the projections of attention whose names differ between the two.
  """
  sublayers = {
    "q": "in_proj_qk",
    "k": "in_proj_qk",
    **values,
    "out": "out_proj",
    "out_norm": "post_layer_norm",
  }
  return {
    "embedding": "embedding.word_embedding.weight",
    "relative": "embedding.relative_embedding",
    "depth_weights": "dwa_modules.alphas",
    **tensor_names(
      {
        "relative_norm": "embedding.relative_layer_norm",
        **{
          f"blocks/attention/{ours}": f"{attention}.{theirs}"
          for ours, theirs in sublayers.items()
        },
        "blocks/mlp/up": f"{mlp}.mlp.1",
        "blocks/mlp/gate": f"{mlp}.mlp.1",  # second half of the tensor
        "blocks/mlp/down": f"{mlp}.mlp.4",
        "head/linear": "nonlinearity.1",
        "head": "nonlinearity.5",
      }
    ),
  }


_FIELDS = {
  "position_bucket_size": "position_buckets",
  "max_position_embeddings": "longest_distance",
}
_GPT_BERT = "attention_gate", "depth_weights"  # LTG-BERT has neither
LAYOUTS = (
  TensorLayout(  # github.com/ltgoslo/ltg-bert, babylm/
    mark="layers.0.attention.in_proj_qk.weight",
    weights=_ltg_bert("layers.{}.attention", "layers.{}.mlp", v="in_proj_v"),
    fields=_FIELDS,
    settings={"model_type": "ltg_bert", **dict.fromkeys(_GPT_BERT, False)},
    boundary="bos_eos",
    notes=(
      "warning: distances follow BabyLM's LTG-BERT; BNC-BERT and NorBERT 3 use"
      " the same names but another layout",
    ),
  ),
  TensorLayout(  # github.com/ltgoslo/gpt-bert, pretraining/model_extra.py
    mark="attention_layers.0.in_proj_qk.weight",
    weights=_ltg_bert(
      "attention_layers.{}", "mlp_layers.{}", v="in_proj_vg", gate="in_proj_vg"
    ),
    fields=_FIELDS,
    settings={"model_type": "ltg_bert", **dict.fromkeys(_GPT_BERT, True)},
    curriculum="C:N=1:15",
    boundary="bos",
    numbered="dwa_modules.alphas",
  ),
)
OWN = TensorLayout(mark="", weights={}, fields={}, settings={})


def find_layout(weights: Weights) -> TensorLayout:
  """Returns the layout of a folder's weights; by default export's."""
  names = set(map(_inner, weights))
  return next((row for row in LAYOUTS if row.mark in names), OWN)
