"""Corruption: rows of tokens as an objective shows them to the model.

Every draw is a hash of (seed, purpose, step, row, position). So any process
makes any row by itself, and a setting changes only the draws of its purpose.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from antlm_jax import hashing
from antlm_jax.objectives.objective import Objective

CYCLE = 8  # visits of a text after which its tokens get another random order
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, lie evenly in [0, 1]
# An index in this list is a counter of the draws: only append to it.
_PURPOSES = "choose fate replacement span prefix turn order tile ratio middle"
_PURPOSES = _PURPOSES.split()


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """Facts about a tokenizer that objectives need."""

  mask_id: int | None  # id of `<mask>`
  pad_id: int | None  # id of `<pad>`
  eos_id: int | None  # id of the token that ends a document
  special: np.ndarray  # whether each token is special, bool `[V]`
  word_start: np.ndarray  # whether each token begins a word, bool `[V]`
  # Place of each token when sorted by frequency, the rarest last, over V:
  # float64 `[V]`. Only needed if an objective has a `frequency_power`.
  rank: np.ndarray | None = None

  @functools.cached_property
  def ordinary(self) -> np.ndarray:
    """Ids of the tokens that are not special."""
    return np.flatnonzero(~self.special).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Draw:
  """The counters behind the randomness of some rows of one step."""

  seed: int  # the run's seed
  step: int
  rows: np.ndarray  # place of each row in the step's batch, int64 `[n, 1]`
  # Number of each prepared row, and of earlier visits to it, int64 `[n, 2]`;
  # None: the place, for the first time.
  texts: np.ndarray | None = None

  def of(self, some: np.ndarray) -> "Draw":
    """Returns the draws of some of the rows, by their indices or a mask."""
    texts = None if self.texts is None else self.texts[some]
    return Draw(self.seed, self.step, self.rows[some], texts)

  def uniform(self, purpose: str, positions: np.ndarray) -> np.ndarray:
    """Returns float64 in [0, 1), of the shape of rows x positions."""
    return hashing.uniform(*self._counters(purpose), positions)

  def bits(self, purpose: str, positions: np.ndarray) -> np.ndarray:
    """Returns uniform uint32, of the shape of rows x positions."""
    return hashing.bits(*self._counters(purpose), positions)

  def _counters(self, purpose: str) -> tuple:
    return self.seed, _PURPOSES.index(purpose), self.step, self.rows

  def of_texts(self) -> tuple["Draw", np.ndarray]:
    """Returns draws that stay for `CYCLE` visits, and the visit's number."""
    texts = self.texts
    if texts is None:
      texts = np.concatenate([self.rows, np.zeros_like(self.rows)], axis=1)
    cycle, visit = np.divmod(texts[:, 1:], CYCLE)
    return Draw(self.seed, cycle, texts[:, :1]), visit


class Corrupted(NamedTuple):
  """Rows as an objective shows them to the model."""

  tokens: np.ndarray  # tokens to be predicted, int32 `[n, T]`
  inputs: np.ndarray  # tokens that the model sees, int32 `[n, T]`
  k_start: np.ndarray  # first key that each position sees, int32 `[n, T]`
  k_end: np.ndarray  # one past the last key, int32 `[n, T]`
  predicted: np.ndarray  # whether each token is a target, bool `[n, T]`
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
    at = np.arange(1, length, dtype=np.int32)
    later[:, :-1] = np.where(starts[:, 1:], at, length)
    end = np.minimum.accumulate(later[:, ::-1], axis=1)[:, ::-1]
    return cls(_latest(starts).astype(np.int32), end)

  @classmethod
  def whole(cls, n: int, length: int) -> "Segments":
    """Returns one segment per row."""
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

  The tokens are int32 `[n, T]`, and the segments their documents or chunks.
  `progress` is the part of the run that is done, 0 to 1.
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
    maskable = ~vocabulary.special[tokens]
    if objective.mask_ends and vocabulary.eos_id is not None:
      # But not an end token that is a document's first.
      maskable |= (tokens == vocabulary.eos_id) & (at > segments.start)
    chosen, unit = _choose(objective, own, tokens, maskable, draw, vocabulary)
    inputs = _replace(objective, tokens, chosen, unit, draw, vocabulary)
  targets = {"all": np.ones_like(chosen), "masked": chosen, "suffix": suffix}
  predicted = targets[objective.predict]
  for never in (vocabulary.pad_id, vocabulary.mask_id):
    if never is not None:
      predicted = predicted & (tokens != never)
  if objective.shift:  # a segment's first token has none before it
    predicted = predicted & (at - segments.start >= objective.shift)
  scale = np.float32(1 / ratio if objective.per_ratio else 1)
  scale = np.broadcast_to(scale, tokens.shape)
  return Corrupted(tokens, inputs, segments.start, k_end, predicted, scale)


