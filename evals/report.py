"""The report of a study, from the runs that there are.

  antlm report --runs=runs/study_tiny --config=clm_or_mlm

`--runs` holds ROW/SEED/ for the rows of the study's config (`evals.study`),
each the folder of a training run with what the evaluations wrote into its
`evals/`. What is not there yet is named.

Writes report.md, its pictures, each table as a .csv file, and table.json (the
same numbers, as shares). Intervals are bootstrapped, always with the same
draws.
"""

import pathlib
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.evals import design
from antlm_jax.evals.reporting import controls, encoders, render, statistics
from antlm_jax.evals.reporting import runs as runs_lib
from antlm_jax.evals.reporting.compare import Study
from antlm_jax.evals.zero_shot.pipelines import PIPELINES

# What is said of a study: by the name of its config's REPORT.
REPORTS = {"controls": controls.report, "encoders": encoders.report}


def _parser() -> cli.Parser:
  parser = cli.Parser(description=__doc__)
  add = parser.add_argument
  add("--runs", type=cli.here, required=True, help="folder of ROW/SEED/")
  add("--output", type=cli.here, help="folder; RUNS/report by default")
  add("--config", default="antlm_table", help="the study")
  add("--scale", default="tiny", help="one of its")
  add(
    "--pipeline",
    choices=PIPELINES,
    help="by which scores of pairs are; by default as most of the results",
  )
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  _, variants = design.read(args.config, args.scale)
  module = config_lib.module(args.config)
  kind = getattr(module, "REPORT", None)
  if kind not in REPORTS:
    known = ", ".join(REPORTS)
    raise UserError(f"--config={args.config}: REPORT is not one of {known}")
  runs = runs_lib.read_runs(args.runs, variants)
  print(f"{sum(map(len, runs.values()))} runs of {len(runs)} rows", flush=True)
  pipelines = runs_lib.pipelines(runs)
  pipeline = args.pipeline or next(iter(pipelines), "ours")
  absent = [
    f"pairs as `--pipeline={name}` scores them: ask for that"
    for name in pipelines
    if name != pipeline
  ]
  absent += [
    f"runs of `{name}`: no row of {args.config}"
    for name in runs_lib.strangers(args.runs, variants)
  ]
  output = pathlib.Path(args.output or pathlib.Path(args.runs) / "report")
  about = module.__doc__ or pathlib.Path(args.config).stem
  study = Study(
    variants,
    runs,
    pipeline,
    name=about.partition("\n")[0].rstrip("."),
    confidence=getattr(module, "CONFIDENCE", statistics.CONFIDENCE),
  )
  render.write(REPORTS[kind](study, absent), output)
  print(f"written to {output / 'report.md'}")


if __name__ == "__main__":
  cli.run(main)
