"""Summary of a task's runs, as files and as a table."""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax import tables
from antlm_jax.errors import UserError
from antlm_jax.evals import results, statistics
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.loop import TuningOutcome
from antlm_jax.evals.finetuning.sets import OWN
from antlm_jax.evals.finetuning.task import Preset, Task, item_scores
from antlm_jax.evals.finetuning.trial import TrialRun
from antlm_jax.evals.statistics import CONFIDENCE, Mean

_CLASSES = 20  # most classes in a printed table
# Share of one answer from which a run counts as collapsed, unless an answer is
# right as often.
COLLAPSED = 0.95
MODEL = "model"  # folder of the saved model, next to the summary


@dataclasses.dataclass(frozen=True, repr=False)
class TunedTask:
  """A fine-tuned task."""

  name: str
  metric: str  # the main metric
  lr: float  # best learning rate
  seed: int  # of the best run, which is saved
  # Main metric over seeds at the best learning rate, by evaluation set.
  scores: Mapping[str, Mean]
  folder: pathlib.Path  # of the results
  model: pathlib.Path | None  # the saved model

  @property
  def score(self) -> float:
    """Mean of its first evaluation set, which chooses the epoch, in [0, 1]."""
    return next(iter(self.scores.values())).mean

  def __fspath__(self) -> str:
    """Returns the path to the saved model, or raises a UserError."""
    if self.model:
      return str(self.model)
    if not self.lr:
      raise UserError(
        f"{self.name} was evaluated without training, so it has no model: use"
        " the model that you gave"
      )
    raise UserError(
      f"the model of {self.name} is not saved: fine-tune with save=True"
    )

  def __repr__(self) -> str:
    return (
      f"<{self.name}: {self.metric} {100 * self.score:.1f} % at learning rate"
      f" {self.lr:g}, {self.folder}>"
    )


@dataclasses.dataclass(frozen=True, repr=False)
class FineTuning:
  """Fine-tuned tasks by name, and their table; a path to its saved model.

  Tasks that were evaluated without training have the learning rate 0.
  """

  tasks: Mapping[str, TunedTask]
  table: str

  def __getitem__(self, task: str) -> TunedTask:
    return self.tasks[task]

  def __iter__(self) -> Iterator[str]:
    return iter(self.tasks)

  def __len__(self) -> int:
    return len(self.tasks)

  @property
  def score(self) -> float:
    """Mean over the evaluation sets of all trained tasks, in [0, 1].

    If a task has a test set, that alone counts: the dev set chose the epoch and
    the rate. If no task is trained, it is the mean over all tasks.
    """
    tasks = self.tasks.values()
    trained = [task for task in tasks if task.lr] or tasks
    scores = (
      task.scores[name]
      for task in trained
      for name in _compared_sets(task.scores)
    )
    return float(np.mean([score.mean for score in scores]))

  @property
  def model(self) -> pathlib.Path | None:
    """Path to the saved model; None if there is none, or several."""
    models = [task.model for task in self.tasks.values() if task.model]
    return models[0] if len(models) == 1 else None

  def __fspath__(self) -> str:
    """Returns the path to the saved model.

    Raises a UserError if there is none, or several.
    """
    if self.model:
      return str(self.model)
    name = next(iter(self.tasks))
    if len(self.tasks) > 1:
      raise UserError(
        f"{', '.join(self.tasks):.200} are several models: give that of a task,"
        f" result[{name!r}]"
      )
    return os.fspath(self.tasks[name])

  def __repr__(self) -> str:
    scores = ", ".join(
      f"{n} {100 * t.score:.1f} %" for n, t in self.tasks.items()
    )
    return f"<fine-tuned: {scores}>"

  def __str__(self) -> str:
    return self.table


def _compared_sets(evaluations: Iterable[str]) -> list[str]:
  """Returns the sets of a task that a mean includes: test sets, or else all."""
  names = [*evaluations]
  return [name for name in names if name.endswith("-test")] or names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
  """Scores of a task's runs: the fields of summary.json."""

  request: Mapping[str, Any]  # everything that the results depend on
  train_examples: int = 0
  task: str
  main_metric: str
  also: Sequence[str]  # further metrics that the table shows
  best_by: str
  baseline: str  # name of the best trivial answer
  # For each set its number of examples, and scores by metric: the best trivial
  # answer's, `baseline`, and those of predictors without training by name.
  evaluations: Mapping[str, Mapping[str, Any]]
  # The learning rate with the best mean, among those that lost the fewest runs.
  best_lr: float
  best_run: int  # index, of the best learning rate
  # For each learning rate its numbers of runs, and mean and standard deviation
  # of the main metric by evaluation set.
  by_lr: Sequence[Mapping[str, Any]]
  runs: Sequence[Mapping[str, Any]]
  seconds: float = 0.0

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> "Summary":
    """Returns the summary that a file stores."""
    names = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: values[name] for name in names & values.keys()})

  @property
  def best_rate(self) -> Mapping[str, Any]:
    """The entry of `by_lr` of the best learning rate."""
    return next(entry for entry in self.by_lr if entry["lr"] == self.best_lr)

  @property
  def best_rate_runs(self) -> list[Mapping[str, Any]]:
    """The runs of the best learning rate."""
    return [run for run in self.runs if run["lr"] == self.best_lr]


