"""GLUE: metrics, heads, presets and files."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import classification, glue
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.classification import Classifier, LinearHead
from tests import random_models, real, runs, tuned
from tests.reference import gelu, layer_norm

run = random_models.run(layers=1)


def test_metrics_are_scikit_learns():
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  draw = np.random.default_rng(0)
  drawn = (draw.random((40, 2, 50)) < draw.random((40, 2, 1))).astype(int)
  some, none, every = drawn[0, 0], np.zeros(50, int), np.ones(50, int)
  for x, y in [*drawn, (none, some), (every, some), (some, every)]:
    expected = {
      "accuracy": metrics.accuracy_score(y, x),
      "f1": metrics.f1_score(y, x, zero_division=0),
      "mcc": metrics.matthews_corrcoef(y, x),
    }
    found = {name: of(x, y) for name, of in classification.BINARY.items()}
    assert found == pytest.approx(expected)
  assert classification.mcc(none, none) == classification.f1(none, none) == 0
  for x, y in draw.integers(0, 4, (20, 2, 9)):
    expected = metrics.f1_score(y, x, average="macro", zero_division=0)
    assert classification.macro_f1(x, y) == pytest.approx(expected)


normed = functools.partial(layer_norm, eps=1e-5)


def two_layers(x, p, norm=lambda x: x):
  x = gelu(norm(x) @ p["dense/kernel"] + p["dense/bias"])
  return norm(x) @ p["classes/kernel"] + p["classes/bias"]


@pytest.mark.parametrize(
  ("pool", "head", "reference"),
  [
    ("last", Classifier, functools.partial(two_layers, norm=normed)),
    ("mean", functools.partial(Classifier, norms=False), two_layers),
    ("first", LinearHead, lambda x, p: x @ p["classes/kernel"]),
  ],
)
def test_heads_are_what_they_say(pool, head, reference):
  head = head(("a", "b", "c"), pool)
  draw = np.random.default_rng(0)
  params = {
    name: draw.normal(size=value.shape).astype(np.float32)
    for name, value in head.init(jax.random.key(0), 16).items()
  }
  assert params.keys() == head.parameters(64).keys()
  hidden = draw.normal(2, 3, (5, 4, 16)).astype(np.float32)
  lengths = np.array([4, 1, 3, 2, 4])
  wide = {name: value.astype(np.float64) for name, value in params.items()}
  of = {"first": lambda x: x[0], "last": lambda x: x[-1]}
  of["mean"] = lambda x: x.mean(axis=0)
  rows = zip(hidden.astype(np.float64), lengths, strict=True)
  x = np.array([of[pool](row[:length]) for row, length in rows])
  got = head(params, *map(jnp.asarray, (hidden, lengths)))
  np.testing.assert_allclose(got, reference(x, wide), rtol=1e-4, atol=1e-4)
  key = jax.random.key(0)
  dropped = head(params, *map(jnp.asarray, (hidden, lengths)), key)
  assert (np.abs(dropped - got).max() > 0.1) == (head.kind == "classifier")


@pytest.mark.parametrize(
  ("head", "std"), [(Classifier, math.sqrt(2 / (5 * 64))), (LinearHead, 0.02)]
)
def test_a_heads_first_values(head, std):
  labels = tuple(map(str, range(64)))
  params = head(labels, "first").init(jax.random.key(0), 64)
  for name, value in params.items():
    # Truncation at two deviations leaves 0.88 of a normal's deviation.
    expected = 0.88 * std if "kernel" in name else 0
    assert np.std(value) == pytest.approx(expected, rel=0.05)


def test_empty_places_weigh_nothing():
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
  labels, weights = jnp.array([0, 2, 1, 1]), jnp.array([1.0, 1.0, 1.0, 0.0])
  got = classification.class_loss(logits, labels, weights)
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  expected = -np.log(p[[0, 1, 2], [0, 2, 1]]).mean()
  assert got == pytest.approx(expected, rel=1e-5)


PAIR = {"sentence1": "a", "sentence2": "b"}
LINES = {  # fields of a line, and the resulting texts
  "boolq": ({"question": "q", "passage": "p"}, ("q", "p")),
  "cola": ({"sentence": "s"}, ("s",)),
  "mnli": ({"premise": "p", "hypothesis": "h"}, ("p", "h")),
  "mrpc": (PAIR, ("a", "b")),
  "multirc": (
    {"paragraph": "p", "question": "q", "answer": "a"},
    ("Question: q Answer: a", "p"),
  ),
  "qnli": ({"question": "q", "sentence": "s"}, ("q", "s")),
  "qqp": ({"question1": "a", "question2": "b"}, ("a", "b")),
  "rte": (PAIR, ("a", "b")),
  "sst2": ({"sentence": "s"}, ("s",)),
  "wsc": (
    {"text": "t", "span1_text": "Tom", "span2_text": "he"},
    ('Does "he" refer to "Tom" in this passage?', "t"),
  ),
}


def line(name, label):
  """Returns a line of a task's file."""
  return json.dumps(LINES[name][0] | {"label": label, "idx": 9}) + "\n"


