"""Typed values with a help text and limits, of dataclasses and of functions.

A section is a dataclass of such values: a group of the configuration. `to_dict`
and `build` turn it into plain values and back.

A command is a function of such values. Its signature has their types, limits
and defaults, and the `Args` of its docstring have the help texts:

    @settings.checked
    def sample(
      prompt: Annotated[str, argument(may_be_empty=True)],
      count: Annotated[int, argument(least=1)] = 1,
      quiet: PythonOnly[bool] = False,
    ) -> list[str]: ...

`fields_of` lists the values of both, and `checked` checks those that Python
gives. `cli.call_with_arguments` runs a function as a command (arguments.py). A
group that has several implementations, such as optimizers, has a `Registry` of
their sections.
"""

import argparse
import collections.abc
import dataclasses
import functools
import inspect
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, ParamSpec, TypeVar

from antlm_jax import jax_flags
from antlm_jax.errors import UserError, suggestion

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
# Bound of ints whose field has none. Larger ints are slips, which NumPy and JAX
# would report as overflows or as lack of memory.
LARGEST = 2**31 - 1
_LARGEST_FLOAT = 3.4e38
_HUGE = 10**39
_LONGEST_NAME = 255  # bytes of a file's name, at most
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # hashable
class Field:
  """A value of one type, which can be read from text and checked.

  The subclasses below are the other forms: lists, amounts, paths, open types.
  """

  name: str = ""
  value_type: type = str  # of the value, or of a tuple's parts
  optional: bool = False  # whether it may be None
  default: Any = None  # `dataclasses.MISSING` if it is required
  help: str = ""
  option: str = ""  # by default --NAME; without dashes, it is positional
  bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
  choices: Collection | None = None
  read: Callable[[str], Any] | None = None  # makes the value from a text
  may_be_empty: bool = False
  keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def flag(self) -> str:
    """Its name on a command line."""
    return self.option or f"--{self.name}"

  def parse(self, text: str, label: str) -> Any:
    """Reads a value from text; errors begin with `label=text`."""
    # As the documentation writes it. Of a text, None might be a value.
    if self.optional and self.value_type is not str and text == "None":
      return None
    if self.read:  # by `accept`
      return text
    try:
      return _READERS[self.value_type](text)
    except (ValueError, KeyError) as error:
      type_name = self.value_type.__name__
      raise UserError(f"{label}={text:.100}: not {type_name}") from error

  def accept(self, value: Any, label: str, text: str = "") -> Any:
    """Returns a value that Python or `parse` gives, in its field's type.

    Raises a UserError, which begins with `label=`, if it is not allowed. `text`
    is the number as the user wrote it.
    """
    if value is None and self.optional:
      return None
    if hasattr(value, "dtype") and not value.ndim:
      value = value.tolist()  # a number of NumPy
    if isinstance(value, os.PathLike) and self.value_type is str:
      value = os.fspath(value)  # a run is a path to its model
    if self.read and isinstance(value, str):
      try:
        value = self.read(value)
      except argparse.ArgumentTypeError as error:
        raise UserError(f"{label}: {error}") from error
    if self.value_type is float and type(value) is int:
      # Larger ints are refused below, but float() raises an OverflowError.
      value = float(min(max(value, -_HUGE), _HUGE))
    elif self.value_type is int and type(value) is float and value.is_integer():
      value = int(value)  # 1e4 is a fine way to write an int
    if unmet := self._unmet(value):
      shown = ascii(value) if isinstance(value, str) else text or repr(value)
      raise UserError(f"{label}={shown:.100} is not {unmet}")
    return value

  def _unmet(self, value: Any) -> str:
    """Returns the expectation that a value fails; "" if it is allowed."""
    # True is an int to Python, but no number of anything.
    is_bool = isinstance(value, bool)
    is_of_type = isinstance(value, self.value_type)
    if not is_of_type or is_bool != (self.value_type is bool):
      return f"of type {self.value_type.__name__}"
    if self.choices is not None and value not in self.choices:
      names = [*map(str, self.choices)]
      hint = suggestion(str(value), names)
      return f"one of {', '.join(names)}{f'; {hint}' * bool(hint)}"
    if self.value_type is str:
      return ""
    if self.value_type is float and not abs(value) <= _LARGEST_FLOAT:
      return "finite in float32"
    bounds = self.bounds
    if self.value_type is int and abs(value) > LARGEST:
      bounds = {"least": -LARGEST, "most": LARGEST} | bounds
    if all(_BOUNDS[name][1](value, bound) for name, bound in bounds.items()):
      return ""
    return " and ".join(f"{_BOUNDS[name][0]} {b}" for name, b in bounds.items())


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ListField(Field):
  """A tuple of values. Python may give a list, an array or a single value."""

  part: Field  # of each value

  def parse(self, text: str, label: str) -> tuple:
    """Reads values between commas, perhaps in brackets."""
    if text.startswith("(") and text.endswith(")"):
      text = text[1:-1]
    return tuple(self.part.parse(x, label) for x in text.split(",") if x)

  def accept(self, value: Any, label: str, text: str = "") -> Any:
    """Returns the values as a tuple, and paths as texts."""
    if value is None and self.optional:
      return None
    if hasattr(value, "dtype"):
      value = value.tolist()
    parts = value if isinstance(value, list | tuple) else (value,)
    texts = (os.fspath(x) if isinstance(x, os.PathLike) else x for x in parts)
    return tuple(self.part.accept(part, label) for part in texts)


