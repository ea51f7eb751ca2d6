"""What the commands that score minimal pairs share.

A pair is right when the good choice's score is the higher one; a tie is wrong
(BabyLM's pipelines give it to the choice that is listed first, the good one).
As there, the result is the unweighted mean of the accuracies by UID.

`--pipeline` says how a choice is scored:

{pipelines}
Writes summary.json and items.jsonl (both scores of every pair); for 2024 and
2025 predictions.json in their forms; for 2025 best_temperature_report.txt.
Where the output folder holds the results of the same request, nothing is done.
"""

import dataclasses
import functools
import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.inference import pairs as pairs_lib
from antlm_jax.inference.pairs import Pair
from antlm_jax.inference.scoring import BATCH_TOKENS, MODES, REDUCTIONS
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint
from evals import results as results_lib
from evals.zero_shot import pipelines
from evals.zero_shot.accuracy import Results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The arguments that the commands share, but for `data` and the model."""

  mode: str = setting(help="how to score", choices=MODES)
  pipeline: str = setting("ours", "see above", choices=pipelines.PIPELINES)
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
  limit: int = setting(0, "pairs per UID; 0 for all", least=0)
  output: str | None = setting(
    None, "folder; RUN/evals/DATA/STEP-MODE by default", read=cli.here
  )
  overwrite: bool = setting(False, "score what is scored already")
  batch_tokens: int = setting(BATCH_TOKENS, "tokens encoded at once", least=1)

  def __post_init__(self):
    if not self.temperature:
      raise UserError("--temperature is empty")


def run(
  argv: Sequence[str],
  module: str,
  description: str,
  settings_type: type[Settings],
  read: Callable[[Settings], list[Pair]],
  task: Callable[[Sequence[Pair]], str],
) -> None:
  """Scores pairs and writes the results, unless they are there.

  Args:
    argv: The command's arguments.
    module: Its name.
    description: Its docstring; this module's is put after it.
    settings_type: What it takes, with `data` and what else chooses the pairs.
    read: Reads the pairs.
    task: Names the pipelines' task that pairs are of.

  Raises:
    UserError: for anything wrong with the checkpoint, data or output.
  """
  args = _parser(module, description, settings_type).parse_args(argv)
  asked = settings.from_args(settings_type, args)
  options = pipelines.options(asked.pipeline, asked.mode)
  if asked.reduction:
    options = options | {"reduction": asked.reduction}
  # What is cheap is checked first: arguments, then the data, then the model.
  pairs = read(asked)
  loaded = checkpoint.load(args.checkpoint, args.step)
  request = _request(asked, loaded, options["reduction"])
  output = pathlib.Path(asked.output or _default_output(loaded, asked))
  if not asked.overwrite and (done := results_lib.finished(output, request)):
    share = f"{100 * done['macro_accuracy']:.2f} %"
    print(f"already scored: {output} ({share}; --overwrite scores again)")
    return
  files.check_writable(output, folder=True)  # before minutes of scoring
  print(f"{len(pairs):,} pairs of {asked.data}, {asked.mode}", flush=True)
  results, cost = _score(loaded, pairs, asked, options)
  own = pipelines.PIPELINES[asked.pipeline].files(task(pairs), results)
  write(output, results, request, cost, own)
  print(results.table())
  print(f"written to {output}")


def _parser(module: str, description: str, settings_type) -> cli.Parser:
  _, about_pipelines = pipelines.__doc__.split("\n\n", 1)
  shared = __doc__.format(pipelines=about_pipelines)
  parser = cli.Parser(
    prog=f"python -m {module}", description=f"{description}\n{shared}"
  )
  checkpoint.add_arguments(parser)
  settings.add_arguments(parser, settings_type)
  return parser


def _score(loaded, pairs, asked: Settings, options) -> tuple[Results, dict]:
  """Scores pairs and says what it cost, compilation included."""
  began = time.monotonic()
  good, bad = pairs_lib.scores(
    loaded,
    pairs,
    asked.mode,
    temperature=asked.temperature,
    batch_tokens=asked.batch_tokens,
    track=functools.partial(progress.track, unit="batch"),
    **options,
  )
  seconds = time.monotonic() - began
  cost = {"seconds": seconds, "peak_memory_mib": _peak_memory()}
  return Results(pairs, good, bad, asked.temperature), cost


def _request(asked: Settings, loaded, reduction: str) -> dict:
  """Returns all that the results depend on."""
  # Where the data lies does not matter, only what is in it.
  apart = "data", "output", "overwrite", "batch_tokens"
  paths = sorted(p for p in pathlib.Path(asked.data).glob("*") if p.is_file())
  return {k: v for k, v in vars(asked).items() if k not in apart} | {
    **results_lib.model_digest(loaded),
    "data": results_lib.data_digest(paths),
    "reduction": reduction,
  }


def _default_output(loaded, asked: Settings) -> pathlib.Path:
  """Returns RUN/evals/DATA/STEP-MODE, or STEP-MODE-PIPELINE."""
  name = "-".join((str(loaded.step), asked.mode, asked.pipeline))
  data = pathlib.Path(asked.data).absolute().name
  return loaded.evals / data / name.removesuffix("-ours")


def _peak_memory() -> float:
  """Returns the accelerator's peak memory, or on CPU the process's, in MiB."""
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"] / 2**20
  unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def write(
  folder: pathlib.Path,
  results: Results,
  request: Mapping,
  cost: Mapping,
  own: Mapping[str, str],
) -> None:
  """Writes a pipeline's own files, items.jsonl and, last, summary.json."""
  items = "".join(json.dumps(item) + "\n" for item in results.items())
  summary = {"request": dict(request), **cost, **results.summary()}
  results_lib.write(folder, {**own, "items.jsonl": items}, summary)
