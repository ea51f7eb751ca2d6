"""Claims, the differences that they rest on, and verdicts of both.

Both reports make their claims of these. The confidence of every interval is
chosen here, so that all of a report's intervals hold together 95 times of 100.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax.evals.reporting.render import without_empty
from antlm_jax.evals.reporting.statistics import CONFIDENCE, Estimate

NOT_LEARNT, NOT_RUN, OPEN = "not learnt", "not run", "not decided"


def is_above(found: Estimate) -> bool:
  """Whether a difference is above zero by more than its 95 % interval."""
  interval = found.interval(CONFIDENCE)
  return (interval.low if interval else found.value) > 0


class Contrast(NamedTuple):
  """A difference that a claim is about."""

  on: str  # the rows compared, and their scores
  found: Estimate | None  # our difference, in the unit that is shown
  published: float | None = None  # the paper's difference, in the same unit
  sign: int = 1  # that the claim expects of it
  digits: int = 2  # number of decimals that are shown
  # By how much each side is above its trivial answer, by its title.
  above: Mapping[str, Estimate] = {}
  each: bool = False  # whether each side has to be above it, or one of them

  @property
  def unlearnt(self) -> list[str]:
    """The sides that are at their trivial answer, if this decides nothing."""
    out = [side for side, found in self.above.items() if not is_above(found)]
    return out if self.each or len(out) == len(self.above) else []

  def verdict(self, confidence: float) -> str:
    """Returns the interval's answer to the claim."""
    if self.found is None:
      return NOT_RUN
    if self.unlearnt:
      return NOT_LEARNT
    interval = self.found.interval(confidence)
    if interval is None:
      return f"one seed: {OPEN}"
    if not interval.sign:
      return OPEN
    word = "confirmed" if interval.sign == self.sign else "contradicted"
    return word if self.found.general else f"{word} for these models"

  def row(self, confidence: float) -> dict[str, Any]:
    """Returns its row in the table of differences."""
    found, verdict, over = self.found, self.verdict(confidence), []
    interval = found and found.interval(confidence)
    if interval and found.seeds > 1:
      kind = "pretrainings" if found.pretrained else "fine-tunings"
      over.append(f"{found.seeds} {kind}")
    if interval and found.freedom:
      over.append(f"{found.items:,} items")
    if verdict == NOT_LEARNT:
      verdict += f": {' and '.join(self.unlearnt)}"
    return {
      "on": self.on,
      "published": self.published,
      "here": found and found.value,
      f"{100 * confidence:.4g} %": interval,
      "over": ", ".join(over) or None,
      "verdict": verdict,
      "_digits": self.digits,
    }

  def needed(self, confidence: float) -> float:
    """Returns how many times the seeds and items would decide it, about.

    It assumes that the difference stays the same, and that the interval
    shrinks with the root of their number.
    """
    interval = self.found.interval(confidence)
    half = (interval.high - interval.low) / 2
    return (half / max(abs(self.found.value), 1e-9)) ** 2


class Claim(NamedTuple):
  """A sentence of a paper, and the differences that it rests on."""

  text: str
  source: str
  contrasts: Sequence[Contrast]

  @property
  def run(self) -> bool:
    """Whether there is any difference."""
    return any(contrast.found for contrast in self.contrasts)

  def verdict(self, confidence: float) -> str:
    """Returns the verdict of the contrasts that count."""
    every = [c.verdict(confidence) for c in self.contrasts]
    found = [v for v in every if v not in (NOT_RUN, NOT_LEARNT)]
    if not found:
      return NOT_LEARNT if NOT_LEARNT in every else NOT_RUN
    if set(found) == {OPEN}:
      those = zip(self.contrasts, every, strict=True)
      needed = min(c.needed(confidence) for c, v in those if v == OPEN)
      times = "over 1,000" if needed > 1000 else max(2, round(needed))
      return f"{OPEN}; some {times} times the seeds and items would"
    counts = [(v, found.count(v)) for v in dict.fromkeys(found)]
    if len(counts) == 1:
      return found[0]
    return ", ".join(f"{v} in {n} of {len(found)}" for v, n in counts)


@dataclasses.dataclass(frozen=True)
class Claims:
  """All claims of a report.

  Attributes:
    every: The claims.
    fixed: Confidence of every interval, if it was fixed beforehand.
  """

  every: Sequence[Claim]
  fixed: float | None = None

  @functools.cached_property
  def contrasts(self) -> int:
    """Number of differences that have an interval."""
    every = (c.found for claim in self.every for c in claim.contrasts)
    return sum(bool(found and found.interval()) for found in every)

  @property
  def confidence(self) -> float:
    """Confidence of each interval, so that all hold together (Bonferroni)."""
    return self.fixed or 1 - (1 - CONFIDENCE) / max(1, self.contrasts)

  def rows(self) -> list[dict[str, Any]]:
    """Returns a row for each contrast of the claims on which there is any."""
    rows = [
      {"claim": claim.text} | contrast.row(self.confidence)
      for claim in self.every
      if claim.run
      for contrast in claim.contrasts
    ]
    return without_empty(rows, "published")
