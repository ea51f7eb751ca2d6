"""Loads and writes trained models."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, overload

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from antlm_jax import models, settings, units
from antlm_jax.errors import UserError
from antlm_jax.inference.framing import TextModel
from antlm_jax.page import history
from antlm_jax.runtime import compilation, files, progress
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import FOLDER, Checkpoint, Meta

if TYPE_CHECKING:
  from matplotlib.figure import Figure

_Model = TypeVar("_Model", bound=TextModel)
# A command's model: loaded, or the path to it.
ModelOrPath = Annotated[
  _Model | files.Path,
  settings.argument(
    "--checkpoint",
    help="Path to a run or one of its checkpoints; may be gs://...",
  ),
]


@dataclasses.dataclass(frozen=True)
class FineTuned:
  """Task of a fine-tuned checkpoint, and the head on its encoder.

  `evals/finetuning/saved.py` and `hf/heads.py` interpret the head.
  """

  name: str  # name of the task
  attention: str  # bidirectional or causal
  kind: str  # kind of head
  settings: Mapping[str, Any]  # settings of the head, plain JSON
  params: Mapping[str, Any]  # arrays of the head by path; may be empty
  export_as: str = ""  # kind in `hf.heads.HEADS`, if it differs from `kind`
  columns: Sequence[str] = ()  # of the texts in the records of training

  def to_json(self) -> dict[str, Any]:
    """Returns all fields except the parameters, for orbax to write."""
    fields = vars(self).items()
    left_out = "", ()
    return {n: x for n, x in fields if n != "params" and x not in left_out}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Loaded(TextModel):
  """A trained model, ready to use.

  `params` are those of the encoder, averaged if the run kept an average.
  """

  saved: Checkpoint  # the checkpoint that was read
  task: FineTuned | None = None  # task of a fine-tuned model

  @property
  def path(self) -> pathlib.Path:
    """Path to its checkpoint."""
    return self.saved.path

  @property
  def step(self) -> int:
    """Number of training steps."""
    return self.saved.step

  def __fspath__(self) -> str:
    return str(self.path)

  def __repr__(self) -> str:
    size = units.quantity(self.model.size)
    inside_run = self.path.parent.name == FOLDER
    path = files.shown_path(self.saved.run if inside_run else self.path)
    name = self.config.model.name
    return f"<{name}, {size} parameters, step {self.step_text}, {path}>"

  @property
  def step_text(self) -> str:
    """Number of training steps, and whether its weights are an average."""
    average = self.saved.weights == "ema"
    return f"{self.step:,}{' (average of the weights)' * average}"

  @property
  def headless(self) -> bool:
    """Whether the model was imported without an output layer."""
    return models.lacks_head(self.model.shapes, self.params)

  def history(self, names: str = "*") -> history.History:
    """Returns the values that its run recorded, as `Trained.history`."""
    return history.read(self.saved.run, names)

  def plot(self) -> "Figure":
    """Draws the losses of its run: a figure, which notebooks show."""
    return history.plot(self.saved.run)


@settings.checked
def load(
  path: str | os.PathLike[str] | Loaded, step: int | None = None
) -> Loaded:
  """Loads a trained model from a run or one of its checkpoints.

  Args:
    path: Path to the run or checkpoint, which may be gs://BUCKET/RUN, or the
      result of `train` or `finetune`.
    step: Step of the run; by default the newest.

  Raises:
    UserError: There is no such checkpoint, or it cannot be read.
  """
  if not isinstance(path, str | os.PathLike):
    raise UserError(
      f"{path!r:.80} is no model: give a path, or the result of load, train or"
      " finetune"
    )
  compilation.keep_programs()
  saved = Checkpoint(path, step)
  saved.say_better_step()
  meta = saved.meta
  task = saved.fields.get("task")
  model = models.build_model(meta.encoder, meta.tokenizer.vocab_size)
  shapes = {saved.weights: saved.without_missing_head(model.shapes)}
  if "head" in saved.sums:
    with checkpoint.readable(saved.path / "head"):  # has the head's shapes
      handler = ocp.StandardCheckpointHandler()
      shapes["head"] = handler.metadata(epath.Path(saved.path / "head"))
  # Load it on one device, independent of the devices that saved it.
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes
  )
  arrays = saved.read(shapes)
  saved.verify(arrays)
  return Loaded(
    model=model,
    params=arrays[saved.weights],
    meta=meta,
    saved=saved,
    task=task and FineTuned(**task, params=arrays.get("head", {})),
  )


@overload
def open_model(model: _Model, step: int | None = None) -> _Model: ...
@overload
def open_model(
  model: str | os.PathLike[str], step: int | None = None
) -> Loaded: ...
def open_model(model, step=None):
  """Returns the model, or loads it from its path and step, as `load` does.

  Runs and fine-tunings are paths to their models (`__fspath__`).
  """
  if not isinstance(model, TextModel):
    return load(model, step)
  if step is not None:
    raise UserError(f"step={step}: {model} is loaded: give the path to its run")
  return model


def revisions(model: Loaded) -> dict[str, pathlib.Path]:
  """Returns the kept checkpoints of `checkpoint.words` by BabyLM's names.

  Raises a UserError if the model's run has no such checkpoint.
  """
  run = model.saved.run
  milestones = model.meta.milestones
  paths = checkpoint.checkpoint_steps(run)
  revision_paths = {
    name: paths[step] for name, step in milestones.items() if step in paths
  }
  if not revision_paths:
    raise UserError(
      f"{run} has no checkpoints by words: train with"
      " checkpoint.words=babylm (from 1M words on), or with smaller"
      " counts, such as 100k,200k"
    )
  if lacking := ", ".join(milestones.keys() - revision_paths):
    progress.say(f"warning: skipping checkpoints that were not kept: {lacking}")
  return revision_paths


def write_checkpoint(
  path,
  step: int,
  params: Mapping[str, Any],
  meta: Meta,
  task: FineTuned | None = None,
) -> pathlib.Path:
  """Writes a checkpoint without optimizer state, atomically.

  Args:
    path: Path to the new folder, which must not exist. Write a step of a run to
      `WORKDIR/checkpoints/STEP`.
    step: Number of training steps.
    params: NumPy or JAX parameters of the encoder by path, with the shapes of
      `models.build_model` for the config in `meta`.
    meta: Metadata.
    task: Task of a fine-tuned model, with its head.

  Returns:
    Absolute path to the checkpoint.

  Raises:
    UserError: The path exists, or cannot be written.
  """
  path = files.absolute_path(path)
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