class AmountField(Field):
  """A number of steps, which is an int, or a share under 1, a float."""

  def parse(self, text: str, label: str) -> Any:
    """Reads an int as an int, so that 1 differs from 1.0."""
    number = super().parse(text, label)
    is_count = text.isdecimal() and number <= LARGEST
    return int(number) if is_count else number

  def accept(self, value: Any, label: str, text: str = "") -> Any:
    """Returns the number; UserError if it may mean either, such as 1.0."""
    number = super().accept(value, label, text)
    if number < 1:
      return number
    is_whole_run = number == 1 and isinstance(value, float)
    if is_whole_run or not number.is_integer():
      raise UserError(
        f"{label}={text or value} is no whole number of steps, nor a share"
        " under 1: write 1 for one step, or a share such as 0.1"
      )
    return int(number)


class OpenField(Field):
  """A value from text, or of other types, which its function checks."""

  def accept(self, value: Any, label: str, text: str = "") -> Any:
    """Returns a value, checked if it is of the text's type."""
    is_of_type = isinstance(value, self.value_type)
    return super().accept(value, label, text) if is_of_type else value


class PathField(Field):
  """A path: a text, or an `os.PathLike` from Python, which `read` may read."""

  def accept(self, value: Any, label: str, text: str = "") -> Any:
    """Returns the path as it is, if libraries can write it."""
    if value is None and self.optional:
      return None
    require_path(value, label)
    is_kept = isinstance(value, os.PathLike) and not self.read
    return value if is_kept else super().accept(value, label, text)


def require_path(value: Any, name: str) -> None:
  """Raises a UserError unless a value is a path that all libraries can write.

  ArrayRecord and orbax take only UTF-8.
  """
  if not isinstance(value, str | os.PathLike):
    raise UserError(f"{name}={value!r:.200} is no path")
  path = os.fspath(value)
  if not path:
    raise UserError(f"{name} is empty: give a path, such as . for this folder")
  if path.startswith("~/"):  # a shell replaces it only where a word begins
    raise UserError(
      f"{name}={path:.200}: ~ is not replaced here: write"
      f" {os.path.expanduser(path):.200}"
    )
  try:
    encoded = path.encode("utf-8")
  except UnicodeEncodeError as error:
    raise UserError(
      f"{name}={value!a:.200} is not UTF-8: rename it, or set PYTHONUTF8=1 if"
      " the locale of this shell is not UTF-8"
    ) from error
  is_long = any(len(part) > _LONGEST_NAME for part in encoded.split(b"/"))
  if is_long or ("\n" in path and not os.path.lexists(path)):
    raise UserError(
      f"{name}={path[:100]!r} is too long for a path, or has line ends; give a"
      " path or, where texts are taken, a list of them"
    )


def argument(
  option: str = "",
  *,
  help: str = "",
  choices: Collection | None = None,
  read: Callable[[str], Any] | None = None,
  may_be_empty: bool = False,
  **keywords,
) -> Field:
  """Describes a value; in a signature, `Annotated[int, argument(least=1)]`.

  The signature has its name, type and default. Bounds and choices hold for each
  part of a tuple. Numbers are finite; ints without bounds lie within
  +-`LARGEST`.

  Args:
    option: Name on a command line, if it is not `--NAME` of the value: another
      option, or a name without dashes for a positional argument.
    help: Noun phrase with the value's unit. That of a function is in the `Args`
      of its docstring, unless a command line needs other words.
    choices: All allowed values.
    read: Function that makes the value from a text, or raises argparse's
      `ArgumentTypeError`. It keeps texts that it has made.
    may_be_empty: Whether a command line may give an empty text.
    **keywords: Bounds (`least` and `most` are inclusive, `over` and `under`
      exclusive) and further keywords of argparse's `add_argument`.
  """
  return Field(
    option=option,
    help=help,
    bounds={name: keywords.pop(name) for name in _BOUNDS if name in keywords},
    choices=choices,
    read=read,
    may_be_empty=may_be_empty,
    keywords=keywords,
  )


