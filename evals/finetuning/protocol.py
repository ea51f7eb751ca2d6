"""Fine-tuning protocol of arXiv 2507.00994, as in its code.

Each of six learning rates by five seeds trains for 1,000 steps of 32 examples,
or for one epoch if that is shorter. The last weights are scored. The
learning rate is chosen on the set's own dev set or on a twentieth of its
training set. The validation set of their hub is the test set. NQ and MLDR are
test sets of the models that are fine-tuned on MS MARCO. Each kind of task has
the metric of their code, next to the usual metric.
Their weights and AdamW's state were bfloat16 (`--weights=bfloat16`); here they
are float32.
"""

import dataclasses
from collections.abc import Mapping

from antlm_jax.evals.finetuning import (
  answering,
  classification,
  glue,
  retrieval,
  sets,
  tagging,
)
from antlm_jax.evals.finetuning.task import Preset, Task

TEXTS: Mapping[str, tuple[str, ...]] = {
  "sst2": ("{sentence}",),
  "qqp": ("Question 1: {question1}\nQuestion 2: {question2}",),
  "mnli": ("Premise: {premise}\nHypothesis: {hypothesis}",),
}


# The kinds of task, by their names in the paper.
TASKS_BY_KIND: Mapping[str, tuple[str, ...]] = {
  "SC": tuple(TEXTS),
  "TC": tuple(tagging.STUDY),
  "QA": tuple(answering.SCORES),
  "IR": tuple(retrieval.SCORES),
}
MEASURES = {  # of the paper's code, by kind of task
  "SC": "accuracy",
  "TC": "sentence_f1",
  "QA": "index_f1",
  "IR": "ndcg_of_ranked",
}
# Test sets without training examples, by the task whose models they evaluate.
FURTHER = {"msmarco": ("nq", "mldr")}
SCORES = {
  name: (*evaluations, *(f"{test}-test" for test in FURTHER.get(name, ())))
  for names in TASKS_BY_KIND.values()
  for name, evaluations in sets.dev_and_test(names).items()
  if name not in FURTHER["msmarco"]
}


def make_protocol_task(
  folder,
  name: str,
  attention: str,
  head: classification.ClassifierOptions,
  answers: answering.AnsweringOptions,
  ranking: retrieval.RetrievalOptions,
) -> Task:
  """Makes a task of the study of the files in a folder.

  Raises a UserError if a file is missing.
  """
  kind = next(kind for kind, names in TASKS_BY_KIND.items() if name in names)
  if kind == "SC":
    form = glue.FORMATS[name]
    form = dataclasses.replace(form, texts=TEXTS[name], metric="accuracy")
    task = glue.make_held_out(folder, name, form, attention, head)
  elif kind == "TC":
    task = tagging.known_task(folder, name)
  elif kind == "QA":
    task = answering.make_answering_task(folder, name, attention, answers)
  else:
    task = retrieval.make_retrieval_task(folder, name, attention, ranking)
    if name in FURTHER:
      task = retrieval.with_test_sets(task, folder, FURTHER[name])
  metric = MEASURES[kind]
  if metric not in task.metrics:  # as with --answers=spans
    metric = task.main_metric
  metrics = (task.main_metric, *task.also)
  return dataclasses.replace(
    task,
    main_metric=metric,
    also=tuple(name for name in metrics if name != metric),
  )


PROTOCOL = {
  "lrs": (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4),
  "seeds": (0, 1, 2, 3, 4),
  "batch_size": 32,
  "steps": 1000,  # or one epoch, whichever is shorter
  "epochs": 1,
  "patience": 0,
  "max_length": 2028,
  "warmup": 0.1,
  "b2": 0.95,
  "eps": 1e-5,
  "weight_decay": 0.1,
  "pool": "mean",
  "head": "plain",
  "dropout": 0.0,
  "answers": "inside",
}
PRESET = Preset(
  "the study",
  "arXiv 2507.00994: tagging, answering, retrieval, SST-2, QQP and MNLI",
  SCORES,
  make_protocol_task,
  settings=(
    classification.ClassifierOptions,
    answering.AnsweringOptions,
    retrieval.RetrievalOptions,
  ),
  defaults=dict.fromkeys(SCORES, PROTOCOL),
  folder="finetune-study",
)
