"""Fine-tunes a checkpoint on GLUE and SuperGLUE tasks, as BabyLM does.

  python -m evals.finetune --checkpoint=RUN --data=FOLDER --task=cola,mrpc

Trains one run for every learning rate and seed, all of them at once, and
evaluates each epoch. A run stops by itself when it gets no better; the epoch
with the best main metric counts. BabyLM's validation set is also its test
set, so that epoch is chosen on what is reported. The defaults are those of
BabyLM's 2024 pipeline.

Writes for each task summary.json, predictions.json (the best run's, in the
pipeline's form) and items.jsonl (what every run says of every example); with
--save also the best run's model, a checkpoint with the task's head. A task
that was done before with the same arguments is not done again.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from antlm_jax import cli, hashing
from antlm_jax.runtime import files, progress
from antlm_jax.training import checkpoint
from evals import results as outputs
from evals.finetuning import glue
from evals.finetuning import loop as tuning
from evals.finetuning import saved as kept
from evals.finetuning import task as tasks
from evals.finetuning.loop import Outcome, Run, Settings
from evals.finetuning.task import Example, Task

COLLAPSED = 0.95  # share of one class from which on a run counts as collapsed


# ------------------------------------------------------------------- results


def summarise(
  task: Task,
  labels: dict[str, np.ndarray],
  outcomes: Sequence[Outcome],
) -> dict:
  """Returns what is to be known of a task's runs.

  `majority` is the score of always answering one class, the best there is:
  accuracy of the most frequent class, F1 of the class that counts, MCC 0. The
  standard deviation over seeds is the sample's, null of one seed.

  Args:
    task: The task.
    labels: `[n]` by evaluation set.
    outcomes: What became of each run.
  """
  runs = [_run(task, outcome) for outcome in outcomes]
  by_lr = [
    _by_lr(task, lr, [run for run in runs if run["lr"] == lr])
    for lr in dict.fromkeys(run["lr"] for run in runs)
  ]
  first = task.evaluations[0]
  scores = [run["scores"][first][task.main_metric] for run in runs]
  means = [entry["scores"][first]["mean"] for entry in by_lr]
  return {
    "task": task.name,
    "main_metric": task.main_metric,
    "evaluations": {
      name: {"examples": len(y), "majority": _majority(task, y)}
      for name, y in labels.items()
    },
    "best_lr": by_lr[int(np.argmax(means))]["lr"],
    "best_run": int(np.argmax(scores)),
    "by_lr": by_lr,
    "runs": runs,
  }


def _run(task: Task, outcome: Outcome) -> dict:
  shares = {
    name: float(np.unique(p, return_counts=True)[1].max() / len(p))
    for name, p in outcome.predictions.items()
  }
  return {
    "lr": outcome.run.lr,
    "seed": outcome.run.seed,
    "best_epoch": outcome.best_epoch,
    "scores": {name: outcome.best[name] for name in task.evaluations},
    "most_frequent_prediction": shares,
    "collapsed": shares[task.evaluations[0]] >= COLLAPSED,
    "epochs": [_finite(epoch) for epoch in outcome.epochs],
  }


def _finite(epoch: dict) -> dict:
  """JSON has no NaN: the loss of a run that diverged is null."""
  loss = epoch["train_loss"]
  return epoch | {"train_loss": loss if math.isfinite(loss) else None}


def _by_lr(task: Task, lr: float, runs: Sequence[dict]) -> dict:
  scores = {
    name: [run["scores"][name][task.main_metric] for run in runs]
    for name in task.evaluations
  }
  return {
    "lr": lr,
    "seeds": len(runs),
    "collapsed": sum(run["collapsed"] for run in runs),
    "scores": {
      name: {
        "mean": float(np.mean(values)),
        "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
      }
      for name, values in scores.items()
    },
  }


def _majority(task: Task, labels: np.ndarray) -> dict[str, float]:
  always = [np.full_like(labels, c) for c in np.unique(labels)]
  return {
    name: max(metric(answer, labels) for answer in always)
    for name, metric in task.metrics.items()
  }


def predictions(best: Outcome, examples: dict[str, Sequence[Example]]) -> dict:
  """Returns a run's predictions in the form of BabyLM's 2024 pipeline."""
  return {
    "glue": {
      name: {
        "predictions": [
          {"id": example.id, "pred": int(pred)}
          for example, pred in zip(examples[name], found, strict=True)
        ]
      }
      for name, found in best.predictions.items()
    }
  }


def items(
  examples: dict[str, Sequence[Example]], outcomes: Sequence[Outcome]
) -> Iterator[dict]:
  """Yields every example with each run's prediction, in the runs' order."""
  for name, those in examples.items():
    for i, example in enumerate(those):
      found = [int(outcome.predictions[name][i]) for outcome in outcomes]
      yield {
        "evaluation": name,
        "id": example.id,
        "label": example.label,
        "predictions": found,
        "correct": [prediction == example.label for prediction in found],
      }


def write(folder: pathlib.Path, summary: dict, outcomes, examples) -> None:
  """Writes a task's files, the summary last: with it the task is done."""
  best = predictions(outcomes[summary["best_run"]], examples)
  lines = [json.dumps(item) + "\n" for item in items(examples, outcomes)]
  texts = {
    "items.jsonl": "".join(lines),
    "predictions.json": json.dumps(best) + "\n",
  }
  outputs.write(folder, texts, summary)


