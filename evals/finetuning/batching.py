"""Examples as rows of tokens, and the batches that are cut of them.

Rows are grouped by length, so that short ones are not padded to the longest,
and only a handful of shapes is compiled. Which lengths follow one another is
the same for all seeds, which rows they hold is not.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from antlm_jax import hashing
from antlm_jax.inference.model import Loaded

_SHORTEST = 16  # tokens; longer rows are padded to it doubled, and so on
_ROWS, _BATCHES, _LEFT_OUT = 0, 1, 2  # what a permutation is of


class Example(NamedTuple):
  """An example of a task."""

  texts: tuple[str, ...]  # such as a sentence, a pair, or words
  label: Any = None  # what to predict, as plain JSON has it; None if unknown
  id: str = ""  # its name in the predictions


@dataclasses.dataclass(frozen=True)
class Rows:
  """Examples as rows of tokens; an example may make several rows.

  Attributes:
    tokens: int32 `[n, T]`, padded at the right; `[n, S, T]` if a row is S
      texts that are encoded apart and learnt from together.
    lengths: Tokens of each, int32 `[n]` or `[n, S]`.
    labels: What the loss compares outputs with, `[n, ...]`.
    per_token: Whether the last axis of the labels is T, cut as the tokens are.
    examples: What is predicted, m examples; often one a row, and in order.
    about: What else decoding needs, such as the example of each row.
    cut: How many texts, or examples of texts in one row, were too long for it.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  labels: np.ndarray
  per_token: bool = False
  examples: Sequence[Example] = ()
  about: Any = None
  cut: int = 0

  def __len__(self) -> int:
    return len(self.tokens)

  @functools.cached_property
  def groups(self) -> dict[int, np.ndarray]:
    """The rows of each padded length, shortest first."""
    longest = self.tokens.shape[-1]
    lengths = self.lengths.reshape(len(self), -1).max(axis=1, initial=1)
    doublings = np.ceil(np.log2(np.maximum(lengths / _SHORTEST, 1)))
    padded = np.minimum(_SHORTEST * 2 ** doublings.astype(int), longest)
    return {int(t): np.flatnonzero(padded == t) for t in np.unique(padded)}


# -------------------------------------------------------------------- encoding


def longest(loaded: Loaded, max_length: int) -> int:
  """Returns the tokens of a row, at most: the model has a limit, too."""
  return min(max_length, loaded.model.config.max_seq_len)


def framed(
  loaded: Loaded, texts: Sequence[Sequence[str]], max_length: int
) -> tuple[np.ndarray, np.ndarray, int]:
  """Makes rows `<s> A </s> B </s>`, as the training data frames a text.

  Where a text is framed by `</s>` alone or by nothing, so are these. What is
  too long, by `max_length` or for the model, loses tokens at the end of its
  longest text.

  Returns:
    tokens int32 `[n, T]`, lengths int32 `[n]`, and how many rows were too long.
  """
  before, after = loaded.frame
  flat = [text for those in texts for text in those]
  ids = iter(loaded.tokenizer.encode_batch(flat))
  limit = longest(loaded, max_length)
  rows, cut = [], 0
  for those in texts:
    parts = [next(ids) for _ in those]
    budget = limit - len(before) - len(parts) * len(after)
    lengths = [len(part) for part in parts]
    cut += sum(lengths) > budget
    kept = truncated(lengths, budget)
    row = [before]
    for part, length in zip(parts, kept, strict=True):
      row += [part[:length], after]
    rows.append(np.concatenate(row))
  return *padded(rows), cut


