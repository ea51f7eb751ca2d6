"""Files of documents of any kind, and the datasets of Hugging Face's hub."""

import contextlib
import csv
import dataclasses
import functools
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from antlm_jax.errors import UserError
from antlm_jax.runtime import files

HUB = "hf://"
_READ = 256  # records that are read at once
_PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
# Characters of a piece: of those the tokenizers library reads 256 ahead.
_PIECE = 1 << 18
_BLOCK = 1 << 20  # characters that are read at once
# WikiText's ` = Article = ` and ` = = Section = = `, BabyLM's with three signs.
_HEADING = re.compile(r"\s*(=(?: =)*) [^=\s].* \1\s*")


class Piece(NamedTuple):
  """A document, or a part of one that is too long to be in memory at once."""

  text: str  # stripped of outer space, and not empty
  begins: bool = True  # a document; it goes on with the one before otherwise


@dataclasses.dataclass(frozen=True)
class Rule:
  """Where a document ends."""

  length: float  # characters after which the next line end ends it
  # Whether a blank line ends it and, from the first heading on, no longer that
  # or the length but the next heading of that level, or of a higher one.
  layout: bool = False


RULES = {
  "auto": Rule(1 << 16, layout=True),
  "line": Rule(1),
  "file": Rule(math.inf),
}


def _plain(file: BinaryIO, rule: Rule) -> Iterator[Piece]:
  """Yields a text's nonblank documents, in pieces if they are long; closes it.

  Lines end as on any system: \\n, \\r\\n or \\r.

  Raises:
    ValueError: It is not UTF-8.
  """
  begins = True
  for text, ends in _split(_lines(file), rule):
    if text := text.strip():
      yield Piece(text, begins)
      begins = False
    begins |= ends


def _split(lines: Iterable[str], rule: Rule) -> Iterator[tuple[str, bool]]:
  """Yields pieces, blank ones as well, and whether a document ends there."""
  held, length = [], 0
  level = math.inf  # of the headings that begin documents: the highest so far
  for line in lines:
    heading = rule.layout and _HEADING.fullmatch(line)
    if heading and len(heading[1]) <= level:
      level = len(heading[1])
      yield "".join(held), True
      held, length = [], 0
    elif length + len(line) > _PIECE:
      yield "".join(held), False
      held, length = [], 0
    held.append(line)
    length += len(line)
    over = length >= rule.length or (rule.layout and not line.strip())
    if over and line.endswith("\n") and level == math.inf:
      yield "".join(held), True
      held, length = [], 0
  yield "".join(held), True


def _lines(file: BinaryIO) -> Iterator[str]:
  """Yields lines with their ends; of those over `_PIECE`, pieces."""
  left, block = "", "\0"
  with io.TextIOWrapper(file, "utf-8-sig") as text:  # -sig: without its mark
    while block:
      try:
        # Not by its lines, each of which it reads whole, however long it is.
        block = text.read(_BLOCK)
      except UnicodeDecodeError as error:
        at = file.tell() - len(error.object) + error.start
        raise ValueError(
          f"not UTF-8: {error.reason} at byte {at}; convert it (iconv -t UTF-8)"
        ) from error
      *lines, left = (left + block).split("\n")
      for line in lines:
        yield from _cut(line + "\n")
      *parts, left = _cut(left)
      yield from parts
  yield left


def _cut(text: str) -> Iterator[str]:
  """Cuts what is too long for a piece, between two words if it has any."""
  begin = 0
  while len(text) - begin > _PIECE:
    end = text.rfind(" ", begin, begin + _PIECE) + 1 or begin + _PIECE
    yield text[begin:end]
    begin = end
  yield text[begin:]


# ------------------------------------------------------------ files of any kind


def kind(source: str) -> str | None:
  """Returns the kind of a file or dataset: its ending; None for others."""
  if source.startswith(HUB):
    return HUB
  name, ending = os.path.splitext(os.path.basename(source).lower())
  if ending in _PACKED:
    ending = os.path.splitext(name)[1]
  return ending if ending in _READERS else None


def endings() -> str:
  """Lists the endings of the kinds that are known."""
  known = " ".join(ending for ending in _READERS if ending != HUB)
  return f"{known}, or in one of these and {' '.join(_PACKED)}"


def pieces(source: str, rule: Rule, column: str) -> Iterator[Piece]:
  """Yields documents: plain text's by `rule`, of a record its `column`.

  Raises:
    UserError: It cannot be read, or a record has no text there.
  """
  if (kind(source) or ".txt") in _TEXT:
    with _reading(source), _open(source) as file:
      yield from _plain(file, rule)
    return
  for where, (value,) in records(source, {column: "column"}):
    with _reading(source):
      document = _document(value, column, where)
    for index, part in enumerate(_cut(document)):
      if part := part.strip():
        yield Piece(part, begins=not index)


