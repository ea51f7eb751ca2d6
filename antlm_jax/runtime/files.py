"""Reads files with clear errors, and writes them whole or not at all.

A path that begins with gs:// is in a bucket of Google Cloud Storage. All
functions raise a `UserError` with the path and the reason if a file cannot be
read, is damaged, or cannot be written.
"""

import contextlib
import errno
import fcntl
import glob
import importlib.util
import io
import json
import logging
import os
import pathlib
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Annotated

import fsspec
from etils import epath

from antlm_jax import cli
from antlm_jax.errors import Unavailable, UserError, is_temporary, suggestion
from antlm_jax.runtime import records
from antlm_jax.settings import argument, require_path

Path = str | os.PathLike[str]  # to a file or folder
LocalPath = Annotated[Path, argument(read=cli.local_path)]  # not in a bucket
_NO_FILE = "it is a link or no regular file: delete it"
FULL = os.strerror(errno.ENOSPC)
# In tensorstore's errors, which are all ValueErrors.
_NO_RIGHT = "PERMISSION_DENIED"
_TENSORSTORES = ("os_error_code=", _NO_RIGHT)  # it cannot write


def not_a_path(text: str) -> UserError:
  """Returns the error for a path to nothing, which may be a text."""
  return UserError(
    f"{text[:200]!r} does not exist; give files or folders or, in Python, a"
    " list of texts"
  )


def is_remote(path: str | os.PathLike) -> bool:
  """Whether a path is in a bucket."""
  return os.fspath(path).startswith("gs://")


def shown_path(path: pathlib.PurePath) -> pathlib.PurePath:
  """Returns a path as people write it: relative, in the present folder."""
  folder = pathlib.Path.cwd()
  return path.relative_to(folder) if path.is_relative_to(folder) else path


def absent(folder: pathlib.PurePath) -> str:
  """Returns "no such folder" and the nearest name here; "" if it exists."""
  if folder.is_dir():
    return ""
  if folder.is_file():
    return "it is a file, not a folder"
  # A bucket may be absent too, or take long to list.
  near_by = [] if is_remote(folder) else folder.parent.glob("*")
  names = (other.name for other in near_by if other.is_dir())

  def shown(name: str) -> str:
    return str(shown_path(folder.parent / name))

  hint = suggestion(folder.name, names, shown=shown)
  return f"no such folder; {hint}" if hint else "no such folder"


def absolute_path(path: str | os.PathLike) -> pathlib.Path | epath.Path:
  """Returns an absolute path, on this machine or in a bucket (needs gcsfs)."""
  require_path(path, "path")
  if not is_remote(path):
    if scheme := re.match(r"[A-Za-z][\w+.-]*://", os.fspath(path)):
      raise UserError(
        f"{path}: {scheme[0]} is not supported: give a folder on this machine,"
        " which may be a mounted bucket, or gs://BUCKET/FOLDER"
      )
    return pathlib.Path(path).absolute()
  if importlib.util.find_spec("gcsfs") is None:
    raise UserError(
      "gs:// paths need gcsfs, which is missing: pip install gcsfs"
    )
  if not re.match("gs://[^/]", os.fspath(path)):
    raise UserError(f"{path}: it names no bucket: write gs://BUCKET/FOLDER")
  # A cached listing would lack the files of tensorstore and other processes.
  fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
  # These log the errors that they raise.
  for name in ("gcsfs", "google.auth"):
    logging.getLogger(name).setLevel(logging.CRITICAL)
  return epath.Path(path)


def read_text(
  path: str | os.PathLike, label: str, lenient: bool = False
) -> str:
  """Reads a file of UTF-8 text, on this machine or in a bucket.

  `label` names the file in errors, such as `the config`. With `lenient`, other
  bytes are replaced. A byte-order mark at the beginning is dropped.
  """
  try:
    data = absolute_path(path).read_bytes()
    if lenient or not (why := records.not_utf8(data)):
      return data.decode("utf-8-sig", "replace" if lenient else "strict")
  except UnicodeDecodeError as error:
    line = data.count(b"\n", 0, error.start) + 1
    why = f"line {line}: not UTF-8: {error.reason}; {records.CONVERT}"
  except file_failures() as error:
    raise failure(
      f"cannot read {label} {path}: {_why(error)}", error
    ) from error
  raise UserError(f"cannot read {label} {path}: {why}")


