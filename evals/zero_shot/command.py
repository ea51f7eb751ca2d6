"""Zero-shot tasks, and their evaluation from Python and by commands.

A task is a value in `TASKS`: a reader of its data, a metric of the model's
scores, and their description. The module that implements a task adds it.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

from antlm_jax import cli, tables
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.inference.framing import TextModel, trained_modes
from antlm_jax.inference.model import (
  Identity,
  Loaded,
  add_arguments,
  identify,
  opened,
)
from antlm_jax.inference.scoring import BATCH_TOKENS, MODES, mode_named
from antlm_jax.runtime import files, progress
from antlm_jax.settings import Setting, setting
from antlm_jax.training.checkpoint import Checkpoint

ITEMS = "items.jsonl"
_WRITES = """\
Writes summary.json (the figures) and items.jsonl (every item with its scores).
If the output folder has results of the same request, prints those instead."""


class Outcome(NamedTuple):
  """The results of a task."""

  summary: dict  # the figures
  lines: Iterable[dict]  # the items with their scores
  files: Mapping[str, str] = {}  # a pipeline's own, text by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings:
  """The arguments of every task, in addition to the model and the task."""

  data: str = setting(help="Path to the folder of the task's files")
  mode: str | None = setting(
    None,
    "Outputs that predict a token, causal (left to right), mlm (at a mask),"
    " mntp (one position before it) or fused (both); by default the mode of"
    " training, causal if there are several",
    choices=MODES,
    read=mode_named,
  )
  limit: int = setting(
    0, "Largest number of items of each file or UID; 0 for all", least=0
  )
  output: str | None = setting(
    None,
    "Path to a folder for results; RUN/evals/DATA/STEP-MODE by default",
    read=cli.here,
  )
  overwrite: bool = setting(False, "Score again if results exist")
  batch_tokens: int = setting(
    BATCH_TOKENS, "Number of tokens encoded at once", least=1
  )
  # For tasks without these arguments.
  pipeline: ClassVar[str] = "ours"
  reduction: ClassVar[str | None] = None
  # Arguments that change no score.
  apart: ClassVar = {"data", "output", "overwrite", "batch_tokens"}

  @property
  def batches(self) -> dict[str, Any]:
    """Options of `scoring.score` that change no score."""
    track = functools.partial(progress.track, unit="batch")
    return {"batch_tokens": self.batch_tokens, "track": track}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSettings(TaskSettings):
  """The arguments of a task of BabyLM's evaluation pipelines."""

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
class Task:
  """A zero-shot task: a reader, and a metric of a model's scores.

  Attributes:
    about: Description for --help; its first line stands for it in lists.
    read: Reads the items, given the settings, or raises a UserError.
    score: Scores the items, given the model, the items and the settings.
    figure: Name of the main figure in the summary.
    table: Formats of a summary's figures by title, or a function that lays out
      the summary.
    settings: Section of the command's arguments.
    reported: Columns of `antlm report`.
  """

  about: str
  read: Callable[[Any], Sequence]
  score: Callable[[Any, Sequence, Any], Outcome]
  figure: str
  table: Mapping[str, str] | Callable[[Mapping], str]
  settings: type[TaskSettings] = TaskSettings
  reported: Sequence[Reported] = ()

  def shown(self, summary: Mapping) -> str:
    """Returns the table of a summary."""
    if callable(self.table):
      return self.table(summary)
    rows = ((n, form.format_map(summary)) for n, form in self.table.items())
    return tables.text(rows, ("figure", "value"), "<>")


TASKS: dict[str, Task] = {}


@dataclasses.dataclass(frozen=True, repr=False)
class Evaluation:
  """The results of a zero-shot task.

  Attributes:
    task: Name of the task.
    mode: Outputs that predict a token.
    summary: The figures, as in summary.json.
    items: Every item with its scores, as in items.jsonl.
    table: The figures as text.
    folder: Folder of the results; None if they are not written.
    reused: Whether the folder had the results before.
  """

  task: str
  mode: str
  summary: Mapping[str, object]
  items: Sequence[Mapping[str, object]]
  table: str
  folder: pathlib.Path | None = None
  reused: bool = False

  @property
  def score(self) -> float:
    """The task's main figure."""
    return cast(float, self.summary[TASKS[self.task].figure])

  def __repr__(self) -> str:
    figure = TASKS[self.task].figure
    return f"<{self.task}, {self.mode}: {figure} {self.score:.4g}>"

  def __str__(self) -> str:
    return self.table


