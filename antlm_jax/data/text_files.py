"""Finds files of text, and sorts them into train, dev and test by name."""

import collections
import dataclasses
import glob
import itertools
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from antlm_jax.data import readers
from antlm_jax.data.readers import RULES, Document
from antlm_jax.errors import UserError
from antlm_jax.runtime import records

DEV = "dev", "validation", "valid", "val"  # names of the held-out split
# A file's name, between two dots, or a folder's that names a split: train,
# corpus_valid, train-00000-of-00002, train_10M.
_NAMED = re.compile(
  rf"(?:.*[-_])?(?:(?P<train>train)|(?P<dev>{'|'.join(DEV)})"
  r"|(?P<test>test))(?:[-_]?\d[\w-]*)?"
)
# The same words anywhere in a name, for names that differ in them alone.
_WORD = re.compile(
  rf"(?P<train>train(?:ing)?)|(?P<dev>{'|'.join(DEV)})"
  r"|(?P<test>test(?:ing)?)"
)
_UNUSED = {
  "": "beside files named train",
  "train": "named train",
  "dev": "named dev, but --dev is given",
  "test": "named test",
  "unknown": "of no known kind",
}
_SHOWN = 3  # names in a list of files
# How the names of folders begin in which `prepare` writes given documents.
WRITTEN = "antlm-documents-"

Path = str | os.PathLike


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Sources of text of each split: paths, and datasets `hf://...`."""

  train: tuple[str, ...]
  dev: tuple[str, ...]  # if empty, a share of train is to be held out
  unused: dict[str, list[str]]  # all others that were found, by reason
  documents: str = "auto"  # where one of plain text ends, of `readers.RULES`
  column: str = "text"  # column of records that holds their text
  given: tuple[str, ...] = ()  # the paths in which they were found

  @property
  def test(self) -> tuple[str, ...]:
    """Sources that are named test. Nothing is trained on them."""
    return tuple(self.unused.get(_UNUSED["test"], ()))

  @property
  def prepared(self) -> list[tuple[str, str]]:
    """Split and source of all that is prepared: of train, then of dev."""
    of_dev = [("dev", source) for source in self.dev]
    return [("train", source) for source in self.train] + of_dev

  def read(
    self, split: str, tally: readers.Tally | None = None
  ) -> Iterator[Document]:
    """Yields the documents of a split's sources, as `read_documents` does."""
    how = {"column": self.column, "tally": tally}
    for source in getattr(self, split):
      yield from readers.read_documents(source, RULES[self.documents], **how)

  def copies(self) -> list[str]:
    """Returns a warning of files with the same content, if there are any.

    The content of a compressed file is that before compression. Empty files do
    not count.
    """
    groups = readers.equal_files([*self.train, *self.dev])
    both = [g for g in groups if {*g} & {*self.train} and {*g} & {*self.dev}]
    warnings = {
      "files are trained on and held out": both,
      "equal files are all used": [g for g in groups if g not in both],
    }
    return [
      f"warning: {what}: {_equal(those)}; delete all but one of them"
      for what, those in warnings.items()
      if those
    ]

  def __str__(self) -> str:
    listed = {"train": self.train, "dev": self.dev}
    for why, found in self.unused.items():
      expected = why == _UNUSED["test"]
      listed[f"{'' if expected else 'warning: '}not used, {why}"] = found
    return "\n".join(
      f"{k}: {_listed_sources(v)}" for k, v in listed.items() if v
    )


def source_name(split: str, path: str) -> str:
  """Returns a source's path, or a name for documents that Python gave."""
  # `prepare` writes them at another path each time.
  written = pathlib.Path(path).parent.name.startswith(WRITTEN)
  return f"documents of {split}" if written else path


class Found(NamedTuple):
  """A file, or a dataset, that was found."""

  source: str
  split: str  # named by the file: train, dev, test, "" or, if no text, unknown
  alone: bool = False  # given by its own path, rather than found in a folder


