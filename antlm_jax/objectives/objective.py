"""Objectives as values: inputs, attention mask and targets.

`OBJECTIVES` is a table of them, and `config.objectives` may add more. Neither
the model nor the train step knows which objective a batch has. An objective
with its own settings or corruption is a subclass that `KINDS` has.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.objectives.corruption import (
  Corrupted,
  Draw,
  Segments,
  Vocabulary,
  latest_begins,
)
from antlm_jax.objectives.curriculum import NAME
from antlm_jax.settings import Registry, Section, setting

KINDS = Registry("objective", "kind")
ATTENTION = ("causal", "bidirectional", "prefix", "block")
PREDICT = ("all", "masked", "suffix")
UNITS = ("token", "word", "span")
CHOICES = ("coin", "binomial", "exact", "covering")


_GOLDEN = (5**0.5 - 1) / 2  # multiples of it, modulo 1, lie evenly in [0, 1]


@KINDS.register("")
@dataclasses.dataclass(frozen=True)
class Objective(Section):
  """One training objective.

  A position sees keys of its own document. With `bidirectional` attention it
  sees all of them, and with `causal` those up to itself. With `prefix` it also
  sees all of a prefix of random length. With `block` it sees those up to the
  end of its block. This is block diffusion (arXiv 2503.09573) on a single
  canvas: a block sees the blocks before it as they are masked.

  The targets are `all` tokens, the `masked` tokens, or the `suffix` after the
  prefix. Special tokens are never masked, and masks are never targets.

  Tokens are masked in units, and all tokens of a unit have the same fate. Units
  are chosen

  - by one `coin` for each unit;
  - until their tokens are as many as coins for each token give (`binomial`,
    LTG-BERT);
  - until each row has its share (`exact`);
  - until each row has its share, by turns (`covering`): within eight visits of
    a row, all tokens are chosen about equally often. GPT-BERT's code counts how
    often each token was chosen. This choice needs no counts.

  With `mask_ratio_high`, each row draws its own share between `mask_ratio` and
  this one, and the rows of a step spread evenly over that range. With `block`
  attention each block draws its own (as in 2503.09573 and in MaxText): the
  blocks before it are then often nearly whole, as in generation.
  """

  name: str = setting()  # in logs and metrics
  attention: str = setting(
    "causal", "Tokens that a token can attend to", choices=ATTENTION
  )
  block_length: int = setting(
    16,
    "Number of tokens in a block, from the document's start",
    least=1,
    most=2**16,
  )
  shift: int = setting(
    1, "Distance from an output to the token that it predicts", choices=(0, 1)
  )
  predict: str = setting("all", "Tokens to predict", choices=PREDICT)
  mask_ratio: float = setting(
    0.0, "Share of the tokens to mask", least=0, most=1
  )
  mask_ends: bool = setting(False, "Also mask the end tokens of documents")
  mask_ratio_end: float | None = setting(
    None,
    "Value of mask_ratio at the end of the run, reached linearly",
    least=0,
    most=1,
  )
  mask_ratio_high: float | None = setting(
    None, "Highest mask_ratio, if each row draws its own", least=0, most=1
  )
  mask_token: float = setting(
    0.8, "Share of the masked tokens that become <mask>", least=0, most=1
  )
  random_token: float = setting(
    0.1,
    "Share of the masked tokens that become random; others stay",
    least=0,
    most=1,
  )
  unit: str = setting("token", "Tokens masked together", choices=UNITS)
  choice: str = setting(
    "coin", "Method that chooses the units", choices=CHOICES
  )
  span_length: int = setting(
    3,
    "Longest span, in tokens; 3 in GPT-BERT, 9 in LTG-BERT",
    least=1,
    most=2**16,
  )
  # geometric: each length two thirds as often as the one before (LTG-BERT).
  span_lengths: str = setting(
    "uniform",
    "Distribution of the span lengths",
    choices=("uniform", "geometric"),
  )
  weight: float = setting(1.0, "Weight of a target in the loss", over=0)
  # The expected loss of a row or block is then that of all its tokens.
  per_ratio: bool = setting(
    False, "Divide the weight by the masked share of the row or block"
  )

  @property
  def prefix(self) -> str:
    """The text before a setting's name in errors."""
    return f"objective {self.name!r}: "

  def __post_init__(self):
    super().__post_init__()
    # Metrics have names such as eval/clm/loss.
    if not self.name.strip() or "/" in self.name:
      self.fail("name", "a name without slashes")
    if self.mask_token + self.random_token > 1 + 1e-6:
      self.fail("random_token", "at most 1 - mask_token")
    if self.predict == "suffix" and self.attention != "prefix":
      self.fail("predict", "all or masked: only prefix attention has a suffix")
    if self.mask_ratio_high is not None and self.mask_ratio_end is not None:
      self.fail("mask_ratio_high", "None, as mask_ratio_end needs")
    if self.per_ratio and not (self.predict == "masked" and self.mask_ratio):
      self.fail("per_ratio", "False without masked targets and a mask_ratio")
    if self.predict == "masked" and self.mask_ratio_end == 0:
      self.fail("mask_ratio_end", "over 0, as predict=masked needs")
    if self.ratio_of_blocks:
      why = "as shares of blocks need"
      if self.unit != "token":
        self.fail("unit", f"token, {why}")
      if self.choice != "coin":
        self.fail("choice", f"coin, {why}")
    if self.max_mask_ratio:
      return
    # Without masks, only the attention hides the targets.
    if self.predict == "masked":
      self.fail("mask_ratio", "over 0, as predict=masked needs")
    if self.shift == 0:
      self.fail("shift", "1: every token would be predicted from itself")
    if self.attention in ("bidirectional", "block"):
      self.fail("attention", "causal or prefix: every target would be seen")
    if self.attention == "prefix" and self.predict != "suffix":
      self.fail("predict", "suffix: the prefix's targets would be seen")

  def fail(self, field: str, expected: str) -> NoReturn:
    """Raises a UserError that names a setting and the value expected."""
    raise UserError(
      f"objective {self.name!r}: {field}={getattr(self, field)!r} is not"
      f" {expected}"
    )

  @property
  def left_to_right(self) -> bool:
    """Whether tokens are predicted from those before them alone."""
    return self.attention in ("causal", "prefix")

  @property
  def ratio_of_blocks(self) -> bool:
    """Whether each block draws its own share."""
    return self.attention == "block" and self.mask_ratio_high is not None

  @property
  def max_mask_ratio(self) -> float:
    """Largest share that is masked at any time of the run."""
    ratios = self.mask_ratio_end, self.mask_ratio_high
    return max(self.mask_ratio, *(ratio or 0.0 for ratio in ratios))

  @property
  def needs_mask_token(self) -> bool:
    """Whether inputs can have a `<mask>`."""
    return self.max_mask_ratio > 0 and self.mask_token > 0

  @property
  def max_target_share(self) -> float:
    """Largest expected share of tokens that are targets."""
    return self.max_mask_ratio if self.predict == "masked" else 1.0

  @property
  def span_shares(self) -> np.ndarray:
    """Shares of the spans that have the lengths 1 to `span_length`."""
    ratio = 1.0 if self.span_lengths == "uniform" else 2 / 3
    shares = ratio ** np.arange(self.span_length)
    return shares / shares.sum()

  def clustering(self, word_size: float = 1.0) -> float:
    """Returns the mean size of a chosen token's unit, with a margin for words.

    It is 1 for spans that no coin chooses. `word_size` is a word's mean size.
    """
    if self.unit == "word":
      return word_size
    if self.unit != "span" or self.choice != "coin":
      return 1.0
    sizes = np.arange(1, self.span_length + 1)
    return float(self.span_shares @ sizes**2 / (self.span_shares @ sizes))

  def ratio_at(self, progress: float) -> float:
    """Returns the mask ratio at a point of the run, `progress` from 0 to 1."""
    begin = self.mask_ratio
    end = self.mask_ratio_end
    return begin if end is None else begin + (end - begin) * progress

  def corrupt(
    self,
    tokens: np.ndarray,
    segments: Segments,
    draw: Draw,
    vocabulary: Vocabulary,
    progress: float = 0.0,
  ) -> Corrupted:
    """Returns the rows' inputs, attention mask and targets.

    It is a pure function of its arguments. The tokens are int32 `[n, T]`, and
    the segments their documents or chunks. `progress` is the part of the run
    that is done, 0 to 1.
    """
    position = np.arange(tokens.shape[1], dtype=np.int32)
    k_end, suffix = _attention_end(self, segments, draw, position)
    inputs = tokens
    chosen = np.zeros(tokens.shape, bool)
    ratio = _ratios(self, segments, draw, progress)
    if np.any(ratio > 0):
      maskable = ~vocabulary.special[tokens]
      if self.mask_ends and vocabulary.eos_id is not None:
        # But not an end token that is a document's first.
        maskable |= (tokens == vocabulary.eos_id) & (position > segments.start)
      choose = _CHOOSE[self.choice]
      # All tokens of a unit use the draws of the position where it begins.
      chosen, unit_begin = choose(
        self, ratio, tokens, maskable, draw, vocabulary
      )
      inputs = _replace_tokens(
        self, tokens, chosen, unit_begin, draw, vocabulary
      )
    predicted_by_kind = {
      "all": np.ones_like(chosen),
      "masked": chosen,
      "suffix": suffix,
    }
    predicted = predicted_by_kind[self.predict]
    for token_id in (vocabulary.pad_id, vocabulary.mask_id):
      if token_id is not None:
        predicted = predicted & (tokens != token_id)
    if self.shift:
      # A segment's first token has no output before it.
      predicted = predicted & (position - segments.start >= self.shift)
    scale = np.float32(1 / ratio if self.per_ratio else 1)
    scale = np.broadcast_to(scale, tokens.shape)
    return Corrupted(
      targets=tokens,
      inputs=inputs,
      k_start=segments.start,
      k_end=k_end,
      predicted=predicted,
      scale=scale,
    )


