"""Metrics of a run: values by step, and the time that each activity takes."""

import collections
import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from antlm_jax import private
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, processes, progress
from antlm_jax.training.writers import WRITERS

METRICS = "metrics.jsonl"
# Losses of the held-out rows by step. The mean over a half's rows is its loss.
ROWS = "held_out_rows.jsonl"
SUMMARY = "summary.json"  # of a run that has ended
PAIRS = "eval/pairs/"  # prefix of accuracies on minimal pairs, by mode
# Each half of the held-out rows has a loss, such as `eval/clm/loss/choose`. One
# chooses the best step; on the other its loss is not too low by choice.
HALVES = CHOOSE, REPORT = "choose", "report"
ByStep = Mapping[int, Mapping[str, float]]  # values by step, then by name


class Records:
  """Values by step, as JSON lines and for the writers of `log.writers`.

  Only the first process writes.
  """

  def __init__(
    self, folder: pathlib.Path, start: int, config=None, name: str = ""
  ):
    """Drops the records after a step, and opens the writers.

    Args:
      folder: Folder of the run.
      start: Step that a killed run resumes from, or -1 for a new run. Later
        values will be recorded again.
      config: Config of the run, which names the writers; None for no writers.
      name: Name of the run for the writers.
    """
    self._path = folder / METRICS
    self._rows_path = folder / ROWS
    self._writers = []
    if not processes.is_first():
      return
    records = [r for r in read_records(folder) if r["step"] <= start]
    files.write_text(self._path, _lines(records))
    rows = [r for r in read_rows(folder) if r["step"] <= start]
    if rows or self._rows_path.exists():
      files.write_text(self._rows_path, _lines(rows))
    for writer in config.log.writers if config else ():
      with files.writing(folder):
        make = WRITERS[writer]
        opened = make(folder, by_step(records), name, config.to_dict())
      self._writers.append(opened)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records values after `step` steps; raises a UserError if it cannot."""
    if not processes.is_first():
      return
    with files.writing(self._path):
      with self._path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **values}) + "\n")
      for writer in self._writers:
        writer.write(step, values)

  def write_rows(self, step: int, rows: Mapping[str, Sequence[float]]) -> None:
    """Records losses of held-out rows, by objective and half."""
    if not processes.is_first() or not rows:
      return
    with files.writing(self._rows_path), self._rows_path.open("a") as file:
      file.write(_lines([{"step": step, **rows}]))

  def close(self) -> None:
    """Closes the writers. Metrics that they cannot write then are lost."""
    for writer in self._writers:
      with contextlib.suppress(OSError, UserError):
        writer.close()


def read_records(workdir: pathlib.Path) -> list[dict]:
  """Reads the metrics of a run, and warns of lines that are not metrics."""
  path = files.absolute_path(workdir) / METRICS
  if not path.exists():
    return []
  records = []
  damaged = []
  for number, record in files.read_jsonl(path, "the metrics", damaged.append):
    if type(record.get("step")) is not int:
      damaged.append(f"{path}, line {number}: it has no step")
    elif odd := [n for n, x in record.items() if not _is_number(x)]:
      damaged.append(f"{path}, line {number}: {odd[0]!r:.60} is no number")
    else:
      records.append(record)
  if damaged:
    count = f"{len(damaged):,} lines are" if damaged[1:] else "the line is"
    progress.say(f"warning: {damaged[0]}; {count} left out")
  return records


def read_rows(workdir: pathlib.Path) -> list[dict]:
  """Reads the losses of held-out rows, without lines that a kill cut short."""
  path = files.absolute_path(workdir) / ROWS
  if not path.exists():
    return []
  lines = files.read_jsonl(path, "the losses of held-out rows", lambda _: None)
  return [record for _, record in lines if "step" in record]


def _lines(records: Iterable[Mapping]) -> str:
  return "".join(json.dumps(record) + "\n" for record in records)


def _is_number(value: object) -> bool:
  """Whether a value of JSON is a number that float64 holds."""
  is_integer = type(value) is int and abs(value) < 1 << 63
  return is_integer or isinstance(value, float)


def by_step(records: Iterable[dict]) -> dict[int, dict[str, float]]:
  """Merges the values that were recorded after the same step."""
  rows: dict[int, dict[str, float]] = {}
  for record in records:
    values = {name: v for name, v in record.items() if name != "step"}
    rows.setdefault(record["step"], {}).update(values)
  return rows


def objective_of_loss(key: str) -> str:
  """Returns a held-out loss's objective, with its set if there are several."""
  return key.removeprefix("eval/").removesuffix("/loss")


