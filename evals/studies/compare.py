"""Compares trainings: one table, and their held-out curves in one picture.

  antlm compare runs/first runs/other

Prints the table, and writes report.md, curves.png, runs.csv, settings.csv (the
settings that differ) and table.json. The table shows each run at its last step,
or with `eval.watch` at its best step. Losses compare only between runs with the
same held-out tokens: the table marks all others.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.errors import UserError
from antlm_jax.evals.studies.reporting import trainings
from antlm_jax.evals.studies.reporting.runs import read_run
from antlm_jax.evals.studies.reporting.trainings import Comparison
from antlm_jax.runtime import files
from antlm_jax.settings import setting
from antlm_jax.training import saving


@dataclasses.dataclass(frozen=True)
class Ranking:
  """How runs are compared, and where the report goes."""

  by: tuple[str, ...] = setting(
    (), "Objectives whose losses rank the runs, such as mlm; all by default"
  )
  x: str | None = setting(
    None,
    "X axis of the picture, share in % of each run; by default share if the"
    " longest run has over twice the steps of the shortest, else step",
    choices=tuple(trainings.AXES),
  )
  output: str | None = setting(
    None,
    "Path to a folder; comparison/ next to the first run by default",
    read=cli.here,
  )


def compare(
  runs: Sequence[files.Path],
  *,
  output: files.Path | None = None,
  by: str | Sequence[str] = (),
  x: str | None = Ranking.x,
) -> Comparison:
  """Compares trainings by their held-out losses.

  Args:
    runs: Paths to the runs' folders.
    output: Folder for the report, a picture of the losses and tables.
    by: Objectives whose losses rank the runs, such as `mlm`; all by default.
    x: X axis of the picture, `step`, `tokens` or `share`; by default `share`
      if the longest run has over twice the steps of the shortest.

  Raises:
    UserError: A folder is no run, or a run has not measured one of the losses.
  """
  asked = settings_lib.choose(Ranking, {"by": by, "x": x})
  paths = [pathlib.Path(os.path.abspath(path)) for path in runs]
  # A glob of a sweep's runs also finds its comparison.
  paths = [path for path in paths if path.name != trainings.FOLDER]
  for path in paths:
    if not (path / saving.CONFIG).is_file():
      raise UserError(f"{path} is no run's folder: it holds no {saving.CONFIG}")
  if not paths:
    raise UserError("no runs to compare")
  # A label is the part of a path that tells it from the others.
  common = os.path.commonpath([path.parent for path in paths])
  labels = {os.path.relpath(path, common): path for path in paths}
  found = {label: [read_run(label, path)] for label, path in labels.items()}
  folder = pathlib.Path(output) if output else None
  return trainings.compare("Runs compared", found, asked.by, folder, asked.x)


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  parser.add_argument("runs", nargs="+", type=cli.here, metavar="RUN")
  settings_lib.add_arguments(parser, Ranking)
  args = parser.parse_args(argv)
  how = vars(settings_lib.from_args(Ranking, args))
  first = pathlib.Path(os.path.abspath(args.runs[0]))
  how["output"] = how["output"] or first.parent / trainings.FOLDER
  print(compare(args.runs, **how))