class _Letters(dict[str, Objective]):
  """Objectives by letter. An item that is set adds an objective.

  Setting raises a UserError for a letter of this file, whose meaning stays.
  """

  def __setitem__(self, letter: str, objective: Objective) -> None:
    built_in = _BUILT_IN.get(letter, objective)
    if objective != built_in:
      raise UserError(
        f"OBJECTIVES[{letter!r}] is {built_in.name}: give yours another letter,"
        f" or change settings such as objectives.{letter}.mask_ratio"
      )
    super().__setitem__(letter, objective)


_BUILT_IN: dict[str, Objective] = {
  # Next-token prediction.
  "C": Objective("clm"),
  # BERT's masked language modeling, predicted in place.
  "M": Objective(
    "mlm", attention="bidirectional", shift=0, predict="masked", mask_ratio=0.15
  ),
  # Masked next-token prediction (arXiv 2410.24159, section 2.1, and LLM2Vec,
  # arXiv 2404.05961): the masked token is predicted one position earlier, so
  # both modes share the head.
  "N": Objective(
    "mntp", attention="bidirectional", predict="masked", mask_ratio=0.15
  ),
  # Mask-enhanced autoregressive prediction (arXiv 2502.07490): next-token
  # prediction with a small share of the inputs masked.
  "E": Objective("meap", mask_ratio=0.15, mask_token=1.0, random_token=0.0),
  # Masked diffusion (arXiv 2406.07524, equation 10). Its loss is an upper bound
  # of the nats per token, comparable with CLM's, so ends are predicted too.
  # Tokens are predicted one position before, as in dual language models (arXiv
  # 2512.14549); shift=0 predicts in place.
  "D": Objective(
    "diffusion",
    attention="bidirectional",
    predict="masked",
    mask_ratio=0.001,
    mask_ends=True,
    mask_ratio_high=1.0,
    mask_token=1.0,
    random_token=0.0,
    per_ratio=True,
  ),
  # Prefix language modeling: the prefix has a random length.
  "P": Objective("prefix_lm", attention="prefix", predict="suffix"),
}
OBJECTIVES = _Letters(_BUILT_IN)


