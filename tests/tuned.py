"""Helpers that fine-tune, write results as the command does, and report."""

import dataclasses
import json
import pathlib

import jax
import numpy as np

from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import classification, loop, saved
from antlm_jax.evals.finetuning import summary as summaries
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.loop import TuningOutcome
from antlm_jax.evals.finetuning.trial import Hyperparameters
from antlm_jax.evals.studies import report
from antlm_jax.inference.model import load
from antlm_jax.training.checkpoint import Checkpoint
from tests import runs

LABELS = np.arange(100) % 2


def answers(right: int) -> np.ndarray:
  """Returns 100 answers, of which the last `right` are right."""
  return np.where(np.arange(100) < 100 - right, 1 - LABELS, LABELS)


def checkpoint_at(path) -> Checkpoint:
  """Returns the checkpoint of step 7 of a model that is not there."""
  found = Checkpoint(path)
  found.path = pathlib.Path(path)
  found.fields = {"sums": {"counters": {"step": 7}, "params": {}}}
  return found


def planned(*args) -> list[finetune.TaskJob]:
  """Returns the jobs of the command's arguments, for an absent Llama."""
  given = finetune.parse_finetune(["--checkpoint=none", *args])
  model = checkpoint_at(given.pop("model"))
  assert given.pop("step") is None
  return finetune.plan_tasks(model, "llama", None, **given)[0]


def write(
  folder,
  name,
  found,
  step,
  attention,
  limit=0,
  metric="accuracy",
  repeats=1,
  **task,
) -> None:
  """Writes a task's results into TASK/STEP-ATTENTION of a folder.

  `found` has each run's 100 answers by evaluation set; `task` has more fields
  of the task. So many examples in a row have the same text: `repeats`.
  """
  sets = list(next(iter(found.values())))
  head = classification.Classifier(("0", "1"), "first")
  task = {"main_metric": metric} | task
  of_task = classification.classification_task(name, None, sets, head, **task)
  outcomes = []
  for run, by_set in found.items():
    metrics = {
      of: {n: f(by_set[of], LABELS) for n, f in of_task.metrics.items()}
      for of in sets
    }
    predictions = {of: by_set[of].tolist() for of in sets}
    outcomes.append(TuningOutcome(run))
    outcomes[-1].add_epoch(of_task, 0.5, metrics, predictions)
  examples = {
    n: [
      Example((f"a {i // repeats}",), int(y), f"{n}_{i}")
      for i, y in enumerate(LABELS)
    ]
    for n in sets
  }
  request = {"step": step, "attention": attention, "limit": limit}
  summary = summaries.summarise(of_task, examples, outcomes, request=request)
  into = folder / name / f"{step}-{attention}"
  into.mkdir(parents=True)
  summaries.write_task_results(into, of_task, summary, outcomes, examples)


def summarised(task, examples, outcomes) -> summaries.Summary:
  """Returns the summary of runs without a request."""
  return summaries.summarise(task, examples, outcomes, request={})


def partial_summary(**fields) -> summaries.Summary:
  """Returns a summary with some fields; all others are None."""
  names = [field.name for field in dataclasses.fields(summaries.Summary)]
  return summaries.Summary(**dict.fromkeys(names) | fields)


WORDS = ("Tom", "Ann", "hills", "dogs", "river", "house", "door", "tree")


def write_beir(folder, splits=("train", "dev", "test"), seed=0) -> None:
  """Writes a folder in BEIR's form: queries have a document's repeated word.

  The first split has eight queries of each of eight documents, others two.
  """
  (folder / "qrels").mkdir(parents=True)
  draw = np.random.default_rng(seed)
  others = ["sat", "often", "near", "the"]
  lines = {"corpus": [], "queries": []}
  for i, word in enumerate(WORDS):
    text = f"{draw.choice(others)} {word}"
    lines["corpus"] += [{"_id": f"d{i}", "title": word, "text": text}]
    asked = [f"{word} {draw.choice(others)}" for _ in range(12)]
    lines["queries"] += [
      {"_id": f"q{i}.{k}", "text": text} for k, text in enumerate(asked)
    ]
  for file, those in lines.items():
    runs.write_lines(folder / f"{file}.jsonl", those)
  for part, split in enumerate(splits):
    wanted = range(8) if part == 0 else (8 + part, 11)
    rows = [f"q{i}.{k}\td{i}\t1" for i in range(len(WORDS)) for k in wanted]
    head = "query-id\tcorpus-id\tscore"
    (folder / "qrels" / f"{split}.tsv").write_text("\n".join([head, *rows]))


def trained(loaded, task, runs, folder, **settings) -> list[TuningOutcome]:
  """Fine-tunes a model; the first run must be the best.

  Asserts that the saved model has the task's head and predicts as that run.
  """
  settings, best = Hyperparameters(**settings), loop.BestParams(runs)
  rows = loop.read_rows(loaded, task, settings.max_length)
  outcomes = loop.fit(loaded, task, rows, settings, runs, best=best)
  saved.save_model(
    folder, loaded, task, "bidirectional", best.of_rate(runs[0].lr)
  )
  model, test = load(folder / "model"), task.evaluations[-1]
  assert saved.saved_head(model.task, model.path) == task.head
  found, rows = saved.compute(model, task.load(test), settings.max_length)
  told = task.head.decode(jax.device_get(task.head.reduce(found)), rows)
  assert told == outcomes[0].predictions[test]
  return outcomes


def outputs(loaded, texts, max_length=128):
  """Returns the outputs of a saved model's head by text, e.g. logits."""
  return saved.compute(loaded, texts, max_length)[0]


def draw_nothing(title, axis, panels, tops, path, **phases):
  """Writes an empty file in place of a report's picture."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.touch()


def report_of(folder, config, *args):
  """Writes the report of runs; returns its numbers and its text."""
  report.main([f"--runs={folder}", f"--config={config}", *args])
  text = (folder / "report/report.md").read_text()
  return json.loads((folder / "report/table.json").read_text()), text


def cells(text, title):
  """Returns the cells of the first table line that begins with a title."""
  line = next(x for x in text.splitlines() if x.startswith(f"| {title} |"))
  return [cell.strip() for cell in line.strip("|").split("|")]


def section(text, title):
  """Returns the part of the report under a heading."""
  return text.split(f"\n## {title}\n")[1].split("\n## ")[0]