def tuning_result(
  preset: Preset, summaries: Mapping[pathlib.Path, Summary]
) -> FineTuning:
  """Returns the result of tasks, from the summaries by their folders."""
  tasks = {}
  for folder, summary in summaries.items():
    runs = summary.best_rate_runs
    metric = summary.main_metric
    tasks[summary.task] = TunedTask(
      name=summary.task,
      metric=metric,
      lr=summary.best_lr,
      seed=summary.runs[summary.best_run]["seed"],
      scores={
        name: _score_over_seeds(runs, name, metric)
        for name in summary.evaluations
      },
      folder=folder,
      model=path if (path := folder / MODEL).is_dir() else None,
    )
  lines = [scores_table([*summaries.values()], preset)]
  for write_lines in (class_tables, remarks):
    lines += itertools.chain(*map(write_lines, summaries.values()))
  return FineTuning(tasks, "\n".join(lines))


def summarise(
  task: Task,
  examples: Mapping[str, Sequence[Example]],
  outcomes: Sequence[TuningOutcome],
  *,
  request: Mapping[str, Any],
  train_examples: int = 0,
  seconds: float = 0.0,
) -> Summary:
  """Returns the scores of a task's runs, of trivial answers and references.

  The standard deviation over seeds is the sample's, null for one seed. The best
  learning rate has the fewest runs that diverged in their first epoch, then the
  best mean. `examples` are those that are predicted, by evaluation set.
  """
  collapsed_share = _collapsed_share(examples.get(task.choosing_set, ()))
  runs = [_run_summary(task, o, examples, collapsed_share) for o in outcomes]
  runs_by_lr = {}
  for run in runs:
    runs_by_lr.setdefault(run["lr"], []).append(run)
  best_lr = _best_rate(task, runs_by_lr, outcomes)
  best_rate_indices = [i for i, run in enumerate(runs) if run["lr"] == best_lr]
  return Summary(
    request=request,
    train_examples=train_examples,
    task=task.name,
    main_metric=task.main_metric,
    also=task.also,
    best_by=task.choosing_metric,
    baseline=task.baseline,
    evaluations={
      name: _without_training(task, name, examples[name]) for name in examples
    },
    best_lr=best_lr,
    best_run=max(best_rate_indices, key=lambda i: outcomes[i].best_score),
    by_lr=[_rate_summary(task, rate_runs) for rate_runs in runs_by_lr.values()],
    runs=runs,
    seconds=seconds,
  )


def _collapsed_share(examples: Sequence[Example]) -> float:
  """Returns the share of examples that only a collapsed run answers equally.

  `examples` are those of the set that chooses, or none if it is not predicted.
  """
  labels = collections.Counter(repr(example.label) for example in examples)
  most_common = max(labels.values(), default=0) / max(1, labels.total())
  return max(COLLAPSED, (1 + most_common) / 2)


def _best_rate(
  task: Task,
  runs_by_lr: Mapping[float, Sequence[Mapping[str, Any]]],
  outcomes: Sequence[TuningOutcome],
) -> float:
  """Returns the learning rate with the fewest lost runs, then the best mean."""
  lost_runs = collections.Counter(
    outcome.run.lr for outcome in outcomes if outcome.best_score == -math.inf
  )

  def rank(lr: float) -> tuple[int, float]:
    score = _score_over_seeds(
      runs_by_lr[lr], task.choosing_set, task.choosing_metric
    )
    return -lost_runs[lr], score.mean

  return max(runs_by_lr, key=rank)


def _without_training(
  task: Task, name: str, examples: Sequence[Example]
) -> dict[str, Any]:
  """Returns the scores of trivial answers and references on a set."""
  # These also need the examples that are not predicted, such as documents.
  all_examples = task.load(name) if task.references else examples
  trivial = [
    task.measure(answers, examples) for answers in task.trivial(all_examples)
  ]
  return {
    "examples": len(examples),
    "baseline": {
      metric: max(scores[metric] for scores in trivial)
      for metric in task.metrics
    },
    "references": {
      reference: task.measure(predict(all_examples), examples)
      for reference, predict in task.references.items()
    },
  }