def _middle_last(objective, tokens, segments, draw, vocabulary) -> np.ndarray:
  """Puts the middle of some documents last; see `Objective.middle_rate`."""
  at = np.arange(tokens.shape[1])
  special = vocabulary.special[tokens]
  # A document's text is a run of ordinary tokens, in any packing.
  begins = (at == segments.start) | special
  begins[:, 1:] |= special[:, :-1]
  begins = np.flatnonzero(begins)  # from here on, rows are one after the other
  ends = np.append(begins[1:], tokens.size)
  draws = draw.uniform("middle", at).reshape(-1)
  taken = (draws[begins] < objective.middle_rate) & (ends - begins >= 4)
  out = tokens.reshape(-1).copy()
  mask = np.array([vocabulary.mask_id], np.int32)
  for begin, end in zip(begins[taken], ends[taken], strict=True):
    text = out[begin : end - 2]  # the last two tokens make room for the masks
    _, one, other, order = draws[begin : begin + 4]
    first, second = sorted(int(u * (len(text) + 1)) for u in (one, other))
    prefix, middle, suffix = text[:first], text[first:second], text[second:]
    if order < 0.5:
      parts = mask, suffix, mask, prefix, middle  # SPM
    else:
      parts = prefix, mask, suffix, mask, middle  # PSM
    out[begin:end] = np.concatenate(parts)
  return out.reshape(tokens.shape)


def _ratios(objective, segments, draw: Draw, progress: float) -> np.ndarray:
  """Returns the share chosen of each token, float64 `[n or 1, T or 1]`."""
  low = objective.ratio_at(progress)
  if objective.mask_ratio_high is None:
    return np.full((1, 1), low)
  if objective.ratio_of_blocks:  # a block draws as its first token does
    u = draw.uniform("ratio", np.arange(segments.start.shape[1]))
    u = np.take_along_axis(u, _block_begin(objective, segments), axis=1)
  else:
    # One draw for the step, and a golden section more for each row: rows spread
    # evenly, so that a step's loss varies less than with a draw for each row.
    first = dataclasses.replace(draw, rows=np.zeros((1, 1), np.int64))
    u = first.uniform("ratio", np.zeros(1, int)) + draw.rows * _GOLDEN
  return low + (objective.mask_ratio_high - low) * (u % 1)


def _by_frequency(objective, ratio, tokens, vocabulary) -> np.ndarray:
  """Returns the share chosen of each token; a row's mean share is `ratio`."""
  among = {"axis": 1, "keepdims": True, "where": ~vocabulary.special[tokens]}
  rank = vocabulary.rank[tokens]
  low, high = rank.min(initial=1, **among), rank.max(initial=0, **among)
  rank = np.clip((rank - low) / np.maximum(high - low, 1e-9), 0, 1)
  weight = rank**objective.frequency_power
  count = np.maximum(1, np.sum(np.ones_like(rank), **among))
  mean = weight.sum(**among) / count
  # A mean that is too high is scaled towards 0, one that is too low towards 1.
  lower = weight * ratio / np.maximum(mean, 1e-9)
  higher = 1 - (1 - weight) * (1 - ratio) / np.maximum(1 - mean, 1e-9)
  return np.where(mean > ratio, lower, higher)


