"""The study's protocol: settings, splits, texts and steps."""

import dataclasses
import json
import re

import numpy as np
import pytest

from antlm_jax import config as config_lib
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import (
  answering,
  classification,
  loop,
  protocol,
  retrieval,
  tagging,
)
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.evals.finetuning.sets import divide_training_set
from antlm_jax.evals.finetuning.trial import Hyperparameters
from antlm_jax.runtime import files, progress
from tests import random_models, runs, tuned

CONFIG = runs.ROOT / "configs/studies/clm_or_mlm.py"
MEASURE = "ndcg_of_ranked"
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
  head = classification.ClassifierOptions(pool="mean", head="plain")
  others = answering.AnsweringOptions(), retrieval.RetrievalOptions()
  return protocol.make_protocol_task(
    folder, name, "bidirectional", head, *others
  )


def test_the_protocol_is_the_codes(tmp_path):
  mnli(tmp_path)
  args = [f"--data={tmp_path}", "--task=mnli"]
  (job,) = tuned.planned(*args, "--preset=study")
  found, task = job.hyperparameters, job.task
  assert len(job.grid.runs) == 30
  assert (found.steps, found.epochs, found.patience) == (1000, 1, 0)
  assert found.batch_size == 32
  assert (found.b1, found.b2, found.eps) == (0.9, 0.95, 1e-5)
  assert (found.weight_decay, found.clip, found.warmup) == (0.1, 1.0, 0.1)
  assert task.head.pool == "mean" and not task.head.norms
  assert task.metrics.keys() == {"accuracy"}
  # Given settings override the protocol.
  (job,) = tuned.planned(*args, "--preset=study", "--steps=7")
  assert job.hyperparameters.steps == 7


def test_texts_and_splits_are_the_codes(tmp_path):
  mnli(tmp_path)
  task = study(tmp_path, "mnli")
  train, dev, test = map(task.load, ("train", *task.evaluations))
  assert (len(train), len(dev), len(test)) == (57, 3, 9)
  assert test[0].texts == ("Premise: Tom 0\nHypothesis: sat",)
  assert not {e.id for e in train} & {e.id for e in dev}
  order = np.random.default_rng(42).permutation(60)
  assert divide_training_set(list(range(60)))[1] == order[:3].tolist()


@pytest.mark.slow
def test_steps_go_through_epochs_and_are_evaluated_once(
  loaded, tmp_path, monkeypatch
):
  mnli(tmp_path, 40)
  task = study(tmp_path, "mnli")
  settings = Hyperparameters(batch_size=8, steps=12, max_length=16, patience=0)
  data = loop.read_rows(loaded, task, 16)
  taken = []

  def track(batches, unit, name):
    taken.append(len(batches))
    return batches

  monkeypatch.setattr(progress, "track", track)
  (outcome,) = loop.fit(loaded, task, data, settings, [TrialRun(1e-3, 0)])
  # One training, and one evaluation of dev and of test.
  assert taken == [12, 1, 2] and len(outcome.epochs) == 1
  (steps,) = loop._training_parts(data["train"], settings, [TrialRun(1e-3, 0)])
  one_epoch = dataclasses.replace(settings, steps=0, epochs=1)
  (first,) = loop._training_parts(data["train"], one_epoch, [TrialRun(1e-3, 0)])
  assert len(first) == 5  # 38 rows by 8
  assert np.array_equal(steps[4]().tokens, first[4]().tokens)


def texts(folder, count):
  for name, size in (("train", count), ("valid", 20)):
    lines = [
      {"sentence": f"Tom {i} {'sat' * (i % 2)}", "label": i % 2}
      for i in range(size)
    ]
    runs.write_lines(folder / f"sst2.{name}.jsonl", lines)


def published(folder):
  """Writes stand-ins for MS MARCO, NQ and MLDR, and 300 sentences."""
  texts(folder, 300)
  for seed, (name, splits) in enumerate(
    {
      "msmarco": ("train", "dev", "test"),
      "nq": ("test",),
      "mldr": ("train", "dev", "test"),
    }.items()
  ):
    tuned.write_beir(folder / name, splits, seed)


def study_run(folder, run, *args):
  """Fine-tunes a model as the row CLM of the tiny study; returns the folder."""
  config = config_lib.load_config(f"{CONFIG}:row=tiny_clm_42")
  row = folder / "tiny_clm_42" / "0"
  files.write_text(row / "config.json", config_lib.to_json(config))
  output = row / "evals" / "finetune-study"
  words = "--preset=study", "--task=all", "--max_length=24", "--save"
  grid = "--lrs=1e-3,1e-9", "--seeds=0,1,2", f"--output={output}"
  finetune.main([f"--checkpoint={run}", *words, *grid, *args])
  return output


def summary_of(folder):
  return json.loads(next(folder.glob("*/summary.json")).read_text())


