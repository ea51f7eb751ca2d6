"""Where an evaluation's results go, and whether they are there already.

An evaluation writes a folder, summary.json last. Its `request` holds all that
the results depend on, the parameters and the data by their content: the same
request again, on whatever machine, finds them; another one is told.
"""

import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping

import jax
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from antlm_jax.training import checkpoint

SUMMARY = "summary.json"


def folder(loaded: checkpoint.Loaded, *names: str) -> pathlib.Path:
  """Returns RUN/evals/NAMES; here runs/RUN for a RUN that is in a bucket."""
  return loaded.evals.joinpath(*names)


def model_digest(loaded: checkpoint.Loaded) -> dict:
  """Returns a request's part that says which model it is of."""
  crc, params = 0, jax.device_get(loaded.params)
  for name in sorted(params):
    crc = zlib.crc32(np.ascontiguousarray(params[name]), crc)
  return {"step": loaded.step, "params_crc32": crc}


def data_digest(paths: Iterable[pathlib.Path]) -> dict[str, int]:
  """Returns a request's part that says what it reads: CRC-32 by file name.

  Raises:
    UserError: if a file cannot be read.
  """
  try:
    return {path.name: zlib.crc32(path.read_bytes()) for path in paths}
  except OSError as error:
    raise UserError(
      f"cannot read {error.filename}: {error.strerror}"
    ) from error


def finished(folder: pathlib.Path, request: dict) -> dict | None:
  """Returns the summary of a request that is done, or None.

  Raises:
    UserError: if the folder holds the results of another request.
  """
  try:
    summary = json.loads((folder / SUMMARY).read_text("utf-8"))
    before = summary["request"]
  except (OSError, ValueError, KeyError, TypeError):
    return None
  # As JSON gives it back: a tuple is a list there.
  wanted = json.loads(json.dumps(request))
  changed = [key for key in wanted if before.get(key) != wanted[key]]
  if changed:
    raise UserError(
      f"{folder / SUMMARY} is of another request ({', '.join(changed)}"
      " differ): give another --output, or --overwrite"
    )
  return summary


def check_writable(folder: pathlib.Path) -> None:
  """Fails before the work is done rather than after.

  Raises:
    UserError: if the folder cannot be made or written.
  """
  parents = (folder, *folder.absolute().parents)
  nearest = next(parent for parent in parents if parent.exists())
  if not nearest.is_dir() or not os.access(nearest, os.W_OK):
    raise UserError(f"cannot write to --output={folder}")


def write(folder: pathlib.Path, texts: Mapping[str, str], summary: dict):
  """Writes files by name, each whole or not at all, the summary last.

  Raises:
    UserError: if the folder cannot be written.
  """
  last = {SUMMARY: json.dumps(summary, indent=2) + "\n"}
  try:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**texts, **last}.items():
      files.write_text(folder / name, text)
  except OSError as error:
    raise UserError(f"cannot write to {folder}: {error.strerror}") from error
