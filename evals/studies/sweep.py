"""Trains a grid of settings, one run after another, and ranks them.

  antlm sweep --output=runs/sweep \\
    --grid="schedule.peak_lr=1e-3,3e-3;seed=1,2" \\
    -- --config=quickstart --config.data.path=runs/data

Put the arguments of `antlm train` after --, without --workdir. Each run is a
run like any other, in OUTPUT/SETTINGS. At the end, OUTPUT/comparison has the
files of `antlm compare`. Runs that differ in their seed alone share a line,
with their mean and standard deviation.

The same command resumes an interrupted sweep, also with a larger grid. If a run
fails, for example at a loss that is not finite, the sweep names it and trains
the others.

With --together=N it trains up to N runs in one process, if they differ in their
seed and schedule alone.

With --commands it prints one command a line, for other machines. After these,
the same command without --commands ranks the runs.
"""

import collections
import dataclasses
import itertools
import json
import math
import os
import pathlib
import sys
import tempfile
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax import settings as settings_lib
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.commands import train as training
from antlm_jax.config import Config
from antlm_jax.data.prepared_folder import PreparedData
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import jobs
from antlm_jax.evals.studies.jobs import Job
from antlm_jax.evals.studies.reporting import comparison
from antlm_jax.evals.studies.reporting.comparison import Comparison
from antlm_jax.evals.studies.reporting.runs import TrainedRun, read_run
from antlm_jax.runtime import files, progress
from antlm_jax.runtime.jobs import Child, running_children
from antlm_jax.settings import PythonOnly, Section, Setting, argument
from antlm_jax.training import held_out, saving
from antlm_jax.training import run as run_lib
from antlm_jax.training import together as together_lib

_Point = Mapping[str, str]  # a value, as it is written, by key
_MOST_RUNS = 4096
_BUILD = "--build"  # its only argument, in the process that builds the runs
_TOGETHER = "antlm_jax.evals.studies.together"


@settings_lib.checked
def sweep(
  config: PythonOnly[files.Path],
  grid: Annotated[
    str | Mapping[str, Sequence[Setting]],
    argument(help="KEY=VALUE,...;KEY=VALUE,...: all combinations"),
  ],
  output: files.LocalPath,
  *,
  data: PythonOnly[files.Path | PreparedData | None] = None,
  by: str | Sequence[str] = (),
  together: Annotated[int, argument(least=1, most=256)] = 1,
  quiet: PythonOnly[bool] = False,
  **settings: Setting,
) -> Comparison:
  """Trains a grid of settings, one run after another, and ranks them.

      grid = {"schedule.peak_lr": [1e-3, 3e-3], "seed": [1, 2]}
      sweep("quickstart", grid, "runs/sweep", data="runs/data").best.label

  The same call resumes an interrupted sweep, also with a larger grid. A run
  that fails does not stop the others.

  Args:
    config: Name of a config, or path to a config file (`FILE.py:ARG`).
    grid: Values of each setting that varies, by its whole name; all
      combinations are trained. Or the same as a text,
      `KEY=VALUE,...;KEY=VALUE,...`.
    output: Path to the folder of all runs.
    data: Prepared folder, or the path to it; by default the config's.
    by: Objectives whose losses rank the runs, such as mlm; by default those
      that every run trained.
    together: Number of runs that one process trains, if they differ in their
      seed and schedule alone.
    quiet: Print nothing.
    **settings: Values of settings of all runs, by their whole names, such as
      `**{"train.steps": 100}`.

  Raises:
    UserError: The settings or the data of a run are wrong, or no run ended.
  """
  if data is not None:
    path = data.folder if isinstance(data, PreparedData) else data
    if path is None:
      raise UserError("the data are in memory: give prepare an output folder")
    settings = {"data.path": os.fspath(path), **settings}
  if not isinstance(config, str | os.PathLike):
    raise UserError("config: give a sweep the name of a config, or a path")
  points = _grid_points(grid)
  folder = pathlib.Path(output).absolute()
  with progress.quietly(quiet):
    trainings = _training_jobs(points, folder, os.fspath(config), settings)
    _check_begun_runs(trainings)
    left = {job: run for job, run in trainings.items() if not job.done}
    _check_sweep_runs(list(left.values()), by)
    jobs.run_jobs(join_trainings(left, together), folder, go_on=True)
    failed = tuple(job.title for job in left if not job.done)
    runs = _read_begun_runs(folder, points)
    if not runs:
      raise UserError(_failure(failed, len(points)))
  title = f"A sweep of {', '.join(points[0])}"
  comparison_folder = folder / comparison.FOLDER
  try:
    ranked = comparison.compare_runs(title, runs, by, comparison_folder)
  except UserError as error:
    if not failed:
      raise
    raise UserError(f"{_failure(failed, len(points))}; {error}") from error
  return dataclasses.replace(ranked, failed=failed)


