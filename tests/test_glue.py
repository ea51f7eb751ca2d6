"""Tasks: their metrics, their head, and GLUE's files."""

import json
import math
import pathlib
import tarfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax.errors import UserError
from evals import finetune
from evals.finetuning import classification, glue
from evals.finetuning.classification import Classifier, Options
from evals.finetuning.rows import Example
from evals.finetuning.task import named

ROOT = pathlib.Path(__file__).parent.parent
GLUE = ROOT / "../shared/data/glue.tar.xz"


# ------------------------------------------------------------------- metrics


def test_metrics_are_their_definitions():
  draw = np.random.default_rng(0)
  for _ in range(20):
    x, y = draw.random((2, 50)) < draw.random((2, 1))
    tp, tn = (x & y).sum(), (~x & ~y).sum()
    fp, fn = (x & ~y).sum(), (~x & y).sum()
    x, y = x.astype(np.int32), y.astype(np.int64)
    assert classification.accuracy(x, y) == pytest.approx((tp + tn) / 50)
    if tp:
      precision, recall = tp / (tp + fp), tp / (tp + fn)
      harmonic = 2 / (1 / precision + 1 / recall)
      assert classification.f1(x, y) == pytest.approx(harmonic)
    sides = math.prod(map(float, (tp + fp, tp + fn, tn + fp, tn + fn)))
    if sides:
      expected = (float(tp) * tn - float(fp) * fn) / math.sqrt(sides)
      assert classification.mcc(x, y) == pytest.approx(expected)


def test_metrics_of_constant_predictions():
  y = np.array([0, 0, 1])
  assert (
    classification.mcc(np.ones(3, int), y)
    == classification.mcc(np.zeros(3, int), y)
    == 0
  )
  assert classification.f1(np.ones(3, int), y) == pytest.approx(0.5)
  assert classification.f1(np.zeros(3, int), np.zeros(3, int)) == 0


# ------------------------------------------------------------------ the head


def test_pools_skip_padding():
  draw = np.random.default_rng(0)
  hidden = draw.normal(size=(3, 5, 4)).astype(np.float32)
  lengths = np.array([1, 3, 5], np.int32)
  for b, n in enumerate(lengths):
    expected = {"first": hidden[b, 0], "last": hidden[b, n - 1]}
    expected["mean"] = hidden[b, :n].mean(axis=0)
    for pool, vector in expected.items():
      got = classification.pooled(
        jnp.asarray(hidden), jnp.asarray(lengths), pool
      )[b]
      np.testing.assert_allclose(got, vector, rtol=1e-6)


def test_the_head_is_what_it_says():
  head = Classifier(("a", "b", "c"), "first", dropout=0.5)
  params = head.init(jax.random.key(0), 64)
  assert params.keys() == head.parameters(64).keys()
  assert np.std(params["dense/kernel"]) == pytest.approx(
    0.88 * math.sqrt(2 / (5 * 64)), rel=0.05
  )  # a normal cut at two deviations has 0.88 of its deviation
  hidden = np.random.default_rng(0).normal(2, 3, (5, 1, 64)).astype(np.float32)

  def norm(x):
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)

  x = norm(hidden[:, 0]) @ np.asarray(params["dense/kernel"])
  x = norm(0.5 * x * (1 + np.tanh(0.7978846 * (x + 0.044715 * x**3))))
  expected = x @ np.asarray(params["classes/kernel"])
  lengths = jnp.ones(5, jnp.int32)
  got = head(params, jnp.asarray(hidden), lengths)
  np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)
  dropped = head(params, jnp.asarray(hidden), lengths, jax.random.key(0))
  assert np.abs(dropped - got).max() > 0.1


def test_the_plain_head_is_two_linears_and_an_exact_gelu():
  draw = np.random.default_rng(0)
  head = Classifier(("a", "b", "c"), "mean", dropout=0.5, norms=False)
  params = {
    name: draw.normal(size=value.shape).astype(np.float32)
    for name, value in head.init(jax.random.key(0), 16).items()
  }
  assert params.keys() == head.parameters(64).keys()
  hidden = draw.normal(size=(5, 4, 16)).astype(np.float32)
  lengths = np.array([4, 1, 3, 2, 4], np.int32)
  wide = {name: value.astype(np.float64) for name, value in params.items()}
  x = np.stack(
    [h[:n].mean(0, np.float64) for h, n in zip(hidden, lengths, strict=True)]
  )
  x = x @ wide["dense/kernel"] + wide["dense/bias"]
  x *= np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)
  expected = x @ wide["classes/kernel"] + wide["classes/bias"]
  got = head(params, jnp.asarray(hidden), jnp.asarray(lengths))
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
  key = jax.random.key(0)
  dropped = head(params, jnp.asarray(hidden), jnp.asarray(lengths), key)
  assert np.abs(dropped - got).max() > 0.1


def test_empty_places_weigh_nothing():
  logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
  labels, weights = jnp.array([0, 2, 1, 1]), jnp.array([1.0, 1.0, 1.0, 0.0])
  got = classification.cross_entropy(logits, labels, weights)
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  expected = -np.log(p[[0, 1, 2], [0, 2, 1]]).mean()
  assert got == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------- files

