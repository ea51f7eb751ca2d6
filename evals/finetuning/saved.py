"""Fine-tuned models that are kept: an encoder with a task's head on it.

  from antlm_jax.training import checkpoint
  from evals.finetuning import saved as kept

  model = checkpoint.load("RUN/evals/finetune/rte/60-bidirectional/model")
  logits = kept.logits(model, [("Tom sat near the hills.", "Tom sat.")])

is what `python -m evals.finetune --save` keeps, and how it is read.
"""

import functools
import math
import pathlib
import shutil
from collections.abc import Callable, Sequence

import jax
import numpy as np

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import FineTuned, Loaded
from evals.finetuning import loop as tuning
from evals.finetuning.loop import Run, Settings
from evals.finetuning.task import Classifier, Example, Task

FOLDER = "model"  # in the folder of a task's results


class Best:
  """The parameters of the best run at its best epoch, on the host.

  Costs a run's trained parameters and its head's once in host memory, and on
  the device, while they are copied, their largest array once more. They are
  copied when a run becomes the best, or better than it was.

  Args:
    runs: All of them: where scores are equal the first one is the best.
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
    folder: The folder, which has no model yet.
    loaded: What the run started from: the rest of the model's parameters.
    task: The task.
    attention: How its rows were read.
    params: The run's parameters.

  Raises:
    UserError: if it cannot be written.
  """
  encoder, own = tuning.split(params)
  head = task.head
  tuned = FineTuned(
    name=task.name,
    attention=attention,
    pool=head.pool,
    norms=head.norms,
    dropout=head.dropout,
    labels=task.labels,
    params=own,
  )
  all_params = {**loaded.params, **encoder}
  checkpoint.write(folder / FOLDER, loaded.step, all_params, loaded.meta, tuned)


def remove(folder: pathlib.Path) -> None:
  """Removes the model kept in a folder: aside first, so never a part of it."""
  model, aside = folder / FOLDER, folder / f"{FOLDER}.old"
  shutil.rmtree(aside, ignore_errors=True)
  if model.exists():
    model.rename(aside)
    shutil.rmtree(aside)


def head(task: FineTuned) -> Classifier:
  """Returns the head that a kept model has."""
  return Classifier(len(task.labels), task.pool, task.dropout, task.norms)


def logits(
  loaded: Loaded,
  texts: Sequence[Sequence[str]],
  max_length: int = Settings.max_length,
  batch_size: int = Settings.batch_size,
) -> np.ndarray:
  """Returns what a kept model says of examples, float32 `[n, C]`.

  Args:
    loaded: The model.
    texts: Of each of n examples its text, or texts that are read together, as
      the task has them.
    max_length: Tokens of an example, at most; see `tuning.encode`.
    batch_size: Examples that are computed together.

  Raises:
    UserError: if the checkpoint has no head.
  """
  if loaded.task is None:
    raise UserError(
      f"{loaded.path} is not fine-tuned: python -m evals.finetune --save"
    )
  rows = tuning.encode(
    loaded, [Example(tuple(those), 0, "") for those in texts], max_length
  )
  causal = loaded.task.attention == "causal"
  program = _program(loaded.model.config, head(loaded.task), causal)
  params = tuning.joined(loaded.params, loaded.task.params)
  call = functools.partial(program, params)
  return tuning.predict(call, rows, batch_size)[0]


@functools.lru_cache(maxsize=4)
def _program(config, head: Classifier, causal: bool) -> Callable:
  """Compiles (parameters, tokens, lengths) to logits `[1, B, C]`."""
  compute = tuning.outputs(models.from_config(config), head, causal)

  def logits(params, tokens, lengths):
    return compute(params, {}, tokens, lengths)[None]

  return jax.jit(logits)
