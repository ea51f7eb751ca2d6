"""Which prepared rows make the batch of a step: a pure function of the step.

Every epoch is a new permutation of the rows, and batches are cut from epochs
that follow one another. Parts of a run may have batches of other sizes, and
longer rows, joined of several prepared ones.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np

from antlm_jax import hashing
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import Layout

_ORDER = 0x0DE7  # keeps the order's draws apart from the objectives'
ROUNDING = ("carry", "up", "down")


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of a run whose batches have one size."""

  begin: float  # where in the run, from 0 to 1
  layout: Layout  # its batches' size, and which slots this process fills
  joined: int = 1  # how many neighbouring prepared rows fill one slot


def parse(
  schedule: Sequence[str], layout: Layout, seq_len: int
) -> tuple[Part, ...]:
  """Reads a batch schedule.

  Each part is `ROWSxTOKENS@BEGIN`, such as `32x512@0.9`: batches of 32 rows of
  512 tokens from nine tenths of the run on. Before the first of them batches
  are of `layout`; a prepared row has `seq_len` tokens.

  Raises:
    UserError: A schedule cannot be read, does not ascend, or has batches that
      cannot be laid out.
  """
  # Microbatches and shards are the run's: only the size changes.
  parts = [Part(0.0, layout)]
  for text in schedule:
    what = f"train.batch_schedule: {text!r}"
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)@(0?\.\d+)", text)
    if not found:
      raise UserError(
        f"{what} is not ROWSxTOKENS@BEGIN, such as 32x512@0.9 (from nine"
        " tenths of the run on)"
      )
    size, length, begin = int(found[1]), int(found[2]), float(found[3])
    if length % seq_len:
      raise UserError(
        f"{what}: {length} is no multiple of the prepared rows' {seq_len}"
      )
    if begin <= parts[-1].begin:
      raise UserError(f"{what} does not begin after the one before")
    laid_out = dataclasses.replace(layout, batch_size=size)
    parts.append(Part(begin, laid_out, length // seq_len))
  return tuple(parts)


@dataclasses.dataclass(frozen=True)
class Order:
  """The order in which a run takes the prepared rows.

  Raises:
    UserError: The rows, the parts and the rounding do not fit together.
  """

  size: int  # number of prepared rows
  parts: tuple[Part, ...]  # ascending; the first begins at 0
  steps: int = 0  # length of the run; only several parts, or a growth, need it
  # The share of a part's batch that the first step has, if it had this part:
  # batches grow from there, linearly with the run's steps. 1: all are whole.
  growth: float = 1.0
  # One of `ROUNDING`: what a batch does at the end of an epoch that it does
  # not divide: `carry` goes on into the next epoch, `up` fills up with rows of
  # the same epoch's beginning, `down` leaves the rest of the epoch out.
  rounding: str = "carry"
  seed: int = 0  # chooses the permutations
  shuffle: bool = True  # whether to permute at all

  def __post_init__(self):
    changing = len(self.parts) > 1 or self.growth < 1
    if changing and self.rounding != "carry":
      raise UserError(
        "train.batch_schedule and train.batch_start need data.rounding=carry,"
        f" not {self.rounding}: their epochs do not end with a batch"
      )
    if self.joined > self.size:
      raise UserError(
        f"train.batch_schedule joins {self.joined} rows, but there are"
        f" {self.size}"
      )

  @property
  def joined(self) -> int:
    """How many prepared rows fill a slot, at most."""
    return max(part.joined for part in self.parts)

  @property
  def steps_per_epoch(self) -> float:
    """Steps in an epoch; a fraction with `carry`.

    Where batches change size, an epoch is the rows over the mean batch.
    """
    if self.rounding != "carry":
      (part,) = self.parts
      return self._slots_per_epoch(part) / part.layout.batch_size
    # By fractions, not by steps: their number is known only after this.
    ends = [*(part.begin for part in self.parts[1:]), 1.0]
    return self.size / sum(
      self._grown(part.begin, end) * part.layout.batch_size * part.joined
      for part, end in zip(self.parts, ends, strict=True)
    )

  def _grown(self, begin: float, end: float) -> float:
    """Returns the integral of the batches' share from `begin` to `end`.

    Both are parts of the run, from 0 to 1.
    """
    more = (1 - self.growth) * (end**2 - begin**2) / 2
    return self.growth * (end - begin) + more

  @property
  def starts(self) -> list[int]:
    """The first step of each part."""
    return [round(part.begin * self.steps) for part in self.parts]

  def at(self, step: int) -> Part:
    """Returns the part that a step is in."""
    return self.parts[self._index(step)]

  def rows(self, step: int) -> np.ndarray:
    """Returns the prepared rows of the slots that this process fills.

    Returns:
      int64 `[n, joined]`, in the layout's order of slots.
    """
    part = self.at(step)
    # What fills a slot moves as one, so that joined rows stay neighbours.
    groups = self._permuted(self._slots(step), part)
    return groups[:, None] * part.joined + np.arange(part.joined)

  def visits(self, step: int) -> np.ndarray:
    """Returns how often the rows of each slot came before, int64 `[n]`."""
    return self._slots(step) // self._slots_per_epoch(self.at(step))

  def _slots(self, step: int) -> np.ndarray:
    """Returns which slots of the run this process fills in a step, `[n]`."""
    index = self._index(step)
    part = self.parts[index]
    # Slots are counted from the run's beginning, as if all parts had this
    # one's batches: a part goes on in the epoch where the one before stopped.
    done = self._rows_before[index] // part.joined
    done += self._filled(part, self.starts[index], step)
    return done + part.layout.rows

  def taken(self, step: int) -> int:
    """Returns how many prepared rows the steps before `step` take.

    A row counts as often as it comes.
    """
    index = self._index(step)
    slots = self._filled(self.parts[index], self.starts[index], step)
    return self._rows_before[index] + slots * self.parts[index].joined

  def batch_size(self, step: int) -> int:
    """Returns how many of a step's slots are filled: the first ones."""
    return self._filled(self.at(step), step, step + 1)

  def _filled(self, part: Part, start: int, stop: int) -> int:
    """Counts the slots that a part's steps from `start` to `stop` fill."""
    size = part.layout.batch_size
    if self.growth == 1:
      return (stop - start) * size
    # Rounded sums from the run's beginning on, so that they add up.
    first, last = (
      round(self._grown(0.0, step / self.steps) * self.steps * size)
      for step in (start, stop)
    )
    return last - first

  def _index(self, step: int) -> int:
    return max(i for i, start in enumerate(self.starts) if start <= step)

  @functools.cached_property
  def _rows_before(self) -> list[int]:
    """How many prepared rows the parts before each part have taken."""
    # Rows, since slots of two parts may hold different numbers of them.
    taken = [0]
    for part, start, stop in zip(
      self.parts, self.starts, self.starts[1:], strict=False
    ):
      slots = self._filled(part, start, stop)
      taken.append(taken[-1] + slots * part.joined)
    return taken

  def _slots_per_epoch(self, part: Part) -> int:
    groups, batch_size = self.size // part.joined, part.layout.batch_size
    return {
      "carry": groups,
      "up": -(-groups // batch_size) * batch_size,
      # An epoch shorter than a batch is filled up all the same.
      "down": max(1, groups // batch_size) * batch_size,
    }[self.rounding]

  def _permuted(self, slots: np.ndarray, part: Part) -> np.ndarray:
    """Returns the group of rows that fills each slot of the run, `[n]`."""
    groups = self.size // part.joined
    epochs, place = np.divmod(slots, self._slots_per_epoch(part))
    place %= groups  # past the last group only where rounding fills up
    if not self.shuffle:
      return place
    out = np.empty_like(place)
    for epoch in np.unique(epochs):  # a batch may reach into the next one
      now = epochs == epoch
      out[now] = hashing.permute(
        place[now], groups, self.seed, _ORDER, int(epoch)
      )
    return out
