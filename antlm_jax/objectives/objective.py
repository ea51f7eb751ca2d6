"""Objectives as values: what is hidden, what is seen, what is predicted.

An objective turns rows of tokens into inputs, an attention mask and targets.
All of them are rows of one small table, `OBJECTIVES`; a new one is a new value
(in the table, or in `config.objectives`), and neither the model nor the train
step knows which one a batch has.
"""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.settings import check, setting

ATTENTION = ("causal", "bidirectional", "prefix", "block")
UNITS = ("token", "word", "span")
CHOICES = ("coin", "binomial", "exact", "covering")


@dataclasses.dataclass(frozen=True)
class Objective:
  """One training objective.

  Attributes:
    name: What logs call it.
    attention: Which keys of its own document a position sees: `causal`, those
      up to itself; `bidirectional`, all; `prefix`, all of a random prefix and
      those up to itself; `block`, those up to the end of its own block (block
      diffusion, arXiv 2503.09573, on one canvas: what a block sees of those
      before it is masked as they are).
    block_length: Tokens of a block, counted from the document's start.
    shift: The output at position i predicts the token at i + shift: 1 for
      next-token prediction, 0 for prediction in place.
    predict: Which tokens are targets: `all`; `masked`, the chosen ones;
      `suffix`, those after the prefix.
    middle_rate: Share of documents whose middle stands last, so that it is
      predicted from what is around it (fill-in-the-middle, arXiv 2207.14255):
      `prefix <mask> suffix <mask> middle` (PSM), or with the prefix before the
      middle, `<mask> suffix <mask> prefix middle` (SPM), as often. The cuts
      are drawn evenly among the tokens between special ones. Masks are never
      predicted, and the document's last two tokens make room for them.
    mask_ratio: Share of tokens chosen, special ones never.
    mask_ends: Whether documents' end tokens are chosen as ordinary ones are.
    mask_ratio_end: If set, the share at the end of the run, reached linearly.
    mask_ratio_high: If set, each row draws its own share, evenly between
      `mask_ratio` and this one; the rows of a step spread over that range. With
      `block` attention each block draws its own (as in 2503.09573, and in
      MaxText): those before it are then often nearly whole, as they are where
      text is generated.
    mask_token: Of the chosen, the share that becomes `<mask>`.
    random_token: Of the chosen, the share that becomes a random token; what
      is left of 1 stays as it is.
    unit: What is chosen at once, with one draw for its fate: a `token`, a
      whole `word`, or a `span` of 1 to `span_length` tokens.
    choice: How units are chosen: by a `coin` each; so many as a coin for each
      token says (`binomial`, LTG-BERT's); so that the ratio is met in each row
      (`exact`); or so that a row's tokens take turns as well (`covering`):
      within eight visits of a row all are chosen about as often. GPT-BERT's
      code counts how often each was, and begins with the least; this needs no
      counts.
    frequency_power: If over 0, rare tokens are chosen more often (arXiv
      2509.05056, whose code ends at 0.02): a token's rank by frequency, from 0
      to 1 in its row, to this power, scaled so that the row's share stays.
    span_length: Longest span.
    span_lengths: How often a span has each length: `uniform` (GPT-BERT's, up
      to 3), or `geometric`, each two thirds as often as the one before
      (LTG-BERT's, up to 9).
    weight: Weight of each target in the loss.
    per_ratio: Whether that is divided by the share of its row or block, so
      that the loss of each is, as expected, that of all its tokens.
  """

  name: str = setting()
  attention: str = setting("causal", choices=ATTENTION)
  block_length: int = setting(16, least=1, most=2**16)
  shift: int = setting(1, choices=(0, 1))
  predict: str = setting("all", choices=("all", "masked", "suffix"))
  middle_rate: float = setting(0.0, least=0, most=1)
  mask_ratio: float = setting(0.0, least=0, most=1)
  mask_ends: bool = setting(False)
  mask_ratio_end: float | None = setting(None, least=0, most=1)
  mask_ratio_high: float | None = setting(None, least=0, most=1)
  mask_token: float = setting(0.8, least=0, most=1)
  random_token: float = setting(0.1, least=0, most=1)
  unit: str = setting("token", choices=UNITS)
  choice: str = setting("coin", choices=CHOICES)
  frequency_power: float = setting(0.0, least=0, most=10)
  span_length: int = setting(3, least=1, most=2**16)
  span_lengths: str = setting("uniform", choices=("uniform", "geometric"))
  weight: float = setting(1.0, over=0)
  per_ratio: bool = setting(False)

  def __post_init__(self):
    check(self, f"objective {self.name!r}: ")
    if self.mask_token + self.random_token > 1 + 1e-6:
      self._fail("random_token", "at most 1 - mask_token")
    if self.predict == "suffix" and self.attention != "prefix":
      self._fail("predict", "all or masked where there is no prefix")
    if self.mask_ratio_high is not None and self.mask_ratio_end is not None:
      self._fail("mask_ratio_high", "None where mask_ratio_end is set")
    if self.per_ratio and not (self.predict == "masked" and self.mask_ratio):
      self._fail("per_ratio", "False but of masked targets, mask_ratio over 0")
    if self.middle_rate and self.attention != "causal":
      self._fail("attention", "causal where documents' middles stand last")
    if self.middle_rate and self.max_mask_ratio:
      self._fail("mask_ratio", "0 where documents' middles stand last")
    if self.ratio_of_blocks or self.frequency_power:
      why = "where tokens of a row have shares of their own"
      if self.unit != "token":
        self._fail("unit", f"token {why}")
      if self.choice != "coin":
        self._fail("choice", f"coin {why}")
    if self.max_mask_ratio:
      return
    # Nothing is hidden by masks: the attention has to hide the targets.
    if self.predict == "masked":
      self._fail("mask_ratio", "over 0 where the masked tokens are predicted")
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
    """Whether a text is read up to a token to predict the next one."""
    return self.attention in ("causal", "prefix")

  @property
  def ratio_of_blocks(self) -> bool:
    """Whether shares are drawn by blocks, and not by rows."""
    return self.attention == "block" and self.mask_ratio_high is not None

  @property
  def max_mask_ratio(self) -> float:
    """Largest share chosen at any time of the run."""
    others = self.mask_ratio_end, self.mask_ratio_high
    return max(self.mask_ratio, *(ratio or 0.0 for ratio in others))

  @property
  def needs_mask_token(self) -> bool:
    """Whether its inputs can hold `<mask>`."""
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
    """Returns the share chosen at a part `progress` (0 to 1) of the run."""
    end = (
      self.mask_ratio if self.mask_ratio_end is None else self.mask_ratio_end
    )
    return self.mask_ratio + (end - self.mask_ratio) * progress


