"""Settings: dataclasses whose fields say what they are and what they may be.

A group of the config and the arguments of a command are both sections:

    @dataclasses.dataclass(frozen=True)
    class Schedule:
      decay: str = setting("linear", "its form", choices=("linear", "cosine"))
      peak_lr: float = setting(1e-3, "highest learning rate", least=0)

`check` compares a section with what its fields allow, `to_config_dict` makes
it a group of the config, `add_arguments` and `from_args` a command's arguments.
"""

import argparse
import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from antlm_jax.errors import UserError

if typing.TYPE_CHECKING:
  from ml_collections import ConfigDict

# What an int may be at most where its field says nothing: larger ones are
# slips, which NumPy and JAX would tell as overflows or as lack of memory.
LARGEST = 2**31 - 1
_LARGEST_FLOAT = 3.4e38  # more is infinite where it is computed with
_BOUNDS = {
  "least": ("at least", operator.ge),
  "over": ("over", operator.gt),
  "most": ("at most", operator.le),
  "under": ("under", operator.lt),
}
_SCALARS = (str, bool, int, float)
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def setting(
  default: Any = dataclasses.MISSING,
  help: str = "",
  *,
  least: float | None = None,
  most: float | None = None,
  over: float | None = None,
  under: float | None = None,
  choices: Collection | None = None,
  read: Callable[[str], Any] | None = None,
  **argument,
) -> Any:
  """Returns a dataclass field that knows what it may be.

  Types are `str`, `bool`, `int`, `float`, `tuple[T, ...]` of these (written
  with commas), and `T | None`. Bounds and choices hold for each part of a
  tuple. Numbers are finite, and ints within +-`LARGEST` if not said otherwise.

  Args:
    default: Its default; without one, the argument is required.
    help: What it is, and in which unit.
    least: Smallest value; `over`, what it is above.
    most: Largest value; `under`, what it is below.
    choices: All values that it may have.
    read: Makes the value from an argument's text, such as `cli.here`.
    **argument: Further keywords of argparse's `add_argument`.
  """
  bounds = {"least": least, "over": over, "most": most, "under": under}
  metadata = {
    "help": help,
    "bounds": {name: b for name, b in bounds.items() if b is not None},
    "choices": choices,
    "read": read,
    "argument": argument,
  }
  return dataclasses.field(default=default, metadata=metadata)


def check(section, prefix: str = "") -> None:
  """Checks the values of a section, a dataclass with `setting` fields.

  In messages the prefix stands before a setting's name: `schedule` gives
  `schedule.peak_lr=-1`, `--` gives `--limit=-1`.

  Raises:
    UserError: for the first value that its field does not allow.
  """
  check_values(type(section), vars(section), prefix)


def check_values(section_type: type, values: Mapping, prefix: str = "") -> None:
  """Like `check`, for the values that a mapping has; others are left out.

  Fields not made by `setting` are held to their type, if it is a plain one.
  """
  # config.key, but --key, and `objective 'mlm': key`.
  dot = "." if prefix[-1:].isalnum() else ""
  for field, kind in _fields(section_type):
    if field.name in values and _scalar(kind) in _SCALARS:
      value = values[field.name]
      name = f"{prefix}{dot}{field.name}"
      _check(f"{name}={_shown(value)}", field, kind, value)


def to_config_dict(section) -> "ConfigDict":
  """Returns a section as a group of the config, which checks types itself."""
  from ml_collections import ConfigDict, config_dict  # not for gpu_check.sh

  out = ConfigDict()
  for field, kind in _fields(type(section)):
    value = getattr(section, field.name)
    # None says nothing of the type that the setting may have.
    unset = value is None
    out[field.name] = config_dict.placeholder(_scalar(kind)) if unset else value
  return out


def add_arguments(parser: argparse.ArgumentParser, section_type: type) -> None:
  """Adds an argument `--name` for each setting of a section."""
  for field, kind in _settings(section_type):
    parser.add_argument(f"--{field.name}", **_argument(field, kind))


def _argument(field: dataclasses.Field, kind: Any) -> dict[str, Any]:
  """Returns the keywords of `add_argument` for a setting."""
  default, own = field.default, field.metadata["argument"]
  out = {"help": field.metadata["help"].replace("%", "%%")}
  if default is dataclasses.MISSING:
    out["required"] = True
  else:
    out["default"] = default if "nargs" in own else written(default)
  if kind is bool:
    off = argparse.BooleanOptionalAction
    return {**out, "action": off if default else "store_true", **own}
  # With nargs, argparse gives the parts one by one.
  read = _part(kind) if "nargs" in own else kind
  out["type"] = functools.partial(_read, field, read)
  if not _is_tuple(kind):
    out["choices"] = field.metadata["choices"]
  return out | own


def from_args(section_type: type, args: argparse.Namespace):
  """Builds a section from arguments of `add_arguments`, which are checked."""
  values = {}
  for field, _ in _settings(section_type):
    value = getattr(args, field.name)
    values[field.name] = tuple(value) if isinstance(value, list) else value
  return section_type(**values)


