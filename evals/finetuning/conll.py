"""Reads files of columns, such as CoNLL's: a word and its tag in each line.

Tabs divide the columns, or else spaces. An empty line ends a sentence. The
reader leaves out comments, CoNLL-U's ranges (`1-2`) and empty nodes (`1.1`),
names of columns, and lines without a word, with a note.
"""

import collections
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.runtime import files, progress
from antlm_jax.runtime.records import MARK

_DOCUMENT = "-DOCSTART-"
# Number of a word in CoNLL-U, or of a range or an empty node.
_ID = re.compile(r"(\d+)([-.]\d+)?")
_UPOS, _CONLLU = 3, 10  # column of CoNLL-U, and their number
# Names of the columns in a first line.
_WORD = re.compile("(word|token|form|text)s?", re.IGNORECASE)
_TAG = re.compile(
  "((ner|[ux]?pos|entity)[_ -]?)?(tag|label|type)s?|ner|[ux]?pos|entity|class",
  re.IGNORECASE,
)


class TaggedLine(NamedTuple):
  """A line that is not empty."""

  number: int  # from 1
  parts: list[str]  # columns
  text: str

  @property
  def may_be_comment(self) -> bool:
    """Whether it begins as comments do; words begin so, too."""
    return self.text.startswith("#")


Sentences = Sequence[Sequence[TaggedLine]]  # the lines between empty lines


class _Form(NamedTuple):
  """Places of a file's columns, from 0."""

  width: int
  numbered: bool  # whether the first column numbers the words
  word: int
  tag: int


Column = int | str | None  # from 0, or by its name in the first line


def columns(
  path: str, word: Column = None, tag: Column = None
) -> list[Example]:
  """Reads sentences, whose labels are tags, and whose names are their places.

  `word` and `tag` are columns; -1 is the last. By default, words are in
  the first column and tags in the last. If the first column numbers the words,
  words are in the second column. Tags are then in the third of three columns,
  or are UPOS, in the fourth of CoNLL-U's ten.

  A byte-order mark is no word. In WikiAnn each word has its language before it
  (`en:Paris`), which is removed, with a note. Raises a UserError if the columns
  of a line are not those of the file.
  """
  blocks = _blocks(path)
  named = [one for one in (word, tag) if isinstance(one, str)]
  word, tag = (_column_number(path, blocks, one) for one in (word, tag))
  form = _find_columns(path, blocks, word, tag)
  left_out = collections.defaultdict(list)
  if blocks and (named or _names_columns(blocks[0][0], form)):
    left_out["names of columns"].append(blocks[0][0].text)
    blocks = [blocks[0][1:], *blocks[1:]]
  _refuse_records(path, blocks, form)
  tags, out = _tags(blocks, form), []
  for block in blocks:
    pairs, where = [], ""
    for line in _without_comments(block, form, tags, left_out):
      if form.numbered and not line.parts[0].isdecimal():
        left_out["ranges or empty nodes"].append(line.text)
      elif not (found := _word_and_tag(path, line, form))[0]:
        left_out["lines without a word"].append(line.text)
      else:
        where = where if pairs else f"{path}, line {line.number}"
        pairs.append(found)
    out += [Example(*zip(*pairs, strict=True), where)] if pairs else []
  for what, those in left_out.items():
    progress.say(f"{path}: {what} left out: {len(those):,} ({those[0]!r:.40})")
  return _without_language(path, out)


def file_has_tags(path: str) -> bool:
  """Whether a file's lines have several columns, not words alone."""
  return _width(_blocks(path)) > 1


def _blocks(path: str) -> Sentences:
  """Reads the lines of a file, in blocks that empty lines divide."""
  lines = []
  text = files.read_text(path, "sentences")
  # Not splitlines: U+2028 and the like may be part of a word. Windows may write
  # \r\r\n at the end of one line.
  for line in re.split("\r*\n|\r", text):
    line = line.replace(MARK, "").strip(" ")  # WNUT-17 has marks in its lines
    lines.append(line if line.strip() else "")
  tabs = any("\t" in line for line in lines if line[:1] != "#")
  divider = re.compile("\t" if tabs else " +")
  out = [[]]
  for number, line in enumerate(lines, start=1):
    if not line or line.startswith(_DOCUMENT):
      out.append([])
    else:
      parts = [part.strip() for part in divider.split(line)]
      out[-1].append(TaggedLine(number, parts, line))
  return [block for block in out if block]


def _width(blocks: Sentences) -> int:
  """Returns the number of columns of the first line that is no comment."""
  lines = [line for block in blocks for line in block]
  first = next((x for x in lines if not x.may_be_comment), None)
  return len((first or lines[0]).parts) if lines else 0


def _find_columns(
  path: str, blocks: Sentences, word: int | None, tag: int | None
) -> _Form:
  """Finds a file's columns. Raises a UserError if the tags' is unclear."""
  width = _width(blocks)
  numbered = width > 2 and _are_numbered(blocks)
  unclear = ""
  if numbered and tag is None and width not in (3, _CONLLU):
    unclear = f"the first of {width} columns numbers the words"
  elif not numbered and word is None and _has_numbers(blocks, width):
    unclear = f"all words in the first of {width} columns are numbers"
  if unclear:
    raise UserError(
      f"{path}: {unclear}: choose the columns of words and tags, such as"
      " tokens_column=2 and tags_column=3"
    )
  if not numbered:
    return _Form(width, False, word or 0, -1 if tag is None else tag)
  given = word is not None and tag is not None
  word = 1 if word is None else word
  tag = (2 if width == 3 else _UPOS) if tag is None else tag
  if not given:
    upos = " (UPOS)" if (width, tag) == (_CONLLU, _UPOS) else ""
    progress.say(
      f"{path}: the first column numbers the words; words are read from column"
      f" {word + 1}, tags from column {tag % width + 1}{upos}"
    )
  return _Form(width, True, word, tag)