def with_ratios(
  objectives: Mapping[str, Objective], text: str
) -> dict[str, Objective]:
  """Adds the objectives of a letter and a percentage, such as M30, in a text.

  Rows of the letter must not draw their own share.
  """
  objectives = dict(objectives)
  for name in re.findall(NAME, text):
    letter, percent = re.fullmatch("(.*?)([0-9]*)", name).groups()
    base = objectives.get(letter)
    if name in objectives or not percent or not base or int(percent) > 100:
      continue
    if base.mask_ratio and base.mask_ratio_high is None:
      objectives[name] = dataclasses.replace(
        base,
        name=f"{base.name}{percent}",
        mask_ratio=int(percent) / 100,
        mask_ratio_end=None,
      )
  return objectives


# ------------------------------------------------------------------ corruption


def _ratios(objective, segments, draw: Draw, progress: float) -> np.ndarray:
  """Returns the share chosen of each token, float64 `[n or 1, T or 1]`."""
  low = objective.ratio_at(progress)
  if objective.mask_ratio_high is None:
    return np.full((1, 1), low)
  if objective.ratio_of_blocks:
    draws = _draws_of_blocks(objective, segments, draw)
  else:
    draws = _draws_of_rows(draw)
  return low + (objective.mask_ratio_high - low) * (draws % 1)