def evaluate(
  model: Loaded | files.Path,
  task: str,
  data: files.Path,
  *,
  mode: str | None = None,
  output: files.Path | None = None,
  overwrite: bool = False,
  quiet: bool = False,
  **settings: Setting,
) -> Evaluation:
  """Scores a zero-shot task.

      evaluate("runs/x", "blimp", "blimp_filtered", mode="causal").score

  Args:
    model: Model, or the path to its run or checkpoint.
    task: Name of the task, a key of `TASKS`.
    data: Path to the task's files.
    mode: Outputs that predict a token: `causal` (or `clm`), `mlm`, `mntp` or
      `fused`; by default the mode of training, `causal` if there are several.
    output: Folder for the results. If it has results of the same request, these
      are returned.
    overwrite: Whether to score again if results exist.
    quiet: Whether to print nothing.
    **settings: Options of the task, such as `limit=100`, which `antlm eval
      score --task=TASK --help` lists.

  Raises:
    UserError: A name or a value is wrong, the model or the data cannot be read,
      or the output cannot be written or has results of another request.
  """
  mode = mode_of(model, mode)
  asked = asked_of(task, data, {"mode": mode, **settings})
  of, folder = TASKS[task], pathlib.Path(output) if output else None
  with progress.quietly(quiet):
    items = of.read(asked)  # before the model, which takes longer
    loaded = opened(model)
    request = request_of(task, asked, loaded)
    # Identifies the data, independent of their path.
    request["data"] = {"crc32": zlib.crc32(repr(items).encode())}
    summary = folder and not overwrite and results.finished(folder, request)
    reused = bool(summary)
    if reused:
      lines = [x for _, x in files.read_jsonl(folder / ITEMS, "the items")]
    else:
      if folder:  # before minutes of scoring
        files.check_writable(folder, folder=True)
      progress.say(f"{len(items):,} items of {asked.data}, mode {asked.mode}")
      began = time.monotonic()
      outcome = of.score(loaded, items, asked)
      seconds = time.monotonic() - began  # compilation included
      about = {"request": request, "task": task, "seconds": seconds}
      summary, lines = {**about, **outcome.summary}, list(outcome.lines)
      if folder:
        rows = "".join(json.dumps(line) + "\n" for line in lines)
        results.write(folder, {**outcome.files, ITEMS: rows}, summary)
  table = of.shown(summary)
  return Evaluation(task, asked.mode, summary, lines, table, folder, reused)


def mode_of(model: TextModel | files.Path, mode: str | None) -> str:
  """Returns the mode; by default that of the model's training."""
  if mode is not None:
    return mode
  known = isinstance(model, TextModel)
  config = model.config if known else Checkpoint(model).meta.config
  return trained_modes(config)[0]


def asked_of(task: str, data: files.Path, given: Mapping[str, Setting]) -> Any:
  """Returns the settings of a task; errors are those of `evaluate`."""
  if task not in TASKS:
    raise UserError(f"task {task!r} is not one of {', '.join(sorted(TASKS))}")
  section = TASKS[task].settings
  known = [*settings_lib.of(section)]
  help = f"antlm eval score --task={task} --help lists them"
  settings_lib.refuse_unknown(given, known, f"task {task}", help)
  given = {**given, "data": os.fspath(data), "mode": mode_named(given["mode"])}
  asked = settings_lib.choose(section, given)
  pipelines.options(asked.pipeline, asked.mode, task)  # refuses unknown modes
  return asked


def request_of(task: str, asked: TaskSettings, model: Identity) -> dict:
  """Returns the settings that the results depend on, except the data."""
  options = pipelines.options(asked.pipeline, asked.mode)
  return {
    "task": task,
    **{k: v for k, v in vars(asked).items() if k not in asked.apart},
    **results.model_digest(model),
    "reduction": asked.reduction or options["reduction"],
  }


def run(description: str, argv: Sequence[str]) -> None:
  """Runs the command of a task; `description` is the command's docstring."""
  name, asked, model = _parse(description, argv)
  given = vars(asked) | {"output": _folder(asked, model)}
  found = evaluate(model.path, name, **given)
  print(found)
  if found.reused:
    print(f"already scored: {found.folder} (--overwrite scores again)")
  else:
    print(f"written to {files.shown(found.folder)}")


def done(description: str, argv: Sequence[str]) -> bool:
  """Returns whether `run` has written its results; reads no model and no data.

  Raises a UserError if the arguments are wrong, there is no such checkpoint, or
  the folder has the results of another request.
  """
  name, asked, model = _parse(description, argv)
  request = request_of(name, asked, model)
  return results.finished(_folder(asked, model), request) is not None


def _folder(asked: TaskSettings, model: Identity) -> pathlib.Path:
  folder = "-".join((str(model.step), asked.mode, asked.pipeline))
  data = pathlib.Path(asked.data).absolute().name
  default = model.evals / data / folder.removesuffix("-ours")
  return pathlib.Path(asked.output or default)


def _parse(
  description: str, argv: Sequence[str]
) -> tuple[str, TaskSettings, Identity]:
  """Parses the arguments of the task that --task names."""
  parser = cli.Parser(add_help=False)
  parser.add_argument("--task", choices=TASKS)
  named = parser.parse_known_args(argv)[0].task
  rows = [(f"  {n}", t.about.partition("\n")[0]) for n, t in TASKS.items()]
  every = f"{description}\nThe tasks:\n\n{tables.text(sorted(rows))}"
  about = TASKS[named].about if named else every
  parser = cli.Parser(description=f"{about.strip()}\n\n{_WRITES}")
  add_arguments(parser)
  given = parser.prog == f"antlm eval {named}"  # a command that is a task's
  about = argparse.SUPPRESS if given else "Name of the task"
  parser.add_argument("--task", required=True, choices=TASKS, help=about)
  section = TASKS[named].settings if named else TaskSettings
  settings_lib.add_arguments(parser, section)
  args = parser.parse_args(argv)
  asked = settings_lib.from_args(section, args)
  model = identify(args.checkpoint, args.step)
  mode = mode_of(model.path, asked.mode)
  return named, dataclasses.replace(asked, mode=mode), model
