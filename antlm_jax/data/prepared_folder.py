"""A prepared folder: what was asked of it, and opening it whole and checked.

What can be checked without reading every row is checked as it is opened; a row
when it is read; all of them by `Prepared.verify`.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Mapping

from antlm_jax.data.hold_out import SPLITS
from antlm_jax.data.rows import Concatenated, Rows, damaged
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.runtime import buckets, files

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
_VERSION = 1
_BLOCK = 4096  # rows that are verified at once


@dataclasses.dataclass(frozen=True)
class Split:
  """What a split holds."""

  rows: int
  documents: int
  words: int  # as spaces divide them
  text_bytes: int  # of UTF-8
  tokens: int  # of all documents, boundaries included
  dropped: int  # tokens that filled no row
  padding: int  # tokens
  file: str  # name of the file of rows
  bytes: int  # its size
  sha256: str  # its hash

  @property
  def row_words(self) -> float:
    """Words in a row, in the mean."""
    return self.words * (1 - self.dropped / self.tokens) / self.rows


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What a prepared folder holds, and how it came to be."""

  settings: dict  # what was asked, by name; without places, which may change
  sources: list[dict]  # per text file its split, path, bytes and sha256
  tokenizer: dict  # sha256 of its file, and its vocab_size
  seq_len: int  # tokens in a row, T
  dtype: str  # of the tokens on disk
  segmented: bool  # whether rows are divided into segments
  splits: dict[str, Split]  # train and dev
  version: int = _VERSION  # of this format

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the manifest, and its own hash in it, at once or not at all."""
    fields = dataclasses.asdict(self)
    fields["checksum"] = _checksum(fields)
    files.write_json(pathlib.Path(folder, MANIFEST), fields)

  @classmethod
  def load(cls, folder: str | os.PathLike) -> "Manifest":
    """Reads a folder's manifest.

    Raises:
      UserError: There is none, or it is not as it was written.
    """
    path = pathlib.Path(folder, MANIFEST)
    try:
      fields = files.read_json(path, "the manifest")
    except UserError as error:
      raise UserError(
        f"{folder} is not a prepared dataset, or its preparation was"
        f" interrupted ({error}); run antlm prepare"
      ) from error
    # No field is looked at before the hash of them all is right: whatever is
    # missing, of another type or changed by hand is told at this one place.
    written = fields.pop("checksum", None)
    if written != _checksum(fields) or fields["version"] != _VERSION:
      raise UserError(
        f"{path} was changed after it was written, or is of another version of"
        " antlm_jax; run antlm prepare with another --output"
      )
    splits = {name: Split(**s) for name, s in fields.pop("splits").items()}
    return cls(splits=splits, **fields)


def _checksum(fields: dict) -> str:
  return _sha256(json.dumps(fields, sort_keys=True))


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A prepared folder."""

  folder: pathlib.Path
  manifest: Manifest  # what it says of itself
  tokenizer: Tokenizer  # the one that its rows were made with
  train: Rows
  dev: Rows  # held out

  @classmethod
  def open(cls, folder: str | os.PathLike) -> "Prepared":
    """Opens a folder, without reading all of it.

    Raises:
      UserError: It is not a prepared folder, or not as it was prepared.
    """
    folder = pathlib.Path(folder)
    manifest = Manifest.load(folder)
    # Ids mean nothing under another tokenizer, even one of the same size.
    path = folder / TOKENIZER
    content = files.read_text(path, "the tokenizer")
    if _sha256(content) != manifest.tokenizer["sha256"]:
      raise damaged(path, "is not the tokenizer that the rows were made with")
    train, dev = (_open_rows(folder, manifest, name) for name in SPLITS)
    return cls(folder, manifest, Tokenizer.from_json(content), train, dev)

  def verify(self) -> None:
    """Reads all rows, and compares the files with the manifest's hashes.

    Raises:
      UserError: A file is not as it was prepared.
    """
    for name, rows in zip(SPLITS, (self.train, self.dev), strict=True):
      # Rows first: their error names the row, the hash's only the file.
      for start in range(0, len(rows), _BLOCK):
        rows.read(range(start, min(start + _BLOCK, len(rows))))
      path = self.folder / rows_file(name)
      if sha256(path) != self.manifest.splits[name].sha256:
        raise damaged(path, "is not as it was prepared")


