"""Scores of single items: by them, rows are paired."""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from antlm_jax.evals.studies.reporting.runs import reading_file
from antlm_jax.evals.studies.reporting.scores import (
  BLIMP,
  LOSS,
  ODDS,
  Score,
  Scores,
)
from antlm_jax.runtime import files
from antlm_jax.training.metrics import ROWS


class Items(NamedTuple):
  """A run's scores of each of a measure's n items."""

  # UIDs and ids, and texts. Runs compare if both are equal.
  names: tuple[tuple, ...]
  texts: tuple  # items of equal texts count as one item
  scores: np.ndarray  # `[n]`, as bool whether it is right


class ItemFiles(dict):
  """Items by file and column; a file is read when it is first asked for.

  Columns of zero-shot items are `accuracy` and `log-odds`, in nats: the score
  of the right choice minus that of the best other choice. Columns of a
  fine-tuned task are the evaluation set and the number of the trial: the items'
  parts in the main metric.
  Columns of held-out rows are the step with the objective and half.
  """

  def __missing__(self, path: pathlib.Path) -> dict[Any, Items]:
    with reading_file(path, files.read_jsonl) as lines:
      items = [item for _, item in lines]
      if not items:
        raise ValueError("it is empty")
      read = _pair_columns if "uid" in items[0] else _trial_columns
      read = _loss_columns if path.name == ROWS else read
      self[path] = dict(read(items))
      for _, _, scores in self[path].values():
        if scores.dtype.kind not in "bif" or not np.isfinite(scores).all():
          raise ValueError("a score is not a finite number")
    return self[path]

  def of(self, score: Score) -> Items | None:
    """Returns the items of a line; None if they are unknown."""
    if score.items is None:
      return Items((("", ""),), ("",), np.array([score.value]))
    # A record has no items: it has the name "" for their file.
    columns = [
      self[path].get(column) if path else None for path, column in score.items
    ]
    if not columns or None in columns:
      return None
    names, texts, scores = zip(*columns, strict=True)
    values = np.concatenate(scores)
    item_texts = sum(texts, ())
    if score.metric == LOSS:
      # The losses of rows are rounded. Rows have no hash of their text, but
      # the baseline is the entropy of the tokens of all.
      values = values + (score.value - values.mean())
      item_texts = tuple((score.baseline, text) for text in item_texts)
    return Items(sum(names, ()), item_texts, values)

  def log_odds(self, scores: Scores) -> Scores:
    """Returns the log-odds behind BLiMP's accuracies."""
    lines = Scores()
    for score in scores.where(measure=BLIMP):
      if score.items:
        ((path, _),) = score.items
        score = score._replace(
          measure=ODDS, baseline=0.0, items=((path, "log-odds"),)
        )
        lines.append(score._replace(value=float(self.of(score).scores.mean())))
    return lines


def _pair_columns(items: Sequence[Mapping]) -> Iterator[tuple[str, Items]]:
  names = tuple((item["uid"], item["id"]) for item in items)
  texts = tuple((*i.get("contexts", ()), *i["choices"]) for i in items)
  odds = [i["scores"][0] - max(i["scores"][1:]) for i in items]
  correct = [item["correct"] for item in items]
  yield "accuracy", Items(names, texts, np.array(correct))
  yield "log-odds", Items(names, texts, np.array(odds))


def _loss_columns(lines: Sequence[Mapping]) -> Iterator[tuple[Any, Items]]:
  for line in lines:
    for column, losses in line.items():
      if column != "step":
        names = tuple(("", str(row)) for row in range(len(losses)))
        yield (line["step"], column), Items(names, names, np.array(losses))


def _trial_columns(items: Sequence[Mapping]) -> Iterator[tuple[Any, Items]]:
  evaluations = {}
  for item in items:
    evaluations.setdefault(item["evaluation"], []).append(item)
  for name, examples in evaluations.items():
    # The same text with another label is another item.
    labels = [json.dumps(item["label"]) for item in examples]
    ids = [item["id"] for item in examples]
    names = tuple((name, item) for item in zip(ids, labels, strict=True))
    texts = tuple(item.get("text", item["id"]) for item in examples)
    # Results of an earlier version may have no scores.
    scores = np.array([item.get("scores", ()) for item in examples])
    for trial in range(scores.shape[1]):
      yield (name, trial), Items(names, texts, scores[:, trial])