def setting(
  default: Any = dataclasses.MISSING, help: str = "", **keywords: Any
) -> Any:
  """Returns a dataclass field with a help text, bounds and choices.

  Types are `str`, `bool`, `int`, `float`, `tuple[T, ...]` of these (written
  with commas), and `T | None`. Without a default, the value is required.
  `argument` documents the keywords.
  """
  metadata = {"argument": argument(help=help, **keywords)}
  return dataclasses.field(default=default, metadata=metadata)


_PYTHON_ONLY = object()
# A parameter that no command line can give, such as a function to call.
PythonOnly = Annotated[T, _PYTHON_ONLY]


def _typed_field(description: Field, hint: Any, **values) -> Field:
  """Returns a described field in the form of its type, such as `int | None`.

  Text makes the first type of a union that `_READERS` has. The others are
  Python's alone.
  """
  member_types: list[Any] = []
  many = False
  for member in _members(hint):
    is_list = member is tuple or typing.get_origin(member) in _LISTS
    part_types = [member]
    if is_list:
      part_types = _members((typing.get_args(member) or (str,))[0])
      many |= any(part_type in _READERS for part_type in part_types)
    member_types += part_types
  types_of_values = {typing.get_origin(x) or x for x in member_types}
  optional = types.NoneType in types_of_values
  types_of_values.discard(types.NoneType)
  read_types = [x for x in member_types if x in _READERS]
  values = vars(description) | values
  values |= {
    "value_type": (read_types or member_types)[0],
    "optional": optional,
  }
  form = Field
  if types_of_values == {str, os.PathLike}:
    form = PathField
  elif types_of_values == {int, float}:
    form = AmountField
  elif len(types_of_values) > 1:
    form = OpenField
  if many:
    part = form(**values | {"optional": False})
    return ListField(**values, part=part)
  return form(**values)


def _members(hint: Any) -> list[Any]:
  """Returns the types of a union, or the type alone, without annotations."""
  if typing.get_origin(hint) is Annotated:
    hint = typing.get_args(hint)[0]
  if typing.get_origin(hint) in (types.UnionType, typing.Union):
    return [
      member for part in typing.get_args(hint) for member in _members(part)
    ]
  return [hint]


def _annotations(hint: Any) -> list[Any]:
  """Returns the annotations of a type, or of a part of a union."""
  parts = typing.get_args(hint)
  if typing.get_origin(hint) is Annotated:
    return [*_annotations(parts[0]), *parts[1:]]
  if typing.get_origin(hint) in (types.UnionType, typing.Union):
    return [annotation for part in parts for annotation in _annotations(part)]
  return []


@functools.cache
def _declared(section_type: type) -> dict[str, Field]:
  """Returns all fields of a dataclass by name."""
  hints = typing.get_type_hints(section_type)
  return {
    field.name: _typed_field(
      field.metadata.get("argument", Field()),
      hints[field.name],
      name=field.name,
      default=field.default,
    )
    for field in dataclasses.fields(section_type)
  }


@functools.cache
def fields_of(source: Callable) -> dict[str, Field]:
  """Returns the settings of a dataclass, or those of a function, by name.

  A function's are its parameters but `*args`, `**settings` and `PythonOnly`.
  Raises a TypeError if a class declares an inherited setting as a plain field,
  which settings and checkpoints would lack.
  """
  if not isinstance(source, type):
    return dict(_parameters(source))
  declared = _declared(source)
  names = [f.name for f in dataclasses.fields(source) if f.metadata]
  for base in filter(dataclasses.is_dataclass, source.__mro__[1:]):
    for name in fields_of(base):
      if name not in names:
        raise TypeError(
          f"{source.__qualname__}: {name!r} is a setting of"
          f" {base.__qualname__}: declare it with setting(...), too"
        )
  return {name: declared[name] for name in names}


