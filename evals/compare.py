"""Compares trainings: one table, and their held-out curves in one picture.

  antlm compare runs/first runs/other

Prints the table; writes it with the picture and the settings in which the runs
differ: report.md, curves.png, runs.csv, settings.csv, table.json. A run is
shown at its last step, or where `eval.watch` is set at its best one; one that
still trains as far as it is.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals.reporting import trainings
from antlm_jax.evals.reporting.runs import TrainedRun, read_run
from antlm_jax.settings import setting
from antlm_jax.training import saving


@dataclasses.dataclass(frozen=True)
class Settings:
  """The command's arguments."""

  by: tuple[str, ...] = setting(
    (), "objectives whose losses rank them, such as mlm; all by default"
  )
  output: str | None = setting(
    None, "folder; comparison/ beside the first run by default", read=cli.here
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
  title = "Runs compared"
  trainings.compare(title, _read(paths), settings.by, pathlib.Path(output))


def _read(paths: Sequence[pathlib.Path]) -> dict[str, list[TrainedRun]]:
  """Reads runs, each by what tells its path from the others'."""
  for path in paths:
    if not (path / saving.CONFIG).is_file():
      raise UserError(f"{path} is no run's folder: it holds no {saving.CONFIG}")
  common = os.path.commonpath([path.parent for path in paths])
  labels = {os.path.relpath(path, common): path for path in paths}
  return {label: [read_run(label, path)] for label, path in labels.items()}


if __name__ == "__main__":
  cli.run(main)
