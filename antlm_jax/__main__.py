"""Runs `antlm COMMAND ...` and `python -m antlm_jax COMMAND ...`."""

import ast
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

import antlm_jax
from antlm_jax import cli, tables
from antlm_jax.commands import COMMANDS
from antlm_jax.errors import UserError, suggestion
from antlm_jax.planning import compilers


def main(argv: Sequence[str]) -> None:
  """Runs a command, or lists all of them."""
  if argv == ["--version"]:
    print(f"antlm {antlm_jax.__version__}")
    return
  for words in (2, 1):
    name = " ".join(argv[:words])
    if name in COMMANDS:
      sys.argv[0] = f"antlm {name}"  # its name in --help
      module, *first = COMMANDS[name].split()
      importlib.import_module(module).main([*first, *argv[words:]])
      return
  name = " ".join(word for word in argv[:2] if not word.startswith("-"))
  rows = [
    (f"antlm {command}", _command_summary(entry))
    for command, entry in COMMANDS.items()
    if f"{command} ".startswith(f"{name} ".lstrip())
  ]
  if not rows:
    hint = suggestion(name, COMMANDS, "antlm --help lists them")
    raise UserError(f"no command {name!r}; {hint}")
  if options := {*argv} - {*name.split(), "-h", "--help"}:
    raise UserError(f"unknown option {min(options)!r}; antlm --help helps")
  listed = tables.text_table(rows, ("command", "purpose"))
  print(f"{listed}\n\nantlm COMMAND --help describes a command.")


def _command_summary(entry: str) -> str:
  """Returns the first line of a command's help, without importing it."""
  module, *first = entry.split()
  if first:
    command = next(name for name, other in COMMANDS.items() if other == module)
    return f"Short for antlm {command} {' '.join(first)}."
  path = pathlib.Path(importlib.util.find_spec(module).origin)
  text = path.read_text("utf-8")
  return ast.get_docstring(ast.parse(text)).partition("\n")[0]


def run() -> None:
  """Entry point of the installed `antlm`."""
  compilers.ignore_absent_devices()
  cli.run_command(main)


if __name__ == "__main__":
  run()
