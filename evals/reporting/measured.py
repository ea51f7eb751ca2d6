"""What was measured of trained runs: one table, and the scores of single items.

A row of the table is one value, of a variant's run (`seed`) after `step` steps:

  task                 mode           metric             value
  "held-out"           an objective   "loss"             nats per target
  a benchmark's name   as scored      "accuracy"         mean over its UIDs
  an evaluation set    the attention  its main metric    of one trial

A trial is one fine-tuning, by its seed (`trial`) and learning rate (`lr`).
"""

import hashlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from antlm_jax.evals.reporting.runs import TrainedRun, ended, number, reading
from antlm_jax.runtime import files

HELD_OUT = "held-out"
KEY = ["variant", "seed", "task", "mode"]  # what has one score
_COLUMNS = {
  "variant": "",
  "seed": "",
  "step": 0,
  "task": "",
  "mode": "",
  "metric": "",
  "value": np.nan,
  "ended": False,  # of losses: whether the run is at its end (`runs.ended`)
  "pipeline": "",  # of zero-shot scores: how items are scored
  "pairs": 0,  # of zero-shot scores: how many
  "phenomena": None,  # of zero-shot scores: a dict, by UID
  "complete": True,  # whether the task's data were there in full
  "trial": "",
  "lr": np.nan,
  "chosen": True,  # whether it is a trial at the best learning rate
  "baseline": np.nan,  # score of the best answer that is always the same
  "collapsed": False,  # whether the trial gives nearly one answer
  "items": (),  # where its items' scores are: files and their columns
}
_TUNED = ("finetune", "finetune-study")  # folders of fine-tuned tasks


class Benchmark(NamedTuple):
  """A zero-shot benchmark."""

  name: str  # in the report
  folder: str  # name of its data's folder
  pairs: int  # number of pairs in full, as BabyLM filters it


BENCHMARKS = (
  Benchmark("BLiMP", "blimp_filtered", 59_875),
  Benchmark("BLiMP supplement", "blimp_supplement_filtered", 5_218),
  Benchmark("EWoK", "ewok", 7_618),
)


# ------------------------------------------------------------------ the table


def read(runs: Mapping[str, Sequence[TrainedRun]]) -> pd.DataFrame:
  """Reads the results of all runs, by variant.

  Raises:
    UserError: if a file cannot be read.
  """
  rows = []
  for variant, of_variant in runs.items():
    at_end = ended(of_variant)
    for run in of_variant:
      own = {"variant": variant, "seed": run.seed}
      losses = ({"ended": run in at_end} | row for row in _losses(run))
      found = *losses, *_zero_shot(run.folder), *_tuned(run.folder)
      rows += [_COLUMNS | own | row for row in found]
  return pd.DataFrame(rows, columns=list(_COLUMNS))


def latest(table: pd.DataFrame) -> pd.DataFrame:
  """Returns the scores of each task's last checkpoint evaluated."""
  last = table.groupby([*KEY, "pipeline"], sort=False).step.transform("max")
  return table[table.step == last]


def _losses(run: TrainedRun) -> Iterator[dict[str, Any]]:
  for kind in run.names.values():
    for step, loss in sorted(run.losses.get(kind, {}).items()):
      yield {
        "step": step,
        "task": HELD_OUT,
        "mode": kind,
        "metric": "loss",
        "value": loss,
      }


