"""Trains a grid of settings, one run after another, and says which is best.

  antlm sweep --output=runs/sweep \\
    --grid="schedule.peak_lr=1e-3,3e-3;seed=1,2" \\
    -- --config=quickstart --config.data.path=runs/data

After -- stand the arguments of `antlm train`, but for the folder: each run has
its own in OUTPUT, named by its settings, and is a run like any other. At the
end OUTPUT/comparison has what `antlm compare` writes; runs that differ in their
seed alone are one line there, with their mean and standard deviation.

The same command goes on where it was interrupted, also with a larger grid. A
run that fails, as where a loss is not finite, is named, and the others go on.
"""

import dataclasses
import itertools
import pathlib
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals.jobs import Job, run
from antlm_jax.evals.reporting import trainings
from antlm_jax.evals.reporting.runs import TrainedRun, read_run
from antlm_jax.settings import setting
from antlm_jax.training import saving

_Point = Mapping[str, str]  # a value, as it is written, by key


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  grid: str = setting(help="KEY=VALUE,...;KEY=VALUE,...: all combinations")
  output: str = setting(help="the folder of all runs", read=cli.here)
  by: tuple[str, ...] = setting(
    (), "objectives whose losses rank the runs, such as mlm; all by default"
  )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  settings_lib.add_arguments(parser, Settings)
  at = argv.index("--") if "--" in argv else len(argv)
  settings = settings_lib.from_args(Settings, parser.parse_args(argv[:at]))
  if at == len(argv):
    raise UserError("the training is missing: antlm sweep ... -- --config=...")
  points = list(_points(settings.grid))
  training = argv[at + 1 :]
  _check(training, points)
  folder = pathlib.Path(settings.output).absolute()
  todo = []
  for point in points:
    workdir = _workdir(folder, point)
    arguments = f"--workdir={workdir}", *training, *_overrides(point)
    todo.append(Job(_title(point), "antlm_jax.train", arguments, workdir))
  failed = run(todo, folder, go_on=True)
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


def _points(grid: str) -> Iterator[_Point]:
  """Yields the combinations of a grid's values.

  Raises:
    UserError: if it is not one.
  """
  values = {}
  for part in filter(None, grid.split(";")):
    key, _, listed = part.partition("=")
    key = key.strip().removeprefix("--").removeprefix("config.")
    found = [value.strip() for value in listed.split(",")]
    if not key or not all(found) or key in values:
      raise UserError(
        f"--grid: {part.strip()!r} is not KEY=VALUE,VALUE,... with a key of its"
        " own"
      )
    values[key] = dict.fromkeys(found)
  for point in itertools.product(*values.values()):
    yield dict(zip(values, point, strict=True))


def _overrides(point: _Point) -> list[str]:
  return [f"--config.{key}={value}" for key, value in point.items()]


def _check(training: Sequence[str], points: Sequence[_Point]) -> None:
  """Checks every run's settings, before the first one begins.

  Raises:
    UserError: for the first that is wrong.
  """
  parser = cli.Parser(description="After --: the arguments of `antlm train`.")
  parser.add_argument("--config", required=True)
  args, overrides = parser.parse_with_overrides(training)
  for point in points:
    config_lib.load(args.config, [*overrides, *_overrides(point)])


def _workdir(folder: pathlib.Path, point: _Point) -> pathlib.Path:
  # Commas would end an argument of `--config=continued:model=RUN,...`.
  name = "_".join(f"{key}={value}" for key, value in point.items())
  return folder / urllib.parse.quote(name, safe="=+*()")


def _title(point: _Point) -> str:
  """Says what a run is: keys by their last part, where that says enough."""
  last = [key.rpartition(".")[2] for key in point]
  names = last if len(set(last)) == len(last) else point
  return ", ".join(
    f"{name}={value}" for name, value in zip(names, point.values(), strict=True)
  )


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
