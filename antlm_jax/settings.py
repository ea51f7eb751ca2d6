"""Settings: dataclasses whose fields carry their help text, bounds and choices.

Such a section is a group of the configuration, or the arguments of a command.
`to_dict` and `from_dict` turn it into plain values and back; `add_arguments`
and `from_args` read one from a command line. A kind that has several
implementations, such as optimizers, has a `Registry` of their sections.
"""

import argparse
import dataclasses
import difflib
import functools
import operator
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, TypeVar

from antlm_jax.errors import UserError

T, U = TypeVar("T"), TypeVar("U")
# Bound of ints whose field has none. Larger ints are slips, which NumPy and JAX
# would report as overflows or as lack of memory.
LARGEST = 2**31 - 1
_LARGEST_FLOAT = 3.4e38
_LISTED = 3  # most keys that a hint lists before the last
_BOUNDS = {
  "least": ("at least", operator.ge),
  "over": ("over", operator.gt),
  "most": ("at most", operator.le),
  "under": ("under", operator.lt),
}
# Values of settings that are given by name, as `train(**settings)` takes them.
Setting = (
  str
  | int
  | float
  | bool
  | tuple[str, ...]
  | tuple[int, ...]
  | tuple[float, ...]
  | None
)
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def setting(
  default: Any = dataclasses.MISSING,
  help: str = "",
  *,
  choices: Collection | None = None,
  read: Callable[[str], Any] | None = None,
  **more,
) -> Any:
  """Returns a dataclass field with a help text, bounds and choices.

  Types are `str`, `bool`, `int`, `float`, `tuple[T, ...]` of these (written
  with commas), and `T | None`. Bounds and choices hold for each part of a
  tuple. Numbers are finite; ints without bounds lie within +-`LARGEST`.

  Args:
    default: Default value; without one, the argument is required.
    help: Noun phrase with the setting's unit, for `--help`.
    choices: All allowed values.
    read: Function that makes the value from an argument's text.
    **more: Bounds (`least` and `most` are inclusive, `over` and `under`
      exclusive) and further keywords of argparse's `add_argument`.
  """
  metadata = {
    "help": help,
    "bounds": {name: more.pop(name) for name in _BOUNDS if name in more},
    "choices": choices,
    "read": read,
    "argument": more,
  }
  return dataclasses.field(default=default, metadata=metadata)


class Field(NamedTuple):
  """A value with a type, which can be read from text and checked."""

  name: str
  kind: type  # of the value, or of a tuple's parts
  many: bool  # whether it is a tuple
  optional: bool  # whether it may be None
  default: Any  # `dataclasses.MISSING` if it is required
  help: str
  bounds: Mapping[str, float]
  choices: Collection | None
  read: Callable[[str], Any] | None  # makes the value from an argument's text
  argument: Mapping[str, Any]  # further keywords of argparse

  def parse(self, text: str, what: str) -> Any:
    """Reads a value from text; errors are UserErrors that begin with `what`."""
    read = _READERS[self.kind]
    try:
      if not self.many:
        return read(text)
      parts = text.strip("()").split(",")  # "()" and "" are both empty
      return tuple(read(part) for part in parts if part)
    except (ValueError, KeyError) as error:
      raise UserError(f"{what}: not {self.kind.__name__}") from error

  def expected(self, value: Any) -> str | None:
    """Returns the expectation that a value fails; None if it is allowed."""
    if value is None and self.optional:
      return None
    if not self.many:
      return self._expected(value)
    if not isinstance(value, tuple | list):
      return "a tuple"
    return next(filter(None, map(self._expected, value)), None)

  def _expected(self, value: Any) -> str | None:
    kind, bounds = self.kind, self.bounds
    # True is an int to Python, but no number of anything.
    if isinstance(value, bool) != (kind is bool) or not isinstance(
      value, (int, float) if kind is float else kind
    ):
      return f"of type {kind.__name__}"
    if self.choices is not None and value not in self.choices:
      return f"one of {', '.join(map(str, self.choices))}"
    if kind is str:
      return None
    if kind is float and not abs(value) <= _LARGEST_FLOAT:
      return "finite in float32"
    if kind is int and abs(value) > LARGEST:
      bounds = {"least": -LARGEST, "most": LARGEST} | bounds
    if all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):
      return None
    return " and ".join(f"{_BOUNDS[name][0]} {b}" for name, b in bounds.items())


@functools.cache
def _declared(section_type: type) -> dict[str, Field]:
  """Returns all fields of a dataclass by name."""
  hints, out = typing.get_type_hints(section_type), {}
  for field in dataclasses.fields(section_type):
    hint, meta = hints[field.name], field.metadata
    optional = isinstance(hint, types.UnionType)
    if optional:
      (hint,) = set(typing.get_args(hint)) - {types.NoneType}
    many = hint is tuple or typing.get_origin(hint) is tuple
    kind = next(iter(typing.get_args(hint)), str) if many else hint
    rest = (meta.get(name) for name in ("choices", "read"))
    own = meta.get("help", ""), meta.get("bounds", {}), *rest
    made = (kind, many, optional, field.default, *own, meta.get("argument", {}))
    out[field.name] = Field(field.name, *made)
  return out


