"""Order of the prepared rows: a pure function of the step.

Every epoch is a new permutation of the rows, and batches are cut from epochs
that follow one another. Each source has its own epochs. A mix gives every
source its share of the slots, and shuffles each block of 64 slots.

The first steps of a run with two sources, `a` of the rows 0 to 3 and `b` of 4
and 5, in batches of three rows (seed 0):

    step  slot  number  source  epoch  place  row
       0     0       0  a           0      0    1
       0     1       1  a           0      1    2
       0     2       2  b           0      0    5
       1     0       3  a           0      2    3
       1     1       4  a           0      3    0
       1     2       5  a           1      0    0

A *slot* is a place in the batch. Its *number* counts the slots since its
*stretch* began: the steps that a *stage* of the run (one batch size) and a
*phase* of the mix (one share for each source) have in common. The number
decides the *source*, and how many slots this source has filled before. That
count, divided by the size of an *epoch*, gives the epoch and the *place* in it.
The epoch's permutation has a *group* of neighbouring rows at each place: a
single *row*, or several if the stage joins them. Such a stage reads some rows
of the current epoch again, and leaves others out.

With `row_block`, an epoch permutes blocks of neighbouring rows, so that a
bucket gives many rows for a request (`_permuted_blocks`).
"""

import bisect
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax import hashing
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.objectives.curriculum import Curriculum, Phase

# Keep these draws apart from the objectives'.
_ORDER = 0x0DE7
_SHUFFLE = 0x0DEB
_BLOCKS = 0x0DEC
_INSIDE = 0x0DED
_LAST = 0x0DEE
_MIX_BLOCK = 64  # slots that are shuffled together
ROUNDING = ("carry", "up", "down")
_LEAST_LANES = 64  # blocks of a source whose rows are read in turn
# Neighbouring lanes that change places, so that not all rows of a block have
# the same slot. A host has at least four neighbouring slots on most pods.
_TURNING = 4


@dataclasses.dataclass(frozen=True)
class Stage:
  """A part of a run whose batches have one size and one RoPE base."""

  begin: float  # where in the run, from 0 to 1
  # Size of its batches, and the slots that this process fills.
  layout: BatchLayout
  joined: int = 1  # number of neighbouring prepared rows that fill one slot
  base: float | None = None  # RoPE's base; None for the model's own


class StepSlots(NamedTuple):
  """The n slots of a step that this process fills."""

  rows: np.ndarray  # prepared rows of each slot, int64 `[n, joined]`
  visits: np.ndarray  # number of earlier visits to these rows, int64 `[n]`


def parse_batch_schedule(
  schedule: Sequence[str], layout: BatchLayout, seq_len: int
) -> tuple[Stage, ...]:
  """Reads a batch schedule: parts `ROWSxTOKENS@SHARE`, such as `32x512@0.9`.

  Batches before the first part have `layout`. Prepared rows have `seq_len`
  tokens. `:base=160000` after a part changes RoPE's base from there on.

  Raises:
    UserError: A part cannot be read or laid out, or does not ascend.
  """
  stages = [Stage(0.0, layout)]
  for text in schedule:
    setting = f"train.batch_schedule: {text!r}"
    match = re.fullmatch(
      r"([1-9]\d*)x([1-9]\d*)@(0?\.\d+)(?::base=([1-9]\d*))?", text
    )
    if not match:
      raise UserError(
        f"{setting} is not ROWSxTOKENS@SHARE, such as 32x512@0.9 (from nine"
        " tenths of the run on); :base=160000 may follow, RoPE's base"
      )
    size = int(match[1])
    length = int(match[2])
    begin = float(match[3])
    joined, remainder = divmod(length, seq_len)
    if remainder:
      raise UserError(
        f"{setting}: {length} is no multiple of the prepared rows' {seq_len}"
      )
    if begin <= stages[-1].begin:
      raise UserError(f"{setting} does not begin after the part before it")
    sized = dataclasses.replace(layout, batch_size=size)
    base = float(match[4]) if match[4] else stages[-1].base
    stages.append(Stage(begin, sized, joined, base))
  return tuple(stages)


class _Stretch(NamedTuple):
  """Steps that one `Stage` and one phase of the mix have in common."""

  start: int  # its first step
  slot_count: float  # slots that it fills; infinite for the last stretch
  rows_before: np.ndarray  # rows that each source gave before it, int64 `[S]`


