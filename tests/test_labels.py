"""Labels of your own records: by position and type, multi-label, numbers."""

import csv
import functools
import json
import math

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

from antlm_jax.errors import UserError
from antlm_jax.evals.finetune import finetune
from antlm_jax.evals.finetuning import (
  classification,
  embedding,
  labelled,
  multi_label,
  regression,
  retrieval,
  tagging,
)
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.predict import predict
from tests import random_models, runs

run = random_models.run(layers=1)
HOW = classification.ClassifierOptions(), labelled.Columns()
NAN = float("nan")


def made(data, make=labelled.classify):
  """Returns the task of data, and its examples in train and dev."""
  is_whole = isinstance(data, str | dict | DataFrame | pa.Table)
  data = data if is_whole else list(data)
  task = make(data, "own", "bidirectional", *HOW)
  return task, [e for s in ("train", task.evaluations[0]) for e in task.load(s)]


def read(data, make=labelled.classify):
  """Returns the texts and labels of data, by name."""
  task, examples = made(data, make)
  out = {}
  for example in examples:
    (out[example.texts],) = task.head.prediction_fields(example.label).values()
  return out


@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_list_is_the_labels_of_one_text(tmp_path, where):
  """Catches lists that become further texts, or the name of a class."""
  pairs = [("a", ["red", "dogs"]), ("b", []), ("c", ["dogs"]), ("d", ["red"])]
  data = pairs * 3
  if where == "file":
    rows = [{"text": text, "label": label} for text, label in data]
    data = str(runs.write_lines(tmp_path / "own.jsonl", rows))
  task, _ = made(data)
  assert task.head.labels == ("dogs", "red")
  assert task.main_metric == "micro_f1"
  expected = {(text,): tuple(sorted(labels)) for text, labels in pairs}
  assert read(data) == expected


def test_a_label_twice_in_a_list_is_refused():
  """Catches a vector of words, whose place decides, read as a set of labels."""
  data = [("a", ["yes"]), ("b", ["yes", "yes", "no"])] * 5
  with pytest.raises(UserError, match="record 2: the list has the label 'yes'"):
    made(data)


def test_an_error_names_the_set_in_memory():
  """Catches a missing label of test that seems to be the first of train."""
  data = {"train": [("a", 0), ("b", 1)], "test": [("c", -1), ("d", 1)]}
  with pytest.raises(UserError, match="data of test, record 1: no label"):
    made(data)


def test_values_in_memory_go_by_position():
  """Catches pairs and NumPy's values that are read as something else."""
  pair = [(("a", "b"), "x"), (["c", "d"], "y")] * 5
  assert read(pair) == {("a", "b"): "x", ("c", "d"): "y"}
  numpy = [(np.str_("a"), np.int64(1)), (np.array(["b"]), np.int64(0))] * 5
  assert read(numpy) == {("a",): "1", ("b",): "0"}
  several = [("a", np.array(["x", "y"])), ("b", ("x",))] * 5
  assert read(several) == {("a",): ("x", "y"), ("b",): ("x",)}
  mapping = [{"text": "a", "label": np.bool_(True)}, ("b", False)] * 5
  assert read(mapping) == {("a",): "true", ("b",): "false"}


class DataFrame:
  """Iterates over its columns' names, as pandas' DataFrame does."""

  def __init__(self, *columns):
    self.columns = columns

  def __iter__(self):
    return iter(self.columns)

  def to_dict(self, form):
    assert form == "records"
    values = [(f"{x} text", x) for x in "abab"]
    return [dict(zip(self.columns, both, strict=True)) for both in values]


def test_a_tables_rows_are_records():
  """Catches columns that are read as texts, refused, or lost."""
  assert read(DataFrame("text", "label")) == {
    ("a text",): "a",
    ("b text",): "b",
  }
  with pytest.raises(UserError, match="two columns have the name 'text'"):
    made(DataFrame("text", "text", "label"))
  table = pa.table({"label": [*"abab"], "text": [f"{x} text" for x in "abab"]})
  assert read(table) == {("a text",): "a", ("b text",): "b"}


