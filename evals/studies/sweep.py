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
import shlex
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
from antlm_jax.evals.studies.reporting import trainings
from antlm_jax.evals.studies.reporting.runs import TrainedRun, read_run
from antlm_jax.evals.studies.reporting.trainings import Comparison
from antlm_jax.page.hook import Page
from antlm_jax.runtime import files, progress, signals
from antlm_jax.runtime.jobs import Child, running_children
from antlm_jax.settings import PythonOnly, Section, Setting, argument
from antlm_jax.training import held_out, saving
from antlm_jax.training import run as run_lib
from antlm_jax.training import together as together_lib

_Point = Mapping[str, str]  # a value, as it is written, by key
_MOST_RUNS = 4096
_BUILD = "--build"  # its only argument, in the process that builds the runs
_TRAIN = "--train"  # before the arguments of each run that a process trains


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
    by: Objectives whose losses rank the runs, such as mlm; all by default.
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
  points, folder = _grid_points(grid), pathlib.Path(output).absolute()
  todo = _training_jobs(points, folder, os.fspath(config), settings)
  with progress.quietly(quiet):
    asked = {j: training.read_run_arguments(j.arguments)[0] for j in todo}
    _check_begun_runs(asked)
    left = {job: config for job, config in asked.items() if not job.done}
    _check_sweep_runs([*left.values()], by)
    jobs.run_jobs(join_trainings(left, together), folder, go_on=True)
    failed = tuple(job.about for job in left if not job.done)
    runs = _read_begun_runs(folder, points)
    if not runs:
      raise UserError(_failure(failed, len(todo)))
  title = f"A sweep of {', '.join(points[0])}"
  try:
    found = trainings.compare_runs(title, runs, by, folder / trainings.FOLDER)
  except UserError as error:
    if not failed:
      raise
    raise UserError(f"{_failure(failed, len(todo))}; {error}") from error
  return dataclasses.replace(found, failed=failed)


def _training_jobs(
  points: Sequence[_Point],
  folder: pathlib.Path,
  config: str,
  settings: Mapping[str, Setting],
) -> list[Job]:
  """Returns the training of each combination."""
  out = []
  for point in points:
    given = {**settings, **point}.items()
    words = [f"--config.{key}={_value_text(value)}" for key, value in given]
    workdir = _workdir(folder, point)
    arguments = f"--workdir={workdir}", f"--config={config}", *words
    out.append(Job(_title(point), "train", arguments, workdir))
  return out


def join_trainings(todo: Mapping[Job, Config], most: int) -> list[Job]:
  """Returns jobs that each train up to `most` of the runs in one process.

  Runs of a process differ in their seed and schedule alone.
  """
  if most == 1:
    return [*todo]
  groups = collections.defaultdict(list)
  for job, config in todo.items():
    groups[together_lib.shared_settings(config)].append(job)
  out = []
  for group in groups.values():
    for first in range(0, len(group), most):
      some = group[first : first + most]
      words = _TRAIN, *(shlex.join(job.arguments) for job in some)
      about = "; ".join(job.about for job in some)
      out.append(
        Job(about, "antlm_jax.evals.studies.sweep", words, some[0].folder)
      )
  return out


def _train_commands(commands: Sequence[str]) -> None:
  """Trains runs together, given the arguments of `antlm train` for each."""
  with signals.listening():
    runs, workdirs, hooks = [], [], []
    for words in commands:
      config, workdir = training.read_run_arguments(shlex.split(words))
      own, start = training.hooks_and_start(config)
      runs.append(run_lib.build_run(config, start))
      workdirs.append(workdir)
      hooks.append([*own, Page(f"antlm train {words}")])
    failed = together_lib.train_together(runs, workdirs, hooks)
  if failed:
    raise UserError(f"{len(failed)} of {len(runs)} runs failed: see above")