OBJECTIVES = {
  # Next-token prediction.
  "C": Objective("clm"),
  # BERT's masked language modeling, predicted in place.
  "M": Objective(
    "mlm",
    attention="bidirectional",
    shift=0,
    predict="masked",
    mask_ratio=0.15,
  ),
  # Masked next-token prediction (arXiv 2410.24159, section 2.1): the masked
  # token is predicted one position earlier, so both modes share the head.
  "N": Objective(
    "mntp", attention="bidirectional", predict="masked", mask_ratio=0.15
  ),
  # Mask-enhanced autoregressive prediction (arXiv 2502.07490): next-token
  # prediction with a small share of the inputs masked.
  "E": Objective("meap", mask_ratio=0.15, mask_token=1.0, random_token=0.0),
  # Masked diffusion (arXiv 2406.07524, equation 10): its loss bounds the nats
  # per token from above, and compares with CLM's, so ends are predicted too.
  # Tokens are predicted one position before, as in dual language models (arXiv
  # 2512.14549); shift=0 is in place.
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
  # Prefix language modeling: a prefix of random length sees itself whole, and
  # what follows it is predicted.
  "P": Objective("prefix_lm", attention="prefix", predict="suffix"),
  # Fill-in-the-middle: next-token prediction, half of the documents with their
  # middle last.
  "F": Objective("fim", middle_rate=0.5),
}


def with_ratio(
  name: str, objectives: Mapping[str, Objective]
) -> Objective | None:
  """Returns the objective that a letter and a percentage name, such as M30.

  None for other names, and where the share is not one fixed number.
  """
  of, percent = re.fullmatch("(.*?)([0-9]*)", name).groups()
  base = objectives.get(of)
  if not percent or not base or not base.mask_ratio or int(percent) > 100:
    return None
  if base.mask_ratio_end is not None or base.mask_ratio_high is not None:
    return None
  return dataclasses.replace(
    base, name=f"{base.name}{percent}", mask_ratio=int(percent) / 100
  )
