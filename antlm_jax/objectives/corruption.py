"""Corruption: rows of tokens as an objective shows them to the model.

Every draw is a hash of (seed, purpose, step, row, position): any process makes
any row by itself, and what one setting changes leaves all other draws alone.
"""

import dataclasses
import functools

import numpy as np

from antlm_jax import hashing
from antlm_jax.objectives.objective import Objective


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """What an objective needs to know of a tokenizer.

  Attributes:
    mask_id: The id of `<mask>`, or None.
    pad_id: The id of `<pad>`, or None.
    special: Which tokens are special, bool `[V]`; never masked.
    word_start: Which tokens begin a word, bool `[V]`.
  """

  mask_id: int | None
  pad_id: int | None
  special: np.ndarray
  word_start: np.ndarray

  @functools.cached_property
  def ordinary(self) -> np.ndarray:
    """Ids of the tokens that are not special."""
    return np.flatnonzero(~self.special).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Draw:
  """The counters behind the randomness of some rows of one step.

  Attributes:
    seed: The run's seed.
    step: The step.
    rows: Place of each row in the step's batch, int64 `[n, 1]`.
  """

  seed: int
  step: int
  rows: np.ndarray

  def uniform(self, purpose: str, positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1), `[n, len(positions)]`."""
    return hashing.uniform(
      self.seed, _PURPOSES.index(purpose), self.step, self.rows, positions
    )


_PURPOSES = ("choose", "fate", "replacement", "span", "prefix")


@dataclasses.dataclass(frozen=True)
class Corrupted:
  """Rows as an objective shows them to the model.

  Attributes:
    inputs: int32 `[n, T]`.
    k_start: First key that each position sees, int32 `[n, T]`.
    k_end: One past the last, int32 `[n, T]`.
    predicted: Whether each token is a target, bool `[n, T]`.
  """

  inputs: np.ndarray
  k_start: np.ndarray
  k_end: np.ndarray
  predicted: np.ndarray


@dataclasses.dataclass(frozen=True)
class Segments:
  """Where each position's segment begins and ends, each int32 `[n, T]`."""

  start: np.ndarray
  end: np.ndarray

  @classmethod
  def of(cls, starts: np.ndarray) -> "Segments":
    """Finds the segments from their first tokens, bool `[n, T]`."""
    n, length = starts.shape
    at = np.arange(length, dtype=np.int32)
    start = np.maximum.accumulate(np.where(starts, at, 0), axis=1)
    # The end is the next start, found from the right.
    later = np.full((n, length), length, np.int32)
    later[:, :-1] = np.where(starts[:, 1:], at[1:], length)
    end = np.minimum.accumulate(later[:, ::-1], axis=1)[:, ::-1]
    return cls(start.astype(np.int32), end)

  @classmethod
  def whole(cls, n: int, length: int) -> "Segments":
    """One segment per row."""
    zeros = np.zeros((n, length), np.int32)
    return cls(zeros, zeros + np.int32(length))


def corrupt(
  objective: Objective,
  tokens: np.ndarray,
  segments: Segments,
  draw: Draw,
  vocabulary: Vocabulary,
  progress: float = 0.0,
) -> Corrupted:
  """Shows rows as `objective` does; a pure function of its arguments.

  Args:
    objective: What to do.
    tokens: int32 `[n, T]`.
    segments: The documents or chunks of each row.
    draw: The counters of these rows.
    vocabulary: Special tokens and word starts.
    progress: Part of the run that is done, 0 to 1.
  """
  at = np.arange(tokens.shape[1], dtype=np.int32)
  k_end, suffix = _attention_end(objective, segments, draw, at)
  inputs, chosen = tokens, np.zeros(tokens.shape, bool)
  ratio = objective.ratio_at(progress)
  if ratio > 0:
    chosen, unit = _choose(objective, ratio, tokens, draw, vocabulary)
    inputs = _replace(objective, tokens, chosen, unit, draw, vocabulary)
  everything = np.ones(tokens.shape, bool)
  predicted = {"all": everything, "masked": chosen, "suffix": suffix}[
    objective.predict
  ]
  if vocabulary.pad_id is not None:
    predicted = predicted & (tokens != vocabulary.pad_id)
  if objective.shift:  # a segment's first token has nothing before it
    predicted = predicted & (at - segments.start >= objective.shift)
  return Corrupted(inputs, segments.start, k_end, predicted)


