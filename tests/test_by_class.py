"""F1 of each class and each kind of entity, in a fine-tuning's summary."""

import json

import numpy as np
import pytest

from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import summary
from tests import random_models

run = random_models.run()
WORDS = ("Tom", "Ann", "hills", "dogs", "river", "house", "door", "tree")
QUICK = {"batch_size": 16, "epochs": 2, "max_length": 16, "overwrite": True}
SEEDS = {"lrs": (1e-2,), "seeds": (0, 1)}


def texts(count, seed=0):
  draw = np.random.default_rng(seed)
  return [" ".join(draw.choice(WORDS, 6)) for _ in range(count)]


def items(tuned):
  """Returns the summary, and the labels and predictions of each run."""
  lines = (tuned.folder / "items.jsonl").read_text().splitlines()
  found = [json.loads(line) for line in lines]
  labels = [one["label"] for one in found]
  runs = zip(*(one["predictions"] for one in found), strict=True)
  return json.loads((tuned.folder / "summary.json").read_text()), labels, runs


def check_table(text, about, name, label):
  """Asserts that a line has a class's mean F1 over both runs, and its size."""
  of = [run["classes"][name][label] for run in about["runs"]]
  mean = 100 * np.mean([one["f1"] for one in of])
  lines = text.split(f"{name}, by class")[1].splitlines()
  line = next(x.split() for x in lines if x.startswith(f"{label} "))
  assert line[1] == f"{mean:.1f}" and line[-1] == str(of[0]["support"])


def test_classes_have_scikit_learns_scores(loaded):
  """Catches F1 of a wrong class, set or run, and a class without any text."""
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  labels = [("Tom" in t) + ("dogs" in t) for t in texts(90)]
  records = list(zip(texts(90), map(str, labels), strict=True))
  records = [*records[:-1], (records[-1][0], "rare")]
  sets = {"train": records, "dev": records[:40]}
  tuned = finetune.finetune(
    loaded, sets, preset="classification", **QUICK, **SEEDS
  )
  about, there, runs = items(tuned["own"])
  for one, found in zip(about["runs"], runs, strict=True):
    of = one["classes"]["own-dev"]
    assert list(of) == ["0", "1", "2", "rare"]
    expected = metrics.precision_recall_fscore_support(
      there, found, labels=range(4), zero_division=0
    )
    named = zip(("precision", "recall", "f1", "support"), expected, strict=True)
    for key, values in named:
      assert [x[key] for x in of.values()] == pytest.approx(values.tolist())
  check_table(str(tuned), about, "own-dev", "1")


def test_labels_of_several_have_scikit_learns_scores(loaded):
  """Catches F1 of a multi-label set that counts texts and not labels."""
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  names = "Ann", "Tom", "hills"
  records = [(t, [n for n in names if n in t]) for t in texts(90)]
  sets = {"train": records, "dev": records[:40]}
  tuned = finetune.finetune(loaded, sets, **QUICK, **SEEDS)
  about, there, runs = items(tuned["own"])
  hot = np.array([[i in one for i in range(3)] for one in there])
  for one, found in zip(about["runs"], runs, strict=True):
    ours = [x["f1"] for x in one["classes"]["own-dev"].values()]
    predicted = np.array([[i in x for i in range(3)] for x in found])
    theirs = metrics.f1_score(hot, predicted, average=None, zero_division=0)
    assert ours == pytest.approx(theirs.tolist())
  check_table(str(tuned), about, "own-dev", "Tom")


def test_kinds_of_entity_have_seqevals_scores(loaded):
  """Catches F1 of tags in place of entities, or of the wrong kind."""
  metrics = pytest.importorskip("seqeval.metrics", reason="the hf extra")
  kinds = {"Tom": "PER", "Ann": "PER", "river": "LOC", "hills": "LOC"}
  records = []
  for text in texts(90):
    tags, before = [], "O"
    for word in text.split():
      kind = kinds.get(word, "O")
      inside = kind != "O" and kind == before
      tags.append(kind if kind == "O" else f"{'I' if inside else 'B'}-{kind}")
      before = kind
    records.append((text.split(), tags))
  sets = {"train": records, "dev": records[:40]}
  tuned = finetune.finetune(loaded, sets, preset="tagging", **QUICK, **SEEDS)
  about, there, runs = items(tuned["own"])
  classes = "O", "B-LOC", "I-LOC", "B-PER", "I-PER"
  gold = [[classes[i] for i in one] for one in there]
  for one, found in zip(about["runs"], runs, strict=True):
    of = one["classes"]["own-dev"]
    predicted = [[classes[i] for i in x] for x in found]
    theirs = metrics.classification_report(
      gold, predicted, output_dict=True, zero_division=0
    )
    assert [*of] == ["LOC", "PER"] and of["PER"]["f1"] > 0
    for kind, scores in of.items():
      renamed = scores | {"f1-score": scores["f1"]}
      for key, value in theirs[kind].items():
        assert renamed[key] == pytest.approx(value)
  check_table(str(tuned), about, "own-dev", "PER")


def test_of_many_classes_the_lowest_are_printed():
  """Catches a table of hundreds of lines, or one without the worst classes."""
  scores = {f"c{i}": {"f1": i / 100, "support": i} for i in range(50)[::-1]}
  runs = [{"lr": 1e-3, "seed": 0, "classes": {"x-dev": scores}}]
  (table,) = summary.class_tables({"best_lr": 1e-3, "runs": runs})
  head, *lines = table.splitlines()
  assert head.startswith("x-dev, lowest 20 of 50 classes")
  assert [line.split()[0] for line in lines] == [f"c{i}" for i in range(20)]
