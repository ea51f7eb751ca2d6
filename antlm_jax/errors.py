"""Errors that are a line rather than a traceback, and exit statuses."""

import difflib
import errno
import os
import traceback
from collections.abc import Callable, Iterable

from antlm_jax import private

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

# Errors of the network, which may pass.
_NETWORK = (
  errno.ETIMEDOUT,
  errno.EHOSTDOWN,
  errno.EHOSTUNREACH,
  errno.ENETDOWN,
  errno.ENETRESET,
  errno.ENETUNREACH,
)
# The libraries that read and write buckets. Their errors below have no HTTP
# status and may pass. They are named, so that no library has to be imported.
_BUCKETS = ("aiohttp", "gcsfs", "google", "requests")
_BROKEN = {
  ("aiohttp", "ClientError"),
  ("gcsfs", "ChecksumError"),
  ("google", "RetryError"),
  ("google", "TransportError"),
  ("requests", "ChunkedEncodingError"),
  ("requests", "ConnectionError"),
  ("requests", "Timeout"),
}
# HTTP statuses below 500 that may pass: request timeout, too many requests.
_PASSING = (408, 429)
# tensorstore raises a ValueError with one of these: the first after 32 tries.
_TENSORSTORE = ("ABORTED", "UNAVAILABLE", "DEADLINE_EXCEEDED")

_NO_MEMORY = "RESOURCE_EXHAUSTED"  # in JAX's errors

# Similarity, from 0 to 1, that a known name has at least if it was meant.
_SIMILARITY = 0.6

CRASHED = 1
BAD_INPUT = 2
# EX_TEMPFAIL of sysexits.h: a run was told to make room and has saved, or a
# bucket failed for now.
RUN_AGAIN = 75
INTERRUPTED = 130  # 128 + SIGINT, as a shell says it


class UserError(Exception):
  """Invalid input. The message is one line: problem, place and advice."""

  def __str__(self) -> str:
    return super().__str__().replace("\n", "\\n")  # of a name in it


class Unavailable(UserError):
  """A bucket or the network fails now: the same command or call may succeed."""


class Stopped(KeyboardInterrupt):
  """A run was told to end: the same command or call resumes it."""

  def __init__(self, status: int, saved: bool = False):
    super().__init__("run the same again to resume" if saved else "")
    self.status = status  # `INTERRUPTED` or `RUN_AGAIN`
    self.saved = saved  # whether it trained, and all processes saved and end


def similar_names(name: str, names: Iterable[str]) -> list[str]:
  """Returns up to three known names that a misspelt name may mean, best first.

  Letters in another order are the likeliest slip: `stesp` for `steps`.
  """
  near = difflib.get_close_matches(name, list(names), cutoff=_SIMILARITY)
  return sorted(near, key=lambda other: sorted(other) != sorted(name))


def suggestion(
  name: str,
  names: Iterable[str],
  otherwise: str = "",
  shown: Callable[[str], str] = repr,
) -> str:
  """Returns "did you mean ...?" with the most similar known name.

  Returns `otherwise` if none is similar. `shown` writes the name.
  """
  near = similar_names(name, names)
  return f"did you mean {shown(near[0])}?" if near else otherwise


def explain(error: BaseException) -> tuple[int, str] | None:
  """Returns an error's exit status and its line; None if it is unforeseen."""
  library = type(error).__module__.partition(".")[0]
  fails_now = library in _BUCKETS and is_temporary(error)
  if isinstance(error, Unavailable) or fails_now:
    line = " ".join(str(error).split()) or type(error).__name__
    return RUN_AGAIN, f"error: {line}: run the same command again"
  if isinstance(error, UserError):
    return BAD_INPUT, f"error: {error}"
  if isinstance(error, OSError) and error.errno in _TOLD:
    place = f": {error.filename}" if error.filename else ""
    return BAD_INPUT, f"error: {error.strerror}{place}"
  in_device = isinstance(error, RuntimeError) and _NO_MEMORY in str(error)
  if in_device or isinstance(error, MemoryError):
    why = str(error).strip().partition("\n")[0] or "out of memory"
    return BAD_INPUT, (
      f"error: {why}: take smaller parts, such as --config.train.microbatches=4"
      " in training"
    )
  # JAX raised it looking for devices; for some, a bare assertion.
  frames = traceback.extract_tb(error.__traceback__)
  in_jax = bool(frames) and private.searches_devices(frames[-1].filename)
  if isinstance(error, RuntimeError | AssertionError) and in_jax:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    why = " ".join(str(error).split()) or "JAX has no such devices here"
    # A device that is held by another process may become free: run again.
    status = BAD_INPUT if "known backends" in why or not str(error) else CRASHED
    return status, f"error: JAX_PLATFORMS={platforms}: {why}"
  if isinstance(error, KeyboardInterrupt):
    status = getattr(error, "status", INTERRUPTED)
    if status != RUN_AGAIN:
      return status, "interrupted"
    # A run that has saved has already said so.
    again = "stopped by a signal: run the same command again"
    return status, "" if error.saved else again
  return None


def is_temporary(error: BaseException) -> bool:
  """Whether a file, a bucket or the network failed in a way that may pass."""
  import socket  # slow, and most commands need no network

  if isinstance(error, TimeoutError | ConnectionError | socket.gaierror):
    return True
  if isinstance(error, ValueError):
    return any(word in str(error) for word in _TENSORSTORE)
  if (status := _http_status(error)) is not None:
    return status in _PASSING or status >= 500
  classes = type(error).__mro__
  names = {(c.__module__.partition(".")[0], c.__name__) for c in classes}
  if names & _BROKEN or getattr(error, "errno", None) in _NETWORK:
    return True
  # google.auth wraps the errors of its own requests.
  return error.__cause__ is not None and is_temporary(error.__cause__)


def _http_status(error: BaseException) -> int | None:
  """Returns the HTTP status of an error of a library, if any."""
  for name in ("status", "code"):  # of aiohttp; of gcsfs and google
    status = str(getattr(error, name, None) or "")
    if status.isdecimal():
      return int(status)
  return None
