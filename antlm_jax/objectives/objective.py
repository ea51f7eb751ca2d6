"""Objectives as values: inputs, attention mask and targets.

`OBJECTIVES` is a table of them, and `config.objectives` may add more. Neither
the model nor the train step knows which objective a batch has.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.settings import check, setting

ATTENTION = ("causal", "bidirectional", "prefix", "block")
PREDICT = ("all", "masked", "suffix")
UNITS = ("token", "word", "span")
CHOICES = ("coin", "binomial", "exact", "covering")


@dataclasses.dataclass(frozen=True)
class Objective:
  """One training objective.

  A position sees keys of its own document. With `causal` attention it sees
  those up to itself, with `bidirectional` all, and with `prefix` those up to
  itself and all of a prefix of random length. With `block` it sees those up to
  the end of its block. This is block diffusion (arXiv 2503.09573) on one
  canvas: a block sees the blocks before it as they are masked.

  The targets are `all` tokens, the `masked` ones, or the `suffix` after the
  prefix. Special tokens are never masked, and masks are never targets.

  Fill-in-the-middle (`middle_rate`, arXiv 2207.14255) turns a document into
  `prefix <mask> suffix <mask> middle` (PSM) or into `<mask> suffix <mask>
  prefix middle` (SPM), with equal probability. The cuts are uniform among the
  tokens between special ones. The document loses its last two tokens.

  Tokens are masked in units, and all tokens of a unit have the same fate. Units
  are chosen

  - by one `coin` for each unit;
  - until their tokens are as many as coins for each token give (`binomial`,
    LTG-BERT);
  - until each row has its share (`exact`);
  - until each row has its share, by turns (`covering`): within eight visits of
    a row, all tokens are chosen about equally often. GPT-BERT's code counts how
    often each token was chosen. This choice needs no counts.

  With `frequency_power` (arXiv 2509.05056, whose code ends at 0.02), a token's
  share is proportional to its rank by frequency within the row, from 0 to 1, to
  this power. The row's mean share stays.

  With `mask_ratio_high`, each row draws its own share between `mask_ratio` and
  this one, and the rows of a step spread evenly over that range. With `block`
  attention each block draws its own (as in 2503.09573 and in MaxText): the
  blocks before it are then often nearly whole, as in generation.
  """

  name: str = setting()  # in logs and metrics
  attention: str = setting("causal", "Keys that are seen", choices=ATTENTION)
  block_length: int = setting(
    16, "Tokens of a block, from the document's start", least=1, most=2**16
  )
  shift: int = setting(
    1, "1: output i predicts token i + 1; 0: token i", choices=(0, 1)
  )
  predict: str = setting("all", "Targets", choices=PREDICT)
  middle_rate: float = setting(
    0.0, "Share of the documents whose middle is last", least=0, most=1
  )
  mask_ratio: float = setting(
    0.0, "Share of the tokens that are masked", least=0, most=1
  )
  mask_ends: bool = setting(False, "Mask also the documents' end tokens")
  mask_ratio_end: float | None = setting(
    None, "mask_ratio at the end of the run, reached linearly", least=0, most=1
  )
  mask_ratio_high: float | None = setting(
    None, "Highest mask_ratio, if each row draws its own", least=0, most=1
  )
  mask_token: float = setting(
    0.8, "Share of the masked tokens that become <mask>", least=0, most=1
  )
  random_token: float = setting(
    0.1, "Share of them that become random; others stay", least=0, most=1
  )
  unit: str = setting("token", "Tokens masked together", choices=UNITS)
  choice: str = setting("coin", "Choice of the units", choices=CHOICES)
  frequency_power: float = setting(
    0.0, "Exponent with which rare tokens are preferred", least=0, most=10
  )
  span_length: int = setting(
    3, "Longest span; GPT-BERT 3, LTG-BERT 9", least=1, most=2**16
  )
  # geometric: each length two thirds as often as the one before (LTG-BERT).
  span_lengths: str = setting(
    "uniform", "Law of the spans' lengths", choices=("uniform", "geometric")
  )
  weight: float = setting(1.0, "Weight of a target in the loss", over=0)
  # The expected loss of a row or block is then that of all its tokens.
  per_ratio: bool = setting(
    False, "Divide the weight by the share of its row or block"
  )

  def __post_init__(self):
    check(self, f"objective {self.name!r}: ")
    if self.mask_token + self.random_token > 1 + 1e-6:
      self._fail("random_token", "at most 1 - mask_token")
    if self.predict == "suffix" and self.attention != "prefix":
      self._fail("predict", "all or masked: only prefix attention has a suffix")
    if self.mask_ratio_high is not None and self.mask_ratio_end is not None:
      self._fail("mask_ratio_high", "None, as mask_ratio_end needs")
    if self.per_ratio and not (self.predict == "masked" and self.mask_ratio):
      self._fail("per_ratio", "False without masked targets and a mask_ratio")
    if self.middle_rate and self.attention != "causal":
      self._fail("attention", "causal, as middle_rate needs")
    if self.middle_rate and self.max_mask_ratio:
      self._fail("mask_ratio", "0, as middle_rate needs")
    if self.ratio_of_blocks or self.frequency_power:
      why = "as frequency_power and shares of blocks need"
      if self.unit != "token":
        self._fail("unit", f"token, {why}")
      if self.choice != "coin":
        self._fail("choice", f"coin, {why}")
    if self.max_mask_ratio:
      return
    # Without masks, only the attention hides the targets.
    if self.predict == "masked":
      self._fail("mask_ratio", "over 0, as predict=masked needs")
    if self.shift == 0:
      self._fail("shift", "1: every token would be predicted from itself")
    if self.attention in ("bidirectional", "block"):
      self._fail("attention", "causal or prefix: every target would be seen")
    if self.attention == "prefix" and self.predict != "suffix":
      self._fail("predict", "suffix: the prefix's targets would be seen")

  def _fail(self, field: str, expected: str):
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
    others = self.mask_ratio_end, self.mask_ratio_high
    return max(self.mask_ratio, *(ratio or 0.0 for ratio in others))

  @property
  def needs_mask_token(self) -> bool:
    """Whether inputs can have a `<mask>`."""
    masked = self.max_mask_ratio > 0 and self.mask_token > 0
    return masked or self.middle_rate > 0

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

  @property
  def clustering(self) -> float:
    """Mean size of a chosen token's span, if a coin chooses spans; else 1."""
    if self.unit != "span" or self.choice != "coin":
      return 1.0
    sizes = np.arange(1, self.span_length + 1)
    return float(self.span_shares @ sizes**2 / (self.span_shares @ sizes))

  def ratio_at(self, progress: float) -> float:
    """Returns the mask ratio at a point of the run, `progress` from 0 to 1."""
    begin, end = self.mask_ratio, self.mask_ratio_end
    return begin if end is None else begin + (end - begin) * progress


OBJECTIVES = {
  # Next-token prediction.
  "C": Objective("clm"),
  # BERT's masked language modeling, predicted in place.
  "M": Objective(
    "mlm", attention="bidirectional", shift=0, predict="masked", mask_ratio=0.15
  ),
  # Masked next-token prediction (arXiv 2410.24159, section 2.1): the masked
  # token is predicted one position earlier, so both modes share the head.
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
  # Fill-in-the-middle: CLM, with half of the documents' middles last.
  "F": Objective("fim", middle_rate=0.5),
}


def with_ratio(
  name: str, objectives: Mapping[str, Objective]
) -> Objective | None:
  """Returns the objective of a letter and a percentage, such as M30.

  Returns None for other names, and if the objective's share is not fixed.
  """
  letter, percent = re.fullmatch("(.*?)([0-9]*)", name).groups()
  base = objectives.get(letter)
  if not percent or not base or not base.mask_ratio or int(percent) > 100:
    return None
  if base.mask_ratio_end is not None or base.mask_ratio_high is not None:
    return None
  return dataclasses.replace(
    base, name=f"{base.name}{percent}", mask_ratio=int(percent) / 100
  )
