"""Writes reports: Markdown from a template, tables as JSON, pictures.

A table is a list of rows: values by heading. A value is a text, a number, a
`Mean`, an `Interval`, or a list of them. Headings that begin with _ are for the
template alone.
"""

import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax import tables as layout
from antlm_jax import units
from antlm_jax.runtime import files

Row = Mapping[str, Any]
Tables = Mapping[str, Mapping[str, Sequence[Row]]]  # by kind and title


class Figure(NamedTuple):
  """A picture of a report: its file's name, and a function that writes it."""

  name: str
  draw: Callable[[pathlib.Path], None]


def without_empty(rows: Sequence[Row], *names: str) -> list[Row]:
  """Leaves out those of some columns that have no value."""
  empty = {n for n in names if all(row.get(n) is None for row in rows)}
  return [{n: x for n, x in row.items() if n not in empty} for row in rows]


def write_report(
  folder: pathlib.Path,
  markdown: str,
  facts: Mapping[str, Any],
  tables: Tables,
  figures: Sequence[Figure],
) -> None:
  """Writes report.md, pictures, and table.json: the `facts`, then the tables.

  Raises:
    UserError: if the folder cannot be written.
  """
  for figure in figures:
    figure.draw(folder / figure.name)
  numbers = _json_value(facts) | _json_value(tables)
  files.write_json(folder / "table.json", numbers)
  files.write_text(folder / "report.md", markdown)


def _json_value(value):
  """Returns a value as JSON has it."""
  if hasattr(value, "_asdict"):
    return _json_value(value._asdict())
  if isinstance(value, Mapping):
    shown = (key for key in value if not key.startswith("_"))
    return {key: _json_value(value[key]) for key in shown}
  if isinstance(value, list | tuple):
    return [_json_value(part) for part in value]
  return value


# ------------------------------------------------------------------- Markdown


def fill_template(template: str, **values) -> str:
  """Fills a file of templates/ in; needs jinja2."""
  import jinja2

  environment = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.globals["table"] = _markdown_table
  environment.filters["quantity"] = units.quantity
  text = environment.get_template(f"{template}.md.j2").render(values)
  return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _markdown_table(rows: Sequence[Row], caller: Callable) -> str:
  """Lays rows out; the block of the template's `call` writes the numbers."""
  head, texts = report_cells(rows, caller)
  return layout.markdown(texts, head) + "\n"


def report_cells(
  rows: Sequence[Row], write: Callable[[Any, str, Row], str]
) -> tuple[list[str], list[list[str | None]]]:
  """Returns a table's headings, and its cells; None where there is no value.

  Args:
    rows: The table.
    write: Writes a value, given its heading and its row.
  """
  names = dict.fromkeys(name for row in rows for name in row)
  head = [name for name in names if not name.startswith("_")]

  def cell(row: Row, name: str) -> str | None:
    value = row.get(name)
    return None if value is None else write(value, name, row).strip()

  return head, [[cell(row, name) for name in head] for row in rows]
