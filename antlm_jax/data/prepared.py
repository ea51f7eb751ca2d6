"""A prepared folder: what was asked of it, and opening it whole and checked.

`Prepared.open` is the only way in. It checks all that can be checked without
reading every row: the manifest's fields and its own hash, that its files are
in the folder and as long as they were, the tokenizer's hash, the number of
rows. A row is checked when it is read; `Prepared.verify` reads all.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.data.packing import BOUNDARIES, PACKINGS
from antlm_jax.data.rows import Rows, damaged, token_dtype
from antlm_jax.data.text import RULES, SPLITS
from antlm_jax.data.tokenizer import KINDS, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from antlm_jax.settings import setting

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
_VERSION = 1
_CHECKSUM = "checksum"
_MANY = 2**62  # of tokens and bytes: more than 32 bits hold
_LONGEST_ROW = 1 << 20
_BLOCK = 4096  # rows that are verified at once


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to prepare, and how: the arguments of `antlm_jax.prepare`."""

  text: tuple[str, ...] = setting(
    help="text files or folders: BabyLM's *.train and *.dev, or *.txt",
    nargs="+",
    action="extend",
    required=False,
    metavar="PATH",
  )
  output: str = setting(help="folder to prepare", read=cli.here)
  tokenizer: str | None = setting(
    None, "a tokenizer.json; without, one is trained"
  )
  vocab_size: int = setting(
    16_000, "vocabulary of the trained tokenizer", least=260, most=1 << 20
  )
  kind: str = setting("bpe", "of the trained tokenizer", choices=tuple(KINDS))
  seq_len: int = setting(128, "tokens in a row", least=2, most=_LONGEST_ROW)
  packing: str = setting(
    "stream",
    "documents one after the other; each in a segment of its own; or the"
    " stream in random chunks, two a row (arXiv 2507.00994)",
    choices=PACKINGS,
  )
  documents: str = setting(
    "auto",
    "what ends one: blank lines, headings or 64 KiB; each line; or each file",
    choices=tuple(RULES),
  )
  boundary: str = setting(
    "bos_eos",
    "tokens around a document: <s> and </s>, </s> after, or none",
    choices=BOUNDARIES,
  )
  dev_share: float = setting(
    0.02,
    "share of the documents held out if there are no dev files",
    over=0,
    most=0.5,
  )
  share: float = setting(
    1.0, "share of the train documents to take, evenly spread", over=0, most=1
  )
  seed: int = setting(0, "of the chunks' lengths")


@dataclasses.dataclass(frozen=True)
class Split:
  """What a split holds.

  Attributes:
    rows: Number of rows.
    documents: Number of documents.
    words: Words, as spaces divide them.
    text_bytes: Bytes of UTF-8.
    tokens: Tokens of all documents, boundaries included.
    dropped: Tokens that filled no row.
    padding: Padding tokens.
    file: Name of the file of rows.
    bytes: Its size.
    sha256: Its hash.
  """

  rows: int = setting(least=1, most=_MANY)
  documents: int = setting(least=0, most=_MANY)
  words: int = setting(least=0, most=_MANY)
  text_bytes: int = setting(least=0, most=_MANY)
  tokens: int = setting(least=0, most=_MANY)
  dropped: int = setting(least=0, most=_MANY)
  padding: int = setting(least=0, most=_MANY)
  file: str = setting()
  bytes: int = setting(least=1, most=_MANY)
  sha256: str = setting()


@dataclasses.dataclass(frozen=True)
class SourceFile:
  """A text file that went in, by its content."""

  split: str = setting(choices=SPLITS)
  path: str = setting()
  bytes: int = setting(least=0, most=_MANY)
  sha256: str = setting()


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
  """The tokenizer's file: its hash, and the size of its vocabulary."""

  sha256: str = setting()
  vocab_size: int = setting(least=1)


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What a prepared folder holds, and how it came to be.

  Attributes:
    settings: What was asked, by name; without places, since those may change.
    sources: The text files.
    tokenizer: The tokenizer's file.
    seq_len: Tokens in a row, T.
    dtype: Of the tokens on disk.
    segmented: Whether rows are divided into segments.
    splits: train and dev.
    version: Of this format.
  """

  settings: dict
  sources: list[SourceFile]
  tokenizer: TokenizerFile
  seq_len: int = setting(least=2, most=_LONGEST_ROW)
  dtype: str = setting(choices=("<u2", "<u4"))
  segmented: bool = setting()
  splits: dict[str, Split]
  version: int = setting(_VERSION, choices=(_VERSION,))

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the manifest, and its own hash in it, at once or not at all."""
    fields = dataclasses.asdict(self)
    fields[_CHECKSUM] = _checksum(fields)
    files.write_json(pathlib.Path(folder, MANIFEST), fields)

  @classmethod
  def load(cls, folder: str | os.PathLike) -> "Manifest":
    """Reads a folder's manifest, and checks each of its fields.

    Raises:
      UserError: There is none, or it is not as it was written.
    """
    path = pathlib.Path(folder, MANIFEST)
    try:
      fields = files.read_json(path, "the manifest")
      # Those of earlier days have no hash: their fields are checked alone.
      written = fields.pop(_CHECKSUM, None)
      manifest = _manifest(fields)
    except UserError as error:
      raise UserError(
        f"{folder} is not a prepared dataset, or its preparation was"
        f" interrupted (no valid {MANIFEST}: {error}); run python -m"
        " antlm_jax.prepare"
      ) from error
    if written not in (None, _checksum(fields)):
      raise damaged(path, "was changed after it was written")
    return manifest


