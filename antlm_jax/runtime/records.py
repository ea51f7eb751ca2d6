"""Parses records: lines of JSON, and tables of csv and tsv.

All readers of such files use these functions, so that they refuse the same
mistakes. A mistake is a ValueError that names the line.
"""

import codecs
import contextlib
import csv
import json
import re
import textwrap
from collections.abc import (
  Callable,
  Collection,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import IO, Any, AnyStr

MARK = "\ufeff"  # byte-order mark
HALF = "it has half of a surrogate pair, which is no character"
_HEAD = 1 << 12  # bytes of a file that show its encoding
_WIDE_MARKS = (
  (codecs.BOM_UTF32_LE, "UTF-32"),
  (codecs.BOM_UTF32_BE, "UTF-32"),
  (codecs.BOM_UTF16_LE, "UTF-16"),
  (codecs.BOM_UTF16_BE, "UTF-16"),
)
# Escape sequences that begin Japanese letters, each two bytes of ASCII.
_JAPANESE = re.compile(rb"\x1b(\$[@B]|\(J)")
# First bytes of files that are no text.
_MAGIC = {
  b"\x1f\x8b": "compressed by gzip: decompress it, or end its name in .gz",
  b"BZh": "compressed by bzip2: decompress it, or end its name in .bz2",
  b"\x28\xb5\x2f\xfd": "compressed by zstd: decompress it",
  b"\xfd7zXZ": "compressed by xz: decompress it",
  b"PK\x03\x04": "a zip archive or an Excel file: unpack it, or save it as csv",
  b"PAR1": "parquet: end its name in .parquet",
}
_CONTROL = re.compile("[\0-\x08\x0e-\x1a]")
_MARKS = re.compile(f"^{MARK}+", re.MULTILINE)
# A field of tsv, with or without quotation marks, and the tab after it.
_FIELD = re.compile(r'("(?:[^"]|"")*"|[^"\t]*)(\t|\Z)')
_MANY = 10  # lines of a quoted field, if each may be a record
_LONGEST = 1 << 24  # characters of a quoted field that spans lines
LONGEST_RECORD = 1 << 28  # bytes or characters: the longest chromosome fits

# iconv reads the encoding of the terminal by default, which is often UTF-8.
CONVERT = (
  "convert it from its encoding (Latin-1 or Windows: iconv -f WINDOWS-1252 -t"
  " UTF-8)"
)

Lines = Iterable[str]


def without_marks(text: str) -> str:
  """Drops the byte-order marks before each line.

  They are no text: files that were joined have one in the middle.
  """
  return _MARKS.sub("", text) if MARK in text else text


def stripped(text: str) -> str:
  """Drops white space at both ends of a document.

  It keeps the indentation of the first of several lines, as code needs it.
  """
  content = text.strip()
  if "\n" not in content:
    return content
  before = text[: len(text) - len(text.lstrip())]
  return before.rpartition("\n")[2] + content


def plain_lines(text: str) -> str:
  """Returns a text whose lines end in "\\n", without byte-order marks."""
  if "\r" in text:
    text = text.replace("\r\n", "\n").replace("\r", "\n")
  return without_marks(text)


def not_utf8(head: bytes) -> str:
  """Returns an error if a file's first bytes are no UTF-8, or "".

  Some scripts are valid UTF-8 in UTF-16 and UTF-32. But each space and line end
  has a zero byte there, and a text in UTF-8 has none. ISO-2022-JP is ASCII with
  escape sequences. Also refuses files of known formats that are no text.
  """
  head = head[:_HEAD]
  for first_bytes, kind in _MAGIC.items():
    if head.startswith(first_bytes):
      return f"it is no text but {kind}"
  # The mark of UTF-32 begins with that of UTF-16.
  names = [name for mark, name in _WIDE_MARKS if head.startswith(mark)]
  name = names[0] if names else ""
  if _JAPANESE.search(head):
    name = "ISO-2022-JP"
  # Zero bytes by place. UTF-32 has three a letter.
  zeros = [head[place::4].count(0) for place in range(4)]
  if not name and any(zeros):
    wide = 2 * sum(zeros) > len(head)
    little = zeros[0] < zeros[3] if wide else sum(zeros[::2]) < sum(zeros) / 2
    name = ("UTF-32" if wide else "UTF-16") + ("LE" if little else "BE")
    if sum(zeros) < max(2, len(head) / 100):
      return (
        f"it has zero bytes, as {name} has and text in UTF-8 has not; convert"
        f" it (iconv -f {name} -t UTF-8), or remove them"
      )
    text = codecs.getincrementaldecoder(name)("replace").decode(head)
    if "\ufffd" in text or _CONTROL.search(text):
      return "it is a binary file, not text"
  return name and f"{name}, not UTF-8; convert it (iconv -f {name} -t UTF-8)"


def bounded_lines(file: IO[AnyStr]) -> Iterator[AnyStr]:
  """Yields the lines of a file, none of which is too long for memory."""
  number = 0
  while line := file.readline(LONGEST_RECORD + 1):
    number += 1
    if len(line) > LONGEST_RECORD:
      raise ValueError(f"line {number:,} {too_long()}")
    yield line


def too_long() -> str:
  """Returns the error of a record that is too long, after its place."""
  return (
    f"is longer than {LONGEST_RECORD >> 20:,} MiB: divide its text into several"
    " records"
  )


def unmarked_lines(file: IO[str]) -> Iterator[str]:
  """Yields lines without byte-order marks before them.

  `file` is opened with `errors="surrogateescape"`, so that the line of a byte
  that is not UTF-8 is known.
  """
  for number, line in enumerate(bounded_lines(file), start=1):
    if not writable(line):
      raise ValueError(f"line {number} is not UTF-8; {CONVERT}")
    yield line.lstrip(MARK)


def writable(text: str) -> bool:
  """Whether a text can be written as UTF-8: it has no half surrogate pair."""
  if text.isascii():
    return True
  try:
    text.encode("utf-8")
  except UnicodeEncodeError:
    return False
  return True


def parse_json(text: str, once: bool = True) -> Any:
  """Parses a value of JSON, which a byte-order mark may precede.

  Raises:
    ValueError: It is no JSON (json.JSONDecodeError), a text has half of a
      surrogate pair or, with `once`, two fields have the same name.
  """
  text = text.lstrip(MARK)
  try:
    value = json.loads(text, object_pairs_hook=_unique_fields if once else None)
    escaped = "\\ud" in text or "\\uD" in text
    if escaped and not writable(json.dumps(value, ensure_ascii=False)):
      raise ValueError(HALF)
  except RecursionError as error:
    raise ValueError("it is nested too deeply") from error
  return value


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  fields = dict(pairs)
  if len(fields) < len(pairs):
    check_once([name for name, _ in pairs], fields)
  return fields


def column_names(values: object) -> list[str] | None:
  """Returns the names of a table's columns; None for a value of other types.

  Tables are mappings, and those of datasets, pandas, polars and pyarrow.
  """
  if isinstance(values, Mapping):
    return [*values]
  names = getattr(values, "column_names", getattr(values, "columns", None))
  return None if names is None else [*names]


def listed(names: Iterable[object]) -> str:
  """Lists as many names as fit into an error."""
  return textwrap.shorten(", ".join(map(repr, names)), 160, placeholder=" ...")


def check_once(names: Collection[str], columns: Collection[str]) -> None:
  """Raises a ValueError if two of the names are one of these columns."""
  names = [*names]
  for name in columns:
    if names.count(name) > 1:
      raise ValueError(f"two columns have the name {name!r}; rename one")


def csv_records(
  read: Callable[[], Lines], columns: Collection[str], tabs: bool = False
) -> Iterator[tuple[int, dict[str, str]]]:
  """Yields the last line's number, and the fields by name, of each record.

  The first record names the columns. In csv, quotation marks quote a field. In
  tsv, they are text, unless the file is quoted as pandas and Excel do.

  Args:
    read: Returns the lines from the first one on; it is called twice.
    columns: Names of columns that are needed; if none, all are.
    tabs: Whether the file is tsv.

  Raises:
    ValueError: A record has more or fewer fields than there are names, or the
      quotation marks are ambiguous.
  """
  if not tabs:
    _check_csv(read())
  quoted = not tabs or _tsv_quotes(read())
  quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
  delimiter = "\t" if tabs else ","
  watched = _Watched(read())
  # Strict: else a stray quotation mark joins all that follows it to one text.
  rows = csv.reader(watched, strict=True, delimiter=delimiter, quoting=quoting)
  names = None
  line_of_names = 0
  previous_line = 0
  try:
    for row in rows:
      span = rows.line_num - previous_line
      previous_line = rows.line_num
      if not row:
        continue  # a blank line
      if not tabs:
        _check_spaces(row, watched.line, rows.line_num)
      if names is None:
        names = row
        line_of_names = rows.line_num
        if not tabs and not {*columns} <= {*names}:
          _check_commas(names)
        check_once(names, columns or [name for name in names if name])
        continue
      _check_width(row, names, rows.line_num, line_of_names, tabs)
      if not tabs and _MANY <= span <= watched.run:
        raise _ambiguous(rows.line_num - span + 1, rows.line_num)
      yield rows.line_num, dict(zip(names, row, strict=True))
  except csv.Error as error:
    raise ValueError(f"line {rows.line_num}: {error}") from error


def _check_commas(names: Sequence[str]) -> None:
  """Raises a ValueError if the first line of csv has no names with commas."""
  if names[0].startswith("sep="):
    raise ValueError("line 1 is for Excel alone: delete it")
  for sign, name in ((";", "semicolons"), ("\t", "tabs")):
    if len(names) == 1 and sign in names[0]:
      raise ValueError(
        f"{name}, not commas, seem to divide its columns: save it with commas,"
        " or with tabs as .tsv"
      )


def _check_spaces(row: Sequence[str], line: str, number: int) -> None:
  """Raises a ValueError if a space makes marks around a field a part of it."""
  for field in row:
    # The line has doubled marks if they are a part of the text.
    if re.fullmatch(' +".*" *', field) and f",{field}" in line:
      raise ValueError(
        f"line {number}: delete the space before {field.strip()!r:.60}: with a"
        " space, its quotation marks would be text"
      )


def _check_width(row, names, number: int, first: int, tabs: bool) -> None:
  if len(row) != len(names):
    comparison = "more" if len(row) > len(names) else "fewer"
    hint = "save texts with tabs or line ends as jsonl"
    if not tabs:
      hint = (
        'put quotation marks around a text with a comma ("a, b") or line end,'
        " and no space before them"
      )
    raise ValueError(
      f"line {number} has {comparison} columns than line {first} names"
      f" ({len(row)}, not {len(names)}); {hint}"
    )
  if len(names) > 1 and row == names:
    raise ValueError(f"line {number} repeats the columns' names; delete it")


def _ambiguous(first: int, last: int) -> ValueError:
  return ValueError(
    f"line {first}: a quotation mark joins it to line {last}, but each of these"
    " lines may be a record; save the records as jsonl"
  )


class _Watched:
  """Lines of csv, and the number of last lines that may each be a record."""

  def __init__(self, lines: Lines):
    self._lines = lines
    self._commas: int | None = None
    self.line = ""  # the last line
    self.run = 0  # number of last lines that may each be a record
    self.every = True  # whether each line so far may be a record

  def __iter__(self) -> Iterator[str]:
    for line in self._lines:
      blank = not line.strip("\r\n")
      if self._commas is None and not blank:
        self._commas = line.count(",")
      is_record = not blank and line.count(",") == self._commas > 0
      self.run = self.run + 1 if is_record else 0
      self.every &= is_record or blank
      self.line = line
      yield line


def _check_csv(lines: Lines) -> None:
  """Raises a ValueError if a field may span lines by mistake.

  If each line of the file is a whole record, two quotation marks of texts would
  swallow all records between them.
  """
  watched = _Watched(lines)
  last_line = 0
  rows = csv.reader(watched, strict=True)
  with contextlib.suppress(csv.Error):  # reading the records raises it again
    spans = []
    for _ in rows:
      if not watched.every:
        return
      if rows.line_num > last_line + 1:
        spans.append((last_line + 1, rows.line_num))
      last_line = rows.line_num
    if spans:
      raise _ambiguous(*spans[0])


def _tsv_quotes(lines: Lines) -> bool:
  """Whether the quotation marks of a tsv file quote its fields.

  They do not if a mark is inside a field that has none at its ends. They do not
  either if they would join fields of two lines, or if a record would have more
  or fewer fields than the names. Otherwise they do if a program must have put
  them there. It did in each of these cases:

  1. Without the marks, lines would differ in their number of tabs.
  2. The names have marks.
  3. Fields with a tab or a mark inside have them, or fields with a comma inside
     have them and no other field has a comma.

  Raises a ValueError if a field spans lines, and 1 does not hold.
  """
  names = None
  tabs_of_lines = set()
  first_span = None  # first and last line of the first field that spans lines
  quoted_signs = set()  # signs in fields with marks
  has_other_comma = False  # whether a field without marks has a comma
  for first, last, record in _tsv_records(lines):
    fields = _tsv_fields(record)
    names = names or fields
    # Two marks of texts must not swallow all records between them.
    joined = any("\t" in field and "\n" in field for field in fields)
    if not fields or joined or len(fields) != len(names):
      return False
    if last > first:
      first_span = first_span or (first, last)
    tabs_of_lines |= {line.count("\t") for line in record.split("\n")}
    for field in fields:
      if field[:1] == '"':
        quoted_signs |= {sign for sign in '"\t,' if sign in field[1:-1]}
      else:
        has_other_comma |= "," in field
  if len(tabs_of_lines) > 1:
    return True
  if first_span:
    raise _ambiguous(*first_span)
  if names and any(name[:1] == '"' for name in names):
    return True
  if has_other_comma:
    quoted_signs.discard(",")
  return bool(quoted_signs)


def _tsv_records(lines: Lines) -> Iterator[tuple[int, int, str]]:
  """Yields the first and last line of each record, if marks quote, and it.

  The record is "" if they do not.
  """
  texts: list[str] = []  # of the lines of a record
  first_line = 0
  size = 0
  opened = False
  for number, line in enumerate(lines, start=1):
    text = line.rstrip("\r\n")
    if not text and not opened:
      continue
    if opened and (size > _LONGEST or "\t" in text.partition('"')[0]):
      break
    if not opened:
      texts = []
      first_line = number
      size = 0
    texts.append(text)
    size += len(text)
    opened ^= text.count('"') % 2 == 1
    if not opened:
      yield first_line, number, "\n".join(texts)
  if opened:
    yield first_line, first_line, ""


def _tsv_fields(record: str) -> list[str]:
  """Returns the fields of a record; none if a mark is not at their ends."""
  if record and '"' not in record:
    return record.split("\t")
  fields = []
  start = 0
  while record and (match := _FIELD.match(record, start)):
    fields.append(match[1])
    start = match.end()
    if not match[2]:
      return fields
  return []
