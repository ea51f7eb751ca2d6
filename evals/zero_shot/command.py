"""From the arguments of a zero-shot command to its result files.

A task is a value in `TASKS`: a reader of its data, a metric of the model's
scores, and their description. The module that implements a task adds it.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax

from antlm_jax import cli, settings, tables
from antlm_jax.evals import results
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.inference.model import (
  Identity,
  add_arguments,
  from_args,
  identify,
)
from antlm_jax.inference.scoring import BATCH_TOKENS, MODES, mode_named
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting

_WRITES = """\
Writes summary.json (the figures) and items.jsonl (every item with its scores).
If the output folder has results of the same request, prints those instead."""


class Outcome(NamedTuple):
  """The results of a task."""

  summary: dict  # the figures
  lines: Iterable[dict]  # the items with their scores
  files: Mapping[str, str] = {}  # a pipeline's own, text by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The arguments of every task, in addition to the model and the task."""

  data: str = setting(help="Path to the folder of the task's files")
  mode: str = setting(
    help="Outputs that predict a token: causal (left to right), mlm (at one"
    " mask at a time), mntp (one position before it) or fused (both together)",
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
class PipelineSettings(Settings):
  """The arguments of a task of BabyLM's evaluation pipelines."""

  pipeline: str = setting(
    "ours",
    "Rules of scoring: ours, or those of BabyLM's pipeline of a year",
    choices=pipelines.PIPELINES,
  )


def digest_files(asked: Settings, items: Sequence) -> dict:
  """Returns what identifies the files of a folder, wherever it is."""
  paths = pathlib.Path(asked.data).glob("*")
  return results.data_digest(sorted(p for p in paths if p.is_file()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
  """A zero-shot task: a reader, and a metric of what a model makes of it.

  Attributes:
    about: Description for --help; its first line stands for it in lists.
    read: Reads the items, given the settings, or raises a UserError.
    score: Scores the items, given the model, the items and the settings.
    table: Formats of a summary's figures by title, or a function that lays out
      the summary, given it and the settings.
    settings: Section of the command's arguments.
    digest: Identifies the data in a request, given the settings and items.
    request: Returns further parts of a request, given the model and settings.
  """

  about: str
  read: Callable[[Any], Sequence]
  score: Callable[[Any, Sequence, Any], Outcome]
  table: Mapping[str, str] | Callable[[Mapping, Any], str]
  settings: type[Settings] = Settings
  digest: Callable[[Any, Sequence], dict] = digest_files
  request: Callable[[Any, Any], dict] = lambda loaded, asked: {}

  def show(self, summary: Mapping, asked: Settings) -> None:
    """Prints the table of a summary."""
    if callable(self.table):
      print(self.table(summary, asked))
    else:
      rows = ((n, form.format_map(summary)) for n, form in self.table.items())
      print(tables.text(rows, align="<>"))


TASKS: dict[str, Task] = {}


def run(description: str, name: str | None, argv: Sequence[str]) -> None:
  """Scores a task and writes the results, unless they exist.

  `description` is the command's docstring, and `name` that of its task; None if
  --task names it. Raises a UserError for anything wrong with the arguments,
  checkpoint, data or output.
  """
  args, task, asked = _parse(description, name, argv)
  # The cheap checks come first: arguments, then data, then the model.
  items = task.read(asked)
  loaded = from_args(args)
  request, output = _request(args.task, asked, loaded)
  request |= {"data": task.digest(asked, items), **task.request(loaded, asked)}
  if not asked.overwrite and (found := results.finished(output, request)):
    task.show(found, asked)
    print(f"already scored: {output} (--overwrite scores again)")
    return
  files.check_writable(output, folder=True)  # before minutes of scoring
  print(f"{len(items):,} items of {asked.data}, {asked.mode}", flush=True)
  began = time.monotonic()
  outcome = task.score(loaded, items, asked)
  about = {
    "task": args.task,
    "seconds": time.monotonic() - began,  # compilation included
    "peak_memory_mib": _peak_memory(),
  }
  task.show(write(output, outcome, request, about), asked)
  print(f"written to {output}")


def done(description: str, name: str | None, argv: Sequence[str]) -> bool:
  """Returns whether `run` has written its results; reads no model and no data.

  Raises a UserError if the arguments are wrong, there is no such checkpoint, or
  the folder has the results of another request.
  """
  args, _, asked = _parse(description, name, argv)
  model = identify(args.checkpoint, args.step)
  request, output = _request(args.task, asked, model)
  return results.finished(output, request) is not None


def _request(name: str, asked: Settings, model: Identity) -> tuple:
  """Returns what the results depend on, except the data, and their folder."""
  options = pipelines.options(asked.pipeline, asked.mode)
  request = {
    "task": name,
    **{k: v for k, v in vars(asked).items() if k not in asked.apart},
    **results.model_digest(model),
    "reduction": asked.reduction or options["reduction"],
  }
  folder = "-".join((str(model.step), asked.mode, asked.pipeline))
  data = pathlib.Path(asked.data).absolute().name
  default = model.evals / data / folder.removesuffix("-ours")
  return request, pathlib.Path(asked.output or default)


def _parse(
  description: str, name: str | None, argv: Sequence[str]
) -> tuple[argparse.Namespace, Task, Settings]:
  """Parses the arguments of the named task, or of the one that --task names."""
  parser = cli.Parser(add_help=False)
  parser.add_argument("--task", choices=TASKS, default=name)
  named = parser.parse_known_args(argv)[0].task
  rows = [(f"  {n}", t.about.partition("\n")[0]) for n, t in TASKS.items()]
  every = f"{description}\nThe tasks:\n\n{tables.text(sorted(rows))}"
  about = TASKS[named].about if named else every
  parser = cli.Parser(description=f"{about.strip()}\n\n{_WRITES}")
  add_arguments(parser)
  if name is None:
    about = "Name of the task"
    parser.add_argument("--task", required=True, choices=TASKS, help=about)
  else:
    parser.set_defaults(task=name)
  section = TASKS[named].settings if named else Settings
  settings.add_arguments(parser, section)
  args = parser.parse_args(argv)
  asked = settings.from_args(section, args)
  pipelines.options(asked.pipeline, asked.mode, named)  # refuses what it lacks
  return args, TASKS[named], asked


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
  results.write(folder, {**outcome.files, "items.jsonl": lines}, summary)
  return summary
