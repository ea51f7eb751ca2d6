"""Writers: TensorBoard, CSV and Weights & Biases, next to metrics.jsonl."""

import csv
import importlib.util
import os
import pathlib
import secrets
import shutil
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from antlm_jax.settings import Registry

WANDB_ID = "wandb_id"  # the file with the id of the folder's run at W&B


class Writer:
  """A copy of a run's metrics in another format.

  It is made with the run's folder, the values that a resumed run has recorded,
  by step, the run's name and its settings. It then receives every later value,
  and is closed at the end of the run, whether that fails or not.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    rows: Mapping[int, Mapping[str, float]],
    name: str,
    config: Mapping[str, Any],
  ):
    pass

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Writes values after `step` steps."""
    raise NotImplementedError

  def close(self) -> None:
    """Writes the remaining metrics."""


WRITERS = Registry[type[Writer]]("log.writers")


@WRITERS.register("csv")
class Csv(Writer):
  """`metrics.csv`: a line `step,name,value` for each value."""

  def __init__(self, folder, rows, name, config):
    self._path = folder / "metrics.csv"
    files.write_text(self._path, "step,name,value\n")
    self._append(rows)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._append({step: values})

  def _append(self, rows: Mapping[int, Mapping[str, float]]) -> None:
    with self._path.open("a", encoding="utf-8", newline="") as file:
      csv.writer(file, lineterminator="\n").writerows(
        (step, name, value)
        for step, values in rows.items()
        for name, value in values.items()
      )


@WRITERS.register("tensorboard")
class TensorBoard(Writer):
  """Event files, in `tensorboard/`.

  Libraries for them import torch or TensorFlow where those are installed, and
  write in a thread whose errors nobody sees. A file is a sequence of records
  with checksums, each an `Event` of tensorflow/core/util/event.proto.
  """

  def __init__(self, folder, rows, name, config):
    now = time.time()
    host = socket.gethostname()
    file = f"events.out.tfevents.{now:.0f}.{host}.{os.getpid()}"
    self._path = folder / "tensorboard" / file
    self._next = max(rows, default=-1) + 1

  def write(self, step: int, values: Mapping[str, float]) -> None:
    if not self._path.exists():
      self._path.parent.mkdir(parents=True, exist_ok=True)
      # The first of every file.
      self._event(0, _protobuf_field(3, b"brain.Event:2"))
      # A session log with status START: TensorBoard then drops later steps of
      # older files.
      self._event(self._next, _protobuf_field(7, b"\x08\x01"))
    scalars = (
      _protobuf_field(1, name.encode()) + b"\x15" + struct.pack("<f", value)
      for name, value in values.items()
    )
    self._event(
      step, _protobuf_field(5, b"".join(_protobuf_field(1, s) for s in scalars))
    )

  def _event(self, step: int, content: bytes) -> None:
    wall_time = b"\x09" + struct.pack("<d", time.time())
    event = wall_time + b"\x10" + _varint(step) + content
    size = struct.pack("<Q", len(event))
    with self._path.open("ab") as file:
      file.write(size + _checksum(size) + event + _checksum(event))


def _varint(number: int) -> bytes:
  """Encodes a whole number as protocol buffers do."""
  out = bytearray()
  while number > 0x7F:
    out.append(number & 0x7F | 0x80)
    number >>= 7
  return bytes([*out, number])


def _protobuf_field(number: int, data: bytes) -> bytes:
  """Encodes a field of text or a message as protocol buffers do."""
  return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _checksum(data: bytes) -> bytes:
  """Returns the CRC-32C, rotated and shifted as in TensorFlow's records."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
  crc ^= 0xFFFFFFFF
  return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@WRITERS.register("wandb")
class Wandb(Writer):
  """A run at Weights & Biases; with WANDB_MODE=offline a folder in `wandb/`.

  A folder continues its own run there. The step is a metric, since W&B's own
  counter cannot return to the step at which a killed run resumes. Raises a
  UserError if W&B cannot be reached, or there is no login.
  """

  def __init__(self, folder: pathlib.Path, rows, name, config):
    import wandb

    if not (folder / WANDB_ID).exists():
      files.write_text(folder / WANDB_ID, secrets.token_hex(4))
    run_id = (folder / WANDB_ID).read_text("utf-8").strip()
    before = list(folder.glob(f"wandb/offline-run-*-{run_id}"))
    try:
      self._run = wandb.init(
        id=run_id,
        resume="allow",
        dir=folder,
        project=os.environ.get("WANDB_PROJECT", "antlm_jax"),
        name=os.environ.get("WANDB_NAME", name),
        config=config,
        settings=wandb.Settings(console="off"),
      )
    except wandb.Error as error:
      raise UserError(
        f"log.writers=wandb: {files.failure_reason(error).rstrip('.')}; without"
        " a login or a network set WANDB_MODE=offline"
      ) from error
    self._run.define_metric("step")
    self._run.define_metric("*", step_metric="step")
    # Send all that W&B lacks: it may have lost the last values of a killed
    # process. An offline folder starts anew, and replaces the one before.
    self._sent = self._run.summary.get("step", -1)
    self._step = -1
    self._values = {}
    for step, values in rows.items():
      self.write(step, values)
    if self._step == self._sent:
      # W&B has these values, but lacks those that its step records next, as
      # those of an evaluation that a signal left out.
      self._values = {}
      self._sent -= 1
    for old in before:
      shutil.rmtree(old)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    if step != self._step:
      self._send()
    self._step = step
    self._values = {**self._values, **values}

  def _send(self) -> None:
    """Sends a step's values at once, since W&B keeps each call as a row."""
    if self._values and self._step > self._sent:
      self._run.log({"step": self._step, **self._values})
    self._values = {}

  def close(self) -> None:
    self._send()
    self._run.finish()


def check_writers(names: Sequence[str]) -> None:
  """Raises a UserError for an unknown writer, or one that is not installed."""
  for name in names:
    WRITERS[name]
  if "wandb" in names and importlib.util.find_spec("wandb") is None:
    raise UserError(
      "log.writers=wandb needs wandb, which is missing: pip install"
      " 'antlm_jax[wandb]'"
    )
