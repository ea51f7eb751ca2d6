"""The bytes of an ArrayRecord file: where a record is, and whether it is whole.

`rows.RowWriter` writes one record a chunk, without compression and of the same
size. So a record's place needs no index. ArrayRecord's own reader of buckets
asks for all bytes that follow a record, one record after the other.

A file consists of blocks that each begin with a header. Between the headers,
after a signature, are the chunks (riegeli's `records_file_format.md`). A chunk
has a header with a hash of its data. Its data are a prefix and the record.
"""

import numpy as np

_BLOCK = 1 << 16
_BLOCK_HEADER = 24
_SIGNATURE = 40
_CHUNK_HEADER = 40
_UNCOMPRESSED = b"\0"
_RECORDS = b"r"
_ONE_RECORD = 1
# HighwayHash-64 (arXiv:1612.06257): its constants, and riegeli's key.
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MUL_0 = np.array(
  [
    0xDBE6D5D5FE4CCE2F,
    0xA4093822299F31D0,
    0x13198A2E03707344,
    0x243F6A8885A308D3,
  ],
  np.uint64,
)
_MUL_1 = np.array(
  [
    0x3BD39E10CB0EF593,
    0xC0ACF169B5F18A8C,
    0xBE5466CF34E90C6C,
    0x452821E638D01377,
  ],
  np.uint64,
)
_KEY = np.frombuffer(b"Riegeli/records\nRiegeli/records\n", np.uint64)
_ZIP = np.array([3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7])
_ZIP = np.append(_ZIP, _ZIP + 16)  # bytes of two lanes change places


def chunk_size(width: int) -> int:
  """Returns the bytes of a record with `width` bytes, with its header."""
  return _CHUNK_HEADER + len(_prefix(width)) + width


def file_offset(place: np.ndarray) -> np.ndarray:
  """Converts an offset among the chunks to an offset in the file."""
  block, inside = np.divmod(place + _SIGNATURE, _BLOCK - _BLOCK_HEADER)
  return block * _BLOCK + _BLOCK_HEADER + inside


def without_block_headers(data: bytes, begin: int) -> bytes:
  """Removes the headers of blocks from the bytes of a file from `begin` on."""
  ends = range(_BLOCK - begin % _BLOCK, len(data) + _BLOCK, _BLOCK)
  first = 0
  parts = []
  for end in ends:
    parts.append(data[first:end])
    first = end + _BLOCK_HEADER
  return b"".join(parts)


def records(chunks: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the records in chunks uint8 `[n, size]`, and damaged chunks.

  Returns:
    uint8 `[n, width]`, and bool `[n]`: whether a chunk is damaged. A damaged
    chunk has another hash, or is not a single record of this width.
  """
  prefix = _prefix(width)
  numbers = [len(prefix) + width, _ONE_RECORD << 8 | _RECORDS[0], width]
  data = chunks[:, _CHUNK_HEADER:]
  header = np.ascontiguousarray(chunks[:, :_CHUNK_HEADER]).view("<u8")
  other = (header[:, [1, 3, 4]] != np.array(numbers, np.uint64)).any(axis=1)
  other |= (data[:, : len(prefix)] != np.frombuffer(prefix, np.uint8)).any(1)
  return data[:, len(prefix) :], other | (header[:, 2] != highway_hash(data))


def _prefix(width: int) -> bytes:
  """Returns the bytes of a chunk's data before its only record."""
  digits = []  # of the record's size, in base 128, the lowest first
  while width >= 128:
    digits.append(width % 128 + 128)
    width //= 128
  return _UNCOMPRESSED + bytes([len(digits) + 1, *digits, width])


def highway_hash(data: np.ndarray) -> np.ndarray:
  """Hashes each row of uint8 `[n, size]` to uint64, by HighwayHash-64."""
  size = data.shape[1] // 32 * 32
  packets = np.ascontiguousarray(data[:, :size]).view("<u8")
  state = _HighwayState(len(data))
  for packet in range(0, size // 8, 4):
    state.update(packets[:, packet : packet + 4])
  if size < data.shape[1]:
    state.update_rest(data[:, size:])
  return state.finish()


class _HighwayState:
  """HighwayHash's four variables of each row, uint64 `[n, 4]`."""

  def __init__(self, rows: int):
    self.mul_0 = np.tile(_MUL_0, (rows, 1))
    self.mul_1 = np.tile(_MUL_1, (rows, 1))
    self.v_0 = self.mul_0 ^ _KEY
    self.v_1 = self.mul_1 ^ (_KEY >> _HALF | _KEY << _HALF)

  def update(self, packet: np.ndarray) -> None:
    """Mixes 32 bytes of each row, uint64 `[n, 4]`."""
    self.v_1 += packet
    self.v_1 += self.mul_0
    self.mul_0 ^= (self.v_1 & _LOW) * (self.v_0 >> _HALF)
    self.v_0 += self.mul_1
    self.mul_1 ^= (self.v_0 & _LOW) * (self.v_1 >> _HALF)
    self.v_0 += _zipped(self.v_1)
    self.v_1 += _zipped(self.v_0)

  def update_rest(self, data: np.ndarray) -> None:
    """Mixes the last bytes of each row, fewer than 32."""
    size = data.shape[1]
    self.v_0 += np.uint64(size << 32 | size)
    halves = self.v_1.view(np.uint32)
    halves[:] = halves << np.uint32(size) | halves >> np.uint32(32 - size)
    packet = np.zeros((len(data), 32), np.uint8)
    last = size % 4
    packet[:, : size - last] = data[:, : size - last]
    if size & 16:
      packet[:, 28:] = data[:, -4:]
    elif last:
      tail = data[:, size - last :]
      packet[:, 16:19] = tail[:, [0, last >> 1, last - 1]]
    self.update(packet.view(np.uint64))

  def finish(self) -> np.ndarray:
    """Returns the hashes."""
    for _ in range(4):
      turned = self.v_0[:, [2, 3, 0, 1]]
      self.update(turned >> _HALF | turned << _HALF)
    return (self.v_0 + self.v_1 + self.mul_0 + self.mul_1)[:, 0]


def _zipped(lanes: np.ndarray) -> np.ndarray:
  """Exchanges the bytes of each two of the lanes uint64 `[n, 4]`."""
  return np.take(lanes.view(np.uint8), _ZIP, axis=1).view(np.uint64)
