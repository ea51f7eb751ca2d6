"""Compares forecasts of whole train steps with measured speeds.

    python -m antlm_jax.evals.benchmarks.costs --forecast  # compiles and stores
    python -m antlm_jax.evals.benchmarks.costs             # compares

Each line of public_speeds.csv, next to this file, is a published speed. It has
the source, the hardware, and the arguments with which `antlm plan` makes the
same shape. own_speeds.csv has the same columns for steps of this project
(`--table=own_speeds`). `--measure` times its lines on the devices at hand.

The forecasts are of this project's model and step. PyTorch's runs are other
programs, with other attention and other kernels. JAX's runs are closer.
"""

import concurrent.futures
import csv
import dataclasses
import itertools
import pathlib
import shlex
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from antlm_jax import cli, tables, units
from antlm_jax import config as config_lib
from antlm_jax.arguments import add_arguments, read_section
from antlm_jax.errors import UserError
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.benchmarks.train_step import (
  StepTimings,
  compile_train_step,
  time_train_step,
)
from antlm_jax.planning.estimate import Estimate, estimate_program
from antlm_jax.planning.forecast import Forecast
from antlm_jax.planning.search import Pod
from antlm_jax.planning.topology import topology_devices
from antlm_jax.runtime import files
from antlm_jax.settings import setting
from antlm_jax.training.run import BatchKind, Run
from antlm_jax.training.step import jitted, state_shardings

_FOLDER = pathlib.Path(__file__).parent
RESULTS = _FOLDER / "results"
TABLES = ("public_speeds", "own_speeds", "encoder_costs", "one_gpu")


@dataclasses.dataclass(frozen=True)
class Speed:
  """Line of a table: a step, and its measured speed, if known."""

  name: str
  system: str  # program that was measured
  source: str
  date: str  # year and month of the measurement
  hardware: str
  topology: str  # smallest topology of `antlm plan` that has the devices
  devices: int  # number of its devices that the step uses
  shape: str  # model, in words
  batch: str  # rows x tokens of a step
  tokens_per_second: float | None  # on all devices
  mfu: float | None  # model FLOPs utilization, if it is all that is known
  derived: str  # how the speed follows from the source
  program: str  # kind of batch that is measured, M or C
  words: str  # arguments of benchmarks.train_step that make the step

  def measured_seconds(self, work: float, tokens: int, peak: float):
    """Returns the measured seconds of a step, or None.

    Args:
      work: FLOPs of the step over all devices.
      tokens: Number of tokens in the step.
      peak: Peak FLOP/s of all devices.
    """
    if self.tokens_per_second:
      return tokens / self.tokens_per_second
    return work / (self.mfu * peak) if self.mfu else None


def read_speeds(table: str) -> list[Speed]:
  """Reads a table of `TABLES`."""
  numbers = {"devices": int, "tokens_per_second": float, "mfu": float}
  with open(_FOLDER / f"{table}.csv", encoding="utf-8", newline="") as file:
    return [
      Speed(
        **row
        | {k: read(row[k]) if row[k] else None for k, read in numbers.items()}
      )
      for row in csv.DictReader(file)
    ]


def build_speed_run(speed: Speed, devices: Sequence) -> tuple[Run, BatchKind]:
  """Returns the run that makes a line's step, and its kind of batch."""
  parser = cli.Parser()
  add_arguments(parser, StepTimings)
  args, overrides = parser.parse_with_overrides(shlex.split(speed.words))
  args = read_section(StepTimings, args)
  text = args.vocab_size, args.seq_len, args.pieces
  changes = config_lib.parse_overrides([*overrides, "--config.eval.rows=0"])
  run = Pod(args.config, changes, devices[: speed.devices], *text).run()
  kinds = run.programs(evaluations=False)
  return run, next(kind for kind in kinds if kind.name == speed.program)


def forecast_speed(speed: Speed) -> dict:
  """Compiles a line's step for its devices; returns its forecast."""
  run, kind = build_speed_run(speed, topology_devices(speed.topology))
  found = estimate_program(run, kind, forecasts=True)
  return {"name": speed.name, "parameters": run.model.size} | _forecast(found)