def _attention_end(objective, segments, draw, at):
  """Returns k_end, and which tokens are after the prefix (or None)."""
  if objective.attention == "bidirectional":
    return segments.end, None
  if objective.attention == "block":
    end = _block_begin(objective, segments) + np.int32(objective.block_length)
    return np.minimum(end, segments.end), None
  own_end = np.broadcast_to(at + 1, segments.end.shape)
  if objective.attention == "causal":
    return own_end, None
  # A segment draws as its first token does.
  share = np.take_along_axis(draw.uniform("prefix", at), segments.start, axis=1)
  length = (share * (segments.end - segments.start)).astype(np.int32)
  prefix_end = segments.start + length
  return np.maximum(own_end, prefix_end), at >= prefix_end


def _block_begin(objective, segments) -> np.ndarray:
  """Returns where the block of each token begins, int32 `[n, T]`."""
  at = np.arange(segments.start.shape[1], dtype=np.int32)
  return at - (at - segments.start) % np.int32(objective.block_length)


def _choose(objective, ratio, tokens, maskable, draw, vocabulary):
  """Returns which tokens are chosen, and the position whose draws each uses."""
  at = np.arange(tokens.shape[1])
  coins = objective.choice == "coin"
  if coins and objective.unit == "span":
    chosen, unit = _spans(objective, ratio, draw, len(at))
    return chosen & maskable, unit
  visit = 0
  if objective.choice == "covering":
    draw, visit = draw.of_texts()
  unit = np.broadcast_to(at, tokens.shape)
  if objective.unit == "word":
    special = vocabulary.special[tokens]
    # A special token ends the word before it.
    begins = vocabulary.word_start[tokens] | special
    begins[:, 1:] |= special[:, :-1]
    unit = _latest(begins)
  elif objective.unit == "span":
    unit = _tiles(objective, draw, len(at))
  if not coins:
    return _in_turn(objective, ratio, unit, maskable, draw, visit), unit
  u = draw.uniform("choose", at)
  if objective.unit == "word":
    u = np.take_along_axis(u, unit, axis=1)
  return (u < ratio) & maskable, unit


def _latest(begins: np.ndarray) -> np.ndarray:
  """Returns the last begin up to each place; places before it have 0."""
  at = np.arange(begins.shape[1])
  return np.maximum.accumulate(np.where(begins, at, 0), axis=1)


def _in_turn(objective, ratio, unit, maskable, draw, visit) -> np.ndarray:
  """Fills each row's share with units in random order (`Objective.choice`)."""
  # A row's units lie in random order around a circle as long as its maskable
  # tokens. The chosen units begin in an arc of the share's length, which begins
  # at a random place: all tokens are as likely. With `covering` a text keeps
  # order and place for `CYCLE` visits, and each arc begins a golden section
  # after the one before. Such arcs cover the circle evenly after any number of
  # visits, also while the ratio changes.
  at = np.arange(unit.shape[1])
  around = np.maximum(maskable.sum(axis=1, keepdims=True), 1)
  length = ratio * around
  if objective.choice == "binomial":
    heads = (draw.uniform("choose", at) < ratio) & maskable
    length = heads.sum(axis=1, keepdims=True)
  place = _places_in_random_order(unit, maskable, draw)
  begin = (draw.uniform("turn", at[:1]) + visit * _GOLDEN) % 1
  return ((place - begin * around) % around < length) & maskable


