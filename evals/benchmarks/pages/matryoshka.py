"""Table of embedders with and without Matryoshka training."""

import numpy as np

from antlm_jax import tables
from antlm_jax.evals import statistics
from antlm_jax.evals.benchmarks.pages.studies import RESULTS, interval_text
from antlm_jax.runtime import files


def _scored_rows() -> list[dict]:
  return files.read_json(RESULTS / "matryoshka.json", "the scores")["rows"]


def _points(row: str, size: str) -> np.ndarray:
  """Returns NDCG@10 in points, of each seed and query `[S, n]`."""
  found = (one for one in _scored_rows() if one["row"] == row)
  each = {one["seed"]: one["queries"] for one in found}
  return 100 * np.array([each[seed][size] for seed in sorted(each)])


def _difference(size: str) -> statistics.Interval:
  """Returns how much better Matryoshka is, paired by seed and query."""
  one, other = (_points(row, size) for row in ("matryoshka", "plain"))
  return statistics.estimate_mean(one - other, pretrained=False).interval()


def _prefix_table() -> str:
  lines = []
  for size in _scored_rows()[0]["queries"]:
    means = (
      f"{_points(row, size).mean():.2f}" for row in ("plain", "matryoshka")
    )
    lines.append((size, *means, interval_text(_difference(size), 2)))
  head = "numbers", "whole vector", "Matryoshka", "difference (95 %)"
  return tables.markdown(lines, head)


TABLES = {"matryoshka": _prefix_table}
