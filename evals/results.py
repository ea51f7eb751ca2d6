"""Where an evaluation's results go, and whether they are there already.

An evaluation writes a folder, summary.json last. Its `request` holds all that
the results depend on, the parameters and the data by their content: the same
request again, on whatever machine, finds them; another one is told.
"""

import contextlib
import json
import pathlib
import zlib
from collections.abc import Iterable, Mapping

from antlm_jax.errors import UserError
from antlm_jax.inference.model import Loaded
from antlm_jax.runtime import files

SUMMARY = "summary.json"


def model_digest(loaded: Loaded) -> dict:
  """Returns a request's part that says which model it is of, by content."""
  return {"step": loaded.step, "params_digest": loaded.digest}


def data_digest(paths: Iterable[pathlib.Path]) -> dict[str, int]:
  """Returns a request's part that says what it reads: CRC-32 by file name.

  Raises:
    UserError: if a file cannot be read.
  """
  digest = {}
  for path in paths:
    try:
      digest[path.name] = zlib.crc32(path.read_bytes())
    except OSError as error:
      raise UserError(f"cannot read {path}: {error.strerror}") from error
  return digest


def finished(folder: pathlib.Path, request: dict) -> dict | None:
  """Returns the summary of a request that is done, or None.

  Args:
    folder: Where its results go.
    request: All that they depend on.

  Raises:
    UserError: if the folder holds the results of another request.
  """
  try:
    summary = files.read_json(folder / SUMMARY, "the summary")
  except UserError:
    return None
  before = summary.get("request")
  if not isinstance(before, dict):
    return None
  if "params_crc32" in json.dumps(before):  # the digest of earlier versions
    return None
  wanted = json.loads(json.dumps(request))  # a tuple is a list there
  if changed := [k for k in wanted if before.get(k) != wanted[k]]:
    raise UserError(
      f"{folder / SUMMARY} is of another request ({', '.join(changed)}"
      " differ): give another --output, or --overwrite"
    )
  return summary


def write(folder: pathlib.Path, texts: Mapping[str, str], summary: dict):
  """Writes files by name, all of them or none; the summary takes place last.

  Raises:
    UserError: if they cannot be written.
  """
  last = {SUMMARY: json.dumps(summary, indent=2) + "\n"}
  with contextlib.ExitStack() as stack:
    # Left in reverse order: each is aside until all of them are written.
    for name, text in (last | dict(texts)).items():
      aside = stack.enter_context(files.replacing(folder / name))
      aside.write_text(text, encoding="utf-8")