@functools.cache
def of(section_type: type) -> dict[str, Field]:
  """Returns the settings of a dataclass by name."""
  own = {f.name for f in dataclasses.fields(section_type) if f.metadata}
  return {n: f for n, f in _declared(section_type).items() if n in own}


class Section:
  """Base of the configuration's groups: frozen dataclasses of settings.

  Making one checks it, and raises a UserError for the first value that its
  field does not allow, with the group's name: `schedule.peak_lr=-1`.
  """

  group: ClassVar[str]  # its key in the configuration

  def __post_init__(self):
    for name, field in of(type(self)).items():
      value = getattr(self, name)
      if isinstance(value, list):  # from JSON
        object.__setattr__(self, name, tuple(value))
      elif field.kind is float and type(value) is int:
        object.__setattr__(self, name, float(value))
    check(self, self.group)


class Registry(dict[str, T]):
  """The implementations of one kind, by name.

  The file of an implementation registers it, and nothing else needs to know:

      @OPTIMIZERS.register("muon")
      @dataclasses.dataclass(frozen=True)
      class Muon(Optimizer):
        ...

  `group` is the setting that names some. If `key` is given, they are sections
  of this group, whose setting `key` names one and is an attribute of each.
  """

  def __init__(self, group: str, key: str = ""):
    super().__init__()
    self.group, self.key = group, key

  def register(self, name: str) -> Callable[[U], U]:
    """Returns a decorator that registers an implementation by its name."""

    def add(made: U) -> U:
      if self.key:
        setattr(made, self.key, name)
        made.group = self.group
      self[name] = made
      return made

    return add

  def __missing__(self, name: str) -> T:
    setting = f"{self.group}.{self.key}".rstrip(".")
    known = ", ".join(sorted(filter(None, self)))
    raise UserError(
      f"{setting}={name!r} is not one of {known}; if a file of yours registers"
      " it, give --plugin=FILE.py (in Python, import it)"
    )

  def make(
    self, values: Mapping[str, Any], group: str = "", old: bool = False
  ) -> Any:
    """Makes a section as `from_dict`, of the implementation that it names.

    Raises a UserError for an unknown name or setting, or a bad value; `group`
    is by default that of all sections.
    """
    own = dict(require_group(values, group or self.group))
    section_type = self[own.pop(self.key, "")]
    return from_dict(section_type, own, group or self.group, old)


def to_dict(section) -> dict[str, Any]:
  """Returns the settings of a section, with its name if it is registered."""
  chosen = {n: getattr(section, n, "") for n in ("name", "kind")}
  own = {name: getattr(section, name) for name in of(type(section))}
  return {name: value for name, value in chosen.items() if value} | own


def changed(section) -> dict[str, Any]:
  """Returns the settings that are not at their default, and its name."""
  known = of(type(section))
  return {
    name: value
    for name, value in to_dict(section).items()
    if name not in known or value != known[name].default
  }


def from_dict(
  section_type: type, values: Mapping[str, Any], group: str, old: bool = False
):
  """Makes a section of some of its settings; the others have their defaults.

  Raises a UserError for an unknown setting. `old` ignores unknown settings,
  which an older version may have written.
  """
  known = of(section_type)
  unknown = sorted(require_group(values, group).keys() - known.keys())
  if unknown and not old:
    name = getattr(section_type, "name", None)
    what = f": no setting of {name}" if name else " is unknown"
    hint = nearest(unknown[0], known)
    raise UserError(f"{group}.{unknown[0]}{what}; {hint}")
  for name, field in known.items():
    if field.default is dataclasses.MISSING and name not in values:
      raise UserError(f"{group}.{name} is missing")
  own = {name: values[name] for name in known if name in values}
  return section_type(**own)


def require_group(values: Mapping[str, Any], group: str) -> Mapping[str, Any]:
  """Returns values if they are a group of settings, else raises a UserError."""
  if not isinstance(values, Mapping):
    raise UserError(f"{group}={values!r} is not a group of settings")
  return values


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
  """Returns a hint at the known name that is nearest to an unknown name."""
  near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
  otherwise = otherwise or "antlm train --help lists them"
  return f"did you mean {near[0]!r}?" if near else otherwise


def by_name(keys: Iterable[str]) -> dict[str, list[str]]:
  """Returns keys by their last names, `steps`, and whole, `train.steps`."""
  out: dict[str, list[str]] = {}
  for key in keys:
    out.setdefault(key.rpartition(".")[2], []).append(key)
  return out | {key: [key] for each in [*out.values()] for key in each}


