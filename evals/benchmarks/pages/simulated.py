"""Tables of the coverage of intervals, and of sizes that decide claims."""

from collections.abc import Iterator, Mapping

from antlm_jax import tables
from antlm_jax.evals.benchmarks import coverage
from antlm_jax.evals.benchmarks.pages.studies import RESULTS
from antlm_jax.evals.statistics import CONFIDENCE, MeanEstimate, student
from antlm_jax.runtime import files

_MANY = 10**9  # degrees of freedom of a set's items, which are many
_MOST = 100  # pretrainings


def _coverage_table() -> str:
  found = files.read_json(RESULTS / "coverage.json", "the simulation")["rows"]
  lines = []
  for row in found:
    cells = [row[name] for name in coverage.HEAD.values()]
    for method in coverage.METHODS:
      cells.append(
        coverage.coverage_text(*row[method]) if method in row else None
      )
    lines.append(cells)
  return tables.markdown(lines, [*coverage.HEAD, *coverage.METHODS])


def _simulated_sizes() -> dict:
  return files.read_json(RESULTS / "study-sizes.json", "the sizes")


def _half(row: Mapping, runs: int, deviation: float, freedom: int) -> float:
  """Returns half of a claim's interval, as the reports make it."""
  about = _simulated_sizes()
  return (
    MeanEstimate(
      value=0.0,
      seeds=runs,
      items=2,
      freedom=freedom,
      by_items=row["items"] ** 2,
      by_seeds=deviation**2 / runs,
    )
    .interval(1 - (1 - CONFIDENCE) / about["claims"])
    .high
  )


def _deciding() -> str:
  about, lines = _simulated_sizes(), []
  each, tuning = about["tunings_each"], about["tunings"]
  for row in about["rows"]:
    one = _half(row, each, tuning, _MANY)
    needed = [
      _needed(row, (deviation**2 + tuning**2 / each) ** 0.5)
      for deviation in about["pretrainings"]
    ]
    if None in needed:
      needed = [f"none: more than {row['set']} are needed"]
    text = " or ".join(map(str, dict.fromkeys(needed)))
    lines.append(
      (row["claim"], row["published"], row["items"], f"{one:.1f}", text)
    )
  head = "claim", "published", "items", "half an interval, one pretraining"
  return tables.markdown(lines, (*head, "pretrainings that decide it"))


def _needed(row: Mapping, deviation: float) -> int | None:
  """Returns the fewest pretrainings that decide a claim; None if none do."""
  for runs in range(2, _MOST):
    if _half(row, runs, deviation, _MANY) < row["published"]:
      return runs
  return None


INTERVALS = {"coverage": _coverage_table}
SIZES = {"study-sizes": _deciding}


def interval_figures() -> Iterator[float]:
  """Yields half of an interval of two pretrainings, in deviations."""
  confidence = 1 - (1 - CONFIDENCE) / _simulated_sizes()["claims"]
  yield student(1, confidence) / 2**0.5