def test_names_of_classes(tmp_path, capsys):
  """Catches spaces that make a second class, and pandas' 1.0 for 1."""
  path = tmp_path / "own.csv"
  path.write_text("text,label\n" + "a,pos\nb,neg\nc,pos \nd,\tneg\n" * 3)
  task, _ = made(str(path))
  assert task.head.labels == ("neg", "pos")
  task, _ = made([("a", 1.0), ("b", 10), ("c", 2), ("d", " 1")] * 3)
  assert task.head.labels == ("1", "2", "10")
  capsys.readouterr()
  task, _ = made([("a", "pos"), ("b", "Pos"), ("c", "é"), ("d", "e\u0301")] * 3)
  assert len(task.head.labels) == 4
  said = capsys.readouterr().out
  assert "warning: own: different classes: 'Pos', 'pos'" in said
  assert r"different classes: 'e\u0301', '\xe9'" in said
  made([("a", "true"), ("b", "1")] * 6)
  assert "different classes: '1', 'true'" in capsys.readouterr().out
  for twin in ("pos\u200b", "pos\ufeff", "pos\xad", "pos\xa0\u200b"):
    made([("a", "pos"), ("b", twin)] * 6)
    assert f"classes: 'pos', {twin!a}" in capsys.readouterr().out
  with pytest.raises(UserError, match=r"'pos.u200b' is not one of 'pos'"):
    made({"train": [("a", "pos"), ("b", "x")], "dev": [("c", "pos\u200b")]})
  made([("a", "x, y"), ("b", "z")] * 6)
  assert "a label with a comma is one class: 'x, y'" in capsys.readouterr().out
  path.write_text("text,label\n" + "a,1\nb,2\nc,1.0\nd,02\n" * 3)
  task, _ = made(str(path))
  assert task.head.labels == ("1", "02", "2")
  assert "classes: '02', '2'\n" in capsys.readouterr().out


def test_whole_numbers_are_one_class_in_all_formats(tmp_path):
  """Catches 1.0 of csv, as pandas writes it, that is not 1 of jsonl."""
  csv_text = "text,label\n" + "a,0.0\nb,1.0\nc,-0.0\n" * 5
  (tmp_path / "train.csv").write_text(csv_text)
  lines = [{"text": "d", "label": 1}, {"text": "e", "label": 0.0}]
  runs.write_lines(tmp_path / "test.jsonl", lines)
  task, _ = made(str(tmp_path))
  assert task.head.labels == ("0", "1")
  assert [e.label for e in task.load(task.evaluations[1])] == [1, 0]


@pytest.mark.parametrize(
  "lines",
  [
    "text,label\nd,-1\ne,-1\n",
    "text,label\nd,\ne,\n",
    "id,text\n1,d\n2,e\n",  # as Kaggle's test.csv
  ],
)
@pytest.mark.parametrize("make", [labelled.classify, labelled.regress])
def test_a_test_set_without_labels_is_not_evaluated(
  tmp_path, capsys, lines, make
):
  """Catches -1 of GLUE's test sets as a number, and advice that is missing."""
  train = "text,label\n" + "a,0\nb,1\nc,2\n" * 5
  (tmp_path / "train.csv").write_text(train)
  (tmp_path / "test.csv").write_text(lines)
  task, _ = made(str(tmp_path), make)
  assert [x.rpartition("-")[2] for x in task.evaluations] == ["dev"]
  said = capsys.readouterr().out
  assert (
    "no record of test has a label, so test is not evaluated; `antlm" in said
  )
  # Some labels, or names that include them, are labels.
  (tmp_path / "test.csv").write_text("text,label\nd,-1\ne,\nf,1\n")
  with pytest.raises(UserError, match=r"line [23]: no label"):
    made(str(tmp_path), make)
  (tmp_path / "test.csv").write_text("text,label\nd,-1\n")
  (tmp_path / "train.csv").write_text(train.replace("2", "-1"))
  if make is labelled.classify:
    classes = labelled.Classes(("-1", "0", "1"))
    task = make(str(tmp_path), "own", "causal", *HOW, classes)
    assert len(task.evaluations) == 2


