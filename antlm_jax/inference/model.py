"""Trained models: what every command but training starts from."""

import argparse
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.inference.framing import TextModel
from antlm_jax.runtime import compilation, files
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import FOLDER, Meta


@dataclasses.dataclass(frozen=True)
class FineTuned:
  """What a fine-tuned checkpoint has beside its encoder: a task's head.

  What the settings and the parameters mean is known to who trained the head
  (`evals.finetuning.saved`) and to who exports its kind (`antlm_jax.hf.heads`).
  """

  name: str  # the task's
  attention: str  # how rows are read: bidirectional or causal
  kind: str  # the head's, as what follows
  settings: Mapping[str, Any]  # plain JSON
  params: Mapping[str, Any]  # {path: array}; may be none

  def to_json(self) -> dict[str, Any]:
    """Returns all but the parameters, for orbax to write."""
    return {name: x for name, x in vars(self).items() if name != "params"}


@dataclasses.dataclass(frozen=True)
class Loaded(Meta, TextModel):
  """A trained model: what every command but training starts from."""

  path: pathlib.Path  # the checkpoint's folder
  step: int
  task: FineTuned | None = None  # what it was fine-tuned for, and the head

  @property
  def longest_row(self) -> int:
    """Tokens in the longest row that it was trained on, as far as known."""
    return self.row_tokens or self.model.config.max_seq_len

  @property
  def run(self) -> pathlib.Path:
    """The run's folder, or that which holds a checkpoint by itself."""
    above = self.path.parent
    return above.parent if above.name == FOLDER else above

  @property
  def evals(self) -> pathlib.Path:
    """Where evaluations go: RUN/evals; here runs/RUN/evals for a bucket's."""
    run = self.run
    if files.is_remote(run):
      run = pathlib.Path("runs", run.name)
    return run / "evals"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds --checkpoint and --step, which `from_args` takes, to a command."""
  add = parser.add_argument
  add("--checkpoint", required=True, help="a run or a step; may be gs://...")
  add("--step", type=int, help="which step of the run; the newest by default")


def from_args(args: argparse.Namespace) -> Loaded:
  """Like `load`, of a command's arguments; what it compiles is kept."""
  compilation.keep_programs()
  return load(args.checkpoint, args.step)


def load(path, step: int | None = None) -> Loaded:
  """Loads a trained model from a run or one of its checkpoints.

  Raises:
    UserError: if there is no such checkpoint, or it cannot be read.
  """
  path = checkpoint.find(path, step)
  with checkpoint.readable(path / "meta"):
    fields = checkpoint.read_fields(path)
    meta = Meta.from_json(fields)
    item = "ema" if "ema" in fields["sums"] else "params"
  model = models.build(meta.config.model, meta.tokenizer.vocab_size)
  wanted = {
    item: _here(model.shapes),
    "counters": _here({"step": jax.ShapeDtypeStruct((), np.int32)}),
  }
  if "head" in fields["sums"]:
    with checkpoint.readable(path / "head"):  # only what is there knows them
      handler = ocp.StandardCheckpointHandler()
      wanted["head"] = _here(handler.metadata(epath.Path(path / "head")))
  found, fields = checkpoint.read(path, wanted)
  checkpoint.check_sums(path, found, fields)
  task = fields.get("task")
  if task is not None:
    task = FineTuned(**task, params=found.get("head", {}))
  return Loaded(
    **vars(meta),
    path=path,
    step=int(found["counters"]["step"]),
    model=model,
    params=found[item],
    task=task,
  )


def write(
  path,
  step: int,
  params: Mapping[str, Any],
  meta: Meta,
  task: FineTuned | None = None,
) -> pathlib.Path:
  """Writes a checkpoint without optimizer's state, whole or not at all.

  Args:
    path: The folder that it becomes: `WORKDIR/checkpoints/STEP` to be found as
      a run's step, or any other. There must be nothing yet.
    step: Number of steps done.
    params: The encoder's parameters, NumPy's or JAX's, as `{path: array}` of
      the shapes that `models.build` gives to the config in `meta`.
    meta: What it says beside its arrays.
    task: The task of a fine-tuned model, with its head.

  Returns its absolute path.

  Raises:
    UserError: if it cannot be written, or is there already.
  """
  path = files.path(path)
  counters = {"step": np.asarray(step, np.int32)}
  items = {"params": dict(params), "counters": counters}
  fields: dict[str, Any] = meta.to_json()
  if task is not None:
    fields["task"] = task.to_json()
    if task.params:
      items["head"] = dict(task.params)
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.check_space(path.parent, items)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as saver:
      saver.save(path, checkpoint.save_args(items, fields))
  except files.failures() as error:
    raise UserError(f"writing {path} failed: {files.reason(error)}") from error
  return path


def _here(shapes):
  """Asks for one device, whatever devices the checkpoint was saved from."""
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {
    name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=one)
    for name, array in shapes.items()
  }
