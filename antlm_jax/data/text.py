"""Text files, and the documents in them, streamed."""

import dataclasses
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from antlm_jax.errors import UserError
from antlm_jax.settings import is_text

# BabyLM names its splits by suffix; its 2026 release adds `.txt` to them.
_SPLIT_SUFFIXES = {
  "train": (".train", ".train.txt"),
  "dev": (".dev", ".dev.txt"),
}
SPLITS = tuple(_SPLIT_SUFFIXES)
_PLAIN_SUFFIXES = (".txt", ".text", ".md")
_HEADING = re.compile(r"\s*= = = .* = = =\s*")


@dataclasses.dataclass(frozen=True)
class Rule:
  """Where a document ends."""

  length: int  # characters after which the next line end ends it
  # Characters at which a line is cut, between two words if it has any.
  longest_line: int = 1 << 20
  at_blank: bool = False  # whether a blank line ends it
  at_heading: bool = False  # whether the next `= = = Title = = =` line does


RULES = {
  # A quarter more, so that a line cut at a space is still a document's length.
  "auto": Rule(1 << 16, 5 << 14, at_blank=True, at_heading=True),
  "line": Rule(1),
  "file": Rule(1 << 20),
}


@dataclasses.dataclass(frozen=True)
class Sources:
  """The files of each split; without dev files, a share of train is dev."""

  train: tuple[pathlib.Path, ...]
  dev: tuple[pathlib.Path, ...]


def find(paths: Iterable[str | os.PathLike]) -> Sources:
  """Finds text files.

  In a folder (searched recursively) with `*.train` files, those are the train
  split and `*.dev` the dev split; in any other, all `.txt`, `.text` and `.md`
  files are train. A file named by itself is train, unless it is `*.dev`.

  Raises:
    UserError: A path is missing or no regular file, or there is no text to
      train on.
  """
  found = [file for path in paths for file in _files(pathlib.Path(path))]
  # A file that is named twice, or through a link, is read once.
  found = list({file.resolve(): file for file in found}.values())
  dev = tuple(file for file in found if _is_split(file, "dev"))
  train = tuple(file for file in found if file not in dev)
  if not train:
    names = " ".join(map(str, paths))
    raise UserError(
      f"no text to train on in {names}: a folder needs *.train files, or "
      f"{' '.join('*' + suffix for suffix in _PLAIN_SUFFIXES)}"
    )
  return Sources(train, dev)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  # Not path.exists(), which raises for names that are too long to be.
  if not os.path.exists(path):
    raise UserError(f"{path} does not exist; give text files or folders")
  if not path.is_dir():
    return [_checked(path)]
  inside = sorted(file for file in path.rglob("*") if not file.is_dir())
  split = [f for f in inside if _is_split(f, "train") or _is_split(f, "dev")]
  if not any(_is_split(file, "train") for file in split):
    split = [file for file in inside if file.suffix.lower() in _PLAIN_SUFFIXES]
  return [_checked(file) for file in split]


def _checked(file: pathlib.Path) -> pathlib.Path:
  """Refuses a FIFO or a device, which cannot be read more than once."""
  if not file.is_file():
    raise UserError(f"{file} is not a regular file; give text files or folders")
  if not is_text(str(file)):
    raise UserError(f"{str(file)!a}: its name is not UTF-8; rename it")
  return file


def _is_split(file: pathlib.Path, split: str) -> bool:
  return file.name.endswith(_SPLIT_SUFFIXES[split])


def split_documents(
  sources: Sources, split: str, rule: Rule, dev_share: float, share: float = 1.0
) -> Iterator[str]:
  """Yields the documents of a split, `train` or `dev`, in order.

  Without dev files `dev_share` of the documents are held out, evenly spread
  and beginning with the first. Of the train documents `share` are taken,
  evenly spread.
  """
  found = documents(sources.train, rule)
  if sources.dev:
    found = documents(getattr(sources, split), rule)
  else:
    held_out = split == "dev"
    found = (d for d, dev in _spread(found, dev_share) if dev == held_out)
  # Of what is left to train on, so that dev does not depend on the share.
  if split == "train":
    found = (d for d, taken in _spread(found, share) if taken)
  yield from found


def _spread(
  documents: Iterable[str], share: float
) -> Iterator[tuple[str, bool]]:
  """Says of each whether it is of an evenly spread share, as the first is."""
  # Taken where the sum of shares steps over a whole number.
  for index, document in enumerate(documents):
    yield document, math.ceil(share * (index + 1)) > math.ceil(share * index)


def documents(files: Sequence[pathlib.Path], rule: Rule) -> Iterator[str]:
  """Yields the nonblank documents of files, each stripped of outer space.

  Lines end as on any system: \\n, \\r\\n or \\r. Memory is bounded by
  `rule.length` and `rule.longest_line` characters.

  Raises:
    UserError: A file cannot be read or is not UTF-8.
  """
  for file in files:
    for document in _split(_lines(file, rule.longest_line), rule):
      if document := document.strip():
        yield document


def _split(lines: Iterable[str], rule: Rule) -> Iterator[str]:
  held, length = [], 0  # the document so far, blank ones included
  for line in lines:
    # A heading begins a document, a blank line or the length ends one.
    if rule.at_heading and _HEADING.fullmatch(line):
      yield "".join(held)
      held, length = [], 0
    held.append(line)
    length += len(line)
    if length >= rule.length or (rule.at_blank and not line.strip()):
      yield "".join(held)
      held, length = [], 0
  yield "".join(held)


def _lines(path: pathlib.Path, longest: int) -> Iterator[str]:
  """Yields the lines of a file with their ends, long ones cut."""
  try:
    # -sig leaves a byte order mark out; \r and \r\n are read as \n.
    with open(path, encoding="utf-8-sig") as file:
      begun = ""  # of the word that a cut would have divided
      while line := file.readline(longest):
        cut = len(line) == longest and not line.endswith("\n")
        line, begun = begun + line, ""
        if cut and " " in line:
          words, space, begun = line.rpartition(" ")
          line = words + space
        yield line
      yield begun
  except UnicodeDecodeError as error:
    raise UserError(
      f"{path} is not UTF-8: {error.reason} at byte {_bad_byte(path)}; convert"
      " it (iconv -t UTF-8)"
    ) from error
  except OSError as error:
    raise UserError(
      f"cannot read {path}: {error.strerror}; check the file"
    ) from error


def _bad_byte(path: pathlib.Path) -> int:
  """Finds the first byte that is not UTF-8: text files know blocks only."""
  offset = 0
  with open(path, "rb") as file:
    for line in file:
      try:
        line.decode("utf-8")
      except UnicodeDecodeError as error:
        return offset + error.start
      offset += len(line)
  return offset