# -------------------------------------------------------------------- tables


def table(summaries: Sequence[dict]) -> str:
  """Lays out every score at its best learning rate, and their mean."""
  lines = [_row("", "metric", "lr", "seeds", "score (%)", "one class (%)", "")]
  scores = {}
  for summary in summaries:
    metric = summary["main_metric"]
    best = next(e for e in summary["by_lr"] if e["lr"] == summary["best_lr"])
    for name, about in summary["evaluations"].items():
      scores[name] = best["scores"][name]["mean"]
      majority = about["majority"][metric]
      lines.append(
        _row(
          name,
          metric,
          f"{best['lr']:g}",
          best["seeds"],
          _score(best["scores"][name]),
          f"{100 * majority:.1f}",
          _remark(best, scores[name], majority),
        )
      )
  lines.append(f"{_average(scores)}: {100 * np.mean([*scores.values()]):.1f}")
  return "\n".join(lines)


def _row(name, metric, lr, seeds, score, majority, remark) -> str:
  line = f"{name:<8} {metric:<9} {lr:>7} {seeds:>5} {score:>13} {majority:>13}"
  return f"{line}  {remark}".rstrip()


def _score(found: dict) -> str:
  if found["std"] is None:
    return f"{100 * found['mean']:.1f}"
  return f"{100 * found['mean']:.1f} ± {100 * found['std']:.1f}"


def _remark(best: dict, score: float, majority: float) -> str:
  if best["collapsed"]:
    return f"{best['collapsed']} of {best['seeds']} collapsed"
  return "" if score > majority else "no better than one class"


def _average(scores: dict[str, float]) -> str:
  if set(scores) == set(glue.SCORES):
    return f"GLUE, unweighted mean of all {len(scores)}"
  count = f"{len(scores)} of {len(glue.SCORES)}"
  return f"mean of these {count} scores, not comparable with GLUE's"


def collapses(summary: dict) -> Iterator[str]:
  """Says which learning rates ended in one and the same answer."""
  for entry in summary["by_lr"]:
    if entry["collapsed"]:
      yield (
        f"{summary['task']} collapsed: {entry['collapsed']} of"
        f" {entry['seeds']} runs at lr {entry['lr']:g} give (nearly) every"
        " example the same answer"
      )


# ------------------------------------------------------------------- command


def _floats(text: str) -> tuple[float, ...]:
  values = tuple(float(part) for part in text.split(","))
  if not all(0 < value < math.inf for value in values):
    raise argparse.ArgumentTypeError(f"{text!r} is not all positive")
  return tuple(dict.fromkeys(values))


