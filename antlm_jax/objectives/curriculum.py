"""The curriculum: the objectives of each step, as a function of the step.

It is written as a string of phases:

    4C+16M+4C            epochs (AntLM's schedule for BabyLlama)
    10000C+32000M        steps: counts of 1,000 or more
    300C+700M steps      steps, with the unit
    25%C+75%M            shares of the run's length
    C+M+C                equal shares of the run's length
    C:M=1:15             both in every batch, in this proportion
    2C+20C:M=1:7+2C      a mixed phase between two pure ones
    12*(1C+1M)           the phases in brackets, twelve times
    75%M30+25%M5         M with 30 % and with 5 % masked (`with_ratios`)

Letters name objectives: those of `objective.OBJECTIVES` or of
`config.objectives`. `data.mix` has the same grammar, with names of sources:
`90%web+10%books`.
"""

import bisect
import dataclasses
import fractions
import functools
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.settings import LARGEST, setting

NAME = "[A-Za-z][A-Za-z0-9_]*"
UNITS = "epochs", "steps"
# The setting whose string has names of this kind.
_SETTINGS = {"objective": "curriculum", "source": "data.mix"}
_MOST_PHASES = 100_000


@dataclasses.dataclass(frozen=True)
class Phase:
  """Steps [start, stop), each batch split among objectives by `shares`."""

  start: int
  stop: int
  shares: Mapping[str, float]  # part of a batch's slots by name; adds to 1

  def __str__(self) -> str:
    """Returns the phase as a curriculum writes it, such as `C:M=1:3`."""
    shares = self.shares.values()
    exact = [fractions.Fraction(x).limit_denominator(10**6) for x in shares]
    unit = math.lcm(*(share.denominator for share in exact))
    ratio = ":".join(str(share * unit) for share in exact)
    mixed = f"={ratio}" if len(set(exact)) > 1 else ""
    return ":".join(self.shares) + mixed

  def divide_batch(self, done: int, batch_size: int) -> np.ndarray:
    """Divides the slots of a batch among the names of the shares.

    Over the batches of a phase, the counts of up to four names stay within one
    slot of their shares. Inside a batch, the slots of a name are spread evenly.

    Args:
      done: Number of slots in the phase's earlier batches.
      batch_size: Number of slots in this batch.

    Returns:
      The index of each slot's name in `list(self.shares)`, int64
      `[batch_size]`.
    """
    ends = self.counts(np.array([done, done + batch_size]))
    (counts,) = np.diff(ends).T
    # Sorting a Weyl sequence spreads the places evenly: a microbatch or shard,
    # which is a run of neighbours, gets its part of each objective.
    spread = (np.arange(batch_size) * 0x9E3779B9) % 2**32
    order = np.argsort(spread, kind="stable")
    out = np.empty_like(spread)
    out[order] = np.repeat(np.arange(len(counts)), counts)
    return out

  def counts(self, slots: np.ndarray) -> np.ndarray:
    """Divides a phase's first `slots` slots, int64 `[names, *slots.shape]`."""
    return np.stack(_divide_slots(slots, list(self.shares.values())))


def _divide_slots(slots: np.ndarray, shares: list[float]) -> list[np.ndarray]:
  """Divides numbers of slots by shares, as `Phase.counts` does."""
  if len(shares) == 1:
    return [slots]
  # The first half of the names takes its part of all slots, rounded, and the
  # other half takes the rest. Neither shrinks as slots grow, so no count does
  # (as differences of rounded sums may), and errors do not add up.
  half = len(shares) // 2
  part = sum(shares[:half]) / sum(shares)
  # 1e-9: 0.1 * 25 must not be 2.4999999999999996 slots.
  first = np.floor(slots * part + 0.5 + 1e-9).astype(np.int64)
  return _divide_slots(first, shares[:half]) + _divide_slots(
    slots - first, shares[half:]
  )


@dataclasses.dataclass(frozen=True)
class Curriculum:
  """The phases of a run, in order and without gaps."""

  phases: tuple[Phase, ...]

  @property
  def steps(self) -> int:
    """Length of the run in steps."""
    return self.phases[-1].stop

  @property
  def objectives(self) -> tuple[str, ...]:
    """Names of the objectives, in the order in which they first appear."""
    return tuple(dict.fromkeys(n for p in self.phases for n in p.shares))

  @property
  def switches(self) -> tuple[int, ...]:
    """The steps at which the shares change."""
    pairs = itertools.pairwise(self.phases)
    return tuple(b.start for a, b in pairs if a.shares != b.shares)

  def at(self, step: int) -> Phase:
    """Returns the phase of a step; the last phase for steps past the end."""
    starts = [phase.start for phase in self.phases]
    return self.phases[bisect.bisect_right(starts, step) - 1]


