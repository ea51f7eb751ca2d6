"""The report of a study, from the runs that there are.

  antlm report --runs=runs/clm_or_mlm_tiny --config=clm_or_mlm

`--runs` holds ROW/SEED/ for the rows of the study's config. Each is the folder
of a training run, with evaluations in its `evals/`. The report lists missing
results.

Writes report.md, its pictures, each table as a .csv file, and table.json (the
same numbers, as shares). losses.json has every held-out loss of the runs, on
all rows and on each half of them. `--runs` also accepts that file, and then
reports the losses without the folders. Needs the extra `evals`: pip install
'antlm_jax[evals]'.
"""

import collections
import importlib.util
import pathlib
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Annotated

from antlm_jax import cli, settings
from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import design
from antlm_jax.evals.zero_shot.pipelines import PIPELINES
from antlm_jax.runtime import files, progress
from antlm_jax.settings import argument


@settings.checked
def report(
  runs: files.LocalPath,
  *,
  output: files.LocalPath | None = None,
  config: str = "antlm_table",
  scale: str = "tiny",
  pipeline: Annotated[str | None, argument(choices=PIPELINES)] = None,
) -> pathlib.Path:
  """Writes the report of a study, and returns the path to report.md.

  Args:
    runs: Path to a study's runs, or to losses.json.
    output: Path to a folder; RUNS/report by default.
    config: Study, by name or path.
    scale: Scale of the study.
    pipeline: Pipeline whose scores of pairs count; the most used by default.

  Raises:
    UserError: A package is missing, the config is no study, or its runs cannot
      be read.
  """
  for name in ("jinja2", "pandas"):
    if importlib.util.find_spec(name) is None:
      raise UserError(
        f"antlm report needs {name}: pip install 'antlm_jax[evals]'"
      )
  # Imported here, because they need the extra's packages.
  from antlm_jax.evals.studies.reporting import measured, record, render
  from antlm_jax.evals.studies.reporting import runs as runs_lib
  from antlm_jax.evals.studies.reporting.findings import Findings

  _, variants = design.read_scale(config, scale)
  module = config_lib.config_module(config)
  make = _kind(config, module)
  folder = pathlib.Path(runs)
  packed = folder.is_file()
  found = (record.read_record if packed else runs_lib.read_runs)(
    folder, variants
  )
  count = sum(map(len, found.values()))
  progress.say(f"{count} runs of {len(found)} rows")
  table = measured.read_measurements(found)
  used = collections.Counter(measured.latest_scores(table).pipeline)
  pipelines = [name for name, _ in used.most_common() if name]
  pipeline = pipeline or next(iter(pipelines), "ours")
  absent = [
    f"pairs as `--pipeline={name}` scores them: ask for that"
    for name in pipelines
    if name != pipeline
  ]
  absent += [
    f"runs of `{name}`: no row of {config}"
    for name in _strangers(folder, variants)
  ]
  about = module.__doc__ or pathlib.Path(config).stem
  table = table[table.pipeline.isin([pipeline, ""])]
  study = Findings(
    name=about.partition("\n")[0].rstrip("."),
    pipeline=pipeline,
    variants=variants,
    runs=found,
    table=table[table.main],
    also=table[~table.main],
    scores=table[:0],
    items=measured.ItemFiles(),
    fixed=getattr(module, "CONFIDENCE", None),
  )
  default = folder.with_suffix("") if packed else folder / "report"
  into = pathlib.Path(output or default)
  render.write_report(make(study, absent), into)
  record.write_record(into / record.FILE, found)
  return into / "report.md"


def _strangers(folder: pathlib.Path, known: Collection[str]) -> list[str]:
  """Returns the names of runs in a folder that the study has no row for."""
  found = {p.parent.parent.name for p in folder.glob("*/*/config.json")}
  return sorted(found - set(known))


def _kind(config: str, module: ModuleType) -> Callable:
  """Returns the function that makes the report of a study's kind."""
  from antlm_jax.evals.studies.reporting import controls, encoders

  kinds = {
    "controls": controls.report_controls,
    "encoders": encoders.report_encoders,
  }
  make = kinds.get(getattr(module, "REPORT", None))
  if make is None:
    known = ", ".join(kinds)
    raise UserError(f"--config={config}: REPORT is not one of {known}")
  return make


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  print(f"written to {cli.call_with_arguments(report, argv, __doc__)}")
