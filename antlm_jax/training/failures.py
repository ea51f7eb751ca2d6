"""What goes wrong with a checkpoint's files, told in a line."""

import contextlib
import functools
import os
import pathlib
import shutil
import sys

import jax

from antlm_jax.errors import UserError
from antlm_jax.runtime import files

_SPARE = 1 << 20  # bytes for what orbax writes beside the arrays
# Of errors that orbax and tensorstore raise for files that are not as written;
# most go on for hundreds of lines.
_DAMAGED = ("TensorStore", "DATA_LOSS", "does not exist", "not found")


class Unreadable(UserError):
  """A checkpoint is there, but cannot be read, or is not what was saved."""


@contextlib.contextmanager
def readable(part: pathlib.Path):
  """Makes an error in its block one that names a checkpoint's part."""
  _hush()
  try:
    yield
  except (UserError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:  # orbax raises it bare for a cut file
    # A checkpoint that is out of reach now must not be passed over.
    away, why = files.out_of_reach(error), files.reason(error)
    if not away and any(word in str(error) for word in _DAMAGED):
      why = "its files are damaged, or not all there"
    raise (UserError if away else Unreadable)(
      f"cannot read the checkpoint {part.parent}: {part.name}: {why}"
    ) from error


@functools.cache
def _hush() -> None:
  """Leaves out what Python would print beside the error of a failed read.

  Where one array cannot be read, orbax gives up on the others in the middle:
  their coroutines are dropped, and tensorstore's threads, which come to their
  end later, find the event loop closed.
  """
  before = sys.unraisablehook

  def hook(found) -> None:
    name = getattr(found.object, "__qualname__", "")
    closed = str(found.exc_value) == "Event loop is closed"
    if not closed and "_read_array_index" not in name:
      before(found)

  sys.unraisablehook = hook


def check_space(folder: pathlib.Path, arrays) -> None:
  """Fails before anything is written rather than in the middle.

  Raises:
    OSError: if the folder cannot be written, or the arrays do not fit.
  """
  if files.is_remote(folder):
    return
  needed = sum(array.nbytes for array in jax.tree.leaves(arrays)) + _SPARE
  # A process that failed later would be waited for by the others, for long.
  if not os.access(folder, os.W_OK):
    raise OSError("it cannot be written")
  free = shutil.disk_usage(folder).free
  if free < needed:
    raise OSError(
      f"{files.FULL} ({needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free)"
    )
