"""What the commands that score a task share.

Writes summary.json and items.jsonl (what was scored, with the scores).
Where the output folder holds the results of the same request, they are shown.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import jax

from antlm_jax import cli, settings, tables
from antlm_jax.evals import results as results_lib
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.inference.model import (
  Identity,
  add_arguments,
  from_args,
  identify,
)
from antlm_jax.inference.scoring import BATCH_TOKENS, MODES
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting


class Outcome(NamedTuple):
  """What scoring a task gives."""

  summary: dict  # the numbers
  lines: Iterable[dict]  # what was scored, with the scores
  files: Mapping[str, str] = {}  # those of the pipeline, text by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The arguments of every task, but for the model and the task."""

  data: str = setting(help="Path to the folder of the task's files")
  mode: str = setting(help="Outputs that predict a token", choices=MODES)
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
  # What a task is scored by that takes none of these.
  pipeline: ClassVar[str] = "ours"
  as_published: ClassVar[bool] = False
  reduction: ClassVar[str | None] = None
  # What changes no score.
  apart: ClassVar[tuple[str, ...]] = (
    "data",
    "output",
    "overwrite",
    "batch_tokens",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineSettings(Settings):
  """Those of a task of BabyLM's pipelines."""

  pipeline: str = setting("ours", "see above", choices=pipelines.PIPELINES)


class Task:
  """What a folder holds, and what scoring it gives.

  Attributes:
    about: What it is, for --help.
    figures: The lines of its table: formats of a summary, by name.
    settings: Its arguments.
    notes: What --help says of them.
  """

  about: str
  figures: Mapping[str, str] = {}
  settings: type[Settings] = PipelineSettings
  notes: str = pipelines.NOTES

  def read(self, asked: Settings) -> Sequence:
    """Reads what is scored."""
    raise NotImplementedError

  def digest(self, asked: Settings, items: Sequence) -> dict:
    """Returns what tells the data from other data, wherever it lies."""
    paths = pathlib.Path(asked.data).glob("*")
    return results_lib.data_digest(sorted(p for p in paths if p.is_file()))

  def score(self, loaded, items, asked, options, track) -> Outcome:
    """Scores it; `options` are a pipeline's, `track` wraps lists of batches."""
    raise NotImplementedError

  def table(self, summary: Mapping, asked: Settings) -> str:
    """Lays the numbers of an outcome's summary out."""
    rows = ((n, form.format_map(summary)) for n, form in self.figures.items())
    return tables.text(rows, align="<>")

  def request(self, loaded, asked: Settings) -> dict:
    """Returns what the results depend on beside model, data and settings."""
    return {}


def run(
  argv: Sequence[str], description: str, tasks: Mapping[str, Task]
) -> None:
  """Scores a task and writes the results, unless they are there.

  Args:
    argv: The command's arguments; --task, if there is more than one.
    description: Its docstring; this module's is put after it.
    tasks: The tasks that it knows, by name.

  Raises:
    UserError: for anything wrong with the checkpoint, data or output.
  """
  args = _parse(argv, description, tasks)
  task = tasks[args.task]
  asked = settings.from_args(task.settings, args)
  options = _options(args.task, asked)
  note = pipelines.note(asked.pipeline, asked.mode, asked.as_published)
  # What is cheap is checked first: arguments, then the data, then the model.
  items = task.read(asked)
  loaded = from_args(args)
  request = {
    **_request(args.task, asked, loaded),
    "data": task.digest(asked, items),
    **task.request(loaded, asked),
  }
  output = _output(asked, loaded)
  if not asked.overwrite and (done := results_lib.finished(output, request)):
    print(task.table(done, asked))
    print(f"already scored: {output} (--overwrite scores again)")
    return
  files.check_writable(output, folder=True)  # before minutes of scoring
  print(f"{len(items):,} items of {asked.data}, {asked.mode}", flush=True)
  began = time.monotonic()
  track = functools.partial(progress.track, unit="batch")
  outcome = task.score(loaded, items, asked, options, track)
  about = {
    "task": args.task,
    "seconds": time.monotonic() - began,  # compilation included
    "peak_memory_mib": _peak_memory(),
    **note,
  }
  summary = write(output, outcome, request, about)
  print(task.table(summary, asked))
  print(f"written to {output}")


def done(
  argv: Sequence[str], description: str, tasks: Mapping[str, Task]
) -> bool:
  """Returns whether `run` has written its results; reads no model and no data.

  Raises:
    UserError: The arguments are wrong, there is no such checkpoint, or the
      folder has the results of another request.
  """
  args = _parse(argv, description, tasks)
  asked = settings.from_args(tasks[args.task].settings, args)
  model = identify(args.checkpoint, args.step)
  request = _request(args.task, asked, model)
  return results_lib.finished(_output(asked, model), request) is not None


def _request(task: str, asked: Settings, model: Identity) -> dict:
  """Returns what the results depend on, except the data."""
  return {
    "task": task,
    **{k: v for k, v in vars(asked).items() if k not in asked.apart},
    **results_lib.model_digest(model),
    "reduction": _options(task, asked)["reduction"],
  }


def _options(task: str, asked: Settings) -> dict:
  """Returns the options of scoring that a pipeline and the settings give."""
  options = pipelines.options(asked.pipeline, asked.mode, task)
  return options | ({"reduction": asked.reduction} if asked.reduction else {})


def _output(asked: Settings, model: Identity) -> pathlib.Path:
  """Returns the folder of the results."""
  name = "-".join((str(model.step), asked.mode, asked.pipeline))
  data = pathlib.Path(asked.data).absolute().name
  default = model.evals / data / name.removesuffix("-ours")
  return pathlib.Path(asked.output or default)


def _parse(argv, description: str, tasks) -> argparse.Namespace:
  """Parses the arguments that the named task has."""
  first = cli.Parser(add_help=False)
  only = next(iter(tasks)) if len(tasks) == 1 else None
  first.add_argument("--task", choices=tasks, default=only)
  named = first.parse_known_args(argv)[0].task
  # Without a task, --help shows what most of them have.
  task = tasks[named] if named else Task()
  shared = __doc__.split(".", 1)[1]
  parser = cli.Parser(description=f"{description}\n{task.notes}{shared}")
  add_arguments(parser)
  if not only:
    about = "see above; --help after it shows its own arguments"
    parser.add_argument("--task", required=True, choices=tasks, help=about)
  parser.set_defaults(task=named)
  settings.add_arguments(parser, task.settings)
  return parser.parse_args(argv)


def _peak_memory() -> float:
  """Returns the accelerator's peak memory, or on CPU the process's, in MiB."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"] / 2**20
  unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def write(
  folder: pathlib.Path, outcome: Outcome, request: Mapping, about: Mapping
) -> dict:
  """Writes a pipeline's own files, items.jsonl and the summary; returns it."""
  lines = "".join(json.dumps(line) + "\n" for line in outcome.lines)
  summary = {"request": request, **about, **outcome.summary}
  results_lib.write(folder, {**outcome.files, "items.jsonl": lines}, summary)
  return summary
