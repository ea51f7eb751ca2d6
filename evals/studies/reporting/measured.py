"""Measurements of trained runs: one table, and the scores of single items.

A row of the table is one value, of a variant's run (`seed`) after `step` steps:

  task                 mode           metric             value
  a benchmark's name   as scored      "accuracy"         mean over its UIDs
  an evaluation set    the attention  each metric shown  of one trial

A trial is one fine-tuning, by its seed (`trial`) and learning rate (`lr`). Only
values of the `main` metric of a task count in means and claims.
"""

import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from antlm_jax.evals.finetuning.presets import PRESETS
from antlm_jax.evals.studies.reporting.runs import (
  TrainedRun,
  finite_number,
  reading_file,
)
from antlm_jax.evals.zero_shot.command import Reported
from antlm_jax.evals.zero_shot.tasks import TASKS
from antlm_jax.runtime import files

CHANCE = 0.5  # of choosing the right one of a pair
KEY = ["variant", "seed", "task", "mode"]  # the part that has one score
_COLUMNS = {  # with the values of tasks that lack them
  "variant": "",
  "seed": "",
  "step": 0,
  "task": "",
  "mode": "",
  "metric": "",
  "main": True,  # whether it is the metric that counts
  "value": np.nan,
  "pipeline": "",  # of benchmarks: how items are scored
  "pairs": 0,  # of benchmarks: how many were scored
  "phenomena": None,  # of benchmarks: by UID
  "complete": True,  # whether the task's data were there in full
  "trial": "",
  "lr": np.nan,
  "chosen": True,  # whether it is a trial at the best learning rate
  "baseline": np.nan,  # score of the best trivial answer
  "collapsed": False,  # whether the trial gives nearly one answer
  "items": (),  # where its items' scores are: files and their columns
}
# Folders of fine-tuned tasks.
_TUNED = dict.fromkeys(s.folder for s in PRESETS.values() if s.reported)


def benchmarks() -> list[Reported]:
  """Returns the zero-shot benchmarks, each a column of the report."""
  return [benchmark for task in TASKS.values() for benchmark in task.reported]


def read_measurements(runs: Mapping[str, Sequence[TrainedRun]]) -> pd.DataFrame:
  """Reads all that was measured of runs, by variant.

  Raises:
    UserError: if a file cannot be read.
  """
  rows = []
  for variant, of_variant in runs.items():
    for run in of_variant:
      own = _COLUMNS | {"variant": variant, "seed": run.seed}
      rows += [own | row for row in _zero_shot(run.folder / "evals")]
      rows += [own | row for row in _read_tuned_scores(run.folder / "evals")]
  plain = bool, int, float  # an empty table has these types, too
  types = {n: type(v) for n, v in _COLUMNS.items() if isinstance(v, plain)}
  return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(types)


def latest_scores(table: pd.DataFrame) -> pd.DataFrame:
  """Returns the scores of each task's last checkpoint evaluated."""
  last = table.groupby([*KEY, "pipeline"], sort=False).step.transform("max")
  return table[table.step == last]


def published_numbers(name: str) -> pd.DataFrame:
  """Returns numbers of papers, from a file of published/."""
  path = pathlib.Path(__file__).parent / "published" / f"{name}.csv"
  return pd.read_csv(path)


def _zero_shot(folder: pathlib.Path) -> list[dict[str, Any]]:
  found = {}
  for task, benchmark in ((t, b) for t in TASKS.values() for b in t.reported):
    for path in sorted((folder / benchmark.folder).glob("*/summary.json")):
      with reading_file(path) as summary:
        request = summary["request"]
        place = {
          "task": benchmark.name,
          "pipeline": request["pipeline"] if benchmark.pairs else "",
          "mode": request["mode"],
          "step": finite_number(request, "step"),
        }
        value = finite_number(summary, task.figure)
        row = place | {"metric": "accuracy", "value": value}
        if benchmark.pairs:
          by_uid = summary["by_uid"].items()
          row |= {
            "pairs": finite_number(summary, "pairs"),
            "baseline": CHANCE,
            "phenomena": {uid: about["term"] for uid, about in by_uid},
            "complete": summary["pairs"] == benchmark.pairs,
            "items": _items(path, "accuracy"),
          }
      found.setdefault(tuple(place.values()), row)
  return list(found.values())


