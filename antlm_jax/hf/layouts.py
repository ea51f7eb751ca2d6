"""Checkpoints of encoders of ours as other programs write them.

A `Layout` is a row: by it a folder reads as one that export_hf would write.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.hf.weights import Tensor, Weights

# What their programs put the modules in, one around the other.
_AROUND = re.compile(r"((module|model|transformer|classifier|lm_head)\.)*")
_OURS = "model.layers.{}.self_attn"


@dataclasses.dataclass(frozen=True)
class Layout:
  """Where a published model has what ours has.

  Attributes:
    mark: The tensor by which it is known, named as in `tensors`.
    tensors: Names there, less what is around them and with `{}` for a number,
      to names here of what they hold, in equal parts along the first axis.
      Numbered ones of one name here follow one another in it.
    fields: Fields of config.json there to the same here.
    settings: Fields that config.json has here and not there.
    curriculum: What it was trained with; by config.json if empty.
    boundary: What framed its texts; by the tokenizer if empty.
    notes: What a person should know.
    around: What stands before all other names here, and not there.
  """

  mark: str
  tensors: Mapping[str, tuple[str, ...]]
  fields: Mapping[str, str]
  settings: Mapping[str, Any]
  curriculum: str = ""
  boundary: str = ""
  notes: tuple[str, ...] = ()
  around: str = ""

  def fields_of(self, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of config.json as they are called here."""
    named = {o: fields[t] for t, o in self.fields.items() if t in fields}
    return {**fields, **named, **self.settings}

  def tensors_of(self, weights: Weights) -> Weights:
    """Returns the weights as they are called here.

    Raises:
      UserError: if the parts of one do not fit together.
    """
    pieces = collections.defaultdict(dict)
    for name, tensor in weights.tensors.items():
      number, names = self._place(name)
      for i, ours in enumerate(names):
        pieces[ours][number] = _part(tensor, i, len(names))
    joined = {
      ours: _joined(f"{weights.folder}: {ours}", [p[i] for i in sorted(p)])
      for ours, p in pieces.items()
    }
    return dataclasses.replace(weights, tensors=joined)

  def _place(self, name: str) -> tuple[int, list[str]]:
    """Returns a tensor's number, and its names here."""
    inner = _inner(name)
    for theirs, ours in self.tensors.items():
      pattern = re.escape(theirs).replace(r"\{\}", r"(\d+)")
      if found := re.fullmatch(pattern, inner):
        number = int(found[1]) if found.groups() else 0
        return number, [each.format(number) for each in ours]
    return 0, [self.around + name]


def _inner(name: str) -> str:
  return _AROUND.sub("", name, count=1)


def _part(tensor: Tensor, index: int, count: int) -> Tensor:
  """Returns one of equal parts along the first axis.

  Where it cannot be divided they are not equal: what is wrong shows in shapes.
  """
  if count == 1 or not tensor.shape:
    return tensor
  start, stop = (tensor.shape[0] * i // count for i in (index, index + 1))
  shape = stop - start, *tensor.shape[1:]
  return Tensor(shape, tensor.dtype, lambda: tensor.read()[start:stop])


def _joined(name: str, tensors: list[Tensor]) -> Tensor:
  """Returns tensors one after the other along the first axis."""
  if len(tensors) == 1:
    return tensors[0]
  shapes = [tensor.shape for tensor in tensors]
  if () in shapes or len({shape[1:] for shape in shapes}) > 1:
    told = ", ".join(str(list(shape)) for shape in shapes)
    raise UserError(f"{name} has parts that do not fit together: {told}")
  return Tensor(
    (sum(shape[0] for shape in shapes), *shapes[0][1:]),
    tensors[0].dtype,
    lambda: np.concatenate([tensor.read() for tensor in tensors]),
  )


def _both(theirs: str, *ours: str) -> dict[str, tuple[str, ...]]:
  """Rows of a weight and of its bias."""
  return {
    f"{theirs}.{kind}": tuple(f"{name}.{kind}" for name in ours)
    for kind in ("weight", "bias")
  }


def _ltg_bert(attention: str, mlp: str) -> dict[str, tuple[str, ...]]:
  """Rows that LTG-BERT and GPT-BERT share, by where the sublayers are."""
  ours = "model.layers.{}"
  return {
    "embedding.word_embedding.weight": ("model.embed_tokens.weight",),
    "embedding.relative_embedding": ("model.relative_embedding.weight",),
    **_both("embedding.relative_layer_norm", "model.relative_norm"),
    **_both(f"{attention}.in_proj_qk", f"{_OURS}.q_proj", f"{_OURS}.k_proj"),
    **_both(f"{attention}.out_proj", f"{_OURS}.o_proj"),
    # The first half is what GELU of the second gates.
    f"{mlp}.mlp.1.weight": (
      f"{ours}.mlp.up_proj.weight",
      f"{ours}.mlp.gate_proj.weight",
    ),
    f"{mlp}.mlp.4.weight": (f"{ours}.mlp.down_proj.weight",),
    **_both("nonlinearity.1", "lm_head.dense"),
    "nonlinearity.5.weight": ("lm_head.weight",),
    "nonlinearity.5.bias": ("lm_head.bias",),
  }


_FIELDS = {
  "position_bucket_size": "position_buckets",
  "max_position_embeddings": "longest_distance",
}
LAYOUTS = (
  Layout(  # github.com/ltgoslo/ltg-bert, babylm/
    mark="layers.0.attention.in_proj_qk.weight",
    tensors={
      **_ltg_bert("layers.{}.attention", "layers.{}.mlp"),
      **_both("layers.{}.attention.in_proj_v", f"{_OURS}.v_proj"),
      **_both("layers.{}.attention.post_layer_norm", f"{_OURS}.out_norm"),
    },
    fields=_FIELDS,
    settings={
      "model_type": "ltg_bert",
      "attention_gate": False,
      "depth_weights": False,
    },
    boundary="bos_eos",
    notes=(
      "distances are read as BabyLM's LTG-BERT does; BNC-BERT and NorBERT 3,"
      " whose files look the same, lay out their projection otherwise",
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
    settings={
      "model_type": "ltg_bert",
      "attention_gate": True,
      "depth_weights": True,
    },
    curriculum="C:N=1:15",
    boundary="bos",
  ),
)
OWN = Layout(mark="", tensors={}, fields={}, settings={})
# Of transformers' AutoModel, as models for embeddings are published.
BARE = dataclasses.replace(OWN, mark="embed_tokens.weight", around="model.")


def layout(weights: Weights) -> Layout:
  """Returns the layout of a folder's weights; export_hf's own if none else."""
  if BARE.mark in weights.tensors:
    return BARE
  names = set(map(_inner, weights))
  return next((row for row in LAYOUTS if row.mark in names), OWN)
