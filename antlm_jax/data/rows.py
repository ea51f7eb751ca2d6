"""Packed rows on disk: written once, read in any order.

Rows are in shards, which are files of ArrayRecord. A record is a row's tokens,
little-endian uint16 (uint32 for vocabularies beyond 65,536). If rows are
segmented, the bits of its starts follow.
"""

import collections
import concurrent.futures
import copy
import functools
import hashlib
import os
import threading
from collections.abc import Iterable, Sequence

import fsspec
import numpy as np
from array_record.python import array_record_module

from antlm_jax.data import array_records, packing
from antlm_jax.errors import UserError
from antlm_jax.runtime import buckets, files
from antlm_jax.units import gib

Indices = Sequence[int] | np.ndarray

# The defaults compress, which is 20 times slower, and read ahead in vain.
_WRITER_OPTIONS = "group_size:1,uncompressed"
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
# Bytes of rows from a bucket that stay in memory: those used last.
_CACHE_BYTES = 1 << 30


def token_dtype(vocab_size: int) -> str:
  """Returns the smallest little-endian dtype that holds every token."""
  return "<u2" if vocab_size <= 1 << 16 else "<u4"


class RowWriter:
  """Writes a shard."""

  def __init__(self, path: files.Path, dtype: str, segmented: bool):
    self._dtype = dtype
    self._segmented = segmented
    # A record for each row: reading one reads no other.
    writer = array_record_module.ArrayRecordWriter
    self._writer = writer(str(path), _WRITER_OPTIONS)

  def write(self, blocks: Iterable[packing.Block]) -> tuple[int, bytes]:
    """Writes blocks `(tokens [n, T], starts [n, T])`.

    Returns:
      The number of rows, and the SHA-256 hash of their records.
    """
    count = 0
    digest = hashlib.sha256()
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
  """Rows of T tokens in shards, which open when a row is read.

  Shards are on this machine or in a bucket. From a bucket, `read` fetches only
  the bytes of the rows, or of their blocks (`by_blocks`). The blocks that were
  used last stay in memory, up to 1 GiB.
  """

  def __init__(
    self,
    shards: Sequence[tuple[files.Path, int]],
    seq_len: int,
    vocab_size: int,
    segmented: bool,
  ):
    """Computes the place of each row, without reading the shards.

    Args:
      shards: Path to each shard, and its number of rows.
      seq_len: Number of tokens in a row, T.
      vocab_size: Size of the vocabulary, which decides the dtype of tokens.
      segmented: Whether bits of segment starts follow the tokens of a row.
    """
    self.seq_len = seq_len
    self.segmented = segmented
    self._shards = tuple(shards)
    self._vocab_size = vocab_size
    self._paths = [os.fspath(path) for path, _ in shards]
    self._remote = np.array([files.is_remote(path) for path in self._paths])
    self._shard_ends = np.cumsum([count for _, count in shards])
    self._shard_begins = np.append(0, self._shard_ends[:-1])
    self._row_count = int(self._shard_ends[-1])
    self._dtype = np.dtype(token_dtype(vocab_size))
    self._token_bytes = seq_len * self._dtype.itemsize
    self._record_bytes = self._token_bytes + -(-seq_len // 8) * segmented
    # First row of each source (see `followed_by`), and the number of all rows.
    self._source_bounds = np.array([0, self._row_count])
    self._block_rows = 1  # number of rows that are read together from a bucket
    self._reset_readers()

  def _reset_readers(self) -> None:
    """Starts with no open shard, and with no block in memory."""
    self._readers = [None] * len(self._shards)  # of shards on this machine
    self._lock = threading.Lock()
    self._tries = buckets.Tries()
    # Blocks of a bucket by their first row: the last used, and those that
    # threads are reading now.
    self._cache = collections.OrderedDict[int, bytes]()
    self._reading: dict[int, concurrent.futures.Future] = {}

  def __len__(self) -> int:
    return self._row_count

  def followed_by(self, further: Sequence["Rows"]) -> "Rows":
    """Returns these rows and then others with the same layout."""
    parts = (self, *further)
    shards = [shard for rows in parts for shard in rows._shards]
    joined = Rows(shards, self.seq_len, self._vocab_size, self.segmented)
    joined._source_bounds = np.cumsum([0, *map(len, parts)])
    return joined

  def by_blocks(self, size: int, at_once: int) -> "Rows":
    """Returns these rows, which a bucket gives in blocks of `size` neighbours.

    The blocks of each source begin at its first row, as those of `order.Order`.
    `at_once` is the number of blocks whose rows are read in turn. Raises a
    UserError if memory has no room for them.
    """
    rows = copy.copy(self)
    rows._block_rows = size
    rows._reset_readers()
    needed = at_once * size * self._record_bytes
    limit = _CACHE_BYTES // 2
    if size > 1 and self._remote.any() and needed > limit:
      raise UserError(
        f"data.shuffle_block={size} keeps {gib(needed)} of rows in memory, over"
        f" {gib(limit)}: give at most {max(1, size * limit // needed)}"
      )
    return rows

  def read(self, indices: Indices) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads rows by their indices `[n]`.

    Returns:
      tokens int32 `[n, T]`, and starts bool `[n, T]`, None if not segmented.

    Raises:
      IndexError: An index is outside.
      UserError: A shard cannot be read, or a row is damaged.
    """
    indices = np.asarray(indices, np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
      raise IndexError(f"rows must be in [0, {len(self)}), got {indices}")
    data = np.empty((len(indices), self._record_bytes), np.uint8)
    shards = np.searchsorted(self._shard_ends, indices, side="right")
    remote = self._remote[shards]
    if remote.any():
      data[remote] = self._read_bucket(indices[remote])
    for shard in np.unique(shards[~remote]).tolist():
      in_shard = shards == shard
      data[in_shard] = self._read_shard(
        shard, indices[in_shard] - self._shard_begins[shard]
      )
    tokens = np.ascontiguousarray(data[:, : self._token_bytes]).view(
      self._dtype
    )
    tokens = tokens.astype(np.int32)
    if not self.segmented:
      return tokens, None
    starts = np.unpackbits(
      data[:, self._token_bytes :], axis=1, count=self.seq_len
    )
    return tokens, starts.view(bool)

  def _read_shard(self, shard: int, rows: np.ndarray) -> np.ndarray:
    """Reads records of a shard on this machine, uint8 `[n, width]`."""
    reader = self._reader(shard)
    path = self._paths[shard]
    # ArrayRecord hashes each record, so a flipped bit raises. One call reads
    # all rows: the reader's own threads fetch them in parallel.
    try:
      records = reader.read(rows.tolist())
    except RuntimeError as error:
      why = _reason(error)
      if len(rows) > 1:  # to name the row
        return np.concatenate(
          [self._read_shard(shard, row) for row in rows[:, None]]
        )
      raise _bad_row(path, rows[0], why) from error
    for row, record in zip(rows, records, strict=True):
      if len(record) != self._record_bytes:
        fault = f"it has {len(record)} bytes, not {self._record_bytes}"
        raise _bad_row(path, row, fault)
    return np.frombuffer(b"".join(records), np.uint8).reshape(
      -1, self._record_bytes
    )

  def _reader(self, shard: int):
    """Returns ArrayRecord's reader of a shard on this machine."""
    with self._lock:
      if self._readers[shard] is None:
        path = self._paths[shard]
        try:
          reader = array_record_module.ArrayRecordReader(path, _READER_OPTIONS)
        except RuntimeError as error:
          raise damaged(path, f"has no rows: {_reason(error)}") from error
        self._readers[shard] = reader
      return self._readers[shard]

  def _read_bucket(self, indices: np.ndarray) -> np.ndarray:
    """Reads records that are in a bucket, uint8 `[n, width]`."""
    sources = np.searchsorted(self._source_bounds, indices, side="right") - 1
    places = (indices - self._source_bounds[sources]) % self._block_rows
    firsts = indices - places
    blocks = self._read_blocks(np.unique(firsts).tolist())
    width = self._record_bytes
    records = []
    begins = (places * width).tolist()
    for first, begin in zip(firsts.tolist(), begins, strict=True):
      records.append(blocks[first][begin : begin + width])
    return np.frombuffer(b"".join(records), np.uint8).reshape(-1, width)

  def _read_blocks(self, firsts: Sequence[int]) -> dict[int, bytes]:
    """Returns the records of blocks, by the first row of each.

    If threads ask for the same block at once, one of them reads it for all.
    """
    blocks = {}
    waiting = {}
    missing = []
    result = concurrent.futures.Future()
    with self._lock:
      for first in firsts:
        if first in self._cache:
          self._cache.move_to_end(first)
          blocks[first] = self._cache[first]
        elif first in self._reading:
          waiting[first] = self._reading[first]
        else:
          missing.append(first)
          self._reading[first] = result
    if missing:
      fetched = {}
      try:
        fetched = self._fetch(np.array(missing))
        result.set_result(fetched)
      except BaseException as error:
        result.set_exception(error)
        raise
      finally:
        with self._lock:
          self._cache |= fetched
          most = max(1, _CACHE_BYTES // (self._block_rows * self._record_bytes))
          while len(self._cache) > most:
            self._cache.popitem(last=False)
          for first in missing:
            del self._reading[first]
      blocks |= fetched
    return blocks | {
      first: future.result()[first] for first, future in waiting.items()
    }

  def _fetch(self, firsts: np.ndarray) -> dict[int, bytes]:
    """Reads blocks of a bucket by their ascending first rows, and checks them.

    A block ends with its source at the latest.
    """
    ends = self._source_bounds[
      np.searchsorted(self._source_bounds, firsts, side="right")
    ]
    ends = np.minimum(firsts + self._block_rows, ends)
    spans = [np.arange(*span) for span in zip(firsts, ends, strict=True)]
    indices = np.concatenate(spans)
    shards = np.searchsorted(self._shard_ends, indices, side="right")
    places = indices - self._shard_begins[shards]
    size = array_records.chunk_size(self._record_bytes)
    chunks = self._read_ranges(shards, places, size)
    records, bad = array_records.records(chunks, self._record_bytes)
    for index in np.flatnonzero(bad):
      fault = (
        f"its hash is wrong, or it is no record of {self._record_bytes} bytes"
      )
      raise _bad_row(self._paths[shards[index]], places[index], fault)
    parts = np.split(records, np.cumsum(ends - firsts)[:-1])
    blocks = (part.tobytes() for part in parts)
    return dict(zip(firsts.tolist(), blocks, strict=True))

  def _read_ranges(
    self, shards: np.ndarray, places: np.ndarray, size: int
  ) -> np.ndarray:
    """Reads chunks of `size` bytes, uint8 `[n, size]`, all at once.

    `places` are their numbers in their shards. Neighbours are one range.
    """
    apart = (np.diff(places) != 1) | (np.diff(shards) > 0)
    first = np.append(0, np.flatnonzero(apart) + 1)
    last = np.append(first[1:], len(places)) - 1
    begins = array_records.file_offset(places[first] * size).tolist()
    ends = (
      array_records.file_offset((places[last] + 1) * size - 1) + 1
    ).tolist()
    paths = [self._paths[shard] for shard in shards[first]]
    system = fsspec.filesystem("gcs")
    ranges = functools.partial(
      system.cat_ranges, paths, begins, ends, on_error="raise"
    )
    try:
      contents = self._tries.read(ranges, paths[0])
    except (*files.file_failures(), ValueError) as error:
      why = files.failure_reason(error)
      raise files.failure(f"cannot read {paths[0]}: {why}", error) from error
    for path, begin, end, data in zip(
      paths, begins, ends, contents, strict=True
    ):
      if len(data) != end - begin:
        raise damaged(path, f"ends before byte {end}")
    parts = map(array_records.without_block_headers, contents, begins)
    return np.frombuffer(b"".join(parts), np.uint8).reshape(-1, size)


def _reason(error: RuntimeError) -> str:
  """Returns why ArrayRecord cannot read a file, in one line."""
  reason = " ".join(str(error).split())
  if "() failed" in reason:  # the system's error, as of a network drive:
    raise error  # the same command may work again
  return reason


def _bad_row(path: files.Path, row: int, why: str) -> UserError:
  """Returns the error for a damaged row, by its number in its file."""
  return damaged(path, f"has a bad row {row}: {why}")


def damaged(path: files.Path, fault: str) -> UserError:
  """Returns the error for a damaged file of a prepared folder."""
  folder = os.path.dirname(path)
  return UserError(f"{path} {fault}; delete {folder} and prepare it again")
