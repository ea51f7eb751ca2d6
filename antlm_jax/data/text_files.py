"""Finds files of text, and sorts them into train, dev and test by name."""

import collections
import dataclasses
import glob
import itertools
import json
import os
import pathlib
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from antlm_jax.data import readers, splits
from antlm_jax.data.readers import RULES, Document, Rule
from antlm_jax.errors import UserError
from antlm_jax.runtime import progress, records
from antlm_jax.runtime.files import not_a_path, writing

_UNUSED = {
  "": "beside files named train",
  "train": "named train",
  "dev": "named dev, but --dev is given",
  "test": "named test",
  "unknown": "of no known kind",
}
_SHOWN = 3  # names in a list of files
# Names of files that describe a folder, and may be no part of its text.
_DESCRIPTION = re.compile(
  "(readme|licen[cs]e|copying|notice|requirements|changelog|contributing"
  "|authors|citation|metadata)([-_.]|$)"
)
# Files of a prepared folder, also before it is ready.
_PREPARED = "train-*.array_record", "preparing/plan.json"
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
  separator: str = ""  # text at which documents end instead
  column: str = "text"  # column of records that holds their text
  paths: tuple[str, ...] = ()  # the paths in which they were found
  # Names of the written documents of a split, if they are of other sources.
  written: dict[str, str] = dataclasses.field(default_factory=dict)
  # Sources whose path names two splits, by those.
  unclear: dict[str, list[str]] = dataclasses.field(default_factory=dict)

  @property
  def rule(self) -> Rule:
    """Where a document ends."""
    if self.separator:
      return readers.rule_of_separator(self.separator)
    return RULES[self.documents]

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
    sources = getattr(self, split)
    yield from self.read_parts(((s, readers.WHOLE) for s in sources), tally)

  def read_parts(
    self,
    parts: Iterable[tuple[str, tuple[int, int]]],
    tally: readers.Tally | None = None,
  ) -> Iterator[Document]:
    """Yields the documents of sources' parts, each (index, count)."""
    for source, part in parts:
      yield from readers.read_documents(
        source, self.rule, self.column, part, tally
      )

  def source_name(self, split: str, path: str) -> str:
    """Returns a source's path, or a name for documents that have none."""
    # `prepare` writes them at another path each time.
    if not pathlib.Path(path).parent.name.startswith(WRITTEN):
      return path
    return self.written.get(split, f"documents of {split}")

  def __str__(self) -> str:
    listed = {"train": self.train, "dev": self.dev}
    for why, sources in self.unused.items():
      expected = why == _UNUSED["test"]
      listed[f"{'' if expected else 'warning: '}not used, {why}"] = sources
    for names, sources in self.unclear.items():
      listed[f"warning: {names}"] = sources
    in_folders = [x for x in self.train if x not in self.paths]
    listed["named like a held-out set, but trained on"] = [
      source
      for source in in_folders
      if splits.split_word(source) in ("dev", "test")
    ]
    listed["warning: named like a description, but trained on"] = [
      source
      for source in in_folders
      if _DESCRIPTION.match(os.path.basename(source).lower())
    ]
    return "\n".join(
      f"{k}: {_listed_sources(v)}" for k, v in listed.items() if v
    )


