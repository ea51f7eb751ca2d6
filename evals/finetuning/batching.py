"""Examples as rows of tokens, and batches of rows.

Rows are grouped by length, so that short rows are not padded to the longest,
and few shapes are compiled. The order of the lengths is the same for all seeds;
the order of the rows of a length is not.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from antlm_jax import hashing
from antlm_jax.inference.model import Loaded
from antlm_jax.runtime import progress, records

_AHEAD = 8  # batches that start before a result is awaited
_SHORTEST = 16  # tokens; rows are padded to this length times a power of two
# Purposes of a permutation.
_ROWS = 0
_BATCHES = 1
_LEFT_OUT = 2


class Example(NamedTuple):
  """An example of a task."""

  texts: tuple[str, ...]  # such as a sentence, a pair, or words
  label: Any = None  # to predict, as plain JSON; None if unknown
  id: str = ""  # its name in the predictions


@dataclasses.dataclass(frozen=True)
class ExampleRows:
  """Examples as rows of tokens; an example may have several rows."""

  # int32 `[n, T]`, padded on the right; `[n, S, T]` if a row is S texts that
  # are encoded apart and trained on together.
  tokens: np.ndarray
  lengths: np.ndarray  # tokens of each, int32 `[n]` or `[n, S]`
  # For the loss, `[n, ...]`, or `ranking.KnownPositives`, whose items for
  # indices `[B]` depend on the rows of the batch.
  labels: Any
  per_token: bool = False  # whether the labels' last axis is T
  examples: Sequence[Example] = ()  # to predict, m; often one for each row
  origins: Any = None  # for decoding, such as the example of each row
  # Numbers of texts, or examples, that were too long, and of all.
  cut: tuple[int, int] = (0, 0)

  def __len__(self) -> int:
    return len(self.tokens)

  @functools.cached_property
  def groups(self) -> dict[int, np.ndarray]:
    """Rows of each padded length, shortest first."""
    longest = self.tokens.shape[-1]
    lengths = self.lengths.reshape(len(self), -1).max(axis=1, initial=1)
    doublings = np.ceil(np.log2(np.maximum(lengths / _SHORTEST, 1)))
    padded = np.minimum(_SHORTEST * 2 ** doublings.astype(int), longest)
    return {int(t): np.flatnonzero(padded == t) for t in np.unique(padded)}


def longest(loaded: Loaded, max_length: int) -> int:
  """Returns the largest number of tokens in a row, for this model."""
  return min(max_length, loaded.model.config.max_seq_len)


def warn_of_cut(
  loaded: Loaded, rows: ExampleRows, max_length: int, name: str = ""
) -> None:
  """Warns of texts of a set, by its name, that were too long."""
  count, total = rows.cut
  if count:
    limit = longest(loaded, max_length)
    limited_by = (
      "the model's longest row" if limit < max_length else "max_length"
    )
    progress.say(
      f"warning: {f'{name}: ' * bool(name)}{count:,} of {total:,} texts are cut"
      f" to fit {limit} tokens ({limited_by})"
    )


def frame_texts(
  loaded: Loaded, texts: Sequence[Sequence[str]], max_length: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
  """Makes rows `<s> A </s> B </s>`, with the special tokens of training.

  White space at the ends of a text is no text. Too long rows lose tokens at the
  end of their longest text.

  Returns:
    tokens int32 `[n, T]`, lengths int32 `[n]`, and the numbers of different
    rows that were too long, and of all.
  """
  before, after = loaded.frame
  flat = [
    records.plain_lines(text).strip()
    for row_texts in texts
    for text in row_texts
  ]
  ids = iter(loaded.tokenizer.encode_batch(flat))
  limit = longest(loaded, max_length)
  rows = []
  cut = set()
  for row_texts in texts:
    parts = [next(ids) for _ in row_texts]
    budget = limit - len(before) - len(parts) * len(after)
    lengths = [len(part) for part in parts]
    if sum(lengths) > budget:
      cut.add(tuple(row_texts))
    row = [before]
    for part, length in zip(
      parts, truncate_lengths(lengths, budget), strict=True
    ):
      row += [part[:length], after]
    rows.append(np.concatenate(row))
  return *pad_rows(rows), (len(cut), len(set(map(tuple, texts))))


def frame_labelled(
  loaded: Loaded,
  texts: Iterable[tuple[Sequence[int], Sequence[int]]],
  frame_label: int,
  max_length: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, int]]:
  """Makes rows `<s> A </s>` of texts' tokens, each with its label.

  Special tokens have the label `frame_label`, padding -1. Too long rows lose
  tokens at their end.

  Returns:
    tokens int32 `[n, T]`, lengths int32 `[n]`, labels int32 `[n, T]`, and the
    numbers of rows that were too long, and of all.
  """
  before, after = loaded.frame
  limit = longest(loaded, max_length) - len(after)
  rows = []
  labels = []
  cut = 0
  for ids, text_labels in texts:
    row = [*before, *ids]
    cut += len(row) > limit
    rows.append([*row[:limit], *after])
    row_labels = [*[frame_label] * len(before), *text_labels]
    labels.append(row_labels[:limit] + [frame_label] * len(after))
  labels = pad_rows(labels, fill=-1)[0]
  return *pad_rows(rows), labels, (cut, len(rows))


def truncate_lengths(lengths: Sequence[int], budget: int) -> list[int]:
  """Shortens the longest, again and again, until the sum fits the budget."""
  result = list(lengths)
  while sum(result) > max(budget, 0):
    # Of equal lengths, cut the text that was shorter, as Hugging Face does.
    longest = max(range(len(result)), key=lambda i: (result[i], -lengths[i]))
    result[longest] -= 1
  return result


def pad_rows(
  rows: Sequence[Sequence[int]], fill: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Pads rows on the right to int32 `[n, T]`; their lengths are at least 1."""
  lengths = np.array([max(1, len(row)) for row in rows], np.int32)
  out = np.full((len(rows), lengths.max(initial=1)), fill, np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out, lengths


class BatchRows(NamedTuple):
  """Rows of a batch."""

  length: int  # padded length T in tokens
  rows: np.ndarray  # int `[B]`; an empty place repeats the first row
  weights: np.ndarray  # float32 `[B]`; 0 for an empty place


def batches_by_length(
  rows: ExampleRows,
  size: int,
  seed: int | None = None,
  epoch: int = 0,
  drop_last: bool = False,
) -> list[BatchRows]:
  """Divides rows into batches of similar length.

  Rows of a length that do not fill a batch go to the next length, so that at
  most one batch, the longest, is incomplete.

  Args:
    rows: The rows.
    size: Rows of a batch B.
    seed: Permutes the rows of a length, with the epoch; None keeps rows and
      batches in order.
    epoch: Permutes the batches.
    drop_last: Leaves out random rows, so that every batch is complete.
  """
  included = np.ones(len(rows), bool)
  if drop_last:  # rows of any length, the same for all seeds: see below
    order = _permutation(len(rows), epoch, _LEFT_OUT)
    included[order[: len(rows) % size]] = False
  out = []
  left = np.array([], int)  # rows that did not fill a batch so far
  for length, members in rows.groups.items():
    members = members[included[members]]
    if seed is not None:
      key = (seed, epoch, _ROWS, length)
      members = members[_permutation(len(members), *key)]
    pool = np.concatenate([left, members])
    full = len(pool) // size * size
    for chosen in pool[:full].reshape(-1, size):
      out.append(BatchRows(length, chosen, np.ones(size, np.float32)))
    left = pool[full:]
  if len(left):
    filled = np.pad(left, (0, size - len(left)), constant_values=left[0])
    weights = (np.arange(size) < len(left)).astype(np.float32)
    out.append(BatchRows(length, filled, weights))
  if seed is None:
    return out
  # Without the seed, because runs that train together need equal lengths.
  return [out[i] for i in _permutation(len(out), epoch, _BATCHES)]


def _permutation(size: int, *key: int) -> np.ndarray:
  return hashing.permute(np.arange(size), size, *key)


class TaskBatch(NamedTuple):
  """Batch of one run, or of several with an axis `[runs]` in front."""

  tokens: Any  # int32 `[B, T]` or `[B, S, T]`
  lengths: Any  # int32 `[B]` or `[B, S]`
  labels: Any  # `[B, ...]`
  weights: Any  # float32 `[B]`; 0 for padding


def gather(rows: ExampleRows, slots: Sequence[BatchRows]) -> TaskBatch:
  """Returns a batch `[runs, B, ...]` of each run's rows, of one length."""
  indices = np.stack([s.rows for s in slots])
  length = slots[0].length
  labels = rows.labels[indices]
  return TaskBatch(
    tokens=rows.tokens[indices][..., :length],
    lengths=rows.lengths[indices],
    labels=labels[..., :length] if rows.per_token else labels,
    weights=np.stack([s.weights for s in slots]),
  )


def predict_rows(
  call: Callable, rows: ExampleRows, size: int, name: str = ""
) -> Any:
  """Calls a function on all n rows, in batches of similar length.

  `call` maps tokens int32 `[B, T]` and lengths `[B]` to arrays
  `[runs, B, ...]`. Returns arrays `[runs, n, ...]`; axes that are longer for
  longer rows are padded with zeros. Shows progress, after the set's name.
  """
  batches = batches_by_length(rows, size)
  outputs = []
  for slots in progress.track(batches, "batch", name):
    tokens = rows.tokens[slots.rows][..., : slots.length]
    outputs.append(call(tokens, rows.lengths[slots.rows]))
    # Several calls start before a result is awaited.
    jax.block_until_ready(outputs[-1 - _AHEAD : -_AHEAD])

  def in_order(*parts: np.ndarray) -> np.ndarray:
    runs, _, *row_shape = np.max([part.shape for part in parts], axis=0)
    out = np.zeros((runs, len(rows), *row_shape), parts[0].dtype)
    for slots, part in zip(batches, parts, strict=True):
      real = slots.weights > 0
      within = map(slice, part.shape[2:])
      out[:, slots.rows[real], *within] = part[:, real]
    return out

  return jax.tree.map(in_order, *jax.device_get(outputs))
