"""The long table of a study: one line for each value that was measured.

A line is a value of a row's run (`seed`) after `step` steps:

  measure                   mode           metric       value
  "clm, end", "clm, lowest" none           "loss"       held out, in nats
  a benchmark's name        as scored      none         mean over its UIDs
  an evaluation set         the attention  its metrics  of one fine-tuning

A fine-tuning (`trial`) has a seed and a learning rate. Only values of the
`main` metric of a measure count in claims.
"""

import csv
import itertools
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from antlm_jax.evals import results
from antlm_jax.evals.finetuning.presets import PRESETS
from antlm_jax.evals.studies.reporting.runs import (
  TrainedRun,
  ended,
  finite_number,
  reading_file,
)
from antlm_jax.evals.zero_shot.task import Reported
from antlm_jax.evals.zero_shot.tasks import TASKS
from antlm_jax.runtime import files
from antlm_jax.training.metrics import REPORT, ROWS

BLIMP = "BLiMP"
ODDS = f"{BLIMP} (log-odds)"  # by how much pairs are right, in nats
CHANCE = 0.5  # of choosing the right one of a pair
LOWEST = "lowest"
WHEN = "end", LOWEST  # the step of a held-out loss
LOSS = "loss"
# Folders of fine-tuned tasks.
_TUNED = dict.fromkeys(s.folder for s in PRESETS.values() if s.reported)


class Score(NamedTuple):
  """A line of the long table."""

  row: str
  seed: str
  measure: str
  mode: str
  value: float
  metric: str = ""
  step: int = 0
  main: bool = True  # whether it is the metric that counts
  baseline: float | None = None  # value of the best trivial answer
  complete: bool = True  # whether the measure's data were there in full
  pipeline: str = ""  # of benchmarks: how items are scored
  pairs: int = 0  # of benchmarks: number of pairs
  trial: str = ""
  lr: float = 0.0
  chosen: bool = True  # whether it is a trial at the best learning rate
  collapsed: bool = False  # whether the trial gives nearly one answer
  # Files of the items' scores, with columns; None if no items are known.
  items: tuple | None = ()


class Scores(list[Score]):
  """Lines of the long table."""

  def where(self, **fields) -> "Scores":
    """Returns the lines whose fields have a value, or one of several."""
    choices = {
      name: value if isinstance(value, list | tuple | Mapping) else (value,)
      for name, value in fields.items()
    }
    return Scores(
      line
      for line in self
      if all(getattr(line, name) in values for name, values in choices.items())
    )

  def groups(self, *fields: str) -> dict[tuple, "Scores"]:
    """Returns the lines by the values of some fields."""
    groups = {}
    for line in self:
      key = tuple(getattr(line, field) for field in fields)
      groups.setdefault(key, Scores()).append(line)
    return groups

  def distinct(self, field: str) -> list:
    """Returns the different values of a field, in order."""
    return list(dict.fromkeys(getattr(line, field) for line in self))

  def latest(self) -> "Scores":
    """Returns the lines of each measure's last checkpoint evaluated."""
    groups = self.groups("row", "seed", "measure", "mode", "pipeline").values()
    return Scores(
      line
      for lines in groups
      for line in lines.where(step=max(lines.distinct("step")))
    )


def benchmarks() -> list[Reported]:
  """Returns the zero-shot benchmarks, each a column of the report."""
  return [benchmark for task in TASKS.values() for benchmark in task.reported]


def read_scores(runs: Mapping[str, Sequence[TrainedRun]]) -> Scores:
  """Reads the results of all evaluations of runs, by row.

  Raises:
    UserError: if a file cannot be read.
  """
  scores = Scores()
  for run in itertools.chain(*runs.values()):
    scores += _zero_shot(run)
    scores += _fine_tuned(run)
  return scores


def loss_name(kind: str, when: str, after: int = 0, half: str = REPORT) -> str:
  """Returns the measure of an objective's held-out loss, as of `losses`."""
  name = f"{kind}, {when_name(when, after)}"
  return name if half == REPORT else f"{name}, {half}"


def when_name(when: str, after: int) -> str:
  """Returns the name of the step at which a loss is compared."""
  return f"{when} after step {after:,}" if after and when == LOWEST else when


def losses(
  runs: Iterable[TrainedRun], after: int = 0, half: str = REPORT
) -> Scores:
  """Returns the losses of a row's runs at the end, and at their lowest.

  Args:
    runs: The runs.
    after: First steps to leave out; then only the lowest loss is returned.
    half: Half of the held-out rows that measures; the other half chooses.
  """
  scores = Scores()
  for run in ended(runs):
    if half != REPORT and not run.halves:
      continue
    path = run.folder / ROWS
    times = (LOWEST,) if after else WHEN
    for kind, when in itertools.product(run.names.values(), times):
      step = run.last(kind)
      loss = run.end(kind, half)
      if when == LOWEST:
        step = run.best(kind, after, half)
        loss = None if step is None else run.halves[half][kind][step]
      if loss is None:
        continue
      column = step, f"{kind}/{half}"
      scores.append(
        Score(
          row=run.variant,
          seed=run.seed,
          measure=loss_name(kind, when, after, half),
          mode="",
          value=loss,
          metric=LOSS,
          step=step,
          baseline=run.summary["unigram_entropy"],
          items=((path, column),) if path.is_file() else None,
        )
      )
  return scores


