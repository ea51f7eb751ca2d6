"""Summary of a task's runs, as files and as a table."""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from antlm_jax import tables
from antlm_jax.errors import UserError
from antlm_jax.evals import results, statistics
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.loop import TuningOutcome, standing
from antlm_jax.evals.finetuning.sets import OWN
from antlm_jax.evals.finetuning.task import Predicted, Suite, Task
from antlm_jax.evals.finetuning.trial import TrialRun
from antlm_jax.evals.statistics import CONFIDENCE, Mean

_CLASSES = 20  # most classes in a printed table
# Share of one answer from which a run counts as collapsed, unless an answer is
# right as often.
COLLAPSED = 0.95
MODEL = "model"  # folder of the saved model, next to the summary


@dataclasses.dataclass(frozen=True, repr=False)
class Tuned:
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
    """Mean of its first evaluation set, in [0, 1].

    This set chooses the epoch, unless the task trains on another set.
    """
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

  tasks: Mapping[str, Tuned]
  table: str

  def __getitem__(self, task: str) -> Tuned:
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
    counted = [task for task in tasks if task.lr] or tasks
    scores = (t.scores[name] for t in counted for name in _counted(t.scores))
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
    first, *others = self.tasks
    if others:
      raise UserError(
        f"{', '.join(self.tasks):.200} are several models: give that of a task,"
        f" result[{first!r}]"
      )
    return os.fspath(self.tasks[first])

  def __repr__(self) -> str:
    scores = ", ".join(
      f"{n} {100 * t.score:.1f} %" for n, t in self.tasks.items()
    )
    return f"<fine-tuned: {scores}>"

  def __str__(self) -> str:
    return self.table


def _counted(evaluations: Iterable[str]) -> list[str]:
  """Returns the sets of a task that a mean counts: test sets, or else all."""
  names = [*evaluations]
  return [name for name in names if name.endswith("-test")] or names


def tuning_result(
  suite: Suite, found: Mapping[pathlib.Path, dict]
) -> FineTuning:
  """Returns the result of tasks, from the summaries in their folders."""
  tasks = {}
  for folder, summary in found.items():
    metric, best = summary["main_metric"], summary["runs"][summary["best_run"]]
    runs = [run for run in summary["runs"] if run["lr"] == summary["best_lr"]]
    names = summary["evaluations"]
    tasks[summary["task"]] = Tuned(
      name=summary["task"],
      metric=metric,
      lr=summary["best_lr"],
      seed=best["seed"],
      scores={name: _score_over_seeds(runs, name, metric) for name in names},
      folder=folder,
      model=path if (path := folder / MODEL).is_dir() else None,
    )
  said = [scores_table([*found.values()], suite)]
  said += [line for summary in found.values() for line in class_tables(summary)]
  said += [line for summary in found.values() for line in remarks(summary)]
  return FineTuning(tasks, "\n".join(said))


def summarise(
  task: Task,
  examples: Mapping[str, Sequence[Example]],
  outcomes: Sequence[TuningOutcome],
) -> dict:
  """Returns the scores of a task's runs, of trivial answers and references.

  `baseline` is the score of the best trivial answer. The standard deviation
  over seeds is the sample's, null for one seed. The best run is of the best
  learning rate. Both are not of runs that diverged in their first epoch, unless
  all did. `examples` are those that are predicted, by evaluation set.
  """
  # Labels of another set that chooses, such as that of train_on, are not here.
  deciding = examples.get(task.evaluations[0], ())
  labels = collections.Counter(repr(example.label) for example in deciding)
  common = max(labels.values(), default=0) / max(1, labels.total())
  collapsed = max(COLLAPSED, (1 + common) / 2)
  runs = [_run_summary(task, o, examples, collapsed) for o in outcomes]
  by_lr = [
    _by_lr(task, lr, [run for run in runs if run["lr"] == lr])
    for lr in dict.fromkeys(run["lr"] for run in runs)
  ]
  scores = [standing(task, outcome.best) for outcome in outcomes]
  # The rate of the best mean, among those that lost the fewest runs.
  found = zip(outcomes, scores, strict=True)
  lost = collections.Counter(o.run.lr for o, s in found if s == -math.inf)
  first = task.evaluations[0]

  def chosen_by(lr: float) -> tuple[int, float]:
    of = [run for run in runs if run["lr"] == lr]
    return -lost[lr], _score_over_seeds(of, first, task.chooser).mean

  best = max(by_lr, key=lambda one: chosen_by(one["lr"]))
  evaluations = {}
  for name, those in examples.items():
    # These also need the examples that are not predicted, such as documents.
    read = task.load(name) if task.references else those
    trivial = [task.measure(answer, those) for answer in task.trivial(read)]
    evaluations[name] = {
      "examples": len(those),
      "baseline": {m: max(found[m] for found in trivial) for m in task.metrics},
      "references": {
        which: task.measure(predict(read), those)
        for which, predict in task.references.items()
      },
    }
  return {
    "task": task.name,
    "main_metric": task.main_metric,
    "also": task.also,
    "trained_on": task.trained_on,
    "best_by": task.chooser,
    "baseline": task.baseline,
    "evaluations": evaluations,
    "best_lr": best["lr"],
    "best_run": max(
      (i for i, run in enumerate(runs) if run["lr"] == best["lr"]),
      key=scores.__getitem__,
    ),
    "by_lr": by_lr,
    "runs": runs,
  }