LINES = {  # fields of a line, and the texts that they make
  "boolq": ({"question": "q", "passage": "p"}, ("q", "p")),
  "cola": ({"sentence": "s"}, ("s",)),
  "mnli": ({"premise": "p", "hypothesis": "h"}, ("p", "h")),
  "mrpc": ({"sentence1": "a", "sentence2": "b"}, ("a", "b")),
  "multirc": (
    {"paragraph": "p", "question": "q", "answer": "a"},
    ("p", "q a"),
  ),
  "qnli": ({"question": "q", "sentence": "s"}, ("q", "s")),
  "qqp": ({"question1": "a", "question2": "b"}, ("a", "b")),
  "rte": ({"sentence1": "a", "sentence2": "b"}, ("a", "b")),
  "sst2": ({"sentence": "s"}, ("s",)),
  "wsc": (
    {"text": "t", "span1_text": "Tom", "span2_text": "he"},
    ("t", "he refers to Tom"),
  ),
}


def line(name, label):
  """A line of a task's file."""
  return json.dumps(LINES[name][0] | {"label": label, "idx": 9}) + "\n"


def every(folder):
  """All tasks of a folder, as the command finds them."""
  args = finetune._parser().parse_args(
    [f"--data={folder}", "--task=all", "--checkpoint=none"]
  )
  return finetune._tasks(args)


def test_all_tasks_load_in_the_official_form(tmp_path):
  folder = tmp_path / "glue_filtered"
  folder.mkdir()
  for name in LINES:
    for split in ("train", "valid"):
      text = line(name, 0) + line(name, 1)
      (folder / f"{name}.{split}.jsonl").write_text(text)
  (folder / "mnli-mm.valid.jsonl").write_text(line("mnli", 2))
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
  assert main.pop("cola") == "mcc"
  assert main.pop("mrpc") == main.pop("qqp") == "f1"
  assert set(main.values()) == {"accuracy"}


def test_names():
  every = [(glue.SUITE, name) for name in glue.FORMATS]
  assert named([glue.SUITE], "all") == every
  assert named([glue.SUITE], "mnli-mm,rte,mnli") == [
    (glue.SUITE, "mnli"),
    (glue.SUITE, "rte"),
  ]
  with pytest.raises(UserError, match="'wnli' is not all or of boolq, cola"):
    named([glue.SUITE], "cola,wnli")


def test_other_forms_of_training_sets(tmp_path):
  for folder in ("sst2", "mnli_en_babylm_eval", "glue_filtered"):
    (tmp_path / folder).mkdir()
  (tmp_path / "sst2/train_full.tsv").write_text(
    'sentence\tlabel\na "quoted \t1\n\u2028b\t0\n'
  )
  (tmp_path / "glue_filtered/sst2.valid.jsonl").write_text(
    json.dumps({"sentence": "c", "label": 1})
  )
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
  assert mnli.evaluations == ("mnli",)  # that train set has seen mnli-mm
  assert mnli.load("mnli")[0].label == 2


def test_the_real_files(tmp_path):
  if not GLUE.exists():
    pytest.skip(f"{GLUE} is absent")
  with tarfile.open(GLUE) as archive:
    archive.extractall(tmp_path, filter="data")
  sizes = {}
  for task in every(tmp_path):
    train = task.load("train")
    sizes[task.name] = len(train), len(task.load(task.name))
    labels = {example.label for example in train}
    assert labels == set(range(len(task.head.labels)))
    assert all(text for example in train[:50] for text in example.texts)
  assert sizes == {
    "cola": (8551, 522),
    "mnli": (7107, 1777),
    "mrpc": (3668, 204),
    "rte": (2490, 139),
    "sst2": (67349, 436),
    "wsc": (554, 52),
  }
  with pytest.raises(UserError, match=r"boolq.train.jsonl is absent"):
    glue.find(tmp_path, "boolq")


GOOD = '{"sentence": "a", "label": 1}'


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", r"cola.train.jsonl holds no examples"),
    (GOOD + "\n{", r"cola.train.jsonl, line 2: not JSON"),
    ("\n[1]", "line 2: not a JSON object"),
    (GOOD.replace('"a"', "null"), "line 1: the field 'sentence' is not text"),
    (GOOD.replace('"a"', "5"), "line 1: the field 'sentence' is not text"),
    (GOOD.replace("1", "0.7"), "line 1: the label 0.7 is not one of 0, 1"),
    (GOOD.replace("1", "NaN"), "line 1: the label nan is not one of 0, 1"),
    (GOOD.replace("1", "1e999"), "line 1: the label inf is not one of 0, 1"),
    (GOOD.replace("1", "[1]"), r"line 1: the label \[1\] is not one of 0, 1"),
    (GOOD.replace("a", "\\ud800"), "line 1: not JSON: .*surrogates"),
    ("[" * 100_000, "line 1: nested too deeply"),
    ('{"sentence": "a"}', "line 1: no field 'label'"),
    ('{"label": 1}', "line 1: no field 'sentence'"),
    (GOOD.replace("1", "2"), "line 1: the label 2 is not one of 0, 1"),
    (GOOD.replace("1", '"x"'), "line 1: the label 'x' is not one of 0, 1"),
    (GOOD.replace("1", "null"), "line 1: the label None is not one of 0, 1"),
  ],
)
def test_bad_files(tmp_path, text, message):
  for split, content in (("train", text), ("valid", GOOD)):
    (tmp_path / f"cola.{split}.jsonl").write_text(content)
  cola = glue.make(tmp_path, "cola", Options(), "bidirectional")
  with pytest.raises(UserError, match=message):
    cola.load("train")


def test_absent_files(tmp_path):
  with pytest.raises(UserError, match="nowhere: no such folder"):
    glue.find(tmp_path / "nowhere", "cola")
  with pytest.raises(UserError, match=r"cannot be trained: .*rte.train.jsonl"):
    glue.find(tmp_path, "rte")
  (tmp_path / "rte.train.jsonl").write_text("")
  with pytest.raises(UserError, match=r"cannot be evaluated: .*rte.valid"):
    glue.find(tmp_path, "rte")