def _run_summary(
  task: Task,
  outcome: TuningOutcome,
  examples: Mapping[str, Sequence[Example]],
  collapsed_share: float,
) -> dict[str, Any]:
  """Returns a run's scores.

  A run that gives one answer to this share of the examples has collapsed.
  """
  shares = {}  # of the most frequent prediction
  for name, predictions in outcome.predictions.items():
    counts = collections.Counter(map(json.dumps, predictions))
    shares[name] = max(counts.values()) / len(predictions)
  classes = {}
  for name in examples if task.by_class else ():
    labels = [example.label for example in examples[name]]
    counts = task.by_class(outcome.predictions[name], labels)
    classes[name] = {label: counts[label].to_json() for label in counts}
  return {
    "lr": outcome.run.lr,
    "seed": outcome.run.seed,
    "best_epoch": outcome.best_epoch,
    "diverged": outcome.diverged,
    "scores": {name: outcome.best[name] for name in task.evaluations},
    "classes": classes,
    "most_frequent_prediction": shares,
    "collapsed": shares[task.choosing_set] >= collapsed_share,
    # JSON has no NaN: the loss of a diverged run is null.
    "epochs": [
      e if math.isfinite(e["train_loss"]) else e | {"train_loss": None}
      for e in outcome.epochs
    ],
  }