@dataclasses.dataclass(frozen=True)
class _WrittenPhase:
  """A phase as written."""

  count: float | None
  unit: str  # "shares", "equal shares", or "" for that of the whole string
  shares: Mapping[str, float]
  position: int  # of its first character


class _Reader:
  """A curriculum string, read from left to right by recursive descent.

  curriculum = sum [unit]                 sum = term {"+" term}
  term = phase | times "*" "(" sum ")"    phase = [count ["%"]] mix
  mix = name {":" name} ["=" number {":" number}]
  """

  def __init__(self, text: str, names: tuple[str, ...], kind: str):
    self.text = text
    self.names = names
    self.kind = kind
    self.what = f"{_SETTINGS[kind]} {text!r:.100}"
    self.position = 0  # the next character
    self.match_begin = 0  # the last match's first character
    self._take("")
    self.parts = self._sum()
    self.unit = self._take(r"[a-z]+")
    if self.unit not in (None, *UNITS):
      self.fail("the unit is 'epochs' or 'steps'", self.match_begin)
    if self.position < len(text):
      self.fail("expected '+' and another phase, or the end")

  def lengths(
    self, steps_per_epoch: float, run_steps: int | None
  ) -> list[float]:
    """Returns the length of each phase in steps, before rounding.

    Raises a UserError if units are mixed, or shares do not fit the run.
    """
    if self.unit and any(part.unit for part in self.parts):
      raise UserError(
        f"{self.what}: shares of the run have no unit: leave out {self.unit!r}"
      )
    # A plain count of 1,000 or more means steps: nobody trains a phase of a
    # thousand epochs, and papers of two stages write steps as 10000C.
    units = {
      part.unit or self.unit or ("steps" if part.count >= 1000 else "epochs")
      for part in self.parts
    }
    if len(units) > 1:
      raise UserError(
        f"{self.what} mixes {' and '.join(sorted(units))}: write all"
        " counts in one unit, such as '300C+700M steps'"
      )
    (unit,) = units
    if unit == "epochs":
      return [part.count * steps_per_epoch for part in self.parts]
    if unit == "steps":
      return [part.count for part in self.parts]
    if run_steps is None:
      raise UserError(
        f"{self.what} divides the run, but the run's length is not set: set"
        " train.epochs or train.steps, or write counts, such as '4C+16M+4C'"
      )
    if unit == "equal shares":
      return [run_steps / len(self.parts)] * len(self.parts)
    total = sum(part.count for part in self.parts)
    if abs(total - 100) > 1e-6:
      raise UserError(f"{self.what} adds up to {total:g} %, not 100 %")
    return [part.count / 100 * run_steps for part in self.parts]

  def _list(self, item: Callable[[], Any], separator: str = ":") -> list:
    """Reads items with separators between them."""
    items = [item()]
    while self._take(re.escape(separator)):
      items.append(item())
    return items

  def _sum(self) -> list[_WrittenPhase]:
    """Reads phases and repetitions with `+` between them."""
    return [part for parts in self._list(self._term, "+") for part in parts]

  def _term(self) -> list[_WrittenPhase]:
    """Reads a phase, or repeated phases such as `12*(1C+1M)`."""
    begin = self.position
    repeat = self._take(r"\d+\s*\*")
    if repeat is None:
      return [self._phase()]
    if not self._take(r"\("):
      self.fail("expected '(' and the phases to repeat")
    parts = self._sum()
    if not self._take(r"\)"):
      self.fail("expected ')'")
    times = float(repeat[:-1])
    if times == 0:
      self.fail("repeat at least once", begin)
    if len(parts) * times > _MOST_PHASES:
      self.fail(f"over {_MOST_PHASES} phases", begin)
    return parts * int(times)

  def _phase(self) -> _WrittenPhase:
    """Reads a phase, such as `4C`, `25%M` or `20C:M=1:7`."""
    position = self.position
    count = self._number()
    if count == 0:
      self.fail("a phase of length 0", position)
    # A plain count has the unit of the whole string, which `lengths` decides.
    unit = "equal shares" if count is None else ""
    if count is not None and self._take("%"):
      unit = "shares"
    mix_begin = self.position
    mix_names = self._list(self._name)
    weights_begin = self.position
    weights = [1.0] * len(mix_names)
    if self._take("="):
      weights = self._list(self._weight)
    if len(weights) != len(mix_names):
      self.fail(f"expected {len(mix_names)} proportions", weights_begin)
    if len(mix_names) > len({*mix_names}) == 1:  # such as C:C
      self.fail(
        f"a mix of {mix_names[0]} alone: name another one, too", mix_begin
      )
    shares: dict[str, float] = {}  # parts of a batch, which add up to 1
    for name, weight in zip(mix_names, weights, strict=True):
      # A name may be repeated: C:M:C=1:2:1 has C twice.
      shares[name] = shares.get(name, 0) + weight / sum(weights)
    return _WrittenPhase(count, unit, shares, position)

  def _name(self) -> str:
    name = self._take(NAME)
    choices = ", ".join(self.names)
    if name is None:
      self.fail(f"expected a name ({choices})")
    if name not in self.names:
      near = [choice for choice in self.names if name.startswith(choice)]
      hint = f"did you mean {near[0]!r}? known" if near else "known"
      self.fail(
        f"unknown {self.kind} {name!r} ({hint}: {choices})", self.match_begin
      )
    return name

  def _weight(self) -> float:
    weight = self._number()
    if weight is None:
      self.fail("expected a number")
    if weight == 0:
      self.fail("a proportion of 0: leave that name out", self.match_begin)
    return weight

  def _number(self) -> float | None:
    text = self._take(r"\d+(\.\d*)?|\.\d+")
    return None if text is None else float(text)

  def _take(self, pattern: str) -> str | None:
    """Takes a match from here, and the blanks after it."""
    match = re.compile(rf"({pattern})\s*").match(self.text, self.position)
    if match is None:
      return None
    self.match_begin = self.position
    self.position = match.end()
    return match[1]

  def fail(self, message: str, position: int | None = None):
    """Raises an error that points at a character."""
    if position is None:
      position = self.position
    place = f"character {position + 1}"
    if position < len(self.text):
      place += f" ({self.text[position]!r})"
    raise UserError(f"{self.what}, {place}: {message}")