def _run_summary(
  task: Task,
  outcome: TuningOutcome,
  examples: Mapping[str, Sequence[Example]],
  collapsed: float,
) -> dict:
  """Returns a run's scores; `collapsed` is a share of one answer."""
  shares = {}  # of the most frequent prediction
  for name, found in outcome.predictions.items():
    counts = collections.Counter(map(json.dumps, found))
    shares[name] = max(counts.values()) / len(found)
  classes = {}
  for name, those in examples.items() if task.by_class else ():
    labels = [example.label for example in those]
    counted = task.by_class(outcome.predictions[name], labels)
    classes[name] = {label: of.to_json() for label, of in counted.items()}
  return {
    "lr": outcome.run.lr,
    "seed": outcome.run.seed,
    "best_epoch": outcome.best_epoch,
    "diverged": outcome.diverged,
    "scores": {name: outcome.best[name] for name in task.evaluations},
    "classes": classes,
    "most_frequent_prediction": shares,
    "collapsed": shares[task.evaluations[0]] >= collapsed,
    # JSON has no NaN: the loss of a diverged run is null.
    "epochs": [
      e if math.isfinite(e["train_loss"]) else e | {"train_loss": None}
      for e in outcome.epochs
    ],
  }


def _by_lr(task: Task, lr: float, runs: Sequence[dict]) -> dict:
  return {
    "lr": lr,
    "seeds": len(runs),
    "diverged": sum(run["diverged"] is not None for run in runs),
    "collapsed": sum(run["collapsed"] for run in runs),
    "scores": {
      name: {"mean": found.mean, "std": found.std}
      for name in task.evaluations
      for found in [_score_over_seeds(runs, name, task.main_metric)]
    },
  }


def _score_over_seeds(runs: Sequence[dict], name: str, metric: str) -> Mean:
  values = {str(run["seed"]): run["scores"][name][metric] for run in runs}
  return statistics.mean_of_seeds(values)


def _percent(found: Mean) -> str:
  half = found.half_width()
  margin = "" if half is None else f" ± {100 * half:.1f}"
  return f"{100 * found.mean:.1f}{margin}"


def write_task_results(
  folder: pathlib.Path,
  task: Task,
  summary: dict,
  outcomes: Sequence[TuningOutcome],
  examples: Mapping[str, Sequence[Example]],
) -> None:
  """Writes a task's files, all or none, the summary last.

  `items.jsonl` has every example with each run's prediction, in their order.
  Raises a UserError if they cannot be written.
  """
  lines = []
  for name, those in examples.items():
    for i, example in enumerate(those):
      found = [outcome.predictions[name][i] for outcome in outcomes]
      item = {
        "evaluation": name,
        "id": example.id,
        "label": example.label,
        "predictions": found,
        "correct": [task.right(one, example.label) for one in found],
      }
      if task.by_example:
        metric = task.metrics[task.main_metric]
        text = "\0".join(example.texts).encode()
        # By it the report knows a text that the set repeats.
        item["text"] = hashlib.blake2b(text, digest_size=8).hexdigest()
        item["scores"] = [metric([one], [example.label]) for one in found]
      lines.append(json.dumps(item) + "\n")
  texts = {"items.jsonl": "".join(lines)}
  if task.texts:
    best = outcomes[summary["best_run"]]
    texts |= task.texts(
      {
        name: Predicted(those, best.predictions[name], best.best[name])
        for name, those in examples.items()
      }
    )
  results.write_results(folder, texts, summary)