def _rate_summary(
  task: Task, runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
  """Returns the scores of the runs of a learning rate."""
  scores = {
    name: _score_over_seeds(runs, name, task.main_metric)
    for name in task.evaluations
  }
  return {
    "lr": runs[0]["lr"],
    "seeds": len(runs),
    "diverged": sum(run["diverged"] is not None for run in runs),
    "collapsed": sum(run["collapsed"] for run in runs),
    "scores": {
      name: {"mean": score.mean, "std": score.std}
      for name, score in scores.items()
    },
  }


def _score_over_seeds(
  runs: Sequence[Mapping[str, Any]], name: str, metric: str
) -> Mean:
  scores = {str(run["seed"]): run["scores"][name][metric] for run in runs}
  return statistics.mean_of_seeds(scores)


def _percent(score: Mean) -> str:
  half = score.half_width()
  margin = "" if half is None else f" ± {100 * half:.1f}"
  return f"{100 * score.mean:.1f}{margin}"


def write_task_results(
  folder: pathlib.Path,
  task: Task,
  summary: Summary,
  outcomes: Sequence[TuningOutcome],
  examples: Mapping[str, Sequence[Example]],
) -> None:
  """Writes a task's files, all or none, the summary last.

  First removes a saved model of other results. `items.jsonl` has every example
  with each run's prediction and its part in the main metric, in the runs'
  order. Raises a UserError if they cannot be written.
  """
  model = folder / MODEL
  aside = folder / f"{MODEL}.old"
  shutil.rmtree(aside, ignore_errors=True)
  if model.exists():
    model.rename(aside)  # so that a part of a model is never taken for it
    shutil.rmtree(aside)
  lines = []
  metric = task.metrics[task.main_metric]
  for name in examples:
    labels = [example.label for example in examples[name]]
    scores = np.array(
      [
        item_scores(metric, outcome.predictions[name], labels)
        for outcome in outcomes
      ]
    )
    for index, example in enumerate(examples[name]):
      predictions = [outcome.predictions[name][index] for outcome in outcomes]
      text = "\0".join(example.texts).encode()
      item = {
        "evaluation": name,
        "id": example.id,
        # By it the report knows a text that the set repeats.
        "text": hashlib.blake2b(text, digest_size=8).hexdigest(),
        "label": example.label,
        "predictions": predictions,
        "scores": scores[:, index].tolist(),
      }
      lines.append(json.dumps(item) + "\n")
  texts = {results.ITEMS: "".join(lines)}
  if task.texts:
    best = outcomes[summary.best_run]
    texts |= task.texts(examples, best.predictions)
  results.write_results(folder, texts, vars(summary))


def scores_table(summaries: Sequence[Summary], preset: Preset) -> str:
  """Returns a table of each score at its best learning rate, and their mean.

  Scores without training are in no mean with others.
  """
  # References, such as BM25, have a column each.
  references = list(
    dict.fromkeys(
      reference
      for summary in summaries
      for evaluation in summary.evaluations.values()
      for reference in evaluation["references"]
    )
  )
  head = ["", "metric", "lr", "seeds", "examples"]
  head += ["score (%)", "baseline (%)"]
  head += [*(f"{name} (%)" for name in references), "note"]
  rows = [
    row for summary in summaries for row in _summary_rows(summary, references)
  ]
  if not any(row[-1] for row in rows):
    head.pop()
  text = tables.text_table(rows, head, "<<>>>>>" + ">" * len(references) + "<")
  if any(summary.best_rate["seeds"] > 1 for summary in summaries):
    text += f"\n±: half of the {100 * CONFIDENCE:g} % interval over seeds, by"
    text += " Student's t"
  return "\n".join([text, *_mean_lines(summaries, preset)])


def _mean_lines(summaries: Sequence[Summary], preset: Preset) -> Iterator[str]:
  """Yields a line about the mean over a preset's known evaluation sets."""
  known_sets = [names for task, names in preset.scores.items() if task != OWN]
  evaluations = {name for x in summaries for name in x.evaluations}
  if not evaluations <= {*itertools.chain(*known_sets)}:
    return
  trained = [summary for summary in summaries if summary.best_lr] or summaries
  means = [
    summary.best_rate["scores"][name]["mean"]
    for summary in trained
    for name in _compared_sets(summary.evaluations)
  ]
  count = len(means)
  preset_count = sum(len(_compared_sets(names)) for names in known_sets)
  text = f"mean of these {count} of {preset_count} scores, not comparable with"
  text += f" {preset.name}'s"
  if count >= preset_count:
    text = f"{preset.name}, unweighted mean of all {count}"
  if untrained := [x.task for x in summaries if x not in trained]:
    text += f", without {', '.join(untrained)}, not trained"
  if any(summary.also for summary in trained):
    text += ", by their first metrics"
  yield f"{text}: {100 * np.mean(means):.1f}"


def _summary_rows(
  summary: Summary, references: Sequence[str]
) -> Iterator[tuple]:
  """Yields a row of the table for each evaluation set and metric."""
  best = summary.best_rate
  rate = f"{best['lr']:g}" if best["lr"] else "-"
  lost_runs = [
    f"{best[problem]} of {best['seeds']} {problem}"
    for problem in ("diverged", "collapsed")
    if best[problem]
  ]
  for name, evaluation in summary.evaluations.items():
    for metric in (summary.main_metric, *summary.also):
      score = _score_over_seeds(summary.best_rate_runs, name, metric)
      baseline = evaluation["baseline"][metric]
      reference_scores = [
        f"{100 * evaluation['references'][reference][metric]:.1f}"
        if reference in evaluation["references"]
        else None
        for reference in references
      ]
      notes = lost_runs[:1]
      if not lost_runs and score.mean <= baseline:
        notes.append(f"no better than {summary.baseline}")
      yield (
        name,
        metric,
        rate,
        best["seeds"],
        f"{evaluation['examples']:,}",
        _percent(score),
        f"{100 * baseline:.1f}",
        *reference_scores,
        "; ".join(notes),
      )


def class_tables(summary: Summary) -> Iterator[str]:
  """Yields a table of each class's F1, for each set with several classes.

  It lists the classes with the lowest F1 if there are too many.
  """
  runs = summary.best_rate_runs
  for name, classes in runs[0].get("classes", {}).items():
    if len(classes) < 2:
      continue
    rows = []
    for label, counts in classes.items():
      f1 = statistics.mean_of_seeds(
        {str(run["seed"]): run["classes"][name][label]["f1"] for run in runs}
      )
      cells = f"{label:.60}", _percent(f1), f"{counts['support']:,}"
      rows.append((f1.mean, cells))
    title = f"{name}, by class"
    if len(rows) > _CLASSES:
      title = f"{name}, lowest {_CLASSES} of {len(rows)} classes"
      rows = sorted(rows, key=lambda row: row[0])[:_CLASSES]
    head = title, "F1 (%)", "support"
    yield tables.text_table([row for _, row in rows], head, "<>>")


def remarks(summary: Summary) -> Iterator[str]:
  """Yields lines about runs that diverged, rates that collapsed, and a tip."""
  for run in summary.runs:
    if epoch := run["diverged"]:
      before = "" if epoch == 1 else "; its epochs before that count"
      name = TrialRun(run["lr"], run["seed"])
      yield f"{summary.task}: {name} diverged in epoch {epoch}{before}"
  for rate in summary.by_lr:
    if rate["collapsed"]:
      yield (
        f"{summary.task} collapsed: {rate['collapsed']} of {rate['seeds']} runs"
        f" at lr {rate['lr']:g} give (nearly) every example the same answer"
      )
  dev = next(iter(summary.evaluations))
  scores = summary.runs[summary.best_run]["scores"][dev]
  if "best_f1" in scores and scores["best_f1"] > scores["f1"]:
    yield (
      f"tip: {summary.task}: --null_score={scores['best_null_score']:.4g} has"
      f" the best F1 on {dev}, {100 * scores['best_f1']:.1f}, not"
      f" {100 * scores['f1']:.1f}: fine-tune again with it"
    )
