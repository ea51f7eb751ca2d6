"""Costs of training an encoder: hours, energy and price, by hardware.

    python -m antlm_jax.evals.benchmarks.encoder_costs --tokens=10G \\
      --price_per_hour=h100=2.5,rtx4090=0.4

Each line of encoder_costs.csv is a model on its hardware. The times are
forecasts of `antlm plan`, from stored plans. To make them again, run

    python -m antlm_jax.evals.benchmarks.costs --table=encoder_costs --forecast

Each row shows the forecast's error, and the nearest step that somebody
measured. The rates are the reader's, each for one chip and an hour.
"""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from antlm_jax import cli, tables, units
from antlm_jax.errors import UserError
from antlm_jax.evals.benchmarks import common, costs
from antlm_jax.page import plots
from antlm_jax.planning import places
from antlm_jax.planning.cost import Cost
from antlm_jax.runtime import files
from antlm_jax.settings import setting

_TABLE = "encoder_costs"
_LIKE = {"h200": "h100"}  # has the cores of an H100, and more memory
PICTURE = "encoder-costs.png"


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
  """A step that somebody measured, and its forecast."""

  name: str
  hardware: str
  kind: str  # kind of chip, such as h100; see `_LIKE`
  # Whether it is a step of this project, to which no constant was fitted.
  own: bool
  program: str  # kind of batch
  parameters: int
  ratio: float  # measured over forecast

  def __str__(self) -> str:
    return f"{self.name}, {self.hardware}: {self.ratio:.2f}"


@dataclasses.dataclass(frozen=True)
class EncoderCost:
  """Costs of training an encoder on one kind of hardware."""

  model: str
  hardware: str
  speed: float  # tokens a second, by the forecast
  cost: Cost
  likely: tuple[float, float, float]  # least, median and most of the ratios
  elsewhere: bool  # whether these are ratios of other chips
  nearest: MeasuredStep

  @property
  def hours(self) -> float:
    """Hours by the forecast."""
    return self.cost.seconds / 3600

  @property
  def error(self) -> str:
    """Measured over forecast, median and spread."""
    least, median, most = self.likely
    spread = f"{least:.2f} to {most:.2f}" if least < most else "one step"
    text = f"{median:.2f} ({spread})"
    return f"{text}, other chips" if self.elsewhere else text


def measured_steps(folder: files.Path) -> list[MeasuredStep]:
  """Returns the measured steps that have a forecast in a folder's files."""
  return [
    MeasuredStep(
      name=row["name"],
      hardware=row["hardware"],
      kind=_LIKE.get(kind := row["topology"].partition(":")[0], kind),
      own=table == "own_speeds" and not row["fitted"],
      program=row["program"],
      parameters=row["parameters"],
      ratio=row["ratio"],
    )
    for table in ("own_speeds", "public_speeds")
    for row in costs.compare_speeds(table, folder)
  ]


def encoder_costs(
  tokens: float, rates: Mapping[str, float], folder: files.Path = costs.RESULTS
) -> Iterator[EncoderCost]:
  """Yields the costs of encoders with stored plans.

  Args:
    tokens: Number of tokens that the encoder trains on.
    rates: Price of one chip for an hour, by kind, such as h100.
    folder: Folder with the JSON files of `benchmarks.costs`.
  """
  path = pathlib.Path(folder) / "encoder-costs.json"
  rows = files.read_json(path, "the forecasts")["rows"]
  found, measured = {row["name"]: row for row in rows}, measured_steps(folder)
  for speed in costs.read_speeds(_TABLE):
    row = found.get(speed.name, {})
    if "seconds" not in row:
      continue  # not compiled, or too large; see `too_large`
    place = places.parse_topology(speed.topology)
    steps = math.ceil(tokens / (row["rows"] * row["seq_len"]))
    same = [m for m in measured if m.kind == place.kind]
    # Other programs count only where ours was never measured.
    of = [m for m in same if m.own] or same or [m for m in measured if m.own]
    ratios = np.quantile([m.ratio for m in of], (0, 0.5, 1))
    yield EncoderCost(
      model=speed.name.partition(",")[0],
      hardware=speed.hardware,
      speed=row["tokens_per_second"],
      cost=Cost(
        steps=steps,
        bound=steps * row["bound_seconds"],
        forecast=steps * row["seconds"],
        chips=place.chips,
        watts=place.chip.watts,
        rate=rates.get(place.kind),
      ),
      likely=tuple(map(float, ratios)),
      elsewhere=not same,
      nearest=min(
        same or measured,
        key=lambda m: (
          abs(math.log(m.parameters / row["parameters"])),
          m.program != speed.program,
        ),
      ),
    )


def too_large(folder: files.Path = costs.RESULTS) -> list[str]:
  """Returns a sentence for each encoder that its hardware cannot hold."""
  path = pathlib.Path(folder) / "encoder-costs.json"
  return [
    f"{row['name']}: needs {units.gib(row['needed_bytes'])} of"
    f" {units.gib(row['limit_bytes'])}"
    for row in files.read_json(path, "the forecasts")["rows"]
    if row.get("needed_bytes", 0) > row.get("limit_bytes", 0)
  ]


