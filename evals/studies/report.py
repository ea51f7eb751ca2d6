"""The report of a study, from the runs that there are.

  antlm report --runs=runs/clm_or_mlm_tiny --config=clm_or_mlm

`--runs` holds ROW/SEED/ for the rows of the study's config. Each is the folder
of a training run, with evaluations in its `evals/`. The report lists missing
results.

Writes report.md, its pictures, and table.json (the same numbers, as shares).
study.json has every score, and every held-out loss on all rows and on each half
of them. `--runs` also accepts that file, and then makes the same report without
the folders. Needs the extra `evals`: pip install 'antlm_jax[evals]'.
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
from antlm_jax.evals.studies.reporting import (
  controls,
  encoders,
  record,
  render,
  scores,
)
from antlm_jax.evals.studies.reporting import runs as runs_lib
from antlm_jax.evals.studies.reporting.claims import Claims
from antlm_jax.evals.studies.reporting.findings import Findings
from antlm_jax.evals.studies.reporting.items import ItemFiles
from antlm_jax.evals.studies.study import read_scale
from antlm_jax.evals.zero_shot.pipelines import PIPELINES
from antlm_jax.runtime import files, progress
from antlm_jax.settings import argument


@settings.checked
def report(
  runs: files.LocalPath,
  *,
  output: files.LocalPath | None = None,
  config: str | None = None,
  scale: str | None = None,
  pipeline: Annotated[str | None, argument(choices=PIPELINES)] = None,
) -> pathlib.Path:
  """Writes the report of a study, and returns the path to report.md.

  Args:
    runs: Path to a study's runs, or to study.json.
    output: Path to a folder; RUNS/report by default.
    config: Study, by name or path; that of study.json, or antlm_table.
    scale: Scale of the study; that of study.json, or tiny.
    pipeline: Pipeline whose scores of pairs count; the most used by default.

  Raises:
    UserError: A package is missing, the config is no study, or its runs cannot
      be read.
  """
  if importlib.util.find_spec("jinja2") is None:
    raise UserError("antlm report needs jinja2: pip install 'antlm_jax[evals]'")
  folder = pathlib.Path(runs)
  packed = folder.is_file()
  stored = record.read_record(folder) if packed else {}
  config = config or stored.get("config", "antlm_table")
  scale = scale or stored.get("scale", "tiny")
  _, rows = read_scale(config, scale)
  module = config_lib.config_module(config)
  make = _kind(config, module)
  trained = stored["rows"] if packed else runs_lib.read_runs(folder, rows)
  trained = runs_lib.chosen_runs(folder, trained, rows)
  count = sum(map(len, trained.values()))
  progress.say(f"{count} runs of {len(trained)} rows")
  items = ItemFiles()
  table = stored["scores"] if packed else scores.read_scores(trained)
  table = table.where(row=trained)
  pipelines = collections.Counter(x.pipeline for x in table.latest())
  pipelines = [name for name, _ in pipelines.most_common() if name]
  pipeline = pipeline or next(iter(pipelines), "ours")
  table = table.where(pipeline=[pipeline, ""])
  absent = [
    f"pairs as `--pipeline={name}` scores them: ask for that"
    for name in pipelines
    if name != pipeline
  ]
  absent += [
    f"runs of `{name}`: no row of {config}" for name in _strangers(folder, rows)
  ]
  if not packed:
    table += items.log_odds(table.latest())
  title = module.__doc__ or pathlib.Path(config).stem
  study = Findings(
    name=title.partition("\n")[0].rstrip("."),
    rows=rows,
    runs=trained,
    table=table,
    scores=scores.Scores(),
    items=items,
    estimates=stored.get("differences", {}),
    notes=stored.get("notes", []),
  )
  contents = make(study)
  claims = Claims(contents.claims, getattr(module, "CONFIDENCE", None))
  tables = {"claims": {"": claims.rows()}, **contents.tables}
  facts = {
    "pipeline": pipeline,
    "confidence": claims.confidence,
    "missing": [*contents.missing, *contents.study.item_notes(), *absent],
    **contents.facts,
  }
  text = render.fill_template(
    contents.template,
    study=contents.study,
    claims=claims,
    tables=tables,
    figures=contents.figures,
    **facts,
  )
  default = folder.with_suffix("") if packed else folder / "report"
  into = pathlib.Path(output or default)
  render.write_report(into, text, facts, tables, contents.figures)
  record.write_record(into / record.FILE, study, config=config, scale=scale)
  return into / "report.md"


def _strangers(folder: pathlib.Path, rows: Collection[str]) -> list[str]:
  """Returns the names of runs in a folder that the study has no row for."""
  names = {p.parent.parent.name for p in folder.glob("*/*/config.json")}
  return sorted(names - set(rows))


def _kind(config: str, module: ModuleType) -> Callable:
  """Returns the function that makes the report of a study's kind."""
  kinds = {
    "controls": controls.report_controls,
    "encoders": encoders.report_encoders,
  }
  make = kinds.get(getattr(module, "REPORT", None))
  if make is None:
    raise UserError(
      f"--config={config}: REPORT is not one of {', '.join(kinds)}"
    )
  return make


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  print(f"written to {cli.call_with_arguments(report, argv, __doc__)}")