def mean_of(scores: Scores, measures: Collection[str], name: str) -> Scores:
  """Averages measures, for the fine-tunings that have them all."""
  means = Scores()
  groups = scores.where(measure=measures).groups("row", "seed", "trial", "mode")
  for lines in groups.values():
    if len(lines) == len(measures):
      lines.sort(key=lambda line: line.measure)
      items = [line.items for line in lines]
      means.append(
        lines[0]._replace(
          measure=name,
          metric=", ".join(
            dict.fromkeys(filter(None, lines.distinct("metric")))
          ),
          value=float(np.mean([line.value for line in lines])),
          baseline=float(np.mean([line.baseline for line in lines])),
          complete=all(line.complete for line in lines),
          items=sum(items, ()) if all(items) else (),
          collapsed=False,
        )
      )
  return means


def published_numbers(name: str) -> list[dict[str, Any]]:
  """Returns numbers of papers, from a file of published/."""
  path = pathlib.Path(__file__).parent / "published" / f"{name}.csv"
  with path.open(newline="") as file:
    lines = list(csv.DictReader(file))
  return [
    {name: _number(cell) for name, cell in line.items()} for line in lines
  ]


def _number(cell: str) -> str | float | None:
  try:
    return float(cell)
  except ValueError:
    return cell or None


def _zero_shot(run: TrainedRun) -> list[Score]:
  scores = {}
  folder = run.folder / "evals"
  for task, benchmark in ((t, b) for t in TASKS.values() for b in t.reported):
    for path in sorted((folder / benchmark.folder).glob("*/summary.json")):
      with reading_file(path) as summary:
        request = summary["request"]
        score = Score(
          row=run.variant,
          seed=run.seed,
          measure=benchmark.name,
          mode=request["mode"],
          value=finite_number(summary, task.figure),
          step=finite_number(request, "step"),
          pipeline=request["pipeline"] if benchmark.pairs else "",
        )
        if benchmark.pairs:
          score = score._replace(
            pairs=finite_number(summary, "pairs"),
            baseline=CHANCE,
            complete=summary["pairs"] == benchmark.pairs,
            items=_items(path, "accuracy"),
          )
      key = score.measure, score.pipeline, score.mode, score.step
      scores.setdefault(key, score)
  return list(scores.values())


def _fine_tuned(run: TrainedRun) -> Iterator[Score]:
  """Yields a line for each trial, evaluation set and metric."""
  scores = {}  # a later folder's results of the same checkpoint replace others
  folder = run.folder / "evals"
  paths = [sorted((folder / t).glob("*/*/summary.json")) for t in _TUNED]
  for path in itertools.chain(*paths):
    with reading_file(path) as summary:
      request = summary["request"]
      main = summary["main_metric"]
      metrics = main, *summary.get("also", ())
      sets = summary["evaluations"].items()
      for (name, figures), metric in itertools.product(sets, metrics):
        score = Score(
          row=run.variant,
          seed=run.seed,
          measure=name,
          mode=request["attention"],
          value=0.0,
          metric=metric,
          step=finite_number(request, "step"),
          main=metric == main,
          baseline=finite_number(figures["baseline"], metric),
          complete=not request["limit"],
        )
        task_set = name.removesuffix("-test") == summary["task"]
        key = name, score.mode, score.step, metric if not score.main else ""
        scores[key] = [
          score._replace(
            value=finite_number(trial["scores"][name], metric),
            trial=str(trial["seed"]),
            lr=finite_number(trial, "lr"),
            chosen=trial["lr"] == summary["best_lr"],
            collapsed=task_set and trial["collapsed"],
            items=_items(path, (name, index)) if score.main else (),
          )
          for index, trial in enumerate(summary["runs"])
        ]
  return itertools.chain(*scores.values())


def _items(summary: pathlib.Path, column) -> tuple:
  path = summary.with_name(results.ITEMS)
  return ((path, column),) if path.is_file() else ()


# ------------------------------------------------------------------ the items


class Items(NamedTuple):
  """A run's scores of each of a measure's n items."""

  names: tuple[tuple[str, str], ...]  # UIDs and ids; where equal, runs compare
  texts: tuple  # items of equal texts count as one item
  scores: np.ndarray  # `[n]`, as bool whether it is right


class ItemFiles(dict):
  """Items by file and column; a file is read when it is first asked for.

  Columns of zero-shot items are `accuracy` and `log-odds`, in nats: the score
  of the right choice minus that of the best other choice. Columns of a
  fine-tuned task are the evaluation set with the number of the trial, if its
  main metric is a mean over examples. Columns of held-out rows are the step
  with the objective and half.
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
    if score.metric == LOSS:  # those of rows are rounded
      values = values + (score.value - values.mean())
    return Items(sum(names, ()), sum(texts, ()), values)

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
  items = [item for item in items if "scores" in item]
  for name in dict.fromkeys(item["evaluation"] for item in items):
    examples = [item for item in items if item["evaluation"] == name]
    names = tuple((name, item["id"]) for item in examples)
    texts = tuple(item["text"] for item in examples)
    scores = np.array([item["scores"] for item in examples])
    for trial in range(scores.shape[1]):
      yield (name, trial), Items(names, texts, scores[:, trial])
