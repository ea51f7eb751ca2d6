"""Reversed text: CLM on documents, a share of which is reversed."""

import dataclasses

import numpy as np

from antlm_jax.objectives.objective import KINDS, OBJECTIVES, Objective
from antlm_jax.settings import setting


@KINDS.register("reversed")
@dataclasses.dataclass(frozen=True)
class Reversed(Objective):
  """CLM that reverses a share of the documents."""

  share: float = setting(
    0.5, "Share of the documents that are reversed", least=0, most=1
  )

  def corrupt(self, tokens, segments, draw, vocabulary, progress=0.0):
    """Reverses some documents, then corrupts rows as CLM does."""
    at = np.arange(tokens.shape[1])
    # The draw of a document's first token decides for the document.
    drawn = draw.uniform("reversed", at)
    drawn = np.take_along_axis(drawn, segments.start, axis=1)
    mirrored = segments.start + segments.end - 1 - at
    places = np.where(drawn < self.share, mirrored, at)
    tokens = np.take_along_axis(tokens, places, axis=1)
    return super().corrupt(tokens, segments, draw, vocabulary, progress)


OBJECTIVES["R"] = Reversed("reversed")