def _parameters(function: Callable) -> Iterator[tuple[str, Field]]:
  """Yields a function's parameters that text can give, by name.

  Raises a TypeError for a parameter without such a type or without help.
  """
  helps = _helps(function)
  hints = typing.get_type_hints(function, include_extras=True)
  for name, parameter in _signature(function).parameters.items():
    annotations = _annotations(hints.get(name))
    if parameter.kind in _VARIADIC or _PYTHON_ONLY in annotations:
      continue
    described = [part for part in annotations if isinstance(part, Field)]
    description = described[0] if described else Field()
    help = description.help or helps.get(name, "")
    default = parameter.default
    if default is parameter.empty:
      default = dataclasses.MISSING
    field = _typed_field(
      description, hints.get(name), name=name, default=default, help=help
    )
    if field.value_type not in _READERS or not help:
      lacks = "type that text can give" if help else "help text in Args"
      raise TypeError(f"{function.__qualname__}: {name!r} has no {lacks}")
    yield name, field


def _helps(function: Callable) -> dict[str, str]:
  """Returns the texts of a docstring's section `Args` by parameter.

  They lose the dot at the end. Raises a TypeError for a text of no parameter.
  """
  doc = inspect.getdoc(function) or ""
  part = re.split(r"\n(?=\S)", doc.partition("\nArgs:\n")[2])[0]
  helps = dict(re.findall(r"(?m)^  \**(\w+): (.*(?:\n    .*)*)", part))
  for name in helps:
    if name not in _signature(function).parameters:
      raise TypeError(f"{function.__qualname__}: no parameter {name!r}")
  return {
    name: " ".join(text.split()).rstrip(".") for name, text in helps.items()
  }


_signature = functools.cache(inspect.signature)


def checked(function: Callable[P, T]) -> Callable[P, T]:
  """Makes a function check its arguments, as its command does.

  For a tuple, a caller may give a list or a single value. Raises a UserError,
  `limit=-1 is not at least 0`, for the first argument that is not allowed, and
  for an unknown name. The function computes with `jax_flags.library_flags`.
  """

  @functools.wraps(function)
  def call(*args: P.args, **kwargs: P.kwargs) -> T:
    bound = _bind(function, args, kwargs)
    fields = fields_of(function)
    for name, field in fields.items():
      if name in bound.arguments:
        bound.arguments[name] = field.accept(bound.arguments[name], name)
    helps = {name: field.help for name, field in fields.items()}
    _require(function, bound, helps)
    with jax_flags.library_flags():
      return function(*bound.args, **bound.kwargs)

  call.__signature__ = _plain_signature(function)
  return call


def _plain_signature(function: Callable) -> inspect.Signature:
  """Returns a signature without fields, whose text `help` begins with."""
  hints = typing.get_type_hints(function)  # without Annotated
  signature = _signature(function)
  parameters = [
    parameter.replace(annotation=hints.get(name, parameter.empty))
    for name, parameter in signature.parameters.items()
  ]
  return signature.replace(parameters=parameters)


def checked_names(function: Callable[P, T]) -> Callable[P, T]:
  """Makes a function check the names and the number of its arguments.

  It is for a function that imports its types when it runs, so that `checked`
  cannot read them. Raises a UserError.
  """

  @functools.wraps(function)
  def call(*args: P.args, **kwargs: P.kwargs) -> T:
    bound = _bind(function, args, kwargs)
    _require(function, bound, _helps(function))
    return function(*args, **kwargs)

  return call


