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

from antlm_jax import hashing
from antlm_jax.data.order import Batches
from antlm_jax.data.rows import Rows
from antlm_jax.objectives import batch as examples
from antlm_jax.objectives.batch import Batch
from antlm_jax.objectives.corruption import (
  Corrupted,
  Draw,
  Segments,
  Vocabulary,
  corrupt,
)
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.objectives.objective import Objective

# Keep these draws apart from the objectives' and the order's.
_SHORT, _CUT = 0x0DE8, 0x0DE9


@dataclasses.dataclass(frozen=True)
class Source:
  """Steps of a run as examples; `grain` reads it at random access.

  Attributes:
    rows: The prepared rows.
    batches: Which of them make a batch, ascending by their first steps; the
      first begins at 0.
    curriculum: The objectives of each step.
    objectives: The objectives by the curriculum's names.
    vocabulary: The tokenizer's special tokens and word starts.
    seed: Chooses what is masked.
    short: Share of the rows that are cut off at a random place: what is after
      it is neither seen nor predicted.
    limit: Rows after this many, counted from step 0, are not predicted.
  """

  rows: Rows
  batches: Sequence[Batches]
  curriculum: Curriculum
  objectives: Mapping[str, Objective]
  vocabulary: Vocabulary
  seed: int
  short: float = 0.0
  limit: int | None = None

  def __len__(self) -> int:
    return self.curriculum.steps

  def __getitem__(self, step: int) -> Batch:
    phase, batches = self.curriculum.at(step), self.batches_at(step)
    slots, layout = batches.layout.rows, batches.layout
    tokens, starts = self._read(batches.rows(step))
    length = self._cut(step, slots, tokens.shape[1])
    if length is not None:
      starts = np.zeros(tokens.shape, bool) if starts is None else starts
      starts = starts | (np.arange(tokens.shape[1]) == length[:, None])
    segments = (
      Segments.whole(*tokens.shape) if starts is None else Segments.of(starts)
    )
    names = self.curriculum.objectives
    in_phase = np.array([names.index(name) for name in phase.shares])
    objective_ids = in_phase[phase.rows(step, layout.batch_size)[slots]]
    corrupted = self._corrupt(step, slots, tokens, segments, objective_ids)
    if length is not None:
      corrupted.predicted[np.arange(tokens.shape[1]) >= length[:, None]] = False
    if self.limit is not None:
      valid = step * layout.batch_size + slots < self.limit
      corrupted.predicted[~valid] = False
    return examples.assemble(
      tokens,
      corrupted,
      objective_ids,
      self._objectives,
      layout,
      {names.index(name): share for name, share in phase.shares.items()},
      segmented=starts is not None,
    )

  def batches_at(self, step: int) -> Batches:
    """Returns the batches that a step's is one of."""
    return next(b for b in reversed(self.batches) if b.start <= step)

  def _read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads rows `[n, joined]` as tokens `[n, T]`, and starts if segmented."""
    tokens, starts = self.rows.read(rows.reshape(-1))
    shape = len(rows), -1
    if starts is not None:
      starts = starts.reshape(shape)
    return tokens.reshape(shape), starts

  def _cut(self, step, slots, length: int) -> np.ndarray | None:
    """Returns how much is left of each row, `[n]`; None where none is cut."""
    if not self.short:
      return None
    short = hashing.uniform(self.seed, _SHORT, step, slots) < self.short
    share = hashing.uniform(self.seed, _CUT, step, slots)
    return np.where(short, 1 + (share * length).astype(np.int64), length)

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
) -> Iterator[Batch]:
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
