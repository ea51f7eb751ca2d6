"""Two sides that do the same work, each in its own process, timed by turns.

The speed of a shared machine changes over time. So the sides take turns, and
each ratio is from the same turn.
"""

import dataclasses
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Work:
  """Work of a case, which both sides do."""

  kind: ClassVar[str]  # such as train
  unit: ClassVar[str]  # of the amount of work

  def tiny(self) -> "Work":
    """Returns work of the same kind that takes seconds."""
    raise NotImplementedError

  def same(self, ours, theirs) -> bool:
    """Whether the results of both sides agree."""
    return bool(np.allclose(ours, theirs, rtol=1e-3, atol=1e-3))


# Prepares a side's work, with a folder for both sides. Returns the call that
# does it, and the amount of work of a call.
Side = Callable[[Any, pathlib.Path], tuple[Call, float]]


@dataclasses.dataclass(frozen=True)
class Case:
  """Work that this library does, and a peer."""

  device: str  # cpu or gpu
  work: Work
  peer: str
  ours: Side
  theirs: Side


class Timed(NamedTuple):
  """A call that was timed, in the process of its side."""

  seconds: float
  result: Any
  peak_bytes: int | None  # most memory of an accelerator so far


class Worker:
  """A side of a case, in its own process."""

  def __init__(self, side: Side, work: Work, folder: pathlib.Path):
    """Starts the process, which prepares the work and makes a first call."""
    context = multiprocessing.get_context("spawn")
    self._pipe, pipe = context.Pipe()
    self._process = context.Process(
      target=_serve, args=(pipe, side, work, folder), daemon=True
    )
    self._process.start()
    pipe.close()

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._pipe.close()
    self._process.terminate()
    self._process.join()

  def first(self) -> tuple[Timed, float]:
    """Waits for the first call; returns it, and the amount of a call."""
    return self._receive()

  def __call__(self) -> Timed:
    """Makes one more call."""
    self._pipe.send(None)
    return self._receive()

  def _receive(self):
    try:
      reply = self._pipe.recv()
    except EOFError:
      raise ChildProcessError("its process was killed") from None
    if isinstance(reply, str):
      raise ChildProcessError(reply)
    return reply


def _serve(pipe, side: Side, work: Work, folder: pathlib.Path) -> None:
  """Works in a worker's process, until its pipe is closed."""
  try:
    call, amount = side(work, folder)
    pipe.send((time_call(call), amount))
    while True:
      pipe.recv()
      pipe.send(time_call(call))
  except (EOFError, BrokenPipeError):
    return
  except Exception as error:  # of any library: other cases follow
    line = " ".join(str(error).split())[:200]
    pipe.send(f"{type(error).__name__}: {line}")


def time_case(case: Case, ours, theirs, rounds: int) -> dict:
  """Times a case, after a call of each side that does not count.

  Args:
    ours: Our `Worker`.
    theirs: The peer's.
    rounds: Number of turns.

  Returns:
    The medians of both, in work per second. The sorted ratios of the turns,
    over 1 if we are faster, with their median. The extra time of our first
    call, which compiles. The accelerator's memory of both. If a side fails,
    only the error.
  """
  names = {"case": str(case.work), "peer": case.peer}
  try:
    our_first, amount = ours.first()
    their_first, _ = theirs.first()
    seconds = by_turns((ours, theirs), rounds)
    peaks = [side().peak_bytes for side in (ours, theirs)]
  except ChildProcessError as error:
    return names | {"error": str(error)}
  ratios = np.sort(seconds[:, 1] / seconds[:, 0])
  our_median, their_median = np.median(seconds, axis=0)
  return names | {
    "unit": case.work.unit,
    "ours": amount / our_median,
    "theirs": amount / their_median,
    "ratio": float(np.median(ratios)),
    "ratios": ratios.tolist(),
    "compile_seconds": our_first.seconds - our_median,
    "peak_bytes": None if None in peaks else peaks,
    "same": case.work.same(our_first.result, their_first.result),
  }


def by_turns(calls: Sequence[Callable[[], Timed]], rounds: int) -> np.ndarray:
  """Times calls by turns, every other turn in reverse order.

  In each turn, a first call of each does not count: a process that waited for
  its turn takes up to twice as long.

  Returns the seconds, `[rounds, calls]`.
  """
  seconds = np.zeros((rounds, len(calls)))
  for turn, row in enumerate(seconds):
    for n in range(len(calls))[:: -1 if turn % 2 else 1]:
      calls[n]()
      row[n] = calls[n]().seconds
  return seconds


def time_call(call: Call) -> Timed:
  """Times a call in this process."""
  begun = time.perf_counter()
  result = call()
  return Timed(time.perf_counter() - begun, result, _peak_bytes())


def _peak_bytes() -> int | None:
  """Returns the accelerator's memory that this process has taken at most."""
  torch = sys.modules.get("torch")
  if torch and torch.cuda.is_initialized():
    return torch.cuda.max_memory_allocated()
  return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