class Found(NamedTuple):
  """A file, or a dataset, that was found."""

  source: str
  split: str  # that its name says, "" for none, or unknown if it is no text
  # Equal for the parts of one set, as the next see `splits.SplitName`.
  stem: tuple[str, ...]
  other: str
  alone: bool  # given by its own path, rather than found in a folder


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
  dev. `reading` holds `documents`, `separator` and `column` of the corpus.

  Raises:
    UserError: A path is missing or of no known kind, or there is no text to
      train on (with `needs_train`) or, in `dev`, to hold out.
  """
  by_path = search(text)
  everything = list(itertools.chain(*by_path))
  train = _to_train_on(by_path)
  if dev:
    held_out = [
      file
      for path, entries in zip(dev, search(dev), strict=True)
      for file in _held_out_files(path, entries)
    ]
  else:
    held_out = [f for f in everything if f.split == "dev" and f not in train]
  # Each file is used once, and held-out text is not trained on.
  dev_of = _by_file(held_out)
  train_of = {k: f for k, f in _by_file(train).items() if k not in dev_of}
  unused = collections.defaultdict(list)
  unclear = collections.defaultdict(list)
  for file, entry in _by_file(everything).items():
    if file not in dev_of and file not in train_of:
      unused[_UNUSED[entry.split]].append(entry.source)
    elif entry.other and entry.split == ("dev" if file in dev_of else "train"):
      names = f"read as {entry.split}, but named {entry.other} as well"
      unclear[names].append(entry.source)
  corpus = Corpus(
    tuple(entry.source for entry in train_of.values()),
    tuple(entry.source for entry in dev_of.values()),
    dict(unused),
    paths=(*text, *dev),
    unclear=dict(unclear),
    **reading,
  )
  if not text:
    raise UserError("no text to train on: the list of texts is empty")
  if not train_of and (needs_train or not corpus.test):
    has = "; ".join(str(corpus).splitlines()) or "no files"
    raise UserError(
      f"no text to train on in {' '.join(text)} ({has}); give files that end"
      f" in {readers.endings()}"
    )
  return corpus


def write_documents(
  path: pathlib.Path, documents: Iterable[str | None], column: str
) -> None:
  """Writes documents as records, which may lack a text."""
  with writing(path), path.open("w", encoding="utf-8") as file:
    for document in documents:
      file.write(json.dumps({column: document}) + "\n")


def _to_train_on(by_path: Sequence[Sequence[Found]]) -> list[Found]:
  """Returns the files to train on, of those found under each path."""
  train = []
  for entries in by_path:
    train += _first_split(entries, "train", "")
  if train:
    return train
  # If nothing else is found, a file's own path says more than its name.
  alone = [file for entries in by_path for file in entries if file.alone]
  return _first_split(alone, "dev", "test")


def _by_file(entries: Iterable[Found]) -> dict[str, Found]:
  """Returns the first of each file and of the links to it."""
  out = {}
  for entry in entries:
    file = entry.source
    if not file.startswith(readers.HUB):
      file = os.path.realpath(file)
    out.setdefault(file, entry)
  return out


def _first_split(entries: Sequence[Found], *splits: str) -> list[Found]:
  """Returns the files of the first of some splits that has any."""
  for split in splits:
    if files := [file for file in entries if file.split == split]:
      return files
  return []


def _held_out_files(path: str, entries: Sequence[Found]) -> list[Found]:
  """Returns the files of a path that the user holds out, or raises."""
  taken = _first_split(entries, "dev", "") or [f for f in entries if f.alone]
  if not taken:
    raise UserError(f"no text to hold out in {path}; give its files themselves")
  return taken


def search(paths: Sequence[str], any_kind: bool = False) -> list[list[Found]]:
  """Finds the files of each path, in the order of their names.

  Files of no known kind have the split `unknown`, except with `any_kind`.
  Raises a UserError if a path has none, or is a file of no known kind.
  """
  files = [path for path in paths if _is_file(path)]
  names = splits.split_names([os.path.basename(path) for path in files])
  alone = {
    path: _checked_file(Found(path, *name, alone=True))
    for path, name in zip(files, names, strict=True)
  }
  return _with_folders(
    [
      [alone[path]] if path in alone else _search_folder(path, any_kind)
      for path in paths
    ]
  )


def _with_folders(by_path: list[list[Found]]) -> list[list[Found]]:
  """Gives files the splits of folders that are above the paths.

  The shell finds single files for `data/*/*.txt`, and folders for `data/*`. A
  folder's name counts only next to that of train.
  """
  sources = [
    entry.source
    for entry in itertools.chain(*by_path)
    if entry.split != "unknown" and not entry.source.startswith(readers.HUB)
  ]
  if len(by_path) < 2 or not sources:
    return by_path
  root = os.path.commonpath(map(os.path.dirname, map(os.path.abspath, sources)))
  names = splits.split_names([os.path.relpath(path, root) for path in sources])
  if all(name.split != "train" for name in names):
    return by_path
  name_of_file = dict(zip(sources, names, strict=True))

  def named(entry: Found) -> Found:
    if entry.split or entry.source not in name_of_file:
      return entry
    return entry._replace(**name_of_file[entry.source]._asdict())

  return [[*map(named, entries)] for entries in by_path]


def _is_file(path: str) -> bool:
  if path.startswith(readers.HUB):
    return False
  # Not of Path, which raises for names that are too long.
  if not os.path.lexists(path) or os.path.isdir(path):
    return False
  readers.kind_of_file(path)
  return True


def _search_folder(path: str, any_kind: bool) -> list[Found]:
  """Finds the files of a folder, a glob, or the parts of a dataset."""
  if readers.is_saved_dataset(path):
    path = readers.HUB + os.path.normpath(path)
  if path.startswith(readers.HUB):
    sources = readers.splits_of(path)
    parts = [source.rpartition(":")[2] for source in sources]
    names = splits.split_names(parts, files=False)
    alone = sources == [path]
    return [
      Found(source, *name, alone)
      for source, name in zip(sources, names, strict=True)
    ]
  root = path
  matched = [pathlib.Path(path)]
  if not os.path.isdir(path):
    root = re.split(r"[^/]*[*?[]", path)[0]
    matched = sorted(map(pathlib.Path, glob.glob(path, recursive=True)))
    if matched and "**" in path:  # glob skips folders that it cannot read
      _inside(root or ".")
  if not matched:
    raise not_a_path(path)
  files = [
    os.fspath(file)
    for match in matched
    for file in (_inside(match) if match.is_dir() else [match])
  ]
  readable = [file for file in files if any_kind or readers.kind(file)]
  names = splits.split_names([os.path.relpath(file, root) for file in readable])
  name_of_file = dict(zip(readable, names, strict=True))
  _warn_of_missing_parts(readable)
  unknown = splits.SplitName("unknown")
  return [
    _checked_file(Found(file, *name_of_file.get(file, unknown), alone=False))
    for file in files
  ]


def _warn_of_missing_parts(paths: Iterable[str]) -> None:
  """Warns of numbered parts that are not there, as after a broken download."""
  numbers = collections.defaultdict(set)
  for path in paths:
    if match := re.match(r"(.*?)(\d+)-of-(\d+)(?!.*/)", path):
      start, number, count = match.groups()
      numbers[start, int(count)].add(int(number))
  for (start, count), present in numbers.items():
    if len(present) < count:
      progress.say(
        f"warning: {start}*: only {len(present):,} of {count:,} parts are there"
      )


def _checked_file(entry: Found) -> Found:
  """Returns an entry after a check of its file.

  Raises a UserError for a broken link or a file out of reach. A file of text
  must also have a name in UTF-8, and be a regular file.
  """
  try:
    mode = os.stat(entry.source).st_mode
  except OSError as error:
    raise UserError(
      f"cannot read {entry.source}: {error.strerror}; delete or mend this"
      f" {'link' if os.path.islink(entry.source) else 'file'}"
    ) from error
  if entry.split == "unknown":  # not read as text
    return entry
  if not records.writable(entry.source):
    shown = os.fsencode(entry.source).decode(errors="backslashreplace")
    raise UserError(
      f"the name of {shown} is not UTF-8: rename it, or set PYTHONUTF8=1 if the"
      " locale of this shell is not UTF-8"
    )
  if not stat.S_ISREG(mode):  # a pipe cannot be read twice
    raise UserError(
      f"{entry.source} is not a regular file; give text files or folders"
    )
  return entry


def _unreadable(error: OSError) -> None:
  raise UserError(
    f"cannot read the folder {error.filename}: {error.strerror}; make it"
    " readable, or give the other folders"
  ) from error


def _inside(folder: Path) -> list[pathlib.Path]:
  """Returns the files in a folder, in the order of their names.

  Leaves out hidden files, and the prepared folders in it.
  """
  files = []
  visited = set()
  real = os.path.realpath
  walk = os.walk(folder, onerror=_unreadable, followlinks=True)
  for place, folders, names in walk:
    visited.add(real(place))
    if readers.is_saved_dataset(place):
      raise UserError(
        f"{place} is a dataset that save_to_disk wrote: give this folder itself"
      )
    visible = [name for name in folders if name[0] != "."]
    folders[:] = [
      name
      for name in visible
      if real(f"{place}/{name}") not in visited
      and not _is_prepared(f"{place}/{name}")
    ]
    files += [pathlib.Path(place, name) for name in names if name[0] != "."]
  return sorted(files)


def _is_prepared(folder: str) -> bool:
  return any(glob.glob(pattern, root_dir=folder) for pattern in _PREPARED)


def _listed_sources(sources: Sequence[str]) -> str:
  names = [source.rpartition("/")[2] or source for source in sources]
  shown = ", ".join(names[:_SHOWN]) + (", ..." if names[_SHOWN:] else "")
  if len(names) == 1:
    return shown
  kinds = collections.Counter(name.partition(".")[1:][1] for name in names)
  counts = ", ".join(f"{count} .{kind}" for kind, count in kinds.most_common(4))
  return f"{len(names)} files ({counts}): {shown}"
