"""Compares fine-tuned models on the items that they predicted."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from antlm_jax import tables
from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.finetuning.summary import MODEL
from antlm_jax.evals.statistics import CONFIDENCE, Interval, MeanEstimate
from antlm_jax.evals.studies.reporting.differences import Pairing, pair_scores
from antlm_jax.evals.studies.reporting.items import ItemFiles
from antlm_jax.evals.studies.reporting.scores import Scores, tuned_scores
from antlm_jax.runtime import files

REPORT = "report.md"
# Metrics that may be below 0: their differences may be above 1.
_SIGNED = "mcc", "pearson", "spearman", "r2"
_HEAD = ["", "model", "score", "seeds", "score (%)"]
_HEAD += ["difference from the first", "paired by"]


class TunedRow(NamedTuple):
  """A model's main metric on an evaluation set, next to the first model's."""

  evaluation: str
  label: str  # of the model
  metric: str
  seeds: int
  score: float  # at most 1
  difference: Interval | None  # from the first model
  paired_by: str  # shared seeds and items, or items: those of its interval


@dataclasses.dataclass(frozen=True, repr=False)
class TunedComparison:
  """Fine-tuned models on the same items, and their table."""

  rows: tuple[TunedRow, ...]
  table: str
  folder: pathlib.Path | None = None  # of the report, if it is written

  @property
  def best(self) -> TunedRow:
    """The highest score on the first evaluation set."""
    first = self.rows[0].evaluation
    scores = [row for row in self.rows if row.evaluation == first]
    return max(scores, key=lambda row: row.score)

  def __repr__(self) -> str:
    return f"<{len({row.label for row in self.rows})} fine-tuned, compared>"

  def __str__(self) -> str:
    if not self.folder:
      return self.table
    return f"{self.table}\nwritten to {files.shown_path(self.folder / REPORT)}"


def results_folder(path: pathlib.Path) -> pathlib.Path | None:
  """Returns a fine-tuned model's results, next to it; None without any."""
  folder = path.parent if path.name == MODEL else path
  return folder if (folder / results.ITEMS).is_file() else None


def compare_tuned(
  folders: Mapping[str, pathlib.Path], output: pathlib.Path | None = None
) -> TunedComparison:
  """Compares fine-tuned models, by label, with the first of them.

  Raises a UserError if they share no evaluation set, its items differ, or files
  cannot be read.
  """
  items = ItemFiles()
  scores = Scores()
  for label, folder in folders.items():
    trials = tuned_scores(label, "", folder / results.SUMMARY)
    for score in trials.where(main=True, chosen=True):
      if not items.of(score):
        raise UserError(
          f"{folder} has no scores of its items: fine-tune or evaluate it again"
          " with --overwrite"
        )
      scores.append(score._replace(mode=""))
  rows = []
  for lines in scores.groups("measure").values():
    if lines.distinct("row") == [*folders]:
      rows += _compared_rows(lines, items)
  if not rows:
    raise UserError(f"{', '.join(folders)} share no evaluation set")
  cells = [
    (
      row.evaluation,
      row.label,
      row.metric,
      row.seeds,
      f"{100 * row.score:.1f}",
      _difference_text(row),
      row.paired_by,
    )
    for row in rows
  ]
  table = tables.text_table(cells, _HEAD, "<<<>><<")
  table += (
    f"\n({100 * CONFIDENCE:g} % interval over the paired seeds and items)"
  )
  if output:
    text = f"# Fine-tuned models compared\n\n```\n{table}\n```\n"
    files.write_text(output / REPORT, text)
  return TunedComparison(tuple(rows), table, output)


def _compared_rows(scores: Scores, items: ItemFiles) -> Iterator[TunedRow]:
  """Compares the models' scores on an evaluation set with the first model's."""
  pairing = pair_scores(scores, items)
  first, *others = scores.distinct("row")
  if pairing.excluded or len(scores.distinct("metric")) > 1:
    raise UserError(
      f"{scores[0].measure}: {' or '.join(others)} has other items than"
      f" {first}: evaluate all on the same files"
    )
  for (label, metric), lines in scores.groups("row", "metric").items():
    difference = None
    paired_by = ""
    if label != first:
      estimate = _estimate(pairing, label, first)
      difference = estimate.interval()
      paired_by = f"{estimate.seeds} seeds, " * (estimate.seeds > 1) + "items"
    yield TunedRow(
      evaluation=lines[0].measure,
      label=label,
      metric=metric,
      seeds=len(lines),
      score=float(np.mean([items.of(line).scores for line in lines])),
      difference=difference,
      paired_by=paired_by,
    )


def _estimate(pairing: Pairing, label: str, first: str) -> MeanEstimate:
  """Estimates the difference from the first over shared seeds and items."""
  weights = {(label, ""): 1.0, (first, ""): -1.0}
  values = {side: pairing.values[side] for side in weights}
  if len(set.intersection(*map(set, values.values()))) < 2:
    # Their means over seeds are paired by items alone.
    values = {
      side: {("", ""): np.mean([*by_seed.values()], axis=0)}
      for side, by_seed in values.items()
    }
  return pairing._replace(values=values).difference(weights)


def _difference_text(row: TunedRow) -> str:
  if row.difference is None:
    return ""
  estimate, low, high = row.difference
  if row.metric not in _SIGNED:
    low, high = np.clip((low, high), -1, 1)
  return f"{100 * estimate:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