def measure_speeds(speeds: Sequence[Speed], args: "Costs") -> Iterator[dict]:
  """Yields the times of lines on the devices of this machine.

  It compiles several steps at once, and times them one after the other.
  """
  with concurrent.futures.ThreadPoolExecutor(args.threads) as pool:
    jobs = [pool.submit(_compile_speed, speed) for speed in speeds]
    concurrent.futures.wait(jobs)
  how = StepTimings(seconds=args.seconds)
  for speed, job in zip(speeds, jobs, strict=True):
    out = {"name": speed.name, "device": jax.devices()[0].device_kind}
    try:
      run, kind, programs, compiled = job.result()
    except (jax.errors.JaxRuntimeError, UserError, ValueError) as error:
      yield out | {"error": str(error).splitlines()[0]}
      continue
    with jax.set_mesh(run.mesh):
      yield out | time_train_step(
        run.step, programs, run.mesh, kind.batch, how, compiled
      )


def _compile_speed(speed: Speed):
  run, kind = build_speed_run(speed, jax.devices())
  programs = jitted(run.step, state_shardings(run.step, run.mesh))
  with jax.set_mesh(run.mesh):
    compiled = compile_train_step(programs, run.mesh, kind.batch)
  return run, kind, programs, compiled


def _forecast(found: Estimate) -> dict:
  """Returns the figures of an estimate that a comparison needs."""
  out = {
    "attention": found.attention,
    "rows": found.rows,
    "seq_len": found.seq_len,
    "devices": found.devices,
    "peak": found.peak,
    "work": found.work.total,
    "needed_bytes": found.memory.needed,
    "limit_bytes": found.memory.limit,
    "compile_seconds": round(found.compile_seconds, 1),
  }
  if not found.memory.fits:
    return out | {"error": "it does not fit into memory"}
  if not isinstance(found.forecast, Forecast):
    return out | {"error": found.forecast}
  seconds = found.forecast.seconds
  parts = {k: dataclasses.asdict(t) for k, t in found.forecast.parts.items()}
  return out | {
    "seconds": seconds,
    "tokens_per_second": found.rows * found.seq_len / seconds,
    "mfu": found.mfu(seconds),
    "bound_seconds": found.step_seconds,
    "parts": parts,
  }


_COLUMNS = {
  "name": 20,
  "attention": 10,
  "needs": (9, units.gib, "needed_bytes"),
  "step": (10, units.milliseconds, "seconds"),
  "tokens/s": (11, "{:,.0f}".format, "tokens_per_second"),
  "MFU": (6, "{:.1%}".format, "mfu"),
  "error": 0,
}


def stored_speeds(name: str, folder: files.Path) -> dict:
  """Returns the stored forecasts or measurements; no rows without a file."""
  path = pathlib.Path(folder) / f"{name.replace('_', '-')}.json"
  known = files.read_json(path, "the speeds") if path.is_file() else {}
  return {"rows": [], "fitted": []} | known


def compare_speeds(table: str, folder: files.Path = RESULTS) -> Iterator[dict]:
  """Yields the measured and the forecast seconds of the lines that have both.

  If a later formula (`-mended`) has forecasts, `first` is the earlier forecast.
  `fitted` says whether the later formula was fitted to the line.

  Args:
    table: A table of `TABLES`.
    folder: Folder with the JSON files that `--forecast` and `--measure` wrote.
  """
  first, later, timed = (
    {row["name"]: row for row in stored_speeds(table + what, folder)["rows"]}
    for what in ("", "-mended", "-measured")
  )
  fitted = stored_speeds(f"{table}-mended", folder)["fitted"]
  for speed in read_speeds(table):
    row = first.get(speed.name, {})
    now = later.get(speed.name, row)
    if "seconds" not in row:
      continue
    tokens, peak = row["rows"] * row["seq_len"], row["peak"] * row["devices"]
    measured = timed.get(speed.name, {}).get("seconds")
    measured = measured or speed.measured_seconds(row["work"], tokens, peak)
    if measured is None:
      continue
    yield {
      "name": speed.name,
      "hardware": speed.hardware,
      "topology": speed.topology,
      "program": speed.program,
      "parameters": row.get("parameters"),
      "system": speed.system,
      "attention": row.get("attention"),
      "measured": measured,
      "first": row["seconds"],
      "forecast": now["seconds"],
      "ratio": measured / now["seconds"],
      "fitted": speed.name in fitted,
    }