def asked(folder, *more):
  """Returns a folder's tasks and settings, as the command reads them."""
  jobs = tuned.planned(f"--data={folder}", "--preset=2024", *more)
  return [
    (vars(job.grid) | vars(job.hyperparameters), job.task) for job in jobs
  ]


def every(folder, *more):
  return [task for _, task in asked(folder, *more)]


def write_all(folder):
  """Writes two examples of each task."""
  folder.mkdir()
  for name in LINES:
    for split in ("train", "valid"):
      text = line(name, 0) + line(name, 1)
      (folder / f"{name}.{split}.jsonl").write_text(text)
  (folder / "mnli-mm.valid.jsonl").write_text(line("mnli", 2))


def test_all_tasks_load_in_the_official_form(tmp_path):
  folder = tmp_path / "glue_filtered"
  write_all(folder)
  for place in (tmp_path, folder):
    assert [task.name for task in every(place)] == list(LINES)
  scores = []
  for task in every(tmp_path):
    name = task.name
    words = ("entailment", "neutral", "contradiction")
    assert task.head.labels == (words if name == "mnli" else ("0", "1"))
    for split in ("train", name):
      assert task.load(split) == [
        Example(LINES[name][1], label, f"{split}_{label}") for label in (0, 1)
      ]
    if name == "mnli":
      mismatched = Example(LINES[name][1], 2, "mnli-mm_0")
      assert task.load("mnli-mm") == [mismatched]
    scores += task.evaluations
  assert tuple(scores) == glue.SCORES and len(scores) == 11
  main = {task.name: task.main_metric for task in every(tmp_path)}
  others = {"cola": "mcc", "mrpc": "f1", "qqp": "f1"}
  assert main == dict.fromkeys(LINES, "accuracy") | others


def test_names():
  preset = glue.OF_2024
  assert preset.named("all") == list(glue.FORMATS)
  assert preset.named("mnli-mm,rte,mnli") == ["mnli", "rte"]
  with pytest.raises(UserError, match="'wnli' is not all or of boolq, cola"):
    preset.named("cola,wnli")
  with pytest.raises(UserError, match="'cola' is not all or of boolq, mnli, m"):
    glue.OF_2026.named("cola")


