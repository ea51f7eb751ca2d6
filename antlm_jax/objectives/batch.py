"""The batch that a train step takes, for any objectives."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.masks import AttentionMask
from antlm_jax.objectives.corruption import Corrupted
from antlm_jax.objectives.objective import Objective

MOST_ROWS = 2**24  # of a batch
Array = np.ndarray | jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
  """A batch: M microbatches of B rows of T tokens, over S data shards.

  The targets of each microbatch and data shard are a flat list. All lists of a
  phase have the same length C (`capacity`) and are padded with weight 0.
  """

  inputs: Array  # tokens that the model sees, int32 `[M, B, T]`
  positions: Array  # place of each token in its document, int32 `[M, B, T]`
  mask: AttentionMask  # keys that each position sees; bounds `[M, B, T]`
  # Where each target is predicted, as an index into the B / S * T positions of
  # its shard, int32 `[M, S, C]`.
  target_positions: Array
  targets: Array  # tokens to predict, int32 `[M, S, C]`
  weights: Array  # weights in the loss, float32 `[M, S, C]`; 0 for padding
  # Objective of each target, as an index into the curriculum's objectives,
  # int32 `[M, S, C]`.
  objective_ids: Array
  # Number of targets for which a list has no room, int32 `[M, S]`.
  lost: Array | None = None
  # RoPE's base, if a phase of the run changes the model's; a compiled constant.
  rope_theta: float | None = dataclasses.field(
    default=None, metadata={"static": True}
  )


@dataclasses.dataclass(frozen=True)
class BatchLayout:
  """Layout of a batch's slots over microbatches and data shards.

  A slot is the place of a row in its batch. Slot s is row
  s % (batch_size / microbatches) of microbatch s // (batch_size /
  microbatches). A data shard holds a contiguous part of every microbatch. This
  process fills the shards `local`; None means all.
  """

  batch_size: int
  microbatches: int = 1
  shards: int = 1
  local: tuple[int, ...] | None = None

  def __post_init__(self):
    parts = self.microbatches * self.shards
    if not 1 <= self.batch_size <= MOST_ROWS or self.batch_size % parts:
      below = min(self.batch_size, MOST_ROWS) // parts * parts
      near = [n for n in (below, below + parts) if 1 <= n <= MOST_ROWS]
      near = " or ".join(map(str, near)) or "fewer devices or microbatches"
      raise UserError(
        f"batch_size={self.batch_size} is not a positive multiple of"
        f" microbatches x data shards = {self.microbatches} x {self.shards}:"
        f" use {near}"
      )
    if self.local is None:
      object.__setattr__(self, "local", tuple(range(self.shards)))

  @property
  def shard_rows(self) -> int:
    """Number of rows of one shard in one microbatch."""
    return self.batch_size // (self.microbatches * self.shards)

  @property
  def slots(self) -> np.ndarray:
    """The batch's slots that this process fills, int64 `[M * local rows]`."""
    slots = np.arange(self.batch_size)
    slots = slots.reshape(self.microbatches, self.shards, self.shard_rows)
    return slots[:, list(self.local)].reshape(-1)


def capacity(
  shares: Sequence[tuple[Objective, float]],
  rows: int,
  length: int,
  word_size: float = 1.0,
) -> int:
  """Returns the length of a phase's target lists, the same for every batch.

  It is the expected number of targets and a margin of about six standard
  deviations, rounded up to a multiple of 128. It is at most the number of
  tokens. A list with more targets drops the last: the loss is the weighted mean
  over the others, and `Batch.lost` counts them. Objectives that predict all
  tokens never drop any. Otherwise the margin is 8 sqrt(n) for n expected
  targets:

  - Tokens masked by coins: the deviation is at most sqrt(n), so that one list
    in 10^15 overflows.
  - Words and spans masked by coins: sizes s of their units multiply the
    variance by E[s^2] / E[s]. One list in 10^8 overflows (5.5 deviations). The
    margin has room for a factor of 2.5; in English prose it is 1.7. It grows
    with higher factors, such as that of the run's rows for words. A few rows
    with far longer words than the others may still overflow.
  - A fixed count for each row (`exact`, `covering`) varies less than coins. So
    does a share for each row (`mask_ratio_high`), which is counted as if all
    rows had the highest share.

  Args:
    shares: Objectives of the phase, and their parts of the rows.
    rows: Number of rows of one data shard in one microbatch.
    length: Number of tokens of a row.
    word_size: E[s^2] / E[s] of words of s tokens (`Vocabulary.word_size`).
  """
  expected = variance = 0.0
  for objective, share in shares:
    # A mixed batch's rows are spread over the shards evenly, to within a row.
    # Shards of 64 rows have one row more in a step of a thousand. The margin
    # has room for it in rows of up to 2,048 tokens. Longer rows lose up to 1 %
    # of a list.
    shard_rows = rows if share == 1 else min(rows, math.ceil(rows * share) + 1)
    targets = shard_rows * length * objective.max_target_share
    expected += targets
    variance += targets * max(1, objective.clustering(word_size) / 2.5)
  size = math.ceil((expected + 8 * math.sqrt(variance)) / 128) * 128
  return min(size, rows * length)


