"""Merging: one model made of the parameters of several, without training.

`linear` is their weighted mean (model soups, arXiv 2203.05482), `slerp` goes
from one of two to the other on a great circle, so that equal norms stay, and
`task` adds what each has learnt since a common base (task arithmetic, arXiv
2212.04089). Each is a function of one tensor of each model, that of one layer
where layers are stacked, in float64 on the host.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from antlm_jax import models
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.inference.model import Loaded
from antlm_jax.models import Params
from antlm_jax.training import checkpoint, saving
from antlm_jax.training.checkpoint import Meta

Tensors = Sequence[np.ndarray]  # one of each model, float64, of one shape
# Settings that trained parameters do not depend on.
_FREE = {
  *("vocab_size", "max_seq_len", "init_std", "dropout", "attention_dropout"),
  *("attention", "dtype", "scan_layers", "remat"),
}
_PARALLEL = 1e-9  # sine of an angle under which there is no great circle


def linear(tensors: Tensors, weights: Sequence[float], base=None) -> np.ndarray:
  """The sum of the tensors, each times its weight's part of all weights."""
  total = sum(weights)
  # Without those of weight 0: their rounding would be added as well.
  pairs = zip(weights, tensors, strict=True)
  return sum(w / total * x for w, x in pairs if w)


def slerp(tensors: Tensors, weights: Sequence[float], base=None) -> np.ndarray:
  """The point between two on the arc of their directions, as of vectors.

  Where they are parallel, or one is zero, that is `linear`.
  """
  norms = [np.linalg.norm(x) for x in tensors]
  if not all(norms):
    return linear(tensors, weights)
  a, b = (x / norm for x, norm in zip(tensors, norms, strict=True))
  # Of small angles the cosine says nothing.
  angle = 2 * np.arctan2(np.linalg.norm(a - b), np.linalg.norm(a + b))
  if np.sin(angle) < _PARALLEL:
    return linear(tensors, weights)
  arcs = np.sin(angle * np.asarray(weights) / sum(weights)) / np.sin(angle)
  return sum(w * x for w, x in zip(arcs, tensors, strict=True) if w)


def task(tensors: Tensors, weights: Sequence[float], base=None) -> np.ndarray:
  """The base, and each one's difference from it times its weight."""
  pairs = zip(weights, tensors, strict=True)
  return base + sum(w * (x - base) for w, x in pairs)


METHODS: Mapping[str, Callable[..., np.ndarray]] = {
  "linear": linear,
  "slerp": slerp,
  "task": task,
}


def merge(
  parts: Sequence[Loaded],
  weights: Sequence[float] = (),
  method: str = "linear",
  base: Loaded | None = None,
) -> tuple[Meta, Params]:
  """Merges models of one shape and one tokenizer.

  A tokenizer may lack the mask that others have: its model gets one, the mean
  of its other tokens, as it would in training.

  Args:
    parts: The models; what is said beside the arrays is the first one's.
    weights: One of each; equal parts by default.
    method: Of `METHODS`.
    base: What `task` starts from.

  Returns:
    What a checkpoint of it says, and its parameters, float32.

  Raises:
    UserError: if they do not fit each other or the method.
  """
  if not parts:
    raise UserError("there are no models to merge: give --models=MODEL,MODEL")
  weights = tuple(weights) or (1 / len(parts),) * len(parts)
  _check(parts, weights, method, base)
  everyone = [*parts, *([base] if base else [])]
  tokenizer = _tokenizer(everyone)
  model = models.build(parts[0].config.model, tokenizer.vocab_size)
  _check_shapes(everyone, parts[0])

  def of(path: str, shape: Sequence[int]) -> np.ndarray:
    grown = [
      np.asarray(saving.with_mean(one.params[path], shape), np.float64)
      for one in everyone
    ]
    # Layers that are stacked are tensors of their own.
    stacked = model.axes[path][0] is None
    layers = zip(*grown, strict=True) if stacked else [grown]
    merged = [
      METHODS[method](layer[: len(parts)], weights, layer[-1] if base else None)
      for layer in layers
    ]
    return (np.stack(merged) if stacked else merged[0]).astype(np.float32)

  params = {path: of(path, x.shape) for path, x in model.shapes.items()}
  meta = dataclasses.replace(
    _meta(parts[0]),
    tokenizer=tokenizer,
    data="",
    milestones={},
    merged=described(parts, weights, method, base),
  )
  return meta, params


def described(parts, weights, method: str, base: Loaded | None) -> str:
  """Says in a line what was merged, without naming folders around it."""
  terms = [
    f"{weight:.4g} * {_name(one)}"
    for one, weight in zip(parts, weights, strict=True)
  ]
  since = f" since {_name(base)}" if base else ""
  return f"{method}: {' + '.join(terms)}{since}"


def _name(one: Loaded) -> str:
  in_run = one.path.parent.name == checkpoint.FOLDER
  name = one.run.name if in_run else one.path.name
  return f"{name} (step {one.step})" if one.step else name


def _meta(one: Loaded) -> Meta:
  names = (field.name for field in dataclasses.fields(Meta))
  return Meta(**{name: getattr(one, name) for name in names})


def _check(parts, weights, method: str, base: Loaded | None) -> None:
  if len(weights) != len(parts):
    raise UserError(
      f"{len(parts)} models have {len(weights)} weights: give one for each"
    )
  if method == "slerp" and len(parts) != 2:
    raise UserError(f"slerp is of two models, not of {len(parts)}")
  if (method == "task") != (base is not None):
    raise UserError("task needs a base, and it alone: give --base=MODEL")
  if method != "task" and (min(weights) < 0 or not sum(weights) > 0):
    raise UserError(f"{method} needs weights from 0 up, and one above 0")
  for one in parts:
    if one.task and (one.task.params or one.task != parts[0].task):
      raise UserError(
        f"{one.path} has a head for {one.task.name}: only encoders are merged,"
        " or embedders that are alike"
      )


def _tokenizer(parts: Sequence[Loaded]) -> Tokenizer:
  """Returns the tokenizer of all, with a mask if one has it."""
  masked = any(one.tokenizer.mask_id is not None for one in parts)
  found = []
  for one in parts:
    lacks = masked and one.tokenizer.mask_id is None
    found.append(one.tokenizer.extended([MASK]) if lacks else one.tokenizer)
  for one, tokenizer in zip(parts, found, strict=True):
    if _vocabulary(tokenizer) != _vocabulary(found[0]):
      raise UserError(
        f"{one.path} has another tokenizer than {parts[0].path}: only models of"
        " one tokenizer are merged"
      )
  return found[0]


def _vocabulary(tokenizer: Tokenizer) -> tuple:
  """Returns what rows mean; what a tokenizer puts around a text is no part."""
  spec = json.loads(tokenizer.to_json())
  return spec["model"], [(t["id"], t["content"]) for t in spec["added_tokens"]]


def _check_shapes(parts: Sequence[Loaded], first: Loaded) -> None:
  """Checks that all are one encoder."""
  wanted = vars(first.model.config)
  for one in parts:
    found = vars(one.model.config)
    changed = [
      f"{name} is {found.get(name)!r} there, {wanted.get(name)!r} here"
      for name in sorted(wanted.keys() | found.keys())
      if name not in _FREE and found.get(name) != wanted.get(name)
    ]
    if changed:
      raise UserError(
        f"{one.path} is another model than {first.path}: {'; '.join(changed)}"
      )
