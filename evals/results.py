"""Folders of an evaluation's results, which a repeated request reuses.

An evaluation writes a folder, summary.json last. Its `request` holds all that
the results depend on, with digests of the parameters and the data. Repeating a
request, on any machine, reuses its results. Another request for the same folder
is an error.
"""

import argparse
import contextlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence

from antlm_jax import cli, settings, terminal
from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from antlm_jax.training.checkpoint import Checkpoint, json_checksum

SUMMARY = "summary.json"
ITEMS = "items.jsonl"  # each item of an evaluation, with its scores


def model_digest(model: Checkpoint) -> dict:
  """Returns the part of a request that identifies the model by its weights.

  The head of a model that was fine-tuned is apart from them.
  """
  digests = {"params_digest": model.digest}
  if "head" in model.sums:
    digests["head_digest"] = json_checksum(model.sums["head"])
  return {"step": model.step, **digests}


def data_digest(paths: Iterable[pathlib.Path]) -> dict[str, int]:
  """Returns the part of a request that identifies its files: their CRC-32.

  Raises:
    UserError: if a file cannot be read.
  """
  paths = [*paths]
  digest = {}
  for path in paths:
    try:
      digest[_short_path(path, paths)] = zlib.crc32(path.read_bytes())
    except OSError as error:
      raise UserError(f"cannot read {path}: {error.strerror}") from error
  return digest


def _short_path(path: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
  """Returns the shortest end of a path that no other of the paths has."""
  parts = path.parts
  for count in range(1, len(parts)):
    if sum(p.parts[-count:] == parts[-count:] for p in set(paths)) == 1:
      return "/".join(parts[-count:])
  return str(path)


def finished(folder: pathlib.Path, request: dict) -> dict | None:
  """Returns the summary of a request that was performed before, or None.

  Args:
    folder: Folder of the results.
    request: All that the results depend on.

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
  request = json.loads(json.dumps(request))  # tuples become lists
  if changed := [k for k in request if before.get(k) != request[k]]:
    # Settings such as limit choose other items of the same data.
    changed = [k for k in changed if k != "data"] or changed
    raise UserError(
      f"{folder / SUMMARY} is of another request ({', '.join(changed)}"
      " differ): give another --output, or --overwrite (in Python, output or"
      " overwrite=True)"
    )
  return summary


def write_results(
  folder: pathlib.Path, texts: Mapping[str, str], summary: dict
):
  """Writes files by name, all of them or none, the summary last.

  Raises:
    UserError: if they cannot be written.
  """
  last = {SUMMARY: json.dumps(summary, indent=2) + "\n"}
  with contextlib.ExitStack() as stack:
    # Left in reverse order: each is aside until all of them are written.
    for name, text in (last | dict(texts)).items():
      aside = stack.enter_context(files.replacing(folder / name))
      aside.write_text(text, encoding="utf-8")


def output_argument(*endings: str, required: bool = False) -> settings.Field:
  """Describes an argument `output_argument`, a file with one of some endings.

  `required` says whether a command line must give it.
  """

  def read(path: str) -> str:
    if not path.endswith(endings):
      raise argparse.ArgumentTypeError(
        f"{path} ends in none of {', '.join(endings)}"
      )
    return cli.local_path(path)

  help = f"Path to a file for the results: {', '.join(endings)}"
  keywords = {"required": True} if required else {}
  return settings.argument(help=help, read=read, **keywords)


def check_output(
  output: files.Path | None, source: files.Path | Iterable
) -> None:
  """Checks, before long work, that results can be written to a file.

  Raises a UserError if it is the file of the texts, `source`, as well.
  """
  if output is None:
    return
  files.check_writable(output)
  is_file = isinstance(source, str | os.PathLike) and os.path.exists(source)
  if is_file and os.path.exists(output) and os.path.samefile(source, output):
    raise UserError(f"{output} is the file of the texts: give another output")


def json_line(row: Mapping[str, object], encoding: str = "utf-8") -> str:
  """Returns a record as JSON in a line, with letters such as ö.

  All is escaped if the encoding or a terminal would change it, so that it stays
  JSON.
  """
  line = json.dumps(row, ensure_ascii=False)
  try:
    line.encode(encoding)
  except UnicodeEncodeError:
    return json.dumps(row)
  # U+2028 and the like also end a line.
  is_plain = len(line.splitlines()) == 1 and terminal.visible(line) == line
  return line if is_plain else json.dumps(row)


def write_rows(path: str, rows: Sequence[Mapping[str, object]]) -> None:
  """Writes a file of records, .jsonl or .parquet, whole or not at all."""
  with files.replacing(path) as aside:
    if path.endswith(".parquet"):
      import pyarrow  # slow to import
      from pyarrow import parquet

      parquet.write_table(pyarrow.Table.from_pylist(list(rows)), aside)
    else:
      aside.write_text("".join(json_line(row) + "\n" for row in rows), "utf-8")
