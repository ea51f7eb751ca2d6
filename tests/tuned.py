"""Results of fine-tuning, written as the command writes them."""

import dataclasses

import numpy as np

from antlm_jax.evals.finetuning import classification
from antlm_jax.evals.finetuning import summary as summaries
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.loop import Outcome

LABELS = np.arange(100) % 2


def answers(right: int) -> np.ndarray:
  """Answers of which so many of a hundred are right: the last ones."""
  return np.where(np.arange(100) < 100 - right, 1 - LABELS, LABELS)


def write(
  folder, name, found, step, attention, limit=0, metric="accuracy", **task
) -> None:
  """Writes a task's results into TASK/STEP-ATTENTION of a folder.

  `found` has each run's answers to 100 questions by evaluation set; `task` are
  further fields of the task.
  """
  sets = list(next(iter(found.values())))
  outcomes = []
  for run, by_set in found.items():
    metrics = {
      of: {n: f(by_set[of], LABELS) for n, f in classification.BINARY.items()}
      for of in sets
    }
    epoch = {"train_loss": 0.5} | metrics
    predictions = {of: by_set[of].tolist() for of in sets}
    outcomes.append(Outcome(run, (epoch,), 1, predictions))
  head = classification.Classifier(("0", "1"), "first")
  of = classification.task(name, None, sets, head, metric)
  of = dataclasses.replace(of, **task)
  examples = {
    n: [Example(("a",), int(y), f"{n}_{i}") for i, y in enumerate(LABELS)]
    for n in sets
  }
  request = {"step": step, "attention": attention, "limit": limit}
  summary = summaries.summarise(of, examples, outcomes)
  into = folder / name / f"{step}-{attention}"
  into.mkdir(parents=True)
  summary = {"request": request} | summary
  summaries.write(into, of, summary, outcomes, examples)