def _read_tuned_scores(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns a row for each trial and evaluation set of fine-tuned tasks."""
  found = {}  # a later folder's results of the same checkpoint replace others
  paths = [sorted((folder / t).glob("*/*/summary.json")) for t in _TUNED]
  for path in itertools.chain(*paths):
    with reading_file(path) as summary:
      request, main = summary["request"], summary["main_metric"]
      shown = main, *summary.get("also", ())
      sets = summary["evaluations"].items()
      for (name, about), metric in itertools.product(sets, shown):
        place = {
          "task": name,
          "mode": request["attention"],
          "step": finite_number(request, "step"),
          "main": metric == main,
          "metric": metric if metric != main else "",
        }
        row = place | {
          "metric": metric,
          "complete": not request["limit"],
          "baseline": finite_number(about["baseline"], metric),
        }
        of_task = name.removesuffix("-test") == summary["task"]
        found[tuple(place.values())] = [
          row
          | {
            "value": finite_number(trial["scores"][name], metric),
            "trial": str(trial["seed"]),
            "lr": finite_number(trial, "lr"),
            "chosen": trial["lr"] == summary["best_lr"],
            "collapsed": of_task and trial["collapsed"],
            "items": _items(path, (name, index)) if metric == main else (),
          }
          for index, trial in enumerate(summary["runs"])
        ]
  return list(itertools.chain(*found.values()))


def _items(summary: pathlib.Path, column) -> tuple:
  path = summary.with_name("items.jsonl")
  return ((path, column),) if path.is_file() else ()


# ------------------------------------------------------------------ the items


class Items(NamedTuple):
  """A run's scores of each of a task's n items."""

  names: tuple[tuple[str, str], ...]  # UIDs and ids; where equal, runs compare
  texts: tuple  # items of equal texts count as one item
  scores: np.ndarray  # `[n]`, as bool whether it is right


class ItemFiles(dict):
  """Items by file and column; a file is read when it is first asked for.

  Columns of zero-shot items are `accuracy` and `log-odds`, in nats: the score
  of the right choice minus that of the best other choice. Columns of a
  fine-tuned
  task are the evaluation set with the number of the trial, if its main metric
  is a mean over examples.
  """

  def __missing__(self, path: pathlib.Path) -> dict[Any, Items]:
    with reading_file(path, files.read_jsonl) as lines:
      found = [item for _, item in lines]
      if not found:
        raise ValueError("it is empty")
      of_pairs = "uid" in found[0]
      self[path] = dict((_of_pairs if of_pairs else _of_trials)(found))
      for _, _, scores in self[path].values():
        if scores.dtype.kind not in "bif" or not np.isfinite(scores).all():
          raise ValueError("a score is not a finite number")
    return self[path]

  def of(self, places: Sequence[tuple[pathlib.Path, Any]]) -> Items | None:
    """Returns the items of a task, or of several; None if some have none."""
    found = [self[path].get(column) for path, column in places]
    if not found or None in found:
      return None
    names, texts, scores = zip(*found, strict=True)
    return Items(sum(names, ()), sum(texts, ()), np.concatenate(scores))


def _of_pairs(found: Sequence[Mapping]) -> Iterator[tuple[str, Items]]:
  names = tuple((item["uid"], item["id"]) for item in found)
  texts = tuple((*i.get("contexts", ()), *i["choices"]) for i in found)
  odds = [i["scores"][0] - max(i["scores"][1:]) for i in found]
  right = [item["correct"] for item in found]
  yield "accuracy", Items(names, texts, np.array(right))
  yield "log-odds", Items(names, texts, np.array(odds))


def _of_trials(found: Sequence[Mapping]) -> Iterator[tuple[Any, Items]]:
  found = [item for item in found if "scores" in item]
  for name in dict.fromkeys(item["evaluation"] for item in found):
    those = [item for item in found if item["evaluation"] == name]
    names = tuple((name, item["id"]) for item in those)
    texts = tuple(item["text"] for item in those)
    scores = np.array([item["scores"] for item in those])
    for trial in range(scores.shape[1]):
      yield (name, trial), Items(names, texts, scores[:, trial])
