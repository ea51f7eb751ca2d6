"""Two ways of doing the same work, timed by turns.

A machine is never quite alone, and is faster at one time than at another: so
the two take turns, each ratio is of one turn, and a turn in which other
processes took part of the machine is done again.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from antlm_jax.inference import programs

# Of what the cores could do in a turn, what other processes may have done.
_DISTURBED = 0.05
_STAT = pathlib.Path("/proc/stat")  # Linux's: elsewhere nothing is known


@dataclasses.dataclass(frozen=True)
class Case:
  """Work that we do, and a peer."""

  name: str
  peer: str
  ours: Callable[[], Any]
  theirs: Callable[[], Any]
  work: float  # how much of it a call does
  unit: str  # of that
  same: Callable[[Any, Any], bool]  # whether both found the same
  # Whether ours compiles in every call: its programs are forgotten before.
  anew: bool = False


def measure(case: Case, rounds: int) -> dict:
  """Times a case, after a call of each that does not count.

  Returns:
    The medians of both, in work a second; the ratios of the turns, sorted, over
    1 where we are faster; what the first call of ours took more (it compiles);
    the share of the machine that others took, and the turns done again.
  """
  (first, mine, _), (_, other, _) = _timed(case.ours), _timed(case.theirs)
  turns, repeated = [], 0
  while len(turns) < rounds:
    turn = _turn(case, theirs_first=len(turns) % 2 == 1)
    busy = max(others for _, others in turn)
    # Where it is never quiet, what was seen is what there is.
    if busy > _DISTURBED and repeated < rounds:
      repeated += 1
      continue
    turns.append([seconds for seconds, _ in turn] + [busy])
  taken = np.array(turns)
  ratios = np.sort(taken[:, 1] / taken[:, 0])
  mine_taken, others_taken = np.median(taken[:, :2], axis=0)
  return {
    "case": case.name,
    "peer": case.peer,
    "unit": case.unit,
    "ours": case.work / mine_taken,
    "theirs": case.work / others_taken,
    "ratio": float(np.median(ratios)),
    "ratios": ratios.tolist(),
    "compile_seconds": 0.0 if case.anew else first - mine_taken,
    "same": bool(case.same(mine, other)),
    "others": float(taken[:, 2].max()),
    "repeated": repeated,
  }


def _turn(case: Case, theirs_first: bool) -> list[tuple[float, float]]:
  """Times ours and theirs: the seconds, and the share that others took."""
  calls = [case.ours, case.theirs]
  out = []
  for call in reversed(calls) if theirs_first else calls:
    if case.anew:
      if call is case.ours:
        programs.compiled.cache_clear()
        jax.clear_caches()
    else:
      # The memory that the other one used comes back slowly: to a virtual
      # machine from its host, which may take as long as the work.
      call()
    seconds, _, others = _timed(call)
    out.append((seconds, others))
  return out[::-1] if theirs_first else out


def _timed(call) -> tuple[float, Any, float]:
  """Returns a call's seconds, its result, and others' share of the machine."""
  own, busy, begun = _own(), _busy(), time.perf_counter()
  out = call()
  seconds = time.perf_counter() - begun
  others = (_busy() - busy) - (_own() - own)
  return seconds, out, max(0.0, others / (seconds * (os.cpu_count() or 1)))


def _own() -> float:
  """The CPU seconds of this process and of those that it started."""
  return sum(os.times()[:4])


def _busy() -> float:
  """The CPU seconds of all processes, and those that a host took away."""
  if not _STAT.exists():
    return _own()
  user, nice, system, _, _, *rest = map(
    int, _STAT.read_text().partition("\n")[0].split()[1:9]
  )
  return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
