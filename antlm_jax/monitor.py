"""What a run shows and records: progress, metrics, and where time went."""

import contextlib
import json
import pathlib
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import tensorboardX
import tqdm

from antlm_jax import chips, distributed, files
from antlm_jax.cli import UserError

METRICS = "metrics.jsonl"


class Records:
  """Metrics by step, as JSON lines and for TensorBoard.

  A run that goes on from step `start` first drops what it had recorded after
  it, so that each step stands there once. Of several processes the first
  writes.
  """

  def __init__(self, workdir: pathlib.Path, start: int, tensorboard: bool):
    self._file = self._board = None
    if not distributed.is_first():
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


def bar(**settings) -> tqdm.tqdm | None:
  """Makes a progress bar on a terminal or in a notebook, none in a log."""
  if sys.stderr.isatty():
    return tqdm.tqdm(dynamic_ncols=True, **settings)
  if type(sys.stdout).__module__ != "ipykernel.iostream":
    return None
  # A notebook shows each stream by itself: on stdout, the bar stays under the
  # lines printed above it. It has no width to ask for.
  return tqdm.tqdm(file=sys.stdout, ncols=100, mininterval=0.5, **settings)


def track(
  items: Sequence, unit: str, name: str = "", every: float = 30.0
) -> Iterator:
  """Goes through items showing progress: a bar, or lines in a log.

  Args:
    items: The items.
    unit: What one is called.
    name: What is being done with them.
    every: Seconds from one line to the next, at least.
  """
  shown = bar(total=len(items), unit=unit, desc=name or None, leave=False)
  last = time.monotonic()
  with shown or contextlib.nullcontext():
    for done, item in enumerate(items, start=1):
      yield item
      if shown is not None:
        shown.update()
      elif time.monotonic() - last >= every:
        last = time.monotonic()
        start = f"{name}: " if name else ""
        print(f"{start}{unit} {done}/{len(items)}", file=sys.stderr, flush=True)


class Progress:
  """A bar on a terminal or in a notebook, plain lines in a log.

  Of several processes the first speaks.
  """

  def __init__(self, start: int, total: int):
    self._total = total
    self._quiet = not distributed.is_first()
    self._bar = None
    if not self._quiet:
      self._bar = bar(total=total, initial=start, unit="step")

  def step(self) -> None:
    """Counts one step."""
    if self._bar is not None:
      self._bar.update()

  def show(self, step: int, text: str) -> None:
    """Shows how training stands after `step` steps."""
    if self._bar is not None:
      self._bar.set_postfix_str(text)
    else:
      self.say(f"step {step}/{self._total} · {text}")

  def say(self, line: str) -> None:
    """Prints a line of its own."""
    if self._bar is not None:
      self._bar.write(line)
    elif not self._quiet:
      print(line, flush=True)

  def close(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.close()


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
    if distributed.is_first():
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


def duration(seconds: float) -> str:
  """Writes seconds as people do: 12.3s, 4m05s, 3h20m."""
  if seconds < 60:
    return f"{seconds:.1f}s"
  minutes, rest = divmod(round(seconds), 60)
  if minutes < 60:
    return f"{minutes}m{rest:02d}s"
  return f"{minutes // 60}h{minutes % 60:02d}m"


def quantity(number: float) -> str:
  """Writes a large number shortly: 950, 12.3k, 4.56M."""
  for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
    if number >= size:
      return f"{number / size:.3g}{unit}"
  return f"{number:.0f}"
