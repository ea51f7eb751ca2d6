"""Trains a grid of settings, one run after another, and ranks them.

  antlm sweep --output=runs/sweep \\
    --grid="schedule.peak_lr=1e-3,3e-3;seed=1,2" \\
    -- --config=quickstart --config.data.path=runs/data

After -- come the arguments of `antlm train`, without --workdir. Each run is a
run like any other, in OUTPUT/SETTINGS. At the end, OUTPUT/comparison has what
`antlm compare` writes. Runs that differ in their seed alone share a line, with
their mean and standard deviation.

The same command resumes an interrupted sweep, also with a larger grid. If a run
fails, for example at a loss that is not finite, the sweep names it and trains
the others.
"""

import concurrent.futures
import dataclasses
import itertools
import math
import multiprocessing
import pathlib
import urllib.parse
from collections.abc import Mapping, Sequence

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import jobs
from antlm_jax.evals.jobs import Job
from antlm_jax.evals.reporting import trainings
from antlm_jax.evals.reporting.runs import TrainedRun, read_run
from antlm_jax.hf import import_
from antlm_jax.settings import setting
from antlm_jax.training import experiment, held_out, saving

_Point = Mapping[str, str]  # a value, as it is written, by key
_MOST_RUNS = 4096


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  grid: str = setting(help="KEY=VALUE,...;KEY=VALUE,...: all combinations")
  output: str = setting(help="Path to the folder of all runs", read=cli.here)
  by: tuple[str, ...] = setting(
    (), "Objectives whose losses rank the runs, such as mlm; all by default"
  )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  settings_lib.add_arguments(parser, Settings)
  at = argv.index("--") if "--" in argv else len(argv)
  settings = settings_lib.from_args(Settings, parser.parse_args(argv[:at]))
  if at == len(argv):
    raise UserError("the training is missing: antlm sweep ... -- --config=...")
  points = _points(settings.grid)
  training = argv[at + 1 :]
  folder = pathlib.Path(settings.output).absolute()
  todo = []
  for point in points:
    workdir = _workdir(folder, point)
    arguments = f"--workdir={workdir}", *training, *_overrides(point)
    todo.append(Job(_title(point), "train", arguments, workdir))
  pairs = zip(points, todo, strict=True)
  left = [point for point, job in pairs if not job.done]
  _check(training, left, settings.by)
  failed = jobs.run(todo, folder, go_on=True)
  runs = _read(folder, points)
  if runs:
    print()
    title = f"A sweep of {', '.join(points[0])}"
    trainings.compare(title, runs, settings.by, folder / trainings.FOLDER)
  if failed:
    names = "; ".join(job.about for job in failed)
    raise UserError(
      f"{len(failed)} of {len(todo)} runs failed ({names}): see above; the same"
      " command tries them again"
    )


def _points(grid: str) -> list[_Point]:
  """Returns the combinations of a grid's values.

  Raises:
    UserError: It is not a grid, or has too many combinations.
  """
  values = {}
  for part in filter(str.strip, grid.split(";")):
    key, _, listed = part.partition("=")
    key = key.strip().removeprefix("--").removeprefix("config.")
    found = [value.strip() for value in listed.split(",")]
    if not key or not all(found) or key in values:
      raise UserError(
        f"--grid: {part.strip()!r} is not KEY=VALUE,VALUE,... with a key of its"
        " own"
      )
    values[key] = dict.fromkeys(found)
  if not values:
    raise UserError(f"--grid={grid}: give KEY=VALUE,VALUE,... to vary")
  count = math.prod(map(len, values.values()))
  if count > _MOST_RUNS:
    raise UserError(
      f"--grid has {count:,} combinations, over {_MOST_RUNS:,}: give fewer"
      " values, or several sweeps"
    )
  combinations = itertools.product(*values.values())
  return [dict(zip(values, point, strict=True)) for point in combinations]


def _overrides(point: _Point) -> list[str]:
  return [f"--config.{key}={value}" for key, value in point.items()]


def _check(
  training: Sequence[str], points: Sequence[_Point], by: Sequence[str]
) -> None:
  """Builds the runs that are left, before the first one is trained.

  Raises:
    UserError: The first run whose settings or data are wrong, or that does not
      measure an objective of `by`.
  """
  parser = cli.Parser(description="After --: the arguments of `antlm train`.")
  parser.add_argument("--config", required=True)
  args, overrides = parser.parse_with_overrides(training)
  words = [[*overrides, *_overrides(point)] for point in points]
  for point in words:
    config_lib.load(args.config, point)
  if not words:
    return
  # In another process, whose end frees the devices for the trainings.
  spawn = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, spawn) as other:
    other.submit(_build, args.config, words, by).result()


def _build(spec: str, words: Sequence[Sequence[str]], by: Sequence[str]):
  """Builds the runs of a config with each list of overrides."""
  for overrides in words:
    config = config_lib.load(spec, overrides)
    begin = config.init.checkpoint
    run = experiment.build(config, import_.start(begin) if begin else None)
    known = held_out.measured(run.evaluations)
    if unknown := [kind for kind in by if kind not in known]:
      raise UserError(
        f"--by={unknown[0]}: not every run measures this; measured:"
        f" {', '.join(known) or 'none'}"
      )


def _workdir(folder: pathlib.Path, point: _Point) -> pathlib.Path:
  # Commas would end an argument of `--config=continued:model=RUN,...`.
  name = "_".join(f"{key}={value}" for key, value in point.items())
  return folder / urllib.parse.quote(name, safe="=+*()")


def _title(point: _Point) -> str:
  """Describes a run, with the last part of each key where that is enough."""
  last = [key.rpartition(".")[2] for key in point]
  names = last if len(set(last)) == len(last) else point
  pairs = zip(names, point.values(), strict=True)
  return ", ".join(f"{name}={value}" for name, value in pairs)


def _read(
  folder: pathlib.Path, points: Sequence[_Point]
) -> dict[str, list[TrainedRun]]:
  """Reads the runs that have begun, those of other seeds under one label."""
  runs = {}
  for point in points:
    label = _title({k: v for k, v in point.items() if k != "seed"})
    workdir = _workdir(folder, point)
    if (workdir / saving.CONFIG).is_file():
      seed = point.get("seed", "")
      found = dataclasses.replace(read_run(label, workdir), seed=seed)
      runs.setdefault(label or "all seeds", []).append(found)
  return runs


if __name__ == "__main__":
  cli.run(main)
