"""Costs of train steps: forecasts next to measured and published speeds.

    python -m antlm_jax.evals.benchmarks.costs --table=own_speeds
    python -m antlm_jax.evals.benchmarks.costs --table=encoder_costs \\
      --tokens=10G --price_per_hour=h100=2.5,rtx4090=0.4

A table is a CSV file next to this file. Each line is a train step. It has the
hardware, and the arguments with which `antlm plan` makes the same shape. If the
measured speed is known, the line has it with its source. `--forecast` compiles
the lines that have no stored forecast. To measure a line again, give its
arguments to `benchmarks.train_step` on that hardware.

The forecasts are of this project's model and step. PyTorch's runs are other
programs, with other attention and other kernels. JAX's runs are closer.
"""

import csv
import dataclasses
import itertools
import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence

import numpy as np

from antlm_jax import cli, tables, units
from antlm_jax import config as config_lib
from antlm_jax.arguments import add_arguments, read_section
from antlm_jax.configs.own_text import READINGS
from antlm_jax.errors import UserError
from antlm_jax.evals.benchmarks import common
from antlm_jax.evals.benchmarks.train_step import StepTimings
from antlm_jax.planning import places
from antlm_jax.planning.cost import Cost
from antlm_jax.planning.estimate import estimate_program
from antlm_jax.planning.forecast import Forecast
from antlm_jax.planning.search import Pod
from antlm_jax.planning.topology import topology_devices
from antlm_jax.runtime import chips, files
from antlm_jax.settings import Section, setting

_FOLDER = pathlib.Path(__file__).parent
RESULTS = _FOLDER / "results"
TABLES = ("public_speeds", "own_speeds", "encoder_costs", "own_text")


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


def forecast_speed(speed: Speed) -> dict:
  """Compiles a line's step for its devices; returns its forecast."""
  parser = cli.Parser()
  add_arguments(parser, StepTimings)
  args, overrides = parser.parse_with_overrides(shlex.split(speed.words))
  args = read_section(StepTimings, args)
  text = args.vocab_size, args.seq_len, args.pieces
  unmeasured = "--config.eval.rows=0", "--config.eval.watch="
  changes = config_lib.parse_overrides([*overrides, *unmeasured])
  devices = topology_devices(speed.topology)[: speed.devices]
  run = Pod(args.config, changes, devices, *text).build_run()
  kinds = run.batch_kinds(evaluations=False)
  kind = next(kind for kind in kinds if kind.name == speed.program)
  estimate = estimate_program(run, kind, forecasts=True)
  row = {
    "name": speed.name,
    "attention": estimate.attention,
    "rows": estimate.rows,
    "seq_len": estimate.seq_len,
    "devices": estimate.devices,
    "peak": estimate.peak,
    "work": estimate.work.total,
    "needed_bytes": estimate.memory.needed,
    "bound_seconds": estimate.step_seconds,
  }
  if not estimate.memory.fits:
    return row | {"error": "it does not fit into memory"}
  if not isinstance(estimate.forecast, Forecast):
    return row | {"error": estimate.forecast}
  return row | {"seconds": estimate.forecast.seconds}


def stored_forecasts(table: str, folder: files.Path = RESULTS) -> list[dict]:
  """Returns the stored forecasts of a table; none without a file."""
  path = pathlib.Path(folder) / f"{table.replace('_', '-')}.json"
  if not path.is_file():
    return []
  return files.read_json(path, "the forecasts")["rows"]


_OURS = "antlm_jax"  # the name of this package in the tables
HEAD = (
  *("step", "hardware", "program", "attention", "needs", "forecast"),
  *("measured", "measured / forecast"),
  *("tokens/s", "hours", "chip-hours", "kWh", "price"),
)


def cost_table(
  table: str,
  tokens: float = 1e10,
  rates: Mapping[str, float] | None = None,
  folder: files.Path = RESULTS,
) -> str:
  """Lays out the lines with a forecast, without empty columns.

  A line with a measured speed compares it. Another has the costs of a training.

  Args:
    table: A table of `TABLES`.
    tokens: Number of tokens that a training reads.
    rates: Price of one chip for an hour, by kind, such as h100.
    folder: Folder of the stored forecasts.
  """
  forecasts = {row["name"]: row for row in stored_forecasts(table, folder)}
  rows = []
  ratios = []
  speeds = read_speeds(table)
  # Without other programs, the names of the lines tell the hardware.
  ours = {speed.system for speed in speeds} == {_OURS}
  for speed in speeds:
    row = forecasts.get(speed.name)
    if row is None:
      continue
    needed = row.get("needed_bytes")
    system = [None, None] if ours else [speed.hardware, speed.system]
    cells = [speed.name, *system, row.get("attention")]
    cells.append(needed and units.gib(needed))
    size = row["rows"] * row["seq_len"]
    peak = row["peak"] * row["devices"]
    measured = speed.measured_seconds(row["work"], size, peak)
    if "seconds" in row and measured:
      ratios.append(measured / row["seconds"])
      times = map(units.milliseconds, (row["seconds"], measured))
      cells += [*times, f"{ratios[-1]:.2f}"]
    elif "seconds" in row:
      rate = size / row["seconds"]
      cells += [None, None, None, units.quantity(rate)]
      cells += _training_costs(speed, row, tokens / size, rates or {})
    rows.append(cells + [None] * (len(HEAD) - len(cells)))
  if ratios:
    spread = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    rows.append(["median (spread)", *[None] * 6, spread, *[None] * 5])
  columns = [n for n in range(len(HEAD)) if any(row[n] for row in rows)]
  lines = [[row[n] for n in columns] for row in rows]
  return tables.markdown(lines, [HEAD[n] for n in columns])