def _checksum(fields: Mapping) -> str:
  text = json.dumps(fields, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def _manifest(fields: Mapping) -> Manifest:
  """Builds a manifest of its JSON, and checks it."""
  found = _section(Manifest, fields, "")
  for name, kind in ("settings", dict), ("splits", dict), ("sources", list):
    if not isinstance(getattr(found, name), kind):
      raise UserError(f"{name} is not a {kind.__name__}")
  # Without places, which may change, and without defaults: all are there.
  settings_lib.check_values(Settings, found.settings, "settings")
  if "boundary" not in found.settings:
    raise UserError("settings.boundary is missing")
  if set(found.splits) != set(SPLITS):
    raise UserError(f"splits are not {' and '.join(SPLITS)}")
  manifest = dataclasses.replace(
    found,
    tokenizer=_section(TokenizerFile, found.tokenizer, "tokenizer"),
    sources=[_section(SourceFile, s, "sources") for s in found.sources],
    splits={
      name: _section(Split, split, f"splits.{name}")
      for name, split in found.splits.items()
    },
  )
  if manifest.dtype != token_dtype(manifest.tokenizer.vocab_size):
    raise UserError(f"dtype={manifest.dtype} is not that of its vocabulary")
  for name, split in manifest.splits.items():
    if split.file != rows_file(name):  # which could lie anywhere
      raise UserError(
        f"splits.{name}.file={split.file!a} is not {rows_file(name)}"
      )
  return manifest


def _section(section_type: type, fields, where: str):
  """Builds a checked section of JSON that has each of its fields."""
  names = {field.name for field in dataclasses.fields(section_type)}
  if not isinstance(fields, dict) or set(fields) != names:
    raise UserError(
      f"{where or 'the whole'} does not have the fields {' '.join(names)}"
    )
  section = section_type(**fields)
  settings_lib.check(section, where)
  return section


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A prepared folder.

  Attributes:
    folder: The folder.
    manifest: What it says of itself.
    tokenizer: The tokenizer that its rows were made with.
    train: The rows to train on.
    dev: The held-out rows.
  """

  folder: pathlib.Path
  manifest: Manifest
  tokenizer: Tokenizer
  train: Rows
  dev: Rows

  @classmethod
  def open(cls, folder: str | os.PathLike) -> "Prepared":
    """Opens a folder, without reading all of it.

    Raises:
      UserError: It is not a prepared folder, or not as it was prepared.
    """
    folder = pathlib.Path(folder)
    manifest = Manifest.load(folder)
    tokenizer = _open_tokenizer(folder / TOKENIZER, manifest.tokenizer)
    train, dev = (_open_rows(folder, manifest, name) for name in SPLITS)
    return cls(folder, manifest, tokenizer, train, dev)

  def verify(self) -> None:
    """Reads all rows, and compares the files with the manifest's hashes.

    Raises:
      UserError: A file is not as it was prepared.
    """
    for name, rows in zip(SPLITS, (self.train, self.dev), strict=True):
      for start in range(0, len(rows), _BLOCK):
        rows.read(range(start, min(start + _BLOCK, len(rows))))
      split = self.manifest.splits[name]
      if sha256(self.folder / split.file) != split.sha256:
        raise damaged(self.folder / split.file, "is not as it was prepared")


def _open_tokenizer(path: pathlib.Path, expected: TokenizerFile) -> Tokenizer:
  content = files.read_text(path, "the tokenizer")
  if hashlib.sha256(content.encode()).hexdigest() != expected.sha256:
    raise damaged(path, "is not the tokenizer that the rows were made with")
  tokenizer = Tokenizer.load(path)
  if tokenizer.vocab_size != expected.vocab_size:
    raise damaged(path, f"has not the manifest's {expected.vocab_size} tokens")
  return tokenizer


def _open_rows(folder: pathlib.Path, manifest: Manifest, name: str) -> Rows:
  split = manifest.splits[name]
  path = folder / split.file
  found = path.stat().st_size if path.is_file() else 0
  if found != split.bytes:
    raise damaged(
      path, f"has {found} bytes, not the {split.bytes} of its manifest"
    )
  return Rows(
    path,
    split.rows,
    manifest.seq_len,
    manifest.tokenizer.vocab_size,
    manifest.segmented,
  )


def rows_file(split: str) -> str:
  """Names the file of a split's rows."""
  return f"{split}.array_record"


def sha256(path: str | os.PathLike) -> str:
  """Hashes a file.

  Raises:
    UserError: It cannot be read.
  """
  try:
    with open(path, "rb") as file:
      return hashlib.file_digest(file, "sha256").hexdigest()
  except OSError as error:
    raise UserError(
      f"cannot read {path}: {error.strerror}; check the file"
    ) from error
