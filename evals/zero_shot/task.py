"""Zero-shot tasks: their description, and their evaluation from Python.

A task is a value in `TASKS`: a reader of its data, a metric of the model's
scores, and their description. The module that implements a task adds it.
evals/score.py is the command.
"""

import dataclasses
import functools
import json
import os
import pathlib
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, cast

from antlm_jax import cli, tables
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.inference.framing import TextModel, trained_modes
from antlm_jax.inference.model import Loaded, ModelOrPath, open_model
from antlm_jax.inference.pairs import Records
from antlm_jax.inference.scoring import BATCH_TOKENS, Mode
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, Setting, argument, setting
from antlm_jax.training.checkpoint import Checkpoint


class ZeroShotOutcome(NamedTuple):
  """The results of a task."""

  summary: dict  # the figures
  lines: Iterable[dict]  # the items with their scores
  files: Mapping[str, str] = {}  # a pipeline's own, text by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings(settings_lib.Section):
  """The data, the mode, and the settings of every task."""

  data: str | Records = ""  # path to the task's files, or its records
  mode: str = "causal"
  limit: int = setting(
    0, "Largest number of items of each file or UID; 0 for all", least=0
  )
  batch_tokens: int = setting(
    BATCH_TOKENS, "Number of tokens encoded at once", least=1
  )
  # For tasks without these settings.
  pipeline: ClassVar[str] = "ours"
  reduction: ClassVar[str | None] = None
  # Values that change no score.
  apart: ClassVar = {"data", "batch_tokens"}

  @property
  def batches(self) -> dict[str, Any]:
    """Options of `scoring.score` that change no score."""
    track = functools.partial(progress.track, unit="batch")
    return {"batch_tokens": self.batch_tokens, "track": track}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSettings(TaskSettings):
  """The settings of a task of BabyLM's evaluation pipelines."""

  pipeline: str = setting(
    "ours",
    "Rules of scoring: ours, or those of BabyLM's pipeline of a year",
    choices=pipelines.PIPELINES,
  )


class Reported(NamedTuple):
  """A column of `antlm report`: a task's main figure, a share, on some data."""

  name: str  # its title
  folder: str  # name of the data's folder
  pairs: int = 0  # number of pairs in full; 0 for tasks of other items


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroShotTask:
  """A zero-shot task: a reader, and a metric of a model's scores.

  Attributes:
    about: Description for --help; its first line stands for it in lists.
    read: Reads the items, given the settings, or raises a UserError.
    score: Scores the items, given the model, the items and the settings.
    figure: Name of the main figure in the summary.
    table: Formats of a summary's figures by title, or a function that lays out
      the summary.
    settings: Section of its settings.
    reads: Help text of `data`, if it is not a folder.
    in_memory: Whether `data` may also be records.
    reported: Columns of `antlm report`.
  """

  about: str
  read: Callable[[Any], Sequence]
  score: Callable[[Any, Sequence, Any], ZeroShotOutcome]
  figure: str
  table: Mapping[str, str] | Callable[[Mapping], str]
  settings: type[TaskSettings] = TaskSettings
  reads: str = ""
  in_memory: bool = False
  reported: Sequence[Reported] = ()

  def shown(self, summary: Mapping) -> str:
    """Returns the table of a summary."""
    if callable(self.table):
      return self.table(summary)
    rows = ((n, form.format_map(summary)) for n, form in self.table.items())
    return tables.text_table(rows, ("figure", "value"), "<>")


TASKS: dict[str, ZeroShotTask] = {}


@dataclasses.dataclass(frozen=True, repr=False)
class ZeroShotResult:
  """The results of a zero-shot task.

  Attributes:
    task: Name of the task.
    mode: Outputs that predict a token.
    summary: The figures, as in summary.json.
    items: Every item with its scores, as in items.jsonl.
    folder: Folder of the results; None if they are not written.
    reused: Whether the folder had the results before.
  """

  task: str
  mode: str
  summary: Mapping[str, object]
  items: Sequence[Mapping[str, object]]
  folder: pathlib.Path | None = None
  reused: bool = False

  @property
  def score(self) -> float:
    """The task's main figure."""
    return cast(float, self.summary[TASKS[self.task].figure])

  @property
  def table(self) -> str:
    """The figures as text."""
    return TASKS[self.task].shown(self.summary)

  def __repr__(self) -> str:
    figure = TASKS[self.task].figure
    return f"<{self.task}, {self.mode}: {figure} {self.score:.4g}>"

  def __str__(self) -> str:
    return self.table


def _task_name(name: str) -> str:
  """Returns the name of a zero-shot task; UserError for another name."""
  if name not in TASKS:
    raise UserError(
      f"task={name!r:.60} is no zero-shot task ({', '.join(TASKS)}): finetune"
      " (antlm eval finetune) has the tasks that need training, such as cola"
    )
  return name