def _draws_of_blocks(objective, segments, draw: Draw) -> np.ndarray:
  """Returns a draw for each block, which all its tokens have, `[n, T]`."""
  draws = draw.uniform("ratio", np.arange(segments.start.shape[1]))
  # A block draws as its first token does.
  begin = _block_begin(objective, segments)
  return np.take_along_axis(draws, begin, axis=1)


def _draws_of_rows(draw: Draw) -> np.ndarray:
  """Returns numbers that spread evenly over the rows, modulo 1, `[n, 1]`."""
  # One draw for the step, and a golden section more for each row. Shares then
  # spread evenly, and the loss varies less than with a draw for each row. Only
  # the objective's own rows count: `Phase.divide_batch` chooses them by the
  # golden section, too, so their places would spread over a part alone.
  step_draw = dataclasses.replace(draw, slots=np.zeros((1, 1), np.int64))
  ranks = draw.slots if draw.ranks is None else draw.ranks
  return step_draw.uniform("ratio", np.zeros(1, int)) + ranks * _GOLDEN


def _attention_end(objective, segments, draw, position):
  """Returns k_end, and which tokens are after the prefix (or None)."""
  if objective.attention == "bidirectional":
    return segments.end, None
  if objective.attention == "block":
    end = _block_begin(objective, segments) + np.int32(objective.block_length)
    return np.minimum(end, segments.end), None
  causal_end = np.broadcast_to(position + 1, segments.end.shape)
  if objective.attention == "causal":
    return causal_end, None
  # A segment draws as its first token does.
  draws = draw.uniform("prefix", position)
  share = np.take_along_axis(draws, segments.start, axis=1)
  length = (share * (segments.end - segments.start)).astype(np.int32)
  prefix_end = segments.start + length
  return np.maximum(causal_end, prefix_end), position >= prefix_end


def _block_begin(objective, segments) -> np.ndarray:
  """Returns where the block of each token begins, int32 `[n, T]`."""
  position = np.arange(segments.start.shape[1], dtype=np.int32)
  place = position - segments.start
  return position - place % np.int32(objective.block_length)


