"""Layouts in which other programs write checkpoints of our encoders.

Each `Layout` is a row that renames a folder's fields and tensors to those that
export writes.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.hf.weights import Stored, Weights

# Modules that wrap the encoder in other programs.
_WRAPPERS = re.compile(r"((module|model|transformer|classifier|lm_head)\.)*")
_OURS = "model.layers.{}.self_attn"
_MLP = "model.layers.{}.mlp"


@dataclasses.dataclass(frozen=True)
class Layout:
  """Names in another program's checkpoints, and our names for them."""

  mark: str  # tensor that identifies the layout, named as in `tensors`
  # Their tensor names, without wrappers and with `{}` for a number, to our
  # names for equal parts along its first axis. Numbered tensors with one name
  # here are joined along that axis.
  tensors: Mapping[str, tuple[str, ...]]
  fields: Mapping[str, str]  # their fields of config.json to ours
  settings: Mapping[str, Any]  # fields that our config.json alone has
  curriculum: str = ""  # objective of training; empty to go by config.json
  boundary: str = ""  # tokens around texts; empty to go by the tokenizer
  notes: tuple[str, ...] = ()  # for the user
  prefix: str = ""  # of our names that theirs lack

  def fields_of(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json under our names."""
    named = {o: fields[t] for t, o in self.fields.items() if t in fields}
    return {**fields, **named, **self.settings}

  def tensors_of(self, weights: Weights) -> Weights:
    """Returns the weights under our names.

    Raises a UserError if numbered tensors have shapes that cannot be joined.
    """
    pieces = collections.defaultdict(dict)
    for name, tensor in weights.tensors.items():
      number, names = self._named(name)
      for i, ours in enumerate(names):
        pieces[ours][number] = _part(tensor, i, len(names))
    joined = {
      ours: _joined(f"{weights.folder}: {ours}", [p[i] for i in sorted(p)])
      for ours, p in pieces.items()
    }
    return dataclasses.replace(weights, tensors=joined)

  def _named(self, name: str) -> tuple[int, list[str]]:
    """Returns a tensor's number and our names for it."""
    inner = _inner(name)
    for theirs, ours in self.tensors.items():
      pattern = re.escape(theirs).replace(r"\{\}", r"(\d+)")
      if found := re.fullmatch(pattern, inner):
        number = int(found[1]) if found.groups() else 0
        return number, [each.format(number) for each in ours]
    return 0, [self.prefix + name]


def _inner(name: str) -> str:
  return _WRAPPERS.sub("", name, count=1)


def _part(tensor: Stored, index: int, count: int) -> Stored:
  """Returns one of `count` parts of the first axis; they may be uneven."""
  if count == 1 or not tensor.shape:
    return tensor
  start, stop = (tensor.shape[0] * i // count for i in (index, index + 1))
  shape = stop - start, *tensor.shape[1:]
  return Stored(shape, tensor.dtype, lambda: tensor.read()[start:stop])


def _joined(name: str, tensors: list[Stored]) -> Stored:
  """Returns tensors joined along the first axis."""
  if len(tensors) == 1:
    return tensors[0]
  shapes = [tensor.shape for tensor in tensors]
  if () in shapes or len({shape[1:] for shape in shapes}) > 1:
    found = ", ".join(str(list(shape)) for shape in shapes)
    raise UserError(f"{name} has parts with different shapes: {found}")
  return Stored(
    (sum(shape[0] for shape in shapes), *shapes[0][1:]),
    tensors[0].dtype,
    lambda: np.concatenate([tensor.read() for tensor in tensors]),
  )


def _both(theirs: str, *ours: str) -> dict[str, tuple[str, ...]]:
  """Returns rows for a weight and its bias."""
  return {
    f"{theirs}.{kind}": tuple(f"{name}.{kind}" for name in ours)
    for kind in ("weight", "bias")
  }


def _ltg_bert(attention: str, mlp: str) -> dict[str, tuple[str, ...]]:
  """Returns rows that LTG-BERT and GPT-BERT share, by sublayer names."""
  up, gate = f"{_MLP}.up_proj.weight", f"{_MLP}.gate_proj.weight"
  return {
    "embedding.word_embedding.weight": ("model.embed_tokens.weight",),
    "embedding.relative_embedding": ("model.relative_embedding.weight",),
    **_both("embedding.relative_layer_norm", "model.relative_norm"),
    **_both(f"{attention}.in_proj_qk", f"{_OURS}.q_proj", f"{_OURS}.k_proj"),
    **_both(f"{attention}.out_proj", f"{_OURS}.o_proj"),
    # GELU of the second half gates the first.
    f"{mlp}.mlp.1.weight": (up, gate),
    f"{mlp}.mlp.4.weight": (f"{_MLP}.down_proj.weight",),
    **_both("nonlinearity.1", "lm_head.dense"),
    "nonlinearity.5.weight": ("lm_head.weight",),
    "nonlinearity.5.bias": ("lm_head.bias",),
  }


_FIELDS = {
  "position_bucket_size": "position_buckets",
  "max_position_embeddings": "longest_distance",
}
_GPT_BERT = "attention_gate", "depth_weights"  # LTG-BERT has neither
LAYOUTS = (
  Layout(  # github.com/ltgoslo/ltg-bert, babylm/
    mark="layers.0.attention.in_proj_qk.weight",
    tensors={
      **_ltg_bert("layers.{}.attention", "layers.{}.mlp"),
      **_both("layers.{}.attention.in_proj_v", f"{_OURS}.v_proj"),
      **_both("layers.{}.attention.post_layer_norm", f"{_OURS}.out_norm"),
    },
    fields=_FIELDS,
    settings={"model_type": "ltg_bert", **dict.fromkeys(_GPT_BERT, False)},
    boundary="bos_eos",
    notes=(
      "distances follow BabyLM's LTG-BERT; BNC-BERT and NorBERT 3 use the same"
      " names but another layout of this projection",
    ),
  ),
  Layout(  # github.com/ltgoslo/gpt-bert, pretraining/model_extra.py
    mark="attention_layers.0.in_proj_qk.weight",
    tensors={
      **_ltg_bert("attention_layers.{}", "mlp_layers.{}"),
      **_both(
        "attention_layers.{}.in_proj_vg", f"{_OURS}.v_proj", f"{_OURS}.g_proj"
      ),
      "dwa_modules.alphas.{}": ("model.depth_weights",),
    },
    fields=_FIELDS,
    settings={"model_type": "ltg_bert", **dict.fromkeys(_GPT_BERT, True)},
    curriculum="C:N=1:15",
    boundary="bos",
  ),
)
OWN = Layout(mark="", tensors={}, fields={}, settings={})
# Saved by transformers' AutoModel, as embedding models are.
BARE = dataclasses.replace(OWN, mark="embed_tokens.weight", prefix="model.")


def layout(weights: Weights) -> Layout:
  """Returns the layout of a folder's weights; by default that of export."""
  if BARE.mark in weights.tensors:
    return BARE
  names = set(map(_inner, weights))
  return next((row for row in LAYOUTS if row.mark in names), OWN)
