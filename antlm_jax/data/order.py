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
  """A part of a run whose batches have one size.

  Attributes:
    begin: Where in the run it begins, from 0 to 1.
    layout: Its batches' size, and which slots this process fills.
    joined: How many neighbouring prepared rows fill one slot.
  """

  begin: float
  layout: Layout
  joined: int = 1


def parse(
  schedule: Sequence[str], layout: Layout, seq_len: int
) -> tuple[Part, ...]:
  """Reads a batch schedule.

  Args:
    schedule: Each `ROWSxTOKENS@BEGIN`, such as `32x512@0.9`: batches of 32
      rows of 512 tokens from nine tenths of the run on.
    layout: Of the batches before the first of them.
    seq_len: Tokens of a prepared row.

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

  Attributes:
    size: Number of prepared rows.
    parts: The parts of the run, ascending; the first begins at 0.
    steps: Length of the run; only several parts need it.
    rounding: What a batch does at the end of an epoch that it does not
      divide: `carry` goes on into the next epoch, `up` fills up with rows of
      the same epoch's beginning, `down` leaves the rest of the epoch out.
    seed: Chooses the permutations.
    shuffle: Whether to permute at all.

  Raises:
    UserError: The rows, the parts and the rounding do not fit together.
  """

  size: int
  parts: tuple[Part, ...]
  steps: int = 0
  rounding: str = "carry"
  seed: int = 0
  shuffle: bool = True

  def __post_init__(self):
    if self.rounding not in ROUNDING:
      raise UserError(
        f"data.rounding={self.rounding!r} is not one of {', '.join(ROUNDING)}"
      )
    if len(self.parts) > 1 and self.rounding != "carry":
      raise UserError(
        f"train.batch_schedule needs data.rounding=carry, not {self.rounding}:"
        " its epochs do not end with a batch"
      )
    longest = max(part.joined for part in self.parts)
    if longest > self.size:
      raise UserError(
        f"train.batch_schedule joins {longest} rows, but there are {self.size}"
      )

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
      (end - part.begin) * part.layout.batch_size * part.joined
      for part, end in zip(self.parts, ends, strict=True)
    )

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
    index = self._index(step)
    part = self.parts[index]
    # Slots are counted from the run's beginning, as if all parts had this
    # one's batches: a part goes on in the epoch where the one before stopped.
    done = self._rows_before[index] // part.joined
    done += (step - self.starts[index]) * part.layout.batch_size
    # What fills a slot moves as one, so that joined rows stay neighbours.
    groups = self._permuted(done + part.layout.rows, part)
    return groups[:, None] * part.joined + np.arange(part.joined)

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
      rows = part.layout.batch_size * part.joined
      taken.append(taken[-1] + (stop - start) * rows)
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