@pytest.mark.slow
def test_nq_and_mldr_are_of_the_ms_marco_model(run, tmp_path, capsys):
  """Catches NQ and MLDR untrained, trained apart, or not in the report."""
  published(tmp_path / "data")
  output = study_run(tmp_path / "runs", run, f"--data={tmp_path / 'data'}")
  said = capsys.readouterr().out
  assert "sst2: 1 epoch of 9 steps in all, fewer than steps=1000" in said
  assert len(re.findall("^msmarco epoch 1, seed", said, re.MULTILINE)) == 6
  assert "nq epoch" not in said and "mldr epoch" not in said
  about = summary_of(output / "msmarco")
  assert about["train_examples"] == 64 and about["main_metric"] == MEASURE
  tests = [f"{name}-test" for name in ("msmarco", "nq", "mldr")]
  assert [*about["evaluations"]] == ["msmarco-dev", *tests]
  # The saved model of MS MARCO has NQ's scores.
  (model,) = (output / "msmarco").glob("*/model")
  words = "--preset=retrieval", "--task=nq", "--epochs=0", "--max_length=24"
  data = f"--data={tmp_path / 'data'}"
  again = f"--output={tmp_path / 'again'}"
  finetune.main([f"--checkpoint={model}", *words, data, again])
  (alone,) = summary_of(tmp_path / "again" / "nq")["runs"]
  best = about["runs"][about["best_run"]]["scores"]["nq-test"]
  assert alone["scores"]["nq-test"] == pytest.approx(best, abs=1e-6)
  numbers, _ = tuned.report_of(tmp_path / "runs", CONFIG, "--scale=tiny")
  _, row = numbers["scores"]["tiny"]
  means = []
  best = [r["scores"] for r in about["runs"] if r["lr"] == about["best_lr"]]
  for name in ("msmarco", "nq", "mldr"):
    of = [scores[f"{name}-test"] for scores in best]
    means.append(np.mean([one[MEASURE] for one in of]))
    assert row[f"{name} ({MEASURE})"]["mean"] == pytest.approx(means[-1])
    mean = np.mean([one["ndcg"] for one in of])
    assert row[f"{name} (ndcg)"]["mean"] == pytest.approx(mean)
  assert row[f"IR ({MEASURE})"]["mean"] == pytest.approx(np.mean(means))


def test_sets_that_are_not_there_are_left_out(tmp_path, capsys):
  """Catches an untrained NQ, and a missing test set that is not told."""
  texts(tmp_path, 9)
  tuned.write_beir(tmp_path / "nq", ("test",))
  model = tuned.checkpoint_at(tmp_path)
  words = ["--checkpoint=none", f"--data={tmp_path}", "--preset=study"]

  def plan(*more):
    given = finetune.parse_finetune([*words, *more])
    del given["model"], given["step"]
    return finetune.plan_tasks(model, "llama", None, **given)

  jobs, absent = plan()
  assert [job.task.name for job in jobs] == ["sst2"]
  assert absent[-3:] == ["nfcorpus", "scifact", "msmarco"]
  tuned.write_beir(tmp_path / "msmarco")
  (job,) = plan("--task=msmarco")[0]
  assert job.task.evaluations[1:] == ("msmarco-test", "nq-test")
  said = f"warning: msmarco: mldr is not in {tmp_path}\n"
  assert capsys.readouterr().out == said


@pytest.mark.parametrize(
  "task, names",
  [
    ("scifact,own", ["scifact", "mine"]),
    ("own,scifact", ["mine", "scifact"]),
    ("all", ["scifact"]),
  ],
)
def test_a_request_for_the_own_set_is_kept(tmp_path, task, names):
  """Catches a named task that is left out next to a known set."""
  folder = tmp_path / "mine"
  tuned.write_beir(folder)
  tuned.write_beir(folder / "scifact")
  words = f"--data={folder}", "--preset=retrieval", f"--task={task}"
  assert [job.task.name for job in tuned.planned(*words)] == names


@pytest.mark.parametrize("count, steps", [(300, 9), (40_000, 1000)])
def test_training_ends_after_1000_steps_or_an_epoch(tmp_path, count, steps):
  """Catches a small set that is read a hundred times."""
  texts(tmp_path, count)
  words = f"--data={tmp_path}", "--preset=study", "--task=sst2"
  (job,) = tuned.planned(*words)
  rows = range(len(job.task.load("train")))
  assert loop.count_steps(job.task, rows, job.hyperparameters) == steps


def test_the_studys_measure_is_reported_and_the_usual_one_beside_it(tmp_path):
  folder = tmp_path / "conll2003"
  folder.mkdir()
  for name in ("train", "testa", "testb"):
    (folder / f"eng.{name}").write_text("Tom X I-PER\n")
  own = tagging.known_task(tmp_path, "conll")
  theirs = study(tmp_path, "conll")
  assert (own.main_metric, theirs.main_metric) == ("entity_f1", "sentence_f1")
  assert own.metrics.keys() == theirs.metrics.keys()
  assert theirs.also == ("entity_f1",)