_read = functools.lru_cache(_Reader)  # runs read their string several times


def objective_names(text: str, names: Collection[str]) -> tuple[str, ...]:
  """Returns the names in a curriculum string as they first appear.

  Raises:
    UserError: The string cannot be read.
  """
  parts = _read(text, tuple(names), "objective").parts
  return tuple(dict.fromkeys(name for part in parts for name in part.shares))


def scaled(phases: Sequence[Phase], steps: int) -> str:
  """Returns a curriculum of these phases over `steps` steps, one or more each.

  If there are more phases than steps, only the first of them stay.
  """
  phases = phases[:steps]
  end = 0
  written = []
  for later, phase in zip(range(len(phases))[::-1], phases, strict=True):
    start = end
    nearest = round(phase.stop / phases[-1].stop * steps)
    end = min(max(end + 1, nearest), steps - later)
    written.append(f"{end - start}{phase}")
  return f"{'+'.join(written)} steps"


def run_length(steps: int, epochs: float, per_epoch: float) -> int | None:
  """Returns a run's steps, or None if neither steps nor epochs are given."""
  if steps or not epochs:
    return steps or None
  return max(1, round(epochs * per_epoch))


def parse_curriculum(
  text: str,
  names: Collection[str],
  steps_per_epoch: float,
  run_steps: int | None = None,
  kind: str = "objective",
) -> Curriculum:
  """Parses a curriculum string.

  Each phase ends at the step nearest to its end counted from the start of the
  run, so that fractions of steps never add up.

  Args:
    text: The string; see the module's documentation.
    names: Names that may appear.
    steps_per_epoch: Number of steps that read the data once; may be a fraction.
    run_steps: Length of the run, for shares of it; None if it is not set.
    kind: Kind of the names: `objective`, or `source` of data.

  Raises:
    UserError: The string cannot be read (the error points at a character), or
      its phases do not fit the run.
  """
  read = _read(text, tuple(names), kind)
  lengths = read.lengths(steps_per_epoch, run_steps)
  if sum(lengths) > LARGEST:  # the step is an int32 on the devices
    raise UserError(f"{read.what} is over {LARGEST} steps long")
  phases = []
  start = 0
  for part, end in zip(read.parts, np.cumsum(lengths), strict=True):
    if round(end) == start:
      least = math.ceil(sum(lengths) / min(lengths))
      read.fail(
        "this phase is shorter than one step: write fewer phases, or train for"
        f" at least {least} steps",
        part.position,
      )
    phases.append(Phase(start, round(end), part.shares))
    start = round(end)
  return Curriculum(tuple(phases))


def amount(value: float, steps: int) -> int:
  """Returns a number of steps; a value under 1 is a share of `steps`."""
  return max(1, round(value * steps)) if 0 < value < 1 else round(value)


def amount_setting(default: float, summary: str):
  """Returns a setting that `amount` reads; `summary` begins its help text."""
  text = f"{summary}, in steps or, under 1, as a share of the run"
  return setting(default, text, least=0, most=LARGEST)
