"""What papers claim, and whether a study's own figures bear it out."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from antlm_jax.evals.reporting.statistics import CONFIDENCE, Interval


class Contrast(NamedTuple):
  """A difference that a claim is about."""

  on: str  # what is compared, and on what
  found: Interval | None  # our difference; None where a side has one seed
  published: float | None = None  # the paper's difference, in the same unit
  sign: int = 1  # that the claim expects of it
  digits: int = 2  # number of decimals that are shown
  here: float | None = None  # ours, where one seed a side has no interval
  but: str = ""  # why nothing is decided, whatever is found

  @property
  def verdict(self) -> str:
    """What the interval says of the claim."""
    if self.but:
      return f"not decided: {self.but}"
    if self.found is None:
      return "not run" if self.here is None else "one seed: not decided"
    if self.found.contains_zero:
      return "not decided"
    right = (self.found.estimate > 0) == (self.sign > 0)
    return "confirmed" if right else "contradicted"

  @property
  def needed(self) -> float:
    """How many times the seeds and items would decide it, about.

    Supposing that the difference is what was found, and that the interval
    shrinks with the root of their number.
    """
    half = (self.found.high - self.found.low) / 2
    return (half / max(abs(self.found.estimate), 1e-9)) ** 2


class Claim(NamedTuple):
  """A sentence of a paper, and the differences that it stands on."""

  text: str
  source: str
  contrasts: Sequence[Contrast]

  @property
  def verdict(self) -> str:
    """What is to be said of it, for a person to read."""
    found = [c.verdict for c in self.contrasts if c.found]
    if not found:
      return next((c.verdict for c in self.contrasts if c.here), "not run")
    if set(found) == {"not decided"}:
      needed = min(c.needed for c in self.contrasts if c.found)
      times = "over 1,000" if needed > 1000 else max(2, round(needed))
      return f"not decided; some {times} times the seeds and items would"
    counts = [(v, found.count(v)) for v in dict.fromkeys(found)]
    if len(counts) == 1:
      return found[0]
    return ", ".join(f"{v} in {n} of {len(found)}" for v, n in counts)


def rows(
  claims: Iterable[Claim], confidence: float = CONFIDENCE
) -> list[dict[str, Any]]:
  """Returns a row for each contrast of some claims."""
  found = [(claim, c) for claim in claims for c in claim.contrasts]
  published = any(c.published is not None for _, c in found)
  return [
    {
      "claim": claim.text,
      "on": c.on,
      **({"published": c.published} if published else {}),
      "here": c.found.estimate if c.found else c.here,
      f"{100 * confidence:.4g} %": c.found,
      "verdict": c.verdict,
      "_digits": c.digits,
    }
    for claim, c in found
  ]