def find_corpus(
  text: Sequence[str],
  dev: Sequence[str] = (),
  needs_train: bool = True,
  **reading,
) -> Corpus:
  """Finds files, in folders (recursively) and by globs, and datasets of a hub.

  A file belongs to the split that its name says (docs/how_to/prepare_text.md).
  Others are train, unless their folder has files named train. If nothing else
  is found, a file given by its own path is train, also if it is named dev or
  test. Paths in `dev` are held out, instead of files of `text` that are named
  dev. `reading` holds `documents` and `column` of the corpus.

  Raises:
    UserError: A path is missing or of no known kind, or there is no text to
      train on (with `needs_train`) or, in `dev`, to hold out.
  """
  by_path = [search(path) for path in text]
  everything = list(itertools.chain(*by_path))
  train = _to_train_on(by_path)
  if dev:
    held_out = [file for path in dev for file in _held_out_files(path)]
  else:
    held_out = [f for f in everything if f.split == "dev" and f not in train]
  # Each file is used once, and held-out text is not trained on.
  dev_of = _by_file(held_out)
  train_of = {k: f for k, f in _by_file(train).items() if k not in dev_of}
  unused = collections.defaultdict(list)
  for file, one in _by_file(everything).items():
    if file not in dev_of and file not in train_of:
      unused[_UNUSED[one.split]].append(one.source)
  corpus = Corpus(
    tuple(one.source for one in train_of.values()),
    tuple(one.source for one in dev_of.values()),
    dict(unused),
    given=(*text, *dev),
    **reading,
  )
  if not train_of and (needs_train or not corpus.test):
    has = "; ".join(str(corpus).splitlines()) or "no files"
    raise UserError(
      f"no text to train on in {' '.join(text)} ({has}); give files that end"
      f" in {readers.endings()}"
    )
  return corpus


def _to_train_on(by_path: Sequence[Sequence[Found]]) -> list[Found]:
  """Returns the files to train on, of those found under each path."""
  train = []
  for found in by_path:
    train += _first_split(found, "train", "")
  if train:
    return train
  # If nothing else is found, a file's own path says more than its name.
  alone = [file for found in by_path for file in found if file.alone]
  return _first_split(alone, "dev", "test")


def _by_file(found: Iterable[Found]) -> dict[str, Found]:
  """Returns the first of each file and of the links to it."""
  out = {}
  for one in found:
    hub = one.source.startswith(readers.HUB)
    out.setdefault(one.source if hub else os.path.realpath(one.source), one)
  return out


def _first_split(found: Sequence[Found], *splits: str) -> list[Found]:
  """Returns the files of the first of some splits that has any."""
  for split in splits:
    if files := [file for file in found if file.split == split]:
      return files
  return []


def _held_out_files(path: str) -> list[Found]:
  """Returns the files of a path that the user holds out, or raises."""
  found = search(path)
  taken = _first_split(found, "dev", "") or [f for f in found if f.alone]
  if not taken:
    raise UserError(f"no text to hold out in {path}; give its files themselves")
  return taken


def search(path: str) -> list[Found]:
  """Finds the files of a path, in the order of their names.

  Raises a UserError if there is none, or a file is of no known kind.
  """
  if path.startswith(readers.HUB):
    alone = path.count(":") > 2
    sources = readers.splits_of(path)
    return [
      Found(s, _named_split([s.rpartition(":")[2]]), alone) for s in sources
    ]
  root, matched = path, [pathlib.Path(path)]
  # Not of Path, which raises for names that are too long.
  if os.path.lexists(path) and not os.path.isdir(path):
    readers.kind_of_file(path)
    return [_checked_file(_sorted(path, os.path.dirname(path), alone=True))]
  if not os.path.isdir(path):
    root = re.split(r"[^/]*[*?[]", path)[0]
    matched = sorted(map(pathlib.Path, glob.glob(path, recursive=True)))
    if matched and "**" in path:  # glob skips folders that it cannot read
      _inside(root or ".")
  if not matched:
    raise UserError(f"{path} does not exist; give text files or folders")
  found = [
    _sorted(file, root)
    for match in matched
    for file in (_inside(match) if match.is_dir() else [match])
  ]
  return [_checked_file(one) for one in _with_siblings(found, root)]