def assemble_batch(
  corrupted: Corrupted,
  row_objectives: np.ndarray,
  objectives: Sequence[Objective],
  layout: BatchLayout,
  shares: Mapping[int, float],
  segmented: bool,
  word_size: float = 1.0,
) -> Batch:
  """Lays corrupted rows out as a `Batch` of NumPy arrays.

  Args:
    corrupted: Rows in the order of `layout.slots`.
    row_objectives: Objective of each row, as an index in `objectives`, `[n]`.
    objectives: Objectives of the whole curriculum.
    layout: Place of each row.
    shares: Part of the batch of each objective in it, by its index. They, and
      not the rows at hand, choose the mask's static part and the capacity, so
      that these are the same in every process and every batch of a phase.
    segmented: Whether rows hold several documents.
    word_size: Mean size of a token's word, as for `capacity`.

  Raises:
    UserError: an objective's `corrupt` returns bounds that its attention lacks.
  """
  length = corrupted.inputs.shape[1]
  shape = (layout.microbatches, -1, length)
  trained = [(objectives[k], share) for k, share in shares.items()]
  size = capacity(trained, layout.shard_rows, length, word_size)
  # The mask has only the bounds that some row needs: plain causal and full
  # attention are cheaper than bounds that say the same.
  attention = {objective.attention for objective, _ in trained}
  causal = attention == {"causal"}
  full = attention == {"bidirectional"} and not segmented
  position = np.arange(length, dtype=np.int32)
  implied_end = position + 1 if causal else length
  if (causal or full) and np.any(corrupted.k_end != implied_end):
    names = " or ".join(objective.name for objective, _ in trained)
    raise UserError(
      f"objective {names}: corrupt returns a k_end that attention="
      f"{attention.pop()} does not have: set attention=prefix"
    )
  mask = AttentionMask(
    causal=causal,
    k_start=corrupted.k_start.reshape(shape) if segmented else None,
    k_end=None if causal or full else corrupted.k_end.reshape(shape),
  )
  return Batch(
    inputs=corrupted.inputs.reshape(shape),
    positions=(position - corrupted.k_start).reshape(shape),
    mask=mask,
    **_target_lists(corrupted, row_objectives, objectives, layout, size),
  )


def _target_lists(corrupted, row_objectives, objectives, layout, size):
  """Returns the four arrays of targets, each `[M, S, C]`, and those lost."""
  lists = layout.microbatches, len(layout.local)
  predicted = corrupted.predicted.reshape(*lists, -1)
  target_index = np.zeros((*lists, size), np.int32)
  real = np.zeros(target_index.shape, bool)
  for index in np.ndindex(lists):
    places = np.flatnonzero(predicted[index])[:size]
    target_index[index][: len(places)] = places
    real[index][: len(places)] = True

  def pick(places, values):
    return np.take_along_axis(values.reshape(*lists, -1), places, axis=-1)

  rows = target_index // corrupted.inputs.shape[1]
  objective = pick(rows, row_objectives.astype(np.int32))
  shift = np.array([o.shift for o in objectives], np.int32)
  weight = np.array([o.weight for o in objectives], np.float32)
  arrays = {
    # A token is predicted from `shift` places before it.
    "target_positions": target_index - shift[objective],
    "targets": pick(target_index, corrupted.targets),
    "weights": weight[objective] * pick(target_index, corrupted.scale),
    "objective_ids": objective,
  }
  out = {name: np.where(real, values, 0) for name, values in arrays.items()}
  lost = np.maximum(predicted.sum(axis=-1, dtype=np.int32) - size, 0)
  return out | {"lost": lost}
