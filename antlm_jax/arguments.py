"""Arguments of a command line: those of functions and of sections."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from antlm_jax import settings
from antlm_jax.settings import Field, ListField


def add_arguments(
  parser: argparse.ArgumentParser, source: Callable
) -> dict[str, argparse.Action]:
  """Adds an argument for each setting of a dataclass or a function, by name."""
  actions = {}
  for field in settings.fields_of(source).values():
    keywords = _keywords(field)
    if field.flag.startswith("-"):
      keywords["dest"] = field.name
    else:
      keywords.pop("required", None)
    action = parser.add_argument(field.flag, **keywords)
    action.may_be_empty = field.may_be_empty  # for `cli.Parser`
    actions[field.name] = action
  return actions


def _keywords(field: Field) -> dict[str, Any]:
  """Returns the keywords of `add_argument` for a setting."""
  keywords = field.keywords
  out = {"help": field.help.replace("%", "%%").replace("`", "")}
  if field.default is dataclasses.MISSING:
    out["required"] = True
  else:
    default = field.default
    if isinstance(default, tuple):
      default = [*default] if "nargs" in keywords else settings.text(default)
    out["default"] = default
  if field.value_type is bool:
    switch = argparse.BooleanOptionalAction
    return {"action": "store_true" if field.default is False else switch} | (
      out | keywords
    )
  if not isinstance(field, ListField):
    out["choices"] = field.choices
  if field.option and not out.get("choices"):
    out["metavar"] = field.option.lstrip("-").upper()
  # With nargs, argparse gives the parts one by one.
  is_parted = isinstance(field, ListField) and "nargs" in keywords
  reader = functools.partial(_read, field.part if is_parted else field)
  return out | {"type": reader} | keywords


def _read(field: Field, text: str):
  """Reads and checks an argument's text."""
  return field.accept(field.parse(text, field.flag), field.flag, text)


def read_arguments(
  source: Callable, args: argparse.Namespace
) -> dict[str, Any]:
  """Returns the values of `add_arguments` for a dataclass or a function."""
  return {
    name: field.accept(getattr(args, name), field.flag)
    for name, field in settings.fields_of(source).items()
    if hasattr(args, name)
  }


def read_section(section_type: type, args: argparse.Namespace):
  """Builds a section from the parsed arguments of `add_arguments`."""
  return settings.build(section_type, read_arguments(section_type, args))
