"""Reads documents: from text files, files of records, and datasets of a hub.

A reader of `READERS` takes a path and the names of the columns that are needed.
It yields records, each with its place in the file, for errors:

    @READERS.register(".notes")
    def read(path, columns):
      for number, text in enumerate(open_file(path), start=1):
        yield f"line {number}", {"text": text.decode()}

It raises a ValueError for a file that it cannot read. The readers of jsonl,
parquet and datasets also take a `part`, as `read_documents` does.
"""

import codecs
import collections
import contextlib
import contextvars
import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import mmap
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from antlm_jax import units
from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from antlm_jax.runtime import records as parsing
from antlm_jax.settings import Registry

HUB = "hf://"
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_COMPRESSED_INSIDE = (".parquet",)  # kinds that are never compressed again
_BATCH = 256  # records read at once
_BLOCK = 1 << 20  # bytes of text read at once
_LARGE = 1 << 20  # bytes of text of which one document may have too much
_BATCH_BYTES = 1 << 28  # of parquet read at once
# Largest unpacked size of a packed file: these bytes, or this multiple of its
# packed size. Text is packed to a tenth at most, and few bytes can fill a disk.
_SMALL = 1 << 28
_RATIO = 1000
# Longest piece, in characters. The tokenizers library reads 256 texts ahead.
_PIECE = 1 << 18
# A line end; that of Windows may be \r\r\n.
_LINE_END = re.compile("\r*\n|\r")
# WikiText's ` = Article = ` and ` = = Section = = `, BabyLM's with three signs.
# The number is how often a sign may be repeated.
_HEADING = r"\s*(=(?: =){0,%d}) [^=\s].* \1\s*"
_ANY_HEADING = re.compile(_HEADING % 9)
# WikiExtractor's lines around an article. Its files are called wiki_00.
_ELEMENT = r"<doc id=.*>\s*"
_ELEMENT_LINE = re.compile(rf"{_ELEMENT}|</doc>\s*")
_WIKI_EXTRACTOR = re.compile(r"wiki_\d+")

Records = Iterator[tuple[str, Any]]  # the place and content of each
# By ending, or `HUB`; None for plain text.
READERS = Registry[Callable[[str, Collection[str]], Records] | None]("reader")
_PLAIN = ".txt .text .md .rst"
_PLAIN += " .train .dev .valid .test .tokens .raw"  # BabyLM's and WikiText's
READERS |= dict.fromkeys(_PLAIN.split())
TABLES = ".csv", ".tsv"  # their fields are text alone
_COLUMNAR = ".parquet", HUB  # readers of these read single columns


# Files that `save_to_disk` of datasets writes, of several splits or of a split.
_SAVED = "dataset_dict.json", "state.json"

# Part of a source, as (index, count): one of `count` parts of about the same
# size, in order.
WHOLE = 0, 1

# Whether datasets of the Hub are streamed.
_STREAMED = contextvars.ContextVar("streamed", default=False)

# Counts of the records, of the `null` and `blank` records, which have no text,
# of `blank lines`, of `separators`, and of documents by their ends. It also has
# a count for each source without text.
Tally = collections.Counter[str]
_DOCUMENTS = "documents: "  # how the names of documents' ends begin
_NO_TEXT = "no text: "  # how the names of sources without text begin


class Document(NamedTuple):
  """A document, or a piece of a document that is too long for memory."""

  text: str  # not blank, as `records.stripped` returns it
  begins: bool = True  # False if it continues the document before it
  before: str = "\n"  # white space between it and the piece that it continues


@dataclasses.dataclass(frozen=True)
class Rule:
  """Where a document of plain text ends."""

  name: str  # predicate of such documents, for messages
  length: float  # characters after which the next line end ends it
  # If True, a blank line ends it as well, unless its file has articles.
  blank_lines: bool = False
  # Regular expression of the lines that begin an article. From the first
  # heading or article on, a document ends only there, or at an element's end.
  article: str = ""
  elements: bool = False  # whether the articles are <doc> elements
  separator: str = ""  # text that ends a document in any file, also in a record

  def may_end_at(self, line: str | bytes, length: int) -> bool:
    """Whether a line ends a document of this length, without articles."""
    return length >= self.length or (self.blank_lines and not line.strip())


RULES = {
  "auto": Rule("end at blank lines or after 64 KiB", 1 << 16, blank_lines=True),
  "line": Rule("are lines", 1),
  "file": Rule("are files", math.inf),
}
_RECORD = "are records"
_AT_HEADINGS = "begin at headings"


def rule_of_separator(separator: str) -> Rule:
  """Returns the rule of documents that end at a text alone."""
  separator = separator.replace("\r\n", "\n")
  return Rule(f"end at {separator!r}", math.inf, separator=separator)


