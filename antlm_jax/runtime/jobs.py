"""Runs commands in child processes: some at once, and stopped together."""

import contextlib
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from antlm_jax import cli
from antlm_jax.errors import INTERRUPTED, RUN_AGAIN, Stopped, UserError
from antlm_jax.runtime import cores, files, progress, signals

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC  # flags of a new log
_PAUSE = 0.1  # seconds between looks at the processes
_LINES = 15  # of a failed command's log that are shown


class Child(subprocess.Popen):
  """A process that runs a module with this Python.

  Its output goes to a log, or to this process's. Otherwise, only its errors are
  kept, for `failure`.
  """

  def __init__(
    self,
    name: str,
    words: Sequence[str],
    environment: Mapping[str, str] = types.MappingProxyType({}),
    *,
    stdin: IO | int = subprocess.DEVNULL,
    log: pathlib.Path | None = None,
    shown: bool = False,
    remedy: str = "run the same command again",
  ):
    """Starts the process.

    Args:
      name: Name of its work, for errors.
      words: The module and its arguments.
      environment: Variables in addition to this process's.
      stdin: Its input.
      log: File for its output and errors.
      shown: Whether it shows its output and errors here.
      remedy: Advice if the process is killed.
    """
    self._name = name
    self._log = log
    self._remedy = remedy
    self._errors = b""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    environment = os.environ | environment
    if log:
      with files.writing(log):
        file = os.fdopen(files.open_no_link(log, _NEW), "wb")
      streams = {"stdout": file, "stderr": subprocess.STDOUT}
    elif shown:
      quiet = subprocess.DEVNULL if progress.is_quiet() else None
      streams = {"stdout": quiet, "stderr": None}
    else:
      environment["PYTHONIOENCODING"] = "utf-8"
    # Not multiprocessing, which imports the user's script again.
    command = cli.python_command(*words)
    super().__init__(command, 0, env=environment, stdin=stdin, **streams)
    if log:
      file.close()
    if self.stderr:
      os.set_blocking(self.stderr.fileno(), False)

  def has_ended(self) -> bool:
    """Returns whether it has ended, and keeps its errors so far."""
    status = self.poll()
    # If this process is killed, nobody reads: the child ends at its next line.
    while self.stderr and (block := self.stderr.read(1 << 16)):
      self._errors += block
    if status is not None and self.stderr:
      self.stderr.close()
    return status is not None

  def failure(self) -> BaseException | None:
    """Returns the error of a child that has ended; None if it succeeded.

    A `UserError` has the line of the child's own error. For a child that
    crashed, this shows the errors that it kept.
    """
    status = self.returncode
    errors = self._errors.decode(errors="replace")
    if not status:
      return None
    if lines := re.findall("(?m)^error: (.*)$", errors):
      return UserError(lines[-1])
    if status in (INTERRUPTED, RUN_AGAIN):
      return Stopped(status)
    if status < 0:
      return UserError(
        f"{self._name} was killed by signal {-status}, as happens without"
        f" enough memory: {self._remedy}"
      )
    said = "see above"
    if self._log:
      lines = self._log.read_text("utf-8", errors="replace").splitlines()
      said = "\n".join([f"see {self._log}", *lines[-_LINES:]])
    sys.stderr.write(errors)
    kind = RuntimeError if errors else UserError
    return kind(
      f"{self._name} failed (status {status}): {said}; it was"
      f" {shlex.join(self.args)}"
    )


class Children(dict[int, Child]):
  """Children that run at once, by number; `running_children` makes them."""

  def __init__(self, most: int | None):
    super().__init__()
    self._most = most

  def has_room(self) -> bool:
    """Returns whether one more may start; the number of cores may change."""
    return len(self) < (self._most or cores.count_cores())

  def pop_ended(self) -> list[tuple[int, Child]]:
    """Waits a moment; removes and returns the children that have ended."""
    time.sleep(_PAUSE)
    ended = [number for number, child in self.items() if child.has_ended()]
    return [(number, self.pop(number)) for number in ended]

  def stop(self) -> None:
    """Asks all to save and end, and waits for them."""
    for child in self.values():
      child.terminate()
    for child in self.values():
      with child:  # waits, and closes its pipe
        pass


@contextlib.contextmanager
def running_children(most: int | None = None) -> Iterator[Children]:
  """Yields an empty collection, for up to `most` children at once.

  By default, it has room for a child on each core. A signal ends the block with
  `Stopped`. Children that run at the end of the block are stopped.
  """
  children = Children(most)
  with signals.listening() as stop:
    try:
      yield children
    finally:
      # A further signal changes nothing; a second Ctrl-C ends the wait.
      stop.waits = True
      children.stop()
