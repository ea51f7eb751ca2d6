"""Packed rows on disk: written once, read at random.

A record is a row's tokens, little-endian uint16 (uint32 for vocabularies
beyond 65,536), then, if the rows are segmented, the bits of its starts.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from array_record.python import array_record_module

from antlm_jax import errors
from antlm_jax.data import packing
from antlm_jax.runtime import files

MANIFEST = "manifest.json"
_VERSION = 1
# Defaults write 20 times slower (they compress), and read ahead for nothing.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


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

  rows: int
  documents: int
  words: int
  text_bytes: int
  tokens: int
  dropped: int
  padding: int
  file: str
  bytes: int
  sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What a prepared folder holds, and how it came to be.

  Attributes:
    settings: What was asked, by name.
    sources: Per source file its path, split, bytes and sha256.
    tokenizer: sha256 and vocab_size.
    seq_len: Tokens in a row, T.
    dtype: Of the tokens on disk.
    segmented: Whether rows are divided into segments.
    splits: train and dev.
    version: Of this format.
  """

  settings: dict
  sources: list[dict]
  tokenizer: dict
  seq_len: int
  dtype: str
  segmented: bool
  splits: dict[str, Split]
  version: int = _VERSION

  def save(self, folder: str | os.PathLike) -> None:
    """Writes the manifest at once, or not at all."""
    text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
    files.write_text(pathlib.Path(folder, MANIFEST), text)


def load_manifest(folder: str | os.PathLike) -> Manifest:
  """Reads a prepared folder's manifest, and checks that its rows are there.

  Raises:
    UserError: It is not a prepared folder, or not a whole one.
  """
  path = pathlib.Path(folder, MANIFEST)
  try:
    fields = json.loads(path.read_text())
    if fields["version"] != _VERSION:
      raise ValueError(f"version {fields['version']}")
    splits = {name: Split(**s) for name, s in fields.pop("splits").items()}
    manifest = Manifest(splits=splits, **fields)
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise errors.UserError(
      f"{folder} is not a prepared dataset, or its preparation was interrupted "
      f"(no valid {MANIFEST}); run python -m antlm_jax.prepare"
    ) from error
  for split in manifest.splits.values():
    _check_file(pathlib.Path(folder, split.file), split.bytes)
  return manifest


def _check_file(path: pathlib.Path, size: int) -> None:
  found = path.stat().st_size if path.is_file() else 0
  if found != size:
    raise errors.UserError(
      f"{path} has {found} bytes, not the {size} of its manifest; delete "
      f"{path.parent} and prepare it again"
    )


def token_dtype(vocab_size: int) -> str:
  """Names the smallest little-endian dtype that holds every token."""
  return "<u2" if vocab_size <= 1 << 16 else "<u4"


def write(
  path: str | os.PathLike,
  blocks: Iterable[packing.Block],
  dtype: str,
  segmented: bool,
) -> int:
  """Writes blocks of rows `(tokens [n, T], starts [n, T])`.

  Returns:
    How many rows were written.
  """
  writer = array_record_module.ArrayRecordWriter(str(path), _WRITER_OPTIONS)
  count = 0
  for tokens, starts in blocks:
    parts = [tokens.astype(dtype).view(np.uint8)]
    if segmented:
      parts.append(np.packbits(starts, axis=1))
    for record in np.concatenate(parts, axis=1):
      writer.write(record.tobytes())
    count += len(tokens)
  writer.close()
  return count


def sha256(path: str | os.PathLike) -> str:
  """Hashes a file."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


class Rows:
  """A split of a prepared folder.

  Attributes:
    seq_len: Tokens in a row, T.
    segmented: Whether rows are divided into segments.
  """

  def __init__(self, folder: str | os.PathLike, split: str):
    """Opens a split.

    Raises:
      UserError: The folder is not prepared, or lacks the split.
    """
    manifest = load_manifest(folder)
    if split not in manifest.splits:
      raise errors.UserError(
        f"{folder} has no split {split}; it has {' '.join(manifest.splits)}"
      )
    self.seq_len = manifest.seq_len
    self.segmented = manifest.segmented
    self._dtype = np.dtype(manifest.dtype)
    self._count = manifest.splits[split].rows
    self._path = str(pathlib.Path(folder, manifest.splits[split].file))

  def __len__(self) -> int:
    return self._count

  def read(
    self, indices: Sequence[int] | np.ndarray
  ) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads rows.

    Args:
      indices: `[n]`, each in [0, len(self)).

    Returns:
      tokens int32 `[n, T]`, and starts bool `[n, T]`, None if not segmented.

    Raises:
      IndexError: An index is outside.
    """
    indices = np.asarray(indices, np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
      raise IndexError(f"rows must be in [0, {len(self)}), got {indices}")
    split = self.seq_len * self._dtype.itemsize
    width = split + -(-self.seq_len // 8) * self.segmented
    records = self._reader.read(indices.tolist()) if indices.size else []
    data = np.frombuffer(b"".join(records), np.uint8).reshape(-1, width)
    tokens = np.ascontiguousarray(data[:, :split]).view(self._dtype)
    if not self.segmented:
      return tokens.astype(np.int32), None
    starts = np.unpackbits(data[:, split:], axis=1, count=self.seq_len)
    return tokens.astype(np.int32), starts.view(bool)

  @functools.cached_property
  def _reader(self):
    return array_record_module.ArrayRecordReader(self._path, _READER_OPTIONS)

  def __getstate__(self) -> dict:
    """Leaves the reader out: a worker process opens its own."""
    return {k: v for k, v in self.__dict__.items() if k != "_reader"}
