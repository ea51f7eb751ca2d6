"""Corruption: rows of tokens as an objective shows them to the model.

Every draw is a hash of (seed, purpose, step, row, position): any process makes
any row by itself, and what one setting changes leaves all other draws alone.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from antlm_jax import hashing
from antlm_jax.objectives.objective import Objective


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """What an objective needs to know of a tokenizer."""

  mask_id: int | None  # of `<mask>`
  pad_id: int | None  # of `<pad>`
  eos_id: int | None  # of what ends a document
  special: np.ndarray  # which tokens are special, bool `[V]`
  word_start: np.ndarray  # which tokens begin a word, bool `[V]`
  # Places of the tokens when sorted by frequency, the rarest last, over V:
  # float64 `[V]`, for objectives that choose by it.
  rank: np.ndarray | None = None

  @functools.cached_property
  def ordinary(self) -> np.ndarray:
    """Ids of the tokens that are not special."""
    return np.flatnonzero(~self.special).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Draw:
  """The counters behind the randomness of some rows of one step."""

  seed: int  # the run's
  step: int
  rows: np.ndarray  # place of each row in the step's batch, int64 `[n, 1]`
  # Which of the prepared rows each is, and how often that one came before,
  # int64 `[n, 2]`; by default the place, for the first time.
  texts: np.ndarray | None = None

  def of(self, some: np.ndarray) -> "Draw":
    """Returns those of some of the rows, by their indices or a mask."""
    texts = None if self.texts is None else self.texts[some]
    return Draw(self.seed, self.step, self.rows[some], texts)

  def uniform(self, purpose: str, positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1), `[n, len(positions)]`."""
    return hashing.uniform(
      self.seed, _PURPOSES.index(purpose), self.step, self.rows, positions
    )

  def of_texts(self) -> tuple["Draw", np.ndarray]:
    """Returns draws that stay for `CYCLE` visits, and which visit it is."""
    texts = self.texts
    if texts is None:
      texts = np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1)
    cycle, visit = np.divmod(texts[:, 1:], CYCLE)
    return Draw(self.seed, cycle, texts[:, :1]), visit


# Visits after which a text's tokens take turns in another order.
CYCLE = 8
_TURN = (5**0.5 - 1) / 2  # the golden ratio's inverse
_PURPOSES = (
  "choose",
  "fate",
  "replacement",
  "span",
  "prefix",
  "turn",
  "order",
  "tile",
  "ratio",
  "middle",
)