def _zero_shot(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
  for benchmark in BENCHMARKS:
    seen = set()
    results = folder / "evals" / benchmark.folder
    for path in sorted(results.glob("*/summary.json")):
      with reading(path) as summary:
        request = summary["request"]
        key = request["pipeline"], request["mode"], number(request, "step")
        items = path.with_name("items.jsonl")
        row = {
          "step": request["step"],
          "task": benchmark.name,
          "mode": request["mode"],
          "metric": "accuracy",
          "value": number(summary, "macro_accuracy"),
          "pipeline": request["pipeline"],
          "pairs": number(summary, "pairs"),
          "phenomena": {u: of["term"] for u, of in summary["by_uid"].items()},
          "complete": summary["pairs"] == benchmark.pairs,
          "items": ((items, "accuracy"),) if items.is_file() else (),
        }
      if key not in seen:  # as another folder has it
        yield row
      seen.add(key)


def _tuned(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Returns a row for each trial and evaluation set of fine-tuned tasks."""
  found = {}  # by what later folders replace
  paths = (
    path
    for name in _TUNED
    for path in sorted((folder / "evals" / name).glob("*/*/summary.json"))
  )
  for path in paths:
    items = path.with_name("items.jsonl")
    with reading(path) as summary:
      request, metric = summary["request"], summary["main_metric"]
      for name, about in summary["evaluations"].items():
        own = name.removesuffix("-test") == summary["task"]
        place = name, request["attention"], number(request, "step")
        found[place] = [
          {
            "step": request["step"],
            "task": name,
            "mode": request["attention"],
            "metric": metric,
            "value": number(trial["scores"][name], metric),
            "complete": not request["limit"],
            "trial": str(trial["seed"]),
            "lr": number(trial, "lr"),
            "chosen": trial["lr"] == summary["best_lr"],
            "baseline": number(about["baseline"], metric),
            "collapsed": own and trial["collapsed"],
            "items": ((items, (name, index)),) if items.is_file() else (),
          }
          for index, trial in enumerate(summary["runs"])
        ]
  return [row for trials in found.values() for row in trials]


# ------------------------------------------------------------------ the items


class Items(NamedTuple):
  """What a run gets of each of a task's n items."""

  key: str  # digest of the items' names in order; results of one key compare
  uids: tuple[str, ...]  # in order of appearance
  strata: np.ndarray  # index of each item's UID, int `[n]`
  scores: np.ndarray  # `[n]`, as bool whether it is right

  @classmethod
  def of(cls, names: Sequence[tuple[str, str]], scores: Sequence) -> "Items":
    """Makes them of each item's UID and id; raises a ValueError if wrong."""
    scores = np.array(scores)
    if not len(names):
      raise ValueError("it is empty")
    if scores.dtype.kind not in "bif" or not np.isfinite(scores).all():
      raise ValueError("a score is not a finite number")
    # The same names in the same order are the same items.
    text = "\n".join(map("\t".join, names))
    uids = tuple(dict.fromkeys(uid for uid, _ in names))
    index = {uid: i for i, uid in enumerate(uids)}
    return cls(
      key=hashlib.sha256(text.encode()).hexdigest(),
      uids=uids,
      strata=np.array([index[uid] for uid, _ in names]),
      scores=scores,
    )

  @property
  def mean(self) -> float:
    """The unweighted mean over UIDs of the mean over their items."""
    sums = np.bincount(self.strata, self.scores)
    return float(np.mean(sums / np.bincount(self.strata)))


class ItemFiles(dict):
  """Items by file and column; a file is read when it is first asked for.

  Columns of zero-shot items are `accuracy` and `log-odds`, in nats: the score
  of the right choice minus that of the best other one. Columns of a fine-tuned
  task are the evaluation set with the number of the trial, if its main metric
  is a mean over examples.
  """

  def __missing__(self, path: pathlib.Path) -> dict[Any, Items]:
    with reading(path, files.read_jsonl) as lines:
      found = [item for _, item in lines]
      of_pairs = not found or "uid" in found[0]
      self[path] = (_of_pairs if of_pairs else _of_trials)(found)
    return self[path]

  def of(self, places: Sequence[tuple[pathlib.Path, Any]]) -> Items | None:
    """Returns the items of a task, or of several; None if some have none.

    The UIDs of all of them are strata.
    """
    found = [self[path].get(column) for path, column in places]
    if not found or None in found:
      return None
    starts = np.cumsum([0, *(len(part.uids) for part in found)])
    strata = [part.strata + n for part, n in zip(found, starts, strict=False)]
    return Items(
      key=" ".join(part.key for part in found),
      uids=tuple(uid for part in found for uid in part.uids),
      strata=np.concatenate(strata),
      scores=np.concatenate([part.scores for part in found]),
    )


def _of_pairs(found: Sequence[Mapping]) -> dict[str, Items]:
  names = [(item["uid"], item["id"]) for item in found]
  odds = [i["scores"][0] - max(i["scores"][1:]) for i in found]
  return {
    "accuracy": Items.of(names, [item["correct"] for item in found]),
    "log-odds": Items.of(names, odds),
  }


def _of_trials(found: Sequence[Mapping]) -> dict[tuple[str, int], Items]:
  out = {}
  for name in dict.fromkeys(item["evaluation"] for item in found):
    those = [i for i in found if i["evaluation"] == name and "scores" in i]
    names = [(name, item["id"]) for item in those]
    for trial in range(len(those[0]["scores"]) if those else 0):
      scores = [item["scores"][trial] for item in those]
      out[name, trial] = Items.of(names, scores)
  return out
