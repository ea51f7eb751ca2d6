"""What papers claim, and whether a study's own figures bear it out."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from antlm_jax.evals.reporting.render import Cell, Table
from antlm_jax.evals.reporting.statistics import CONFIDENCE, Interval


class Contrast(NamedTuple):
  """A difference that a claim is about.

  Attributes:
    on: What is compared, and on what.
    published: The paper's difference, in the unit of `text`.
    found: Ours; None where a side is not there.
    sign: Which sign the claim expects of it, 1 or -1.
    text: Writes a number, such as one in points.
    here: Our difference, where one seed a side has no interval.
    but: Why nothing is decided, whatever is found; "" for nothing.
  """

  on: str
  published: float | None
  found: Interval | None
  sign: int = 1
  text: Callable[[float], str] = "{:+.2f}".format
  here: float | None = None
  but: str = ""

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


def parts(
  claims: Sequence[Claim], of: str, confidence: float = CONFIDENCE
) -> Iterator[list[str] | Table]:
  """Yields claims of a family with their verdicts, and what is behind them."""
  yield [f"{c.text} ({c.source}): **{c.verdict}**" for c in claims]
  head = f"{100 * confidence:.4g} %"
  rows = [_row(claim, c, head) for claim in claims for c in claim.contrasts]
  if not any(row["published"].text for row in rows):
    rows = [{k: v for k, v in row.items() if k != "published"} for row in rows]
  yield Table("claims", rows, f"{of}: what the verdicts stand on")


def _row(claim: Claim, c: Contrast, head: str) -> dict[str, Cell | str | None]:
  found, published = c.found, c.published
  here = found.estimate if found else c.here
  ends = found and f"{c.text(found.low)} to {c.text(found.high)}"
  return {
    "claim": claim.text,
    "on": c.on,
    "published": Cell(
      published, None if published is None else c.text(published)
    ),
    "here": Cell(here, None if here is None else c.text(here)),
    head: Cell(found, ends),
    "verdict": c.verdict,
  }
