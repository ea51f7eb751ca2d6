"""A report as a value, and what makes Markdown, JSON and pictures of it.

A report is a list of sections; a section is a list of notes (strings), lists
of lines, tables and figures. A table is records, and columns that say how a
record's cell is written: Markdown shows the cells, JSON has the records whole.
"""

import collections
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from antlm_jax import tables
from antlm_jax.runtime import files
from evals.reporting.compare import Mean
from evals.reporting.statistics import Interval


@dataclasses.dataclass(frozen=True)
class Table:
  """Records, and what is shown of them.

  Attributes:
    name: What the JSON calls the records; tables of one name are one there,
      and one without a name is not.
    records: NamedTuples, dataclasses or dicts, a line each.
    columns: How each column writes a record's cell, by heading; None is a
      dash. Without columns the table is in the JSON alone.
    title: Stands above it.
    note: Stands between the title and the table.
    most: How many lines with the same first cell are shown at most; the
      middle ones are left out.
  """

  name: str
  records: Sequence[Any]
  columns: Mapping[str, Callable[[Any], str | None]] = dataclasses.field(
    default_factory=dict
  )
  title: str = ""
  note: str = ""
  most: float = math.inf

  def lines(self) -> Iterator[list[str | None]]:
    """Yields the cells of each line that is shown."""
    every = [[cell(r) for cell in self.columns.values()] for r in self.records]
    for _, group in itertools.groupby(every, key=lambda cells: cells[0]):
      shown = list(group)
      if len(shown) > self.most:
        half = int(self.most) // 2
        shown[half:-half] = [["...", *[""] * (len(self.columns) - 1)]]
      yield from shown


@dataclasses.dataclass(frozen=True)
class Figure:
  """A picture beside the report.

  Attributes:
    name: Its file's name.
    draw: Writes it to a path.
  """

  name: str
  draw: Callable[[pathlib.Path], None]


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of a report.

  Attributes:
    title: Its heading.
    parts: Notes, lists of lines, tables, figures; empty ones are not shown.
    note: Stands first, whether or not there is anything.
    otherwise: What to say if no part has anything.
  """

  title: str
  parts: Sequence[str | Sequence[str] | Table | Figure]
  note: str = ""
  otherwise: str = "None yet."


@dataclasses.dataclass(frozen=True)
class Report:
  """Sections, and what the JSON says beside their tables."""

  title: str
  sections: Sequence[Section]
  about: Mapping[str, Any]

  def parts(self, kind: type) -> list:
    """Returns the parts of one type, over all sections."""
    return [p for s in self.sections for p in s.parts if isinstance(p, kind)]


def write(report: Report, folder: pathlib.Path) -> None:
  """Writes FOLDER/report.md, its pictures, and table.json.

  Raises:
    UserError: if the folder cannot be written.
  """
  for figure in report.parts(Figure):
    figure.draw(folder / figure.name)
  files.write_json(folder / "table.json", numbers(report))
  files.write_text(folder / "report.md", markdown(report))


# ---------------------------------------------------------------------- JSON


def numbers(report: Report) -> dict:
  """Returns the records of every table, as JSON has them."""
  out = collections.defaultdict(list)
  for table in report.parts(Table):
    if table.name:
      out[table.name] += _plain(table.records)
  return _plain(report.about) | out


def _plain(value):
  if hasattr(value, "_asdict"):
    value = value._asdict()
  if dataclasses.is_dataclass(value):
    value = vars(value)
  if isinstance(value, Mapping):
    return {key: _plain(part) for key, part in value.items()}
  if isinstance(value, list | tuple):
    return [_plain(part) for part in value]
  return value


# ------------------------------------------------------------------ Markdown


def markdown(report: Report) -> str:
  """Returns the report as Markdown."""
  parts = [f"# {report.title}"]
  for section in report.sections:
    shown = list(filter(None, map(_part, section.parts)))
    parts += [f"## {section.title}", section.note]
    parts += shown or [section.otherwise]
  return "\n\n".join(filter(None, parts)) + "\n"


def _part(part) -> str:
  if isinstance(part, str):
    return part
  if isinstance(part, Figure):
    return f"![{part.name}]({part.name})"
  if not isinstance(part, Table):
    return "\n".join(f"- {line}" for line in part)
  if not part.records or not part.columns:
    return ""
  title = f"### {part.title}" if part.title else ""
  table = tables.markdown(part.lines(), list(part.columns))
  return "\n\n".join(filter(None, (title, part.note, table)))


# --------------------------------------------------------------------- cells


def percent(found: Mean | None) -> str | None:
  """Writes a share: its mean over seeds, and their standard deviation."""
  if found is None:
    return None
  spread = "" if found.std is None else f" ± {100 * found.std:.1f}"
  return f"{100 * found.mean:.1f}{spread}"


def points(found: float | Interval | None) -> str | None:
  """Writes a difference of shares in points, or the ends of its interval."""
  if isinstance(found, Interval):
    return f"{points(found.low)} to {points(found.high)}"
  return None if found is None else f"{100 * found:+.1f}"


def nats(loss: float | None, sign: str = "") -> str | None:
  """Writes a loss; a difference with `sign="+"`."""
  return None if loss is None else f"{loss:{sign}.3f}"