COMPARISON = (
  *("", "hardware", "measured program", "attention of the forecast"),
  *("measured", "first forecast", "ratio", "forecast", "ratio", "fitted"),
)


def comparison_cells(rows: Sequence[dict]) -> list[tuple]:
  """Returns the cells of a table with the head `COMPARISON`.

  The last lines have the median and the spread of the ratios. If the formula
  was fitted to some lines, the other lines have a line of their own.
  """
  cells = [
    (
      row["name"],
      row["hardware"],
      row["system"],
      row["attention"],
      units.milliseconds(row["measured"]),
      units.milliseconds(row["first"]),
      f"{row['measured'] / row['first']:.2f}",
      units.milliseconds(row["forecast"]),
      f"{row['ratio']:.2f}",
      "yes" if row["fitted"] else "no",
    )
    for row in rows
  ]
  groups = {"median (spread)": rows}
  others = [row for row in rows if not row["fitted"]]
  if 0 < len(others) < len(rows):
    groups |= {"of the lines that are not fitted": others}
  for title, group in groups.items():
    first = _median_and_range([row["measured"] / row["first"] for row in group])
    now = _median_and_range([row["ratio"] for row in group])
    cells.append((title, *[""] * 5, first, "", now, ""))
  return cells


def _median_and_range(ratios: Sequence[float]) -> str:
  return f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


@dataclasses.dataclass(frozen=True)
class Costs:
  """The command's arguments."""

  table: str = setting("public_speeds", "Table of speeds", choices=TABLES)
  forecast: bool = setting(
    False,
    "Compile each step and store its forecast, without a comparison. Skip"
    " lines that have one, unless --only names them",
  )
  measure: bool = setting(
    False, "Time each step on the devices of this machine and store the times"
  )
  only: tuple[str, ...] = setting(
    (), "Names of the lines, or their first letters, such as 17M (default: all)"
  )
  seconds: float = setting(3.0, "Seconds of timing for each line", over=0)
  threads: int = setting(4, "Steps that are compiled at once", least=1)
  output: str = common.output()


def main(argv) -> None:
  """Stores the forecasts, or prints them next to the measured speeds."""
  args = common.benchmark_arguments(__doc__, Costs, argv)
  speeds = read_speeds(args.table)
  only = args.only or ("",)
  wanted = [speed for speed in speeds if speed.name.startswith(only)]
  if not wanted:
    named = ",".join(only)
    raise UserError(f"--only={named} names no line of {args.table}.csv")
  if args.forecast or args.measure:
    name = args.table + "-measured" * args.measure
    kept = stored_speeds(name, args.output)["rows"]
    if args.forecast and not args.only:  # continue an earlier call
      known = {row["name"] for row in kept}
      wanted = [speed for speed in wanted if speed.name not in known]
    named = {speed.name for speed in wanted}
    kept = [row for row in kept if row["name"] not in named]
    make = measure_speeds(wanted, args)
    made = make if args.measure else map(forecast_speed, wanted)
    rows = itertools.chain(kept, made)
    common.report_rows(rows, args.output, name, _COLUMNS, "<<>>>><")
    return
  rows = list(compare_speeds(args.table, args.output))
  if not rows:
    raise UserError(f"{args.table}.csv has no measured line with a forecast")
  print(tables.text_table(comparison_cells(rows), COMPARISON, "<<<<>"))


if __name__ == "__main__":
  cli.run_command(main)