# Each method of `CHOICES` returns which tokens are chosen, bool `[n, T]`, and
# where the unit of each token begins: the position whose draws it uses.


def _choose_by_coins(objective, ratio, tokens, maskable, draw, vocabulary):
  """Tosses one coin for each unit."""
  position = np.arange(tokens.shape[1])
  if objective.unit == "span":
    chosen, unit_begin = _random_spans(objective, ratio, draw, len(position))
    return chosen & maskable, unit_begin
  unit_begin = np.broadcast_to(position, tokens.shape)
  coins = draw.uniform("choose", position)
  if objective.unit == "word":  # its tokens have the coin of the first
    unit_begin = vocabulary.words(tokens)
    coins = np.take_along_axis(coins, unit_begin, axis=1)
  return (coins < ratio) & maskable, unit_begin


def _choose_binomial(objective, ratio, tokens, maskable, draw, vocabulary):
  """Chooses as many tokens, in units, as coins for each token give."""
  unit_begin = _unit_begins(objective, tokens, draw, vocabulary)
  coins = draw.uniform("choose", np.arange(tokens.shape[1]))
  count = ((coins < ratio) & maskable).sum(axis=1, keepdims=True)
  return _fill_arc(count, unit_begin, maskable, draw), unit_begin


def _choose_exact(objective, ratio, tokens, maskable, draw, vocabulary):
  """Chooses the share of each row."""
  unit_begin = _unit_begins(objective, tokens, draw, vocabulary)
  count = ratio * _maskable_tokens(maskable)
  return _fill_arc(count, unit_begin, maskable, draw), unit_begin


def _choose_covering(objective, ratio, tokens, maskable, draw, vocabulary):
  """Chooses the share of each row, and other tokens at each visit to it."""
  # A text keeps its units, their order and the first arc for `CYCLE` visits,
  # and each arc begins a golden section after the one before. Such arcs cover
  # the circle evenly after any number of visits, also while the ratio changes.
  draw, visit = draw.by_row()
  unit_begin = _unit_begins(objective, tokens, draw, vocabulary)
  count = ratio * _maskable_tokens(maskable)
  chosen = _fill_arc(count, unit_begin, maskable, draw, visit * _GOLDEN)
  return chosen, unit_begin


_CHOOSE = {
  "coin": _choose_by_coins,
  "binomial": _choose_binomial,
  "exact": _choose_exact,
  "covering": _choose_covering,
}


def _unit_begins(objective, tokens, draw, vocabulary) -> np.ndarray:
  """Returns where the unit of each token begins, `[n, T]`."""
  if objective.unit == "word":
    return vocabulary.words(tokens)
  if objective.unit == "span":
    return _tile_spans(objective, draw, tokens.shape[1])
  return np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)


def _maskable_tokens(maskable: np.ndarray) -> np.ndarray:
  """Returns the number of maskable tokens in each row, at least 1, `[n, 1]`."""
  return np.maximum(maskable.sum(axis=1, keepdims=True), 1)


def _fill_arc(count, unit_begin, maskable, draw, turn=0) -> np.ndarray:
  """Chooses `count` tokens of each row, in units in random order."""
  # A row's units lie in random order around a circle as long as its maskable
  # tokens. The chosen units begin in an arc of `count` tokens. It begins at a
  # random place, moved by a share `turn` of the circle. So all tokens are as
  # likely.
  around = _maskable_tokens(maskable)
  place = _places_in_random_order(unit_begin, maskable, draw)
  begin = (draw.uniform("turn", np.arange(1)) + turn) % 1
  return ((place - begin * around) % around < count) & maskable


