"""The data source: its item at a step is that step's batch.

A *row* is one of the prepared rows on disk. A *slot* is a place in the batch,
from 0 to batch_size, and holds one row, or several that are joined. Random
draws belong to slots: a row gets new masks in each epoch.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import grain
import numpy as np

from antlm_jax import hashing
from antlm_jax.data.order import Order
from antlm_jax.data.rows import Rows
from antlm_jax.objectives.batch import Batch, assemble_batch
from antlm_jax.objectives.corruption import (
  Corrupted,
  Draw,
  Segments,
  Vocabulary,
)
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.objectives.objective import Objective

# Keep these draws apart from the objectives' and the order's.
_SHORT = 0x0DE8
_CUT = 0x0DE9
_OFFSET = 0x0DEA


@dataclasses.dataclass(frozen=True)
class BatchSource:
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
  # Number of held-out rows; None for a run's own rows. Later slots are not
  # predicted. Draws belong to rows, not to slots: batches of any size measure
  # the same.
  held_out: int | None = None

  def __len__(self) -> int:
    return self.curriculum.steps

  def __getitem__(self, step: int) -> Batch:
    stage = self.order.stage_at(step)
    layout = stage.layout
    slots = layout.slots
    contents = self.order.slots(step)
    tokens, starts = self._read(step, slots, contents.rows)
    in_text = self._in_text(step, slots, tokens.shape)
    if self.short:
      starts = _with_segment(starts, ~in_text)
    # Rows that hold one document need no starts: their mask stays static.
    segmented = starts is not None
    one_segment = Segments.whole(*tokens.shape)
    segments = Segments.of(starts) if segmented else one_segment
    shares, objective_ids, ranks = self._divided(step)
    weighted = self._weighted(objective_ids[: self.order.batch_size(step)])
    objective_ids = objective_ids[slots]
    ranks = ranks[slots, None]
    first_rows = contents.rows[:, 0]
    rows_and_visits = np.stack([first_rows, contents.visits], axis=1)
    if self.held_out is None:
      draw = Draw(self.seed, step, slots[:, None], rows_and_visits, ranks)
      # A batch that still grows has empty slots.
      has_text = slots < self.order.batch_size(step)
    else:
      row_numbers = self.order.slot_numbers(step)
      draw = Draw(self.seed, 0, row_numbers[:, None], rows_and_visits)
      has_text = row_numbers < self.held_out
    progress = step / max(1, len(self) - 1)  # 1 at the last step
    corrupted = self._corrupt(draw, tokens, segments, objective_ids, progress)
    predicted = corrupted.predicted & in_text & has_text[:, None]
    batch = assemble_batch(
      corrupted._replace(predicted=predicted),
      objective_ids,
      weighted,
      layout,
      shares,
      segmented,
      self.vocabulary.word_size,
    )
    return dataclasses.replace(batch, rope_theta=stage.base)

  def _divided(self, step: int) -> tuple[dict, np.ndarray, np.ndarray]:
    """Divides a step's batch, in all processes, among the objectives.

    An objective's id is its place in the whole curriculum, so that ids mean the
    same in every phase.

    Returns:
      The objectives' shares of the batch, by id.
      The objective's id of each slot, int64 `[B]`.
      Each slot's place among those with its id, int64 `[B]`.
    """
    phase = self.curriculum.at(step)
    names = self.curriculum.objectives
    shares = {names.index(name): x for name, x in phase.shares.items()}
    size = self.order.batch_size(step)
    name_indices = phase.divide_batch(
      self.order.slots_between(phase.start, step), size
    )
    # A batch that still grows has empty slots behind the others.
    empty = self.order.stage_at(step).layout.batch_size - size
    objective_ids = np.array(list(shares))[np.pad(name_indices, (0, empty))]
    ranks = np.empty_like(objective_ids)
    for objective_id in shares:
      has_id = objective_ids == objective_id
      ranks[has_id] = np.arange(has_id.sum())
    return shares, objective_ids, ranks

  def _read(self, step: int, slots, rows):
    """Reads the slots' texts: tokens `[n, T]`, and starts if segmented."""
    tokens, starts = self.rows.read(rows.reshape(-1))
    # Joined rows follow one another.
    tokens = tokens.reshape(len(rows), -1)
    starts = None if starts is None else starts.reshape(tokens.shape)
    if self.random_offset:
      tokens = self._moved(step, slots, rows, tokens)
    if self.frame:
      tokens = _framed(tokens, *self.frame)
      starts = tokens == self.frame[0]
    return tokens, starts

  def _moved(self, step: int, slots, rows, tokens) -> np.ndarray:
    """Begins each slot's text up to a row's length later, int32 `[n, T]`."""
    following = rows[:, -1] + 1
    ends = np.cumsum(list(self.order.sources.values()))
    last = np.isin(following, ends)  # nothing follows: it stays
    next_tokens, _ = self.rows.read(np.where(last, 0, following))
    share = hashing.uniform(self.seed, _OFFSET, step, slots)
    offset = np.where(last, 0, (share * self.rows.seq_len).astype(np.int64))
    position = offset[:, None] + np.arange(tokens.shape[1])
    joined = np.concatenate([tokens, next_tokens], axis=1)
    return np.take_along_axis(joined, position, axis=1)

  def _in_text(self, step: int, slots, shape: tuple[int, int]) -> np.ndarray:
    """Returns whether tokens belong to their slot's text, bool `[n, T]`.

    The others are cut off, in a share `short` of the slots.
    """
    if not self.short:
      return np.ones(shape, bool)
    _, length = shape
    # Whether and where are two draws: the share of one cannot bias the other.
    is_short = hashing.uniform(self.seed, _SHORT, step, slots) < self.short
    share = hashing.uniform(self.seed, _CUT, step, slots)
    short_length = 1 + (share * length).astype(np.int64)
    text_length = np.where(is_short, short_length, length)
    return np.arange(length) < text_length[:, None]

  def _weighted(self, objective_ids: np.ndarray) -> Sequence[Objective]:
    """Returns all objectives, with the weights of a batch with these ids."""
    if self.loss_average != "objectives":
      return self._objectives
    # A small batch's shares differ from those of its phase, and may be 0.
    counts = np.bincount(objective_ids, minlength=len(self._objectives))
    shares = (counts / max(1, len(objective_ids))).tolist()
    return [
      dataclasses.replace(o, weight=o.weight * (share or 1.0))
      for o, share in zip(self._objectives, shares, strict=True)
    ]

  @functools.cached_property
  def _objectives(self) -> Sequence[Objective]:
    return [self.objectives[name] for name in self.curriculum.objectives]

  def _corrupt(
    self, draw, tokens, segments, objective_ids, progress: float
  ) -> Corrupted:
    """Corrupts the slots of each objective together, and merges the parts."""
    merged = None
    # Draws depend on the slot alone, so that any process makes any slots.
    for objective_id in np.unique(objective_ids):
      has_id = objective_ids == objective_id
      part = self._objectives[objective_id].corrupt(
        tokens[has_id],
        Segments(segments.start[has_id], segments.end[has_id]),
        draw.of(has_id),
        self.vocabulary,
        progress,
      )
      if has_id.all():
        return part
      if merged is None:
        merged = Corrupted(*(np.empty(tokens.shape, a.dtype) for a in part))
      for merged_array, part_array in zip(merged, part, strict=True):
        merged_array[has_id] = part_array
    return merged


