"""Trained models: every command but training starts from one."""

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TypeVar, overload

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from antlm_jax import models, units
from antlm_jax.errors import UserError
from antlm_jax.inference.framing import TextModel
from antlm_jax.runtime import compilation, files, progress
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import FOLDER, Checkpoint, Meta


@dataclasses.dataclass(frozen=True)
class FineTuned:
  """The task of a fine-tuned checkpoint, and the head on its encoder.

  `evals.finetuning.saved` and `antlm_jax.hf.heads` interpret the head.
  """

  name: str  # of the task
  attention: str  # bidirectional or causal
  kind: str  # of the head
  settings: Mapping[str, Any]  # of the head, plain JSON
  params: Mapping[str, Any]  # of the head, `{path: array}`; may be empty
  export_as: str = ""  # kind of `hf.heads.HEADS`, if it has another name

  def to_json(self) -> dict[str, Any]:
    """Returns all but the parameters, for orbax to write."""
    fields = vars(self).items()
    return {name: x for name, x in fields if name != "params" and x != ""}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
  """Where a trained model is, and what tells its weights from others."""

  path: pathlib.Path  # the checkpoint's folder
  step: int  # number of steps that it was trained for
  digest: int  # CRC-32 of the weights, which depends on nothing else

  @property
  def run(self) -> pathlib.Path:
    """The run's folder, or the folder that holds a single checkpoint."""
    above = self.path.parent
    return above.parent if above.name == FOLDER else above

  @property
  def evals(self) -> pathlib.Path:
    """Folder of evaluations: RUN/evals; here runs/RUN/evals for a bucket's."""
    run = self.run
    here = pathlib.Path("runs", run.name) if files.is_remote(run) else run
    return here / "evals"


@dataclasses.dataclass(frozen=True, repr=False)
class Loaded(Meta, TextModel, Identity):
  """A trained model with all that using it needs.

  `params` are the encoder's: their average if the run kept one.
  """

  task: FineTuned | None = None  # that it was fine-tuned for

  def __repr__(self) -> str:
    size = units.quantity(self.model.size)
    where = self.run if self.path.parent.name == FOLDER else self.path
    if where.is_relative_to(pathlib.Path.cwd()):
      where = where.relative_to(pathlib.Path.cwd())
    name = self.config.model.name
    return f"<{name}, {size} parameters, step {self.step:,}, {where}>"

  @property
  def longest_row(self) -> int:
    """Tokens in the longest row that it was trained on, as far as known."""
    return self.row_tokens or self.model.config.max_seq_len


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds --checkpoint and --step, which `from_args` reads, to a command."""
  add = parser.add_argument
  where = "Path to a run or one of its checkpoints; may be gs://..."
  add("--checkpoint", required=True, help=where)
  add("--step", type=int, help="Step of the run (default: the newest)")


def from_args(args: argparse.Namespace) -> Loaded:
  """Loads the model that a command's arguments name."""
  return load(args.checkpoint, args.step)


def load(path: str | os.PathLike[str], step: int | None = None) -> Loaded:
  """Loads a trained model from a run or one of its checkpoints.

  `path` may be gs://BUCKET/RUN. `step` is by default the newest of the run.
  Raises a UserError if there is no such checkpoint, or it cannot be read.
  """
  compilation.keep_programs()
  saved = Checkpoint(path, step)
  meta, task = saved.meta, saved.fields.get("task")
  model = models.build(meta.encoder, meta.tokenizer.vocab_size)
  wanted = {saved.weights: model.shapes}
  if "head" in saved.sums:
    with checkpoint.readable(saved.path / "head"):  # its shapes are only there
      handler = ocp.StandardCheckpointHandler()
      wanted["head"] = handler.metadata(epath.Path(saved.path / "head"))
  # One device, whatever devices the checkpoint was saved from.
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), wanted
  )
  found = saved.read(wanted)
  saved.verify(found)
  return Loaded(
    **vars(meta),
    path=saved.path,
    step=saved.step,
    model=model,
    params=found[saved.weights],
    digest=saved.digest,
    task=task and FineTuned(**task, params=found.get("head", {})),
  )


_Model = TypeVar("_Model", bound=TextModel)


@overload
def opened(model: _Model) -> _Model: ...
@overload
def opened(model: str | os.PathLike[str]) -> Loaded: ...
def opened(model):
  """Returns a model as it is, or loads it from its path."""
  return model if isinstance(model, TextModel) else load(model)


def revisions(model: Loaded) -> dict[str, pathlib.Path]:
  """Returns the kept checkpoints of `checkpoint.words`, by BabyLM's names.

  Raises a UserError if the model's run has none.
  """
  steps, names = checkpoint.steps(model.run), model.milestones
  found = {name: steps[step] for name, step in names.items() if step in steps}
  if not found:
    raise UserError(
      f"{model.run} has kept no steps by words: train on 1M words or more with"
      " --config.checkpoint.words=babylm, or with numbers that the run reaches,"
      " such as 100k,200k"
    )
  if lacking := ", ".join(names.keys() - found):
    progress.say(f"left out, not kept: {lacking}")
  return found


def identify(path: str | os.PathLike[str], step: int | None = None) -> Identity:
  """Identifies the model that `load` loads, without reading its weights.

  Arguments and errors are those of `load`.
  """
  saved = Checkpoint(path, step)
  return Identity(path=saved.path, step=saved.step, digest=saved.digest)


def write(
  path,
  step: int,
  params: Mapping[str, Any],
  meta: Meta,
  task: FineTuned | None = None,
) -> pathlib.Path:
  """Writes a checkpoint without optimizer state, whole or not at all.

  Returns its absolute path. Raises a UserError if it exists, or cannot be
  written.

  Args:
    path: The folder to make: `WORKDIR/checkpoints/STEP` for a step of a run,
      or any other. It must not exist.
    step: Number of steps done.
    params: The encoder's parameters, NumPy's or JAX's, as `{path: array}` of
      the shapes that `models.build` gives to the config in `meta`.
    meta: The metadata.
    task: The task of a fine-tuned model, with its head.
  """
  path = files.path(path)
  if path.exists():
    raise UserError(f"{path} already exists: give another folder")
  counters = {"step": np.asarray(step, np.int32)}
  items = {"params": dict(params), "counters": counters}
  fields = meta.to_json()
  if task is not None:
    fields["task"] = task.to_json()
    if task.params:
      items["head"] = dict(task.params)
  with files.writing(path):
    args = checkpoint.save_args(path.parent, items, fields)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as saver:
      saver.save(path, args)
  return path
