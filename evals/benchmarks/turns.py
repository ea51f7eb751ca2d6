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
  (first, mine, _), (_, other, _) = (
    _time_call(case.ours),
    _time_call(case.theirs),
  )
  calls = case.ours, case.theirs
  before = case.before or case.ours, case.theirs
  seconds, others, repeated = by_turns(calls, rounds, before)
  ratios = np.sort(seconds[:, 1] / seconds[:, 0])
  mine_taken, others_taken = np.median(seconds, axis=0)
  mine_best, others_best = seconds.min(axis=0)
  return {
    "case": case.name,
    "peer": case.peer,
    "unit": case.unit,
    "ours": case.work / mine_taken,
    "theirs": case.work / others_taken,
    "ratio": float(np.median(ratios)),
    "ratios": ratios.tolist(),
    "best": float(others_best / mine_best),
    "compile_seconds": 0.0 if case.before else first - mine_taken,
    "same": bool(case.same(mine, other)),
    "others": others,
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
  largest, repeated = 0.0, 0
  while len(turns) < rounds:
    turn, others = [0.0] * len(calls), 0.0
    for n in list(range(len(calls)))[:: -1 if len(turns) % 2 else 1]:
      before[n]()
      turn[n], _, taken = _time_call(calls[n])
      others = max(others, taken)
    if others > _DISTURBED and repeated < rounds:
      repeated += 1
    else:
      turns.append(turn)
      largest = max(largest, others)
  return np.array(turns), largest, repeated


def _time_call(call: Callable[[], Any]) -> tuple[float, Any, float]:
  """Returns a call's seconds, its result, and others' share of the machine."""
  own, busy, begun = _own_cpu_seconds(), _busy(), time.perf_counter()
  out = call()
  seconds = time.perf_counter() - begun
  others = (_busy() - busy) - (_own_cpu_seconds() - own)
  return seconds, out, max(0.0, others / (seconds * (os.cpu_count() or 1)))


def _own_cpu_seconds() -> float:
  """The CPU seconds of this process and of those that it started."""
  return sum(os.times()[:4])


def _busy() -> float:
  """The CPU seconds of all processes, and those that a host took away."""
  if not _STAT.exists():
    return _own_cpu_seconds()
  words = _STAT.read_text("utf-8").partition("\n")[0].split()[1:9]
  user, nice, system, _, _, *rest = map(int, words)
  return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
