"""Compares trainings: one table, and their held-out curves in one picture.

  antlm compare runs/first runs/other

Prints the table, and writes it with the picture and the settings in which the
runs differ: report.md, curves.png, runs.csv, settings.csv, table.json. The
table shows a run at its last step, or with `eval.watch` at its best one.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals.reporting import trainings
from antlm_jax.evals.reporting.runs import read_run
from antlm_jax.settings import setting
from antlm_jax.training import saving


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  by: tuple[str, ...] = setting(
    (), "Objectives whose losses rank the runs, such as mlm; all by default"
  )
  x: str | None = setting(
    None,
    "The picture's x axis; by default step, or share (in % of each run) if the"
    " longest run has over twice the steps of the shortest",
    choices=tuple(trainings.AXES),
  )
  output: str | None = setting(
    None,
    "Path to a folder; comparison/ next to the first run by default",
    read=cli.here,
  )


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  parser.add_argument("runs", nargs="+", type=cli.here, metavar="RUN")
  settings_lib.add_arguments(parser, Settings)
  args = parser.parse_args(argv)
  settings = settings_lib.from_args(Settings, args)
  paths = [pathlib.Path(os.path.abspath(path)) for path in args.runs]
  output = settings.output or paths[0].parent / trainings.FOLDER
  for path in paths:
    if not (path / saving.CONFIG).is_file():
      raise UserError(f"{path} is no run's folder: it holds no {saving.CONFIG}")
  # A label is the part of a path that tells it from the others.
  common = os.path.commonpath([path.parent for path in paths])
  labels = {os.path.relpath(path, common): path for path in paths}
  runs = {label: [read_run(label, path)] for label, path in labels.items()}
  folder = pathlib.Path(output)
  trainings.compare("Runs compared", runs, settings.by, folder, settings.x)


if __name__ == "__main__":
  cli.run(main)