def labelled(
  loaded: Loaded,
  texts: Iterable[tuple[Sequence[int], Sequence[int]]],
  around: int,
  max_length: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
  """Makes rows `<s> A </s>` of texts' tokens, each with its label.

  The frame's tokens have the label `around`, padding -1. What is too long loses
  tokens at its end.

  Returns:
    tokens int32 `[n, T]`, lengths int32 `[n]`, labels int32 `[n, T]`, and how
    many rows were too long.
  """
  before, after = loaded.frame
  limit = longest(loaded, max_length) - len(after)
  rows, labels, cut = [], [], 0
  for ids, marks in texts:
    row = [*before, *ids]
    cut += len(row) > limit
    rows.append([*row[:limit], *after])
    marks = [*[around] * len(before), *marks]
    labels.append(marks[:limit] + [around] * len(after))
  return *padded(rows), padded(labels, fill=-1)[0], cut


def truncated(lengths: Sequence[int], budget: int) -> list[int]:
  """Shortens the longest, again and again, until the sum fits the budget."""
  kept = list(lengths)
  while sum(kept) > max(budget, 0):
    # Of equals the one that was shorter, as Hugging Face's tokenizers do.
    kept[max(range(len(kept)), key=lambda i: (kept[i], -lengths[i]))] -= 1
  return kept


def padded(
  rows: Sequence[Sequence[int]], fill: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Pads rows at the right to int32 `[n, T]`; their lengths are at least 1."""
  lengths = np.array([max(1, len(row)) for row in rows], np.int32)
  out = np.full((len(rows), lengths.max(initial=1)), fill, np.int32)
  for i, row in enumerate(rows):
    out[i, : len(row)] = row
  return out, lengths


# --------------------------------------------------------------------- batches


class Slots(NamedTuple):
  """Which rows make a batch."""

  length: int  # tokens T that the batch is padded to
  rows: np.ndarray  # int `[B]`; a place that is empty repeats the first row
  weights: np.ndarray  # float32 `[B]`, 0 where a place is empty


def batches(
  rows: Rows,
  size: int,
  seed: int | None = None,
  epoch: int = 0,
  drop_last: bool = False,
) -> list[Slots]:
  """Cuts rows into batches of like length.

  What is left of a length that does not fill a batch goes with the next
  length, so at most one batch, of the longest, is incomplete.

  Args:
    size: Rows of a batch B.
    seed: With the epoch, permutes the rows of a length; None to leave rows and
      batches in order.
    epoch: By itself, permutes the batches.
    drop_last: Leaves out, at random, as many rows as do not fill a batch; else
      every row is in one.
  """
  kept = np.ones(len(rows), bool)
  if drop_last:  # those of any length, the same for all seeds: see below
    kept[_permutation(len(rows), epoch, _LEFT_OUT)[: len(rows) % size]] = False
  # `left` is what did not fill a batch of the shorter lengths.
  out, left = [], np.array([], int)
  for length, members in rows.groups.items():
    members = members[kept[members]]
    if seed is not None:
      key = (seed, epoch, _ROWS, length)
      members = members[_permutation(len(members), *key)]
    pool = np.concatenate([left, members])
    full = len(pool) // size * size
    for chosen in pool[:full].reshape(-1, size):
      out.append(Slots(length, chosen, np.ones(size, np.float32)))
    left = pool[full:]
  if len(left):
    empty = size - len(left)
    filled = np.pad(left, (0, empty), constant_values=left[0])
    weights = (np.arange(size) < len(left)).astype(np.float32)
    out.append(Slots(length, filled, weights))
  if seed is None:
    return out
  # Without the seed: runs that train together take the same lengths.
  return [out[i] for i in _permutation(len(out), epoch, _BATCHES)]


def _permutation(size: int, *key: int) -> np.ndarray:
  return hashing.permute(np.arange(size), size, *key)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TaskBatch:
  """What a step of one run reads; in training with an axis `[runs]` before."""

  tokens: Any  # int32 `[B, T]` or `[B, S, T]`
  lengths: Any  # int32 `[B]` or `[B, S]`
  labels: Any  # `[B, ...]`
  weights: Any  # float32 `[B]`; 0 for padding


def gather(rows: Rows, slots: Sequence[Slots]) -> TaskBatch:
  """Reads batches of the same length, one a run, into `[runs, B, ...]`."""
  which, length = np.stack([s.rows for s in slots]), slots[0].length
  labels = rows.labels[which]
  return TaskBatch(
    tokens=rows.tokens[which][..., :length],
    lengths=rows.lengths[which],
    labels=labels[..., :length] if rows.per_token else labels,
    weights=np.stack([s.weights for s in slots]),
  )


def predict(call: Callable, rows: Rows, size: int) -> Any:
  """Calls a function on all rows, in batches of like length.

  Args:
    call: Tokens int32 `[B, T]` and lengths `[B]` to arrays `[runs, B, ...]`.
    rows: n rows.
    size: Rows of a batch B.

  Returns:
    The arrays `[runs, n, ...]`; an axis that is longer for longer rows is
    padded with zeros.
  """
  made = batches(rows, size)
  # All calls are under way before the first result is waited for.
  found = [
    call(rows.tokens[s.rows][..., : s.length], rows.lengths[s.rows])
    for s in made
  ]
  put = functools.partial(_put_together, made, len(rows))
  return jax.tree.map(lambda *parts: put(parts), *jax.device_get(found))


def _put_together(made: Sequence[Slots], n: int, parts: Sequence[np.ndarray]):
  """Puts batches' results `[runs, B, ...]` in the order of the rows."""
  # Axes after [runs, B] may differ: a batch of short rows has fewer tokens.
  runs, _, *rest = np.max([part.shape for part in parts], axis=0)
  out = np.zeros((runs, n, *rest), parts[0].dtype)
  for slots, part in zip(made, parts, strict=True):
    real = slots.weights > 0
    within = map(slice, part.shape[2:])
    out[:, slots.rows[real], *within] = part[:, real]
  return out
