"""Errors that are a line rather than a traceback, and exit statuses."""

import errno
import os
import traceback

# Errors of the machine, not of the program.
_TOLD = (
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EACCES,
  errno.EPERM,
  errno.EROFS,
  errno.ENAMETOOLONG,
  errno.ENOTDIR,
  errno.EISDIR,
)

CRASHED = 1
BAD_INPUT = 2
RUN_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: saved, and told to make room
INTERRUPTED = 130  # 128 + SIGINT, as a shell says it


class UserError(Exception):
  """Invalid input. The message is one line: problem, place and advice."""


class Stopped(KeyboardInterrupt):
  """A run was told to end: the same command or call resumes it."""

  def __init__(self, status: int, saved: bool = False):
    super().__init__("run the same again to resume" if saved else "")
    self.status = status  # `INTERRUPTED` or `RUN_AGAIN`
    self.saved = saved  # whether it trained, and all processes saved and end


def explain(error: BaseException) -> tuple[int, str] | None:
  """Returns an error's exit status and its line; None if it is unforeseen."""
  if isinstance(error, UserError):
    return BAD_INPUT, f"error: {error}"
  if isinstance(error, OSError) and error.errno in _TOLD:
    where = f": {error.filename}" if error.filename else ""
    return BAD_INPUT, f"error: {error.strerror}{where}"
  # JAX raised it looking for devices; for some, a bare assertion.
  frames = traceback.extract_tb(error.__traceback__)
  in_jax = bool(frames) and frames[-1].filename.endswith("xla_bridge.py")
  if isinstance(error, RuntimeError | AssertionError) and in_jax:
    asked = os.environ.get("JAX_PLATFORMS", "")
    why = " ".join(str(error).split()) or "JAX has no such devices here"
    # A device that is held by another process may become free: run again.
    status = BAD_INPUT if "known backends" in why or not str(error) else CRASHED
    return status, f"error: JAX_PLATFORMS={asked}: {why}"
  if isinstance(error, KeyboardInterrupt):
    status = getattr(error, "status", INTERRUPTED)
    if status != RUN_AGAIN:
      return status, "interrupted"
    # A run that has saved has already said so.
    again = "stopped by a signal: run the same command again"
    return status, "" if error.saved else again
  return None
