"""Parsing, one-line errors and exit statuses, shared by all commands."""

import argparse
import itertools
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from antlm_jax import jax_flags, plugins, terminal
from antlm_jax.errors import UserError, explain, suggestion


class _HelpFormatter(
  argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
  """Keeps the lines of descriptions, and shows defaults but None and False."""

  def _get_help_string(self, action):
    negative = isinstance(action, argparse._StoreFalseAction)
    hidden = action.default is False or action.default in (None, [], "")
    if negative or hidden:
      return action.help
    return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
  """An argparse parser whose errors are `UserError`s."""

  def __init__(self, **kwargs):
    kwargs.setdefault("formatter_class", _HelpFormatter)
    kwargs.setdefault("allow_abbrev", False)
    # As `run_command` and `antlm` name it.
    kwargs.setdefault("prog", sys.argv[0])
    super().__init__(**kwargs)
    # `run_command` takes it before the command sees its arguments.
    if self.add_help:
      self.add_argument(
        plugins.OPTION,
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="Python file to import first; it registers your own parts",
      )
    self._words: Sequence[str] = ()  # that it parses
    self._meant: Callable[[str], str] = lambda word: ""

  def error(self, message: str):
    """Raises a UserError, with a hint at an option that looks misspelt."""
    # These are about unknown arguments, and about required arguments that are
    # missing, perhaps because they are misspelt.
    if message.startswith(("unrecognized", "unknown", "the following")):
      message = self._misspelt_option() or message
    raise UserError(f"{message} (see --help)")

  def _misspelt_option(self) -> str:
    """Returns a message with a hint at the first such option, or ""."""
    options = self._option_string_actions
    # Without the dashes, which would make all options similar.
    names = [name[2:] for name in options if name.startswith("--")]
    for word in itertools.takewhile(lambda word: word != "--", self._words):
      name = word.partition("=")[0]
      # The reader of settings has hints at --config.KEY itself.
      if name in options or not name.startswith("--") or "." in name:
        continue
      near = suggestion(name[2:], names, shown="'--{}'".format)
      if hint := f"; {near}" if near else self._meant(word):
        return f"unrecognized arguments: {word}{hint}"
    return ""

  def parse_known_args(self, args=None, namespace=None):
    """Parses, and refuses empty values, as of an unset shell variable."""
    self._words = sys.argv[1:] if args is None else args
    parsed, unknown = super().parse_known_args(args, namespace)
    for action in self._actions:
      value = getattr(parsed, action.dest, None)
      empty = value == "" or (isinstance(value, list) and "" in value)
      may_be = getattr(action, "may_be_empty", False)
      if empty and not may_be and value != action.default:
        self.error(f"{(action.option_strings or [action.dest])[0]} is empty")
    return parsed, unknown

  def parse_with_overrides(
    self, argv: Sequence[str], meant: Callable[[str], str] = lambda _: ""
  ):
    """Returns the arguments, and the list of `--config.KEY=VALUE` words.

    `meant` returns a hint at the meaning of an unknown word.
    """
    self._meant = meant
    args, unknown = self.parse_known_args(argv)
    overrides = []
    words = iter(unknown)
    for word in words:
      if not word.startswith("--config."):
        self.error(f"unknown argument {word!r}{meant(word)}")
      # The value may be a separate word, as with any argument.
      value = next(words, None) if "=" not in word else None
      overrides.append(word if value is None else f"{word}={value}")
    return args, overrides


def parsed(function: Callable, argv: Sequence[str], description: str) -> dict:
  """Returns the arguments of a function that a command line gives, by name.

  The function declares them: see `settings.fields_of`. `description` is that
  for `--help`.
  """
  from antlm_jax.arguments import add_arguments, read_arguments  # slow

  parser = Parser(description=description)
  add_arguments(parser, function)
  return read_arguments(function, parser.parse_args(argv))


def call_with_arguments(
  function: Callable, argv: Sequence[str], description: str
):
  """Calls a function with a command's arguments, and returns its result."""
  return function(**parsed(function, argv, description))


def value_of(option: str, argv: Sequence[str]) -> str | None:
  """Returns an option's text, before the other arguments can be parsed."""
  parser = Parser(add_help=False)
  parser.add_argument(option, dest="value")
  return parser.parse_known_args(argv)[0].value


def local_path(path: str) -> str:
  """Reads a path that must be on this machine, not in a bucket."""
  if "://" in path:
    raise argparse.ArgumentTypeError(
      f"{path} is not on this machine: write to a folder here, then copy it"
    )
  return path


def python_command(*words: str) -> list[str]:
  """Returns the command that runs a module with this Python.

  With -P, it imports nothing from the present folder: a folder of texts may
  have a file tqdm.py. The source tree itself may be used without installing it.
  """
  root = pathlib.Path(__file__).resolve().parents[1]
  safe = [] if pathlib.Path.cwd() == root else ["-P"]
  return [sys.executable, *safe, "-m", *words]


def run_command(main: Callable[[Sequence[str]], None]) -> None:
  """Runs a command, and exits with a status of `antlm_jax.errors`."""
  # Orbax and asyncio also log the tracebacks of errors that they raise.
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  terminal.show_controls()
  if spec := sys.modules["__main__"].__spec__:
    sys.argv[0] = f"python -m {spec.name}"
  # An encoding without some sign, such as ASCII, must not end a run.
  if sys.stdout is not None:
    sys.stdout.reconfigure(errors="backslashreplace")
  try:
    argv = plugins.load_plugins(sys.argv[1:])
    with jax_flags.library_flags():
      main(argv)
  except BrokenPipeError:  # the reader (head, less) has quit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)
  except BaseException as error:
    explained = explain(error)
    if explained is None:
      raise
    status, line = explained
    if line:
      # A name in it may have line ends.
      print(line.replace("\n", "\\n"), file=sys.stderr)
    sys.exit(status)
