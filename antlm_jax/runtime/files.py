"""Where files are, on this machine or in a bucket, and writing them whole.

A path that begins with gs:// is a place in a bucket of Google Cloud Storage.
`path` makes it an `epath.Path`, which is used like a `pathlib.Path`.
"""

import functools
import importlib.util
import logging
import os
import pathlib
import sys

import fsspec
from etils import epath

from antlm_jax.errors import UserError

_BUCKETS = "gs://"
# How tensorstore names what is no fault of the files.
_OUT_OF_REACH = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "PERMISSION_DENIED")


def is_remote(path: str | os.PathLike) -> bool:
  """Whether a path is in a bucket."""
  return os.fspath(path).startswith(_BUCKETS)


def path(where: str | os.PathLike) -> pathlib.Path | epath.Path:
  """Returns an absolute path, on this machine or in a bucket.

  Raises:
    UserError: if it is in a bucket, and what reads buckets is not installed.
  """
  if not is_remote(where):
    return pathlib.Path(where).absolute()
  _set_up_buckets()
  return epath.Path(where)


@functools.cache
def _set_up_buckets() -> None:
  if importlib.util.find_spec("gcsfs") is None:
    raise UserError(
      "gs:// paths need gcsfs, which is missing: pip install gcsfs"
    )
  # It would not see what tensorstore and other processes write.
  fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
  # They log errors that are raised as well.
  for name in ("gcsfs", "google.auth"):
    logging.getLogger(name).setLevel(logging.CRITICAL)


def write_text(path: str | os.PathLike, text: str) -> None:
  """Writes a file at once, or not at all: aside first, then in its place."""
  if is_remote(path):  # an object is there when it is whole
    epath.Path(path).write_text(text)
    return
  path = pathlib.Path(path)
  aside = path.with_name(path.name + ".tmp")
  aside.write_text(text, encoding="utf-8")
  aside.replace(path)


def failures() -> tuple[type[Exception], ...]:
  """Returns what reading or writing files may raise; buckets raise more."""
  return (OSError, ValueError, *_clients_failures())


def _clients_failures() -> tuple[type[Exception], ...]:
  """The errors of gcsfs, and of those below it, which no class unites."""
  if "gcsfs" not in sys.modules:
    return ()
  import aiohttp
  from gcsfs.retry import HttpError
  from google.api_core.exceptions import GoogleAPIError
  from google.auth.exceptions import GoogleAuthError

  return aiohttp.ClientError, HttpError, GoogleAPIError, GoogleAuthError


def out_of_reach(error: Exception) -> bool:
  """Whether a bucket failed, or a right to it, rather than what is there."""
  return isinstance(error, (*_clients_failures(), TimeoutError)) or any(
    word in str(error) for word in (*_OUT_OF_REACH, "Forbidden: ")
  )


def reason(error: Exception) -> str:
  """Returns why a file could not be read or written, in a line."""
  text = " ".join(str(error).split())
  if getattr(error, "strerror", None):
    text = f"{error.strerror}: {error.filename}"
  if "nonymous" in text:
    return "you are not logged in: gcloud auth application-default login"
  return (text or type(error).__name__)[:300]