TEXT_LISTS = "[a]", "[a, b]", "{a,b}", "('a', 'b')", "a|b", "a; b", "0 1.0 0"
TEXT_LISTS += "0,1,0", "[0 1 0]", "True False", "a\nb", "a\uff1bb"
MISSING = "nan", "NaN", "None", "null", "N/A", "NA", "-", "-1", -1, -100.0
MISSING += "?", "--", "N.A.", "\\N"


@pytest.mark.parametrize(
  ("second", "message"),
  [
    (("c", None), "data, record 2: no label"),
    (("c", NAN), "data, record 2: no label"),
    (("c", np.float32("nan")), "data, record 2: no label"),
    (("c", " "), "data, record 2: no label"),
    (("c", [None]), "data, record 2: no label"),
    (("c", float("inf")), "record 2: the label inf is not text, a number or"),
    (("c", {"a": 1}), "record 2: the label {'a': 1} is not text, a number or"),
    (("c", [["a"]]), r"record 2: the label \['a'\] is not text, a number or"),
    (("c", "['a', 'b']"), "is a list that is written as text: write lists to"),
    *(
      (("c", text), "is a list that is written as text") for text in TEXT_LISTS
    ),
    *((("c", label), "2: no label .*name all classes") for label in MISSING),
    *((("c", [label]), "record 2: no label") for label in MISSING),
    (("c", "x,y"), "record 2: the label 'x,y' joins the labels x, y: write"),
    *(
      (("c", f"x{sign}y"), "2: the label 'x.+y' joins the labels x, y: write")
      for sign in ("+", " ", ":", "_", "\uff0c", "\u3001", " - ")
    ),
    (("c", "x,y,"), "record 2: the label 'x,y,' joins the labels x, y: write"),
    (("c", "\ud800"), r"record 2: '\\ud800' has half of a surrogate"),
    (("\udfff", "x"), r"record 2: '\\udfff' has half of a surrogate"),
    ((NAN, "x"), "data, record 2: nan is not text"),
    ((None, "x"), "data, record 2: no text to read"),
    (("a", "b", "x"), r"data, record 2 has 3 values: give \(text, label\)"),
    (("c",), r"data, record 2 has 1 values: give \(text, label\)"),
    ("c", r"data, record 2 has 1 values: give \(text, label\)"),
    (([], "x"), "data, record 2: no text to read"),
    ({"text": ["c", "d"], "label": "x"}, r"2: \['c', 'd'\] is not text"),
    ({"text": "c"}, "data, record 2 has no 'label' but 'text'"),
    (5, r"data, record 2 is 5: give \(text, label\)"),
    (("c", ["x"]), "2 has 1 text and a list of labels, but data, record 1"),
    ((("c", "d"), "x"), "record 2 has 2 texts and one label, but data, record"),
    (("c", 0.5), "numbers with fractions, such as 0.5: choose preset=regr"),
    (("c", "0.5"), "numbers with fractions, such as 0.5: choose preset=reg"),
  ],
)
def test_what_cannot_be_read_is_refused(second, message):
  """Catches missing labels as classes, and labels that lose the results."""
  with pytest.raises(UserError, match=message):
    made([("a", "x"), second, ("b", "y")])


