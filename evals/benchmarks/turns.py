"""Ways of doing the same work, timed by turns.

The speed of a shared machine changes over time. So the calls take turns, and
each ratio is from the same turn. A turn is repeated if other processes used a
part of the machine.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Largest share of the machine that other processes may take in a turn.
_DISTURBED = 0.05
_STAT = pathlib.Path("/proc/stat")  # Linux only: elsewhere nothing is known


@dataclasses.dataclass(frozen=True)
class TimedCase:
  """Work that we do, and a peer."""

  name: str
  peer: str
  ours: Callable[[], Any]
  theirs: Callable[[], Any]
  work: float  # amount that a call does
  unit: str  # of that amount
  same: Callable[[Any, Any], bool]  # whether both results agree
  # Runs before ours is timed, in the place of a call that does not count.
  before: Callable[[], Any] | None = None


def time_case(case: TimedCase, rounds: int) -> dict:
  """Times a case, after a call of each that does not count.

  Returns:
    The medians of both, in work per second. The sorted ratios of the turns,
    over 1 if we are faster, with their median and the ratio of the best turns.
    The extra time of our first call, which compiles. The share of the machine
    that other processes used, and the number of repeated turns.
  """
  first_seconds, our_result, _ = _time_call(case.ours)
  _, their_result, _ = _time_call(case.theirs)
  calls = case.ours, case.theirs
  before = case.before or case.ours, case.theirs
  seconds, busy_share, repeated = by_turns(calls, rounds, before)
  ratios = np.sort(seconds[:, 1] / seconds[:, 0])
  our_median, their_median = np.median(seconds, axis=0)
  our_best, their_best = seconds.min(axis=0)
  return {
    "case": case.name,
    "peer": case.peer,
    "unit": case.unit,
    "ours": case.work / our_median,
    "theirs": case.work / their_median,
    "ratio": float(np.median(ratios)),
    "ratios": ratios.tolist(),
    "best": float(their_best / our_best),
    "compile_seconds": 0.0 if case.before else first_seconds - our_median,
    "same": bool(case.same(our_result, their_result)),
    "others": busy_share,
    "repeated": repeated,
  }


def by_turns(
  calls: Sequence[Callable[[], Any]],
  rounds: int,
  before: Sequence[Callable[[], Any]],
) -> tuple[np.ndarray, float, int]:
  """Times calls by turns, every other turn in reverse order.

  `before` has an untimed call for each, usually the same call. It regains the
  memory that another call used. A virtual machine gets this memory from its
  host, which may take as long as the work.

  Returns the seconds, `[rounds, calls]`, the largest share of the machine that
  other processes used, and the number of turns repeated for it, at most
  `rounds`.
  """
  turns: list[list[float]] = []
  largest_share = 0.0
  repeated = 0
  while len(turns) < rounds:
    turn = [0.0] * len(calls)
    turn_share = 0.0
    for n in list(range(len(calls)))[:: -1 if len(turns) % 2 else 1]:
      before[n]()
      turn[n], _, busy_share = _time_call(calls[n])
      turn_share = max(turn_share, busy_share)
    if turn_share > _DISTURBED and repeated < rounds:
      repeated += 1
    else:
      turns.append(turn)
      largest_share = max(largest_share, turn_share)
  return np.array(turns), largest_share, repeated


def _time_call(call: Callable[[], Any]) -> tuple[float, Any, float]:
  """Returns a call's seconds, its result, and others' share of the machine."""
  others_before = _others_cpu_seconds()
  begun = time.perf_counter()
  result = call()
  seconds = time.perf_counter() - begun
  busy = _others_cpu_seconds() - others_before
  return seconds, result, max(0.0, busy / (seconds * (os.cpu_count() or 1)))


def _others_cpu_seconds() -> float:
  """The CPU seconds of all other processes."""
  return _busy() - _own_cpu_seconds()


def _own_cpu_seconds() -> float:
  """The CPU seconds of this process and of those that it started."""
  return sum(os.times()[:4])


def _busy() -> float:
  """The CPU seconds of all processes, and those that a host took away."""
  if not _STAT.exists():
    return _own_cpu_seconds()
  words = _STAT.read_text("utf-8").partition("\n")[0].split()[1:9]
  user, nice, system, _, _, *interrupts = map(int, words)
  return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