def _places_in_random_order(unit_begin, maskable, draw) -> np.ndarray:
  """Returns how many maskable tokens are before each token's unit, `[n, T]`."""
  draws = draw.uniform("order", np.arange(unit_begin.shape[1]))
  # A unit draws as its first token does, so that its tokens stay together.
  draws = np.take_along_axis(draws, unit_begin, axis=1)
  order = np.argsort(draws, axis=1, kind="stable")
  counted = np.take_along_axis(maskable, order, axis=1)
  before = np.empty(unit_begin.shape, np.int64)
  np.put_along_axis(before, order, np.cumsum(counted, axis=1) - counted, axis=1)
  return np.take_along_axis(before, unit_begin, axis=1)


def _tile_spans(objective: Objective, draw: Draw, length: int) -> np.ndarray:
  """Cuts rows into spans; returns where the span of each token begins."""
  shares = np.cumsum(objective.span_shares)[:-1]
  u = draw.uniform("tile", np.arange(length))
  sizes = 1 + np.searchsorted(shares, u, side="right")
  begins = np.cumsum(sizes, axis=1) - sizes
  row, span = np.nonzero(begins < length)
  is_begin = np.zeros((len(draw.slots), length), bool)
  is_begin[row, begins[row, span]] = True
  return latest_begins(is_begin)


def _random_spans(objective: Objective, ratio, draw: Draw, length: int):
  """Chooses spans by coins; a span that begins inside another cuts it off."""
  shares = objective.span_shares
  # Spans may begin before the row, so that its first tokens are as likely to be
  # chosen as any other.
  lead = objective.span_length - 1
  position = np.arange(length + lead)
  begins = draw.uniform("choose", position) < _span_rate(ratio, shares)
  # The k-th of these is the probability that a span is longer than k.
  longer = 1 - np.cumsum(shares[:-1])
  u = 1 - draw.uniform("span", position)
  lengths = 1 + np.searchsorted(-longer, -u, side="left")
  # The last begin up to each place, and the length of that span.
  begin = np.maximum.accumulate(np.where(begins, position, -1), axis=1)
  reach = np.take_along_axis(lengths, np.maximum(begin, 0), axis=1)
  chosen = (begin >= 0) & (position - begin < reach)
  return chosen[:, lead:], np.maximum(begin, 0)[:, lead:]


def _span_rate(ratio: np.ndarray, shares: np.ndarray) -> np.ndarray:
  """Returns how often spans must begin so that they cover `ratio`, `[n, 1]`."""
  # A token at distance k from the last begin is covered if that span is longer
  # than k. So the covered share is the sum over k of p (1 - p)^k P(length > k),
  # which grows with p.
  k = np.arange(len(shares))
  longer = np.cumsum(shares[::-1])[::-1]
  low = np.zeros(ratio.shape)
  high = np.ones(ratio.shape)
  for _ in range(60):  # bisection, down to the last bits of a float
    p = (low + high) / 2
    less = np.sum(p * (1 - p) ** k * longer, axis=1, keepdims=True) < ratio
    low = np.where(less, p, low)
    high = np.where(less, high, p)
  return high


def _replace_tokens(objective, tokens, chosen, unit_begin, draw, vocabulary):
  """Makes each chosen token `<mask>` or a random token, or leaves it."""
  if objective.mask_token >= 1:
    return np.where(chosen, np.int32(vocabulary.mask_id), tokens)
  # Only the chosen tokens draw. A unit's tokens share their fate, but each has
  # a random token of its own.
  row, position = np.nonzero(chosen)
  draw = Draw(draw.seed, draw.step, draw.slots[row, 0])
  fate = draw.uniform("fate", unit_begin[row, position])
  ordinary = vocabulary.ordinary
  random = draw.bits("replacement", position) % np.uint32(len(ordinary))
  is_changed = fate < objective.mask_token + objective.random_token
  changed = np.where(is_changed, ordinary[random], tokens[chosen])
  if objective.mask_token > 0:
    changed = np.where(fate < objective.mask_token, vocabulary.mask_id, changed)
  out = tokens.copy()
  out[row, position] = changed
  return out
