"""What every command shares: one-line errors, exit statuses, `--help`."""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence

# What a machine refuses, rather than what a program did wrong.
_TOLD = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS)


BAD_INPUT = 2
RUN_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: saved, and told to make room
INTERRUPTED = 130  # 128 + SIGINT, as a shell says it


class UserError(Exception):
  """Bad input, told in one line: what is wrong, where, and what to do.

  Raised anywhere below a command; `run` prints it without a traceback and
  exits with status 2.
  """


class _HelpFormatter(
  argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter
):
  """Keeps a description's lines, and shows the defaults that say something."""

  def _get_help_string(self, action):
    if action.default is None or action.default is False:
      return action.help
    return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
  """An argparse parser whose errors are `UserError`s."""

  def __init__(self, **kwargs):
    kwargs.setdefault("formatter_class", _HelpFormatter)
    kwargs.setdefault("allow_abbrev", False)
    super().__init__(**kwargs)

  def error(self, message: str):
    raise UserError(f"{message} (see --help)")


def here(path: str) -> str:
  """The type of an argument that names a place on this machine.

  Raises:
    ArgumentTypeError: for one that is elsewhere.
  """
  if "://" in path:
    raise argparse.ArgumentTypeError(
      f"{path} is not on this machine: write to a folder here, then copy it"
    )
  return path


class Stopped(KeyboardInterrupt):
  """A run was told to end: the same command goes on.

  Attributes:
    status: The exit status: `INTERRUPTED` or `RUN_AGAIN`.
    saved: Whether it has trained, and all its processes saved and end now.
  """

  def __init__(self, status: int, saved: bool = False):
    super().__init__()
    self.status, self.saved = status, saved


def explain(error: BaseException) -> tuple[int, str] | None:
  """Returns an error's exit status and its line; None for an unforeseen one."""
  if isinstance(error, UserError):
    return BAD_INPUT, f"error: {error}"
  if isinstance(error, OSError) and error.errno in _TOLD:
    where = f": {error.filename}" if error.filename else ""
    return BAD_INPUT, f"error: {error.strerror}{where}"
  if isinstance(error, KeyboardInterrupt):
    status = getattr(error, "status", INTERRUPTED)
    return status, "run me again" if status == RUN_AGAIN else "interrupted"
  return None


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Runs a command's `main(argv)` and ends the process with its status.

  Status 0 is success, 2 bad input (`UserError`), 130 an interruption, 75
  (EX_TEMPFAIL) a request to run the same command again.
  """
  # Orbax and asyncio log the tracebacks of errors that are raised as well.
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  try:
    main(sys.argv[1:])
  except BrokenPipeError:  # the reader (head, less) has gone: not our error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)
  except (UserError, OSError, KeyboardInterrupt) as error:
    told = explain(error)
    if told is None:
      raise
    status, line = told
    print(line, file=sys.stderr)
    sys.exit(status)