def _seeds(text: str) -> tuple[int, ...]:
  values = tuple(int(part) for part in text.split(","))
  if not all(0 <= value < 2**32 for value in values):
    raise argparse.ArgumentTypeError(f"{text!r} is not all in [0, 2^32)")
  return tuple(dict.fromkeys(values))


def _at_least(least: float, kind: type = int, under: float = math.inf):
  def number(text: str):
    value = kind(text)
    if not least <= value < under:
      raise argparse.ArgumentTypeError(
        f"{text} is not at least {least}"
        + (f" and under {under:g}" if under < math.inf else "")
      )
    return value

  return number


_HEADS = ("norms", "plain")
_SHARE = _at_least(0, float, 1)
_SETTINGS = {  # by field of Settings: type or choices, help
  "batch_size": (_at_least(1), "examples in a step"),
  "epochs": (_at_least(1), "epochs, at most"),
  "patience": (_at_least(0), "epochs without a better score; 0 for all epochs"),
  "max_length": (_at_least(8), "tokens of a row, at most"),
  "attention": (tuning.ATTENTIONS, "how rows are read"),
  "warmup": (_SHARE, "share of the steps in which the rate rises"),
  "decay": (tuning.DECAYS, "how it falls to 0 over the rest"),
  "b1": (_SHARE, "AdamW's"),
  "b2": (_SHARE, "AdamW's"),
  "eps": (_at_least(0, float), "AdamW's"),
  "weight_decay": (_at_least(0, float), "AdamW's, of all but norms and biases"),
  "clip": (_at_least(0, float), "largest gradient norm; 0 for no clipping"),
}


def _parser() -> cli.Parser:
  parser = cli.Parser(prog="python -m evals.finetune", description=__doc__)
  add = parser.add_argument
  checkpoint.add_arguments(parser)
  add("--data", required=True, help="holds NAME.train.jsonl, NAME.valid.jsonl")
  add("--task", required=True, help=f"all, or of {','.join(glue.SCORES)}")
  add("--lrs", type=_floats, default="5e-5", help="peak rates, with commas")
  add("--seeds", type=_seeds, default="12", help="seeds, with commas")
  for name, (kind, text) in _SETTINGS.items():
    kind = {"type": kind} if callable(kind) else {"choices": kind}
    add(f"--{name}", default=getattr(Settings, name), help=text, **kind)
  add(
    "--pool",
    choices=tasks.POOLS,
    help="which vector is classified; by default the first token's of a"
    " bidirectional reading, the last one's of a causal one",
  )
  add(
    "--head",
    choices=_HEADS,
    default="norms",
    help="BabyLM's, with norms, or plain, without: EuroBERT's",
  )
  add("--dropout", type=_SHARE, default=0.1, help="in the head")
  add(
    "--limit",
    type=_at_least(0),
    default=0,
    help="training examples, at most, a random part; 0 for all",
  )
  add(
    "--runs_at_once",
    type=_at_least(0),
    default=0,
    help="runs that train together; 0 for all that are asked for",
  )
  add(
    "--output",
    type=cli.here,
    help="holds TASK/STEP-ATTENTION; RUN/evals/finetune if unset",
  )
  add(
    "--save",
    action="store_true",
    help=f"keep the best run's model, in TASK/STEP-ATTENTION/{kept.FOLDER}",
  )
  add("--overwrite", action="store_true", help="do again what was done")
  return parser


@dataclasses.dataclass(frozen=True)
class Job:
  """A task that was asked for.

  Attributes:
    task: The task.
    folder: Where its results go.
    request: All that they depend on, as JSON has it.
    done: The summary of the same request, if it is there, with its model if
      that is to be kept.
  """

  task: Task
  folder: pathlib.Path
  request: dict
  done: dict | None