def _places_in_random_order(unit, maskable, draw) -> np.ndarray:
  """Returns how many maskable tokens are before each token's unit, `[n, T]`."""
  draws = draw.uniform("order", np.arange(unit.shape[1]))
  # A unit draws as its first token does, so that its tokens stay together.
  draws = np.take_along_axis(draws, unit, axis=1)
  order = np.argsort(draws, axis=1, kind="stable")
  counted = np.take_along_axis(maskable, order, axis=1)
  before = np.empty(unit.shape, np.int64)
  np.put_along_axis(before, order, np.cumsum(counted, axis=1) - counted, axis=1)
  return np.take_along_axis(before, unit, axis=1)


def _tiles(objective: Objective, draw: Draw, length: int) -> np.ndarray:
  """Cuts rows into spans; returns where the span of each token begins."""
  shares = np.cumsum(objective.span_shares)[:-1]
  u = draw.uniform("tile", np.arange(length))
  sizes = 1 + np.searchsorted(shares, u, side="right")
  begins = np.cumsum(sizes, axis=1) - sizes
  row, span = np.nonzero(begins < length)
  is_begin = np.zeros((len(draw.rows), length), bool)
  is_begin[row, begins[row, span]] = True
  return _latest(is_begin)


def _spans(objective: Objective, ratio, draw: Draw, length: int):
  """Chooses spans by coins; a span that begins inside another cuts it off."""
  shares = objective.span_shares
  # Spans may begin before the row, so that its first tokens are as likely to be
  # chosen as any other.
  lead = objective.span_length - 1
  at = np.arange(length + lead)
  begins = draw.uniform("choose", at) < _span_rate(ratio, shares)
  # The k-th of these is the probability that a span is longer than k.
  longer = 1 - np.cumsum(shares[:-1])
  u = 1 - draw.uniform("span", at)
  lengths = 1 + np.searchsorted(-longer, -u, side="left")
  # The last begin up to each place, and the length of that span.
  begin = np.maximum.accumulate(np.where(begins, at, -1), axis=1)
  reach = np.take_along_axis(lengths, np.maximum(begin, 0), axis=1)
  chosen = (begin >= 0) & (at - begin < reach)
  return chosen[:, lead:], np.maximum(begin, 0)[:, lead:]


def _span_rate(ratio: np.ndarray, shares: np.ndarray) -> np.ndarray:
  """Returns how often spans must begin so that they cover `ratio`, `[n, 1]`."""
  # A token at distance k from the last begin is covered if that span is longer
  # than k. So the covered share is the sum over k of p (1 - p)^k P(length > k),
  # which grows with p.
  k = np.arange(len(shares))
  longer = np.cumsum(shares[::-1])[::-1]
  low, high = np.zeros(ratio.shape), np.ones(ratio.shape)
  for _ in range(60):  # bisection, down to the last bits of a float
    p = (low + high) / 2
    less = np.sum(p * (1 - p) ** k * longer, axis=1, keepdims=True) < ratio
    low, high = np.where(less, p, low), np.where(less, high, p)
  return high


def _replace(objective, tokens, chosen, unit, draw, vocabulary):
  """Makes each chosen token `<mask>` or a random token, or leaves it."""
  if objective.mask_token >= 1:
    return np.where(chosen, np.int32(vocabulary.mask_id), tokens)
  # Only the chosen tokens draw. A unit's tokens share their fate, but each has
  # a random token of its own.
  row, at = np.nonzero(chosen)
  draw = Draw(draw.seed, draw.step, draw.rows[row, 0])
  fate = draw.uniform("fate", unit[row, at])
  ordinary = vocabulary.ordinary
  random = draw.bits("replacement", at) % np.uint32(len(ordinary))
  is_changed = fate < objective.mask_token + objective.random_token
  changed = np.where(is_changed, ordinary[random], tokens[chosen])
  if objective.mask_token > 0:
    changed = np.where(fate < objective.mask_token, vocabulary.mask_id, changed)
  out = tokens.copy()
  out[row, at] = changed
  return out
