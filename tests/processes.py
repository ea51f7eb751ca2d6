"""Training by real processes on this machine, which tests watch and end."""

import os
import pathlib
import signal
import subprocess
import time

from tests import runs
from tests.launching import LAUNCH

# Each process leaves its number, and becomes the command.
_TELL = 'echo $$ > "$0.$JAX_PROCESS_ID.tmp" && mv "$0.$JAX_PROCESS_ID.tmp"'
_TELL += ' "$0.$JAX_PROCESS_ID"; exec "$@"'
# Dropout everywhere, a change of objective, every step logged.
QUICK = (
  "train.batch_size=16",
  "model.layers=1",
  "model.dropout=0.1",
  "model.attention_dropout=0.1",
  "log.every=1",
  "log.tensorboard=false",
  "eval.rows=0",
)


class Training:
  """A training run of `count` processes, each with `devices` devices.

  Args:
    workdir: The run's folder.
    data: The prepared data.
    overrides: Settings, such as `train.batch_size=4`.
    own: Further settings by process, as bash puts them in.
    cache: Where compiled programs are kept for the next run.
  """

  def __init__(self, workdir, data, overrides, count, devices, own="", *, cache):
    self._pids = pathlib.Path(f"{workdir}.pids")
    self._count = count
    for i in range(count):
      self._pid_file(i).unlink(missing_ok=True)
    args = runs.train_args(workdir, data, *QUICK, *overrides)
    command = runs.command("antlm_jax.train", *args)
    words = [
      LAUNCH / "local.sh", count, f"--devices={devices}", "--grace=90", "--",
      "bash", "-c", f"{_TELL} {own}", self._pids, *command,
    ]  # fmt: skip
    caching = {
      "JAX_COMPILATION_CACHE_DIR": str(cache),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
      "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    self.process = subprocess.Popen(
      list(map(str, words)),
      cwd=runs.ROOT,
      env=os.environ | caching,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )

  def _pid_file(self, i: int) -> pathlib.Path:
    return self._pids.with_name(f"{self._pids.name}.{i}")

  def running(self) -> bool:
    """Whether it has not ended."""
    return self.process.poll() is None

  def send(self, number: signal.Signals, *to: int) -> None:
    """Sends a signal to some of the processes, or to all."""
    for i in to or range(self._count):
      while not self._pid_file(i).exists():
        time.sleep(0.01)
      os.kill(int(self._pid_file(i).read_text()), number)

  def end(self, seconds: float = 300) -> tuple[int, str]:
    """Waits for the end; returns the status and all that was printed."""
    out, err = self.process.communicate(timeout=seconds)
    return self.process.returncode, out + err