def _jobs(args, loaded: checkpoint.Loaded, settings: Settings) -> list[Job]:
  """Checks everything before anything is trained."""
  pool = args.pool or ("last" if args.attention == "causal" else "first")
  common = {
    **outputs.model_digest(loaded),
    "lrs": list(args.lrs),
    "seeds": list(args.seeds),
    "pool": pool,
    "head": args.head,
    "dropout": args.dropout,
    "limit": args.limit,
    **dataclasses.asdict(settings),
  }
  output = pathlib.Path(args.output or loaded.evals / "finetune")
  jobs = []
  for name, found in _found(args.data, args.task).items():
    task = glue.task(found, name, pool, args.dropout, args.head == "norms")
    folder = output / name / f"{loaded.step}-{args.attention}"
    data = outputs.data_digest([found.train, *found.evaluations.values()])
    request = {"task": name, "data": data, **common}
    done = None if args.overwrite else outputs.finished(folder, request)
    if args.save and not (folder / kept.FOLDER).is_dir():
      done = None
    jobs.append(Job(task, folder, request, done))
    files.check_writable(folder, folder=True)
  return jobs


def _found(folder, wanted: str) -> dict[str, glue.Files]:
  """Finds the files of tasks; of all, says which ones are absent."""
  wanted_names = glue.names(wanted)
  if wanted != "all":
    return {name: glue.find(folder, name) for name in wanted_names}
  found = glue.find_all(folder)
  absent = [name for name in wanted_names if name not in found]
  if absent:
    print(f"left out, without training set in {folder}: {', '.join(absent)}")
  return found


def _tell(line: str) -> None:
  print(line, file=sys.stderr, flush=True)


def perform(
  job: Job,
  loaded: checkpoint.Loaded,
  settings: Settings,
  at_once: int,
  save: bool = False,
) -> dict:
  """Trains a task's runs, writes its results and returns the summary.

  Args:
    job: The task.
    loaded: The model that runs start from.
    settings: How to train.
    at_once: Runs that train together; 0 for all.
    save: Whether to keep the best run's model.
  """
  begun, task, request = time.monotonic(), job.task, job.request
  train = _limited(task.load("train"), request["limit"])
  examples = {name: task.load(name) for name in task.evaluations}
  data = tuning.Data(
    tuning.encode(loaded, train, settings.max_length),
    {
      name: tuning.encode(loaded, those, settings.max_length)
      for name, those in examples.items()
    },
  )
  runs = [Run(lr, seed) for lr in request["lrs"] for seed in request["seeds"]]
  best = kept.Best(runs) if save else None
  outcomes = [
    outcome
    for some in _groups(runs, at_once)
    for outcome in tuning.fit(
      loaded,
      task,
      data,
      settings,
      some,
      track=functools.partial(progress.track, unit="step", name=task.name),
      tell=_tell,
      keep=best,
    )
  ]
  labels = {name: rows.labels for name, rows in data.evaluations.items()}
  summary = {"request": request, "train_examples": len(train)}
  summary |= summarise(task, labels, outcomes)
  summary["seconds"] = round(time.monotonic() - begun, 1)
  # A model that is there always belongs to the summary beside it.
  kept.remove(job.folder)
  write(job.folder, summary, outcomes, examples)
  if best:
    kept.save(job.folder, loaded, task, settings.attention, best.params)
  return summary


def _groups(runs: Sequence[Run], size: int) -> Iterator[Sequence[Run]]:
  size = size or len(runs)
  for start in range(0, len(runs), size):
    yield runs[start : start + size]


def _limited(examples: Sequence[Example], limit: int) -> Sequence[Example]:
  if not limit or limit >= len(examples):
    return examples
  chosen = hashing.permute(np.arange(limit), len(examples), 0)
  return [examples[i] for i in np.sort(chosen)]


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  glue.names(args.task)
  settings = Settings(**{name: getattr(args, name) for name in _SETTINGS})
  loaded = checkpoint.load(args.checkpoint, args.step)
  summaries = []
  for job in _jobs(args, loaded, settings):
    summary = job.done
    if summary:
      print(f"{job.task.name} is already done: {job.folder}")
    else:
      summary = perform(job, loaded, settings, args.runs_at_once, args.save)
      print(f"{job.task.name} is written to {job.folder}", flush=True)
    summaries.append(summary)
  print(table(summaries))
  for line in (line for summary in summaries for line in collapses(summary)):
    print(line)


if __name__ == "__main__":
  cli.run(main)
