"""What every command shares: one-line errors, exit statuses, `--help`."""

import argparse
import errno
import logging
import os
import sys
from collections.abc import Callable, Sequence

# What a machine refuses, rather than what a program did wrong.
_TOLD = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS)


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


def run(main: Callable[[Sequence[str]], None]) -> None:
  """Runs a command's `main(argv)` and ends the process with its status.

  Status 0 is success, 2 bad input (`UserError`), 130 an interruption.
  """
  # Orbax and asyncio log the tracebacks of errors that are raised as well.
  for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  try:
    main(sys.argv[1:])
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
  except BrokenPipeError:  # the reader (head, less) has gone: not our error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(141)
  except OSError as error:
    if error.errno not in _TOLD:
      raise
    print(f"error: {error.strerror}: {error.filename or ''}", file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    sys.exit(130)
