"""Values of records as plain Python, and the meaning of their texts."""

import collections
import contextlib
import decimal
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.inference import inputs
from antlm_jax.runtime import progress
from antlm_jax.runtime.records import writable

# Values as Python writes them. The patterns take linear time, and no text is
# evaluated.
_TEXT = r"""(?:'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+")"""
_NUMBER_TEXT = r"[-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+"
_PYTHON = rf"(?:{_TEXT}|{_NUMBER_TEXT}|None|True|False|nan)"
# Also of lists, tuples, dictionaries or texts of numpy, and joined texts.
_OPEN = r"(?:np\.\w++\(|[\[({\s])*+"
_CLOSE = r"[\])}\s]*+"
_ITEM = rf"{_OPEN}(?:{_TEXT}\s*+:{_OPEN})?{_PYTHON}(?:\s*+{_TEXT})*+{_CLOSE}"
_LIST = re.compile(rf"\[(?:\s*+\]|{_ITEM}(?:,{_ITEM})*+)")
# Programs' marks of missing values, without case.
_MISSING = {
  *("", "-", "nan", "-nan", "nat", "none", "null", "n/a", "#n/a", "<na>"),
  *("n.a.", "#na", "\\n", "-1", "-1.0", "-100", "-100.0"),
}
_TRUTH = {
  **dict.fromkeys(("0", "0.0", "false"), False),
  **dict.fromkeys(("1", "1.0", "true"), True),
}


def plain_text(text: object, index: int) -> str | list[str]:
  """Returns a text in memory, or a sequence of texts, as plain Python.

  Raises a UserError for another value, such as None, with its index.
  """
  place = f"text {index}"
  text = plain_python(text, place)
  for part in text if isinstance(text, list) else [text]:
    inputs.check_is_text(part, place)
  return text


def plain_python(value: Any, place: str) -> Any:
  """Returns a value without arrays, tensors, decimals, tuples and sets.

  Raises a UserError if a text in it is not Unicode.
  """
  if hasattr(value, "tolist"):
    value = value.tolist()
  if type(value).__name__ in ("NAType", "NaTType"):  # pandas' missing values
    return None
  if isinstance(value, decimal.Decimal):  # as databases write numbers
    is_integer = value.is_finite() and value == value.to_integral_value()
    return int(value) if is_integer else float(value)
  if isinstance(value, str):
    if not writable(value):
      raise UserError(
        f"{place}: {value!a:.40} has half of a surrogate pair, which no file"
        " can hold: remove it"
      )
  elif isinstance(value, Mapping):
    return {key: plain_python(item, place) for key, item in value.items()}
  elif isinstance(value, list | tuple | set | frozenset):
    return [plain_python(item, place) for item in value]
  return value


def nonempty(texts: Iterable[object], place: str) -> None:
  """Raises a UserError if the record at this place has no text, or a blank."""
  for text in [*texts] or [""]:
    if text is not None and not isinstance(text, str):
      raise UserError(f"{place}: {text!r:.40} is not text")
    if not (text or "").strip():
      raise UserError(f"{place}: no text to read")


def refuse_list(text: str, place: str) -> None:
  """Raises a UserError if a text is a list, as pandas writes it to csv."""
  text = text.strip()
  if text.endswith("]") and _LIST.fullmatch(text):
    raise list_as_text(f"{place}: the text", text)


def list_as_text(place: str, text: str) -> UserError:
  """Returns the error for a list that is written as a text."""
  return UserError(
    f"{place} {text!r:.60} is a list that is written as text: write lists to"
    " jsonl or parquet"
  )


def is_missing(label: object) -> bool:
  """Whether a label is a program's mark of a missing value."""
  if isinstance(label, list | Mapping):
    return False
  text = str(label).strip()
  return text == "NA" or text.casefold() in _MISSING


def truth(value: object) -> bool | None:
  """Returns whether a value is 1 or true; None if it is no truth value."""
  return _TRUTH.get(str(value).strip().casefold())


def warn_of_twins(path: str, names: Iterable[str]) -> None:
  """Warns of classes that differ only in their writing: '1' and '01'."""
  forms = collections.defaultdict(list)
  for name in sorted(names):
    forms[visible_form(name)].append(name)
  for twins in forms.values():
    if len(twins) > 1:
      text = ", ".join(map(ascii, twins))
      progress.say(f"warning: {path}: different classes: {text:.200}")


def visible_form(name: str) -> str | float:
  """Returns one form of all names that differ only in their writing.

  It has no case, no invisible characters, and one form of accents and spaces.
  Numbers are their values, and `true` is 1.
  """
  if (is_true := truth(name)) is not None:
    return float(is_true)
  if (number := finite_number(name)) is not None:
    return number
  visible = "".join(
    character
    for character in unicodedata.normalize("NFKC", name)
    if unicodedata.category(character) not in ("Cf", "Cn")
    and not "\ufe00" <= character <= "\ufe0f"  # forms of emoji
  )
  return same_text(visible)


def finite_number(name: str) -> float | None:
  """Returns the value of a name that is a finite number."""
  with contextlib.suppress(ValueError):
    if math.isfinite(value := float(name)):
      return value
  return None


def same_text(text: str) -> str:
  """Returns a text's NFC without case and repeated spaces, for comparisons."""
  return " ".join(unicodedata.normalize("NFC", text).casefold().split())
