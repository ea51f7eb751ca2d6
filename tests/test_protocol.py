"""The study's protocol: settings, splits, texts and steps."""

import dataclasses

import numpy as np

from antlm_jax.evals.finetuning import (
  answering,
  classification,
  loop,
  protocol,
  retrieval,
  tagging,
)
from antlm_jax.evals.finetuning.loop import Run
from antlm_jax.evals.finetuning.sets import held_out
from antlm_jax.evals.finetuning.trial import Hyperparameters
from antlm_jax.runtime import progress
from tests import random_models, runs, tuned

run = random_models.run(layers=1)


def mnli(folder, count=60):
  words = ["entailment", "neutral", "contradiction"]
  for name, size in (("train", count), ("valid", 9)):
    line = {"hypothesis": "sat"}
    lines = [
      line | {"premise": f"Tom {i}", "label": words[i % 3]} for i in range(size)
    ]
    runs.write_lines(folder / f"mnli.{name}.jsonl", lines)


def study(folder, name):
  head = classification.Options(pool="mean", head="plain")
  others = answering.Options(), retrieval.Options()
  return protocol.make(folder, name, "bidirectional", head, *others)


def test_the_protocol_is_the_codes(tmp_path):
  mnli(tmp_path)
  args = [f"--data={tmp_path}", "--task=mnli"]
  (job,) = tuned.planned(*args, "--preset=study")
  found, task = job.how, job.task
  assert len(job.grid.runs) == 30
  assert (found.steps, found.epochs, found.patience) == (1000, 1, 0)
  assert found.batch_size == 32
  assert (found.b1, found.b2, found.eps) == (0.9, 0.95, 1e-5)
  assert (found.weight_decay, found.clip, found.warmup) == (0.1, 1.0, 0.1)
  assert task.head.pool == "mean" and not task.head.norms
  assert task.metrics.keys() == {"accuracy"}
  # Given settings override the protocol.
  (job,) = tuned.planned(*args, "--preset=study", "--steps=7")
  assert job.how.steps == 7


def test_texts_and_splits_are_the_codes(tmp_path):
  mnli(tmp_path)
  task = study(tmp_path, "mnli")
  train, dev, test = map(task.load, ("train", *task.evaluations))
  assert (len(train), len(dev), len(test)) == (57, 3, 9)
  assert test[0].texts == ("Premise: Tom 0\nHypothesis: sat",)
  assert not {e.id for e in train} & {e.id for e in dev}
  order = np.random.default_rng(42).permutation(60)
  assert held_out(list(range(60)))[1] == order[:3].tolist()


def test_steps_go_through_epochs_and_are_evaluated_once(
  loaded, tmp_path, monkeypatch
):
  mnli(tmp_path, 40)
  task = study(tmp_path, "mnli")
  settings = Hyperparameters(batch_size=8, steps=12, max_length=16, patience=0)
  data = loop.read(loaded, task, 16)
  taken = []

  def track(batches, unit, name):
    taken.append(len(batches))
    return batches

  monkeypatch.setattr(progress, "track", track)
  (outcome,) = loop.fit(loaded, task, data, settings, [Run(1e-3, 0)])
  assert taken == [12] and len(outcome.epochs) == 1
  (steps,) = loop._parts(data.train, settings, [Run(1e-3, 0)])
  one_epoch = dataclasses.replace(settings, steps=0, epochs=1)
  (first,) = loop._parts(data.train, one_epoch, [Run(1e-3, 0)])
  assert len(first) == 5  # 38 rows by 8
  assert np.array_equal(steps[4]().tokens, first[4]().tokens)


def test_the_studys_measure_is_reported_and_the_usual_one_beside_it(tmp_path):
  folder = tmp_path / "conll2003"
  folder.mkdir()
  for name in ("train", "testa", "testb"):
    (folder / f"eng.{name}").write_text("Tom X I-PER\n")
  own = tagging.make(tmp_path, "conll", "bidirectional")
  theirs = study(tmp_path, "conll")
  assert (own.main_metric, theirs.main_metric) == ("entity_f1", "sentence_f1")
  assert own.metrics.keys() == theirs.metrics.keys()
