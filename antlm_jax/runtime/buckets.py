"""Runs and data in a bucket: what must be on this machine all the same.

Files that grow (metrics, TensorBoard's) cannot be there, since objects cannot
be appended to: `Mirror` copies them. Rows are read from a copy: `local`.
"""

import concurrent.futures
import contextlib
import hashlib
import os
import pathlib
import shutil
import tempfile
import time

import fsspec

from antlm_jax import units
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, processes, progress

_EVERY = 30.0  # seconds from one copy of the mirror to the next, at least
PATIENCE = 10.0  # seconds that training waits for a copy
_CHUNK = 32 << 20  # bytes of a request
_REQUESTS = 8  # at a time


class Mirror:
  """The folder on this machine for the files of a run that grow.

  For a run on this machine that is its own. For one in a bucket it is a new
  one, with the files `fetched`, from which the first process copies to the
  bucket what has changed. It ends with its block, unless its last copy failed.

  Attributes:
    workdir: The run's folder, as `files.path` gives it.
    folder: Where to write.

  Raises:
    UserError: if the bucket is not there, or may not be written.
  """

  def __init__(self, workdir: str | os.PathLike, *fetched: str):
    self.workdir = self.folder = pathlib.Path(workdir)
    self._copies = files.is_remote(workdir) and processes.is_first()
    if not files.is_remote(workdir):
      return
    self.workdir = files.path(workdir)
    if self._copies:
      _check(self.workdir)
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix="antlm_jax_"))
    # One thread: copies of the same file are not to overtake each other.
    self._pool = concurrent.futures.ThreadPoolExecutor(1)
    self._copying: concurrent.futures.Future | None = None
    self._begun = 0.0
    self._seen: dict[pathlib.Path, int] = {}
    self._failed = ""
    for name in fetched if self._copies else ():
      with contextlib.suppress(FileNotFoundError):
        data = (self.workdir / name).read_bytes()
        (self.folder / name).write_bytes(data)

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    if not files.is_remote(self.workdir):
      return
    self.push(wait=6 * PATIENCE)
    self._pool.shutdown(wait=False, cancel_futures=True)
    if self._copies and (self._failed or not self._copying.done()):
      progress.say(f"files not copied to {self.workdir} are in {self.folder}")
    else:
      shutil.rmtree(self.folder, ignore_errors=True)

  def push(self, wait: float = 0.0) -> None:
    """Begins to copy to the bucket what has changed.

    Waits so many seconds until it is there; with 0, does nothing where
    something was copied a moment ago.
    """
    if not self._copies:
      return
    idle = self._copying is None or self._copying.done()
    if wait or (idle and time.monotonic() - self._begun >= _EVERY):
      self._begun = time.monotonic()
      self._copying = self._pool.submit(self._copy)
    if wait:
      concurrent.futures.wait([self._copying], timeout=wait)

  def _copy(self) -> None:
    try:
      for path in sorted(self.folder.rglob("*")):
        if not path.is_file() or path.suffix == ".tmp":  # half written
          continue
        if self._seen.get(path) != (changed := path.stat().st_mtime_ns):
          name = path.relative_to(self.folder).as_posix()
          (self.workdir / name).write_bytes(path.read_bytes())
          self._seen[path] = changed
      self._failed = ""
    except files.failures() as error:
      if not self._failed:  # told once; the next push tries again
        self._failed = files.reason(error)
        progress.say(
          f"metrics cannot be copied to {self.workdir} now: {self._failed}"
        )


def _check(url) -> None:
  """Uses every right that a run needs: they have no better test."""
  probe = url / f".writable-{os.getpid()}"
  try:
    # Orbax asks the same, to know whether the bucket has real folders.
    fsspec.filesystem("gcs").call("GET", f"b/{url.parts[2]}")
    probe.write_text("")
    probe.read_text()
    probe.unlink()
  except FileNotFoundError as error:
    raise UserError(
      f"{url}: there is no such bucket: gcloud storage buckets create makes one"
    ) from error
  except files.failures() as error:
    raise UserError(f"{url} cannot be used: {files.reason(error)}") from error


def local(folder: str | os.PathLike, stamp: str) -> pathlib.Path:
  """Returns a folder on this machine: itself, or a copy of one in a bucket.

  A copy, of the files in it and not of its subfolders, is kept in the user's
  cache. `stamp` is the file that is another one when the content is.

  Raises:
    UserError: if there is no stamp, no room, or no way to read it.
  """
  if not files.is_remote(folder):
    return pathlib.Path(folder)
  source = files.path(folder)
  try:
    content = (source / stamp).read_bytes()
    # Other content has another name: an older copy is never taken for it.
    key = hashlib.sha256(f"{source}\n".encode() + content).hexdigest()[:16]
    copy = files.cache() / key
    copy.parent.mkdir(parents=True, exist_ok=True)
    with files.locked(copy.with_suffix(".lock"), wait=True):
      if not copy.is_dir():
        _fetch(source, copy)
  except FileNotFoundError as error:
    raise UserError(f"{folder} has no {stamp}: is it the right one?") from error
  except files.failures() as error:
    raise UserError(f"cannot copy {folder}: {files.reason(error)}") from error
  return copy


def _fetch(source, copy: pathlib.Path) -> None:
  """Copies a bucket's folder, whole or not at all."""
  system = fsspec.filesystem("gcs")
  entries = system.ls(str(source), detail=True)
  sizes = {e["name"]: e["size"] for e in entries if e["type"] == "file"}
  needed, free = sum(sizes.values()), shutil.disk_usage(copy.parent).free
  if free < needed:
    raise UserError(
      f"the copy of {source} needs {units.quantity(needed, 'B')},"
      f" {copy.parent} has {units.quantity(free, 'B')} free: set XDG_CACHE_HOME"
      " to a larger disk, or mount the bucket (gcsfuse) and give that path"
    )
  aside = copy.with_suffix(".part")
  shutil.rmtree(aside, ignore_errors=True)
  aside.mkdir()
  for name in sizes:  # the parts are written into them, in any order
    (aside / pathlib.PurePosixPath(name).name).touch()
  with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
    parts = [
      pool.submit(_fetch_part, system, name, start, size, aside)
      for name, size in sizes.items()
      for start in range(0, size, _CHUNK)
    ]
    try:
      for part in progress.track(
        parts, f"{_CHUNK >> 20} MB", f"copying {source}"
      ):
        part.result()
    except BaseException:
      pool.shutdown(wait=False, cancel_futures=True)
      raise
  aside.rename(copy)


def _fetch_part(system, name: str, start: int, size: int, folder) -> None:
  stop = min(start + _CHUNK, size)
  data = system.cat_file(name, start=start, end=stop)
  if len(data) != stop - start:
    raise OSError(f"{name} ended at byte {start + len(data)} of {size}")
  with (folder / pathlib.PurePosixPath(name).name).open("r+b") as file:
    file.seek(start)
    file.write(data)
