"""Which rows make the batch of a step: epochs, and batches that change size."""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from antlm_jax import hashing
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import Layout

_ORDER = 0x0DE7  # keeps the order's draws apart from the objectives'
ROUNDING = ("carry", "up", "down")


@dataclasses.dataclass(frozen=True)
class Epochs:
  """The order of rows: every epoch a new permutation.

  Attributes:
    size: Rows in the data.
    batch_size: Rows in a batch.
    rounding: What a batch does at the end of an epoch that it does not
      divide: `carry` goes on into the next epoch, `up` fills up with rows of
      the same epoch's beginning, `down` leaves the rest of the epoch out.
    seed: Chooses the permutations.
    shuffle: Whether to permute at all.
  """

  size: int
  batch_size: int
  rounding: str = "carry"
  seed: int = 0
  shuffle: bool = True

  @property
  def steps_per_epoch(self) -> float:
    """Steps in an epoch; a fraction with `carry`."""
    return self._rows_per_epoch / self.batch_size

  @property
  def _rows_per_epoch(self) -> int:
    batches = {
      "carry": self.size / self.batch_size,
      "up": -(-self.size // self.batch_size),
      # An epoch shorter than a batch is filled up all the same.
      "down": max(1, self.size // self.batch_size),
    }[self.rounding]
    return round(batches * self.batch_size)

  def rows(self, count: np.ndarray) -> np.ndarray:
    """Returns the data's rows by their count from the run's beginning."""
    epochs, place = np.divmod(count, self._rows_per_epoch)
    place %= self.size
    if not self.shuffle:
      return place
    out = np.empty_like(place)
    for epoch in np.unique(epochs):
      now = epochs == epoch
      out[now] = hashing.permute(
        place[now], self.size, self.seed, _ORDER, int(epoch)
      )
    return out


@dataclasses.dataclass(frozen=True)
class Batches:
  """The batches from a step on, until the next of these.

  Attributes:
    start: Their first step.
    epochs: The order of their rows.
    layout: Where the rows go.
    joined: How many prepared rows in a row make one of theirs.
    before: Rows, of their length, that the steps before them took.
  """

  start: int
  epochs: Epochs
  layout: Layout
  joined: int = 1
  before: int = 0

  def rows(self, step: int) -> np.ndarray:
    """Returns the prepared rows of a step's batch, `[n, joined]`."""
    done = self.before + (step - self.start) * self.layout.batch_size
    groups = self.epochs.rows(done + self.layout.rows)
    return groups[:, None] * self.joined + np.arange(self.joined)


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of a run with batches of one size.

  Attributes:
    begin: Where in the run it begins, from 0 to 1.
    rows: Rows in a batch.
    joined: How many prepared rows in a row make one of them.
  """

  begin: float
  rows: int
  joined: int = 1


@dataclasses.dataclass(frozen=True)
class Order:
  """How a run goes through its prepared rows; see `Epochs`."""

  size: int
  rounding: str = "carry"
  seed: int = 0
  shuffle: bool = True

  def __post_init__(self):
    if self.rounding not in ROUNDING:
      raise UserError(
        f"data.rounding={self.rounding!r} is not one of {', '.join(ROUNDING)}"
      )

  def epochs(self, part: Part) -> Epochs:
    """Returns the epochs of a part's rows."""
    if part.joined > self.size:
      raise UserError(
        f"train.batch_schedule joins {part.joined} rows, but there are"
        f" {self.size}"
      )
    size = self.size // part.joined
    return Epochs(size, part.rows, self.rounding, self.seed, self.shuffle)


def plan(
  schedule: Sequence[str], batch_size: int, seq_len: int
) -> tuple[Part, ...]:
  """Reads a batch schedule.

  Args:
    schedule: Each `ROWSxTOKENS@BEGIN`, such as `32x512@0.9`: batches of 32
      rows of 512 tokens from nine tenths of the run on.
    batch_size: Rows of a batch before the first of them.
    seq_len: Tokens of a prepared row.

  Raises:
    UserError: for a schedule that cannot be read or does not ascend.
  """
  out = [Part(0.0, batch_size)]
  for text in schedule:
    what = f"train.batch_schedule: {text!r}"
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)@(0?\.\d+)", text)
    if not found:
      raise UserError(
        f"{what} is not ROWSxTOKENS@BEGIN, such as 32x512@0.9 (from nine"
        " tenths of the run on)"
      )
    rows, length, begin = int(found[1]), int(found[2]), float(found[3])
    if length % seq_len:
      raise UserError(
        f"{what}: {length} is no multiple of the prepared rows' {seq_len}"
      )
    if begin <= out[-1].begin:
      raise UserError(f"{what} does not begin after the one before")
    out.append(Part(begin, rows, length // seq_len))
  return tuple(out)


def steps_per_epoch(plan: Sequence[Part], order: Order) -> float:
  """Returns the steps in an epoch, at the mean batch if they change.

  Raises:
    UserError: if they change and epochs are to end with a batch.
  """
  if len(plan) == 1:
    return order.epochs(plan[0]).steps_per_epoch
  if order.rounding != "carry":
    raise UserError(
      f"train.batch_schedule needs data.rounding=carry, not {order.rounding}:"
      " its epochs do not end with a batch"
    )
  ends = [*(part.begin for part in plan[1:]), 1.0]
  return order.size / sum(
    (end - part.begin) * part.rows * part.joined
    for part, end in zip(plan, ends, strict=True)
  )


def make(
  plan: Sequence[Part],
  order: Order,
  steps: int,
  microbatches: int = 1,
  shards: int = 1,
  local: tuple[int, ...] | None = None,
) -> tuple[Batches, ...]:
  """Makes the batches of a run.

  Args:
    plan: From `plan`.
    order: How the rows are gone through.
    steps: Length of the run.
    microbatches: Parts of a batch that are computed in turn.
    shards: Data shards.
    local: Those that this process makes; all by default.
  """
  starts = [round(part.begin * steps) for part in plan]
  taken, out = 0, []  # prepared rows
  for part, start, stop in zip(plan, starts, [*starts[1:], steps], strict=True):
    layout = Layout(part.rows, microbatches, shards, local)
    before = taken // part.joined
    out.append(Batches(start, order.epochs(part), layout, part.joined, before))
    taken += (stop - start) * part.rows * part.joined
  return tuple(out)
