"""The report of a study, from the runs that there are.

  antlm report --runs=runs/study_tiny --config=clm_or_mlm

`--runs` holds ROW/SEED/ for the rows of the study's config. Each is the folder
of a training run, with evaluations in its `evals/`. The report lists missing
results.

Writes report.md, its pictures, each table as a .csv file, and table.json (the
same numbers, as shares). losses.json has every held-out loss of the runs, on
all rows and on each half of them. `--runs` also accepts that file, and then
reports the losses without the folders. Needs the extra `evals`: pip install
'antlm_jax[evals]'.
"""

import argparse
import collections
import importlib.util
import pathlib
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import design
from antlm_jax.evals.zero_shot.pipelines import PIPELINES


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = cli.Parser(description=__doc__)
  add = parser.add_argument
  add(
    "--runs",
    type=cli.here,
    required=True,
    help="Path to a study's runs, or to losses.json",
  )
  add(
    "--output", type=cli.here, help="Path to a folder; RUNS/report by default"
  )
  add("--config", default="antlm_table", help="Study, by name or path")
  add("--scale", default="tiny", help="Scale of the study")
  add(
    "--pipeline",
    choices=PIPELINES,
    help="Pipeline whose scores of pairs count; the most used by default",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _arguments(argv)
  for name in ("jinja2", "pandas"):
    if importlib.util.find_spec(name) is None:
      raise UserError(
        f"antlm report needs {name}: pip install 'antlm_jax[evals]'"
      )
  # Imported here, because they need the extra's packages.
  from antlm_jax.evals.studies.reporting import (
    controls,
    encoders,
    measured,
    record,
    render,
    runs,
  )
  from antlm_jax.evals.studies.reporting.findings import Findings

  kinds = {"controls": controls.report, "encoders": encoders.report}

  _, variants = design.read(args.config, args.scale)
  module = config_lib.module(args.config)
  make = kinds.get(getattr(module, "REPORT", None))
  if make is None:
    known = ", ".join(kinds)
    raise UserError(f"--config={args.config}: REPORT is not one of {known}")
  folder = pathlib.Path(args.runs)
  packed = folder.is_file()
  found = (record.read if packed else runs.read_runs)(folder, variants)
  print(
    f"{sum(map(len, found.values()))} runs of {len(found)} rows", flush=True
  )
  table = measured.read(found)
  used = collections.Counter(measured.latest(table).pipeline)
  pipelines = [name for name, _ in used.most_common() if name]
  pipeline = args.pipeline or next(iter(pipelines), "ours")
  absent = [
    f"pairs as `--pipeline={name}` scores them: ask for that"
    for name in pipelines
    if name != pipeline
  ]
  strangers = {p.parent.parent.name for p in folder.glob("*/*/config.json")}
  absent += [
    f"runs of `{name}`: no row of {args.config}"
    for name in sorted(strangers - set(variants))
  ]
  about = module.__doc__ or pathlib.Path(args.config).stem
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
  output = pathlib.Path(args.output or default)
  render.write(make(study, absent), output)
  record.write(output / record.FILE, found)
  print(f"written to {output / 'report.md'}")
