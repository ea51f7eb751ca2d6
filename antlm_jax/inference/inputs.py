"""Texts as users give them in Python."""

import itertools
from collections.abc import Iterable, Mapping

from antlm_jax.errors import UserError
from antlm_jax.runtime import records


def as_texts(
  texts: str | Iterable[str],
  kind: str = "text",
  most: int | None = None,
  strip: bool = True,
) -> list[str]:
  """Returns one or more texts as a list, as `prepare` reads documents.

  Lines end in "\\n", and white space at the ends of a text is no text.

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
  return [item.strip() if strip else item for item in items]


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
  if isinstance(values, Mapping | bytes) or hasattr(values, "columns"):
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
