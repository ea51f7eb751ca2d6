"""Merges the parameters of several models into a model, without training.

`linear` is the weighted mean (model soups, arXiv 2203.05482). `slerp` follows
a great circle from one model to the other, which keeps the norm. `task` adds
the changes of each model from a common base (task arithmetic, arXiv
2212.04089). Each method combines a tensor of each model, in float64 on the
host. Each layer of a stack is a tensor.
"""

import dataclasses
import json
from collections.abc import Sequence

import numpy as np

from antlm_jax import models
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.inference.model import FOLDER, Loaded
from antlm_jax.models import Params
from antlm_jax.training import saving
from antlm_jax.training.checkpoint import Meta

Tensors = Sequence[np.ndarray]  # float64, of equal shape, one per model
# Settings that do not change the meaning of trained parameters.
# fmt: off
_FREE = {
  "vocab_size", "max_seq_len", "init_std", "dropout", "attention_dropout",
  "attention", "dtype", "scan_layers", "remat",
}
# fmt: on
_PARALLEL = 1e-9  # sine of the smallest angle that defines a great circle


def linear(tensors: Tensors, weights: Sequence[float], base=None) -> np.ndarray:
  """Returns the weighted mean of the tensors."""
  total = sum(weights)
  # Omit tensors of weight 0, which would add rounding errors.
  pairs = zip(weights, tensors, strict=True)
  return sum(w / total * x for w, x in pairs if w)


def slerp(tensors: Tensors, weights: Sequence[float], base=None) -> np.ndarray:
  """Interpolates two tensors along the arc between their directions.

  It equals `linear` if they are parallel or either is zero.
  """
  norms = [np.linalg.norm(x) for x in tensors]
  if not all(norms):
    return linear(tensors, weights)
  a, b = (x / norm for x, norm in zip(tensors, norms, strict=True))
  # The cosine of a small angle rounds to 1.
  angle = 2 * np.arctan2(np.linalg.norm(a - b), np.linalg.norm(a + b))
  if np.sin(angle) < _PARALLEL:
    return linear(tensors, weights)
  arcs = np.sin(angle * np.asarray(weights) / sum(weights)) / np.sin(angle)
  return sum(w * x for w, x in zip(arcs, tensors, strict=True) if w)


def task(tensors: Tensors, weights: Sequence[float], base=None) -> np.ndarray:
  """Returns the base plus the weighted changes of each tensor from it."""
  pairs = zip(weights, tensors, strict=True)
  return base + sum(w * (x - base) for w, x in pairs)


METHODS = {"linear": linear, "slerp": slerp, "task": task}


def merge(
  parts: Sequence[Loaded],
  weights: Sequence[float] = (),
  method: str = "linear",
  base: Loaded | None = None,
) -> tuple[Meta, Params]:
  """Merges models with the same shapes and tokenizer.

  If only some tokenizers have a mask, the other models get a mask too. Its
  embedding is the mean of their tokens, as in training.

  Args:
    parts: The models; the result has the metadata of the first model.
    weights: Weight of each model; equal by default.
    method: Name of the method, one of `METHODS`.
    base: Model to which `task` adds changes.

  Returns:
    Metadata of a checkpoint of the merged model, and its parameters, float32.

  Raises:
    UserError: The models do not fit each other or the method.
  """
  if not parts:
    raise UserError("there are no models to merge: give --models=MODEL,MODEL")
  weights = tuple(weights) or (1 / len(parts),) * len(parts)
  _check_request(parts, weights, method, base)
  everyone = [*parts, *([base] if base else [])]
  _check_same_encoder(everyone)
  tokenizer = _tokenizer(everyone)
  model = models.build(parts[0].encoder, tokenizer.vocab_size)
  params = {}
  for path, shape in model.shapes.items():
    own = (saving.with_mean(one.params[path], shape.shape) for one in everyone)
    tensors = [np.asarray(x, np.float64) for x in own]
    stacked = model.axes[path][0] is None
    layers = zip(*tensors, strict=True) if stacked else [tensors]
    n, combine = len(parts), METHODS[method]
    merged = [combine(x[:n], weights, x[-1] if base else None) for x in layers]
    params[path] = np.float32(merged if stacked else merged[0])
  pairs = zip(parts, weights, strict=True)
  terms = [f"{weight:.4g} * {_name(one)}" for one, weight in pairs]
  since = f" since {_name(base)}" if base else ""
  kept = {f.name: getattr(parts[0], f.name) for f in dataclasses.fields(Meta)}
  changed = {
    "tokenizer": tokenizer,
    "data": "",
    "milestones": {},
    "merged": f"{method}: {' + '.join(terms)}{since}",
  }
  return Meta(**kept | changed), params


def _name(one: Loaded) -> str:
  """Returns a model's name and step, without the folders around it."""
  in_run = one.path.parent.name == FOLDER
  name = one.run.name if in_run else one.path.name
  return f"{name} (step {one.step})" if one.step else name


def _check_request(parts, weights, method: str, base: Loaded | None) -> None:
  """Checks that the method can merge these models with these weights."""
  if len(weights) != len(parts):
    raise UserError(
      f"{len(parts)} models have {len(weights)} weights: give one for each"
    )
  if method == "slerp" and len(parts) != 2:
    raise UserError(f"slerp merges exactly two models, got {len(parts)}")
  if (method == "task") != (base is not None):
    raise UserError(
      "the method task, and no other method, needs a base: give --base=MODEL"
    )
  if method != "task" and (min(weights) < 0 or not sum(weights) > 0):
    raise UserError(f"{method} needs weights of at least 0, not all 0")
  for one in parts:
    if one.task and (one.task.params or one.task != parts[0].task):
      raise UserError(
        f"{one.path} has a head for {one.task.name}: merge only encoders, or"
        " embedders of the same kind"
      )


def _check_same_encoder(everyone: Sequence[Loaded]) -> None:
  """Checks that all are the same encoder."""
  first = everyone[0]
  wanted = vars(first.model.config)
  for one in everyone:
    found = vars(one.model.config)
    changed = [
      f"{name} is {found.get(name)!r} there, {wanted.get(name)!r} here"
      for name in sorted(wanted.keys() | found.keys())
      if name not in _FREE and found.get(name) != wanted.get(name)
    ]
    if changed:
      raise UserError(
        f"{one.path} differs from {first.path}: {', '.join(changed)}"
      )


def _tokenizer(everyone: Sequence[Loaded]) -> Tokenizer:
  """Returns the common tokenizer, with a mask if any tokenizer has it."""
  found = [one.tokenizer for one in everyone]
  if any(tokenizer.mask_id is not None for tokenizer in found):
    found = [t.extended([MASK]) if t.mask_id is None else t for t in found]
  for one, tokenizer in zip(everyone, found, strict=True):
    if _vocabulary(tokenizer) != _vocabulary(found[0]):
      raise UserError(
        f"{one.path} has another tokenizer than {everyone[0].path}: merge only"
        " models with the same tokenizer"
      )
  return found[0]


def _vocabulary(tokenizer: Tokenizer) -> tuple:
  """Returns the tokens, without the rules that add special tokens."""
  spec = json.loads(tokenizer.to_json())
  return spec["model"], [(t["id"], t["content"]) for t in spec["added_tokens"]]