def read_json(path: str | os.PathLike, label: str) -> dict:
  """Reads a file that holds one JSON object."""
  # Others' configs may repeat a name; as in transformers, the last one counts.
  text = read_text(path, label)
  return _object(text, f"cannot read {label} {path}", 1, once=False)


def read_jsonl(
  path: str | os.PathLike,
  label: str,
  skipping: Callable[[UserError], object] | None = None,
) -> Iterator[tuple[int, dict]]:
  """Yields the line numbers and objects of a file with a JSON object a line.

  With `skipping`, damaged lines are left out, such as a line that a kill cut
  short, and it is called with the error of each.
  """
  text = read_text(path, label, lenient=skipping is not None)
  # Not splitlines: U+2028 and the like may be part of a JSON string.
  for number, line in enumerate(text.split("\n"), start=1):
    if line.strip(" \t\r" + records.MARK):
      try:
        yield number, _object(line, f"cannot read {label} {path}", number)
      except UserError as error:
        if skipping is None:
          raise
        skipping(error)


def _object(text: str, start: str, line: int, once: bool = True) -> dict:
  """Parses a JSON object that begins on `line`; errors begin with `start`."""
  try:
    value = records.parse_json(text, once)
  except json.JSONDecodeError as error:
    line += error.lineno - 1
    raise UserError(f"{start}, line {line}: not JSON: {error.msg}") from error
  except ValueError as error:
    raise UserError(f"{start}, line {line}: {error}") from error
  if not isinstance(value, dict):
    raise UserError(f"{start}, line {line}: not a JSON object")
  return value


def read_csv(
  path: str | os.PathLike, label: str
) -> Iterator[tuple[int, dict[str, str]]]:
  """Yields line numbers and records of a CSV file, as `records.csv_records`."""
  text = records.without_marks(read_text(path, label))
  try:
    yield from records.csv_records(lambda: io.StringIO(text, ""), ())
  except ValueError as error:
    raise UserError(f"cannot read {label} {path}, {error}") from error


@contextlib.contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
  """Raises failures to write in its block as a `UserError` with the path."""
  try:
    yield
  except (UserError, BrokenPipeError):
    raise
  except Exception as error:  # libraries wrap a full disk in many types
    # A failed computation may be "UNAVAILABLE", too, but is no ValueError.
    words = _TENSORSTORES if isinstance(error, ValueError) else ()
    wrapped = any(word in str(error) for word in (FULL, *words))
    is_of_files = isinstance(error, file_failures()) or is_temporary(error)
    if not wrapped and not is_of_files:
      raise
    raise failure(f"cannot write {path}: {_why(error)}", error) from error


@contextlib.contextmanager
def reaching(path: str | os.PathLike) -> Iterator[None]:
  """Raises failures of a bucket in its block as a `UserError` with the path."""
  try:
    yield
  except file_failures() as error:
    if not (is_remote(path) and out_of_reach(error)):
      raise
    raise failure(f"cannot reach {path}: {_why(error)}", error) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[pathlib.Path]:
  """Yields a temporary path, which replaces `path` at the end of the block.

  The new file or folder appears whole or not at all, even if the machine goes
  down. A folder replaces nothing but an empty folder. Temporary paths that
  killed processes of this host left for `path` are removed.
  """
  target = pathlib.Path(path).absolute()
  start = f".{target.name}.{re.sub(r'[^a-zA-Z0-9]', '-', socket.gethostname())}"
  aside = target.with_name(f"{start}.{os.getpid()}.tmp")
  with writing(path):
    try:
      target.parent.mkdir(parents=True, exist_ok=True)
      for temporary in target.parent.glob(f"{glob.escape(start)}.*.tmp"):
        process = temporary.name.split(".")[-2]
        if temporary == aside or not _is_alive(process):
          _remove_path(temporary)
      yield aside
      # A rename may reach the disk before the file's content.
      for file in (aside, *aside.rglob("*")):
        if file.is_file():
          with file.open("rb") as opened:
            os.fsync(opened.fileno())
      aside.replace(target)
    finally:
      _remove_path(aside)


def _is_alive(process: str) -> bool:
  """Whether a process of this number runs on this host, or may."""
  try:
    os.kill(int(process), 0)
  except ProcessLookupError:
    return False
  except (ValueError, OverflowError, OSError):  # such as another user's
    return True
  return True


