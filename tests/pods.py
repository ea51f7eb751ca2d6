"""Training by real processes on this machine, which tests watch and stop."""

import contextlib
import hashlib
import os
import pathlib
import signal
import subprocess
import time

import jax
import numpy as np

from antlm_jax import attention
from antlm_jax import mesh as mesh_lib
from antlm_jax.masks import AttentionMask
from antlm_jax.models import layers
from antlm_jax.training import metrics
from tests import runs
from tests.launching import LAUNCH

# Each process writes its PID to a file, then executes the command.
TELL = (
  'echo $$ > "$0.$JAX_PROCESS_ID.tmp" &&'
  ' mv "$0.$JAX_PROCESS_ID.tmp" "$0.$JAX_PROCESS_ID"'
)
# Dropout everywhere, rows for eight data shards, every step logged.
SMALL = (
  "train.batch_size=16",
  "model.layers=1",
  "model.dropout=0.1",
  "model.attention_dropout=0.1",
  "log.every=1",
  "log.writers=",
  "eval.rows=0",
)


class Training:
  """A command that runs as `count` processes, by launch/local.sh.

  Args:
    command: The command's words.
    pids: Path prefix of the files that hold the processes' PIDs.
    count: Number of processes.
    devices: Number of devices of each process.
    own: Bash code that each process runs first, e.g. `set -- "$@" --word`.
    cache: Folder of compiled programs, which later runs reuse.
  """

  def __init__(self, command, pids, count=1, devices=1, own=":", cache=None):
    self.count, self._pids = count, pathlib.Path(pids)
    for i in range(count):
      self._pid_file(i).unlink(missing_ok=True)
    launcher = [LAUNCH / "local.sh", count, f"--devices={devices}"]
    script = f'{TELL}; {own}; exec "$@"'
    bash = ["--grace=60", "--", "bash", "-c", script, self._pids]
    words = [*launcher, *bash, *command]
    self._process = subprocess.Popen(
      list(map(str, words)),
      cwd=runs.ROOT,
      env=os.environ | caching(cache),
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  def _pid_file(self, i: int) -> pathlib.Path:
    return self._pids.with_name(f"{self._pids.name}.{i}")

  def running(self) -> bool:
    """Returns whether the command is still running."""
    return self._process.poll() is None

  def send(self, number: signal.Signals, *to: int) -> None:
    """Sends a signal to these processes, or to all."""
    for i in to or range(self.count):
      while not self._pid_file(i).exists():
        time.sleep(0.01)
      os.kill(int(self._pid_file(i).read_text()), number)

  def read_to(self, text: str) -> None:
    """Reads the output up to a line with this text."""
    assert any(text in line for line in self._process.stdout), "it has ended"

  def end(self, seconds: float = 300) -> tuple[int, str]:
    """Waits for the end; returns the status and the remaining output."""
    try:
      out, _ = self._process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
      self.send(signal.SIGKILL)
      out, _ = self._process.communicate()
      raise AssertionError(f"not over after {seconds} s: {out}") from None
    return self._process.returncode, out


def caching(folder) -> dict[str, str]:
  """Returns the environment that caches compiled programs in a folder."""
  return {
    "JAX_COMPILATION_CACHE_DIR": str(folder or ""),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
  }


def training(workdir, data, *overrides: str, **options) -> Training:
  """Starts to train the small model; `options` are those of `Training`."""
  args = runs.train_args(workdir, data, *SMALL, *overrides)
  command = runs.command("antlm_jax", "train", *args)
  return Training(command, f"{workdir}.pid", **options)


def train(workdir, data, *overrides: str, **options) -> str:
  """Trains to the end and asserts success; returns the output."""
  status, out = training(workdir, data, *overrides, **options).end()
  assert status == 0, out
  return out


def losses(workdir) -> dict[tuple[int, str], float]:
  """Returns training and held-out losses by step and name."""
  found = {}
  for record in metrics.read_records(workdir):
    for name, value in record.items():
      if name.endswith("/loss"):
        assert (record["step"], name) not in found
        found[record["step"], name] = value
  return found


def errors(out: str) -> list[str]:
  """Returns the lines that are errors of a process."""
  return [line for line in out.splitlines() if "] error: " in line]


@jax.jit
def _drop(key, states, q, v):
  states = mesh_lib.constrain(states, "batch", "seq", "embed_act")
  q = mesh_lib.constrain(q, "batch", "seq", "heads", None)
  k = mesh_lib.constrain(q[:, :, :2], "batch", "seq", "kv_heads", None)
  v = mesh_lib.constrain(v, "batch", "seq", "kv_heads", None)
  dropped = layers.attention_dropout(0.5, key, len(q))
  weights = attention.attend(q, k, v, AttentionMask(False), dropout=dropped)
  return layers.dropout(states, 0.5, key) != 0, weights != 0


def drawn(mesh=None) -> list[str]:
  """Returns hashes of dropout's masks for states and for attention."""
  rows, length = 16, 32
  # Arguments, because XLA (0.10.2, CPU) rarely compiles a product of two
  # constants to NaN.
  states = np.ones((rows, length, 24), np.float32)
  q = np.zeros((rows, length, 4, length), np.float32)
  # All weights are equal, and the output at a key's index is its weight.
  v = np.eye(length, dtype=np.float32)[None, :, None]
  v = np.broadcast_to(v, (rows, length, 2, length))
  with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
    arrays = _drop(jax.random.key(5), states, q, v)
  if mesh:
    arrays = jax.jit(
      lambda x: x, out_shardings=mesh_lib.replicated_sharding(mesh)
    )(arrays)
  bits = [np.packbits(np.asarray(array)) for array in arrays]
  return [hashlib.sha256(b.tobytes()).hexdigest() for b in bits]