def _attention_end(objective, segments, draw, at):
  """Returns k_end, and which tokens lie after the prefix (or None)."""
  if objective.attention == "bidirectional":
    return segments.end, None
  own_end = np.broadcast_to(at + 1, segments.end.shape)
  if objective.attention == "causal":
    return own_end, None
  # One draw for a segment, that of its first token.
  share = np.take_along_axis(draw.uniform("prefix", at), segments.start, axis=1)
  length = (share * (segments.end - segments.start)).astype(np.int32)
  prefix_end = segments.start + length
  return np.maximum(own_end, prefix_end), at >= prefix_end


def _choose(objective, ratio, tokens, draw, vocabulary):
  """Chooses tokens to hide.

  Returns:
    Which are chosen, bool `[n, T]`, and for each the position that its unit
    takes its draws from, int `[n, T]` (None where that is its own).
  """
  at = np.arange(tokens.shape[1])
  ordinary = ~vocabulary.special[tokens]
  if objective.unit == "span":
    chosen, unit = _spans(objective, ratio, draw, len(at))
    return chosen & ordinary, unit
  u = draw.uniform("choose", at)
  unit = None
  if objective.unit == "word":
    # A special token ends the word before it.
    begins = vocabulary.word_start[tokens] | ~ordinary
    begins[:, 1:] |= ~ordinary[:, :-1]
    unit = np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    u = np.take_along_axis(u, unit, axis=1)
  return (u < ratio) & ordinary, unit


def _spans(objective: Objective, ratio: float, draw: Draw, length: int):
  """Chooses spans; a span that begins inside another one cuts it off.

  Spans may begin before the row, so that its first tokens are as likely to
  be chosen as any other.
  """
  law = objective.span_lengths, objective.span_length
  lead = objective.span_length - 1  # places before the row
  at = np.arange(length + lead)
  # Independent coins: how far apart spans begin is geometric.
  begins = draw.uniform("choose", at) < _span_rate(ratio, *law)
  # A span is longer than k with the k-th of these probabilities.
  longer = 1 - np.cumsum(_span_shares(*law)[:-1])
  u = 1 - draw.uniform("span", at)
  lengths = 1 + np.searchsorted(-longer, -u, side="left")
  # The last begin up to each place, and how far that span reaches.
  begin = np.maximum.accumulate(np.where(begins, at, -1), axis=1)
  reach = np.take_along_axis(lengths, np.maximum(begin, 0), axis=1)
  chosen = (begin >= 0) & (at - begin < reach)
  # A span is one unit: its fate is drawn at its begin.
  return chosen[:, lead:], np.maximum(begin, 0)[:, lead:]


def _span_shares(law: str, longest: int) -> np.ndarray:
  """Returns how often spans have the lengths 1 to `longest`."""
  ratio = 1.0 if law == "uniform" else 2 / 3
  shares = ratio ** np.arange(longest)
  return shares / shares.sum()


@functools.lru_cache
def _span_rate(ratio: float, law: str, longest: int) -> float:
  """Returns how often spans must begin for a share `ratio` to be covered.

  A token at distance k from the last begin is covered if that span is longer
  than k, so the share is the sum over k of p (1 - p)^k P(length > k), which
  grows with p.
  """
  k = np.arange(longest)
  shares = _span_shares(law, longest)
  longer = np.cumsum(shares[::-1])[::-1]
  low, high = 0.0, 1.0
  for _ in range(60):  # bisection, down to the last bits of a float
    p = (low + high) / 2
    covered = np.sum(p * (1 - p) ** k * longer)
    low, high = (p, high) if covered < ratio else (low, p)
  return high


def _replace(objective, tokens, chosen, unit, draw, vocabulary):
  """Gives each chosen token its fate: `<mask>`, a random token, or itself."""
  if objective.mask_token >= 1:
    return np.where(chosen, np.int32(vocabulary.mask_id), tokens)
  # The draws are few, so they are made for the chosen ones alone. A unit's
  # tokens share their fate, but each has a replacement of its own.
  row, at = np.nonzero(chosen)
  rows = draw.rows[row, 0]
  source = at if unit is None else unit[row, at]
  key = (draw.seed, _PURPOSES.index("fate"), draw.step, rows, source)
  fate = hashing.uniform(*key)
  key = (draw.seed, _PURPOSES.index("replacement"), draw.step, rows, at)
  ordinary = vocabulary.ordinary
  random = ordinary[hashing.bits(*key) % np.uint32(len(ordinary))]
  out = tokens.copy()
  changed = np.where(
    fate < objective.mask_token + objective.random_token, random, tokens[chosen]
  )
  if objective.mask_token > 0:
    changed = np.where(fate < objective.mask_token, vocabulary.mask_id, changed)
  out[row, at] = changed
  return out
