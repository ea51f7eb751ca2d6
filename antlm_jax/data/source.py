"""The data source: the item is the step.

`source[step]` reads this process's rows of that step in one call and corrupts
them together. Order, objectives and corruption are pure functions of (seed,
step, row), so resuming is asking for the next step.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import grain
import numpy as np

from antlm_jax import examples, hashing
from antlm_jax.curriculum import Curriculum
from antlm_jax.data.rows import Rows
from antlm_jax.examples import Example, Layout
from antlm_jax.objectives import (
  Corrupted,
  Draw,
  Objective,
  Segments,
  Vocabulary,
  corrupt,
)

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

  def rows(self, step: int, slots: np.ndarray) -> np.ndarray:
    """Returns the data's rows for the slots of a step's batch, `[n]`."""
    count = step * self.batch_size + slots
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
class Source:
  """Steps of a run as examples; `grain` reads it at random access.

  Attributes:
    rows: The prepared rows.
    epochs: Their order.
    curriculum: The objectives of each step.
    objectives: The objectives by the curriculum's names.
    layout: Which rows of each batch this process makes, and where they go.
    vocabulary: The tokenizer's special tokens and word starts.
    seed: Chooses what is masked.
    limit: Rows after this many, counted from step 0, are not predicted.
  """

  rows: Rows
  epochs: Epochs
  curriculum: Curriculum
  objectives: Mapping[str, Objective]
  layout: Layout
  vocabulary: Vocabulary
  seed: int
  limit: int | None = None

  def __len__(self) -> int:
    return self.curriculum.steps

  def __getitem__(self, step: int) -> Example:
    phase = self.curriculum.at(step)
    slots = self._slots
    tokens, starts = self.rows.read(self.epochs.rows(step, slots))
    segments = (
      Segments.whole(*tokens.shape) if starts is None else Segments.of(starts)
    )
    names = self.curriculum.objectives
    in_phase = np.array([names.index(name) for name in phase.shares])
    objective_ids = in_phase[phase.rows(step, self.layout.batch_size)[slots]]
    corrupted = self._corrupt(step, slots, tokens, segments, objective_ids)
    if self.limit is not None:
      valid = step * self.layout.batch_size + slots < self.limit
      corrupted.predicted[~valid] = False
    return examples.assemble(
      tokens,
      corrupted,
      objective_ids,
      self._objectives,
      self.layout,
      {names.index(name): share for name, share in phase.shares.items()},
      segmented=starts is not None,
    )

  @functools.cached_property
  def _slots(self) -> np.ndarray:
    return self.layout.rows

  @functools.cached_property
  def _objectives(self) -> Sequence[Objective]:
    return [self.objectives[name] for name in self.curriculum.objectives]

  def _corrupt(self, step, slots, tokens, segments, objective_ids) -> Corrupted:
    """Corrupts the rows of each objective together."""
    progress = step / max(1, len(self) - 1)
    present = np.unique(objective_ids)
    parts = []
    for kind in present:
      mine = slice(None) if len(present) == 1 else objective_ids == kind
      parts.append((mine, corrupt(
        self._objectives[kind],
        tokens[mine],
        Segments(segments.start[mine], segments.end[mine]),
        Draw(self.seed, step, slots[mine, None]),
        self.vocabulary,
        progress,
      )))  # fmt: skip
    if len(parts) == 1:
      return parts[0][1]
    merged = {}
    for field in dataclasses.fields(Corrupted):
      arrays = [(mine, getattr(part, field.name)) for mine, part in parts]
      out = np.empty(tokens.shape, arrays[0][1].dtype)
      for mine, array in arrays:
        out[mine] = array
      merged[field.name] = out
    return Corrupted(**merged)


def load(
  source: Source, start: int = 0, threads: int = 2, ahead: int = 8
) -> Iterator[Example]:
  """Yields `source[start]`, `source[start + 1]`, ..., prefetched by grain.

  Args:
    source: The steps.
    start: First step.
    threads: Threads that read and corrupt.
    ahead: How many examples wait ready.
  """
  if start >= len(source):
    return iter(())
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
  steps = grain.MapDataset.source(source)[start:]
  return iter(steps.to_iter_dataset(options))
