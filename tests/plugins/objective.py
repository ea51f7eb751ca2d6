"""Fill in the middle: CLM on documents whose middle may be last."""

import dataclasses

import numpy as np

from antlm_jax.objectives.objective import KINDS, OBJECTIVES, Objective
from antlm_jax.settings import setting


@KINDS.register("fim")
@dataclasses.dataclass(frozen=True)
class FillInTheMiddle(Objective):
  """Puts the middle of a share of the documents last (arXiv 2207.14255)."""

  middle_rate: float = setting(
    0.5, "Share of the documents whose middle is last", least=0, most=1
  )

  @property
  def needs_mask_token(self) -> bool:
    """Whether `<mask>` marks the cuts of some documents."""
    return self.middle_rate > 0

  def corrupt(self, tokens, segments, draw, vocabulary, progress=0.0):
    """Moves the middles, then shows the rows as CLM does."""
    at = np.arange(tokens.shape[1])
    special = vocabulary.special[tokens]
    # A document's text is a run of ordinary tokens, in any packing.
    is_start = (at == segments.start) | special
    is_start[:, 1:] |= special[:, :-1]
    starts = np.flatnonzero(is_start)
    ends = np.append(starts[1:], tokens.size)
    # The draw of a text's first token decides for the text.
    is_moved = draw.uniform("middle", at).reshape(-1)[starts] < self.middle_rate
    is_moved &= ends - starts >= 4
    places = draw.uniform("cut", at).reshape(-1)
    moved = tokens.reshape(-1).copy()
    for start, end in zip(starts[is_moved], ends[is_moved], strict=True):
      cuts = places[start : start + 2]
      mask = vocabulary.mask_id
      moved[start:end] = middle_last(moved[start:end], cuts, mask)
    moved = moved.reshape(tokens.shape)
    return super().corrupt(moved, segments, draw, vocabulary, progress)


def middle_last(text, cuts, mask):
  """Returns `prefix <mask> suffix <mask> middle`, as long as the text `[n]`."""
  text = text[:-2]  # makes room for the masks
  first, second = np.sort((cuts * (len(text) + 1)).astype(int))
  prefix, middle, suffix = np.split(text, [first, second])
  parts = (prefix, [mask], suffix, [mask], middle)
  return np.concatenate(parts).astype(text.dtype)


OBJECTIVES["F"] = FillInTheMiddle("fim")