def _remove_path(path: pathlib.Path) -> None:
  """Removes a file or folder, if it is there."""
  shutil.rmtree(path, ignore_errors=True)
  path.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
  """Writes a file whole or not at all, on this machine or in a bucket."""
  if is_remote(path):  # an object appears when it is whole
    with writing(path):
      absolute_path(path).write_bytes(text.encode())
    return
  with replacing(path) as aside:
    aside.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike, value, indent: int = 2) -> None:
  """Writes a value as a JSON file, as `write_text` does."""
  write_text(path, json.dumps(value, indent=indent) + "\n")


def check_writable(path: str | os.PathLike, folder: bool = False) -> None:
  """Checks, before long work, that its file or folder can be written."""
  target = pathlib.Path(path).absolute()
  place = target if folder else target.parent
  with writing(path):
    if target.exists() and not folder and not target.is_file():
      raise OSError(errno.EINVAL, "not a regular file")
    nearest = next(p for p in (place, *place.parents) if p.exists())
    tempfile.TemporaryFile(dir=nearest).close()  # permissions may not suffice


@contextlib.contextmanager
def file_lock(
  path: str | os.PathLike, wait: bool = False, refuse: bool = True
) -> Iterator[bool]:
  """Holds a lock for the time of its block, and yields whether it does.

  If another process holds it, this raises a `UserError` that names the process,
  or waits, or, with `refuse=False`, yields False. The system releases the lock
  when its holder ends; the file stays. Buckets have no locks. Raises a
  UserError for a link, whose target it would overwrite.
  """
  if is_remote(path):
    yield True
    return
  with contextlib.ExitStack() as stack:
    with writing(path):
      # Unbuffered: else closing it would fail once more on a full disk.
      file = stack.enter_context(
        open(path, "a+b", buffering=0, opener=open_no_link)
      )
    try:
      fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
      if not refuse:
        yield False
        return
      file.seek(0)
      holder = file.read(300).decode(errors="replace").strip()
      raise UserError(
        f"{pathlib.Path(path).parent} is in use by"
        f" {holder or 'another process'}: wait for it, or end it"
      ) from error
    except OSError:  # a file system without locks
      pass
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    line = f"process {os.getpid()} on {socket.gethostname()} since {now}\n"
    with writing(path):
      file.truncate(0)
      file.write(line.encode())
    yield True


def open_no_link(path: str, flags: int) -> int:
  """Opens a file whose content may be replaced: no link, pipe or device."""
  try:
    # Nonblocking: else it would wait for the other end of a pipe.
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
  except OSError as error:
    if error.errno in (errno.ELOOP, errno.ENXIO):
      raise OSError(errno.EINVAL, _NO_FILE) from error
    raise
  if not stat.S_ISREG(os.fstat(number).st_mode):
    os.close(number)
    raise OSError(errno.EINVAL, _NO_FILE)
  return number


def file_failures() -> tuple[type[Exception], ...]:
  """Returns the errors of files and buckets; others are bugs.

  tensorstore raises a ValueError instead. `writing` knows it by its text.
  """
  if "gcsfs" not in sys.modules:
    return (OSError,)
  import aiohttp
  from gcsfs.retry import HttpError
  from google.api_core.exceptions import GoogleAPIError
  from google.auth.exceptions import GoogleAuthError

  # No class unites the errors of gcsfs and of the libraries below it.
  of_buckets = aiohttp.ClientError, HttpError, GoogleAPIError, GoogleAuthError
  return OSError, *of_buckets


def failure(message: str, error: Exception) -> UserError:
  """Returns the error with a message for an error of a file or a bucket."""
  return (Unavailable if is_temporary(error) else UserError)(message)


def out_of_reach(error: Exception) -> bool:
  """Whether a bucket, or the right to use it, is missing, not its content."""
  words = any(word in str(error) for word in (_NO_RIGHT, "Forbidden: "))
  is_of_buckets = isinstance(error, file_failures()[1:])
  return words or is_of_buckets or is_temporary(error)


def failure_reason(error: Exception) -> str:
  """Returns in one line why a file could not be read or written."""
  if getattr(error, "filename", None):
    return f"{error.strerror}: {error.filename}"
  return _why(error)


def _why(error: Exception) -> str:
  """The reason without the file, which the caller names."""
  text = " ".join(str(error).split())
  if "nonymous" in text:
    return "you are not logged in: gcloud auth application-default login"
  if isinstance(error, KeyError):
    text = f"it has no {text}"
  elif FULL in text and not text.startswith(FULL):
    text = FULL  # from the end of tensorstore's long message
  text = getattr(error, "strerror", None) or text or type(error).__name__
  return text[:300]