def _has_numbers(blocks: Sentences, width: int) -> bool:
  """Whether the first of several columns counts sentences or characters.

  The first line may have names.
  """
  _, *lines = [line for block in blocks for line in block] or [None]
  found = [line.parts[0] for line in lines if not line.may_be_comment]
  return width > 2 and bool(found) and all(map(str.isdecimal, found))


def _column_number(path: str, blocks: Sentences, column: Column) -> int | None:
  """Returns the number of a column. Raises a UserError for an unknown name."""
  if not isinstance(column, str):
    return column
  names = blocks[0][0].parts if blocks else []
  if names.count(column) != 1:
    raise UserError(
      f"{path}: {names.count(column)} columns have the name {column!r} in the"
      f" first line ({', '.join(names):.60}): give the number, from 1"
    )
  return names.index(column)


def _are_numbered(blocks: Sentences) -> bool:
  """Whether the first column counts the words of each sentence."""
  longest = 0
  for block in blocks:
    words = [line for line in block if not line.may_be_comment]
    ids = [_ID.fullmatch(line.parts[0]) for line in words]
    if not all(ids):
      return False
    counts = [int(one[1]) for one in ids if not one[2]]
    if counts and counts != [*range(counts[0], counts[0] + len(counts))]:
      return False
    longest = max(longest, len(counts))
  return longest > 1


def _refuse_records(path: str, blocks: Sentences, form: _Form) -> None:
  """Raises a UserError if each line has a whole sentence and all its tags."""

  def whole(line: TaggedLine) -> bool:
    if max(form.word, form.tag) >= len(line.parts):
      return False
    word, tag = line.parts[form.word], line.parts[form.tag]
    return len(word.split()) == len(tag.split()) > 1 or tag[:1] == "["

  lines = [line for block in blocks for line in block]
  if lines and all(map(whole, lines)):
    raise UserError(
      f"{path}, line {lines[0].number}: it has a whole sentence: save records"
      " as csv, jsonl or parquet, or put each word on a separate line"
    )


def _names_columns(line: TaggedLine, form: _Form) -> bool:
  """Whether a file's first line has the names of its columns."""
  if max(form.word, form.tag) >= len(line.parts):
    return False
  word, tag = line.parts[form.word], line.parts[form.tag]
  return bool(_WORD.fullmatch(word) and _TAG.fullmatch(tag))


def _tags(blocks: Sentences, form: _Form) -> set[str]:
  """Returns the tags of all lines that are surely words."""
  lines = (line for block in blocks for line in block)
  return {
    line.parts[form.tag]
    for line in lines
    if not line.may_be_comment and form.tag < len(line.parts)
  }


def _without_comments(
  block: Sequence[TaggedLine], form: _Form, tags: set[str], left_out: dict
) -> Iterator[TaggedLine]:
  """Yields a block's lines without comments.

  If the first column has the words, a word may be `#` or `#tag`. There, a
  comment precedes the sentence, and its columns or its tag are not those of
  words.
  """
  begun = False
  for line in block:
    odd = len(line.parts) != form.width or (
      line.parts[0] == "#" and tags.isdisjoint(line.parts[form.tag :][:1])
    )
    if line.may_be_comment and (form.word > 0 or (odd and not begun)):
      left_out["comments"].append(line.text)
      continue
    begun = True
    yield line


def _word_and_tag(path: str, line: TaggedLine, form: _Form) -> tuple[str, str]:
  """Returns a line's word and tag. Raises a UserError if it has none."""
  where, count = f"{path}, line {line.number}", len(line.parts)
  if count < 2:
    hint = ""
    if " " in line.parts[0]:
      hint = "; another line has a tab, and then tabs divide all columns"
    raise UserError(f"{where}: {count} columns, not a word and its tag{hint}")
  # Lines may differ in the columns after those that are read.
  if form.tag < 0 and count != form.width:
    raise UserError(
      f"{where}: {count} columns, but the first line has {form.width}"
    )
  if (last := 1 + max(form.word, form.tag)) > count:
    raise UserError(f"{where}: {count} columns, of which none is column {last}")
  word, tag = line.parts[form.word], line.parts[form.tag]
  if word and not tag:
    raise UserError(f"{where}: {word!r:.40} has no tag")
  return word, tag


def _without_language(path: str, found: list[Example]) -> list[Example]:
  """Removes a language that all words have before them, as in WikiAnn."""
  texts = [text for one in found for text in one.texts]
  language = re.match("[a-z][a-z-]*:(?=.)", texts[0]) if texts else None
  if not language or not all(t.startswith(language[0]) for t in texts):
    return found
  progress.say(f"{path}: removed {language[0]!r} before each word")
  return [
    one._replace(texts=tuple(t[language.end() :] or t for t in one.texts))
    for one in found
  ]