def _checked_file(found: Found) -> Found:
  """Raises a UserError for a link to nothing, and for text in no plain file."""
  try:
    mode = os.stat(found.source).st_mode
  except OSError as error:
    raise UserError(
      f"cannot read {found.source}: {error.strerror}; delete or mend this"
      f" {'link' if os.path.islink(found.source) else 'file'}"
    ) from error
  if found.split != "unknown" and not records.writable(found.source):
    shown = os.fsencode(found.source).decode(errors="backslashreplace")
    raise UserError(f"the name of {shown} is not UTF-8: rename it")
  # A pipe cannot be read twice.
  if found.split != "unknown" and not stat.S_ISREG(mode):
    raise UserError(
      f"{found.source} is not a regular file; give text files or folders"
    )
  return found


def _unreadable(error: OSError) -> None:
  raise UserError(
    f"cannot read the folder {error.filename}: {error.strerror}; make it"
    " readable, or give the other folders"
  ) from error


def _inside(folder: Path) -> list[pathlib.Path]:
  """Returns the files in a folder, without hidden files, in order of names."""
  files, seen, real = [], set(), os.path.realpath
  walk = os.walk(folder, onerror=_unreadable, followlinks=True)
  for place, folders, names in walk:
    seen.add(real(place))
    visible = [name for name in folders if name[0] != "."]
    folders[:] = [n for n in visible if real(f"{place}/{n}") not in seen]
    files += [pathlib.Path(place, name) for name in names if name[0] != "."]
  return sorted(files)


def _sorted(file: Path, root: Path, alone: bool = False) -> Found:
  """Finds a file's split in its name, and in those of folders under `root`."""
  source = os.fspath(file)
  # In a folder, many files without an ending are no text.
  if not alone and readers.kind(source) is None:
    return Found(source, "unknown", alone)
  *folders, name = pathlib.Path(os.path.relpath(source, root)).parts
  return Found(
    source, _named_split([*name.split("."), *reversed(folders)]), alone
  )


def _with_siblings(found: Sequence[Found], root: Path) -> list[Found]:
  """Also finds splits in names that differ in the split's word alone.

  Next to train_set.csv, the file test_set.csv is test. Without such a file, its
  name may be that of any document.
  """
  groups = collections.defaultdict(dict)
  for number, one in enumerate(found):
    parts = pathlib.Path(os.path.relpath(one.source, root)).parts
    for at, part in enumerate(parts) if not one.split else ():
      name = part.lower()
      if word := _WORD.search(name):
        around = name[: word.start()], name[word.end() :]
        same = *parts[:at], *(re.sub(r"[\W\d_]", "", text) for text in around)
        groups[same][number] = word.lastgroup
  splits = {}
  for named in groups.values():
    if {"train"} < {*named.values()}:
      splits |= named
  return [
    one._replace(split=splits.get(number, one.split))
    for number, one in enumerate(found)
  ]


def _named_split(names: Iterable[str]) -> str:
  """Returns the split of the first name that says one, "" if none does."""
  matches = (_NAMED.fullmatch(name.lower()) for name in names)
  return next((match.lastgroup for match in matches if match), "")


def _equal(groups: Sequence[Sequence[str]]) -> str:
  """Shows some groups of equal files, by their paths in their common folder."""
  paths = [path for group in groups for path in group]
  folders = [os.path.dirname(os.path.abspath(path)) for path in paths]
  root = os.path.commonpath(folders)
  shown = [
    " = ".join(os.path.relpath(path, root) for path in group[:_SHOWN])
    + (f" = ... ({len(group)} files)" if group[_SHOWN:] else "")
    for group in groups[:_SHOWN]
  ]
  more = f", and {len(groups) - _SHOWN:,} more" if groups[_SHOWN:] else ""
  return ", ".join(shown) + more


def _listed_sources(sources: Sequence[str]) -> str:
  names = [source.rpartition("/")[2] or source for source in sources]
  shown = ", ".join(names[:_SHOWN]) + (", ..." if names[_SHOWN:] else "")
  if len(names) == 1:
    return shown
  kinds = collections.Counter(name.partition(".")[1:][1] for name in names)
  counts = ", ".join(f"{count} .{kind}" for kind, count in kinds.most_common(4))
  return f"{len(names)} files ({counts}): {shown}"