def cost_rows(found: Sequence[EncoderCost]) -> list[tuple]:
  """Returns the cells of a table with the head `HEAD`."""
  return [
    (
      one.model,
      one.hardware,
      units.quantity(one.speed),
      _two_digits(one.hours),
      _two_digits(one.cost.chip_hours),
      None if one.cost.energy is None else _two_digits(one.cost.energy),
      None if one.cost.price is None else f"{one.cost.price:,.2f}",
      one.error,
      str(one.nearest),
    )
    for one in found
  ]


HEAD = (
  *("encoder", "hardware", "tokens/s", "hours", "chip-hours", "kWh", "price"),
  "measured / forecast",
  "nearest measured step",
)


def _two_digits(number: float) -> str:
  """Writes a number with two digits or more."""
  return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def draw_costs(
  found: Sequence[EncoderCost], title: str, path: pathlib.Path
) -> None:
  """Draws hours, energy and price as a PNG, with the forecast's error.

  Without rates, the last panel shows chip-hours.
  """
  models = list(dict.fromkeys(one.model for one in found))
  hardware = list(dict.fromkeys(one.hardware for one in found))
  priced = any(one.cost.price is not None for one in found)
  of_price = (
    ("price, at your rates", lambda one: one.cost.price)
    if priced
    else ("chip-hours", lambda one: one.cost.chip_hours)
  )
  # One panel above the other, for letters that a phone shows.
  figure = plots.canvas(5.8, 2 + 1.3 * len(models), title)
  panels = figure.subplots(3, 1)
  values = (
    ("hours", lambda one: one.hours),
    ("energy (kWh), at the most power", lambda one: one.cost.energy),
    of_price,
  )
  for axes, (label, value) in zip(panels, values, strict=True):
    styles = zip(
      hardware,
      itertools.cycle(plots.COLOURS),
      itertools.cycle("osD^v"),
      strict=False,
    )
    for place, (name, colour, marker) in enumerate(styles):
      shift = 0.62 * ((place + 0.5) / len(hardware) - 0.5)
      style = {"color": colour, "marker": marker, "ms": 5, "ls": "none"}
      for one in found:
        if one.hardware != name or value(one) is None:
          continue
        x, y = value(one), models.index(one.model) + shift
        least, _, most = one.likely
        axes.plot((least * x, most * x), (y, y), color=colour, lw=1.5)
        axes.plot(x, y, label=name, **style)
    axes.set(xscale="log", xlabel=label)
    axes.grid(axis="x", color="0.9")
    plots.step_axis(axes)
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()
  handles, labels = panels[0].get_legend_handles_labels()
  known = dict(zip(labels, handles, strict=True))
  panels[0].legend(known.values(), known, fontsize=9, frameon=False)
  plots.save_figure(figure, path)


def parse_rates(given: Sequence[str]) -> dict[str, float]:
  """Reads rates such as h100=2.5."""
  out = {}
  for text in given:
    kind, _, rate = text.partition("=")
    if kind not in places.KINDS:
      raise UserError(
        f"--price_per_hour={text}: {kind!r} is none of"
        f" {', '.join(places.KINDS)}"
      )
    try:
      out[kind] = float(rate)
    except ValueError:
      raise UserError(
        f"--price_per_hour={text}: write KIND=RATE, such as h100=2.5"
      ) from None
  return out


@dataclasses.dataclass(frozen=True)
class EncoderCosts:
  """The command's arguments."""

  tokens: str = setting("10G", "Number of training tokens, such as 10G")
  price_per_hour: tuple[str, ...] = setting(
    (), "Prices of one chip for an hour, by kind, such as h100=2.5,v5e=1.2"
  )
  picture: str = setting(PICTURE, "Path to the picture", read=cli.here)
  output: str = common.output()


def main(argv: Sequence[str]) -> None:
  """Prints the table and draws the picture."""
  args = common.benchmark_arguments(__doc__, EncoderCosts, argv)
  try:
    tokens = units.parse_quantity(args.tokens)
  except ValueError:
    raise UserError(f"--tokens={args.tokens} is not a number") from None
  rates = parse_rates(args.price_per_hour)
  found = list(encoder_costs(tokens, rates, args.output))
  if not found:
    raise UserError(f"{_TABLE} has no forecasts: run costs --forecast")
  files.check_writable(args.picture)
  print(tables.text_table(cost_rows(found), HEAD, "<<>>>>><<"))
  for line in too_large(args.output):
    print(line)
  title = (
    f"Training on {units.quantity(tokens)} tokens: forecast, and its error"
  )
  draw_costs(found, title, pathlib.Path(args.picture))
  print(f"wrote {args.picture}")


if __name__ == "__main__":
  cli.run_command(main)
