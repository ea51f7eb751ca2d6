"""Event files, which TensorBoard reads.

Written here, since every library for it imports torch or TensorFlow where they
are installed (seconds of each start), and writes in a thread whose errors none
could handle. A file is a sequence of records of bytes, each with checksums; a
record is an `Event` message of tensorflow/core/util/event.proto.
"""

import os
import pathlib
import socket
import struct
import time
from collections.abc import Mapping

_VERSION = b"brain.Event:2"  # the first record of every file


class Board:
  """An event file, opened where something is first written.

  Args:
    folder: Receives it.
    purge: TensorBoard is to forget this step and those after it, as recorded
      in the folder's other files.
  """

  def __init__(self, folder: pathlib.Path, purge: int):
    self._folder, self._purge, self._file = folder, purge, None

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes scalars by their names."""
    if self._file is None:
      self._open()
    each = [
      _field(1, name) + b"\x15" + struct.pack("<f", value)
      for name, value in values.items()
    ]
    summary = b"".join(_field(1, value) for value in each)
    self._event(step, _field(5, summary))

  def _open(self) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    name = f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}"
    self._file = (self._folder / name).open("ab")
    self._event(0, _field(3, _VERSION))
    # A session log with status START: what makes TensorBoard forget.
    self._event(self._purge, _field(7, b"\x08\x01"))

  def _event(self, step: int, content: bytes) -> None:
    head = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step)
    data = head + content
    size = struct.pack("<Q", len(data))
    self._file.write(size + _checksum(size) + data + _checksum(data))
    self._file.flush()

  def close(self) -> None:
    """Closes it, if it is open."""
    if self._file is not None:
      self._file.close()


# Protocol buffers' encoding: a field is its number and kind, then its value.


def _varint(number: int) -> bytes:
  out = bytearray()
  while number > 0x7F:
    out.append(number & 0x7F | 0x80)
    number >>= 7
  return bytes([*out, number])


def _field(number: int, value: str | bytes) -> bytes:
  """A field that holds text, bytes or a message."""
  data = value.encode() if isinstance(value, str) else value
  return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _crc_of(byte: int) -> int:
  for _ in range(8):
    byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
  return byte


_CRC = [_crc_of(byte) for byte in range(256)]


def _checksum(data: bytes) -> bytes:
  """CRC-32C, rotated and shifted as record files have it."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc = _CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
  crc ^= 0xFFFFFFFF
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