class Corrupted(NamedTuple):
  """Rows as an objective shows them to the model."""

  tokens: np.ndarray  # what is to be predicted, int32 `[n, T]`
  inputs: np.ndarray  # int32 `[n, T]`
  k_start: np.ndarray  # first key that each position sees, int32 `[n, T]`
  k_end: np.ndarray  # one past the last, int32 `[n, T]`
  predicted: np.ndarray  # whether each token is a target, bool `[n, T]`
  scale: np.ndarray  # what multiplies each target's weight, float32 `[n, T]`


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

  The rows `tokens` are int32 `[n, T]`, `segments` are their documents or
  chunks, and `progress` is the part of the run that is done, 0 to 1.
  """
  at = np.arange(tokens.shape[1], dtype=np.int32)
  if objective.middle_rate:
    tokens = _middle_last(objective, tokens, segments, draw, vocabulary)
  k_end, suffix = _attention_end(objective, segments, draw, at)
  inputs, chosen = tokens, np.zeros(tokens.shape, bool)
  ratio = _ratios(objective, segments, draw, progress)
  if np.any(ratio > 0):
    own = ratio
    if objective.frequency_power:
      own = _by_frequency(objective, ratio, tokens, vocabulary)
    masked = ~vocabulary.special[tokens]
    if objective.mask_ends and vocabulary.eos_id is not None:
      # Not one that stands before a document.
      masked |= (tokens == vocabulary.eos_id) & (at > segments.start)
    chosen, unit = _choose(objective, own, tokens, masked, draw, vocabulary)
    inputs = _replace(objective, tokens, chosen, unit, draw, vocabulary)
  everything = np.ones(tokens.shape, bool)
  predicted = {"all": everything, "masked": chosen, "suffix": suffix}[
    objective.predict
  ]
  for never in (vocabulary.pad_id, vocabulary.mask_id):
    if never is not None:
      predicted = predicted & (tokens != never)
  if objective.shift:  # a segment's first token has nothing before it
    predicted = predicted & (at - segments.start >= objective.shift)
  scale = np.float32(1 / ratio if objective.per_ratio else 1)
  scale = np.broadcast_to(scale, tokens.shape)
  return Corrupted(tokens, inputs, segments.start, k_end, predicted, scale)


def _middle_last(objective, tokens, segments, draw, vocabulary) -> np.ndarray:
  """Puts the middle of some documents last; see `Objective.middle_rate`."""
  at = np.arange(tokens.shape[1], dtype=np.int32)
  special = vocabulary.special[tokens]
  # A document's text is what stands between special tokens, in any packing.
  begins = (at == segments.start) | special
  begins[:, 1:] |= special[:, :-1]
  text = Segments.of(begins)
  length = text.end - text.start - 2
  # A text draws as its first four tokens do; a shorter one stays.
  u = draw.uniform("middle", at)
  rate, one, other, order = (
    np.take_along_axis(u, np.minimum(text.start + k, at[-1]), axis=1)
    for k in range(4)
  )
  cuts = np.sort([(u * (length + 1)).astype(int) for u in (one, other)], axis=0)
  # SPM is PSM without a prefix.
  first, second = np.where(order < 0.5, 0, cuts[0]), cuts[1]
  hole, end = first, first + 1 + length - second  # where the masks stand
  here = at - text.start
  source = np.select(
    [here < hole, here < end],
    [here, here - hole - 1 + second],
    here - end - 1 + first,
  )
  source = np.clip(text.start + source, 0, at[-1])
  moved = np.take_along_axis(tokens, source, axis=1)
  masked = (here == hole) | (here == end)
  moved = np.where(masked, np.int32(vocabulary.mask_id), moved)
  taken = (rate < objective.middle_rate) & (length >= 2) & ~special
  return np.where(taken, moved, tokens)


def _ratios(objective, segments, draw: Draw, progress: float) -> np.ndarray:
  """Returns the share chosen of each token, float64 `[n or 1, T or 1]`."""
  low = objective.ratio_at(progress)
  if objective.mask_ratio_high is None:  # one for all, found once
    return np.full((1, 1), low)
  if objective.ratio_of_blocks:  # a draw for each, that of its first token
    u = draw.uniform("ratio", np.arange(segments.start.shape[1]))
    u = np.take_along_axis(u, _block_begin(objective, segments), axis=1)
  else:
    # One draw for the step, from which its rows go around in golden sections:
    # they spread evenly, so that a step's loss varies less than by a draw each.
    first = dataclasses.replace(draw, rows=np.zeros((1, 1), np.int64))
    u = first.uniform("ratio", np.zeros(1, int)) + draw.rows * _TURN
  return low + (objective.mask_ratio_high - low) * (u % 1)


def _by_frequency(objective, ratio, tokens, vocabulary) -> np.ndarray:
  """Returns the share chosen of each token, `ratio` in the mean of its row."""
  among = {"axis": 1, "keepdims": True, "where": ~vocabulary.special[tokens]}
  rank = vocabulary.rank[tokens]
  low, high = rank.min(initial=1, **among), rank.max(initial=0, **among)
  rank = np.clip((rank - low) / np.maximum(high - low, 1e-9), 0, 1)
  weight = rank**objective.frequency_power
  count = np.maximum(1, np.sum(np.ones_like(rank), **among))
  mean = weight.sum(**among) / count
  # Scaled from 0 where all are too likely, and from 1 where all are too rare.
  return np.where(
    mean > ratio,
    weight * ratio / np.maximum(mean, 1e-9),
    1 - (1 - weight) * (1 - ratio) / np.maximum(1 - mean, 1e-9),
  )


def _attention_end(objective, segments, draw, at):
  """Returns k_end, and which tokens lie after the prefix (or None)."""
  if objective.attention == "bidirectional":
    return segments.end, None
  if objective.attention == "block":
    end = _block_begin(objective, segments) + np.int32(objective.block_length)
    return np.minimum(end, segments.end), None
  own_end = np.broadcast_to(at + 1, segments.end.shape)
  if objective.attention == "causal":
    return own_end, None
  # One draw for a segment, that of its first token.
  share = np.take_along_axis(draw.uniform("prefix", at), segments.start, axis=1)
  length = (share * (segments.end - segments.start)).astype(np.int32)
  prefix_end = segments.start + length
  return np.maximum(own_end, prefix_end), at >= prefix_end


def _block_begin(objective, segments) -> np.ndarray:
  """Returns where the block of each token begins, int32 `[n, T]`."""
  at = np.arange(segments.start.shape[1], dtype=np.int32)
  return at - (at - segments.start) % np.int32(objective.block_length)


def _choose(objective, ratio, tokens, masked, draw, vocabulary):
  """Chooses tokens to hide, of those that may be `masked`, bool `[n, T]`.

  Returns:
    Which are chosen, bool `[n, T]`, and for each the position that its unit
    takes its draws from, int `[n, T]` (None where that is its own).
  """
  at = np.arange(tokens.shape[1])
  if objective.choice != "coin":
    return _in_turn(objective, ratio, tokens, masked, draw, vocabulary)
  if objective.unit == "span":
    chosen, unit = _spans(objective, ratio, draw, len(at))
    return chosen & masked, unit
  u = draw.uniform("choose", at)
  unit = None
  if objective.unit == "word":
    unit = _words(tokens, vocabulary)
    u = np.take_along_axis(u, unit, axis=1)
  return (u < ratio) & masked, unit


def _words(tokens, vocabulary) -> np.ndarray:
  """Returns where the word of each token begins, int `[n, T]`."""
  ordinary = ~vocabulary.special[tokens]
  # A special token ends the word before it.
  begins = vocabulary.word_start[tokens] | ~ordinary
  begins[:, 1:] |= ~ordinary[:, :-1]
  return _latest(begins)


def _latest(begins: np.ndarray) -> np.ndarray:
  """Returns the last begin up to each place; places before it have 0."""
  at = np.arange(begins.shape[1])
  return np.maximum.accumulate(np.where(begins, at, 0), axis=1)


def _in_turn(objective, ratio, tokens, masked, draw, vocabulary):
  """Chooses units around a circle; see `Objective.choice` and `_choose`.

  A row's units stand in a random order, on a circle as long as its tokens that
  may be masked; those are chosen that begin in an arc of the share. A text
  keeps its order for `CYCLE` visits, and each visit's arc begins a golden
  section of the circle after the one before: such points lie evenly however
  many they are, so all are chosen about as often, whatever the ratio is and
  how it changes.
  """
  at = np.arange(tokens.shape[1])
  visit = 0
  if objective.choice == "covering":
    draw, visit = draw.of_texts()
  unit = np.broadcast_to(at, tokens.shape)
  if objective.unit == "word":
    unit = _words(tokens, vocabulary)
  elif objective.unit == "span":
    unit = _tiles(objective, draw, len(at))
  key = np.take_along_axis(draw.uniform("order", at), unit, axis=1)
  order = np.argsort(key, axis=1, kind="stable")
  # How many such tokens stand before each one's unit on the circle.
  before = np.empty(tokens.shape, np.int64)
  counted = np.take_along_axis(masked, order, axis=1)
  np.put_along_axis(before, order, np.cumsum(counted, axis=1) - counted, axis=1)
  begin = np.take_along_axis(before, unit, axis=1)
  around = np.maximum(masked.sum(axis=1, keepdims=True), 1)
  turn = (draw.uniform("turn", at[:1]) + visit * _TURN) % 1
  arc = ratio * around
  if objective.choice == "binomial":
    coins = draw.uniform("choose", at) < ratio
    arc = (coins & masked).sum(axis=1, keepdims=True)
  chosen = (begin - turn * around) % around < arc
  return chosen & masked, unit


def _tiles(objective: Objective, draw: Draw, length: int) -> np.ndarray:
  """Cuts rows into spans; returns where that of each token begins."""
  shares = np.cumsum(objective.span_shares)[:-1]
  u = draw.uniform("tile", np.arange(length))
  sizes = 1 + np.searchsorted(shares, u, side="right")
  begins = np.cumsum(sizes, axis=1) - sizes
  row, span = np.nonzero(begins < length)
  is_begin = np.zeros((len(draw.rows), length), bool)
  is_begin[row, begins[row, span]] = True
  return _latest(is_begin)


def _spans(objective: Objective, ratio, draw: Draw, length: int):
  """Chooses spans; a span that begins inside another one cuts it off.

  Spans may begin before the row, so that its first tokens are as likely to
  be chosen as any other.
  """
  shares = objective.span_shares
  lead = objective.span_length - 1  # places before the row
  at = np.arange(length + lead)
  # Independent coins: how far apart spans begin is geometric.
  begins = draw.uniform("choose", at) < _span_rate(ratio, shares)
  # A span is longer than k with the k-th of these probabilities.
  longer = 1 - np.cumsum(shares[:-1])
  u = 1 - draw.uniform("span", at)
  lengths = 1 + np.searchsorted(-longer, -u, side="left")
  # The last begin up to each place, and how far that span reaches.
  begin = np.maximum.accumulate(np.where(begins, at, -1), axis=1)
  reach = np.take_along_axis(lengths, np.maximum(begin, 0), axis=1)
  chosen = (begin >= 0) & (at - begin < reach)
  # A span is one unit: its fate is drawn at its begin.
  return chosen[:, lead:], np.maximum(begin, 0)[:, lead:]


def _span_rate(ratio: np.ndarray, shares: np.ndarray) -> np.ndarray:
  """Returns how often spans must begin for shares `[n, 1]` to be covered.

  A token at distance k from the last begin is covered if that span is longer
  than k, so the share is the sum over k of p (1 - p)^k P(length > k), which
  grows with p.
  """
  k = np.arange(len(shares))
  longer = np.cumsum(shares[::-1])[::-1]
  low, high = np.zeros(ratio.shape), np.ones(ratio.shape)
  for _ in range(60):  # bisection, down to the last bits of a float
    p = (low + high) / 2
    less = np.sum(p * (1 - p) ** k * longer, axis=1, keepdims=True) < ratio
    low, high = np.where(less, p, low), np.where(less, high, p)
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
