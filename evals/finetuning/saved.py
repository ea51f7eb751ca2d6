"""Saves fine-tuned models, an encoder with a task's head, and computes them."""

import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import batching, presets, record_values, trial
from antlm_jax.evals.finetuning.batching import Example, ExampleRows
from antlm_jax.evals.finetuning.loop import TuningOutcome, evaluate
from antlm_jax.evals.finetuning.summary import MODEL
from antlm_jax.evals.finetuning.task import Task, TaskHead
from antlm_jax.evals.finetuning.trial import Hyperparameters, TrialRun
from antlm_jax.inference import programs
from antlm_jax.inference.model import FineTuned, Loaded, write_checkpoint


def fine_tuned(
  task: Task, attention: str, params: Mapping[str, Any] | None = None
) -> FineTuned:
  """Returns a task's entry in a checkpoint, with the head's parameters."""
  return FineTuned(
    task.name,
    attention,
    task.head.kind,
    task.head.settings,
    params or {},
    task.head.export_as,
    task.columns,
  )


def save_model(
  folder: pathlib.Path,
  loaded: Loaded,
  task: Task,
  attention: str,
  params: dict[str, np.ndarray],
) -> None:
  """Writes a run's model into the folder of its task's results.

  `loaded` is the model that was fine-tuned; `params` are the trained parameters
  of encoder and head. Raises a UserError if the model cannot be written.
  """
  encoder, head = trial.split_params(params)
  tuned = fine_tuned(task, attention, head)
  all_params = {**loaded.params, **encoder}
  write_checkpoint(folder / MODEL, loaded.step, all_params, loaded.meta, tuned)


def saved_head(task: FineTuned | None, path: pathlib.Path) -> TaskHead:
  """Returns the head of the saved model at a path.

  Raises a UserError if it has none, or one of an unknown kind.
  """
  if task is None:
    raise UserError(
      f"{path} is not fine-tuned: fine-tune it with save=True (`antlm eval"
      " finetune --save`), and give the model that it saves"
    )
  heads = presets.head_types()
  if task.kind not in heads:
    raise UserError(
      f"{path} has a head of the kind {task.kind!r}, which is not one of"
      f" {', '.join(heads)}"
    )
  # JSON turns tuples into lists, which have no hash.
  lists = {k: tuple(v) for k, v in task.settings.items() if isinstance(v, list)}
  try:
    return heads[task.kind](**{**task.settings, **lists})
  except TypeError as error:
    raise UserError(
      f"{path} has a head ({task.kind}) of another version: {error}"
    ) from error


def untrained(
  task: Task, model_head: TaskHead | None, path: pathlib.Path
) -> TaskHead:
  """Returns the head with which a model can do a task as it is.

  It is the model's own head if its inputs and predictions are the task's.
  Otherwise it is the task's head, if that has no parameters. Raises a UserError
  that names the model's path if there is none.
  """
  head = task.head
  if (
    model_head
    and model_head.encode.__func__ == head.encode.__func__
    and model_head.decode.__func__ == head.decode.__func__
  ):
    model_labels = getattr(model_head, "labels", ())
    labels = getattr(head, "labels", ())
    if model_labels == labels:
      return model_head.evaluated_as(head)
    problem = f"predicts {', '.join(model_labels)}, not {', '.join(labels)}"
  elif not head.parameters(1):
    return head
  else:
    problem = f"has no head of the kind {head.kind!r}"
  raise UserError(
    f"{task.name} cannot be evaluated without training: {path} {problem:.200};"
    " fine-tune a model first, save it, and then give the saved model"
  )


def as_is(
  loaded: Loaded, task: Task, settings: Hyperparameters
) -> tuple[dict[str, ExampleRows], TuningOutcome]:
  """Evaluates a model without training it, as a run at rate 0.

  Also returns the rows of each evaluation set.
  """
  # A head without parameters may have other prompts than the model's.
  head = None if task.head.parameters(1) else task.head
  rows = {}
  outputs = {}
  for name in task.evaluations:
    set_outputs, rows[name] = compute(
      loaded,
      task.examples(name),
      settings.max_length,
      settings.rows_in_memory,
      head,
      settings.attention == "causal",
      name,
    )
    outputs[name] = jax.device_get(task.head.reduce(set_outputs))
  outcome = TuningOutcome(TrialRun(0.0, 0))
  evaluate(task, rows, outcome, 0.0, outputs)
  return rows, outcome


Texts = Iterable[str | Sequence[str] | Example]


def compute(
  loaded: Loaded,
  texts: Texts,
  max_length: int,
  batch_size: int = Hyperparameters.batch_size,
  head: TaskHead | None = None,
  causal: bool | None = None,
  name: str = "",
) -> tuple[Any, ExampleRows]:
  """Returns a head's outputs for rows of texts, and the rows.

  Args:
    loaded: The model.
    texts: One or more examples: texts, or sequences of texts that are read
      together.
    max_length: Largest number of tokens in a row.
    batch_size: Number of rows that are computed together.
    head: A head without parameters; the model's by default.
    causal: Whether to read from left to right; as fine-tuned by default.
    name: Name of the set of texts, for warnings and progress.

  Raises:
    UserError: The checkpoint has no head, or one of an unknown kind, or a value
      is not text.
  """
  params = loaded.params
  if head is None:
    head = saved_head(loaded.task, loaded.path)
    params = trial.join_params(params, loaded.task.params)
  causal = loaded.task.attention == "causal" if causal is None else causal
  examples = [
    text
    if isinstance(text, Example)
    else head.example(record_values.plain_text(text, index))
    for index, text in enumerate(texts)
  ]
  rows = head.encode(loaded, examples, max_length)
  batching.warn_of_cut(loaded, rows, max_length, name)
  program = programs.compiled(_run_outputs, loaded.model.config, head, causal)
  call = functools.partial(program, params)
  outputs = batching.predict_rows(call, rows, batch_size, name)
  return jax.tree.map(lambda x: x[0], outputs), rows


def _run_outputs(model, head: TaskHead, causal: bool, params, tokens, lengths):
  """Returns a head's outputs `[1, B, ...]`."""
  out = trial.outputs(model, head, causal, params, {}, tokens, lengths)
  return jax.tree.map(lambda x: x[None], out)
