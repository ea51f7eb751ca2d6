"""Ctrl-C, SIGTERM and a closed terminal end a run, after it has saved."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator

from antlm_jax import errors

# Exit statuses of the signals.
ENDS = {
  signal.SIGINT: errors.INTERRUPTED,
  signal.SIGTERM: errors.RUN_AGAIN,
  signal.SIGHUP: errors.RUN_AGAIN,
}


@dataclasses.dataclass
class Stop:
  """The signal that a run received."""

  status: int = 0  # exit status; 0 without a signal
  waits: bool = False  # whether the run looks at it; otherwise, signals end it

  def __call__(self, number: int, frame) -> None:
    """Handles a signal; a second Ctrl-C ends the run at once."""
    # A launcher may send SIGTERM twice: to the process and to its group.
    if self.status and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.status = self.status or ENDS[number]
    if not self.waits:
      raise errors.Stopped(self.status)


def end_training() -> bool:
  """Asks a run to save and end. Returns False if no run looks for signals."""
  stop = signal.getsignal(signal.SIGTERM)
  if not (isinstance(stop, Stop) and stop.waits):
    return False
  stop.status = stop.status or errors.RUN_AGAIN
  return True


def asked_to_end() -> bool:
  """Whether a run has received a signal, as any of its threads may ask."""
  stop = signal.getsignal(signal.SIGTERM)
  return isinstance(stop, Stop) and bool(stop.status)


@contextlib.contextmanager
def listening() -> Iterator[Stop]:
  """Handles signals for the time of its block.

  Blocks may be nested; the outermost one handles signals. Raises Stopped if a
  library has swallowed an earlier signal, as imports may.
  """
  stop = signal.getsignal(signal.SIGTERM)
  if isinstance(stop, Stop):
    if stop.status:
      raise errors.Stopped(stop.status)
    try:
      yield stop
    finally:
      stop.waits = False
    return
  stop = Stop()
  handlers = {}
  try:
    for number in ENDS:
      # nohup has a run survive its terminal.
      ignored = signal.getsignal(number) is signal.SIG_IGN
      if not (ignored and number == signal.SIGHUP):
        handlers[number] = signal.signal(number, stop)
  except ValueError:  # not the main thread, as in some notebooks
    pass
  try:
    yield stop
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)
