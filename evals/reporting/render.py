"""A report as a value, and what makes Markdown, JSON and pictures of it.

A report is a list of sections, a section a list of notes (strings), lists of
lines, tables and figures. A table is rows of cells by heading. A cell is a
number with its text, or a text alone: Markdown has the texts, JSON the numbers.
"""

import collections
import csv
import dataclasses
import io
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax import tables
from antlm_jax.evals.reporting.compare import Mean
from antlm_jax.evals.reporting.statistics import Interval
from antlm_jax.runtime import files


class Cell(NamedTuple):
  """A number, and how it is written; None is a dash."""

  value: Any
  text: str | None


class Table(NamedTuple):
  """Rows of cells by heading, under a title and a note.

  Attributes:
    name: The kind of table: the JSON has rows by name and title.
    most: How many rows with the same first cell the Markdown has at most; the
      middle ones are left out. With 0 the table is in the JSON alone.
  """

  name: str
  rows: Sequence[Mapping[str, Cell | str | None]]
  title: str = ""
  note: str = ""
  most: int = 1000


class Figure(NamedTuple):
  """A picture beside the report: its file's name, and what writes it."""

  name: str
  draw: Callable[[pathlib.Path], None]


class Section(NamedTuple):
  """A part of a report; of its parts, empty ones are not shown."""

  title: str
  parts: Sequence[str | list[str] | Table | Figure]
  note: str = ""  # stands first, whether or not there is anything
  otherwise: str = "None yet."  # what to say if no part has anything


class Report(NamedTuple):
  """Sections, and what the JSON says beside their tables."""

  title: str
  sections: Sequence[Section]
  about: Mapping[str, Any]

  def parts(self, kind: type) -> list:
    """Returns the parts of one type, over all sections."""
    return [p for s in self.sections for p in s.parts if isinstance(p, kind)]


def write(report: Report, folder: pathlib.Path) -> None:
  """Writes FOLDER/report.md, its pictures, its tables as .csv, and table.json.

  Raises:
    UserError: if the folder cannot be written.
  """
  for figure in report.parts(Figure):
    figure.draw(folder / figure.name)
  for name, rows in numbers(report).items():
    if isinstance(rows, dict):
      files.write_text(folder / f"{name}.csv", _csv(rows))
  files.write_json(folder / "table.json", numbers(report))
  files.write_text(folder / "report.md", markdown(report))


# ---------------------------------------------------------------------- JSON


def numbers(report: Report) -> dict[str, Any]:
  """Returns the rows of every table by its name and title, as JSON has them."""
  out = collections.defaultdict(dict)
  for table in report.parts(Table):
    out[table.name][table.title] = _plain(table.rows)
  return {**_plain(report.about), **out}


def _csv(by_title: Mapping[str, Sequence[Mapping]]) -> str:
  """Lays out the rows of tables of one name."""
  rows = [
    {"": t} | _flat(row) for t, found in by_title.items() for row in found
  ]
  out = io.StringIO()
  head = dict.fromkeys(name for row in rows for name in row)
  writer = csv.DictWriter(out, head, lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  return out.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
  """Returns what a row has: of a mean the mean, of an interval its ends."""
  out = {}
  for name, value in row.items():
    if not isinstance(value, Mapping):
      out |= {} if value is None else {name: value}
    elif "mean" in value:
      out[name] = value["mean"]
    else:
      out |= {f"{name} {end}": value[end] for end in ("low", "high")}
  return out


def _plain(value):
  if isinstance(value, Cell):
    return _plain(value.value)
  if hasattr(value, "_asdict"):
    return _plain(value._asdict())
  if dataclasses.is_dataclass(value):
    return _plain(vars(value))
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


def _part(part: str | list[str] | Table | Figure) -> str:
  if isinstance(part, str):
    return part
  if isinstance(part, Figure):
    return f"![{part.name}]({part.name})"
  if isinstance(part, list):
    return "\n".join(f"- {line}" for line in part)
  if not part.rows or not part.most:
    return ""
  head = _head(part)
  title = f"### {part.title}" if part.title else ""
  rows = tables.markdown(_lines(part, head), head)
  return "\n\n".join(filter(None, (title, part.note, rows)))


def text(table: Table) -> str:
  """Returns a table as a command prints it."""
  return tables.text(_lines(table, _head(table)), _head(table), "<>")


def _head(table: Table) -> list[str]:
  return list(dict.fromkeys(name for row in table.rows for name in row))


def _lines(table: Table, head: Sequence[str]) -> Iterator[list[str | None]]:
  """Yields the texts of each row that is shown."""
  cells = [[row.get(name) for name in head] for row in table.rows]
  texts = [[c.text if isinstance(c, Cell) else c for c in r] for r in cells]
  for _, group in itertools.groupby(texts, key=lambda row: row[0]):
    shown, half = list(group), table.most // 2
    if len(shown) > table.most:
      shown[half:-half] = [["...", *[""] * (len(head) - 1)]]
    yield from shown


# --------------------------------------------------------------------- cells


def percent(found: Mean | None, note: str = "") -> Cell:
  """Shows shares: their mean over seeds, and their standard deviation."""
  if found is None:
    return Cell(None, None)
  spread = "" if found.std is None else f" ± {100 * found.std:.1f}"
  return Cell(found, f"{100 * found.mean:.1f}{spread}{note}")


def points(found: float | Interval | None) -> Cell:
  """Shows a difference of shares, or the ends of its interval, in points."""
  return _difference(found, lambda end: f"{100 * end:+.1f}")


def _difference(found: float | Interval | None, write: Callable) -> Cell:
  if found is None:
    return Cell(None, None)
  interval = isinstance(found, Interval)
  ends = (found.low, found.high) if interval else (found,)
  return Cell(found, " to ".join(map(write, ends)))


def nats(found: Mean | None, sign: str = "", spread: bool = False) -> Cell:
  """Shows losses by their mean over seeds; differences with `sign="+"`.

  With their spread, the standard deviation over seeds as well.
  """
  if found is None:
    return Cell(None, None)
  more = f" ± {found.std:.3f}" if spread and found.std is not None else ""
  return Cell(found, f"{found.mean:{sign}.3f}{more}")


def nats_apart(found: float | Interval | None) -> Cell:
  """Shows a difference in nats, or the ends of its interval."""
  return _difference(found, lambda end: f"{end:+.3f}")
