"""Plugins: a user's Python files that register their parts when imported.

    antlm train --plugin=my_optimizer.py --config.optimizer.name=mine ...

`--plugin` may be given more than once, before or after the command's name.
`ANTLM_PLUGINS` lists further files, as `PATH` does folders. From Python, import
the file.
"""

import contextlib
import importlib.util
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Iterator, Sequence

from antlm_jax.errors import UserError

OPTION = "--plugin"
VARIABLE = "ANTLM_PLUGINS"


def load_plugins(argv: Sequence[str]) -> list[str]:
  """Imports a command's plugins, and returns its other arguments.

  Adds them to `ANTLM_PLUGINS`, for the processes that the command starts.
  Raises a UserError if a plugin is missing or fails.
  """
  plugins = {}
  arguments = []
  words = iter([*plugin_arguments(), *argv])
  for word in words:
    option, equals, path = word.partition("=")
    if option != OPTION:
      arguments.append(word)
    elif path := path if equals else next(words, ""):
      paths = path.split(",")
      if len(paths) > 1 and not os.path.exists(path):
        options = " ".join(f"{OPTION}={part}" for part in paths)
        raise UserError(
          f"{OPTION}={path}: give the option once for each file: {options}"
        )
      plugins[os.path.abspath(path)] = f"{OPTION}={path}"
    else:
      raise UserError(f"{OPTION} is empty: give a file, {OPTION}=FILE.py")
  for path, shown in plugins.items():
    run_file(path, shown)
  os.environ[VARIABLE] = os.pathsep.join(plugins)
  return arguments


def plugin_arguments() -> list[str]:
  """Returns the arguments for the plugins of `ANTLM_PLUGINS`."""
  paths = os.environ.get(VARIABLE, "").split(os.pathsep)
  return [f"{OPTION}={path}" for path in paths if path]


def run_file(path: str, shown: str) -> types.ModuleType:
  """Imports a user's Python file; its errors are UserErrors.

  `shown` is the argument that names the file, for messages.
  """
  if not pathlib.Path(path).is_file():
    raise UserError(f"{shown}: no such file")
  # A name that hides no module, also of other files with this name.
  name = f"antlm_file_{os.path.abspath(path)}"
  spec = importlib.util.spec_from_file_location(name, path)
  if spec is None:
    raise UserError(f"{shown}: not a Python file")
  module = importlib.util.module_from_spec(spec)
  sys.modules[name] = module
  with reported(path, shown):
    spec.loader.exec_module(module)
  return module


@contextlib.contextmanager
def reported(path: str, shown: str) -> Iterator[None]:
  """Reports any error of a user's file as bad input, with its line."""
  try:
    yield
    return
  except UserError:
    raise
  except SyntaxError as error:
    lines = [error.lineno]
    message = error.msg
  except (Exception, SystemExit) as error:
    # The last line of this file that ran, not of the library that it called.
    frames = traceback.extract_tb(error.__traceback__)
    file = os.path.abspath(path)
    lines = [f.lineno for f in frames if os.path.abspath(f.filename) == file]
    message = f"{type(error).__name__}: {error}"
  place = ", line ".join([shown, *map(str, lines[-1:])])
  raise UserError(f"{place}: {' '.join(message.split())}")