def _bind(
  function: Callable, args: tuple, kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
  """Binds arguments to parameters. UserError for a wrong name or number."""
  signature = _signature(function)
  names = signature.parameters
  takes_others = any(p.kind is p.VAR_KEYWORD for p in names.values())
  for name in kwargs:
    if name not in names and not takes_others:
      hint = suggestion(name, names, f"it has {', '.join(names)}")
      raise UserError(f"{function.__name__}: no argument {name!r}; {hint}")
  try:
    return signature.bind_partial(*args, **kwargs)
  except TypeError as error:  # too many, or one of them twice
    raise UserError(
      f"{function.__name__}: {error}; it has {', '.join(names)}"
    ) from None


def _require(
  function: Callable, bound: inspect.BoundArguments, helps: Mapping[str, str]
) -> None:
  """Raises a UserError for the first required argument that is missing."""
  for name, help in helps.items():
    parameter = bound.signature.parameters[name]
    is_missing = name not in bound.arguments
    is_required = parameter.default is parameter.empty
    if is_missing and is_required and parameter.kind not in _VARIADIC:
      raise UserError(f"{function.__name__}: give {name}: {help}")


class Section:
  """Base of groups of settings: frozen dataclasses.

  Making one sets each value as `Field.accept` returns it, such as a tuple for a
  list. It raises a UserError for the first value that its field does not allow,
  with the group's name: `schedule.peak_lr=-1`.
  """

  group: ClassVar[str] = ""  # its key in the configuration

  @property
  def prefix(self) -> str:
    """The text before a setting's name in errors."""
    return f"{self.group}." if self.group else ""

  def __post_init__(self):
    # Fields not made by `setting` must have their type, if that is plain.
    for name, field in _declared(type(self)).items():
      if field.value_type in _READERS:
        value = field.accept(getattr(self, name), f"{self.prefix}{name}")
        object.__setattr__(self, name, value)


class Registry(dict[str, T]):
  """Implementations of one interface, by name.

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
    self.group = group
    self.key = key

  def register(self, name: str) -> Callable[[U], U]:
    """Returns a decorator that registers an implementation by its name.

    The same class or function may be registered again, as a notebook's cell
    that runs twice does. Raises a UserError if another has the name, or if
    it is not a section of the group.
    """

    def add(implementation: U) -> U:
      if self.key and Section not in getattr(implementation, "__mro__", ()):
        raise UserError(
          f"{self.group} {name!r}: {_definition(implementation)} is no class of"
          " settings: register that class, such as a subclass of EncoderConfig"
        )
      taken = self.get(name, implementation)
      if _definition(taken) != _definition(implementation):
        raise UserError(
          f"{self.group} {name!r} is {_definition(taken)}: register"
          f" {_definition(implementation)} with another name"
        )
      if self.key:
        setattr(implementation, self.key, name)
        implementation.group = self.group
      self[name] = implementation
      return implementation

    return add

  def __missing__(self, name: str) -> T:
    setting = f"{self.group}.{self.key}".rstrip(".")
    names = ", ".join(sorted(filter(None, self))) or "those that are known"
    raise UserError(
      f"{setting}={name!r} is not one of {names}; if a file of yours has it"
      f" by .register({name!r}), give --plugin=FILE.py (in Python, import it)"
    )


def _definition(implementation: Any) -> str:
  """Returns the name of a class or function, and its file or module."""
  name = getattr(implementation, "__qualname__", repr(implementation))
  module = implementation.__module__
  # A plugin that another file imports has two modules.
  path = getattr(sys.modules.get(module), "__file__", None)
  return f"{name} of {os.path.realpath(path) if path else module}"


def to_dict(section) -> dict[str, Any]:
  """Returns the settings of a section, with its name if it is registered."""
  names = {key: getattr(section, key, "") for key in ("name", "kind")}
  values = {name: getattr(section, name) for name in fields_of(type(section))}
  return {key: name for key, name in names.items() if name} | values


def changed_settings(section) -> dict[str, Any]:
  """Returns the settings that are not at their default, and its name."""
  fields = fields_of(type(section))
  return {
    name: value
    for name, value in to_dict(section).items()
    if name not in fields or value != fields[name].default
  }


def build(
  section: type[T] | Registry, values: Mapping[str, Any], group: str = ""
) -> T:
  """Builds a section of some of its settings; the others have their defaults.

  This is the only way from settings to a section: those of a config, of a
  stored run and of a command line.

  Args:
    section: Type of the section, or a registry, one of whose types the values
      name.
    values: Values by the settings' names.
    group: Group of the settings, for errors.

  Raises:
    UserError: A setting is unknown, missing or not allowed, or the registry
      does not know the name.
  """
  values = dict(values)
  name = ""
  if isinstance(section, Registry):
    name = str(values.pop(section.key, ""))
    section = section[name]
  owner = name or group or section.__name__
  fields = fields_of(section)
  refuse_unknown(values, fields, owner, "antlm train --help lists them")
  for name, field in fields.items():
    if field.default is dataclasses.MISSING and name not in values:
      raise UserError(f"{f'{group}.{name}'.lstrip('.')} is missing")
  return section(**values)


def by_name(keys: Collection[str]) -> dict[str, list[str]]:
  """Returns keys by their last names, `steps`, and whole, `train.steps`."""
  by_last_name: dict[str, list[str]] = {}
  for key in keys:
    by_last_name.setdefault(key.rpartition(".")[2], []).append(key)
  return by_last_name | {key: [key] for key in keys}


def refuse_unknown(
  names: Iterable[str], settings: Collection[str], owner: str, otherwise: str
) -> None:
  """Raises a UserError for a name that is none of the settings of `owner`."""
  for name in names:
    if name not in settings:
      hint = suggestion(name, settings, otherwise)
      raise UserError(f"{name} is no setting of {owner}; {hint}")


def text(value: Any) -> str | None:
  """Returns a value as a command line has it, and None as it is."""
  if isinstance(value, list | tuple):
    return ",".join(str(text(part)) for part in value)
  if isinstance(value, os.PathLike):  # a run is a path to its model
    return os.fspath(value)
  return None if value is None else str(value)


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
_LISTS = (tuple, collections.abc.Sequence)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
