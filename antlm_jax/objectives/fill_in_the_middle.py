"""Fill-in-the-middle (arXiv 2207.14255)."""

import dataclasses

import numpy as np

from antlm_jax.objectives.corruption import (
  Corrupted,
  Draw,
  Segments,
  Vocabulary,
)
from antlm_jax.objectives.objective import KINDS, OBJECTIVES, Objective
from antlm_jax.settings import setting


@KINDS.register("fim")
@dataclasses.dataclass(frozen=True)
class FillInTheMiddle(Objective):
  """CLM on documents of which a share has its middle last.

  A document becomes `prefix <mask> suffix <mask> middle` (PSM) or `<mask>
  suffix <mask> prefix middle` (SPM), with equal probability. The cuts are
  uniform among the tokens between special ones. The document loses its last two
  tokens.
  """

  middle_rate: float = setting(
    0.5, "Share of the documents whose middle is last", least=0, most=1
  )

  def __post_init__(self):
    super().__post_init__()
    if self.attention != "causal":
      self.fail("attention", "causal, as middle_rate needs")
    if self.max_mask_ratio:
      self.fail("mask_ratio", "0, as middle_rate needs")

  @property
  def needs_mask_token(self) -> bool:
    """Whether `<mask>` marks the cuts of some document."""
    return self.middle_rate > 0

  def corrupt(
    self,
    tokens: np.ndarray,
    segments: Segments,
    draw: Draw,
    vocabulary: Vocabulary,
    progress: float = 0.0,
  ) -> Corrupted:
    """Puts the middle of some documents last, then shows them as CLM does."""
    moved = self._middle_last(tokens, segments, draw, vocabulary)
    return super().corrupt(moved, segments, draw, vocabulary, progress)

  def _middle_last(self, tokens, segments, draw, vocabulary) -> np.ndarray:
    at = np.arange(tokens.shape[1])
    special = vocabulary.special[tokens]
    # A document's text is a run of ordinary tokens, in any packing.
    begins = (at == segments.start) | special
    begins[:, 1:] |= special[:, :-1]
    begins = np.flatnonzero(
      begins
    )  # from here on, rows are one after the other
    ends = np.append(begins[1:], tokens.size)
    draws = draw.uniform("middle", at).reshape(-1)
    taken = (draws[begins] < self.middle_rate) & (ends - begins >= 4)
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


OBJECTIVES["F"] = FillInTheMiddle("fim")
