"""Divides the time of a step by part of the model.

Each instruction of a compiled program names the scopes (`jax.named_scope`) of
its source code. XLA fuses instructions. A fusion with a product belongs to the
part of the product.
"""

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Mapping

from antlm_jax import tables, units
from antlm_jax.errors import UserError
from antlm_jax.page import plots
from antlm_jax.planning.hlo import Instruction
from antlm_jax.runtime import files

KERNELS = "attention kernel"
NETWORK = "network"
_LAYOUTS = "RoPE and layouts"
_REST = "rest"
_STACKS = "layer stacks"
# The first pattern that matches an instruction's scope decides. For example, a
# scope is `mlp/` in the forward pass, and `jvp(mlp)/` in a gradient.
_SCOPES = {
  NETWORK: "^collectives$",
  "optimizer": r"\boptimizer\b",
  "head": r"\bhead\b",
  # A scan's slices and updates of stacked weights and saved activations.
  _STACKS: r"while/body/(jit\()?dynamic_(update_)?(index|slice)",
  "embedding": r"\bembedding\b",
  "norms": r"\bnorm\b",
  _LAYOUTS: r"\b(rope|attention)\b",
  "projections": r"\bprojections\b",
  "MLP": r"\bmlp\b",
}
PARTS = (*_SCOPES, KERNELS, _REST)


@dataclasses.dataclass(frozen=True)
class Time:
  """Seconds of a part of a step."""

  seconds: float = 0.0
  products: float = 0.0  # seconds of its matrix products alone

  def __add__(self, other: "Time") -> "Time":
    return Time(self.seconds + other.seconds, self.products + other.products)


def part_of_step(instruction: Instruction) -> str:
  """Returns the part of a step that an instruction belongs to (`PARTS`)."""
  for name, pattern in _SCOPES.items():
    if re.search(pattern, instruction.scope):
      if name == "projections" and instruction.code in ("copy", "transpose"):
        return _LAYOUTS
      return name
  return _REST


def total_time(parts: Mapping[str, Time]) -> Time:
  """Returns the time of a whole step."""
  return sum(parts.values(), Time())


def read_step_parts(path: files.Path) -> dict[str, dict[str, Time]]:
  """Reads the parts of each step from the JSON file of an earlier plan.

  Raises a UserError if the file is not a plan with a forecast.
  """
  plan = files.read_json(path, "the plan")
  try:
    return {
      f"{program['name']} before": {
        name: Time(**time)
        for name, time in program["forecast"]["parts"].items()
      }
      for program in plan["programs"]
      if program["steps"]
    }
  except (KeyError, TypeError) as error:
    raise UserError(
      f"{path} has no forecast by part: write it with antlm plan --output"
    ) from error


def step_parts_table(columns: Mapping[str, Mapping[str, Time]]) -> str:
  """Returns a table of the parts of steps, in milliseconds."""
  rows = [
    [n, *(_time_text(c.get(n)) for c in columns.values())]
    for n in _present_parts(columns)
  ]
  rows.append(["all", *(_time_text(total_time(c)) for c in columns.values())])
  return tables.text_table(rows, ["ms per step (products)", *columns], "<>")


def draw_step_parts(
  title: str, columns: Mapping[str, Mapping[str, Time]], path: pathlib.Path
) -> None:
  """Draws the parts of steps as bars in a PNG, with products darker."""
  names = _present_parts(columns)
  thick = 0.8 / len(columns)
  height = 1.3 + 0.14 * len(names) * (1 + len(columns))
  figure = plots.canvas(9, height, title)
  axes = figure.subplots()
  colours = itertools.cycle(plots.COLOURS)
  for row, (name, parts) in enumerate(columns.items()):
    times = [parts.get(part, Time()) for part in names]
    places = [y - 0.4 + thick * (row + 0.5) for y in range(len(names))]
    style = {"height": thick, "color": next(colours)}
    milliseconds = [1e3 * time.seconds for time in times]
    name += f": {units.milliseconds(total_time(parts).seconds)}"
    axes.barh(places, milliseconds, alpha=0.45, label=name, **style)
    axes.barh(places, [1e3 * time.products for time in times], **style)
  axes.set_yticks(range(len(names)), names)
  axes.invert_yaxis()
  axes.set_xlabel("forecast (ms per step); dark: matrix multiplications alone")
  plots.step_axis(axes)
  plots.legend(axes)
  plots.save_figure(figure, path)


def _present_parts(columns: Mapping[str, Mapping[str, Time]]) -> list[str]:
  return [name for name in PARTS if any(name in c for c in columns.values())]


def _time_text(time: Time | None) -> str | None:
  if time is None:
    return None
  products = f" ({1e3 * time.products:,.1f})" if time.products else ""
  return f"{1e3 * time.seconds:,.1f}{products}"