def kind(source: str) -> str | None:
  """Returns a file's ending, or `HUB` for a dataset; None if unknown."""
  if source.startswith(HUB):
    return HUB
  name, ending = os.path.splitext(os.path.basename(source).lower())
  if ending in COMPRESSED:
    name, ending = os.path.splitext(name)
    if ending in _COMPRESSED_INSIDE:
      return None
  if not ending and _WIKI_EXTRACTOR.fullmatch(name):
    return ".txt"
  return ending if ending in READERS else None


def kind_of_file(path: str) -> str:
  """Returns the kind of a file that is given by its path.

  Text often has no ending. Raises a UserError if the ending is unknown.
  """
  if (file_kind := kind(path)) is not None:
    return file_kind
  if "." in os.path.basename(path):
    raise UserError(
      f"{path} is of no known kind; give files that end in {endings()}"
    )
  return ".txt"


def endings() -> str:
  """Lists the endings of the files that can be read."""
  readable = " ".join(ending for ending in READERS if ending != HUB)
  inside = " ".join(_COMPRESSED_INSIDE)
  packed = " ".join(COMPRESSED)
  return f"{readable}, or one of these (but {inside}) and {packed}"


def extent(source: str, rule: Rule) -> tuple[int, int]:
  """Returns a source's bytes, and the most parts that it divides into.

  Plain text (unless a file is a document) and jsonl divide anywhere, parquet
  between row groups, and a dataset between rows. Others are one part.
  """
  file_kind = kind(source)
  if file_kind == HUB:
    dataset = _dataset(source)
    return dataset.data.nbytes, max(1, len(dataset))
  size = os.path.getsize(source)
  if file_kind == ".parquet":
    from pyarrow import parquet  # slow to import

    with _reading_source(source), parquet.ParquetFile(source) as file:
      return size, max(1, file.num_row_groups)
  can_end = rule.length < math.inf or rule.separator
  plain = READERS.get(file_kind) is None and can_end
  packed = os.path.splitext(source)[1].lower() in COMPRESSED
  anywhere = (plain or file_kind in (".jsonl", ".ndjson")) and not packed
  return size, max(1, size) if anywhere else 1


def read_documents(
  source: str,
  rule: Rule,
  column: str,
  part: tuple[int, int] = WHOLE,
  tally: Tally | None = None,
) -> Iterator[Document]:
  """Yields the documents of a file, or of a dataset `hf://NAME:CONFIG:SPLIT`.

  `rule` is for plain text; its separator is for all. The `column` of a record
  holds its text. `part` is (index, count): only one of `count` parts of the
  source is read. The parts together have all documents. `tally` counts the
  documents by their ends, and the records, also those without text, which are
  no documents. It names a whole source without text. If each line is a
  document, it also counts blank lines.

  Raises:
    UserError: The source cannot be read, or a record has no text.
  """
  begins = True  # whether the next text begins a document
  space = ""  # white space after the last text
  has_text = False
  with _reading_source(source):
    tally = Tally() if tally is None else tally
    rule = _rule_of_file(source, rule)
    pieces = _text_pieces(source, rule, column, part, tally)
    if rule.separator:
      pieces = _separated(pieces, rule.separator, tally)
    for text, ends in pieces:
      if content := text.strip():
        has_text = True
        if begins:
          tally[_DOCUMENTS + rule.name] += 1
          yield Document(parsing.stripped(text))
        else:
          space += text[: len(text) - len(text.lstrip())]
          yield Document(content, begins=False, before=space)
        space = text[len(text.rstrip()) :]
        begins = False
      elif not begins:
        space += text
      elif text and ends:
        tally["blank lines"] += 1
      begins |= ends
    if not has_text and part == WHOLE:
      tally[_NO_TEXT + source] += 1


def whole_documents(pieces: Iterable[Document]) -> Iterator[str]:
  """Yields whole documents, also those that are read in pieces."""
  document = []
  for text, begins, before in pieces:
    if begins and document:
      yield "".join(document)
      document = []
    document += [before, text] if document else [text]
  if document:
    yield "".join(document)


def left_out(tally: Tally) -> str:
  """Says how many records, and which sources, have no text; "" if all have."""
  facts = []
  if none := tally["null"] + tally["blank"]:
    facts.append(
      f"{none:,} of {tally['records']:,} records have no text and are left out"
      f" ({tally['blank']:,} blank, {tally['null']:,} null)"
    )
  names = [name for name in tally if name.startswith(_NO_TEXT)]
  if names:
    sources = (name.removeprefix(_NO_TEXT) for name in names)
    file_names = [source.rpartition("/")[2] or source for source in sources]
    facts.append(f"without text: {parsing.listed(file_names)}")
  return "; ".join(facts)


