"""Texts as users give them in Python."""

import itertools
from collections.abc import Iterable, Iterator, Mapping

from antlm_jax.errors import UserError
from antlm_jax.runtime import records


def read_documents(source: Iterable, column: str) -> Iterator[str | None]:
  """Yields the documents of a list of texts, of records, or of a table.

  `column` holds the text of a record or a table. None is a record without text.

  Raises:
    UserError: It has no such column, or a document is no text.
  """
  names = records.column_names(source)
  if names is not None:
    _check_column(names, column, f"a {type(source).__name__}")
    source = source[column]
    if isinstance(source, str):
      raise UserError(f"column {column!r:.40} is a str: give a list of texts")
  if hasattr(source, "to_pylist"):  # of pyarrow
    source = source.to_pylist()
  if hasattr(source, "notna"):  # pandas has NaN for a missing text
    source = source.astype(object).where(source.notna(), None)
  for index, item in enumerate(source):
    if isinstance(item, Mapping):
      _check_column([*item], column, f"text {index} (counted from 0)")
      item = item[column]
    if item is not None:
      check_is_text(item, f"text {index}")
    yield item


def _check_column(names: list[str], column: str, place: str) -> None:
  """Raises a UserError unless one of the names is the column's."""
  count = names.count(column)
  if count > 1:
    raise UserError(f"{place} has {count} columns {column!r:.40}: rename them")
  if not count:
    raise UserError(
      f"{place} has no column {column!r:.40} but {records.listed(names)};"
      " choose one with column="
    )


def as_texts(
  texts: str | Iterable[str],
  kind: str = "text",
  most: int | None = None,
  strip: bool = True,
) -> list[str]:
  """Returns one or more texts as a list, as `prepare` reads documents.

  Lines end in "\\n", and white space at the ends of a text is no text. The
  first of several lines keeps its indentation.

  Args:
    texts: Text, or texts in any iterable, such as a column of pandas.
    kind: Name of a text in errors.
    most: Largest number of texts to take.
    strip: Whether to remove the white space at the ends.

  Raises:
    UserError: It is a table, or one of the texts is not a str, or is no
      text that UTF-8 can write.
  """
  if isinstance(texts, str):
    if not records.writable(texts):
      raise UserError(f"the {kind} {texts!r:.60}: {records.HALF}: remove it")
    items = [texts]
  else:
    items = as_items(texts, kind, most)
    for index, item in enumerate(items):
      check_is_text(item, f"{kind} {index}")
  items = map(records.plain_lines, items)
  return [records.stripped(item) if strip else item for item in items]


def as_items(
  values: Iterable, kind: str = "text", most: int | None = None
) -> list:
  """Returns the items of an iterable; UserError if that loses the texts."""
  check_rows(values, kind)
  try:
    return list(itertools.islice(values, most))
  except TypeError as error:
    raise UserError(f"{values!r:.60} is no {kind}, or list of them") from error


def check_rows(values: object, kind: str = "text") -> None:
  """Raises a UserError if the items of a table or mapping are only names."""
  is_table = records.column_names(values) is not None
  if is_table or isinstance(values, bytes):
    name = type(values).__name__
    raise UserError(f"a {name} is no list of {kind}s: give a list or a column")


def check_is_text(item: object, place: str) -> None:
  """Raises a UserError if an item, at this place of a list, is not a text."""
  if not isinstance(item, str):
    raise UserError(
      f"{place} is {item!r:.60}, not a str (counted from 0): leave it out or"
      " give its text"
    )
  if not records.writable(item):
    raise UserError(f"{place} (counted from 0): {records.HALF}: remove it")
