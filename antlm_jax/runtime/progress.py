"""Progress: a bar on a terminal or in a notebook, lines in a log."""

import contextlib
import contextvars
import errno
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence

import tqdm

from antlm_jax import terminal, units
from antlm_jax.runtime import processes, signals

_QUIET = contextvars.ContextVar("quiet", default=False)


@contextlib.contextmanager
def quietly(quiet: bool = True) -> Iterator[None]:
  """Shows no lines and no bars in its block, if `quiet`.

  This includes the warnings of orbax, such as of a save that takes a second.
  """
  if quiet:
    logging.getLogger("absl").addFilter(_is_shown)
  before = _QUIET.set(quiet or _QUIET.get())
  try:
    yield
  finally:
    _QUIET.reset(before)


def _is_shown(_: logging.LogRecord) -> bool:
  return not _QUIET.get()


def is_quiet() -> bool:
  """Whether nothing is to be shown."""
  return _QUIET.get()


def say(line: str) -> None:
  """Prints a line on stdout. Only the first of several processes prints it.

  If nobody can read it any more, a training saves and ends.
  """
  if not processes.is_first() or _QUIET.get():
    return
  # A stream of the user's may lack signs; a command's replaces them itself.
  encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
  line = line.encode(encoding, "backslashreplace").decode(encoding)
  try:
    # Above any bar.
    tqdm.tqdm.write(terminal.visible(line), file=sys.stdout)
    sys.stdout.flush()
  except OSError as error:  # a pipe or a terminal that is closed
    gone = error.errno in (errno.EPIPE, errno.EIO)
    if not (gone and signals.end_training()):
      raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def bar(**settings) -> tqdm.tqdm | None:
  """Returns a progress bar on a terminal or in a notebook; None in a log."""
  if _QUIET.get():
    return None
  if sys.stderr.isatty():
    return tqdm.tqdm(dynamic_ncols=True, **settings)
  if type(sys.stdout).__module__ != "ipykernel.iostream":
    return None
  with warnings.catch_warnings():  # of a notebook that has no ipywidgets
    warnings.simplefilter("ignore", tqdm.TqdmWarning)
    from tqdm import auto
  if auto.notebook_tqdm is not auto.std_tqdm:
    return auto.tqdm(dynamic_ncols=True, **settings)
  # Without widgets, the bar is text. A notebook shows stdout and stderr apart.
  # On stdout, the bar stays below the printed lines. A notebook does not report
  # its width.
  return tqdm.tqdm(file=sys.stdout, ncols=100, mininterval=0.5, **settings)


class Amount:
  """Counts up to a total: a bar, or lines in a log.

  `unit` is the counted unit, such as `batch`, or `B` for bytes. `name` precedes
  the bar or line. Lines are at least `interval` seconds apart. Several threads
  may add to it.
  """

  def __init__(
    self, total: int, unit: str, name: str = "", interval: float = 30.0
  ):
    self._total = total
    self._unit = unit
    self._done = 0
    self._start = f"{name}: " if name else ""
    self._interval = interval
    self._last = time.monotonic()
    self._lock = threading.Lock()
    scale = {"unit": unit, "unit_scale": unit == "B"}
    self._bar = bar(total=total, desc=name or None, leave=False, **scale)

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    if self._bar is not None:
      self._bar.close()

  def add(self, amount: int = 1) -> None:
    """Counts some more."""
    with self._lock:
      self._done += amount
      if self._bar is not None:
        self._bar.update(amount)
        return
      if time.monotonic() - self._last < self._interval or _QUIET.get():
        return
      self._last = time.monotonic()
    line = f"{self._unit} {self._done}/{self._total}"
    if self._unit == "B":
      line = "/".join(units.quantity(n, "B") for n in (self._done, self._total))
    print(f"{self._start}{line}", file=sys.stderr, flush=True)


def track(
  items: Sequence, unit: str, name: str = "", interval: float = 30.0
) -> Iterator:
  """Yields the items and shows progress as `Amount` does."""
  with Amount(len(items), unit, name, interval) as amount:
    for item in items:
      yield item
      amount.add()


# The time left is in the postfix, as in a log's lines.
_STEPS = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]"


class Progress:
  """A bar on a terminal or in a notebook, and plain lines in a log.

  Only the first of several processes shows anything.
  """

  def __init__(self, start: int, total: int):
    self._total = total
    self._shown = {"step": (start, time.monotonic())}  # last of each kind
    self._bar = None
    if processes.is_first():
      steps = {"total": total, "initial": start, "unit": "step"}
      self._bar = bar(**steps, bar_format=_STEPS)

  def step(self) -> None:
    """Counts one step."""
    if self._bar is not None:
      self._bar.update()

  def show(self, step: int, text: str) -> None:
    """Shows `text`, such as the losses, after `step` steps."""
    if self._bar is not None:
      self._bar.set_postfix_str(terminal.visible(text))
    else:
      self.note("step", step, f"step {step}/{self._total} · {text}")

  def note(self, kind: str, step: int, line: str) -> None:
    """Prints a line, unless one of its kind was printed just before.

    That is less than half of the run and 10 seconds before. The end has a line.
    """
    before, when = self._shown.get(kind, (-self._total, 0.0))
    long = step - before >= self._total / 2 or time.monotonic() - when >= 10
    if long or step == self._total:
      self._shown[kind] = step, time.monotonic()
      say(line)

  def close(self) -> None:
    """Ends the bar."""
    if self._bar is not None:
      self._bar.close()