def document_ends(tally: Tally) -> str:
  """Returns a line about the number of documents, by their ends."""
  counts = [
    f"{count:,} {name.removeprefix(_DOCUMENTS)}"
    for name, count in tally.most_common()
    if name.startswith(_DOCUMENTS)
  ]
  return _DOCUMENTS + ", ".join(counts)


def warning_of_headings(tally: Tally, sizes: np.ndarray) -> str:
  """Warns if a document has most of the text because no heading follows it.

  Another kind of text after the last article would be a part of that article.
  `sizes` are the documents' bytes, int64 `[n]`. Returns "" if none is so large.
  """
  share = sizes.max() / sizes.sum()
  # A few books may differ in size. Of many articles, none has a tenth.
  most = 0.1 if len(sizes) > 100 else 0.5
  large = len(sizes) > 1 and sizes.sum() > _LARGE and share > most
  if not large or not tally[_DOCUMENTS + _AT_HEADINGS]:
    return ""
  return (
    f"warning: one document has {share:.1%} of the text to train on, because no"
    " heading follows it: put text without headings in files of its own, or"
    " give --documents=line"
  )


def _rule_of_file(source: str, rule: Rule) -> Rule:
  """Returns the rule of one file, of which the first MiB is read.

  A file has articles if it begins with a heading, or has two of a level and one
  in 64 KiB, or begins as WikiExtractor's. A document ends before each heading
  of the articles' level or above. Raises a ValueError if the file's first two
  lines are JSON records, unless the rule has a separator.
  """
  if READERS.get(kind(source)) is not None:
    return rule if rule.separator else dataclasses.replace(rule, name=_RECORD)
  if rule.separator:
    return rule
  with open_file(source) as file:
    head = file.read(_BLOCK).decode("utf-8", errors="replace")
  # Not splitlines: U+2028 and the like may be part of a line.
  lines = _LINE_END.split(parsing.without_marks(head))
  first_lines = [*itertools.islice(filter(str.strip, lines), 2)]
  if first_lines and all(map(_is_json_record, first_lines)):
    raise ValueError(
      "its lines are JSON records: name the file .jsonl to read their texts, or"
      " give a separator to read it as it is"
    )
  if not rule.blank_lines:
    return rule
  first = first_lines[0] if first_lines else ""
  if re.fullmatch(_ELEMENT, first):
    name = "are <doc> elements"
    return dataclasses.replace(rule, name=name, article=_ELEMENT, elements=True)
  headings = filter(None, map(_ANY_HEADING.fullmatch, lines))
  counts = collections.Counter(len(heading[1]) for heading in headings)
  least = max(2, len(head) >> 16)
  levels = [level for level, count in counts.items() if count >= least]
  if heading := _ANY_HEADING.fullmatch(first):
    levels.append(len(heading[1]))
  if not levels:
    return rule
  article = _HEADING % (min(levels) // 2)
  return dataclasses.replace(rule, name=_AT_HEADINGS, article=article)


def _is_json_record(line: str) -> bool:
  """Whether a line is a JSON object with a text in it."""
  record = _json_object(line) or {}
  return any(isinstance(value, str) for value in record.values())


def _json_object(line: str | bytes) -> dict | None:
  """Returns the JSON object that is a whole line, or None."""
  try:
    value = json.loads(line)
  except (ValueError, RecursionError):
    return None
  return value if isinstance(value, dict) else None


def _separated(
  pieces: Iterable[tuple[str, bool]], separator: str, tally: Tally
) -> Iterator[tuple[str, bool]]:
  """Ends documents at a separator too.

  It yields pieces as it takes them: a text, and whether it ends its document. A
  separator may begin in one piece and end in the next.
  """
  rest = ""
  for text, ends in pieces:
    *documents, rest = (rest + text).split(separator)
    tally["separators"] += len(documents)
    for document in documents:
      yield from _document_pieces(document)
    if ends:
      yield from _document_pieces(rest)
      rest = ""
    # The last piece of the rest stays: its end may begin a separator.
    while len(rest) > 2 * _PIECE:
      piece = next(_cut_text(rest))
      yield piece, False
      rest = rest[len(piece) :]


def _text_pieces(
  source: str, rule: Rule, column: str, part: tuple[int, int], tally: Tally
) -> Iterator[tuple[str, bool]]:
  """Yields all pieces, even blank, and whether each ends its document."""
  if READERS.get(kind(source)) is None:  # also without an ending
    with open_file(source) as file:
      begin = 0
      end = None
      if part != WHOLE:
        begin, end = _byte_range(file, part, rule)
      yield from _divide_lines(_file_lines(file, begin, end), rule)
    return
  for place, (value,) in read_source_records(source, {column: "column"}, part):
    if not isinstance(value, str | None):
      raise ValueError(f"{place}: {column!r} is no text but {value!r:.60}")
    text = parsing.stripped(parsing.plain_lines(value or ""))
    if not parsing.writable(text):  # of a reader of the user's
      raise ValueError(f"{place}: {parsing.HALF}")
    tally["records"] += 1
    if not text:
      tally["null" if value is None else "blank"] += 1
    yield from _document_pieces(text)


def _document_pieces(document: str) -> Iterator[tuple[str, bool]]:
  """Cuts a document; yields each piece, and whether it is the last."""
  *pieces, last = _cut_text(document)
  yield from ((piece, False) for piece in pieces)
  yield last, True


def read_source_records(
  source: str, columns: Mapping[str, str], part: tuple[int, int] = WHOLE
) -> Records:
  """Yields the place of each record, such as `line 3`, and its values.

  `columns` has the argument that chooses each column, or "", for errors. Only
  `part` of the source is read.

  Raises:
    UserError: The source cannot be read, holds no records or lacks a column.
  """
  # A reader of the user's knows no parts.
  parts = {"part": part} if part != WHOLE else {}
  for place, record in mappings(source, columns, **parts):
    yield place, column_values(record, columns)


def column_values(record: Mapping[str, Any], columns: Iterable[str]) -> list:
  """Returns a record's values, without marks, in the columns' order."""
  values = [record.get(column) for column in columns]
  # Lists may refer to the texts' characters.
  if any(isinstance(value, list | dict) for value in values):
    return values
  return [
    parsing.without_marks(value) if isinstance(value, str) else value
    for value in values
  ]


def mappings(
  source: str,
  columns: Mapping[str, str],
  optional: Collection[str] = (),
  **options,
) -> Records:
  """Yields each record's place and the record, and checks its columns.

  It may also have columns that are `optional`. `options` are those of the
  kind's reader. The errors are those of `read_source_records`.
  """
  if (reader := READERS.get(kind(source))) is None:
    readable = " ".join(
      ending for ending, read in READERS.items() if read and ending != HUB
    )
    raise UserError(
      f"{source} holds no records; files of records are {readable}"
    )
  with _reading_source(source):
    if kind(source) in _COLUMNAR:
      options["optional"] = optional
    for place, record in reader(source, columns, **options):
      if columns and not isinstance(record, dict):
        raise ValueError(f"{place} is no object with a {next(iter(columns))!r}")
      if absent := [column for column in columns if column not in record]:
        has = parsing.listed(record)
        if kind(source) in TABLES:
          has += " (line 1 must name the columns)"
        hint = ""
        if argument := columns[absent[0]]:
          hint = f"; choose one with --{argument}, or leave out this file"
        raise ValueError(
          f"{place} has no column {parsing.listed(absent)} but {has}{hint}"
        )
      yield place, record


def is_saved_dataset(folder: str | os.PathLike) -> bool:
  """Whether `save_to_disk` of datasets has written a folder."""
  return any(os.path.isfile(os.path.join(folder, name)) for name in _SAVED)


def features(source: str) -> Mapping[str, Any]:
  """Returns each column's feature, as `datasets.Features.to_dict` does.

  Datasets of the Hub have features, and so do parquet files that datasets has
  written. Other sources give an empty mapping.
  """
  if kind(source) == HUB:
    return _dataset(source).features.to_dict()
  if kind(source) != ".parquet":
    return {}
  from pyarrow import parquet  # slow to import

  with _reading_source(source):
    metadata = parquet.read_schema(source).metadata or {}
    entry = parsing.parse_json(metadata.get(b"huggingface", b"{}").decode())
  # The features are nested, and another program may have changed the entry.
  for key in ("info", "features"):
    entry = entry.get(key) if isinstance(entry, dict) else None
  return entry if isinstance(entry, dict) else {}


@contextlib.contextmanager
def streaming(streamed: bool) -> Iterator[None]:
  """Makes a block stream datasets of the Hub, or else download them whole."""
  before = _STREAMED.set(streamed)
  try:
    yield
  finally:
    _STREAMED.reset(before)


def splits_of(source: str) -> list[str]:
  """Returns `hf://NAME:CONFIG:SPLIT` for the splits of `hf://NAME[:CONFIG]`.

  Raises:
    UserError: There is no such dataset, or `datasets` is not installed.
  """
  name, config, split = _hub_parts(source)
  splits = [split]
  if not split:
    splits = _load_hub_splits(name, config, _STREAMED.get())
  return [f"{HUB}{name}:{config}:{part}" for part in splits]


@contextlib.contextmanager
def _reading_source(source: str) -> Iterator[None]:
  try:
    yield
  except (OSError, ValueError, NotImplementedError) as error:
    raise UserError(
      f"cannot read {source}: {files.failure_reason(error)}"
    ) from error


def open_file(path: str) -> BinaryIO:
  """Opens a file for reading, and decompresses it.

  Raises a ValueError if it is text in UTF-16 or UTF-32, or a compressed file
  is empty.
  """
  ending = os.path.splitext(path)[1].lower()
  if ending in COMPRESSED:
    if not os.path.getsize(path):
      raise ValueError(
        f"it has 0 bytes, which is not {COMPRESSED[ending]}: fetch it again, or"
        " delete it"
      )
    file = io.BufferedReader(_Unpacked(path, COMPRESSED[ending]), _BLOCK)
  else:
    file = io.BufferedReader(io.FileIO(path))
  if why := parsing.not_utf8(file.peek()):
    file.close()
    raise ValueError(why)
  return file


class _Unpacked(io.RawIOBase):
  """The content of a compressed file; its size is checked while it is read."""

  def __init__(self, path: str, compression: str):
    import pyarrow  # slow to import

    self._stream = pyarrow.input_stream(path, compression)
    self._errors = pyarrow.ArrowException, OSError
    self._path = path
    self._bytes = 0

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    try:
      count = self._stream.readinto(buffer)
    except self._errors as error:
      # For example, of an empty stream in bz2, or of bytes after the streams.
      raise ValueError(
        f"{error}: it is damaged, or has bytes after its end; unpack it, or"
        " fetch it again"
      ) from error
    self._bytes += count
    _check_unpacked(self._path, self._bytes)
    return count

  def close(self) -> None:
    self._stream.close()
    super().close()


def _check_unpacked(path: str, size: int) -> None:
  """Raises a ValueError if a packed file holds incredibly many bytes."""
  packed = os.path.getsize(path)
  if size > max(_SMALL, _RATIO * packed):
    raise ValueError(
      f"its {units.quantity(packed, 'B')} hold over {units.quantity(size, 'B')}"
      f" of text, over {_RATIO:,} times as much: if that is right, unpack it"
    )


def _divide_lines(
  lines: Iterable[str], rule: Rule
) -> Iterator[tuple[str, bool]]:
  """Joins lines to pieces; yields each, and whether it ends its document.

  A document ends before an article and after an element. It also ends where
  `Rule.may_end_at` says, until the first article or heading of the file, and
  outside of elements.
  """
  piece = []
  piece_length = 0
  document_length = 0
  ends_before = False  # whether a document ends before the line
  is_in_articles = False  # whether an article or a section has begun
  begins_article = re.compile(rule.article).fullmatch
  for line in lines:
    if rule.elements:
      if _ELEMENT_LINE.fullmatch(line):
        is_in_articles = not line.startswith("</")
        ends_before = True
        line = ""
    elif rule.article and _ANY_HEADING.fullmatch(line):
      is_in_articles = True
      ends_before |= begins_article(line) is not None
    if ends_before or piece_length + len(line) > _PIECE:
      yield "".join(piece), ends_before
      piece = []
      piece_length = 0
    if ends_before:
      document_length = 0
    piece.append(line)
    piece_length += len(line)
    document_length += len(line)
    # This is about the next line.
    ends_before = (
      not is_in_articles
      and line.endswith("\n")
      and rule.may_end_at(line, document_length)
    )
  yield "".join(piece), True


def _byte_range(
  file: BinaryIO, part: tuple[int, int], rule: Rule
) -> tuple[int, int]:
  """Returns the first byte of a part of a file, and the byte after it.

  A part begins with a document: with a line, or after a separator.
  """
  size = file.seek(0, os.SEEK_END)
  index, count = part
  separator = rule.separator.encode()
  begins_article = re.compile(rule.article.encode()).fullmatch

  def may_begin_at(line: bytes, passed: int) -> bool:
    """Whether a part may begin at a line, this many bytes after its place."""
    line = line.removeprefix(codecs.BOM_UTF8)
    if rule.article:
      return bool(begins_article(line))
    return rule.may_end_at(line, passed)

  def first_byte(number: int) -> int:
    position = size * number // count
    if position in (0, size):
      return position
    if separator:
      with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        place = data.find(separator, position)
      return place + len(separator) if place >= 0 else size
    file.seek(position - 1)  # a line may begin here
    line_start = position
    begins_line = False
    while line := file.readline(_BLOCK):  # a line may be as long as the file
      if begins_line and may_begin_at(line, line_start - position):
        break
      line_start = file.tell()
      begins_line = line.endswith(b"\n")
    return line_start

  return first_byte(index), first_byte(index + 1)


def _file_lines(
  file: BinaryIO, begin: int = 0, end: int | None = None
) -> Iterator[str]:
  """Yields lines with their ends, as \\n, and long lines in parts.

  If `begin` and `end` are given, reads only the bytes between them.
  """
  # Reads blocks, not lines: a line may be as long as the file.
  decoder = codecs.getincrementaldecoder("utf-8")()
  left = ""
  returns = ""
  block = b"\0"
  size = begin
  if end is not None:
    file.seek(begin)
  while block:
    block = file.read(_BLOCK if end is None else min(_BLOCK, end - size))
    size += len(block)
    try:
      text = returns + decoder.decode(block, final=not block)
      returns = ""
    except UnicodeDecodeError as error:
      position = size - len(error.object) + error.start
      raise ValueError(
        f"not UTF-8: {error.reason} at byte {position}; {parsing.CONVERT}"
      ) from error
    if "\r" in text:
      # The next block may continue the end of a line.
      sure = len(text.rstrip("\r")) if block else len(text)
      returns = text[sure:]
      text = text[:sure]
      if "\r\r\n" in text:  # seldom: the pattern is slow
        text = _LINE_END.sub("\n", text)
      text = text.replace("\r\n", "\n").replace("\r", "\n")
    *lines, left = (left + text).split("\n")
    for line in lines:
      yield from _cut_text(line.lstrip(parsing.MARK) + "\n")
    *parts, left = _cut_text(left.lstrip(parsing.MARK))
    yield from parts
  yield left


def _cut_text(text: str) -> Iterator[str]:
  """Cuts a text longer than a piece, between words if it has any."""
  begin = 0
  while len(text) - begin > _PIECE:
    end = text.rfind(" ", begin, begin + _PIECE) + 1 or begin + _PIECE
    yield text[begin:end]
    begin = end
  yield text[begin:]


@READERS.register(".ndjson")
@READERS.register(".jsonl")
def _json_lines(path: str, columns: Collection, part=WHOLE) -> Records:
  with open_file(path) as file:
    begin = 0
    end = math.inf
    position = 0
    if part != WHOLE:
      begin, end = _byte_range(file, part, Rule("", 0))
      position = file.seek(begin)
    for number, line in enumerate(parsing.bounded_lines(file), start=1):
      if position >= end:
        return
      if line.strip(b" \t\r\n" + codecs.BOM_UTF8):
        place = f"line {number}" + (f" after byte {begin:,}" if begin else "")
        try:
          record = parsing.parse_json(line.decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
          raise ValueError(f"{place} is not JSON: {error}") from error
        except ValueError as error:
          raise ValueError(f"{place}: {error}") from error
        yield place, record
      position += len(line)


@READERS.register(".json")
def _json(path: str, columns: Collection) -> Records:
  """Reads lines of JSON, or one value, of a file.

  If its first line is a whole object, each line is a record. Otherwise, the
  file is an array of records or of texts, or a single record.
  """
  with open_file(path) as file:
    blank = b" \t\r\n" + codecs.BOM_UTF8
    lines = (line.strip(blank) for line in parsing.bounded_lines(file))
    first_line = next(filter(None, lines), None)
  if first_line is None:
    return
  if _json_object(first_line) is not None:
    yield from _json_lines(path, columns)
    return
  with open_file(path) as file:
    content = file.read(parsing.LONGEST_RECORD + 1)
  if len(content) > parsing.LONGEST_RECORD:
    raise ValueError(f"its only value {parsing.too_long()}, a line each")
  try:
    value = parsing.parse_json(content.decode("utf-8"))
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ValueError(f"it is not JSON: {error}") from error
  for number, item in enumerate(value if isinstance(value, list) else [value]):
    if isinstance(item, str) and len(columns) == 1:
      item = dict.fromkeys(columns, item)
    yield f"record {number + 1}", item


@READERS.register(".csv")
def _read_table(path: str, columns: Collection, tabs: bool = False) -> Records:
  csv.field_size_limit(parsing.LONGEST_RECORD)

  def lines() -> Iterator[str]:
    options = {"errors": "surrogateescape", "newline": ""}
    with io.TextIOWrapper(open_file(path), "utf-8", **options) as file:
      yield from parsing.unmarked_lines(file)

  for number, row in parsing.csv_records(lines, columns, tabs):
    yield f"line {number}", row


READERS[".tsv"] = functools.partial(_read_table, tabs=True)


@READERS.register(".fa")
@READERS.register(".faa")
@READERS.register(".fasta")
@READERS.register(".fna")
def _fasta(path: str, columns: Collection) -> Records:
  """Yields sequences, whose lines are joined, and their headers.

  A line that begins with `;` is a comment.
  """
  header = None
  begin = 0
  sequence = bytearray()

  def record() -> tuple[str, dict[str, str]]:
    try:
      texts = {"text": sequence.decode(), "header": header.decode()}
    except UnicodeDecodeError as error:
      raise ValueError(f"line {begin}: its record is not UTF-8") from error
    return f"line {begin}", texts

  with open_file(path) as file:
    for number, line in enumerate(parsing.bounded_lines(file), start=1):
      line = line.removeprefix(codecs.BOM_UTF8).strip()
      if line.startswith(b";"):
        continue
      if line.startswith(b">"):
        if header is not None:
          yield record()
        begin = number
        header = line[1:].strip()
        sequence = bytearray()
      elif header is not None:
        sequence += b"".join(line.split())
        if len(sequence) > parsing.LONGEST_RECORD:
          raise ValueError(f"line {begin}: its record {parsing.too_long()}")
      elif line:
        raise ValueError(f"line {number} is before the first header, >NAME")
  if header is not None:
    yield record()


@READERS.register(".parquet")
def _parquet(
  path: str, columns: Collection, part=WHOLE, optional: Collection = ()
) -> Records:
  """Yields the records of one part of a file's row groups.

  Reads `columns`, and the `optional` columns that the file has. If one of
  `columns` is absent, reads all, so that the caller's error can list them.
  """
  from pyarrow import parquet  # slow to import

  # Without a buffer, pyarrow reads a column of a whole row group at once.
  with parquet.ParquetFile(path, buffer_size=1 << 20) as file:
    names = file.schema_arrow.names
    columns = columns or names
    parsing.check_once(names, {*columns})
    selection = names
    if {*columns} <= {*names}:
      optional_names = {*optional} & {*names} - {*columns}
      selection = [*columns, *(x for x in names if x in optional_names)]
    part_index, part_count = part
    groups = np.array_split(range(file.num_row_groups), part_count)
    # A file without rows has no row groups.
    if not (part_groups := groups[part_index].tolist()):
      return
    group = file.metadata.row_group
    # Records are numbered from the beginning of the file.
    rows_before = sum(group(i).num_rows for i in range(part_groups[0]))
    batch_size = min(_rows_at_once(group(i)) for i in part_groups)
    # Threads would cost more than they gain for few rows.
    options = {"columns": selection, "use_threads": False}
    batches = file.iter_batches(batch_size, part_groups, **options)
    yield from _batch_records(_plain_batches(path, batches), rows_before)


def _rows_at_once(group) -> int:
  """Returns the number of rows of a row group to read at once.

  All rows may refer to one value, which is as long as the column. The file has
  it once, and memory has it for each row.
  """
  columns = [group.column(number) for number in range(group.num_columns)]
  longest = max(1, *(column.total_uncompressed_size for column in columns))
  packed = max(1, *(column.total_compressed_size for column in columns))
  # Text is packed to a tenth. Few rows at a time take several times as long.
  least = 1 if longest > 100 * packed else 16
  return max(least, min(_BATCH, _BATCH_BYTES // longest))


def _plain_batches(path: str, batches: Iterable) -> Iterator:
  """Yields batches without dictionaries: all columns have their values.

  So `nbytes` is the memory that the rows take, of which a small damaged file
  may name incredibly much: see `_check_unpacked`.
  """
  import pyarrow  # slow to import

  unpacked_bytes = 0
  for batch in batches:
    columns = [
      column.dictionary_decode()
      if isinstance(column, pyarrow.DictionaryArray)
      else column
      for column in batch.columns
    ]
    batch = pyarrow.RecordBatch.from_arrays(columns, batch.schema.names)
    unpacked_bytes += batch.nbytes
    _check_unpacked(path, unpacked_bytes)
    yield batch


@READERS.register(HUB)
def _read_hub(
  source: str, columns: Collection, part=WHOLE, optional: Collection = ()
) -> Records:
  """Yields the records of a Hub dataset, or of a part of it, by row number.

  A record has the required `columns`, and the `optional` columns that exist. By
  default, it has all. A streamed dataset cannot be divided into parts.
  """
  dataset = _dataset(source)
  # A stream may know no names before its first record.
  names = dataset.column_names or [*next(iter(dataset), {})]
  parsing.check_once(names, columns or {*names})
  # Otherwise `mappings` reports the absent column, and names all others.
  if {*columns} <= {*names}:
    optional_names = (name for name in optional if name in names)
    dataset = dataset.select_columns([*columns, *optional_names])
  begin = 0
  if part != WHOLE:
    index, count = part
    begin = len(dataset) * index // count
    end = len(dataset) * (index + 1) // count
    dataset = dataset.select(range(begin, end))
  yield from _batch_records(dataset.with_format("arrow").iter(_BATCH), begin)


def _batch_records(batches: Iterable, before: int) -> Records:
  number = before
  for batch in batches:
    # Python's copy of long texts is of one row.
    count = 1 if batch.nbytes > _BLOCK * _BATCH else batch.num_rows
    for first in range(0, batch.num_rows, count):
      rows = batch.slice(first, count)
      if count == 1 and rows.nbytes > parsing.LONGEST_RECORD:
        raise ValueError(f"row {number + 1} {parsing.too_long()}")
      for row in rows.to_pylist():
        number += 1
        yield f"row {number}", row


def _dataset(source: str):
  name, config, split = _hub_parts(source)
  splits = _load_hub_splits(name, config, _STREAMED.get())
  if not split and len(splits) == 1:
    (split,) = splits
  if split not in splits:
    has = f"no split {split} but" if split else "the splits"
    first = f"{HUB}{name}:{config}:{next(iter(splits))}"
    raise UserError(f"{HUB}{name} has {has} {', '.join(splits)}: write {first}")
  return splits[split]


def _hub_parts(source: str) -> list[str]:
  """Returns a dataset's name, config and split, each "" if not given."""
  path = source.removeprefix(HUB)
  name = path
  # A folder's name may have colons.
  while ":" in name and not os.path.isdir(name):
    name = name.rpartition(":")[0]
  config, split = (path[len(name) + 1 :] + ":").split(":")[:2]
  return [name, config, split]


@functools.cache
def _load_hub_splits(name: str, config: str, streamed: bool):
  """Returns a dataset's splits by name, from the hub or a local folder."""
  try:
    import datasets
  except ImportError as error:
    raise UserError(
      f"{HUB}{name} needs datasets, which is missing: pip install datasets"
    ) from error
  if int(datasets.__version__.split(".")[0]) < 4:
    raise UserError(
      f"{HUB}{name} may run code of its own in datasets"
      f" {datasets.__version__}: install datasets 4 or later"
    )
  if not sys.stderr.isatty():
    datasets.disable_progress_bars()
  try:
    # Folders of `save_to_disk` may also have files of a cache.
    if is_saved_dataset(name):
      _check_inside(name, _saved_files(name))
      saved = datasets.load_from_disk(name)
      is_divided = isinstance(saved, datasets.DatasetDict)
      return saved if is_divided else {"train": saved}
    if os.path.isdir(name):
      builder = datasets.load_dataset_builder(name, config or None)
      named = (builder.config.data_files or {}).values()
      _check_inside(name, itertools.chain(*named))
    return datasets.load_dataset(name, config or None, streaming=streamed)
  except (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    datasets.exceptions.DatasetsError,
  ) as error:
    why = files.failure_reason(error)
    raise UserError(f"cannot load {HUB}{name}: {why}") from error


def _saved_files(folder: str) -> Iterator[str]:
  """Yields the files that a folder of `save_to_disk` names."""
  folders = [folder]
  path = os.path.join(folder, _SAVED[0])
  if os.path.isfile(path):
    splits = files.read_json(path, "the dataset")["splits"]
    folders = [os.path.join(folder, split) for split in splits]
  for place in folders:
    state = os.path.join(place, _SAVED[1])
    yield state
    for file in files.read_json(state, "the dataset")["_data_files"]:
      yield os.path.join(place, file["filename"])


def _check_inside(folder: str, paths: Iterable[str]) -> None:
  """Raises a UserError if a dataset's folder names a file outside itself.

  In the Hub's cache, the files of a snapshot are links to its blobs.
  """
  root = os.path.realpath(folder)
  places = [root]
  if os.path.basename(os.path.dirname(root)) == "snapshots":
    places.append(os.path.join(root, "../../blobs"))
  inside = tuple(f"{os.path.realpath(place)}/" for place in places)
  for path in paths:
    if "://" in path or not os.path.realpath(path).startswith(inside):
      raise UserError(
        f"{HUB}{folder} names {path}, which is outside of the folder: copy the"
        " file into it, or give its path"
      )


_OWN = frozenset(READERS)


def is_own(source: str) -> bool:
  """Whether this library reads it. A user's reader runs in one process."""
  return (kind(source) or ".txt") in _OWN