def test_fractions_are_classes_if_they_are_named():
  """Catches a remedy that does not work."""
  for labels in ((0.5, 1.0), (-1, "none"), ("a|b", "[a]")):
    names = tuple(map(str, labels))
    classes = labelled.Classes(tuple(name.removesuffix(".0") for name in names))
    data = [("a", labels[0]), ("b", labels[1])] * 5
    task = labelled.classify(data, "own", "causal", *HOW, classes)
    assert task.head.labels == classes.labels


@pytest.mark.parametrize(
  "form",
  [
    list,
    np.array,
    lambda values: np.array(values, np.float32),
    lambda values: [bool(value) for value in values],
    lambda values: [str(value) for value in values],
    jnp.array,
  ],
)
def test_vectors_of_zeros_and_ones_are_labels_by_their_places(form):
  """Catches classes `0` and `1` in place of the labels of a vector."""
  vectors = {"a": [1, 0, 0], "b": [0, 1, 1], "c": [0, 0, 0]}
  data = [(text, form(vector)) for text, vector in vectors.items()] * 4

  def names(labels):
    classes = labelled.Classes(labels)
    task = labelled.classify({"test": data}, "own", "causal", *HOW, classes)
    return {e.texts[0]: e.label for e in task.load("own-test")}

  assert names(("x", "y", "z")) == {"a": [0], "b": [1, 2], "c": []}
  with pytest.raises(UserError, match="name the 3 labels, in this order"):
    made(data)
  with pytest.raises(
    UserError, match="1 has 3 values of 0 and 1, but there ar"
  ):
    names(("x", "y"))
  with pytest.raises(UserError, match=r"list of one 0 or 1: give (1|true)"):
    made([("a", form([1])), ("b", form([0]))] * 5)
  with pytest.raises(UserError, match="'x,y' is one name: give a list of name"):
    names("x,y")
  # Lists of names that are 0 and 1 are no vectors.
  assert made([("a", [0]), ("b", [0, 1])] * 5)[0].head.labels == ("0", "1")


def test_a_column_for_each_label(tmp_path):
  """Catches a lost column, another order's label, and a value that is none."""
  path = tmp_path / "test.csv"
  path.write_text("text,toxic,rude\na,1,0\nb,1.0,True\nc,0,False\n")
  columns = labelled.Columns(label_column=("toxic", "rude"))
  for data in (str(path), [("a", 1, 0), ("b", True, 1.0), ("c", 0, 0)]):
    task = labelled.classify({"test": data}, "own", "causal", HOW[0], columns)
    assert task.head.labels == ("toxic", "rude")
    (name,) = task.evaluations
    labels = {e.texts[0]: e.label for e in task.load(name)}
    assert labels == {"a": [0], "b": [0, 1], "c": []}
  for data in (str(path), [("a", 1, 0), ("b", 1, 1), ("c", 0, 0)]):
    make = functools.partial(
      labelled.classify, {"test": data}, "own", "causal", HOW[0], columns
    )
    # The names of a saved model may have another order.
    task = make(labelled.Classes(("rude", "toxic")))
    (name,) = task.evaluations
    labels = {e.texts[0]: e.label for e in task.load(name)}
    assert labels == {"a": [1], "b": [0, 1], "c": []}
    with pytest.raises(UserError, match="toxic,rude names other columns than"):
      make(labelled.Classes(("toxic", "kind")))
  for value, message in ((2, "'rude' is '2': give 0 or 1"), (-1, "no label")):
    with pytest.raises(UserError, match=message):
      labelled.classify([("a", 1, value)], "own", "causal", HOW[0], columns)


