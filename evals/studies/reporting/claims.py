"""Claims, the differences that they rest on, and verdicts of both.

The confidence of the differences' intervals is chosen here, so that all of them
hold together 95 times of 100. Intervals that no claim depends on are at 95 %.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax.evals.statistics import CONFIDENCE, MeanEstimate, student
from antlm_jax.evals.studies.reporting.findings import Findings
from antlm_jax.evals.studies.reporting.render import (
  Figure,
  Tables,
  without_empty,
)

NOT_LEARNT = "not learnt"
NOT_RUN = "not run"
OPEN = "not decided"
ONE_TEXT = "on one text"
_MOST = 1000  # pretrainings that a report may name as necessary


def is_above(gain: MeanEstimate) -> bool:
  """Whether a difference is above zero by more than its 95 % interval."""
  interval = gain.interval(CONFIDENCE)
  return (interval.low if interval else gain.value) > 0


class Contrast(NamedTuple):
  """A difference that a claim is about."""

  on: str  # the rows compared, and their scores
  estimate: MeanEstimate | None  # our difference, in the unit that is shown
  published: float | None = None  # the paper's difference, in the same unit
  sign: int = 1  # that the claim expects of it
  # By how much each side is above its trivial answer, by its title.
  above: Mapping[str, MeanEstimate] = {}
  all_above: bool = False  # whether all sides have to be above it, or one
  # The same on the other half of the held-out rows, if no items are known.
  other_half: MeanEstimate | None = None

  @property
  def unlearnt(self) -> list[str]:
    """The sides that are at their trivial answer, if this decides nothing."""
    sides = [side for side, gain in self.above.items() if not is_above(gain)]
    return sides if self.all_above or len(sides) == len(self.above) else []

  def verdict(self, confidence: float) -> str:
    """Returns the interval's answer to the claim."""
    if self.estimate is None:
      return NOT_RUN
    if self.unlearnt:
      return NOT_LEARNT
    interval = self.estimate.interval(confidence)
    if interval is None:
      return f"one seed: {OPEN}"
    other = self.other_half and self.other_half.interval(confidence)
    if not interval.sign or (other and other.sign != interval.sign):
      return OPEN
    word = "confirmed" if interval.sign == self.sign else "contradicted"
    if not self.estimate.general:
      return f"{word} for these models"
    return f"{word} {ONE_TEXT}" if self.on_one_text else word

  @property
  def on_one_text(self) -> bool:
    """Whether its interval covers other seeds, but no other items."""
    return self.estimate.general and self.estimate.items == 1

  def row(self, confidence: float) -> dict[str, Any]:
    """Returns its row in the table of differences."""
    estimate = self.estimate
    interval = estimate and estimate.interval(confidence)
    units = []
    if interval and estimate.seeds > 1:
      kind = "pretrainings" if estimate.pretrained else "fine-tunings"
      units.append(f"{estimate.seeds} {kind}")
    if interval and estimate.freedom:
      units.append(f"{estimate.items:,} items")
    covers = "the recipe" if estimate and estimate.general else "these models"
    if interval and self.on_one_text:
      covers += f", {ONE_TEXT}"
    other = self.other_half and self.other_half.interval(confidence)
    sides = " and ".join(self.unlearnt)
    verdict = self.verdict(confidence)
    return {
      "on": self.on,
      "published": self.published,
      "here": estimate and estimate.value,
      f"{100 * confidence:.4g} %": interval,
      "on the other half": other,
      "over": ", ".join(units) or None,
      "covers": interval and covers,
      "verdict": f"{verdict}: {sides}" if verdict == NOT_LEARNT else verdict,
    }

  def needed(self, confidence: float) -> tuple[int, float, str]:
    """Returns the effort that would decide it: a rank, a number and its unit.

    It assumes that the difference and the variances stay the same. Student's
    quantile shrinks with the number of pretrainings, too.
    """
    estimate = self.estimate
    if self.other_half and estimate.interval(confidence).sign:
      estimate = self.other_half  # which does not decide it
    value = max(abs(estimate.value), 1e-9)
    if estimate.general:
      for count in range(estimate.seeds + 1, _MOST + 1):
        if estimate.with_seeds(count).half_width(confidence) < value:
          return 0, count, "pretrainings"
      estimate = estimate.with_seeds(10**9)  # their items are too few
      if not estimate.half_width(confidence) > value:
        return 0, math.inf, "pretrainings"
    only_items = estimate.general or estimate.seeds == 1
    unit = "items" if only_items else "seeds and items"
    factor = (estimate.half_width(confidence) / value) ** 2
    return 1, factor, f"times the {unit}"


class Claim(NamedTuple):
  """A sentence of a paper, and the differences that it rests on."""

  text: str
  source: str
  contrasts: Sequence[Contrast]

  @property
  def run(self) -> bool:
    """Whether there is any difference."""
    return any(contrast.estimate for contrast in self.contrasts)

  def verdict(self, confidence: float) -> str:
    """Returns the verdict of the contrasts that count."""
    verdicts = [c.verdict(confidence) for c in self.contrasts]
    decisive = [v for v in verdicts if v not in (NOT_RUN, NOT_LEARNT)]
    if not decisive:
      return NOT_LEARNT if NOT_LEARNT in verdicts else NOT_RUN
    if set(decisive) == {OPEN}:
      undecided = (c for c in self.contrasts if c.verdict(confidence) == OPEN)
      _, number, unit = min(c.needed(confidence) for c in undecided)
      number = f"over {_MOST:,}" if number > _MOST else max(2, round(number))
      return f"{OPEN}; some {number} {unit} would"
    counts = {v: decisive.count(v) for v in decisive}
    if len(counts) == 1:
      return decisive[0]
    return ", ".join(
      f"{v} in {n} of {len(decisive)}" for v, n in counts.items()
    )


@dataclasses.dataclass(frozen=True)
class Claims:
  """All claims of a report.

  Attributes:
    claims: The claims.
    fixed: Confidence of each difference, if it was fixed beforehand.
  """

  claims: Sequence[Claim]
  fixed: float | None = None

  @functools.cached_property
  def contrasts(self) -> int:
    """Number of differences that have an interval."""
    estimates = (c.estimate for claim in self.claims for c in claim.contrasts)
    return sum(bool(x and x.interval()) for x in estimates)

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
      for claim in self.claims
      if claim.run
      for contrast in claim.contrasts
    ]
    return without_empty(rows, "published", "on the other half")


class Report(NamedTuple):
  """Contents of the report of a study."""

  template: str  # a file of templates/, without its suffixes
  study: Findings
  claims: Sequence[Claim]
  tables: Tables
  figures: Sequence[Figure]
  missing: Sequence[str]
  facts: Mapping[str, Any] = {}  # further entries of table.json
