"""Which files hold the text of each split."""

import collections
import dataclasses
import glob
import itertools
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from antlm_jax.data import readers
from antlm_jax.data.readers import RULES, Piece
from antlm_jax.errors import UserError

# What a file's name between two dots, or a folder's, says of the split:
# train, corpus_valid, train-00000-of-00002, train_10M.
_NAMED = re.compile(
  r"(?:.*[-_])?(?:(?P<train>train)|(?P<dev>dev|valid|validation|val)"
  r"|(?P<test>test))(?:[-_]?\d[\w-]*)?"
)
_UNUSED = {
  "": "beside files named train",
  "train": "named train",
  "dev": "named dev, but --dev is given",
  "test": "named test",
  "unknown": "of no known kind",
}
_SHOWN = 3  # names in a list of files


@dataclasses.dataclass(frozen=True)
class Corpus:
  """The sources of each split: paths, and datasets as `readers` names them."""

  train: tuple[str, ...]
  dev: tuple[str, ...]  # none: a share of train is held out
  unused: dict[str, list[str]]  # what else was found, by why
  documents: str = "auto"  # where one of plain text ends, of `readers.RULES`
  column: str = "text"  # what is read of records

  @property
  def test(self) -> tuple[str, ...]:
    """The sources that are named test, which nothing is trained on."""
    return tuple(self.unused.get(_UNUSED["test"], ()))

  def pieces(self, split: str) -> Iterator[Piece]:
    """Yields the documents of a split's sources, as `readers.pieces` does."""
    for source in getattr(self, split):
      yield from readers.pieces(source, RULES[self.documents], self.column)

  def __str__(self) -> str:
    listed = {"train": self.train, "dev": self.dev}
    listed |= {f"not used, {why}": found for why, found in self.unused.items()}
    return "\n".join(f"{k}: {_listed(v)}" for k, v in listed.items() if v)


class _Found(NamedTuple):
  source: str
  split: str  # that its name says, "" for none; "unknown" if the kind is
  alone: bool  # given by itself, rather than found in a folder

  @property
  def key(self) -> str:
    """What a file that is named twice, or through a link, has in common."""
    hub = self.source.startswith(readers.HUB)
    return self.source if hub else os.path.realpath(self.source)


def find(text: Sequence[str], dev: Sequence[str] = (), **reading) -> Corpus:
  """Finds files, in folders (recursively) and by globs too, and hub datasets.

  Files are of the split that their names say (docs/data.md). All others are
  train, but for those in a folder beside files named train. A file given by
  itself is of the split that it is given for, if there is no other.

  Paths in `text` are of what to train on and, if it is so named, of what to
  hold out, unless `dev` has those; `reading` is `documents` and `column`.

  Raises:
    UserError: A path is missing or of no known kind, or there is no text to
      train on, or to hold out in `dev`.
  """
  given = [_find(path) for path in text]
  everything = list(itertools.chain(*given))
  train = [f for some in given for f in _first(some, "train", "")]
  train = train or _first([f for f in everything if f.alone], "dev", "test")
  held_out = [f for f in everything if f.split == "dev" and f not in train]
  if dev:
    held_out = [f for path in dev for f in _held_out(path)]
  # Once each; and what is held out is not trained on.
  seen, unused = set(), collections.defaultdict(list)
  dev_of = _once(held_out, seen)
  train_of = _once(train, seen)
  for found in everything:
    if _once([found], seen):
      unused[_UNUSED[found.split]].append(found.source)
  corpus = Corpus(train_of, dev_of, dict(unused), **reading)
  if not train_of:
    there = "; ".join(str(corpus).splitlines()) or "no files"
    raise UserError(
      f"no text to train on in {' '.join(text)} ({there}); give files that end"
      f" in {readers.endings()}"
    )
  # A FIFO or a device cannot be read more than once.
  for source in (*train_of, *dev_of):
    if not (source.startswith(readers.HUB) or os.path.isfile(source)):
      raise UserError(
        f"{source} is not a regular file; give text files or folders"
      )
  return corpus


def _once(found: Iterable[_Found], seen: set[str]) -> tuple[str, ...]:
  """Returns the sources of those that are not seen yet, and adds them."""
  new = {}
  for one in found:
    if one.key not in seen:
      new.setdefault(one.key, one.source)
  seen.update(new)
  return tuple(new.values())


def _held_out(path: str) -> list[_Found]:
  found = _find(path)
  taken = _first(found, "dev", "") or [f for f in found if f.alone]
  if not taken:
    raise UserError(f"no text to hold out in {path}; name its files themselves")
  return taken


def _first(found: Iterable[_Found], *splits: str) -> list[_Found]:
  """Returns those of the first of some splits that has any."""
  of = [[f for f in found if f.split == split] for split in splits]
  return next(filter(None, of), [])


def _find(path: str) -> list[_Found]:
  """Finds what a path stands for, in the order of names."""
  if path.startswith(readers.HUB):
    sources = readers.splits_of(path)
    alone = path.count(":") > 2
    return [_Found(s, _split([s.rpartition(":")[2]]), alone) for s in sources]
  # Not path.exists(), which raises for names that are too long to be.
  if os.path.isdir(path):
    return [_named(file, path) for file in _inside(path)]
  if os.path.exists(path):
    found = _named(path, os.path.dirname(path), alone=True)
    if found.split == "unknown":
      raise UserError(
        f"{path} is of no known kind; give files that end in"
        f" {readers.endings()}"
      )
    return [found]
  root = glob.has_magic(path) and re.split(r"[^/]*[*?[]", path)[0]
  matched = sorted(map(pathlib.Path, glob.glob(path, recursive=True)))
  if not matched:
    raise UserError(f"{path} does not exist; give text files or folders")
  return [
    _named(file, root)
    for match in matched
    for file in (_inside(match) if match.is_dir() else [match])
  ]


def _inside(folder: str | os.PathLike) -> list[pathlib.Path]:
  """Returns the files in a folder, but hidden ones, in the order of names."""
  files, seen = [], set()
  for place, folders, names in os.walk(folder, followlinks=True):
    seen.add(os.path.realpath(place))
    folders[:] = [
      name
      for name in folders
      if name[0] != "." and os.path.realpath(f"{place}/{name}") not in seen
    ]
    files += [pathlib.Path(place, name) for name in names if name[0] != "."]
  return sorted(files)


def _named(
  file: str | os.PathLike, root: str | os.PathLike, alone: bool = False
) -> _Found:
  """Sorts a file by its name, and those of the folders under `root`."""
  source = os.fspath(file)
  # Text often has no ending; in a folder, so have many other things.
  plain = alone and "." not in os.path.basename(source)
  if not plain and readers.kind(source) is None:
    return _Found(source, "unknown", alone)
  *folders, name = pathlib.Path(os.path.relpath(source, root)).parts
  return _Found(source, _split([*name.split("."), *reversed(folders)]), alone)


def _split(names: Iterable[str]) -> str:
  """Returns the split that the first name to say so says, "" if none does."""
  matches = (_NAMED.fullmatch(name.lower()) for name in names)
  return next((match.lastgroup for match in matches if match), "")


def _listed(sources: Sequence[str]) -> str:
  names = [source.rpartition("/")[2] or source for source in sources]
  shown = ", ".join(names[:_SHOWN]) + (", ..." if names[_SHOWN:] else "")
  if len(names) == 1:
    return shown
  kinds = collections.Counter(name.partition(".")[1:][1] for name in names)
  counts = ", ".join(f"{count} .{kind}" for kind, count in kinds.most_common(4))
  return f"{len(names)} files ({counts}): {shown}"
