"""Reads files of columns, such as CoNLL's: a word and its tag in each line.

Tabs divide the columns, or else spaces. An empty line or `-DOCSTART-` ends a
sentence. A file whose columns are not those that the caller knows is refused.
In CoNLL-U, which Universal Dependencies has, comments, ranges (1-2 Don't) and
empty nodes (1.1) are left out.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.runtime import files, progress
from antlm_jax.runtime.records import MARK

_DOCUMENT = "-DOCSTART-"
# Number of a word, of CoNLL-U's ranges (1-2), and of empty nodes (1.1).
_ID = re.compile(r"\d+([-.]\d+)?")
# Names of columns, in a first line.
_WORD = re.compile("(word|token|form|text)s?", re.IGNORECASE)
_TAG = re.compile(
  "((ner|[ux]?pos|entity)[_ -]?)?(tag|label|type)s?|ner|[ux]?pos|entity|class",
  re.IGNORECASE,
)
# Tag of an entity, in any scheme.
_ENTITY = re.compile("O|[BILMESUW]-.+")
_LANGUAGE = re.compile("[a-z][a-z-]*:(?=.)")


class Columns(NamedTuple):
  """Form of a file of columns."""

  word: int = 0  # column of the words
  tag: int = 1  # column of the tags; -1 is the last
  width: int = 2  # number of columns; 0 for that of the first line
  comments: bool = False  # whether comments (# ...) are left out
  numbered: bool = False  # whether it is CoNLL-U: numbers in column 1
  language: bool = False  # whether one precedes each word (en:Paris)


class _Line(NamedTuple):
  number: int  # from 1
  parts: list[str]  # columns
  text: str


def read_known(path: str, columns: Columns) -> list[Example]:
  """Reads a known set's sentences; labels are tags, and names are places.

  Raises a UserError for a line with other columns.
  """
  sentences = _sentences(path, columns, _read_blocks(path, columns))
  if columns.language:
    return [
      sentence._replace(texts=tuple(map(_without_language, sentence.texts)))
      for sentence in sentences
    ]
  return sentences


def read_own(path: str, columns: Columns) -> list[Example]:
  """Reads the sentences of a user's file, as `read_known` does.

  Also raises a UserError for lines that hold no word and its tag: comments,
  names of columns, whole sentences, and numbers or tags alone. In CoNLL-U, the
  numbers tell that all lines are words.
  """
  if columns.numbered:
    return read_known(path, columns)
  blocks = _read_blocks(path, columns)
  lines = [line for block in blocks for line in block]
  words = [line.parts[columns.word] for line in lines]
  if words and all(map(_ENTITY.fullmatch, words)):
    raise UserError(
      f"{path}: column {columns.word + 1} has tags in place of words: choose"
      " tokens_column and tags_column (from 1)"
    )
  for line, fault in _faults(lines, columns):
    raise _refusal(path, columns, lines, line, fault)
  return _sentences(path, columns, blocks)


def column_count(path: str, tags: Collection[str]) -> int:
  """Returns the number of columns of a file, or 0 for lines of text.

  Each line has as many columns. Tabs divide them, or a column has only tags, or
  each line is a word and empty lines divide sentences.
  """
  blocks = _divide_blocks(path, Columns(comments=True))
  rows = [line.parts for block in blocks for line in block]
  widths = {*map(len, rows)}
  if len(widths) != 1 or len(rows) < 2:
    return 0
  if any(" " in part for row in rows for part in row):
    return 0
  (count,) = widths
  if count == 1:
    return int(1 < len(blocks) < len(rows))
  has_tags = any(
    {*column} <= {*tags} or all(map(_ENTITY.fullmatch, column))
    for column in [*zip(*rows, strict=True)][1:]
  )
  has_tabs = "\t" in blocks[0][0].text
  return count if has_tags or has_tabs else 0


def _faults(
  lines: Sequence[_Line], columns: Columns
) -> Iterator[tuple[_Line, str]]:
  """Yields each line that is not a word and its tag, with its fault.

  A fault of the whole file is yielded with its first line.
  """
  if not lines:
    return
  pairs = [
    (line.parts[columns.word], line.parts[columns.tag]) for line in lines
  ]
  words = [word for word, _ in pairs]
  tags = {tag for word, tag in pairs if word[:1] != "#"}
  # Faults of a single line. A lone # is a word if other words have its tag.
  for line, (word, tag) in zip(lines, pairs, strict=True):
    is_known = tag in tags or columns.word == columns.tag
    if word.startswith("# ") or (word == "#" and not is_known):
      yield line, "a comment"
    if " " in word + tag:
      yield line, "several words in a column"
  # Faults of the whole file.
  first_line = lines[0]
  word, tag = pairs[0]
  if _WORD.fullmatch(word) and _TAG.fullmatch(tag):
    yield first_line, "the names of columns"
  if all(map(_ID.fullmatch, words)):
    yield first_line, "a number in place of each word"
  if all(map(_LANGUAGE.match, words)):
    yield first_line, f"{word.partition(':')[0]}: before each word"
  # Lines of CoNLL-U without a word, if the first column always has a number.
  numbers = [_ID.fullmatch(line.parts[0]) for line in lines]
  if all(numbers):
    for line, number in zip(lines, numbers, strict=True):
      if number[1]:
        yield line, "a range or an empty node of CoNLL-U"


def _read_blocks(path: str, columns: Columns) -> list[list[_Line]]:
  """Reads the lines of each sentence, which all have the same columns."""
  blocks = _divide_blocks(path, columns)
  lines = [line for block in blocks for line in block]
  least = max(columns.word, columns.tag) + 1
  for line in lines:
    count = len(line.parts)
    width = columns.width or max(len(lines[0].parts), least)
    if count != width:
      fault = f"{count} column{'s' * (count != 1)}, not {width}"
      raise _refusal(path, columns, lines, line, fault)
    if columns.numbered and not _ID.fullmatch(line.parts[0]):
      raise _refusal(path, columns, lines, line, "no number in column 1")
  return blocks


def _divide_blocks(path: str, columns: Columns) -> list[list[_Line]]:
  """Divides a file into the lines of each sentence, of any columns."""
  texts = []
  # Not splitlines: U+2028 and the like may be part of a word. Windows may write
  # \r\r\n at the end of one line.
  for text in re.split("\r*\n|\r", files.read_text(path, "sentences")):
    texts.append(text.replace(MARK, "").strip(" "))  # WNUT-17's lines have them
  uncommented = [text for text in texts if text[:1] != "#"]
  tabs = any("\t" in text for text in uncommented)
  divider = re.compile("\t" if tabs else " +")
  words = [
    text
    for text in uncommented
    if text.strip() and not text.startswith(_DOCUMENT)
  ]
  # A word # is not at the start of a line that begins with its number.
  numbered = words and all(_ID.fullmatch(divider.split(x)[0]) for x in words)

  def is_comment(text: str) -> bool:
    # A word has no space before a tab.
    in_tabs = text[:2] == "# " and (tabs or "\t" in text)
    return columns.comments and text[:1] == "#" and (numbered or in_tabs)

  blocks = [[]]
  for line_number, text in enumerate(texts, start=1):
    if not text.strip() or text.startswith(_DOCUMENT) or is_comment(text):
      blocks.append([])
      continue
    parts = [part.strip() for part in divider.split(text)]
    number = _ID.fullmatch(parts[0])
    if columns.numbered and number and number[1]:
      continue
    blocks[-1].append(_Line(line_number, parts, text))
  return [block for block in blocks if block]


def _sentences(
  path: str, columns: Columns, blocks: Iterable[Sequence[_Line]]
) -> list[Example]:
  sentences = []
  left_out = []
  for block in blocks:
    pairs = []
    for line in block:
      word = line.parts[columns.word]
      tag = line.parts[columns.tag]
      if not word:
        left_out.append(line.text)
        continue
      if not tag:
        raise UserError(f"{path}, line {line.number}: {word!r:.40} has no tag")
      pairs.append((word, tag))
    if pairs:
      words, tags = zip(*pairs, strict=True)
      place = f"{path}, line {block[0].number}"
      sentences.append(Example(words, tags, place))
  if left_out:
    progress.say(
      f"{path}: lines without a word left out: {len(left_out):,}"
      f" ({left_out[0]!r:.40})"
    )
  return sentences


def _without_language(word: str) -> str:
  return _LANGUAGE.sub("", word, count=1)


def _refusal(
  path: str, columns: Columns, lines: Sequence[_Line], line: _Line, fault: str
) -> UserError:
  """Returns an error with its remedy."""
  place = f"{path}, line {line.number} has {fault}"
  if columns.numbered:
    return UserError(f"{place}, but each line must be a word of CoNLL-U")
  rows = [line for line in lines if line.text[:1] != "#"]
  if rows and all(_ID.fullmatch(row.parts[0]) for row in rows):
    return UserError(
      f"{place}, and numbers precede its words: choose tokens_column and"
      " tags_column (from 1), such as 2 and 3, or if it is CoNLL-U, end its"
      " name in .conllu, and choose tags_column (by default 4, UPOS)"
    )
  return UserError(
    f"{place}, but each line must be a word and its tag: choose tokens_column"
    " and tags_column (from 1), or remove or mend the line"
  )