def test_names_of_a_datasets_classes_are_kept(tmp_path):
  """Catches numbers as names, and another order; in files, lists and tags."""
  datasets = pytest.importorskip("datasets", reason="the data extra")
  names = datasets.ClassLabel(names=["O", "B-X", "B-A"])
  features = {"text": datasets.Value("string"), "label": names}
  columns = {"text": [f"text {i}" for i in range(24)]}
  columns["label"] = [i % 2 for i in range(24)]
  data = datasets.Dataset.from_dict(columns, datasets.Features(features))
  data.to_parquet(tmp_path / "own.parquet")
  for source in ({"train": data}, str(tmp_path / "own.parquet")):
    task = labelled.classify(source, "own", "causal", *HOW)
    assert task.head.labels == ("O", "B-X", "B-A")
    texts = {e.texts[0]: e.label for e in task.load("train")}
    assert texts["text 2"] == 0 and set(texts.values()) == {0, 1}
  words = datasets.List(datasets.Value("string"))
  features = {"tokens": words, "tags": datasets.List(names)}
  columns = {"tokens": [["a", str(i)] for i in range(24)]}
  columns["tags"] = [[1 + i % 2, 0] for i in range(24)]
  data = datasets.Dataset.from_dict(columns, datasets.Features(features))
  task = tagging.own_task(data)
  assert task.head.labels[:3] == ("O", "B-X", "B-A")
  assert {tuple(e.label) for e in task.load("train")} == {(1, 0), (2, 0)}


def test_each_class_has_its_share_of_the_held_out_tenth(capsys):
  """Catches a class that is held out as a whole, and one unsaid."""
  for place in range(40):
    labels = ["ab"[i % 4 == 0] for i in range(40)]
    labels[place] = "rare"
    _, examples = made((f"text {i}", label) for i, label in enumerate(labels))
    train = [example.label for example in examples[:36]]
    dev = [example.label for example in examples[36:]]
    assert 2 in train and sorted(dev) == [0, 0, 0, 1]
  said = capsys.readouterr().out
  assert "own: 1 of 3 classes have no example in dev: 'rare'" in said
  given = {"train": [("a", "x"), ("b", "y")], "dev": [("c", "x")]}
  classes = labelled.Classes(("x", "y", "z"))
  labelled.classify(given, "own", "causal", *HOW, classes)
  said = capsys.readouterr().out
  assert "1 of 3 classes have no example in train: 'z'" in said
  assert "2 of 3 classes have no example in dev: 'y', 'z'" in said


def test_numbers_are_read_as_numbers():
  """Catches whole numbers and texts of a csv that are not numbers."""
  data = [("a", 0.5), ("b", 3), ("c", " 2.5"), ("d", np.float32(1))] * 3
  expected = {("a",): 0.5, ("b",): 3.0, ("c",): 2.5, ("d",): 1.0}
  assert read(data, labelled.regress) == expected
  for label, message in (
    ("good", "data, record 2: the label 'good' is not a number"),
    ("nan", r"data, record 2: no label \('nan'\)"),
    ([1.0], r"data, record 2: the label \[1.0\] is not a number"),
    (True, "data, record 2: the label True is not a number"),
    (None, "data, record 2: no label"),
    (0.5, "have the standard deviation 0.0: give numbers that differ"),
  ):
    with pytest.raises(UserError, match=message):
      made([("a", 0.5), ("b", label), ("c", 0.5)] * 3, labelled.regress)


def test_the_scale_is_that_of_the_numbers_trained_on(capsys):
  """Catches a scale of all numbers, and a score that no model can reach."""
  train = [(str(i), i) for i in range(6)]
  data = {"train": train, "dev": [("x", 100), ("y", 100)]}
  task = labelled.regress(data, "own", "causal", *HOW)
  assert task.head.mean == 2.5
  assert task.head.deviation == pytest.approx(np.std(range(6)))
  said = capsys.readouterr().out
  assert "warning: own-dev: all numbers are equal, so scores are 0" in said