IN_2024 = {
  **{"lrs": (5e-5,), "seeds": (12,), "limit": 0, "batch_size": 64},
  **{"epochs": 10, "patience": 3, "threshold": 0.001, "drop_last": False},
  **{"max_length": 128, "warmup": 0, "decay": "linear", "floor": 0},
  **{"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0, "clip": 1},
}
IN_2026 = IN_2024 | {
  **{"lrs": (3e-5,), "seeds": (42,), "batch_size": 32, "patience": 0},
  **{"drop_last": True, "max_length": 512, "warmup": 0.06, "decay": "cosine"},
  **{"floor": 0.1, "weight_decay": 0.01, "decay_scope": "all", "clip": 0},
}
OWN = {  # settings of a task in 2026, and the metric that selects the epoch
  "boolq": ({"batch_size": 16}, "accuracy"),
  "mnli": ({"limit": 10_000}, "accuracy"),
  "mrpc": ({}, "f1"),
  "multirc": ({"batch_size": 16}, "accuracy"),
  "qqp": ({"limit": 10_000}, "f1"),
  "rte": ({}, "accuracy"),
  "wsc": ({"epochs": 30}, "accuracy"),
}


@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_what_presets_set(tmp_path, attention):
  write_all(tmp_path / "glue_filtered")
  labels, pool = ("0", "1"), "last" if attention == "causal" else "first"
  with_norms = Classifier(labels, pool)
  by_attention = LinearHead(labels, pool) if pool == "last" else with_norms
  words = ("entailment", "neutral", "contradiction")
  found = asked(tmp_path, f"--attention={attention}")
  for args, task in found:
    assert args.items() >= IN_2024.items()
    assert task.choosing_metric == ("accuracy" if task.name == "mnli" else "f1")
    assert dataclasses.replace(task.head, labels=labels) == by_attention
  assert len(found) == 10
  found = asked(tmp_path, "--preset=2026", f"--attention={attention}")
  for args, task in found:
    own, chooser = OWN[task.name]
    assert args.items() >= (IN_2026 | own).items()
    assert (task.choosing_metric, task.evaluations) == (chooser, (task.name,))
    assert [path.name for path in task.files] == [
      f"{task.name}.{split}.jsonl" for split in ("train", "valid")
    ]
    assert task.head.labels == (words if task.name == "mnli" else labels)
    assert dataclasses.replace(task.head, labels=labels) == with_norms
  assert [task.name for _, task in found] == list(OWN)
  more = ("--limit=5", "--epochs=2", "--no-drop_last", "--batch_size=7")
  given = {"limit": 5, "epochs": 2, "drop_last": False, "batch_size": 7}
  for args, _ in asked(tmp_path, "--preset=2026", *more):
    assert args.items() >= (IN_2026 | given).items()


def test_prediction_files_of_both_years():
  matched = [Example((), 1, "mnli_0"), Example((), 2, "mnli_1")]
  mismatched = [Example((), 0, "mnli-mm_0")]
  examples = {"mnli": matched, "mnli-mm": mismatched}
  found = {"mnli": [1, 0], "mnli-mm": [2]}
  matched = [{"id": "mnli_0", "pred": 1}, {"id": "mnli_1", "pred": 0}]
  texts = glue.texts_2024(examples, found)
  expected = {"mnli": {"predictions": matched}}
  expected["mnli-mm"] = {"predictions": [{"id": "mnli-mm_0", "pred": 2}]}
  assert json.loads(texts.pop("predictions.json")) == {"glue": expected}
  assert texts == {
    "mnli/predictions.txt": "index\tprediction\n0\t1\n1\t0\n",
    "mnli-mm/predictions.txt": "index\tprediction\n0\t2\n",
  }
  del examples["mnli-mm"]
  assert glue.texts_2026(examples, found) == {
    "predictions.json": '{"mnli": {"predictions": [{"id": "mnli_0", "pred": 1},'
    ' {"id": "mnli_1", "pred": 0}]}}'
  }


def test_other_forms_of_training_sets(tmp_path):
  for folder in ("sst2", "mnli_en_babylm_eval", "glue_filtered"):
    (tmp_path / folder).mkdir()
  tsv = tmp_path / "sst2/train_full.tsv"
  tsv.write_text('sentence\tlabel\na "quoted \t1\n\u2028b\t0\n')
  valid = '{"sentence": "c", "label": 1}'
  (tmp_path / "glue_filtered/sst2.valid.jsonl").write_text(valid)
  for split in ("train", "valid"):
    path = tmp_path / f"mnli_en_babylm_eval/mnli_en.{split}.jsonl"
    path.write_text(line("mnli", "contradiction"))
  (tmp_path / "glue_filtered/mnli-mm.valid.jsonl").write_text(line("mnli", 0))
  mnli, sst2 = every(tmp_path)
  assert (mnli.name, sst2.name) == ("mnli", "sst2")
  assert sst2.load("train") == [
    Example(('a "quoted ',), 1, "train_0"),
    Example(("\u2028b",), 0, "train_1"),
  ]
  assert sst2.load("sst2") == [Example(("c",), 1, "sst2_0")]
  assert mnli.evaluations == ("mnli",)  # this training set contains mnli-mm
  assert mnli.load("mnli")[0].label == 2
  tsv.write_text("sentence\tlabel\na\t1\tb\n")
  with pytest.raises(UserError, match="line 2 has more columns than line 1"):
    sst2.load("train")


def test_the_real_files(tmp_path):
  real.unpacked("glue", tmp_path)
  sizes = {}
  for task in every(tmp_path):
    train = task.load("train")
    sizes[task.name] = len(train), len(task.load(task.name))
    labels = {example.label for example in train}
    assert labels == set(range(len(task.head.labels)))
    assert all(text for example in train[:50] for text in example.texts)
  expected = {"cola": (8551, 522), "mnli": (7107, 1777), "mrpc": (3668, 204)}
  expected |= {"rte": (2490, 139), "sst2": (67349, 436), "wsc": (554, 52)}
  assert sizes == expected
  with pytest.raises(UserError, match=r"boolq is not in .*BoolQ/train.jsonl"):
    glue.find_glue_files(tmp_path, "boolq", glue.FORMATS["boolq"])


GOOD = '{"sentence": "a", "label": 1}'


@pytest.mark.parametrize(
  ("text", "message"),
  [
    (GOOD + "\n{", r"cola.train.jsonl: line 2 is not JSON"),
    ("\n[1]", "line 2: not a JSON object"),
    (GOOD.replace('"a"', "5"), "line 1: the field 'sentence' is not text"),
    (GOOD.replace("1", "0.7"), "line 1: the label 0.7 is not one of 0, 1"),
    (GOOD.replace("1", "NaN"), "line 1: the label nan is not one of 0, 1"),
    (GOOD.replace("1", "[1]"), r"line 1: the label \[1\] is not one of 0, 1"),
    ('{"sentence": "a"}', "line 1: the field 'label' is absent"),
    ('{"label": 1}', "line 1: the field 'sentence' is absent"),
    (GOOD.replace("1", '"x"'), "line 1: the label 'x' is not one of 0, 1"),
    (GOOD.replace("1", "null"), "line 1: the label None is not one of 0, 1"),
  ],
)
def test_bad_files(tmp_path, text, message):
  for split, content in (("train", text), ("valid", GOOD)):
    (tmp_path / f"cola.{split}.jsonl").write_text(content)
  options = classification.ClassifierOptions()
  cola = glue.make_glue_task(tmp_path, "cola", "bidirectional", options)
  with pytest.raises(UserError, match=message):
    cola.load("train")


def test_absent_files_are_all_named(tmp_path):
  """Catches an error that names only one of a set's possible places."""
  with pytest.raises(UserError, match="nowhere: no such folder"):
    glue.find_glue_files(tmp_path / "nowhere", "cola", glue.FORMATS["cola"])
  (tmp_path / "rte.train.jsonl").write_text("")
  words = (
    "rte.train.jsonl with rte.valid.jsonl or glue_filtered/rte.train.jsonl with"
    " glue_filtered/rte.valid.jsonl or RTE/train.jsonl with RTE/val.jsonl"
  )
  with pytest.raises(UserError, match=words):
    glue.find_glue_files(tmp_path, "rte", glue.FORMATS["rte"])
  with pytest.raises(UserError, match=r"no set of .*cola, .* task=wsc, for"):
    every(tmp_path)


MULTIRC = {"question": "q", "answers": [{"text": "a", "label": 1}]}
MULTIRC["answers"] += [{"text": "b", "label": 0}]
SUPERGLUE = {  # a published line, and its examples
  "BoolQ": (
    {"question": "q", "passage": "p", "idx": 0, "label": True},
    [(("q", "p"), 1)],
  ),
  "CB": (
    {"premise": "p", "hypothesis": "h", "label": "contradiction", "idx": 0},
    [(("p", "h"), 1)],
  ),
  "COPA": (
    {
      **{"premise": "p", "choice1": "a", "choice2": "b"},
      **{"question": "effect", "label": 1, "idx": 0},
    },
    [(("p What was the result?", "a", "b"), 1)],
  ),
  "MultiRC": (
    {
      "idx": 0,
      "version": 1.1,
      "passage": {"text": "p", "questions": [MULTIRC]},
    },
    [(("Question: q Answer: a", "p"), 1), (("Question: q Answer: b", "p"), 0)],
  ),
  "RTE": (
    {"premise": "p", "hypothesis": "h", "label": "not_entailment", "idx": 0},
    [(("p", "h"), 1)],
  ),
  "WiC": (
    {
      **{"word": "w", "sentence1": "a w", "sentence2": "b w", "idx": 0},
      **{"label": False, "start1": 2, "end1": 3, "start2": 2, "end2": 3},
    },
    [(("w: a w", "b w"), 0)],
  ),
  "WSC": (
    {
      "text": "t",
      "target": {
        **{"span1_index": 0, "span1_text": "Tom"},
        **{"span2_index": 1, "span2_text": "he"},
      },
      **{"idx": 0, "label": True},
    },
    [(('Does "he" refer to "Tom" in this passage?', "t"), 1)],
  ),
}


def test_superglues_own_files(tmp_path):
  """Catches nested, renamed and boolean fields that are misread."""
  for folder, (record, _) in SUPERGLUE.items():
    for split in ("train", "val"):
      runs.write_lines(tmp_path / folder / f"{split}.jsonl", [record])
  tasks = {task.name: task for task in every(tmp_path, "--preset=superglue")}
  for folder, (_, expected) in SUPERGLUE.items():
    task = tasks.pop(folder.lower())
    found = task.load(f"{task.name}-test")
    assert [(e.texts, e.label) for e in found] == expected
    assert task.evaluations == (f"{task.name}-dev", f"{task.name}-test")
  assert not tasks
  # BabyLM's presets read them as well.
  names = [task.name for task in every(tmp_path)]
  assert names == ["boolq", "multirc", "rte", "wsc"]


@pytest.mark.parametrize(
  ("folder", "fields", "message"),
  [
    ("RTE", {"target": 1}, ""),
    ("WiC", {"target": None}, ""),
    ("WSC", {"target": 1}, "'span2_text' is absent"),
    ("BoolQ", {"question": ["q"]}, "'question' is not text"),
    (
      "MultiRC",
      {"passage": {"text": "p"}},
      "'questions' is no list of objects",
    ),
    (
      "MultiRC",
      {"passage": {"questions": [{"question": "q"}]}},
      "'answers' is no list of objects",
    ),
    (
      "MultiRC",
      {"passage": {"questions": [MULTIRC | {"answers": [{"label": 1}]}]}},
      "'answer' is not text",
    ),
  ],
)
def test_other_fields_of_superglue_are_no_tracebacks(
  tmp_path, folder, fields, message
):
  """Catches fields that are not as published: ignored, or one line."""
  record, expected = SUPERGLUE[folder]
  path = runs.write_lines(tmp_path / "a.jsonl", [record | fields])
  form = glue.SUPERGLUE[folder.lower()]
  read = functools.partial(glue.read_glue_examples, form, path, "train")
  if not message:
    assert [(e.texts, e.label) for e in read()] == expected
    return
  assert f"a.jsonl, line 1: the field {message}" in runs.told(read)


def test_a_chooser_scores_each_choice_by_itself(loaded):
  """Catches choices that are compared across examples."""
  head = classification.Chooser(("a", "b", "c"), "last")
  examples = [Example(("Tom sat", "near", "the dogs", "often"), 2)] * 2
  rows = head.encode(loaded, examples, 16)
  pairs = [Example(("Tom sat", choice)) for choice in examples[0].texts[1:]]
  plain = Classifier(("x",), "last").encode(loaded, pairs, 16)
  assert rows.tokens.shape[:2] == (2, 3)
  assert np.array_equal(rows.tokens[0], plain.tokens)
  scores = np.random.default_rng(0).normal(size=(2, 3, 1)).astype(np.float32)
  shares = np.exp(scores[..., 0])
  expected = -np.log(shares[:, 2] / shares.sum(axis=1)).mean()
  loss = head.loss(scores, jnp.asarray(rows.labels), jnp.ones(2))
  assert loss == pytest.approx(expected, rel=1e-5)
  assert head.reduce(scores).tolist() == scores[..., 0].argmax(axis=1).tolist()
  with pytest.raises(UserError, match="has 2 choices, not 3"):
    head.encode(loaded, [Example(("a", "b", "c"))], 16)