def written(value) -> Any:
  """Returns a tuple as `parse` reads it, with commas; all else as it is."""
  return ",".join(map(str, value)) if isinstance(value, tuple) else value


def parse(text: str, kind: Any, what: str):
  """Reads a value of type `kind` from text.

  Raises:
    UserError: if it is not one; the message begins with `what`.
  """
  try:
    return _parse(text, _without_none(kind))
  except (ValueError, KeyError) as error:
    raise UserError(f"{what}: not {_scalar(kind).__name__}") from error


def _parse(text: str, kind: Any):
  if kind is str:
    return text
  if kind is bool:
    return _BOOLS[text.lower()]
  if kind is float:
    return float(text)
  if kind is int:
    try:
      return int(text)
    except ValueError:
      number = float(text)  # 1e4 is a fine way to write an int
      if number.is_integer():
        return int(number)
      raise
  if _is_tuple(kind):
    parts = text.strip("()").split(",")  # "()" and "" are both empty
    return tuple(_parse(part, _part(kind)) for part in parts if part)
  raise ValueError(text)


@functools.cache
def _fields(section_type: type) -> list[tuple[dataclasses.Field, Any]]:
  """Returns the fields of a section, each with its type."""
  kinds = typing.get_type_hints(section_type)
  return [(f, kinds[f.name]) for f in dataclasses.fields(section_type)]


def kinds(section_type: type) -> dict[str, Any]:
  """Returns the types of a section's fields, by name."""
  return {field.name: kind for field, kind in _fields(section_type)}


def _settings(section_type: type) -> list[tuple[dataclasses.Field, Any]]:
  """Returns those of the fields that `setting` made."""
  return [(f, kind) for f, kind in _fields(section_type) if f.metadata]


def _read(field: dataclasses.Field, kind: Any, text: str):
  """Reads and checks an argument's text."""
  what, read = f"--{field.name}={text:.100}", field.metadata["read"]
  value = read(text) if read else parse(text, kind, what)
  # argparse compares a single value with the choices, and lists them.
  if field.metadata["choices"] is None or isinstance(value, tuple):
    _check(what, field, kind, value)
  return value


def _check(what: str, field: dataclasses.Field, kind: Any, value) -> None:
  plain = _without_none(kind)
  if value is None and plain is not kind:
    return
  if not _is_tuple(plain):
    parts = (value,)
  elif isinstance(value, tuple | list):
    parts, plain = value, _part(plain)
  else:
    raise UserError(f"{what} is not a tuple")
  for part in parts:
    expected = _expected(part, plain, **field.metadata)
    if expected is not None:
      raise UserError(f"{what} is not {expected}")


def _expected(
  value, kind: type, bounds=types.MappingProxyType({}), choices=None, **_
) -> str | None:
  """Says what a value should be and is not, if there is something."""
  # True is an int to Python, but no number of anything.
  if isinstance(value, bool) != (kind is bool) or not isinstance(
    value, (int, float) if kind is float else kind
  ):
    return f"of type {kind.__name__}"
  if choices is not None and value not in choices:
    return f"one of {', '.join(map(str, choices))}"
  if kind is str:
    return None if is_text(value) else "valid text"
  # Not isfinite, which cannot take ints that are too large for a float.
  if kind is float and not abs(value) <= _LARGEST_FLOAT:
    return "finite in float32"
  if kind is int and abs(value) > LARGEST:
    bounds = {"least": -LARGEST, "most": LARGEST, **bounds}
  if all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):
    return None
  return " and ".join(f"{_BOUNDS[name][0]} {b}" for name, b in bounds.items())


def is_text(value: str) -> bool:
  """Whether it can be written and passed on: no lone surrogate, no NUL."""
  try:
    return b"\0" not in value.encode("utf-8")
  except UnicodeEncodeError:
    return False


def _shown(value) -> str:
  """A value in a message, which is one line of bearable length."""
  if isinstance(value, int) and abs(value) > 10**40:  # Python may refuse to
    return f"<an int of {value.bit_length()} bits>"
  shown = ascii(value) if isinstance(value, str) else repr(value)
  return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _is_tuple(kind: Any) -> bool:
  return kind is tuple or typing.get_origin(kind) is tuple


def _part(kind: Any) -> Any:
  """The type of a tuple's parts: tuple[int, ...] has ints."""
  return next(iter(typing.get_args(kind)), str)


def _without_none(kind: Any) -> Any:
  """The type T of `T | None`, and any other type itself."""
  if isinstance(kind, types.UnionType):
    (kind,) = set(typing.get_args(kind)) - {types.NoneType}
  return kind


def _scalar(kind: Any) -> Any:
  """The type of a value, or of its parts if it is a tuple."""
  kind = _without_none(kind)
  return _part(kind) if _is_tuple(kind) else kind