def scores_table(summaries: Sequence[dict], suite: Suite) -> str:
  """Returns a table of each score at its best learning rate, and their mean.

  Scores without training are in no mean with others.
  """
  # References, such as BM25, have a column each.
  about = (
    of for summary in summaries for of in summary["evaluations"].values()
  )
  references = list(
    dict.fromkeys(name for of in about for name in of["references"])
  )
  head = ["", "metric", "lr", "seeds", "score (%)", "baseline (%)"]
  head += [*(f"{name} (%)" for name in references), "note"]
  rows = [
    row for summary in summaries for row in _summary_rows(summary, references)
  ]
  if not any(row[-1] for row in rows):
    head.pop()
  text = tables.text_table(rows, head, "<<>>>>" + ">" * len(references) + "<")
  if any(_best_by_lr(summary)["seeds"] > 1 for summary in summaries):
    text += f"\n±: half of the {100 * CONFIDENCE:g} % interval over seeds, by"
    text += " Student's t"
  return "\n".join([text, *_mean_lines(summaries, suite)])


def _mean_lines(summaries: Sequence[dict], suite: Suite) -> Iterator[str]:
  """Yields a line about the mean over a suite's known evaluation sets."""
  known = [of for name, of in suite.scores.items() if name != OWN]
  there = {name for one in summaries for name in one["evaluations"]}
  if not there <= {*itertools.chain(*known)}:
    return
  counted = [one for one in summaries if one["best_lr"]] or summaries
  means = [
    _best_by_lr(one)["scores"][name]["mean"]
    for one in counted
    for name in _counted(one["evaluations"])
  ]
  count, every = len(means), sum(len(_counted(of)) for of in known)
  what = f"mean of these {count} of {every} scores, not comparable with"
  what += f" {suite.name}'s"
  if count >= every:
    what = f"{suite.name}, unweighted mean of all {count}"
  if without := [one["task"] for one in summaries if one not in counted]:
    what += f", without {', '.join(without)}, not trained"
  if any(one["also"] for one in counted):
    what += ", by their first metrics"
  yield f"{what}: {100 * np.mean(means):.1f}"


def _best_by_lr(summary: Mapping) -> dict:
  return next(e for e in summary["by_lr"] if e["lr"] == summary["best_lr"])


def _summary_rows(
  summary: Mapping, references: Sequence[str]
) -> Iterator[tuple]:
  best = _best_by_lr(summary)
  runs = [run for run in summary["runs"] if run["lr"] == best["lr"]]
  for name, about in summary["evaluations"].items():
    for metric in (summary["main_metric"], *summary["also"]):
      found = _score_over_seeds(runs, name, metric)
      trivial = about["baseline"][metric]
      others = [
        f"{100 * about['references'][name][metric]:.1f}"
        if name in about["references"]
        else None
        for name in references
      ]
      lost = [
        f"{best[what]} of {best['seeds']} {what}"
        for what in ("diverged", "collapsed")
        if best[what]
      ]
      notes = lost[:1]
      if not lost and found.mean <= trivial:
        notes.append(f"no better than {summary['baseline']}")
      if source := summary.get("trained_on"):
        notes.append(f"trained on {source}")
      rate = f"{best['lr']:g}" if best["lr"] else "untrained"
      about_lr = rate, best["seeds"]
      scores = _percent(found), f"{100 * trivial:.1f}", *others
      yield name, metric, *about_lr, *scores, "; ".join(notes)


def class_tables(summary: Mapping) -> Iterator[str]:
  """Yields a table of each class's F1, for each set with several classes.

  It lists the classes with the lowest F1 if there are too many.
  """
  lr = summary["best_lr"]
  runs = [run for run in summary["runs"] if run["lr"] == lr]
  for name, classes in runs[0].get("classes", {}).items():
    if len(classes) < 2:
      continue
    rows = []
    for label, of in classes.items():
      found = statistics.mean_of_seeds(
        {str(run["seed"]): run["classes"][name][label]["f1"] for run in runs}
      )
      cells = f"{label:.60}", _percent(found), f"{of['support']:,}"
      rows.append((found.mean, cells))
    which = f"{name}, by class"
    if len(rows) > _CLASSES:
      which = f"{name}, lowest {_CLASSES} of {len(rows)} classes"
      rows = sorted(rows, key=lambda row: row[0])[:_CLASSES]
    head = which, "F1 (%)", "support"
    yield tables.text_table([row for _, row in rows], head, "<>>")


def remarks(summary: Mapping) -> Iterator[str]:
  """Yields a line for each run that diverged, then for rates that collapsed."""
  task = summary["task"]
  for run in summary["runs"]:
    if epoch := run["diverged"]:
      before = "" if epoch == 1 else "; its epochs before that count"
      which = TrialRun(run["lr"], run["seed"])
      yield f"{task}: {which} diverged in epoch {epoch}{before}"
  for entry in summary["by_lr"]:
    if entry["collapsed"]:
      yield (
        f"{task} collapsed: {entry['collapsed']} of {entry['seeds']} runs at lr"
        f" {entry['lr']:g} give (nearly) every example the same answer"
      )