def _training_jobs(
  points: Sequence[_Point],
  folder: pathlib.Path,
  config: str,
  settings: Mapping[str, Setting],
) -> dict[Job, Config]:
  """Returns the training of each combination, and its config."""
  trainings = {}
  for point in points:
    workdir = _workdir(folder, point)
    arguments = [f"--workdir={workdir}", f"--config={config}"]
    for key, value in {**settings, **point}.items():
      arguments.append(f"--config.{key}={_value_text(value)}")
    job = Job(_title(point), "train", tuple(arguments), workdir)
    trainings[job], _ = training.read_run_arguments(arguments)
  return trainings


def join_trainings(trainings: Mapping[Job, Config], most: int) -> list[Job]:
  """Returns jobs that each train up to `most` of the runs in one process.

  Runs of a process differ in their seed and schedule alone.
  """
  if most == 1:
    return [*trainings]
  groups = collections.defaultdict(list)
  for job, config in trainings.items():
    groups[together_lib.shared_settings(config)].append(job)
  return [
    jobs.join_jobs(group[start : start + most], _TOGETHER)
    for group in groups.values()
    for start in range(0, len(group), most)
  ]


def _value_text(value: Setting) -> str:
  if isinstance(value, Section | type):
    raise UserError(
      f"{value!r:.60} is no value of a sweep: give its name and settings, such"
      " as optimizer=muon"
    )
  return str(settings_lib.text(value))


def _grid_points(grid: str | Mapping[str, Sequence[Setting]]) -> list[_Point]:
  """Returns the combinations of a grid's values.

  Raises a UserError if it has none, or too many.
  """
  if isinstance(grid, str):
    grid = _parse_grid(grid)
  if not isinstance(grid, Mapping):
    raise UserError(f"the grid {grid!r:.60} is no mapping and no text")
  texts = {}
  for key, values in grid.items():
    if isinstance(values, str) or not isinstance(values, Iterable):
      values = [values]
    texts[key] = dict.fromkeys(map(_value_text, values))
  count = math.prod(map(len, texts.values()))
  if not texts or not count:
    raise UserError(f"the grid {dict(grid)} has no values to vary")
  if count > _MOST_RUNS:
    raise UserError(
      f"the grid has {count:,} combinations, over {_MOST_RUNS:,}: give fewer"
      " values, or several sweeps"
    )
  combinations = itertools.product(*texts.values())
  return [dict(zip(texts, point, strict=True)) for point in combinations]


def _check_begun_runs(trainings: Mapping[Job, Config]) -> None:
  """Raises a UserError if a run that exists has other settings."""
  for job, config in trainings.items():
    path = job.folder / saving.CONFIG
    if not path.is_file():
      continue
    text = files.read_text(path, "the config")
    try:
      before = config_lib.config_from_json(text)
    except UserError as error:
      raise UserError(f"{path}: {error}: remove that run") from error
    if changed := config_lib.config_differences(before, config):
      raise UserError(
        f"{job.folder} is a run of another sweep ({'; '.join(changed[:3])}):"
        " give another output"
      )


