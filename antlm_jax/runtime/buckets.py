"""Runs in a bucket: reads that are tried again, and files that grow.

Objects in a bucket cannot grow, so `Mirror` keeps the files that do (metrics,
TensorBoard's) on this machine, and copies them.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TypeVar

import fsspec

from antlm_jax.errors import UserError, is_temporary
from antlm_jax.runtime import files, processes, progress, signals

_EVERY = 30.0  # least seconds from one copy of the mirror to the next
PATIENCE = 10.0  # seconds that training waits for a copy
TRIES = 300.0  # seconds for which reads are tried again after a failure
_PAUSES = 1.0, 30.0  # seconds between two tries: the first, and the longest
Result = TypeVar("Result")


class Tries:
  """Reads of a bucket, by any thread, that are tried again while it fails."""

  def __init__(self):
    self._failing_since: float | None = None

  def read(self, read: Callable[[], Result], path: files.Path) -> Result:
    """Returns the result of `read`, and calls it again if it fails for now.

    It stops `TRIES` seconds after the bucket began to fail, or if a signal asks
    the run to end. gcsfs itself has then tried each request six times, in half
    a minute. Raises the errors of `read`.
    """
    pause, longest = _PAUSES
    while True:
      try:
        result = read()
      except (*files.file_failures(), ValueError) as error:
        if not is_temporary(error):
          raise
        since = self._failing_since or time.monotonic()
        self._failing_since = since
        left = since + TRIES - time.monotonic()
        if left <= 0 or signals.asked_to_end():
          raise
        why = files.failure_reason(error)
        _warn(f"{path}: {why}: trying again for {max(1, round(left))} s")
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
        continue
      if (since := self._failing_since) is not None:
        self._failing_since = None
        _warn(f"{path} answers after {time.monotonic() - since:.0f} s")
      return result


def _warn(line: str) -> None:
  """Prints a warning, also in later processes: each reads its own rows."""
  if not progress.is_quiet():
    print(f"warning: {line}", file=sys.stderr, flush=True)


class Mirror:
  """The folder on this machine for the files of a run that grow.

  For a run on this machine, it is the run's folder. For a run in a bucket, it
  is a new folder with the files `fetched`. The first process copies changed
  files from there to the bucket. The folder is deleted at the end of the block,
  unless the last copy failed. Raises a UserError if the bucket does not exist,
  or cannot be written.

  Attributes:
    workdir: The run's folder, as `files.absolute_path` returns it.
    folder: The folder to write to.
  """

  def __init__(self, workdir: str | os.PathLike, *fetched: str):
    self.workdir = self.folder = pathlib.Path(workdir)
    self._copies = files.is_remote(workdir) and processes.is_first()
    if not files.is_remote(workdir):
      return
    self.workdir = files.absolute_path(workdir)
    if self._copies:
      _check_bucket_rights(self.workdir)
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix="antlm_jax_"))
    # A single thread, so that no older copy of a file replaces a newer copy.
    self._pool = concurrent.futures.ThreadPoolExecutor(1)
    self._copying: concurrent.futures.Future | None = None
    self._begun = 0.0
    self._seen: dict[pathlib.Path, int] = {}
    self._failure = ""  # of the last copy
    self._complete = False  # whether the last copy was
    for name in fetched if self._copies else ():
      with contextlib.suppress(FileNotFoundError):
        data = (self.workdir / name).read_bytes()
        (self.folder / name).write_bytes(data)

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    if self.folder == self.workdir:
      return
    self.push(wait=6 * PATIENCE)
    self._pool.shutdown(wait=False, cancel_futures=True)
    if self._copies and not self._complete:
      progress.say(
        f"warning: files not copied to {self.workdir} are in {self.folder}"
      )
    else:
      shutil.rmtree(self.folder, ignore_errors=True)

  def push(self, wait: float = 0.0) -> None:
    """Starts to copy changed files to the bucket.

    Waits at most `wait` seconds for the copy. With 0, it skips copies that are
    less than 30 seconds apart.
    """
    if not self._copies:
      return
    idle = self._copying is None or self._copying.done()
    if self._copying is not None and idle:
      self._copying.result()  # raises errors that `_copy` did not expect
    if wait or (idle and time.monotonic() - self._begun >= _EVERY):
      self._begun = time.monotonic()
      self._copying = self._pool.submit(self._copy)
    if wait:
      concurrent.futures.wait([self._copying], timeout=wait)

  def _copy(self) -> None:
    self._complete = False
    try:
      for path in sorted(self.folder.rglob("*")):
        if not path.is_file() or path.suffix == ".tmp":  # half written
          continue
        if self._seen.get(path) != (changed := path.stat().st_mtime_ns):
          name = path.relative_to(self.folder).as_posix()
          (self.workdir / name).write_bytes(path.read_bytes())
          self._seen[path] = changed
      self._failure = ""
      self._complete = True
    except files.file_failures() as error:
      if not self._failure:  # the next push tries again, silently
        self._failure = files.failure_reason(error)
        progress.say(
          f"warning: metrics cannot be copied to {self.workdir} now:"
          f" {self._failure}"
        )


def _check_bucket_rights(url) -> None:
  """Tries every right that a run needs."""
  probe = url / f".writable-{os.getpid()}"
  try:
    # Orbax asks for the bucket, too, to know whether it has real folders.
    fsspec.filesystem("gcs").call("GET", f"b/{url.parts[2]}")
    probe.write_text("")
    probe.read_text()
    probe.unlink()
  except FileNotFoundError as error:
    raise UserError(
      f"{url}: there is no such bucket; make it with gcloud storage buckets"
      " create"
    ) from error
  except (
    *files.file_failures(),
    ValueError,
  ) as error:  # that of a name's letters
    line = f"{url} cannot be used: {files.failure_reason(error)}"
    raise files.failure(line, error) from error
