"""Packed rows on disk: written once, read in any order.

A record is a row's tokens, little-endian uint16 (uint32 for vocabularies
beyond 65,536). If rows are segmented, the bits of its starts follow.
"""

import os
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
from array_record.python import array_record_module

from antlm_jax.data import packing
from antlm_jax.errors import UserError

Indices = Sequence[int] | np.ndarray

# The defaults compress, which is 20 times slower, and read ahead in vain.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def token_dtype(vocab_size: int) -> str:
  """Returns the smallest little-endian dtype that holds every token."""
  return "<u2" if vocab_size <= 1 << 16 else "<u4"


def write(
  path: str | os.PathLike,
  blocks: Iterable[packing.Block],
  dtype: str,
  segmented: bool,
) -> int:
  """Writes blocks `(tokens [n, T], starts [n, T])`; returns the row count."""
  # A record for each row: reading one reads no other.
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


class Rows:
  """Rows of `seq_len` tokens T in a file, `segmented` or not."""

  def __init__(
    self,
    path: str | os.PathLike,
    count: int,
    seq_len: int,
    vocab_size: int,
    segmented: bool,
  ):
    """Opens a file of `count` rows, and reads the first and the last.

    Raises:
      UserError: It cannot be read, or has another number of rows.
    """
    self.seq_len, self.segmented = seq_len, segmented
    self._path, self._count = pathlib.Path(path), count
    self._dtype = np.dtype(token_dtype(vocab_size))
    reader = array_record_module.ArrayRecordReader
    self._reader = reader(str(path), _READER_OPTIONS)
    found = self._reader.num_records() or count  # 0: its index is damaged
    if found != count:
      what = f"has {found} rows, not the {count} of its manifest"
      raise damaged(self._path, what)
    # A file that was zeroed or is of other rows fails here.
    self.read([0, count - 1])

  def __len__(self) -> int:
    return self._count

  def read(self, indices: Indices) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads rows by their indices `[n]`.

    Returns:
      tokens int32 `[n, T]`, and starts bool `[n, T]`, None if not segmented.

    Raises:
      IndexError: An index is outside.
      UserError: A row is damaged.
    """
    indices = np.asarray(indices, np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
      raise IndexError(f"rows must be in [0, {len(self)}), got {indices}")
    # ArrayRecord hashes each record, so a flipped bit raises. One call reads
    # all rows: the reader's own threads fetch them in parallel.
    try:
      records = self._reader.read(indices.tolist()) if indices.size else []
    except RuntimeError as error:
      reason = " ".join(str(error).split())
      if "() failed" in reason:  # the system's error, as of a network drive:
        raise  # the same command may work again
      raise damaged(self._path, f"has a bad row: {reason}") from error
    split = self.seq_len * self._dtype.itemsize
    width = split + -(-self.seq_len // 8) * self.segmented
    data = np.frombuffer(b"".join(records), np.uint8)
    if data.size != indices.size * width:
      raise damaged(self._path, f"has rows that are not of {width} bytes")
    data = data.reshape(-1, width)
    tokens = np.ascontiguousarray(data[:, :split]).view(self._dtype)
    tokens = tokens.astype(np.int32)
    if not self.segmented:
      return tokens, None
    starts = np.unpackbits(data[:, split:], axis=1, count=self.seq_len)
    return tokens, starts.view(bool)


class Concatenated:
  """Rows of several files, one file after the other, as `Rows`."""

  def __init__(self, parts: Sequence[Rows]):
    self.seq_len, self.segmented = parts[0].seq_len, parts[0].segmented
    self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])

  def __len__(self) -> int:
    return int(self._ends[-1])

  def read(self, indices: Indices) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads rows, as `Rows.read`."""
    indices = np.asarray(indices, np.int64)
    tokens = np.empty((len(indices), self.seq_len), np.int32)
    starts = np.empty(tokens.shape, bool) if self.segmented else None
    places = np.searchsorted(self._ends, indices, side="right")
    for place in np.unique(places):
      part, mine = self._parts[place], places == place
      first = self._ends[place] - len(part)
      tokens[mine], found = part.read(indices[mine] - first)
      if self.segmented:
        starts[mine] = found
    return tokens, starts


def damaged(path: pathlib.Path, what: str) -> UserError:
  """Returns the error for a damaged file of a prepared folder."""
  return UserError(f"{path} {what}; delete {path.parent} and prepare it again")