def comparable_losses(
  folder: pathlib.Path, watch: Sequence[str]
) -> dict[int, float]:
  """Returns a run's `choosing` losses on as many rows as the newest."""
  losses = choosing(by_step(read_records(folder)), watch)
  name = f"{watch[0]}/{CHOOSE}"
  counts = {row["step"]: len(row.get(name, ())) for row in read_rows(folder)}
  newest = counts.get(max(losses, default=0))
  return {s: x for s, x in losses.items() if counts.get(s) == newest}


def choosing(rows: ByStep, watch: Sequence[str]) -> dict[int, float]:
  """Returns the sum of losses that chooses the best step, by step.

  It is on half of the held-out rows, or on all if there is a single row.
  """
  return watched(rows, watch, f"/{CHOOSE}") or watched(rows, watch)


def watched(
  rows: ByStep, objectives: Sequence[str], half: str = ""
) -> dict[int, float]:
  """Returns the sum of held-out losses in nats, by step."""
  keys = [f"eval/{name}/loss{half}" for name in objectives]
  return {
    step: sum(row[key] for key in keys)
    for step, row in rows.items()
    if keys and all(key in row for key in keys)
  }


class Ledger:
  """Seconds that a run spends on each activity."""

  def __init__(self):
    self.seconds = collections.defaultdict[str, float](float)
    self._begun = time.monotonic()

  @contextlib.contextmanager
  def time(self, activity: str) -> Iterator[None]:
    """Counts the time of its block as spent on an activity."""
    begun = time.monotonic()
    try:
      yield
    finally:
      self.seconds[activity] += time.monotonic() - begun

  @property
  def training(self) -> float:
    """Seconds spent on steps and their data, without compilation."""
    return self.seconds.get("data", 0.0) + self.seconds.get("steps", 0.0)

  @property
  def paused(self) -> float:
    """Seconds spent on evaluations, saves and other hooks."""
    between = "evaluation", "checkpoint", "hooks"
    return sum(self.seconds.get(activity, 0.0) for activity in between)

  @property
  def total(self) -> float:
    """Seconds since the ledger was made."""
    return time.monotonic() - self._begun


class StepClock:
  """Measures the seconds of one step, and writes them into a ledger.

  A step's time is that of its data, that of handing it to the device, and that
  of waiting for its results. A CPU may take the step when it is handed over,
  and an accelerator while the host waits.
  """

  def __init__(self, ledger: Ledger):
    """Starts the clock: the step's data are read next."""
    self._ledger = ledger
    self._started = ledger.training
    self._seconds = 0.0
    # Whether the step compiled its program. That takes minutes, which do not
    # count for the speed.
    self.compiled = False

  @contextlib.contextmanager
  def handing_over(self, update: Callable) -> Iterator[None]:
    """Times its block, which calls the jitted `update`."""
    programs = private.compiled_programs(update)
    begun = time.monotonic()
    yield
    self.compiled = private.compiled_programs(update) > programs
    activity = "compile" if self.compiled else "steps"
    self._ledger.seconds[activity] += time.monotonic() - begun
    self._seconds = self._ledger.training - self._started

  @contextlib.contextmanager
  def waiting(self) -> Iterator[None]:
    """Times its block, which waits for the step's results."""
    before = self._ledger.training
    with self._ledger.time("steps"):
      yield
    self._seconds += self._ledger.training - before

  @property
  def seconds(self) -> float:
    """Seconds that the step and its data took; 0 if it compiled."""
    return 0.0 if self.compiled else self._seconds