def records(
  source: str, columns: Mapping[str, str]
) -> Iterator[tuple[str, list]]:
  """Yields where each record of a file or a dataset is, and its values.

  `columns` are what is read, and the argument that chooses it, for the error.

  Raises:
    UserError: It cannot be read, has no records, or lacks a column.
  """
  if (reader := _READERS.get(kind(source))) is None:
    known = " ".join(e for e in _READERS if e not in (*_TEXT, HUB))
    raise UserError(f"{source} holds no records; those are {known}")
  with _reading(source):
    for where, record in reader(source, columns):
      for column, argument in columns.items():
        if not isinstance(record, dict):
          raise ValueError(f"{where} is no object with a {column!r}")
        if column not in record:
          has = ", ".join(map(repr, record))
          raise ValueError(
            f"{where} has no column {column!r} but {has}; choose one with"
            f" --{argument}"
          )
      yield where, [record[column] for column in columns]


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
  try:
    yield
  except (OSError, ValueError, NotImplementedError, csv.Error) as error:
    raise UserError(f"cannot read {source}: {files.reason(error)}") from error


def _document(value: Any, column: str, where: str) -> str:
  """Returns the text of a record, as that of a file would be."""
  if not isinstance(value, str | None):
    raise ValueError(f"{where}: {column!r} is no text but {value!r:.60}")
  value = (value or "").replace("\r\n", "\n").replace("\r", "\n").strip()
  if not value.isascii():
    value.encode("utf-8")  # ValueError: half of a pair of surrogates
  return value


# ------------------------------------------------------------------- the kinds


def _open(path: str) -> BinaryIO:
  """Opens a file to read what is packed in it."""
  ending = os.path.splitext(path)[1].lower()
  if ending not in _PACKED:
    return open(path, "rb")
  import pyarrow  # slow to import, as all of these are

  return io.BufferedReader(pyarrow.input_stream(path, _PACKED[ending]))


def _json_lines(path: str, columns: Collection) -> Iterator[tuple[str, Any]]:
  with _open(path) as file:
    for number, line in enumerate(file, start=1):
      if line.strip():
        where = f"line {number}"
        try:
          yield where, json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
          raise ValueError(f"{where} is not JSON: {error}") from error


def _table(
  path: str, columns: Collection, **dialect
) -> Iterator[tuple[str, Any]]:
  csv.field_size_limit(2**31 - 1)
  with io.TextIOWrapper(_open(path), "utf-8-sig", newline="") as file:
    # Strict, since a stray quote would join what follows it to one text.
    rows = csv.DictReader(file, strict=True, **dialect)
    try:
      for row in rows:
        yield f"line {rows.line_num}", row
    except csv.Error as error:
      raise ValueError(f"line {rows.line_num}: {error}") from error


def _parquet(path: str, columns: Collection) -> Iterator[tuple[str, Any]]:
  from pyarrow import parquet

  # Through a buffer: else a column of a row group is read at once.
  with parquet.ParquetFile(path, buffer_size=1 << 20) as file:
    names = file.schema_arrow.names
    only = list(columns) if {*columns} <= {*names} else names
    yield from _rows(file.iter_batches(_READ, columns=only))


def _of_hub(source: str, columns: Collection) -> Iterator[tuple[str, Any]]:
  name, config, split = source.removeprefix(HUB).split(":")
  found = _load(name, config)
  if split not in found:
    raise UserError(f"{HUB}{name} has no split {split} but {', '.join(found)}")
  dataset = found[split]
  if {*columns} <= {*dataset.column_names}:
    dataset = dataset.select_columns([*columns])
  yield from _rows(dataset.with_format("arrow").iter(_READ))


def _rows(batches: Iterable) -> Iterator[tuple[str, Any]]:
  number = 0
  for batch in batches:
    for row in batch.to_pylist():
      number += 1
      yield f"row {number}", row


# Of plain text; the last ones by the names that BabyLM and WikiText have.
_TEXT = (
  *(".txt", ".text", ".md", ".rst"),
  *(".train", ".dev", ".valid", ".test", ".tokens", ".raw"),
)
_READERS: dict[str, Callable[[str, Collection], Iterator[tuple[str, Any]]]] = {
  **dict.fromkeys(_TEXT),
  ".jsonl": _json_lines,
  ".ndjson": _json_lines,
  ".parquet": _parquet,
  ".csv": _table,
  ".tsv": functools.partial(_table, delimiter="\t"),
  HUB: _of_hub,
}


# ----------------------------------------------------------- the hub's datasets


def splits_of(source: str) -> list[str]:
  """Returns `hf://NAME:CONFIG:SPLIT` for the splits of `hf://NAME[:CONFIG]`.

  Raises:
    UserError: There is no such dataset, or nothing to read it with.
  """
  name, config, split = (source.removeprefix(HUB) + "::").split(":")[:3]
  found = [split] if split else _load(name, config)
  return [f"{HUB}{name}:{config}:{split}" for split in found]


@functools.cache
def _load(name: str, config: str):
  """Returns the splits of a dataset by name, from the hub or from here."""
  try:
    import datasets
  except ImportError as error:
    raise UserError(
      f"{HUB}{name} needs datasets, which is missing: pip install datasets"
    ) from error
  if not sys.stderr.isatty():
    datasets.disable_progress_bars()
  try:
    return datasets.load_dataset(name, config or None)
  except Exception as error:  # it raises many kinds, and those of the hub
    raise UserError(
      f"cannot load {HUB}{name}: {files.reason(error)}"
    ) from error