def test_a_list_of_positives_is_no_negative():
  """Catches a second positive text that is taken for a negative."""
  how = (
    "own",
    "causal",
    retrieval.RetrievalOptions(),
    embedding.EmbedderOptions(),
  )
  task = embedding.pairs_task(
    [("q", "p", ["n", "m"]), ("r", "s", "n", "m")], *how
  )
  assert {len(e.texts) for e in task.load("train")} == {4}
  records = [("q", ["p", "n"]), ("r", "s")]
  task = embedding.pairs_task({"train": records, "dev": records}, *how)
  texts = [e.texts for e in task.load("train")]
  assert texts == [("q", "p"), ("q", "n"), ("r", "s")]
  asked = task.load("own-dev")[0]
  assert asked.texts == ("q",) and len(asked.label) == 2
  with pytest.raises(UserError, match="record 1: not one query and a pos"):
    embedding.pairs_task([(["q", "r"], "p")], *how)


def test_unused_columns_that_change_the_meaning_are_told(tmp_path, capsys):
  """Catches weights, and labels of pairs, that are left out in silence."""
  pair = {"query": "q", "positive": "p", "text": "a", "topic": "t"}
  rows = [{**pair, "label": i % 2, "weight": 2} for i in range(6)]
  rows = [{**row, "Is_Duplicate": 0, "negative_1": "n"} for row in rows]
  path = str(runs.write_lines(tmp_path / "own.jsonl", rows))
  options = retrieval.RetrievalOptions(), embedding.EmbedderOptions()
  embedding.pairs_task(path, "own", "causal", *options)
  made(rows)
  said = capsys.readouterr().out
  assert "own.jsonl: columns that are not used: 'Is_Duplicate', 'label'" in said
  unused = "'Is_Duplicate', 'negative_1', 'weight'"
  assert f"data: columns that are not used: {unused}" in said
  made([("a", "x"), {"text": "b", "label": "y", "text_pair": "c"}] * 3)
  assert "not used: 'text_pair'" in capsys.readouterr().out


def test_metrics_of_lists_are_scikit_learns():
  """Compares micro and macro F1 and exact match of random lists."""
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  x, y = np.random.default_rng(0).random((2, 60, 5)) < 0.4
  lists = [[np.flatnonzero(row).tolist() for row in z] for z in (x, y)]
  for average in ("micro", "macro"):
    found = multi_label.METRICS[f"{average}_f1"](*lists)
    assert found == pytest.approx(metrics.f1_score(y, x, average=average))
  found = multi_label.exact_match(*lists)
  assert found == metrics.accuracy_score(y, x) > 0
  assert (
    multi_label.micro_f1([[]], [[]])
    == 0
    == multi_label.label_macro_f1([[]], [[]])
  )
  examples = [Example(("a",), label) for label in lists[1]]
  every = [*multi_label.frequent(examples)]
  assert every[0] == [[]] * 60 and every[-1] == [[0, 1, 2, 3, 4]] * 60
  (most,) = {tuple(one) for one in every[1]}
  assert most == (y.sum(axis=0).argmax(),)


