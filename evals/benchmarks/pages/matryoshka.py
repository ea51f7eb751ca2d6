"""Table of embedders with and without Matryoshka training."""

from collections.abc import Iterator

import numpy as np

from antlm_jax import tables
from antlm_jax.evals import statistics
from antlm_jax.evals.benchmarks.pages.studies import RESULTS, interval_text
from antlm_jax.runtime import files


def _query_scores(row: str, size: str) -> np.ndarray:
  """Returns NDCG@10 in points, of each seed and query `[S, n]`."""
  found = files.read_json(RESULTS / "matryoshka.json", "the scores")["rows"]
  each = {one["seed"]: one["queries"] for one in found if one["row"] == row}
  return 100 * np.array([each[seed][size] for seed in sorted(each)])


def _difference(size: str) -> statistics.Interval:
  """Returns how much better Matryoshka is, paired by seed and query."""
  one, other = (_query_scores(row, size) for row in ("matryoshka", "plain"))
  return statistics.estimate_mean(one - other, pretrained=False).interval()


def _prefix_table() -> str:
  lines = []
  for size in ("64", "128", "256"):
    means = (
      f"{_query_scores(row, size).mean():.2f}"
      for row in ("plain", "matryoshka")
    )
    lines.append((size, *means, interval_text(_difference(size), 2)))
  head = "numbers", "whole vector", "Matryoshka", "difference (95 %)"
  return tables.markdown(lines, head)


TABLES = {"matryoshka": _prefix_table}


def matryoshka_figures() -> Iterator[float]:
  """Yields the differences, and their intervals' ends."""
  for size in ("64", "128", "256"):
    yield from _difference(size)
