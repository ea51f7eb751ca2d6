"""Packed rows on disk: written once, read in any order.

Rows are in shards, which are files of ArrayRecord. A record is a row's tokens,
little-endian uint16 (uint32 for vocabularies beyond 65,536). If rows are
segmented, the bits of its starts follow.
"""

import hashlib
import os
import threading
from collections.abc import Iterable, Sequence

import fsspec
import numpy as np
from array_record.python import array_record_module

from antlm_jax.data import packing
from antlm_jax.errors import UserError
from antlm_jax.runtime import files

Indices = Sequence[int] | np.ndarray

# The defaults compress, which is 20 times slower, and read ahead in vain.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
# Bytes of rows from a bucket that stay in memory.
_CACHE_BYTES = 1 << 30
# A file of ArrayRecord is of blocks that each begin with a header. Between the
# headers, after a signature, are records, each with a header of its own
# (riegeli's `records_file_format.md`).
_BLOCK, _BLOCK_HEADER, _SIGNATURE, _RECORD_HEADER = 1 << 16, 24, 40, 40


def token_dtype(vocab_size: int) -> str:
  """Returns the smallest little-endian dtype that holds every token."""
  return "<u2" if vocab_size <= 1 << 16 else "<u4"


class Writer:
  """Writes a shard."""

  def __init__(self, path: files.Path, dtype: str, segmented: bool):
    self._dtype, self._segmented = dtype, segmented
    # A record for each row: reading one reads no other.
    writer = array_record_module.ArrayRecordWriter
    self._writer = writer(str(path), _WRITER_OPTIONS)

  def write(self, blocks: Iterable[packing.Block]) -> tuple[int, bytes]:
    """Writes blocks `(tokens [n, T], starts [n, T])`.

    Returns:
      The number of rows, and the SHA-256 hash of their records.
    """
    count, digest = 0, hashlib.sha256()
    for tokens, starts in blocks:
      parts = [tokens.astype(self._dtype).view(np.uint8)]
      if self._segmented:
        parts.append(np.packbits(starts, axis=1))
      records = np.concatenate(parts, axis=1)
      digest.update(records)
      for record in records:
        self._writer.write(record.tobytes())
      count += len(tokens)
    return count, digest.digest()

  def close(self) -> None:
    self._writer.close()


