"""Inputs and outputs of objectives: vocabularies, draws, segments, rows.

Every draw is a hash of (seed, purpose, step, row, position). So any process
makes any row by itself, and a setting changes only the draws of its purpose.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from antlm_jax import hashing

CYCLE = 8  # visits of a text after which its tokens get another random order
# The draws of these purposes have counters 0 to 8, and those of other purposes
# have hashes of their names. A change would change all runs.
_PURPOSES = "choose fate replacement span prefix turn order tile ratio"
_PURPOSES = _PURPOSES.split()


class WordTokens(NamedTuple):
  """Where the words of a text begin, by its tokens, bool `[V]` each."""

  start: np.ndarray  # whether a word begins with each token, or it is special
  # Whether a word ends with each token. The next token then begins a word,
  # unless it continues any word before it. None: no token does.
  end: np.ndarray | None = None
  inside: np.ndarray | None = None  # whether it continues any word


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Facts about a tokenizer that objectives need."""

  mask_id: int | None  # id of `<mask>`
  pad_id: int | None  # id of `<pad>`
  eos_id: int | None  # id of the token that ends a document
  special: np.ndarray  # whether each token is special, bool `[V]`
  # Asked only to mask words, since it takes a second for a large vocabulary.
  word_tokens: Callable[[], WordTokens]
  # Mean number of tokens in the word of a token, in the rows of the run.
  word_size: float = 1.0

  @functools.cached_property
  def ordinary(self) -> np.ndarray:
    """Ids of the tokens that are not special."""
    return np.flatnonzero(~self.special).astype(np.int32)

  def words(self, tokens: np.ndarray) -> np.ndarray:
    """Returns where the word of each token begins, int `[n, T]`."""
    special = self.special[tokens]
    word = self.word_tokens()
    begins = word.start[tokens] | special
    # A special token ends the word before it.
    ends = special if word.end is None else special | word.end[tokens]
    after = ends[:, :-1]
    if word.inside is not None:
      after = after & ~word.inside[tokens[:, 1:]]
    begins[:, 1:] |= after
    return latest_begins(begins)

  def mean_word_size(self, tokens: np.ndarray) -> float:
    """Returns the mean size of a token's word in rows, in ordinary tokens."""
    ordinary = ~self.special[tokens]
    row_begin = tokens.shape[1] * np.arange(len(tokens))[:, None]
    word_begin = self.words(tokens) + row_begin
    sizes = np.bincount(word_begin[ordinary], minlength=1).astype(float)
    return float(sizes @ sizes / max(sizes.sum(), 1))


@dataclasses.dataclass(frozen=True)
class Draw:
  """The counters behind the randomness of some slots of one batch."""

  seed: int  # the run's seed
  step: int  # of the batch; 0 for held-out rows
  # Slot of each text in the step's batch, int64 `[n, 1]`. Held-out rows have
  # their own number, so that batches of any size have the same draws.
  slots: np.ndarray
  # Number of each prepared row, and of earlier visits to it, int64 `[n, 2]`.
  # None means that the number is the slot, and the visit the first.
  rows_and_visits: np.ndarray | None = None
  # Place of each slot among those of its objective in the step's batch, int64
  # `[n, 1]`. None means that the place is the slot.
  ranks: np.ndarray | None = None

  def of(self, subset: np.ndarray) -> "Draw":
    """Returns the draws of some of the slots, by their indices or a mask."""
    rows_and_visits = self.rows_and_visits
    ranks = self.ranks
    return Draw(
      self.seed,
      self.step,
      self.slots[subset],
      None if rows_and_visits is None else rows_and_visits[subset],
      None if ranks is None else ranks[subset],
    )

  def uniform(self, purpose: str, positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1), of the shape of slots x positions."""
    return hashing.uniform(*self._counters(purpose), positions)

  def bits(self, purpose: str, positions: np.ndarray) -> np.ndarray:
    """Returns uniform uint32, of the shape of slots x positions."""
    return hashing.bits(*self._counters(purpose), positions)

  def _counters(self, purpose: str) -> tuple:
    number = zlib.crc32(purpose.encode())
    if purpose in _PURPOSES:
      number = _PURPOSES.index(purpose)
    return self.seed, number, self.step, self.slots

  def by_row(self) -> tuple["Draw", np.ndarray]:
    """Returns draws that depend on the prepared row, and the visit.

    They are equal over `CYCLE` visits. The second result is the number of the
    visit in its cycle, int64 `[n, 1]`.
    """
    row = self.slots
    visits = np.zeros_like(self.slots)
    if self.rows_and_visits is not None:
      row = self.rows_and_visits[:, :1]
      visits = self.rows_and_visits[:, 1:]
    cycle, visit = np.divmod(visits, CYCLE)
    return Draw(self.seed, cycle, row), visit


class Corrupted(NamedTuple):
  """Rows as an objective shows them to the model."""

  targets: np.ndarray  # the tokens before corruption, int32 `[n, T]`
  inputs: np.ndarray  # tokens that the model sees, int32 `[n, T]`
  k_start: np.ndarray  # first key that each position sees, int32 `[n, T]`
  k_end: np.ndarray  # one past the last key, int32 `[n, T]`
  predicted: np.ndarray  # whether each target is predicted, bool `[n, T]`
  scale: np.ndarray  # factor of each target's weight, float32 `[n, T]`


@dataclasses.dataclass(frozen=True)
class Segments:
  """Begin and end of each position's segment, each int32 `[n, T]`."""

  start: np.ndarray
  end: np.ndarray

  @classmethod
  def of(cls, starts: np.ndarray) -> "Segments":
    """Finds the segments from their first tokens, bool `[n, T]`."""
    length = starts.shape[1]
    # The end is the next start, found from the right.
    later = np.full(starts.shape, length, np.int32)
    position = np.arange(1, length, dtype=np.int32)
    later[:, :-1] = np.where(starts[:, 1:], position, length)
    end = np.minimum.accumulate(later[:, ::-1], axis=1)[:, ::-1]
    return cls(latest_begins(starts).astype(np.int32), end)

  @classmethod
  def whole(cls, n: int, length: int) -> "Segments":
    """Returns one segment per row."""
    zeros = np.zeros((n, length), np.int32)
    return cls(zeros, zeros + np.int32(length))


def latest_begins(begins: np.ndarray) -> np.ndarray:
  """Returns the latest begin at or before each place; 0 before the first."""
  position = np.arange(begins.shape[1])
  return np.maximum.accumulate(np.where(begins, position, 0), axis=1)
