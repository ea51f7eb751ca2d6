"""Saves fine-tuned models, an encoder with a task's head, and uses them.

`antlm eval finetune --save` saves models that are used like this:

  import antlm_jax
  from antlm_jax.evals.finetuning import saved

  model = antlm_jax.load("RUN/evals/finetune/rte/60-bidirectional/model")
  classes = saved.predict(model, [("Tom sat near the hills.", "Tom sat.")])
"""

import functools
import math
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching, trial
from antlm_jax.evals.finetuning.answering import Inside, Spans
from antlm_jax.evals.finetuning.batching import Example, Rows
from antlm_jax.evals.finetuning.classification import Classifier, Linear
from antlm_jax.evals.finetuning.loop import Run
from antlm_jax.evals.finetuning.retrieval import Towers
from antlm_jax.evals.finetuning.tagging import Tagger
from antlm_jax.evals.finetuning.task import Head, Predictions, Task
from antlm_jax.evals.finetuning.trial import Settings
from antlm_jax.inference import programs
from antlm_jax.inference.model import FineTuned, Loaded, write

FOLDER = "model"  # of the folder of a task's results
HEADS: dict[str, type[Head]] = {  # by the kind that a checkpoint names
  head.kind: head
  for head in (Classifier, Linear, Tagger, Spans, Inside, Towers)
}


class Best:
  """The parameters of the best run at its best epoch, on the host.

  Needs host memory for one copy of the trained parameters, and device memory
  for one extra copy of the largest array. If scores are equal, the earlier run
  is the best.
  """

  def __init__(self, runs: Sequence[Run]):
    self._runs = list(runs)
    self._rank = (-math.inf, 0)
    self.params: dict[str, np.ndarray] = {}

  def __call__(self, run: Run, score: float, copy: Callable[[], dict]) -> None:
    """Keeps a run if it is the best so far; `copy` returns its parameters."""
    rank = score, -self._runs.index(run)
    if rank > self._rank:
      self.params = {}  # first, so that there are never two in memory
      self._rank, self.params = rank, copy()


def save(
  folder: pathlib.Path,
  loaded: Loaded,
  task: Task,
  attention: str,
  params: dict[str, np.ndarray],
) -> None:
  """Writes a run's model into the folder of its task's results.

  Args:
    folder: The folder of results, which has no model yet.
    loaded: The model that was fine-tuned, for the parameters that were not.
    attention: How rows are read: bidirectional or causal.
    params: The trained parameters of the encoder and the head.

  Raises:
    UserError: if it cannot be written.
  """
  encoder, own = trial.split(params)
  head = task.head
  tuned = FineTuned(task.name, attention, head.kind, head.settings, own)
  all_params = {**loaded.params, **encoder}
  write(folder / FOLDER, loaded.step, all_params, loaded, tuned)


def remove(folder: pathlib.Path) -> None:
  """Removes a folder's saved model, after a rename: never only a part."""
  model, aside = folder / FOLDER, folder / f"{FOLDER}.old"
  shutil.rmtree(aside, ignore_errors=True)
  if model.exists():
    model.rename(aside)
    shutil.rmtree(aside)


def head(loaded: Loaded) -> Head:
  """Returns the head of a saved model.

  Raises:
    UserError: if it has none, or one of an unknown kind.
  """
  task = loaded.task
  if task is None:
    raise UserError(
      f"{loaded.path} is not fine-tuned: `antlm eval finetune --save` is"
    )
  if task.kind not in HEADS:
    raise UserError(
      f"{loaded.path} has a head of the kind {task.kind!r}, which is not one of"
      f" {', '.join(HEADS)}"
    )
  # JSON turns tuples into lists, which cannot be hashed.
  lists = {k: tuple(v) for k, v in task.settings.items() if isinstance(v, list)}
  try:
    return HEADS[task.kind](**{**task.settings, **lists})
  except TypeError as error:
    raise UserError(
      f"{loaded.path} has a head ({task.kind}) of another version: {error}"
    ) from error


def predict(
  loaded: Loaded,
  examples: Sequence[Sequence[str] | Example],
  max_length: int = Settings.max_length,
  batch_size: int = Settings.batch_size,
) -> Predictions:
  """Returns a saved model's predictions for examples.

  Args:
    examples: Examples of its task, or only their texts.
    max_length: Largest number of tokens in a row.
    batch_size: Number of rows that are computed together.

  Raises:
    UserError: if the checkpoint has no head, or one of an unknown kind.
  """
  found, rows = _compute(loaded, examples, max_length, batch_size)
  reduced = jax.device_get(head(loaded).reduce(found))
  return head(loaded).decode(reduced, rows)


def outputs(
  loaded: Loaded,
  examples: Sequence[Sequence[str] | Example],
  max_length: int = Settings.max_length,
  batch_size: int = Settings.batch_size,
) -> Any:
  """Returns the head's outputs for each row, such as logits; see `predict`."""
  return _compute(loaded, examples, max_length, batch_size)[0]


def _compute(
  loaded: Loaded, examples, max_length: int, batch_size: int
) -> tuple[Any, Rows]:
  """Returns a head's outputs, and their rows."""
  examples = [
    those if isinstance(those, Example) else Example(tuple(those))
    for those in examples
  ]
  rows = head(loaded).encode(loaded, examples, max_length)
  causal = loaded.task.attention == "causal"
  program = programs.compiled(
    _one_run, loaded.model.config, head(loaded), causal
  )
  params = trial.joined(loaded.params, loaded.task.params)
  call = functools.partial(program, params)
  found = batching.predict(call, rows, batch_size)
  return jax.tree.map(lambda x: x[0], found), rows


def _one_run(model, head: Head, causal: bool, params, tokens, lengths):
  """Returns a head's outputs `[1, B, ...]`."""
  out = trial.outputs(model, head, causal)(params, {}, tokens, lengths)
  return jax.tree.map(lambda x: x[None], out)
