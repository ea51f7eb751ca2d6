"""The fine-tuning protocol of arXiv 2507.00994, as its code has it: a preset.

A thousand steps of 32 examples at six rates by five seeds, the last weights
scored. The rate is chosen on a twentieth of the training set, or on the set's
own; what their hub calls the validation set is the test. Each kind of task has
the measure of their code, and the usual one beside it. Their weights and
AdamW's state were bfloat16, which `--weights=bfloat16` imitates; here they are
float32.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from antlm_jax.evals.finetuning import (
  answering,
  classification,
  glue,
  retrieval,
  tagging,
)
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import Suite, Task, split_of

TEXTS: Mapping[str, tuple[str, ...]] = {
  "sst2": ("{sentence}",),
  "qqp": ("Question 1: {question1}\nQuestion 2: {question2}",),
  "mnli": ("Premise: {premise}\nHypothesis: {hypothesis}",),
}


def _classification(folder, name: str, options, attention: str) -> Task:
  files = glue.find(folder, name)
  form = dataclasses.replace(
    glue.FORMATS[name], texts=TEXTS[name], metric="accuracy"
  )

  def load(split: str) -> Sequence[Example]:
    return split_of(
      split,
      train=lambda: glue.load(files, form, "train"),
      test=lambda: glue.load(files, form, name),
    )

  return classification.task(
    name,
    load,
    _SCORES[name],
    options.classifier(form.classes, attention),
    files=(files.train, files.evaluations[name]),
  )


# The kinds of task, by the names that the paper has for them.
KINDS: Mapping[str, tuple[str, ...]] = {
  "SC": tuple(TEXTS),
  "TC": tuple(tagging.SCORES),
  "QA": tuple(answering.SCORES),
  "IR": tuple(retrieval.SCORES),
}
# What makes a kind's tasks, and the measure that is reported.
_MADE = {
  "SC": (_classification, "accuracy"),
  "TC": (tagging.make, "sentence_f1"),
  "QA": (answering.make, "index_f1"),
  "IR": (retrieval.make, "ndcg_of_ranked"),
}
_MAKERS = {name: _MADE[kind] for kind, names in KINDS.items() for name in names}
_SCORES = {name: (f"{name}-dev", f"{name}-test") for name in _MAKERS}


def make(folder, name: str, options, attention: str) -> Task:
  """Makes a task of the study of what is found in a folder.

  Raises:
    UserError: if a file of it is absent.
  """
  maker, metric = _MAKERS[name]
  made = maker(folder, name, options, attention)
  # Answers as spans have other measures than the study's tags, means as well.
  metric = metric if metric in made.metrics else made.main_metric
  return dataclasses.replace(made, main_metric=metric, by_example=True)


PROTOCOL = {
  "lrs": (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4),
  "seeds": (0, 1, 2, 3, 4),
  "batch_size": 32,
  "steps": 1000,
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
_ONE_EPOCH = {"steps": 0, "epochs": 1}
SUITE = Suite(
  "the study",
  _SCORES,
  make,
  "finetune-study",
  {
    name: PROTOCOL | (_ONE_EPOCH if name in ("conll", "uner") else {})
    for name in _MAKERS
  },
)
