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
from antlm_jax.training.metrics import REPORT, ROWS

BLIMP = "BLiMP"
ODDS = f"{BLIMP} (log-odds)"  # by how much pairs are right, in nats
CHANCE = 0.5  # of choosing the right one of a pair
WHEN = END, LOWEST = "end", "lowest"  # the step of a held-out loss
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
  return Scores(
    score
    for run in itertools.chain(*runs.values())
    for score in (*_zero_shot(run), *_fine_tuned(run))
  )


def loss_measure(
  loss_name: str, when: str, half: str = REPORT, after: int = 0
) -> str:
  """Returns the measure of an objective's held-out loss, as of `losses`."""
  name = f"{loss_name}, {when_name(when, after)}"
  return name if half == REPORT else f"{name}, {half}"


def when_name(when: str, after: int) -> str:
  """Returns the name of the step at which a loss is compared."""
  return f"{when} after step {after:,}" if after and when == LOWEST else when


def losses(
  runs: Iterable[TrainedRun], half: str = REPORT, after: int = 0
) -> Iterator[Score]:
  """Yields the losses of a row's runs at the end, and at their lowest.

  Args:
    runs: The runs.
    half: Half of the held-out rows that measures; the other half chooses.
    after: First steps to leave out; then only the lowest loss is returned.
  """
  for run in ended(runs):
    if half != REPORT and not run.has_halves:
      continue
    path = run.folder / ROWS
    for loss_name in run.names.values():
      measured = {END: None if after else run.end(loss_name, half)}
      measured[LOWEST] = run.lowest(loss_name, half, after)
      for when, step_and_loss in measured.items():
        if step_and_loss is None:
          continue
        step, loss = step_and_loss
        column = step, f"{loss_name}/{half}"
        yield Score(
          row=run.variant,
          seed=run.seed,
          measure=loss_measure(loss_name, when, half, after),
          mode="",
          value=loss,
          metric=LOSS,
          step=step,
          baseline=run.summary["unigram_entropy"],
          items=((path, column),) if path.is_file() else None,
        )


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
      items = path.with_name(results.ITEMS)
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
            items=((items, "accuracy"),) if items.is_file() else (),
          )
      key = score.measure, score.pipeline, score.mode, score.step
      scores.setdefault(key, score)
  return list(scores.values())


def _fine_tuned(run: TrainedRun) -> Iterator[Score]:
  scores = {}  # a later folder's results of the same checkpoint replace others
  folder = run.folder / "evals"
  for task in _TUNED:
    for path in sorted((folder / task).glob("*/*/summary.json")):
      lines = tuned_scores(run.variant, run.seed, path)
      groups = lines.groups("measure", "mode", "step", "main", "metric")
      for (*measure, main, metric), group in groups.items():
        scores[*measure, main or metric] = group
  return itertools.chain(*scores.values())


def tuned_scores(row: str, seed: str, path: pathlib.Path) -> Scores:
  """Returns a line for each trial, evaluation set and metric of a fine-tuning.

  Args:
    row: Name of the row.
    seed: Name of the pretraining.
    path: Path to the summary.

  Raises:
    UserError: If the summary cannot be read.
  """
  scores = Scores()
  items = path.with_name(results.ITEMS)
  with reading_file(path) as summary:
    request = summary["request"]
    main = summary["main_metric"]
    sets = summary["evaluations"].items()
    metrics = main, *summary.get("also", ())
    for (name, figures), metric in itertools.product(sets, metrics):
      is_task = name.removesuffix("-test") == summary["task"]
      for number, trial in enumerate(summary["runs"]):
        column = name, number
        has_items = metric == main and items.is_file()
        scores.append(
          Score(
            row=row,
            seed=seed,
            measure=name,
            mode=request["attention"],
            value=finite_number(trial["scores"][name], metric),
            metric=metric,
            step=finite_number(request, "step"),
            main=metric == main,
            baseline=finite_number(figures["baseline"], metric),
            complete=not request["limit"],
            trial=str(trial["seed"]),
            lr=finite_number(trial, "lr"),
            chosen=trial["lr"] == summary["best_lr"],
            collapsed=is_task and trial["collapsed"],
            items=((items, column),) if has_items else (),
          )
        )
  return scores