@settings_lib.checked
def evaluate(
  model: ModelOrPath[Loaded],
  task: Annotated[str, argument(choices=TASKS, read=_task_name)],
  data: Annotated[
    files.Path | Records,
    argument(help="Path to the folder of the task's files"),
  ],
  *,
  mode: Mode | None = None,
  output: Annotated[
    files.Path | None,
    argument(
      help="Path to a folder for results; RUN/evals/DATA/STEP-MODE by default",
      read=cli.local_path,
    ),
  ] = None,
  overwrite: bool = False,
  step: int | None = None,
  quiet: PythonOnly[bool] = False,
  **settings: Setting,
) -> ZeroShotResult:
  """Scores a zero-shot task.

      evaluate("runs/x", "blimp", "blimp_filtered", mode="causal").score

  Args:
    model: Model, or the path to its run or checkpoint.
    task: Name of the task.
    data: Path to the folder of the task's files. For blimp, also a list of
      pairs, `{"sentence_good": TEXT, "sentence_bad": TEXT}`.
    mode: Outputs that predict a token, causal (left to right), mlm (at a mask),
      mntp (one position before it) or fused (both); by default the mode of
      training, causal if there are several.
    output: Folder for the results. If it has results of the same request, these
      are returned.
    overwrite: Score again if results exist.
    step: Step of the run; by default the newest.
    quiet: Print nothing.
    **settings: Settings of the task, such as `limit=100`, which `antlm eval
      score --task=TASK --help` lists.

  Raises:
    UserError: A name or a value is wrong, the model or the data cannot be read,
      or the output cannot be written or has results of another request.
  """
  is_path = data is None or isinstance(data, str | os.PathLike)
  if is_path or not TASKS[task].in_memory:
    settings_lib.require_path(data, "data")
  mode = mode_of(model, mode, step)
  task_settings = build_settings(task, data, mode, settings)
  zero_shot_task = TASKS[task]
  folder = pathlib.Path(output).absolute() if output else None
  with progress.quietly(quiet):
    # Before the model, which takes longer.
    items = zero_shot_task.read(task_settings)
    loaded = open_model(model, step)
    request = request_of(task, task_settings, loaded.saved, items)
    summary = None
    if folder and not overwrite:
      summary = finished_summary(folder, request)
    reused = summary is not None
    if reused:
      lines = [
        x for _, x in files.read_jsonl(folder / results.ITEMS, "the items")
      ]
    else:
      if folder:  # before minutes of scoring
        files.check_writable(folder, folder=True)
      origin = f" of {data}" if isinstance(data, str | os.PathLike) else ""
      progress.say(f"{len(items):,} items{origin}, mode {mode}")
      began = time.monotonic()
      outcome = zero_shot_task.score(loaded, items, task_settings)
      seconds = time.monotonic() - began  # compilation included
      summary = {"request": request, "task": task, "seconds": seconds}
      summary |= outcome.summary
      lines = list(outcome.lines)
      if folder:
        rows = "".join(json.dumps(line) + "\n" for line in lines)
        results.write_results(
          folder, {**outcome.files, results.ITEMS: rows}, summary
        )
  return ZeroShotResult(task, mode, summary, lines, folder, reused)


def mode_of(
  model: TextModel | files.Path, mode: str | None, step: int | None = None
) -> str:
  """Returns the mode; by default that of the model's training."""
  if mode is not None:
    return mode
  if isinstance(model, TextModel):
    config = model.config
  else:
    config = Checkpoint(model, step).meta.config
  return trained_modes(config)[0]


def build_settings(
  task: str,
  data: files.Path | Records,
  mode: str,
  settings: Mapping[str, Setting],
) -> Any:
  """Returns the settings of a task; errors are those of `evaluate`."""
  section = TASKS[task].settings
  help = f"antlm eval score --task={task} --help lists them"
  names = [*settings_lib.fields_of(section)]
  settings_lib.refuse_unknown(settings, names, f"task {task}", help)
  task_settings = settings_lib.build(section, settings)
  # Refuses a mode or a task that the pipeline lacks.
  pipelines.options(task_settings.pipeline, mode, task)
  if isinstance(data, os.PathLike):
    data = os.fspath(data)
  return dataclasses.replace(task_settings, data=data, mode=mode)


def request_of(
  task: str, settings: TaskSettings, model: Checkpoint, items: Sequence
) -> dict:
  """Returns all that the results depend on."""
  options = pipelines.options(settings.pipeline, settings.mode)
  return {
    "task": task,
    **{k: v for k, v in vars(settings).items() if k not in settings.apart},
    **results.model_digest(model),
    "reduction": settings.reduction or options["reduction"],
    # Identifies the data, independent of their path.
    "data": {"crc32": zlib.crc32(repr(items).encode())},
  }


def finished_summary(folder: pathlib.Path, request: dict) -> dict | None:
  """Returns the summary that `results.finished` finds, if it has its items."""
  summary = results.finished(folder, request)
  return summary if (folder / results.ITEMS).is_file() else None
