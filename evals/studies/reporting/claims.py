"""Claims, the differences that they rest on, and verdicts of both.

Both reports make their claims of these. The confidence of the differences'
intervals is chosen here, so that all of them hold together 95 times of 100.
Intervals that no claim depends on are at 95 %.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax.evals.statistics import CONFIDENCE, MeanEstimate, student
from antlm_jax.evals.studies.reporting.render import without_empty

NOT_LEARNT, NOT_RUN, OPEN = "not learnt", "not run", "not decided"
_MOST = 1000  # pretrainings that a report may name as necessary


def is_above(found: MeanEstimate) -> bool:
  """Whether a difference is above zero by more than its 95 % interval."""
  interval = found.interval(CONFIDENCE)
  return (interval.low if interval else found.value) > 0


class Contrast(NamedTuple):
  """A difference that a claim is about."""

  on: str  # the rows compared, and their scores
  found: MeanEstimate | None  # our difference, in the unit that is shown
  published: float | None = None  # the paper's difference, in the same unit
  sign: int = 1  # that the claim expects of it
  digits: int = 2  # number of decimals that are shown
  # By how much each side is above its trivial answer, by its title.
  above: Mapping[str, MeanEstimate] = {}
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
    covers = "the recipe" if found and found.general else "these models"
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
      "covers": interval and covers,
      "verdict": verdict,
      "_digits": self.digits,
    }

  def needed(self, confidence: float) -> tuple[int, float, str]:
    """Returns the effort that would decide it: a rank, a number and its unit.

    It assumes that the difference and the variances stay the same. Student's
    quantile shrinks with the number of pretrainings, too.
    """
    found, value = self.found, max(abs(self.found.value), 1e-9)
    if found.general:
      for count in range(found.seeds + 1, _MOST + 1):
        if found.with_seeds(count).half_width(confidence) < value:
          return 0, count, "pretrainings"
      found = found.with_seeds(10**9)  # their items are too few
      if not found.half_width(confidence) > value:
        return 0, math.inf, "pretrainings"
    what = "items" if found.general or found.seeds == 1 else "seeds and items"
    return 1, (found.half_width(confidence) / value) ** 2, f"times the {what}"


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
      _, number, what = min(c.needed(confidence) for c, v in those if v == OPEN)
      number = f"over {_MOST:,}" if number > _MOST else max(2, round(number))
      return f"{OPEN}; some {number} {what} would"
    counts = [(v, found.count(v)) for v in dict.fromkeys(found)]
    if len(counts) == 1:
      return found[0]
    return ", ".join(f"{v} in {n} of {len(found)}" for v, n in counts)


@dataclasses.dataclass(frozen=True)
class Claims:
  """All claims of a report.

  Attributes:
    every: The claims.
    fixed: Confidence of each difference, if it was fixed beforehand.
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
    """Confidence of each difference: all hold together (Bonferroni)."""
    return self.fixed or 1 - (1 - CONFIDENCE) / max(1, self.contrasts)

  def errors(self, seeds: int) -> float:
    """Returns the standard errors over seeds in half of an interval."""
    return student(seeds - 1, self.confidence)

  def rows(self) -> list[dict[str, Any]]:
    """Returns a row for each contrast of the claims on which there is any."""
    rows = [
      {"claim": claim.text} | contrast.row(self.confidence)
      for claim in self.every
      if claim.run
      for contrast in claim.contrasts
    ]
    return without_empty(rows, "published")
