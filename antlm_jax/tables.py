"""Tables, as aligned text and as Markdown: one formatter for all commands."""

import re
from collections.abc import Iterable, Sequence
from html import escape

from antlm_jax.terminal import visible

_GAP = "  "
# A code span of CommonMark.
_CODE = re.compile(r"(?<![`\\])(`+)(?!`).+?(?<!`)\1(?!`)")


def text_table(
  rows: Iterable[Sequence], head: Sequence[str] = (), align: str = "<"
) -> str:
  """Lays out rows in columns as wide as their cells.

  None is shown as a dash, and short rows are filled up. `align` has `<` or `>`
  for each column; the last holds for all further columns.
  """
  cells = [_table_cells(row) for row in (*([head] if head else ()), *rows)]
  columns = max(map(len, cells), default=0)
  cells = [row + [""] * (columns - len(row)) for row in cells]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return "\n".join(table_line(row, widths, align) for row in cells)


def table_line(cells: Sequence, widths: Sequence[int], align: str = "<") -> str:
  """Lays out one row at given widths, for a table that is shown as it grows."""
  sides = align + align[-1] * len(widths)
  padded = (
    f"{cell:{side}{width}}"
    for cell, side, width in zip(
      _table_cells(cells), sides, widths, strict=False
    )
  )
  return _GAP.join(padded).rstrip()


def markdown(rows: Iterable[Sequence], head: Sequence[str]) -> str:
  """Lays out rows as a Markdown table, all but the first to the right."""
  rule = ["---", *["---:"] * (len(head) - 1)]
  lines = [
    [plain_markdown(c).replace("|", "\\|") for c in _table_cells(row)]
    for row in (head, *rows)
  ]
  lines.insert(1, rule)
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plain_markdown(text: str) -> str:
  """Returns a line of Markdown without links, and HTML only in code spans.

  Names, as of runs and data sets, may have both, and line ends.
  """
  text = visible(text).replace("\n", " ")
  parts = []
  end = 0
  for code in _CODE.finditer(text):
    parts += [_inert(text[end : code.start()]), code[0]]
    end = code.end()
  return "".join([*parts, _inert(text[end:])])


def _inert(text: str) -> str:
  return text.replace("<", "&lt;").replace("](", "]\\(")


def html(rows: Iterable[Sequence], head: Sequence[str]) -> str:
  """Lays out rows as a table of HTML, for notebooks."""
  lines = [_html_row(row, "td") for row in rows]
  return f"<table>{_html_row(head, 'th')}{''.join(lines)}</table>"


def _html_row(row: Sequence, tag: str) -> str:
  cells = (f"<{tag}>{escape(cell)}</{tag}>" for cell in _table_cells(row))
  return f"<tr>{''.join(cells)}</tr>"


def _table_cells(row: Sequence) -> list[str]:
  return ["-" if x is None else " ".join(str(x).split("\n")) for x in row]
