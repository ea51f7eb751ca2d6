"""What a run shows and records: progress, metrics, and where time went."""

import contextlib
import json
import pathlib
import re
import time
from collections.abc import Mapping, Sequence

import jax
import tensorboardX

from antlm_jax.errors import UserError
from antlm_jax.runtime import chips, files, processes
from antlm_jax.units import duration

METRICS = "metrics.jsonl"


class Records:
  """Metrics by step, as JSON lines and for TensorBoard.

  A run that goes on from step `start` first drops what it had recorded after
  it, so that each step stands there once. Of several processes the first
  writes.
  """

  def __init__(self, workdir: pathlib.Path, start: int, tensorboard: bool):
    self._file = self._board = None
    if not processes.is_first():
      return
    path = workdir / METRICS
    kept = [r for r in read_records(workdir) if r["step"] <= start]
    files.write_text(path, "".join(json.dumps(r) + "\n" for r in kept))
    self._file = path.open("a")
    if tensorboard:
      self._board = tensorboardX.SummaryWriter(
        str(workdir / "tensorboard"), purge_step=start + 1
      )

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records `values`, named such as `train/clm/loss`, after `step` steps."""
    if self._file is not None:
      self._file.write(json.dumps({"step": step, **values}) + "\n")
      self._file.flush()
    if self._board is not None:
      for name, value in values.items():
        self._board.add_scalar(name, value, step)

  def close(self) -> None:
    """Flushes and closes."""
    if self._file is not None:
      self._file.close()
    if self._board is not None:
      self._board.close()


def read_records(workdir: pathlib.Path) -> list[dict]:
  """Reads the metrics of a run; a line cut off by a kill is left out."""
  path = files.path(workdir) / METRICS
  records = []
  if path.exists():
    for line in path.read_text().splitlines():
      with contextlib.suppress(json.JSONDecodeError):
        records.append(json.loads(line))
  return records


class Trace:
  """A profile of some steps, for TensorBoard's profiler or xprof.

  Of several processes the first is profiled.

  Args:
    steps: `FIRST:LAST`, the steps from FIRST up to LAST; empty for none.
    folder: Receives it.

  Raises:
    UserError: for steps that cannot be read.
  """

  def __init__(self, steps: str, folder: pathlib.Path):
    self._folder, self._running = folder, False
    found = re.fullmatch(r"(\d+):(\d+)", steps)
    if steps and not (found and int(found[1]) < int(found[2])):
      raise UserError(
        f"log.trace={steps!r} is not FIRST:LAST, such as 100:105 for five steps"
      )
    self.first, self.last = map(int, found.groups()) if found else (-1, -1)

  def begin(self) -> None:
    """Begins; the computations before must have ended."""
    if processes.is_first():
      jax.profiler.start_trace(str(self._folder))
      self._running = True

  def end(self) -> None:
    """Ends, and writes what was seen; nothing where none was begun."""
    if self._running:
      jax.profiler.stop_trace()
      self._running = False


class Ledger:
  """Seconds by what they were spent on."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._begun = time.monotonic()

  @contextlib.contextmanager
  def time(self, what: str):
    """Counts the time of its block as spent on `what`."""
    begun = time.monotonic()
    try:
      yield
    finally:
      self.add(what, time.monotonic() - begun)

  def add(self, what: str, seconds: float) -> None:
    """Counts `seconds` as spent on `what`."""
    self.seconds[what] = self.seconds.get(what, 0.0) + seconds

  @property
  def total(self) -> float:
    """Seconds since the ledger was made."""
    return time.monotonic() - self._begun

  def __str__(self) -> str:
    rest = self.total - sum(self.seconds.values())
    parts = {**self.seconds, "other": rest}
    return ", ".join(
      f"{what} {duration(s)}" for what, s in parts.items() if s >= 0.05
    )


class Window:
  """Sums metrics between log lines.

  Args:
    ledger: Its `data` and `steps` are the time that training took.
  """

  def __init__(self, ledger: Ledger):
    self._ledger = ledger
    self._devices = jax.device_count()
    peak = chips.peak(jax.devices()[0])
    self._peak = peak and peak * self._devices
    self._clear()

  def _clear(self) -> None:
    self._nats = self._count = 0.0  # both become [K]
    self._tokens = self._work = 0.0
    self._begun = self._spent()

  def _spent(self) -> float:
    """Seconds of training so far, without compiling, evaluating and saving."""
    seconds = self._ledger.seconds
    return seconds.get("data", 0.0) + seconds.get("steps", 0.0)

  def add(self, metrics: Mapping, tokens: int, work: float) -> None:
    """Counts a step.

    Args:
      metrics: What the train step returned.
      tokens: Its tokens; 0 if its time is not to count for the speed.
      work: Its floating-point operations; likewise.
    """
    self._nats += metrics["nats"]
    self._count += metrics["count"]
    self._tokens += tokens
    self._work += work

  def take(self, names: Sequence[str]) -> dict[str, float]:
    """Returns the losses by objective and the speed, and begins anew.

    Args:
      names: The logged name of each objective.
    """
    values = {
      f"train/{name}/loss": float(nats / count)
      for name, nats, count in zip(names, self._nats, self._count, strict=True)
      if count > 0
    }
    seconds = self._spent() - self._begun
    if self._tokens:
      rate = self._tokens / seconds
      values["train/tokens_per_second"] = rate
      values["train/tokens_per_second_per_device"] = rate / self._devices
      if self._peak:
        values["train/mfu"] = self._work / seconds / self._peak
    self._clear()
    return values