def test_metrics_of_numbers_are_scipys():
  """Compares correlations and explained variance, with ties."""
  stats = pytest.importorskip("scipy.stats")
  x, y = np.random.default_rng(0).integers(0, 9, (2, 50)).astype(float)
  y += x
  metrics = regression.FIELDS["metrics"]
  assert metrics["pearson"](x, y) == pytest.approx(stats.pearsonr(x, y)[0])
  assert metrics["spearman"](x, y) == pytest.approx(stats.spearmanr(x, y)[0])
  share = 1 - ((x - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()
  assert metrics["r2"](x, y) == pytest.approx(share)
  constant = np.ones(50)
  assert [of(constant, y) for of in metrics.values()][:2] == [0, 0]


def test_losses_are_their_definitions():
  """Catches a wrong mean, and padding that counts."""
  draw = np.random.default_rng(0)
  logits = draw.normal(size=(3, 4)).astype(np.float32)
  weights = np.array([1, 1, 0], np.float32)
  examples = [Example(("",), label) for label in ([0, 3], [], [1])]
  head = multi_label.MultiLabelClassifier(("a", "b", "c", "d"), "first")
  targets = head.targets(examples)
  assert targets.tolist() == [[1, 0, 0, 1], [0] * 4, [0, 1, 0, 0]]
  shares = 1 / (1 + np.exp(-logits.astype(np.float64)))
  nats = -np.log(np.where(targets == 1, shares, 1 - shares))[:2].mean()
  assert float(head.loss(logits, targets, weights)) == pytest.approx(nats)
  head = regression.Regressor(("value",), "first", mean=10.0, deviation=4.0)
  targets = head.targets([Example(("",), label) for label in (10, 12, 2)])
  assert targets.tolist() == [0, 0.5, -2]
  outputs = np.array([[0.5], [1.0], [9.0]], np.float32)
  assert float(head.loss(outputs, targets, weights)) == 0.25
  assert head.decode(head.reduce(outputs), None) == [12, 14, 46]


def topics(count):
  """Returns texts, the topics that they name, and a number for each."""
  draw = np.random.default_rng(0)
  words = {"dogs": "the dogs", "hills": "near hills", "rest": "often rest"}
  for i in range(count):
    has = [one for one in words if draw.random() < 0.5]
    said = [words[one] for one in draw.permutation(has)]
    text = " ".join([*said, "sat", *("Tom", "and") * (i % 3)])
    yield text, has, 1000 + 500 * ("dogs" in has) + 250 * ("rest" in has)


@pytest.mark.slow
@pytest.mark.parametrize(
  "attention",
  [pytest.param("bidirectional", marks=pytest.mark.nightly), "causal"],
)
def test_many_labels_and_numbers_are_learnt(run, tmp_path, attention):
  """Catches a head that learns, predicts or evaluates something else."""
  how = {"epochs": 20, "lrs": 1e-2, "batch_size": 16, "attention": attention}
  how |= {"quiet": True, "save": True, "patience": 0, "pool": "mean"}
  every = [*topics(240)]
  lists = [(text, labels) for text, labels, _ in every]
  tuned = finetune(
    run, lists, preset="classification", output=tmp_path / "a", **how
  )
  assert tuned.score > 0.9
  texts = [text for text, _ in lists[:40]]
  found = predict(tuned.model, texts, quiet=True)
  pairs = zip(found, lists[:40], strict=True)
  right = [set(one.labels) == {*y} for one, (_, y) in pairs]
  assert np.mean(right) > 0.85
  for one in found:
    likely = {name for name, p in one.probabilities.items() if p > 0.5}
    assert likely == {*one.labels} and one.label is None
  folder = tuned["own"].folder
  with open(folder / "own-dev.csv", newline="") as file:
    rows = list(csv.DictReader(file))
  labels, predicted = (
    [json.loads(row[column]) for row in rows]
    for column in ("label", "predicted")
  )
  (scores,) = (one["scores"]["own-dev"] for one in runs.summary(folder)["runs"])
  same = [a == b for a, b in zip(labels, predicted, strict=True)]
  assert scores["exact_match"] == np.mean(same)
  dev = [lists[int(row["record"].split()[1]) - 1][1] for row in rows]
  assert labels == [sorted(one) for one in dev]

  numbers = [(text, number) for text, _, number in every]
  y = [number for _, number in numbers]
  tuned = finetune(
    run, numbers, preset="regression", output=tmp_path / "b", **how
  )
  assert tuned["own"].metric == "pearson" and tuned.score > 0.9
  found = predict(tuned.model, texts, quiet=True)
  pairs = zip(found, numbers[:40], strict=True)
  errors = [one.value - number for one, (_, number) in pairs]
  assert math.sqrt(np.mean(np.square(errors))) < np.std(y) / 2
  again = finetune(
    tuned.model, numbers, preset="regression", epochs=0, quiet=True
  )
  values = [one.value for one in predict(tuned.model, [t for t, _ in numbers])]
  expected = np.corrcoef(values, y)[0, 1]
  assert again.score == pytest.approx(expected, abs=1e-6)