def meant(
  name: str,
  keys: Iterable[str],
  others: Mapping[str, str] = types.MappingProxyType({}),
  shown: Callable[[str], str] = repr,
  least: float = 0.4,
) -> str:
  """Returns a hint at the keys that an unknown name may mean, or "".

  `others` are keys by further names, `least` is the smallest similarity, and
  `shown` writes a key.
  """
  named = by_name(keys) | {other: [key] for other, key in others.items()}
  last = name.rpartition(".")[2]
  for text, cutoff in ((name, 0.75), (last, 0.75), (name, least)):
    if near := difflib.get_close_matches(text, named, cutoff=cutoff):
      # Letters in another order are the likeliest slip: stesp for steps.
      same = [one for one in near if sorted(one) == sorted(text)]
      *others, end = map(shown, named[[*same, *near][0]])
      others[_LISTED:] = ["..."] * (len(others) > _LISTED)
      listed = f"{', '.join(others)} or {end}" if others else end
      return f"did you mean {listed}?"
  return ""


def check(section, prefix: str = "") -> None:
  """Checks the values of a section, a dataclass with `setting` fields.

  Messages put the prefix before a setting's name: `schedule` gives
  `schedule.peak_lr=-1`, `--` gives `--limit=-1`. Raises a UserError for the
  first value that its field does not allow.
  """
  # Fields not made by `setting` must have their type, if that is plain.
  # The prefix joins as config.key, but --key and `objective 'mlm': key`.
  dot = "." if prefix[-1:].isalnum() else ""
  for name, field in _declared(type(section)).items():
    if field.kind in _READERS:
      _require(field, getattr(section, name), f"{prefix}{dot}{name}")


def _require(field: Field, value: Any, name: str) -> None:
  if (expected := field.expected(value)) is not None:
    shown = ascii(value) if isinstance(value, str) else repr(value)
    raise UserError(f"{name}={shown:.200} is not {expected}")


def add_arguments(parser: argparse.ArgumentParser, section_type: type) -> None:
  """Adds an argument `--name` for each setting of a section."""
  for field in of(section_type).values():
    parser.add_argument(f"--{field.name}", **_argument(field))


def _argument(field: Field) -> dict[str, Any]:
  """Returns the keywords of `add_argument` for a setting."""
  own = field.argument
  out = {"help": field.help.replace("%", "%%")}
  if field.default is dataclasses.MISSING:
    out["required"] = True
  else:
    default = field.default
    out["default"] = [*default] if "nargs" in own else written(default)
  if field.kind is bool:
    off = argparse.BooleanOptionalAction
    return {**out, "action": off if field.default else "store_true", **own}
  if not field.many:
    out["choices"] = field.choices
  # With nargs, argparse gives the parts one by one.
  one = field._replace(many=field.many and "nargs" not in own)
  return out | {"type": functools.partial(_read, one)} | own


def _read(field: Field, text: str):
  """Reads and checks an argument's text."""
  what = f"--{field.name}={text:.100}"
  value = field.read(text) if field.read else field.parse(text, what)
  # argparse compares a single value with the choices, and lists them.
  if field.choices is None or isinstance(value, tuple):
    expected = field.expected(value)
    if expected is not None:
      raise UserError(f"{what} is not {expected}")
  return value


def from_args(section_type: type, args: argparse.Namespace):
  """Builds a section from the parsed arguments of `add_arguments`."""
  return choose(section_type, vars(args))


def refuse_unknown(
  names: Iterable[str], known: Collection[str], what: str, otherwise: str
) -> None:
  """Raises a UserError for a name that is not known as a setting of `what`."""
  for name in names:
    if name not in known:
      hint = nearest(name, known, otherwise)
      raise UserError(f"{name} is no setting of {what}; {hint}")


def choose(section_type: type, values: Mapping[str, Any]):
  """Makes a section of its settings among some values, and checks them.

  Messages name a setting by its argument. Raises a UserError for the first
  value that is bad, or required and missing.
  """
  own = {}
  for field in of(section_type).values():
    if field.name in values:
      value = values[field.name]
      if field.many and value is not None:  # may be a list or a single value
        many = isinstance(value, list | tuple)
        value = tuple(value) if many else (value,)
      own[field.name] = value
    elif field.default is dataclasses.MISSING:
      raise UserError(f"--{field.name} is missing")
  made = section_type(**own)
  check(made, "--")
  return made


def written(value) -> Any:
  """Returns a tuple as text with commas, and any other value unchanged."""
  return ",".join(map(str, value)) if isinstance(value, tuple) else value


def text(value: Any) -> str | None:
  """Returns a value as a command line has it, and None as it is."""
  if isinstance(value, list | tuple):
    return ",".join(str(text(one)) for one in value)
  if isinstance(value, os.PathLike):  # a run is a path to its model
    return os.fspath(value)
  return None if value is None else str(value)


def parse(text: str, kind: type, what: str):
  """Reads a single value; errors are UserErrors that begin with `what`."""
  bare = Field("", kind, False, False, None, "", {}, None, None, {})
  return bare.parse(text, what)


def _int(text: str) -> int:
  try:
    return int(text)
  except ValueError:
    number = float(text)  # 1e4 is a fine way to write an int
    if not number.is_integer():
      raise
    return int(number)


_READERS = {
  str: str,
  bool: lambda text: _BOOLS[text.lower()],
  int: _int,
  float: float,
}
