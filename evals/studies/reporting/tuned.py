"""Compares fine-tuned models on the items that they predicted."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax import tables
from antlm_jax.errors import UserError
from antlm_jax.evals import results, statistics
from antlm_jax.evals.finetuning.summary import MODEL, Summary
from antlm_jax.evals.statistics import CONFIDENCE, Interval
from antlm_jax.runtime import files

REPORT = "report.md"
_HEAD = "", "model", "score", "seeds", "score (%)", "difference from the first"


class Answers(NamedTuple):
  """A model's scores of the n items of an evaluation set."""

  items: Sequence[tuple[str, str]]  # id and label of each item
  metric: str  # the mean of the scores
  seeds: Sequence[int]  # S fine-tunings with the best learning rate
  scores: np.ndarray  # in [0, 1], float64 `[S, n]`


class TunedRow(NamedTuple):
  """A model's score on an evaluation set, next to the first model's."""

  evaluation: str
  label: str  # of the model
  metric: str
  seeds: int
  score: float  # in [0, 1]
  difference: Interval | None  # from the first model, by seeds and items


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
  answers = {label: _read_answers(folders[label]) for label in folders}
  first, *others = answers
  evaluations = [
    name for name in answers[first] if all(name in answers[x] for x in others)
  ]
  if not evaluations:
    raise UserError(f"{', '.join(folders)} share no evaluation set")
  rows = [
    _row(name, label, answers[label][name], first, answers[first][name])
    for name in evaluations
    for label in answers
  ]
  cells = [
    (
      row.evaluation,
      row.label,
      row.metric,
      row.seeds,
      f"{100 * row.score:.1f}",
      _difference_text(row.difference),
    )
    for row in rows
  ]
  table = tables.text_table(cells, _HEAD, "<<<>><")
  table += f"\n({100 * CONFIDENCE:g} % interval over seeds and items, paired)"
  if output:
    with files.replacing(output / REPORT) as aside:
      aside.write_text(f"# Fine-tuned models compared\n\n```\n{table}\n```\n")
  return TunedComparison(tuple(rows), table, output)


def _read_answers(folder: pathlib.Path) -> dict[str, Answers]:
  """Reads a model's scores by evaluation set."""
  fields = files.read_json(folder / results.SUMMARY, "the summary")
  try:
    summary = Summary.from_json(fields)
    best = [
      i for i, r in enumerate(summary.runs) if r in summary.best_rate_runs
    ]
  except (KeyError, TypeError) as error:
    raise UserError(f"{folder}: no results of a fine-tuning") from error
  by_evaluation = {}
  for _, item in files.read_jsonl(folder / results.ITEMS, "the items"):
    by_evaluation.setdefault(item["evaluation"], []).append(item)
  answers = {}
  for name, items in by_evaluation.items():
    has_scores = "scores" in items[0]
    column = "scores" if has_scores else "correct"
    scores = np.array([item[column] for item in items], np.float64)
    answers[name] = Answers(
      items=[(item["id"], json.dumps(item["label"])) for item in items],
      metric=summary.main_metric if has_scores else "right answers",
      seeds=[summary.runs[i]["seed"] for i in best],
      scores=scores[:, best].T,
    )
  return answers


def _row(
  name: str, label: str, answers: Answers, first: str, reference: Answers
) -> TunedRow:
  """Compares a model's answers with those of the first model."""
  if answers.items != reference.items or answers.metric != reference.metric:
    raise UserError(
      f"{name}: {label} has other items than {first}: evaluate both on the same"
      " files"
    )
  scores = answers.scores
  reference_scores = reference.scores
  if [*answers.seeds] != [*reference.seeds]:
    scores = scores.mean(axis=0, keepdims=True)
    reference_scores = reference_scores.mean(axis=0, keepdims=True)
  difference = None
  if answers is not reference:
    estimate = statistics.estimate_mean(
      scores - reference_scores, pretrained=False
    )
    difference = estimate.interval()
  return TunedRow(
    name,
    label,
    answers.metric,
    len(answers.seeds),
    float(answers.scores.mean()),
    difference,
  )


def _difference_text(difference: Interval | None) -> str:
  if difference is None:
    return ""
  estimate, *ends = difference
  low, high = np.clip(ends, -1, 1)
  return f"{100 * estimate:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