# Tokens of an English word with a vocabulary of 16,000, in BabyLM's text
_TOKENS_A_WORD = 1.37
_OWN_HEAD = "words", "GPU", "time", "needs", "--config"


def own_text_table(folder: files.Path = RESULTS) -> str:
  """Lays out the time of a whole training for each text and GPU."""
  forecasts = {row["name"]: row for row in stored_forecasts("own_text", folder)}
  lines = []
  for speed in read_speeds("own_text"):
    row = forecasts.get(speed.name)
    if row is None or "seconds" not in row:
      continue
    config, *_ = shlex.split(speed.words)
    size = speed.name.partition(" ")[0]
    tokens = _TOKENS_A_WORD * units.parse_quantity(size.replace("B", "G"))
    steps = tokens * READINGS[size] / (row["rows"] * row["seq_len"])
    lines.append(
      [
        size,
        speed.hardware,
        _hours(steps * row["seconds"] / 3600),
        units.gib(row["needed_bytes"]),
        f"`{config.partition('=')[2]}`",
      ]
    )
  return tables.markdown(lines, _OWN_HEAD)


def _hours(hours: float) -> str:
  """Writes a time in hours, or in minutes if it is shorter than one."""
  if hours >= 1:
    return f"{_two_digits(hours)} h"
  return f"{max(1, round(60 * hours))} min"


def _training_costs(
  speed: Speed, row: Mapping, steps: float, rates: Mapping[str, float]
) -> list[str | None]:
  """Returns hours, chip-hours, energy and price of a number of steps."""
  place = places.parse_topology(speed.topology)
  count = math.ceil(steps)
  cost = Cost(
    steps=count,
    bound=count * row["bound_seconds"],
    forecast=count * row["seconds"],
    chips=place.chips,
    watts=place.chip.watts,
    rate=rates.get(place.kind),
  )
  return [
    _two_digits(cost.seconds / 3600),
    _two_digits(cost.chip_hours),
    _two_digits(cost.energy),
    None if cost.price is None else f"{cost.price:,.2f}",
  ]


def _two_digits(number: float | None) -> str | None:
  """Writes a number with two digits or more."""
  if number is None:
    return None
  return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
  """Reads rates such as h100=2.5."""
  rates = {}
  for text in texts:
    kind, _, rate = text.partition("=")
    if kind not in chips.NAMES:
      raise UserError(
        f"--price_per_hour={text}: {kind!r} is none of {', '.join(chips.NAMES)}"
      )
    try:
      rates[kind] = float(rate)
    except ValueError:
      raise UserError(
        f"--price_per_hour={text}: write KIND=RATE, such as h100=2.5"
      ) from None
  return rates


@dataclasses.dataclass(frozen=True)
class Costs(Section):
  """The command's arguments."""

  table: str = setting("public_speeds", "Table of speeds", choices=TABLES)
  tokens: str = setting("10G", "Number of training tokens, such as 10G")
  price_per_hour: tuple[str, ...] = setting(
    (), "Prices of one chip for an hour, by kind, such as h100=2.5,v5e=1.2"
  )
  forecast: bool = setting(
    False,
    "Compile each step and store its forecast, and print no table. Skip lines"
    " that have one, unless --only names them",
  )
  only: tuple[str, ...] = setting(
    (), "Names of the lines, or their first letters, such as 17M (default: all)"
  )
  output: str = common.output()


def main(argv: Sequence[str]) -> None:
  """Stores the forecasts of a table, or prints the table."""
  args = common.benchmark_arguments(__doc__, Costs, argv)
  if args.forecast:
    _forecast_lines(args)
    return
  try:
    tokens = units.parse_quantity(args.tokens)
  except ValueError:
    raise UserError(f"--tokens={args.tokens} is not a number") from None
  rates = parse_rates(args.price_per_hour)
  if args.table == "own_text":
    print(own_text_table(args.output))
  else:
    print(cost_table(args.table, tokens, rates, args.output))


def _forecast_lines(args: Costs) -> None:
  """Compiles lines, and stores their forecasts with those stored before."""
  only = args.only or ("",)
  speeds = [x for x in read_speeds(args.table) if x.name.startswith(only)]
  if not speeds:
    named = ",".join(only)
    raise UserError(f"--only={named} names no line of {args.table}.csv")
  stored = stored_forecasts(args.table, args.output)
  if not args.only:  # continue an earlier call
    names = {row["name"] for row in stored}
    speeds = [speed for speed in speeds if speed.name not in names]
  names = {speed.name for speed in speeds}
  stored = [row for row in stored if row["name"] not in names]
  rows = itertools.chain(stored, map(forecast_speed, speeds))
  columns = {
    "name": 20,
    "attention": 10,
    "needs": (9, units.gib, "needed_bytes"),
    "step": (10, units.milliseconds, "seconds"),
    "error": 0,
  }
  common.report_rows(rows, args.output, args.table, columns, "<<>>")


if __name__ == "__main__":
  cli.run_command(main)
