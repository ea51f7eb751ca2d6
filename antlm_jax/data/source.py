"""The data source: its item at a step is that step's batch.

A *row* is one of the prepared rows on disk. A *slot* is a place in the batch,
from 0 to batch_size, and holds one row, or several that are joined. Random
draws belong to slots: a row gets new masks in each epoch.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import grain
import numpy as np

from antlm_jax import hashing
from antlm_jax.data.order import Order
from antlm_jax.data.rows import Rows
from antlm_jax.objectives.batch import Batch, assemble
from antlm_jax.objectives.corruption import (
  Corrupted,
  Draw,
  Segments,
  Vocabulary,
)
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.objectives.objective import Objective

# Keep these draws apart from the objectives' and the order's.
_SHORT, _CUT, _OFFSET = 0x0DE8, 0x0DE9, 0x0DEA


@dataclasses.dataclass(frozen=True)
class Source:
  """The batches of a run, which `grain` reads at random access."""

  rows: Rows  # the prepared rows
  order: Order  # the rows of each step's slots
  curriculum: Curriculum  # the objectives of each step
  objectives: Mapping[str, Objective]  # by the curriculum's names
  vocabulary: Vocabulary  # the tokenizer's special tokens and word starts
  seed: int  # chooses the masked tokens
  # Share of the slots whose text is cut off at a random place. The tokens
  # after it are neither seen nor predicted.
  short: float = 0.0
  # As in `training.step.TrainStep`: with `objectives` the weight of a target
  # includes its objective's part of the batch.
  loss_average: str = "targets"
  # A slot's text begins at a random place of its row and continues in the next.
  # This is for rows of a single stream (BabyLlama's code).
  random_offset: bool = False
  # Ids of the tokens before and after a document; the second may be None. If
  # given, they replace or push out tokens at both ends of a stream's rows, and
  # documents are segments (LTG-BERT, GPT-BERT).
  frame: tuple[int, int | None] | None = None
  # Slots after this many, counted from step 0, are not predicted.
  limit: int | None = None

  def __len__(self) -> int:
    return self.curriculum.steps

  def __getitem__(self, step: int) -> Batch:
    phase, part = self.curriculum.at(step), self.order.at(step)
    layout = part.layout
    slots, taken = layout.rows, self.order.slots(step)
    tokens, starts = self._read(step, slots, taken.rows)
    n, length = tokens.shape
    if self.short:
      # Whether and where are two draws: the share of one cannot bias the other.
      short = hashing.uniform(self.seed, _SHORT, step, slots) < self.short
      share = hashing.uniform(self.seed, _CUT, step, slots)
      left = np.where(short, 1 + (share * length).astype(np.int64), length)
      past_end = np.arange(length) >= left[:, None]
      # The cut-off tokens are a segment: no token sees across.
      cut = np.diff(past_end, axis=1, prepend=False)
      starts = cut if starts is None else starts | cut
    # Rows that hold one document need no starts: their mask stays static.
    segmented = starts is not None
    segments = Segments.of(starts) if segmented else Segments.whole(n, length)
    # An objective's id is its place in the whole curriculum, so that ids mean
    # the same in every phase.
    names = self.curriculum.objectives
    shares = {names.index(name): s for name, s in phase.shares.items()}
    kinds = phase.rows(step, layout.batch_size)[slots]
    objective_ids = np.array(list(shares))[kinds]
    texts = np.stack([taken.rows[:, 0], taken.visits], axis=1)
    draw = Draw(self.seed, step, slots[:, None], texts)
    corrupted = self._corrupt(draw, tokens, segments, objective_ids)
    # A batch that still grows has empty slots.
    counts = slots < self.order.batch_size(step)
    if self.limit is not None:
      counts &= step * layout.batch_size + slots < self.limit
    corrupted.predicted[~counts] = False
    if self.short:
      corrupted.predicted[past_end] = False
    objectives = self._objectives
    if self.loss_average == "objectives":
      objectives = [
        dataclasses.replace(o, weight=o.weight * shares.get(k, 1.0))
        for k, o in enumerate(objectives)
      ]
    batch = assemble(
      corrupted,
      objective_ids,
      objectives,
      layout,
      shares,
      segmented,
      self.vocabulary.word_size,
    )
    return dataclasses.replace(batch, rope_theta=part.base)

  def _read(self, step: int, slots, rows):
    """Reads the slots' texts: tokens `[n, T]`, and starts if segmented."""
    tokens, starts = self.rows.read(rows.reshape(-1))
    # Joined rows follow one another.
    tokens = tokens.reshape(len(rows), -1)
    starts = None if starts is None else starts.reshape(tokens.shape)
    if self.random_offset:
      tokens = self._moved(step, slots, rows, tokens)
    if not self.frame:
      return tokens, starts
    before, after = self.frame
    moved = np.roll(tokens, 1, axis=1)
    moved[:, 0] = before
    tokens = np.where(tokens[:, :1] == before, tokens, moved)
    if after is not None:
      tokens[:, -1] = after
    return tokens, tokens == before

  def _moved(self, step: int, slots, rows, tokens) -> np.ndarray:
    """Begins each slot's text up to a row's length later, int32 `[n, T]`."""
    following = rows[:, -1] + 1
    ends = np.cumsum(list(self.order.sources.values()))
    last = np.isin(following, ends)  # nothing follows: it stays
    more, _ = self.rows.read(np.where(last, 0, following))
    share = hashing.uniform(self.seed, _OFFSET, step, slots)
    offset = np.where(last, 0, (share * self.rows.seq_len).astype(np.int64))
    at = offset[:, None] + np.arange(tokens.shape[1])
    whole = np.concatenate([tokens, more], axis=1)
    return np.take_along_axis(whole, at, axis=1)

  @functools.cached_property
  def _objectives(self) -> Sequence[Objective]:
    return [self.objectives[name] for name in self.curriculum.objectives]

  def _corrupt(self, draw, tokens, segments, objective_ids) -> Corrupted:
    """Corrupts the slots of each objective together, and merges the parts."""
    progress = draw.step / max(1, len(self) - 1)  # 1 at the last step
    merged = None
    # Draws depend on the slot alone, so that any process makes any slots.
    for objective_id in np.unique(objective_ids):
      mine = objective_ids == objective_id
      part = self._objectives[objective_id].corrupt(
        tokens[mine],
        Segments(segments.start[mine], segments.end[mine]),
        draw.of(mine),
        self.vocabulary,
        progress,
      )
      if mine.all():
        return part
      if merged is None:
        merged = Corrupted(*(np.empty(tokens.shape, a.dtype) for a in part))
      for whole, array in zip(merged, part, strict=True):
        whole[mine] = array
    return merged


def load(source: Source, start: int = 0, threads: int = 2) -> Iterator[Batch]:
  """Yields `source[start]`, `source[start + 1]`, ..., made by grain's threads.

  Raises:
    UserError: A row cannot be read (`Rows.read`).
  """
  if start >= len(source):
    return iter(())
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=8)
  steps = grain.MapDataset.source(source)[start:]
  return iter(steps.to_iter_dataset(options))
