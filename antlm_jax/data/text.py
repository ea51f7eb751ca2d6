"""Text files, and the documents in them, streamed."""

import codecs
import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from antlm_jax import errors

# BabyLM names its splits by suffix; its 2026 release adds `.txt` to them.
_SPLIT_SUFFIXES = {
  "train": (".train", ".train.txt"),
  "dev": (".dev", ".dev.txt"),
}
SPLITS = tuple(_SPLIT_SUFFIXES)
_PLAIN_SUFFIXES = (".txt", ".text", ".md")
_HEADING = re.compile(r"\s*= = = .* = = =\s*")
# A line longer than this, in bytes, is read as several.
_LONGEST_LINE = 1 << 20


@dataclasses.dataclass(frozen=True)
class Rule:
  """Where a document ends.

  Attributes:
    length: Characters after which the next line end ends the document.
    at_blank: Whether a blank line ends it.
    at_heading: Whether the next `= = = Title = = =` line ends it.
  """

  length: int
  at_blank: bool = False
  at_heading: bool = False


RULES = {
  "auto": Rule(1 << 16, at_blank=True, at_heading=True),
  "line": Rule(1),
  "file": Rule(1 << 20),
}


@dataclasses.dataclass(frozen=True)
class Sources:
  """The files of each split; without dev files, a share of train is dev."""

  train: tuple[pathlib.Path, ...]
  dev: tuple[pathlib.Path, ...]

  @property
  def files(self) -> tuple[pathlib.Path, ...]:
    return self.train + self.dev


def find(paths: Iterable[str | os.PathLike]) -> Sources:
  """Finds text files.

  In a folder (searched recursively) with `*.train` files, those are the train
  split and `*.dev` the dev split; in any other, all `.txt`, `.text` and `.md`
  files are train. A file named by itself is train, unless it is `*.dev`.

  Raises:
    UserError: A path is missing, or there is no text to train on.
  """
  found = [file for path in paths for file in _files(pathlib.Path(path))]
  found = list({file.resolve(): file for file in found}.values())
  dev = tuple(file for file in found if _is_split(file, "dev"))
  train = tuple(file for file in found if file not in dev)
  if not train:
    names = " ".join(map(str, paths))
    raise errors.UserError(
      f"no text to train on in {names}: a folder needs *.train files, or "
      f"{' '.join('*' + suffix for suffix in _PLAIN_SUFFIXES)}"
    )
  return Sources(train, dev)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  if not path.exists():
    raise errors.UserError(f"{path} does not exist; give text files or folders")
  if not path.is_dir():
    return [path]
  inside = sorted(file for file in path.rglob("*") if file.is_file())
  split = [f for f in inside if _is_split(f, "train") or _is_split(f, "dev")]
  if any(_is_split(file, "train") for file in split):
    return split
  return [file for file in inside if file.suffix.lower() in _PLAIN_SUFFIXES]


def _is_split(file: pathlib.Path, split: str) -> bool:
  return file.name.endswith(_SPLIT_SUFFIXES[split])


def split_documents(
  sources: Sources, split: str, rule: Rule, dev_share: float, share: float = 1.0
) -> Iterator[str]:
  """Yields the documents of a split, `train` or `dev`, in order.

  Args:
    sources: The files.
    split: `train` or `dev`.
    rule: Where a document ends.
    dev_share: Share of the documents held out as dev, evenly spread and
      beginning with the first; used only where there are no dev files.
    share: Share of the train documents to take, evenly spread.
  """
  found = documents(sources.train, rule)
  if sources.dev:
    found = documents(getattr(sources, split), rule)
  else:
    held_out = split == "dev"
    found = (d for d, dev in _spread(found, dev_share) if dev == held_out)
  if split == "train":
    found = (d for d, taken in _spread(found, share) if taken)
  yield from found


def _spread(
  documents: Iterable[str], share: float
) -> Iterator[tuple[str, bool]]:
  """Says of each whether it is of an evenly spread share, as the first is."""
  for index, document in enumerate(documents):
    yield document, math.ceil(share * (index + 1)) > math.ceil(share * index)


def documents(files: Sequence[pathlib.Path], rule: Rule) -> Iterator[str]:
  """Yields the nonblank documents of files, each stripped of outer space.

  Memory is bounded by `rule.length` characters and one line, itself cut at
  1 MiB.

  Raises:
    UserError: A file cannot be read or is not UTF-8.
  """
  for file in files:
    for document in _split(_lines(file), rule):
      if document := document.strip():
        yield document


def _split(lines: Iterable[str], rule: Rule) -> Iterator[str]:
  held, length = [], 0
  for line in lines:
    if rule.at_heading and _HEADING.fullmatch(line):
      yield "".join(held)
      held, length = [], 0
    held.append(line)
    length += len(line)
    if length >= rule.length or (rule.at_blank and not line.strip()):
      yield "".join(held)
      held, length = [], 0
  yield "".join(held)


def _lines(path: pathlib.Path) -> Iterator[str]:
  """Yields the lines of a file with their ends, long ones cut at a space."""
  try:
    with open(path, "rb") as file:
      tail = ""
      for line, cut_off in _decoded(path, file):
        line, tail = _at_space(tail + line) if cut_off else (tail + line, "")
        yield line
      yield tail
  except OSError as error:
    raise errors.UserError(
      f"cannot read {path}: {error.strerror}; check the file"
    ) from error


def _at_space(line: str) -> tuple[str, str]:
  """Splits a line that was cut off into whole words and a begun one."""
  words, space, begun = line.rpartition(" ")
  return (words + space, begun) if space else (line, "")


def _decoded(path: pathlib.Path, file) -> Iterator[tuple[str, bool]]:
  """Yields decoded lines, and whether each was cut off at 1 MiB."""
  decoder = codecs.getincrementaldecoder("utf-8")()
  offset = 0
  while True:
    block = file.readline(_LONGEST_LINE)
    carried = len(decoder.getstate()[0])
    try:
      line = decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
      raise errors.UserError(
        f"{path} is not UTF-8: {error.reason} at byte "
        f"{offset - carried + error.start}; convert it (iconv -t UTF-8)"
      ) from error
    if offset == 0:
      line = line.removeprefix("\ufeff")
    cut_off = len(block) == _LONGEST_LINE and not block.endswith(b"\n")
    yield line.replace("\r\n", "\n"), cut_off
    if not block:
      return
    offset += len(block)