@dataclasses.dataclass(frozen=True)
class Order:
  """The order in which a run reads the prepared rows.

  Rows are numbered through all sources, in the order of `sources`.

  Raises:
    UserError: The rows, the stages and the rounding do not fit together.
  """

  sources: Mapping[str, int]  # number of prepared rows of each source
  stages: tuple[Stage, ...]  # ascending; the first begins at 0
  steps: int = 0  # length of the run; needed by several stages and by a growth
  # Shares of the sources at each step. None gives each source the same share of
  # every batch as it has of all rows.
  mix: Curriculum | None = None
  # Batch size at step 0 as a share of the stage's batch; it grows linearly to
  # the whole over the run.
  growth: float = 1.0
  # An epoch's last, incomplete batch is filled from the next epoch (`carry`) or
  # from this epoch's first rows (`up`). `down` drops it.
  rounding: str = "carry"
  seed: int = 0  # chooses the permutations
  shuffle: bool = True  # whether to permute the rows of each source
  row_block: int = 1  # number of neighbouring rows that are permuted together
  # Whether two batches take turns: a stretch's even slots are in even batches,
  # and its odd slots in odd batches, for any batch size.
  alternate: bool = False

  def __post_init__(self):
    several = len(self.stages) > 1 or len(self.sources) > 1
    if (several or self.growth < 1) and self.rounding != "carry":
      raise UserError(
        "several sources of data, train.batch_schedule and train.batch_start"
        f" need data.rounding=carry, not {self.rounding}: their epochs do not"
        " end with a batch"
      )
    if self.joined > (rows := self._sizes.min()):
      raise UserError(
        f"train.batch_schedule joins {self.joined} rows, but there are {rows}"
      )
    bounds = itertools.pairwise([*self.starts, self.steps])
    for stage, (start, stop) in zip(self.stages, bounds, strict=True):
      if self.steps and start == stop:
        raise UserError(
          f"train.batch_schedule: the batches of {stage.layout.batch_size} rows"
          f" from {stage.begin:g} of the run on take less than one of its"
          f" {self.steps:,} steps: write fewer parts, or train for more steps"
        )

  @functools.cached_property
  def _sizes(self) -> np.ndarray:
    """Number of rows of each source, int64 `[S]`."""
    return np.array(list(self.sources.values()), np.int64)

  @property
  def joined(self) -> int:
    """Largest number of prepared rows that fill a slot."""
    return max(stage.joined for stage in self.stages)

  @property
  def steps_per_epoch(self) -> float:
    """Number of steps in an epoch; a fraction with `carry`.

    If batches change size, an epoch is the rows over the mean batch.
    """
    if self.rounding != "carry":
      (stage,) = self.stages
      return float(self._slots_per_epoch(stage)[0] / stage.layout.batch_size)
    # By shares of the run: its number of steps may depend on this result.
    ends = [*(stage.begin for stage in self.stages[1:]), 1.0]
    return int(self._sizes.sum()) / sum(
      self._grown(stage.begin, end) * stage.layout.batch_size * stage.joined
      for stage, end in zip(self.stages, ends, strict=True)
    )

  @property
  def starts(self) -> list[int]:
    """The first step of each stage."""
    return [round(stage.begin * self.steps) for stage in self.stages]

  def stage_at(self, step: int) -> Stage:
    """Returns the stage of a step."""
    return self.stages[bisect.bisect_right(self.starts, step) - 1]

  def slots(self, step: int) -> StepSlots:
    """Returns the slots of a step that this process fills.

    Each slot has a number in its stretch. This number decides the slot's source
    and how many slots the source has filled before. That count decides the
    epoch and the place in it. The epoch's permutation decides the rows.
    """
    stage = self.stage_at(step)
    if self.row_block > 1 and self.shuffle:
      source, epoch, place = self._places_by_lane(step)
    else:
      source, epoch, place = self._places(step, self.slot_numbers(step))
    group = self._permuted(stage, source, epoch, place)
    first_row_of_source = np.cumsum(self._sizes) - self._sizes
    first_row = first_row_of_source[source] + group * stage.joined
    rows = first_row[:, None] + np.arange(stage.joined)
    return StepSlots(rows, visits=epoch)

  def _places(
    self, step: int, numbers: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the source, epoch and place in it of a step's slots.

    `numbers` are those of the slots in their stretch, int64 `[n]`, as are all
    three results.
    """
    stage = self.stage_at(step)
    stretch = self._stretch(step)
    source, filled = self._sources_of(stretch, numbers)
    # Each source continues the epoch in which the stretch before it stopped.
    filled = filled + stretch.rows_before[source] // stage.joined
    epoch, place = np.divmod(filled, self._slots_per_epoch(stage)[source])
    return source, epoch, place

  def _places_by_lane(
    self, step: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns `_places` of a step's slots in this process.

    A lane is a part of a source's epoch, with a single open block of rows at a
    time (`_permuted_blocks`). Place p is in lane p % lanes. The slots of a
    source take its places of this step in the order of their lanes. So a lane
    has the same slot, or a neighbour, in all steps, even if batches grow.
    With three lanes, and one source in slots 0, 1 and 3:

        slot           0  1  3
        its place      5  6  7
        lane (of it)   2  0  1
        place it takes 6  7  5
    """
    size = max(1, self.batch_size(step))
    start = self._stretch(step).start
    # These are the slots of the whole batch, also those of other processes.
    numbers = self.slots_between(start, step) + np.arange(size)
    source, epoch, place = self._places(step, numbers)
    lane = place % self._lanes[source]
    # Both orders have one source after another. The first has its places by
    # lane, and the second its slots as they are.
    places_by_lane = np.lexsort((lane, source))
    slots_in_order = np.argsort(source, kind="stable")
    index_of_slot = np.empty_like(places_by_lane)
    index_of_slot[slots_in_order] = places_by_lane
    slots = self.stage_at(step).layout.slots
    # Empty slots repeat the first: their process need not read another row.
    index = index_of_slot[np.where(slots < size, slots, 0)]
    return source[index], epoch[index], place[index]

  def slot_numbers(self, step: int) -> np.ndarray:
    """Returns the numbers of a step's slots in their stretch, int64 `[n]`."""
    slots = self.stage_at(step).layout.slots
    start = self._stretch(step).start
    if not self.alternate:
      return self.slots_between(start, step) + slots
    odd = (step - start) % 2
    return self.slots_between(start, step - odd) + 2 * slots + odd

  def rows_read(self, step: int) -> dict[str, int]:
    """Returns the number of rows of each source that earlier steps read."""
    stretch = self._stretch(step)
    slot_count = self.slots_between(stretch.start, step)
    rows = self._counts(step, slot_count) * self.stage_at(step).joined
    rows += stretch.rows_before
    return dict(zip(self.sources, rows.tolist(), strict=True))

  def epochs(self, step: int) -> dict[str, float]:
    """Returns how often earlier steps read the rows of each source."""
    if self.rounding != "carry":  # an epoch has more or fewer slots than rows
      return dict.fromkeys(self.sources, step / self.steps_per_epoch)
    rows_read = self.rows_read(step)
    return {name: rows_read[name] / size for name, size in self.sources.items()}

  def batch_size(self, step: int) -> int:
    """Returns the number of slots that a step fills; later slots are empty."""
    return self.slots_between(step, step + 1)

  def slots_between(self, start: int, stop: int) -> int:
    """Returns the number of slots that the steps [start, stop) fill."""
    inside = [s for s in self.starts if start < s < stop]
    total = 0
    for begin, end in itertools.pairwise([start, *inside, stop]):
      size = self.stage_at(begin).layout.batch_size
      if self.growth == 1:
        total += (end - begin) * size
        continue
      # Rounded sums from the run's beginning on, so that they add up.
      first, last = (
        round(self._grown(0.0, step / self.steps) * self.steps * size)
        for step in (begin, end)
      )
      total += last - first
    return total

  def _grown(self, begin: float, end: float) -> float:
    """Integrates the batches' share from `begin` to `end` of the run."""
    triangle = (1 - self.growth) * (end**2 - begin**2) / 2
    return self.growth * (end - begin) + triangle

  def _slots_per_epoch(self, stage: Stage) -> np.ndarray:
    """Number of slots in an epoch of each source, int64 `[S]`."""
    groups = self._sizes // stage.joined
    batch_size = stage.layout.batch_size
    return {
      "carry": groups,
      "up": -(-groups // batch_size) * batch_size,
      # An epoch that is shorter than a batch fills up one batch.
      "down": np.maximum(1, groups // batch_size) * batch_size,
    }[self.rounding]

  def _permuted(
    self, stage: Stage, source: np.ndarray, epoch: np.ndarray, place: np.ndarray
  ) -> np.ndarray:
    """Returns the group of rows at each slot's place in its epoch, int64 `[n]`.

    A group is the `joined` neighbouring rows that fill a slot. It has a number
    in its source.
    """
    groups = self._sizes // stage.joined
    # `up` and `down` may fill a batch with an epoch's first rows again.
    place = place % groups[source]
    if not self.shuffle:
      return place
    group = np.empty_like(place)
    # A batch may have several sources, and reach into the next epoch.
    for s, e in np.unique(np.stack([source, epoch], 1), axis=0).tolist():
      inside = (source == s) & (epoch == e)
      size = int(groups[s])
      if self.row_block > 1:
        lanes = int(self._lanes[s])
        block = self.row_block // stage.joined
        group[inside] = _permuted_blocks(
          place[inside], size, max(1, block), lanes, (self.seed, e, s)
        )
        continue
      # The first source has the permutations of a run without others.
      key = (self.seed, _ORDER, e, s) if s else (self.seed, _ORDER, e)
      group[inside] = hashing.permute(place[inside], size, *key)
    return group

  @property
  def blocks_at_once(self) -> int:
    """Number of blocks whose rows this process reads in turn."""
    layout = self.stages[0].layout
    share = len(layout.slots) / layout.batch_size
    return math.ceil(share * int(self._lanes.sum()))

  @functools.cached_property
  def _lanes(self) -> np.ndarray:
    """Number of blocks of each source whose rows are read in turn, int64 `[S]`.

    It is the number of the source's slots in the smallest step, or a multiple.
    So every step reads the lanes equally often, and processes, which fill
    different slots, read different blocks.
    """
    least_shares = []
    for name in self.sources:
      shares = [phase.shares.get(name, 0.0) for phase in self._mix.phases]
      least_shares.append(min(filter(None, shares), default=1.0))
    smallest_batch = min(stage.layout.batch_size for stage in self.stages)
    least_slots = np.array(least_shares) * smallest_batch * self.growth
    turns = np.ceil(_LEAST_LANES / least_slots)
    return np.rint(least_slots * turns).astype(np.int64)

  def _stretch(self, step: int) -> _Stretch:
    """Returns the stretch of a step."""
    after = bisect.bisect_right(self._stretches, step, key=lambda s: s.start)
    return self._stretches[after - 1]

  @functools.cached_property
  def _stretches(self) -> list[_Stretch]:
    """All stretches, in order. A stage or a phase of the mix begins each."""
    changes = [phase.start for phase in self._mix.phases]
    starts = sorted({*self.starts, *changes})
    stretches = []
    rows_before = np.zeros_like(self._sizes)
    for start, stop in itertools.pairwise(starts):
      slot_count = self.slots_between(start, stop)
      stretches.append(_Stretch(start, slot_count, rows_before))
      # Rows, since slots of two stages may hold different numbers of them.
      rows = self._counts(start, slot_count) * self.stage_at(start).joined
      rows_before = rows_before + rows
    return [*stretches, _Stretch(starts[-1], math.inf, rows_before)]

  @functools.cached_property
  def _mix(self) -> Curriculum:
    """The shares of the sources at each step."""
    sizes = self._sizes / self._sizes.sum()
    shares = dict(zip(self.sources, sizes.tolist(), strict=True))
    return self.mix or Curriculum((Phase(0, self.steps, shares),))

  def _counts(self, step: int, slot_counts) -> np.ndarray:
    """Returns how many of a stretch's first slots each source fills.

    `slot_counts` are one or several numbers of first slots, `[...]`, and the
    result is int64 `[S, ...]`.
    """
    slot_counts = np.asarray(slot_counts, np.int64)
    phase = self._mix.at(step)
    counts = np.zeros((len(self.sources), *slot_counts.shape), np.int64)
    names = list(self.sources)
    indices = [names.index(name) for name in phase.shares]
    counts[indices] = phase.counts(slot_counts)
    return counts

  def _sources_of(
    self, stretch: _Stretch, numbers: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns each slot's source, and the slots that this source filled before.

    `numbers` are those of the slots in the stretch, int64 `[n]`, as are both
    results.
    """
    if len(self.sources) == 1:
      return np.zeros_like(numbers), numbers
    source = np.empty_like(numbers)
    filled = np.empty_like(numbers)
    blocks, offsets = np.divmod(numbers, _MIX_BLOCK)
    for block in np.unique(blocks).tolist():
      inside = blocks == block
      block_source, block_filled = self._shuffled_block(stretch, block)
      source[inside] = block_source[offsets[inside]]
      filled[inside] = block_filled[offsets[inside]]
    return source, filled

  def _shuffled_block(
    self, stretch: _Stretch, block: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the results of `_sources_of` for all slots of a block.

    The shares of the mix decide exactly how many slots of a block each source
    fills (`_counts`), and a shuffle chooses these slots. The rows of a source
    keep their order.
    """
    numbers = block * _MIX_BLOCK + np.arange(_MIX_BLOCK)
    # Slots that each source fills before each of these, `[S, _MIX_BLOCK + 1]`.
    before = self._counts(stretch.start, np.append(numbers, numbers[-1] + 1))
    # Whether each source fills each slot, 0 or 1, before and after the shuffle.
    fills = np.diff(before)
    fills = fills[:, self._shuffle_of(stretch, numbers)]
    before = before[:, :1] + fills.cumsum(axis=1) - fills
    source = fills.argmax(axis=0)
    return source, before[source, np.arange(_MIX_BLOCK)]

  def _shuffle_of(self, stretch: _Stretch, numbers: np.ndarray) -> np.ndarray:
    """Returns a random permutation of a block's slots, int64 `[_MIX_BLOCK]`."""
    counters = stretch.rows_before.sum() + numbers
    draws = hashing.bits(self.seed, _SHUFFLE, counters)
    # Slots after the stretch's end stay behind the slots before it, so that the
    # stretch has exactly its shares.
    after_all = 2**32
    is_inside = numbers < stretch.slot_count
    draws = np.where(is_inside, draws.astype(np.int64), after_all)
    return np.argsort(draws, kind="stable")


def _permuted_blocks(
  place: np.ndarray, size: int, block: int, lanes: int, key: tuple[int, ...]
) -> np.ndarray:
  """Permutes range(size) so that rows of a block follow one another closely.

  The blocks of `block` neighbours are permuted, and the rows in each. This
  sequence is divided into `lanes` parts, the lanes. The permutation takes the
  first row of each lane, then the second row of each, and so on. So the rows of
  any batch are of as many blocks as there are lanes, and each lane has one open
  block at a time.

  Args:
    place: Places in the permutation, int64 `[n]`.
    size: Number of rows.
    block: Number of rows in a block.
    lanes: Number of lanes.
    key: Seed, epoch and source, which choose the permutation.

  Returns:
    The row at each place, int64 `[n]`.
  """
  seed, *counters = key
  # Each lane has `length` rows, and the first `longer` lanes have one more.
  length, longer = divmod(size, lanes)
  turn, lane = np.divmod(place, lanes)
  first = lane - lane % _TURNING
  turns = (turn < length) & (first + _TURNING <= lanes)
  lane = np.where(turns, first + (lane + turn) % _TURNING, lane)
  index = lane * length + np.minimum(lane, longer) + turn
  # The incomplete block has a random place among the others.
  count, remainder = divmod(size, block)
  share = hashing.uniform(seed, _LAST, *counters)
  begin = int(share * (count + 1)) * block
  last = (begin <= index) & (index < begin + remainder)
  index = np.where(
    index < begin, index, index - np.where(last, begin, remainder)
  )
  row = np.empty_like(index)
  row[last] = count * block + hashing.permute(
    index[last], remainder, seed, _INSIDE, *counters, count
  )
  number, inside = np.divmod(index[~last], block)
  number = hashing.permute(number, count, seed, _BLOCKS, *counters)
  inside = hashing.permute(inside, block, seed, _INSIDE, *counters, number)
  row[~last] = number * block + inside
  return row