def _check_sweep_runs(
  configs: Sequence[Config], ranking: Sequence[str]
) -> None:
  """Checks that all remaining runs can be built, before any is trained.

  `ranking` has the losses that rank the runs. Raises the UserError of the first
  run whose settings or data are wrong, or that does not measure such a loss.
  """
  if not configs:
    return
  # Build them in a subprocess, because its end frees the devices for training.
  command = "antlm_jax.evals.studies.sweep", _BUILD
  with running_children() as children, tempfile.TemporaryFile("w+") as stdin:
    json.dump([[*map(config_lib.to_json, configs)], ranking], stdin)
    stdin.seek(0)
    children[0] = Child("the check of the runs", command, stdin=stdin)
    while children:  # `pop_ended` waits
      for _, child in children.pop_ended():
        if error := child.failure():
          raise error


def _build_runs(configs: Sequence[str], ranking: Sequence[str]) -> None:
  """Builds the runs of configs in JSON; the subprocess's part of the check."""
  for config in map(config_lib.config_from_json, configs):
    _, start = training.hooks_and_start(config)
    run = run_lib.build_run(config, start)
    measured = held_out.loss_names(run.evaluations)
    if unknown := [kind for kind in ranking if kind not in measured]:
      raise UserError(
        f"by={unknown[0]}: not every run measures this; measured:"
        f" {', '.join(measured) or 'none'}"
      )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  if argv == [_BUILD]:
    _build_runs(*json.load(sys.stdin))
    return
  parser = cli.Parser(description=__doc__)
  add_arguments(parser, sweep)
  parser.add_argument(
    "--commands",
    action="store_true",
    help="Print the command of each run, to run them on other machines",
  )
  end = argv.index("--") if "--" in argv else len(argv)
  args = parser.parse_args(argv[:end])
  if end == len(argv):
    raise UserError("the training is missing: antlm sweep ... -- --config=...")
  points = _grid_points(args.grid)
  parser = cli.Parser(description="After --: the arguments of `antlm train`.")
  parser.add_argument("--config", required=True)
  base, words = parser.parse_with_overrides(argv[end + 1 :])
  settings = dict(
    word.removeprefix("--config.").split("=", 1) for word in words
  )
  if args.commands:
    folder = pathlib.Path(args.output).absolute()
    trainings = _training_jobs(points, folder, base.config, settings)
    for job in join_trainings(trainings, args.together):
      print(job.command_line)
    return
  ranked = sweep(base.config, **read_arguments(sweep, args), **settings)
  print(f"\n{ranked}")
  if ranked.failed:
    raise UserError(_failure(ranked.failed, len(points)))


def _parse_grid(grid: str) -> dict[str, list[str]]:
  """Reads a grid; raises a UserError if it is none."""
  values = {}
  for part in filter(str.strip, grid.split(";")):
    key, _, listed = part.partition("=")
    key = key.strip().removeprefix("--").removeprefix("config.")
    texts = [value.strip() for value in listed.split(",")]
    if not key or not all(texts) or key in values:
      raise UserError(
        f"--grid: {part.strip()!r} is not KEY=VALUE,VALUE,... with a key of its"
        " own"
      )
    values[key] = texts
  if not values:
    raise UserError(f"--grid={grid}: give KEY=VALUE,VALUE,... to vary")
  return values


def _failure(failed: Sequence[str], count: int) -> str:
  return (
    f"{len(failed)} of {count} runs failed ({'; '.join(failed)}): see above;"
    " the same command tries them again"
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


def _read_begun_runs(
  folder: pathlib.Path, points: Sequence[_Point]
) -> dict[str, list[TrainedRun]]:
  """Reads the runs that have begun, those of other seeds under one label."""
  runs = {}
  for point in points:
    label = _title({k: v for k, v in point.items() if k != "seed"})
    workdir = _workdir(folder, point)
    if (workdir / saving.CONFIG).is_file():
      seed = point.get("seed", "")
      run = dataclasses.replace(read_run(label, workdir), seed=seed)
      runs.setdefault(label or "all seeds", []).append(run)
  return runs


if __name__ == "__main__":
  cli.run_command(main)