@dataclasses.dataclass(frozen=True)
class Sources:
  """What a run reads: prepared folders by name, prepared alike.

  One folder may have no name, which is then "".
  """

  train: Mapping[str, Rows]
  held_out: Mapping[str, Rows]  # of the same, then sets of others
  tokenizer: Tokenizer  # that of all of them
  boundary: str  # special tokens around documents: `antlm_jax.data.packing`
  words: Mapping[str, float]  # in a row to train on, in the mean
  sha256: str  # of the rows to train on

  @classmethod
  def open(cls, path: str, further: str = "") -> "Sources":
    """Opens folders, each `FOLDER` or `NAME=FOLDER,NAME=FOLDER`.

    They may be in a bucket. Of `further` ones only what is held out is read.

    Raises:
      UserError: They cannot be read so, or were not prepared alike.
    """
    own, others = (
      {
        name: Prepared.open(buckets.local(folder, MANIFEST))
        for name, folder in named(text, key).items()
      }
      for text, key in ((path, "data.path"), (further, "eval.data"))
    )
    for name in others:
      if name in own or not name:
        raise UserError(
          f"eval.data={further}: give each folder a name of its own, such as"
          " news=FOLDER"
        )
    every = own | others
    _check_alike(every)
    first, *more = own.values()
    splits = {name: of.manifest.splits["train"] for name, of in own.items()}
    joined = ",".join(f"{name}={of.sha256}" for name, of in splits.items())
    return cls(
      train={name: of.train for name, of in own.items()},
      held_out={name: of.dev for name, of in every.items()},
      tokenizer=first.tokenizer,
      boundary=first.manifest.settings["boundary"],
      words={name: of.row_words for name, of in splits.items()},
      sha256=joined if more else joined.partition("=")[2],
    )

  @property
  def rows(self) -> Rows | Concatenated:
    """All rows to train on."""
    first, *more = self.train.values()
    return Concatenated([first, *more]) if more else first


def named(text: str, key: str) -> dict[str, str]:
  """Reads `FOLDER`, or `NAME=FOLDER,NAME=FOLDER`, as folders by name.

  Raises:
    UserError: for a name that is there twice; it names the setting `key`.
  """
  name = f"{curriculum.NAME}="
  if not re.match(name, text):
    return {"": text} if text else {}
  # Folders may have commas: only one before a name divides.
  pairs = [part.split("=", 1) for part in re.split(f",(?={name})", text)]
  out = dict(pairs)
  if len(out) < len(pairs):
    raise UserError(f"{key}={text}: a name is there twice")
  return out


def _check_alike(prepared: Mapping[str, Prepared]) -> None:
  """Checks that rows of all of them may stand in one batch."""
  (first, like), *others = prepared.items()
  for name, of in others:
    ours, theirs = (
      {
        "tokenizer.json": m.tokenizer["sha256"][:8],
        "--seq_len": m.seq_len,
        "--boundary": m.settings["boundary"],
        "rows divided into segments (--packing)": m.segmented,
      }
      for m in (like.manifest, of.manifest)
    )
    for what in ours:
      if ours[what] != theirs[what]:
        raise UserError(
          f"{like.folder} and {of.folder} were not prepared alike:"
          f" {what} is {ours[what]} for {first or 'the first'}, but"
          f" {theirs[what]} for {name}; prepare {name} again, with"
          f" --tokenizer={like.folder / TOKENIZER} and the same options"
        )


def _open_rows(folder: pathlib.Path, manifest: Manifest, name: str) -> Rows:
  path, split = folder / rows_file(name), manifest.splits[name]
  # The file's name is ours, not the manifest's, which could lead elsewhere.
  found = path.stat().st_size if path.is_file() else 0
  if found != split.bytes:
    raise damaged(
      path, f"has {found} bytes, not the {split.bytes} of its manifest"
    )
  vocab_size = manifest.tokenizer["vocab_size"]
  return Rows(
    path, split.rows, manifest.seq_len, vocab_size, manifest.segmented
  )


def rows_file(split: str) -> str:
  """Names the file of a split's rows."""
  return f"{split}.array_record"


def sha256(path: str | os.PathLike) -> str:
  """Hashes a file; UserError if it cannot be read."""
  try:
    with open(path, "rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except OSError as error:
    raise UserError(
      f"cannot read {path}: {error.strerror}; check the file"
    ) from error
