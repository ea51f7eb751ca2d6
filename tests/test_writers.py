"""Writers of metrics: TensorBoard and Weights & Biases."""

import json
import pathlib
import signal
import struct
import subprocess
import sys
import time
from unittest import mock

import pytest

from antlm_jax.training import metrics, writers
from tests import runs


def test_event_files_are_tensorboards(tmp_path):
  from tensorboardX.proto.event_pb2 import Event, SessionLog
  from tensorboardX.record_writer import masked_crc32c

  board = writers.TensorBoard(tmp_path, {7: {}}, "", None)
  loss = "train/clm/loss"
  written = {8: {loss: 1.5, "é": -2.0}, 300: {loss: 0.25}}
  for step, values in written.items():
    board.write(step, values)
  board.close()
  (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
  data, found = path.read_bytes(), []
  while data:
    size, of_size = struct.unpack("<QI", data[:12])
    event, rest = data[12 : 12 + size], data[12 + size :]
    assert of_size == masked_crc32c(data[:8])
    assert struct.unpack("<I", rest[:4])[0] == masked_crc32c(event)
    found.append(Event.FromString(event))
    data = rest[4:]
  assert found[0].file_version == "brain.Event:2"
  assert found[1].step == 8 and found[1].session_log.status == SessionLog.START
  values = {
    event.step: {v.tag: v.simple_value for v in event.summary.value}
    for event in found[2:]
  }
  assert values == written
  assert abs(found[-1].wall_time - time.time()) < 60


def records_of(folder: pathlib.Path):
  """Reads wandb's messages in LevelDB's log format from an offline folder."""
  from wandb.proto.wandb_internal_pb2 import Record

  (path,) = folder.glob("run-*.wandb")
  data, at, message = path.read_bytes(), 7, b""
  while at + 7 <= len(data):
    size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
    if at % 32768 > 32768 - 7 or not kind:  # the end of a block
      at += 32768 - at % 32768
      continue
    message += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in (1, 4):  # a whole message, or its last part
      yield Record.FromString(message)
      message = b""


KILLED = """
import os, signal, sys
from antlm_jax import config
from antlm_jax.training import hooks, loop

class Kill(hooks.Hook):
  def after_step(self, trainer, done_step):
    if done_step.step == 9:
      os.kill(os.getpid(), signal.SIGKILL)

spec, workdir = (word.partition("=")[2] for word in sys.argv[1:3])
loop.train_run(config.load_config(spec, sys.argv[3:]), workdir, [Kill()])
"""


def test_wandb_has_the_evaluation_that_a_signal_left_out(tmp_path, monkeypatch):
  """Catches values of W&B's last step that it dropped as already sent."""
  wandb = mock.MagicMock(Error=OSError)
  wandb.init.return_value.summary = {"step": 8}
  monkeypatch.setitem(sys.modules, "wandb", wandb)
  writer = writers.Wandb(tmp_path, {4: {"a": 1.0}, 8: {"a": 2.0}}, "", {})
  writer.write(8, {"b": 3.0})
  writer.close()
  wandb.init.return_value.log.assert_called_once_with({"step": 8, "b": 3.0})


@pytest.mark.slow
def test_wandb_has_each_step_of_a_killed_run_once(
  prepared, tmp_path, monkeypatch
):
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  settings = "log.writers=wandb model.layers=1 checkpoint.every=4 eval.every=5"
  settings = *settings.split(), "curriculum=8C+6M steps"
  args = runs.train_args(tmp_path / "run", prepared, *settings)
  killed = subprocess.run([sys.executable, "-c", KILLED, *args], cwd=runs.ROOT)
  assert killed.returncode == -signal.SIGKILL
  done = runs.train(tmp_path / "run", prepared, *settings, devices=1)
  assert "resuming from step 8" in done.stdout
  (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
  found = {}
  for record in records_of(folder):
    if record.HasField("run"):
      assert record.run.run_id == (tmp_path / "run/wandb_id").read_text()
    if record.HasField("history"):
      row = {
        "".join(item.nested_key) or item.key: json.loads(item.value_json)
        for item in record.history.item
      }
      step = row.pop("step")
      assert step not in found
      found[step] = {n: v for n, v in row.items() if not n.startswith("_")}
  assert list(found) == list(range(15))
  assert found == metrics.by_step(metrics.read_records(tmp_path / "run"))


def test_a_writer_that_is_not_installed_is_told(
  prepared, tmp_path, monkeypatch
):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  line = runs.refused_training(tmp_path / "run", prepared, "log.writers=wandb")
  assert "pip install 'antlm_jax[wandb]'" in line
  assert not (tmp_path / "run").exists()