def done(argv: Sequence[str]) -> bool:
  """Returns whether all runs of a process have ended; see `training.done`."""
  return all(training.done(shlex.split(words)) for words in argv[1:])


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
  values = {}
  for key, given in grid.items():
    alone = isinstance(given, str) or not isinstance(given, Iterable)
    each = [given] if alone else given
    values[key] = dict.fromkeys(map(_value_text, each))
  count = math.prod(map(len, values.values()))
  if not values or not count:
    raise UserError(f"the grid {dict(grid)} has no values to vary")
  if count > _MOST_RUNS:
    raise UserError(
      f"the grid has {count:,} combinations, over {_MOST_RUNS:,}: give fewer"
      " values, or several sweeps"
    )
  combinations = itertools.product(*values.values())
  return [dict(zip(values, point, strict=True)) for point in combinations]


def _check_begun_runs(asked: Mapping[Job, Config]) -> None:
  """Raises a UserError if a run that exists has other settings."""
  for job, config in asked.items():
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


def _check_sweep_runs(configs: Sequence[Config], by: Sequence[str]) -> None:
  """Builds the runs that are left, before the first is trained.

  Raises a UserError of the first run whose settings or data are wrong, or that
  does not measure an objective of `by`.
  """
  if not configs:
    return
  # In another process, whose end frees the devices for the trainings.
  words = "antlm_jax.evals.studies.sweep", _BUILD
  with running_children() as children, tempfile.TemporaryFile("w+") as asked:
    json.dump([[config_lib.to_json(config) for config in configs], by], asked)
    asked.seek(0)
    children[0] = Child("the check of the runs", words, stdin=asked)
    while children:
      for _, child in children.pop_ended():
        if error := child.failure():
          raise error


def _build_runs(configs: Sequence[str], by: Sequence[str]) -> None:
  """Builds the runs of configs, which are JSON."""
  for config in map(config_lib.config_from_json, configs):
    _, start = training.hooks_and_start(config)
    run = run_lib.build_run(config, start)
    known = held_out.loss_names(run.evaluations)
    if unknown := [kind for kind in by if kind not in known]:
      raise UserError(
        f"by={unknown[0]}: not every run measures this; measured:"
        f" {', '.join(known) or 'none'}"
      )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  if argv == [_BUILD]:
    _build_runs(*json.load(sys.stdin))
    return
  if argv[:1] == [_TRAIN]:
    _train_commands(argv[1:])
    return
  parser = cli.Parser(description=__doc__)
  add_arguments(parser, sweep)
  about = "Print the command of each run, to run them on other machines"
  parser.add_argument("--commands", action="store_true", help=about)
  at = argv.index("--") if "--" in argv else len(argv)
  args = parser.parse_args(argv[:at])
  if at == len(argv):
    raise UserError("the training is missing: antlm sweep ... -- --config=...")
  points = _grid_points(args.grid)
  about = "After --: the arguments of `antlm train`."
  parser = cli.Parser(description=about)
  parser.add_argument("--config", required=True)
  base, words = parser.parse_with_overrides(argv[at + 1 :])
  pairs = (word.removeprefix("--config.").split("=", 1) for word in words)
  if args.commands:
    folder = pathlib.Path(args.output).absolute()
    todo = _training_jobs(points, folder, base.config, dict(pairs))
    configs = {
      job: training.read_run_arguments(job.arguments)[0] for job in todo
    }
    for job in join_trainings(configs, args.together):
      print(job.command_line)
    return
  asked = read_arguments(sweep, args)
  found = sweep(base.config, **asked, **dict(pairs))
  print(f"\n{found}")
  if found.failed:
    raise UserError(_failure(found.failed, len(points)))


def _parse_grid(grid: str) -> dict[str, list[str]]:
  """Reads a grid; raises a UserError if it is none."""
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
    values[key] = found
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
      found = dataclasses.replace(read_run(label, workdir), seed=seed)
      runs.setdefault(label or "all seeds", []).append(found)
  return runs


if __name__ == "__main__":
  cli.run_command(main)