class Rows:
  """Rows of `seq_len` tokens T in shards, `segmented` or not.

  Shards are on this machine or in a bucket, and open when a row is read. From a
  bucket, only the bytes of the rows are read, and kept up to 1 GiB.
  """

  def __init__(
    self,
    shards: Sequence[tuple[files.Path, int]],
    seq_len: int,
    vocab_size: int,
    segmented: bool,
  ):
    """Takes the path to each shard, and its number of rows."""
    self.seq_len, self.segmented = seq_len, segmented
    self._paths = [os.fspath(path) for path, _ in shards]
    self._counts = [count for _, count in shards]
    self._ends = np.cumsum(self._counts)
    self._count = int(self._ends[-1])
    self._dtype = np.dtype(token_dtype(vocab_size))
    self._split = seq_len * self._dtype.itemsize
    self._width = self._split + -(-seq_len // 8) * segmented  # of a record
    self._readers = [None] * len(shards)  # of those on this machine
    self._lock = threading.Lock()
    self._cache: dict[int, bytes] = {}  # of a bucket, by row

  def __len__(self) -> int:
    return self._count

  def read(self, indices: Indices) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads rows by their indices `[n]`.

    Returns:
      tokens int32 `[n, T]`, and starts bool `[n, T]`, None if not segmented.

    Raises:
      IndexError: An index is outside.
      UserError: A shard cannot be read, has another number of rows, or a row is
        damaged.
    """
    indices = np.asarray(indices, np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
      raise IndexError(f"rows must be in [0, {len(self)}), got {indices}")
    data = np.empty((len(indices), self._width), np.uint8)
    if files.is_remote(self._paths[0]):
      self._read_bucket(indices, data)
    else:
      for shard, mine, rows in self._by_shard(indices):
        data[mine] = self._read_shard(shard, rows)
    tokens = np.ascontiguousarray(data[:, : self._split]).view(self._dtype)
    tokens = tokens.astype(np.int32)
    if not self.segmented:
      return tokens, None
    starts = np.unpackbits(data[:, self._split :], axis=1, count=self.seq_len)
    return tokens, starts.view(bool)

  def _by_shard(self, indices: np.ndarray):
    """Yields each shard, which rows are in it, and their indices there."""
    if len(self._paths) == 1 and indices.size:
      yield 0, slice(None), indices
      return
    shards = np.searchsorted(self._ends, indices, side="right")
    order = np.argsort(shards, kind="stable")
    used, first = np.unique(shards[order], return_index=True)
    for shard, mine in zip(used, np.split(order, first[1:]), strict=False):
      before = self._ends[shard] - self._counts[shard]
      yield int(shard), mine, indices[mine] - before

  def _read_shard(self, shard: int, rows: np.ndarray) -> np.ndarray:
    """Reads records of a shard on this machine, uint8 `[n, width]`."""
    path = self._paths[shard]
    # ArrayRecord hashes each record, so a flipped bit raises. One call reads
    # all rows: the reader's own threads fetch them in parallel.
    try:
      with self._lock:
        if (reader := self._readers[shard]) is None:
          reader = array_record_module.ArrayRecordReader(path, _READER_OPTIONS)
          found = reader.num_records() or self._counts[shard]  # 0: damaged
          if found != self._counts[shard]:
            what = f"has {found} rows, not the {self._counts[shard]}"
            raise damaged(path, f"{what} of its manifest")
          self._readers[shard] = reader
      records = reader.read(rows.tolist())
    except RuntimeError as error:
      reason = " ".join(str(error).split())
      if "() failed" in reason:  # the system's error, as of a network drive:
        raise  # the same command may work again
      raise damaged(path, f"has a bad row: {reason}") from error
    data = np.frombuffer(b"".join(records), np.uint8)
    if data.size != rows.size * self._width:
      raise damaged(path, f"has rows that are not of {self._width} bytes")
    return data.reshape(-1, self._width)

  def _read_bucket(self, indices: np.ndarray, data: np.ndarray) -> None:
    """Reads records by ranges of bytes, all at once, into `[n, width]`."""
    wanted = np.array([i for i in indices.tolist() if i not in self._cache])
    wanted = np.unique(wanted).astype(np.int64)
    places, paths, begins, ends = [], [], [], []
    overhead = _RECORD_HEADER + 2 + _varint_size(self._width)
    step = overhead + self._width
    for shard, mine, rows in self._by_shard(wanted):
      # Neighbours come in one range.
      for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        paths.append(self._paths[shard])
        begins.append(_offset(_SIGNATURE + int(run[0]) * step))
        ends.append(_offset(_SIGNATURE + (int(run[-1]) + 1) * step - 1) + 1)
      places.extend(wanted[mine].tolist())
    read = {}
    try:
      system = fsspec.filesystem("gcs")
      found = system.cat_ranges(paths, begins, ends, on_error="raise")
    except (*files.failures(), ValueError) as error:
      raise UserError(
        f"cannot read {paths[0]}: {files.reason(error)}"
      ) from error
    at = iter(places)
    for path, begin, end, block in zip(paths, begins, ends, found, strict=True):
      if len(block) != end - begin:
        raise damaged(path, f"ends before byte {end}")
      plain = _without_headers(block, begin)
      for start in range(0, len(plain), step):
        size = int.from_bytes(plain[start + 8 : start + 16], "little")
        if size != step - _RECORD_HEADER:
          raise damaged(path, f"has rows that are not of {self._width} bytes")
        read[next(at)] = plain[start + overhead : start + step]
    if len(self._cache) * self._width < _CACHE_BYTES:
      self._cache |= read
    for place, index in enumerate(indices.tolist()):
      record = read.get(index) or self._cache[index]
      data[place] = np.frombuffer(record, np.uint8)


def _varint_size(number: int) -> int:
  """Returns the bytes of a number in base 128."""
  return -(-number.bit_length() // 7)


def _offset(place: int) -> int:
  """Returns the byte in the file of a byte between the blocks' headers."""
  block, inside = divmod(place, _BLOCK - _BLOCK_HEADER)
  return block * _BLOCK + _BLOCK_HEADER + inside


def _without_headers(data: bytes, begin: int) -> bytes:
  """Removes the headers of blocks from the bytes of a file from `begin` on."""
  ends = range(_BLOCK - begin % _BLOCK, len(data) + _BLOCK, _BLOCK)
  first, parts = 0, []
  for end in ends:
    parts.append(data[first:end])
    first = end + _BLOCK_HEADER
  return b"".join(parts)


class Concatenated:
  """Rows of several folders, one folder after the other, as `Rows`."""

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


def damaged(path: files.Path, what: str) -> UserError:
  """Returns the error for a damaged file of a prepared folder."""
  folder = os.path.dirname(path)
  return UserError(f"{path} {what}; delete {folder} and prepare it again")
