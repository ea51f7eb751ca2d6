"""Compares trainings: one table, and their held-out curves in one picture.

  antlm compare runs/first runs/other
  antlm compare TUNED OTHER

Prints the table, and writes report.md, with the settings that differ,
curves.png, and table.json. The table shows each run at its last step, or with
`eval.watch` at its best step. Losses compare only between runs with the
same held-out tokens: the table marks all others.

TUNED and OTHER are folders of results of `antlm eval finetune`. The table then
shows each task's main metric on the same items. Differences from the first
model have intervals, paired by item and seed.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Annotated

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.studies.reporting import comparison, tuned
from antlm_jax.evals.studies.reporting.comparison import Comparison
from antlm_jax.evals.studies.reporting.runs import read_run
from antlm_jax.evals.studies.reporting.tuned import TunedComparison
from antlm_jax.runtime import files
from antlm_jax.settings import argument
from antlm_jax.training import saving


@settings.checked
def compare(
  runs: Annotated[
    Sequence[files.Path],
    argument("runs", nargs="+", metavar="RUN", read=cli.local_path),
  ],
  *,
  by: str | Sequence[str] = (),
  output: Annotated[
    files.Path | None,
    argument(
      help="Path to a folder; comparison/ next to the first run by default",
      read=cli.local_path,
    ),
  ] = None,
) -> Comparison | TunedComparison:
  """Compares trainings by their held-out losses, or fine-tuned models by items.

  Args:
    runs: Paths to the runs' folders, or to results of fine-tunings.
    by: Objectives whose losses rank the runs, such as mlm; by default those
      that every run trained.
    output: Path to a folder for the report, a picture of the losses and tables;
      by default nothing is written.

  Raises:
    UserError: A folder is no run, or a run has not measured one of the losses.
  """
  paths = [pathlib.Path(os.path.abspath(path)) for path in runs]
  # A glob of a sweep's runs also finds its comparison.
  paths = [path for path in paths if path.name != comparison.FOLDER]
  if not paths:
    raise UserError("no runs to compare")
  for path in paths:
    if not path.exists():
      raise UserError(f"{path} does not exist")
  folder = pathlib.Path(output) if output else None
  tuned_folders = [tuned.results_folder(path) for path in paths]
  are_tuned = all(tuned_folders)
  if are_tuned:
    paths = tuned_folders
  elif any(tuned_folders):
    kinds = {bool(tuned_folders[i]): path for i, path in enumerate(paths)}
    raise UserError(
      f"{kinds[True]} has results of a fine-tuned model, and {kinds[False]} has"
      " none: compare runs, or results"
    )
  # A label is the part of a path that tells it from the others.
  common = os.path.commonpath([path.parent for path in paths])
  labels = {os.path.relpath(path, common): path for path in paths}
  if are_tuned:
    return tuned.compare_tuned(labels, folder)
  for path in paths:
    _check_run(path)
  trained = {label: [read_run(label, path)] for label, path in labels.items()}
  return comparison.compare_runs("Runs compared", trained, by, folder)


def _check_run(path: pathlib.Path) -> None:
  """Raises a UserError if a folder is no run; it names runs inside it."""
  if (path / saving.CONFIG).is_file():
    return
  for name, kind in ((saving.CONFIG, "runs"), (results.ITEMS, "results")):
    inner = sorted([*path.glob(f"*/{name}"), *path.glob(f"*/*/{name}")])
    if inner:
      raise UserError(
        f"{path} is a folder of {kind}: name each, such as {inner[0].parent}"
      )
  raise UserError(f"{path} is no run's folder: it holds no {saving.CONFIG}")


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  arguments = cli.parsed(compare, argv, __doc__)
  if arguments["output"] is None:
    first = pathlib.Path(os.path.abspath(arguments["runs"][0]))
    arguments["output"] = first.parent / comparison.FOLDER
  print(compare(**arguments))
