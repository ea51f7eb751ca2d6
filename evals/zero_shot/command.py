"""What the commands that score a task share.

A pair is right when the good choice's score is the higher one; a tie is wrong
(BabyLM's pipelines give it to the choice that is listed first, the good one).
As there, the result is the unweighted mean of the accuracies by UID.

`--pipeline` says how a choice is scored:

{pipelines}
Writes summary.json and items.jsonl (what was scored, with the scores); for
2024 and 2025 predictions.json in their forms; for 2025 its reports.
Where the output folder holds the results of the same request, nothing is done.
"""

import dataclasses
import functools
import json
import pathlib
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import jax

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.evals import results as results_lib
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.inference.scoring import BATCH_TOKENS, MODES, REDUCTIONS
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint


class Outcome(Protocol):
  """What scoring a task gives."""

  def summary(self) -> dict:
    """Returns the numbers."""

  def lines(self) -> Iterable[dict]:
    """Yields what was scored, with the scores."""

  def table(self) -> str:
    """Lays the numbers out."""

  def files_2025(self) -> dict[str, str]:
    """Returns the files of pipeline 2025, text by name."""


class Task:
  """What a folder holds, and what scoring it gives.

  Attributes:
    about: What it is, for --help.
    flags: Settings that it takes, of those that are not for every task.
  """

  about: str
  flags: tuple[str, ...] = ()

  def read(self, asked: "Settings") -> Sequence:
    """Reads what is scored."""
    raise NotImplementedError

  def score(self, loaded, items, asked, options, track) -> Outcome:
    """Scores it; `options` are a pipeline's, `track` wraps lists of batches."""
    raise NotImplementedError

  def request(self, loaded, asked: "Settings") -> dict:
    """Returns what the results depend on beside model, data and settings."""
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The command's arguments, but for the model and the task."""

  data: str = setting(help="folder with the task's files")
  mode: str = setting(help="how to score", choices=MODES)
  pipeline: str = setting("ours", "see above", choices=pipelines.PIPELINES)
  as_published: bool = setting(
    False, "for 2024, masked: give scores to other sentences, as it does"
  )
  reduction: str | None = setting(
    None,
    "over the tokens of a choice; the pipeline's by default",
    choices=REDUCTIONS,
  )
  temperature: tuple[float, ...] = setting(
    (1.0,),
    "divides the logits; items are of the first",
    over=0,
    most=1e30,
    metavar="T[,T2,...]",
  )
  unfiltered: bool = setting(False, "EWoK: keep words BabyLM's list lacks")
  full_sentence_scores: bool = setting(False, "EWoK: score contexts, too")
  revisions: tuple[str, ...] = setting(
    (), "aoa: NAME=STEP or NAME=CHECKPOINT, ...; see its task", metavar="R,..."
  )
  limit: int = setting(0, "items per file or UID; 0 for all", least=0)
  output: str | None = setting(
    None, "folder; RUN/evals/DATA/STEP-MODE by default", read=cli.here
  )
  overwrite: bool = setting(False, "score what is scored already")
  batch_tokens: int = setting(BATCH_TOKENS, "tokens encoded at once", least=1)

  def __post_init__(self):
    if not self.temperature:
      raise UserError("--temperature is empty")


_APART = "data", "output", "overwrite", "batch_tokens"
# Not for every task.
_FLAGS = (
  *("reduction", "temperature", "unfiltered", "full_sentence_scores"),
  "revisions",
)


