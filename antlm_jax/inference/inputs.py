"""Texts as users give them in Python."""

import itertools
from collections.abc import Iterable, Mapping

from antlm_jax.errors import UserError
from antlm_jax.runtime import records


def as_texts(
  given: str | Iterable[str], what: str = "text", most: int | None = None
) -> list[str]:
  """Returns one or more texts as a list.

  Args:
    given: Text, or texts in any iterable, such as a column of pandas.
    what: Name of a text in errors.
    most: Largest number of texts to take.

  Raises:
    UserError: It is a table, or one of the texts is not a str, or is no
      text that UTF-8 can write.
  """
  if isinstance(given, str):
    if not records.writable(given):
      raise UserError(f"the {what} {given!r:.60}: {records.HALF}: remove it")
    return [given]
  found = as_items(given, what, most)
  for index, one in enumerate(found):
    check_is_text(one, f"{what} {index}")
  return found


def as_items(
  given: Iterable, what: str = "text", most: int | None = None
) -> list:
  """Returns the items of an iterable; UserError if that loses the texts."""
  check_rows(given, what)
  try:
    return list(itertools.islice(given, most))
  except TypeError as error:
    raise UserError(f"{given!r:.60} is no {what}, or list of them") from error


def check_rows(given: object, what: str = "text") -> None:
  """Raises a UserError if the items of a table or mapping are only names."""
  if isinstance(given, Mapping | bytes) or hasattr(given, "columns"):
    kind = type(given).__name__
    raise UserError(f"a {kind} is no list of {what}s: give a list or a column")


def check_is_text(one: object, where: str) -> None:
  """Raises a UserError if an item, at this place of a list, is not a text."""
  if not isinstance(one, str):
    raise UserError(
      f"{where} is {one!r:.60}, not a str (counted from 0): leave it out or"
      " give its text"
    )
  if not records.writable(one):
    raise UserError(f"{where} (counted from 0): {records.HALF}: remove it")
