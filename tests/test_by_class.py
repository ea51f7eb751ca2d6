"""F1 of each class and each kind of entity, in a fine-tuning's summary."""

import json

import numpy as np
import pytest

from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import summary
from tests import random_models
from tests.tuned import partial_summary

run = random_models.run()
WORDS = ("Tom", "Ann", "hills", "dogs", "river", "house", "door", "tree")
QUICK = {"batch_size": 16, "epochs": 2, "max_length": 16, "overwrite": True}
SEEDS = {"lrs": (1e-2,), "seeds": (0, 1)}


def texts(count, seed=0):
  draw = np.random.default_rng(seed)
  return [" ".join(draw.choice(WORDS, 6)) for _ in range(count)]


def class_records():
  """Returns texts with a class each. The class "rare" has a single text."""
  labels = [("Tom" in t) + ("dogs" in t) for t in texts(90)]
  records = list(zip(texts(90), map(str, labels), strict=True))
  return [*records[:-1], (records[-1][0], "rare")]


def class_scores(labels, predictions):
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  scores = metrics.precision_recall_fscore_support(
    labels, predictions, labels=range(4), zero_division=0
  )
  scores = zip(*scores, strict=True)
  return dict(zip(("0", "1", "2", "rare"), scores, strict=True))


NAMES = "Ann", "Tom", "hills"


def label_records():
  return [(t, [n for n in NAMES if n in t]) for t in texts(90)]


def label_scores(labels, predictions):
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  hot = (
    [[i in x for i in range(3)] for x in of] for of in (labels, predictions)
  )
  scores = metrics.precision_recall_fscore_support(
    *map(np.array, hot), zero_division=0
  )
  return dict(zip(NAMES, zip(*scores, strict=True), strict=True))


KINDS = {"Tom": "PER", "Ann": "PER", "river": "LOC", "hills": "LOC"}
TAGS = "O", "B-LOC", "I-LOC", "B-PER", "I-PER"


def tag_records():
  records = []
  for text in texts(90):
    kinds = [KINDS.get(word, "O") for word in text.split()]
    tags = [
      kind if kind == "O" else f"{'I' if kind == before else 'B'}-{kind}"
      for before, kind in zip(["O", *kinds], kinds, strict=False)
    ]
    records.append((text.split(), tags))
  return records


def tag_scores(labels, predictions):
  home = "seqeval.metrics.sequence_labeling"
  metrics = pytest.importorskip(home, reason="the hf extra")
  tags = (
    [[TAGS[i] for i in row] for row in of] for of in (labels, predictions)
  )
  scores = metrics.precision_recall_fscore_support(
    *tags, average=None, zero_division=0
  )
  return dict(zip(("LOC", "PER"), zip(*scores, strict=True), strict=True))


@pytest.mark.sample(1, 1)
@pytest.mark.parametrize(
  ("preset", "records", "scores_of", "shown"),
  [
    ("classification", class_records, class_scores, "1"),
    ("", label_records, label_scores, "Tom"),
    ("tagging", tag_records, tag_scores, "PER"),
  ],
)
def test_classes_have_the_scores_of_sklearn_and_seqeval(
  loaded, preset, records, scores_of, shown
):
  """Catches F1 of a wrong class, set or run, or of tags in place of entities.

  Some classes have no text, and some texts have several labels.
  """
  records, how = records(), {"preset": preset} if preset else {}
  sets = {"train": records, "dev": records[:40]}
  result = finetune.finetune(loaded, sets, **how, **QUICK, **SEEDS)
  tuned = result["own"]
  lines = (tuned.folder / "items.jsonl").read_text().splitlines()
  items = [json.loads(line) for line in lines]
  labels = [item["label"] for item in items]
  runs = zip(*(item["predictions"] for item in items), strict=True)
  about = json.loads((tuned.folder / "summary.json").read_text())
  by_run = [run["classes"]["own-dev"] for run in about["runs"]]
  for classes, predictions in zip(by_run, runs, strict=True):
    expected = scores_of(labels, predictions)
    assert [*classes] == [*expected]
    for scores, theirs in zip(classes.values(), expected.values(), strict=True):
      names = "precision", "recall", "f1", "support"
      assert [scores[name] for name in names] == pytest.approx([*theirs])
  # The table has the mean F1 over both runs, and the number of texts.
  mean = 100 * np.mean([classes[shown]["f1"] for classes in by_run])
  lines = str(result).split("own-dev, by class")[1].splitlines()
  line = next(x.split() for x in lines if x.startswith(f"{shown} "))
  assert mean > 0 and line[1] == f"{mean:.1f}"
  assert line[-1] == str(by_run[0][shown]["support"])


def test_of_many_classes_the_lowest_are_printed():
  """Catches a table of hundreds of lines, or one without the worst classes."""
  scores = {f"c{i}": {"f1": i / 100, "support": i} for i in range(50)[::-1]}
  runs = [{"lr": 1e-3, "seed": 0, "classes": {"x-dev": scores}}]
  (table,) = summary.class_tables(partial_summary(best_lr=1e-3, runs=runs))
  head, *lines = table.splitlines()
  assert head.startswith("x-dev, lowest 20 of 50 classes")
  assert [line.split()[0] for line in lines] == [f"c{i}" for i in range(20)]