def run(
  argv: Sequence[str],
  description: str,
  tasks: Mapping[str, Task],
) -> None:
  """Scores a task and writes the results, unless they are there.

  Args:
    argv: The command's arguments; --task, if there is more than one.
    description: Its docstring; this module's is put after it.
    tasks: The tasks that it knows, by name.

  Raises:
    UserError: for anything wrong with the checkpoint, data or output.
  """
  args = _parser(description, tasks).parse_args(argv)
  asked = settings.from_args(Settings, args)
  task = tasks[args.task]
  _check_flags(args.task, task, asked)
  options = pipelines.options(asked.pipeline, asked.mode, args.task)
  note = pipelines.note(asked.pipeline, asked.mode, asked.as_published)
  if asked.reduction:
    options = options | {"reduction": asked.reduction}
  # What is cheap is checked first: arguments, then the data, then the model.
  items = task.read(asked)
  loaded = checkpoint.from_args(args)
  named = {"task": args.task}
  request = named | _request(task, asked, loaded, options["reduction"])
  output = pathlib.Path(asked.output or _default_output(loaded, asked))
  # Requests that are older than the name are taken to be of this task.
  if not asked.overwrite and results_lib.finished(output, request, named):
    print(f"already scored: {output} (--overwrite scores again)")
    return
  files.check_writable(output, folder=True)  # before minutes of scoring
  print(f"{len(items):,} items of {asked.data}, {asked.mode}", flush=True)
  outcome, cost = _score(task, loaded, items, asked, options)
  own = pipelines.PIPELINES[asked.pipeline].files(outcome)
  write(output, outcome, request, named | cost | note, own)
  print(outcome.table())
  print(f"written to {output}")


def _parser(description: str, tasks) -> cli.Parser:
  _, about_pipelines = pipelines.__doc__.split("\n\n", 1)
  shared = __doc__.format(pipelines=about_pipelines)
  parser = cli.Parser(description=f"{description}\n{shared}")
  checkpoint.add_arguments(parser)
  if len(tasks) > 1:
    parser.add_argument(
      "--task", required=True, choices=tasks, help="see above"
    )
  else:
    parser.set_defaults(task=next(iter(tasks)))
  settings.add_arguments(parser, Settings)
  return parser


def _check_flags(name: str, task: Task, asked: Settings) -> None:
  defaults = {field.name: field.default for field in dataclasses.fields(asked)}
  for flag in _FLAGS:
    if flag not in task.flags and getattr(asked, flag) != defaults[flag]:
      raise UserError(f"--{flag} is not for {name}")


def _request(task: Task, asked: Settings, loaded, reduction: str) -> dict:
  """Returns all that the results depend on."""
  # Where the data lies does not matter, only what is in it.
  paths = sorted(p for p in pathlib.Path(asked.data).glob("*") if p.is_file())
  return {
    **{k: v for k, v in vars(asked).items() if k not in _APART},
    **results_lib.model_digest(loaded),
    "data": results_lib.data_digest(paths),
    "reduction": reduction,
    **task.request(loaded, asked),
  }


def _default_output(loaded, asked: Settings) -> pathlib.Path:
  """Returns RUN/evals/DATA/STEP-MODE, or STEP-MODE-PIPELINE."""
  name = "-".join((str(loaded.step), asked.mode, asked.pipeline))
  data = pathlib.Path(asked.data).absolute().name
  return loaded.evals / data / name.removesuffix("-ours")


def _score(
  task: Task, loaded, items: Sequence, asked: Settings, options: Mapping
) -> tuple[Outcome, dict[str, float]]:
  """Scores a task's items, and returns what it took beside the outcome."""
  began = time.monotonic()
  track = functools.partial(progress.track, unit="batch")
  outcome = task.score(loaded, items, asked, options, track)
  seconds = time.monotonic() - began  # compilation included
  return outcome, {"seconds": seconds, "peak_memory_mib": _peak_memory()}


def _peak_memory() -> float:
  """Returns the accelerator's peak memory, or on CPU the process's, in MiB."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"] / 2**20
  unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def write(
  folder: pathlib.Path,
  outcome: Outcome,
  request: Mapping,
  about: Mapping,
  own: Mapping[str, str],
) -> None:
  """Writes a pipeline's own files, items.jsonl and, last, summary.json."""
  lines = "".join(json.dumps(line) + "\n" for line in outcome.lines())
  summary = {"request": dict(request), **about, **outcome.summary()}
  results_lib.write(folder, {**own, "items.jsonl": lines}, summary)
