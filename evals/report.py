"""The report of the AntLM table, from the runs that there are.

  python -m evals.report --runs=runs/antlm_tiny

`--runs` holds ROW/SEED/ for the rows of configs/antlm_table.py, each the
folder of a training run with what `evals.blimp`, `evals.ewok` and
`evals.finetune` wrote into its `evals/`. What is not there yet is named.

Writes report.md, its pictures, and table.json (the same numbers, as shares).
Intervals are bootstrapped, always with the same draws.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from antlm_jax import cli
from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from evals.reporting import compare as report_numbers
from evals.reporting import markdown as report_text
from evals.reporting import plots as report_plots
from evals.reporting import runs as report_data
from evals.reporting.compare import Delta, Mean, Numbers, Study
from evals.reporting.runs import BENCHMARKS, READINGS
from evals.zero_shot import scoring

TABLE = pathlib.Path(__file__).parent.parent / "configs" / "antlm_table.py"


def draw(numbers: Numbers, folder: pathlib.Path) -> list[str]:
  """Draws every picture there is something for; returns their names."""
  study, names = numbers.study, []
  for family in study.families:
    name = f"curves_{family.lower().replace('-', '_')}.png"
    if report_plots.curves(study, family, folder / name):
      names.append(name)
  titles = {name: row.title for name, row in study.rows.items()}
  for row, deltas in numbers.phenomena.items():
    names.append(f"phenomena_{row}.png")
    report_plots.phenomena(deltas, titles, folder / names[-1])
  return names


def table(numbers: Numbers) -> dict:
  """Returns the numbers as JSON has them."""
  study = numbers.study
  return {
    "rows": {name: _row(numbers, name) for name in study.runs},
    "differences": _plain(numbers.deltas),
    "phenomena": _plain(numbers.phenomena),
    "switches": _plain(numbers.switches),
    "fine_tuned": _plain(numbers.tunings),
    "majority": _plain(study.majorities),
    "published": _plain(report_text.PUBLISHED),
  }


def _row(numbers: Numbers, name: str) -> dict:
  study = numbers.study
  scores = {
    reading: {b.name: study.score(name, b, reading) for b in BENCHMARKS}
    | {"macro-average": numbers.macros.get((name, reading))}
    for reading in READINGS
  }
  return {
    "family": study.rows[name].family,
    "title": study.rows[name].title,
    "curriculum": study.runs[name][0].text,
    "seeds": [run.seed for run in study.runs[name]],
    "scores": _plain(scores),
  }


def _plain(value):
  """Makes JSON's of dataclasses: their fields, and what follows from them."""
  if dataclasses.is_dataclass(value):
    fields = dataclasses.fields(value)
    out = {field.name: _plain(getattr(value, field.name)) for field in fields}
    derived = {Mean: ("mean", "std"), Delta: ("verdict",)}
    return out | {n: getattr(value, n) for n in derived.get(type(value), ())}
  if isinstance(value, Mapping):
    return {key: _plain(part) for key, part in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(part) for part in value]
  return value


def _parser() -> cli.Parser:
  parser = cli.Parser(prog="python -m evals.report", description=__doc__)
  add = parser.add_argument
  add("--runs", type=cli.here, required=True, help="folder of ROW/SEED/")
  add("--output", type=cli.here, help="folder; RUNS/report by default")
  add("--config", default=str(TABLE), help="config file that defines ROWS")
  add(
    "--pipeline",
    choices=scoring.PIPELINES,
    help="by which scores of pairs are; by default as most of the results",
  )
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  rows = report_data.read_rows(args.config)
  runs = report_data.read_runs(args.runs, rows)
  print(f"{sum(map(len, runs.values()))} runs of {len(runs)} rows", flush=True)
  pipelines = report_data.pipelines(runs)
  pipeline = args.pipeline or next(iter(pipelines), "ours")
  study = Study(rows, runs, pipeline)
  absent = [
    f"pairs as `--pipeline={name}` scores them: ask for that"
    for name in pipelines
    if name != pipeline
  ]
  absent += [
    f"runs of `{name}`: no row of {args.config}"
    for name in report_data.strangers(args.runs, rows)
  ]
  output = pathlib.Path(args.output or pathlib.Path(args.runs) / "report")
  try:
    output.mkdir(parents=True, exist_ok=True)
    numbers = report_numbers.compute(study)
    absent = report_text.missing(study) + absent
    pictures = draw(numbers, output)
    about = {"pipeline": pipeline, "missing": absent}
    text = json.dumps(about | table(numbers), indent=2) + "\n"
    files.write_text(output / "table.json", text)
    text = report_text.markdown(numbers, pictures, absent)
    files.write_text(output / "report.md", text)
  except OSError as error:
    raise UserError(f"cannot write to {output}: {error.strerror}") from error
  print(f"written to {output / 'report.md'}")


if __name__ == "__main__":
  cli.run(main)