def _framed(tokens: np.ndarray, before: int, after: int | None) -> np.ndarray:
  """Puts the frame's tokens at both ends of rows, int32 `[n, T]`.

  A row moves by one place to make room for the first token, unless it begins
  with it. The last token replaces the row's own.
  """
  moved = np.roll(tokens, 1, axis=1)
  moved[:, 0] = before
  framed = np.where(tokens[:, :1] == before, tokens, moved)
  if after is not None:
    framed[:, -1] = after
  return framed


def _with_segment(starts: np.ndarray | None, cut_off: np.ndarray) -> np.ndarray:
  """Makes the cut-off tokens a segment: no token sees across the cut."""
  first_cut_off = np.diff(cut_off, axis=1, prepend=False)
  return first_cut_off if starts is None else starts | first_cut_off


def load_batches(
  source: BatchSource, start: int = 0, threads: int = 2
) -> Iterator[Batch]:
  """Yields `source[start]`, `source[start + 1]`, ..., made by grain's threads.

  Raises:
    UserError: A row cannot be read (`Rows.read`).
  """
  if start >= len(source):
    return
  options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=8)
  steps = grain.MapDataset.source(source)[start:]
  # Closed, so that no thread reads further batches after an error.
  with contextlib.closing(iter(steps.to_iter_dataset(options))) as batches:
    yield from batches
