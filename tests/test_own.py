"""Classification with a user's own files, on a random model."""

import csv
import decimal
import functools
import json
import re

import numpy as np
import pytest

from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import classification, labelled, sets
from antlm_jax.evals.predict import predict
from antlm_jax.hf import export
from antlm_jax.inference.model import load
from tests import random_models, runs, tuned

run = random_models.run()
COLUMNS = ("--text_column=review", "--label_column=stars")


def write(path, rows):
  with open(path, "w", newline="", encoding="utf-8-sig") as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  return path


def reviews(count, seed=0):
  """Returns reviews: dogs are good, cats are bad, Tom is neither."""
  draw = np.random.default_rng(seed)

  def end(i):  # makes all texts distinct
    parts = "sat", "often", "near", "rest", "the"
    return " ".join(parts[i // 5**k % 5] for k in range(3))

  words = {"good": "the dogs", "bad": "the cats", "10": "Tom"}
  labels = draw.choice(list(words), count, p=[0.5, 0.3, 0.2])
  return [
    {"id": i, "review": f'{words[label]} {end(i)}, "hills" .', "stars": label}
    for i, label in enumerate(labels)
  ]


def args(run, data, *more):
  return [
    *(f"--checkpoint={run}", f"--data={data}", "--preset=classification"),
    *(*COLUMNS, "--batch_size=16", "--epochs=4", "--lrs=1e-2", *more),
  ]


def test_sets_in_memory_and_in_folders_with_a_description(tmp_path):
  """Catches Hugging Face's validation, databases' numbers, and README.md."""
  rows = [
    {"text": f"{word} {i}", "label": decimal.Decimal(f"{i % 2}.0")}
    for word in ("a", "b")
    for i in range(9)
  ]
  how = "own", "causal", classification.ClassifierOptions(), labelled.Columns()
  data = {"train": rows[:9], "validation": rows[9:]}
  task = labelled.classify(data, *how)
  assert [e.texts[0][0] for e in task.load("own-dev")] == ["b"] * 9
  assert task.head.labels == ("0", "1")
  with pytest.raises(UserError, match="data has the sets 'dev', 'val'"):
    labelled.classify({"dev": rows, "val": rows}, *how)
  (tmp_path / "films").mkdir()
  write(tmp_path / "films/reviews.csv", [{"text": "a", "label": "x"}] * 3)
  (tmp_path / "films/README.md").write_text("Films.")
  found = sets.open_data(str(tmp_path / "films"))
  assert [*found] == ["train"] and len(found["train"]) == 1


def test_a_file_named_test_is_trained_on_with_a_warning(tmp_path, capsys):
  """Catches a model that is trained, not evaluated, on a test set."""
  rows = [{"text": f"a {i}", "label": i % 2} for i in range(9)]
  path = write(tmp_path / "test.csv", rows)
  how = "own", "causal", classification.ClassifierOptions(), labelled.Columns()
  for data, is_told in ((str(path), True), ({"test": str(path)}, False)):
    labelled.classify(data, *how)
    told = "test.csv is named test, but trained on" in capsys.readouterr().out
    assert told == is_told


def test_lines_longer_than_a_piece_are_one_text(tmp_path):
  """Catches vectors that no longer belong to the lines of the file."""
  lines = ["the dogs sat . " * 20_000, "\u732b\u5728" * 200_000, "a b"]
  (tmp_path / "a.txt").write_text("\n".join(lines) + "\n")
  found = [text for (text,) in sets.source_texts(str(tmp_path / "a.txt"), ())]
  assert found == [line.strip() for line in lines]


def test_a_file_of_records(run, tmp_path, capsys):
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  rows = reviews(120)
  data = write(tmp_path / "films.csv", rows)
  finetune.main(args(run, data, "--save"))
  said = capsys.readouterr().out
  folder = run / f"evals/finetune/films/{random_models.STEP}-bidirectional"
  summary = json.loads((folder / "summary.json").read_text())
  head = summary["request"]["head"]
  assert head["labels"] == ["10", "bad", "good"]
  # By default, transformers has the same head.
  assert (head["norms"], head["pool"]) == (False, "mean")
  assert "tip:" not in said
  (hf,) = export.export_model(load(folder / "model"), tmp_path / "hf")
  config = json.loads((hf / "config.json").read_text())
  assert config["architectures"] == ["EuroBertForSequenceClassification"]
  card = (hf / "README.md").read_text()
  assert "fine-tuned it on the task `films`" in card
  assert "| Labels | 3: 10, bad, good |" in card
  assert "| Training examples | 108 |" in card
  assert "| Longest row | 48 tokens |" in card
  assert summary["train_examples"] == 108  # a tenth is held out
  with open(folder / "films-dev.csv", newline="") as file:
    found = list(csv.DictReader(file))
  by_line = {f"line {i + 2}": row["stars"] for i, row in enumerate(rows)}
  assert all(by_line[one["record"]] == one["label"] for one in found)
  pairs = [(one["label"], one["predicted"]) for one in found]
  (scores,) = (r["scores"]["films-dev"] for r in summary["runs"])
  labels, predicted = zip(*pairs, strict=True)
  expected = {"accuracy": metrics.accuracy_score(labels, predicted)}
  expected["macro_f1"] = metrics.f1_score(labels, predicted, average="macro")
  assert scores == pytest.approx(expected)
  majority = max(labels.count(label) for label in labels) / len(labels)
  for metric, shown in (("accuracy", (majority,)), ("macro_f1", ())):
    table = said.partition(": written to")[2].splitlines()
    (line,) = (one for one in table if f" {metric} " in one)
    for share in (scores[metric], *shown):
      assert f"{100 * share:.1f}" in line
  assert scores["accuracy"] > majority
  # Other columns of the same file are other data.
  told = r"another request \(.*data.*another --output"
  with pytest.raises(Exception, match=told):
    finetune.main(args(run, data, "--text_column=review,id"))


@pytest.mark.slow
def test_examples_in_memory_are_those_of_a_file(run, tmp_path, capsys):
  """Python's settings equal the command's flags; `quiet` prints nothing."""
  rows = reviews(40)
  path = write(tmp_path / "own.csv", rows)
  texts = [(row["review"], row["stars"]) for row in rows]
  how = {"batch_size": 16, "epochs": 1, "lrs": [1e-2, 1e-3], "seeds": 3}
  how |= {"preset": "classification", "quiet": True}
  columns = {"text_column": "review", "label_column": "stars"}
  found = [
    finetune.finetune(run, data, output=tmp_path / str(i), **how, **more)
    for i, (data, more) in enumerate(
      (
        (path, columns),
        (rows, columns),
        (iter(texts), {}),
        ([((a, a), b) for a, b in texts], {}),
      )
    )
  ]
  assert capsys.readouterr().out == ""
  summaries = [runs.summary(one["own"].folder) for one in found]
  runs_of = [about["runs"] for about in summaries]
  assert runs_of[0] == runs_of[1] == runs_of[2] != runs_of[3]  # a pair
  assert summaries[0]["request"]["lrs"] == [1e-2, 1e-3]
  one, about = found[0]["own"], summaries[0]
  assert (one.lr, one.seed, one.model) == (about["best_lr"], 3, None)
  best = next(e for e in about["by_lr"] if e["lr"] == one.lr)
  assert one.scores["own-dev"].mean == best["scores"]["own-dev"]["mean"]
  assert f"{100 * found[0].score:.1f}" in str(found[0])
  assert repr(found[0]) == f"<fine-tuned: own {100 * one.score:.1f} %>"
  for data, more, message in (
    (texts, {"preset": "2024"}, "preset 2024 reads a folder of files"),
    (texts, {"preset": "own"}, "preset='own' is not one of 2024, 2026, "),
    (texts, {"rate": 1}, "rate is no setting of preset=classification; "),
    (texts, {"pools": 1}, "; did you mean 'pool'?"),
    (texts, {"query_column": "a"}, "query_column is no setting of preset="),
    (texts, {"lrs": -1}, "lrs=-1.0 is not over 0"),
    (texts, {"epochs": "1"}, "epochs='1' is not of type int"),
    ({"x": texts}, {}, "data has the sets 'x': give train, dev and test"),
    ({"dev": None}, {}, "data has the sets 'dev': give train, dev and test"),
    (None, {}, "None is no list of records, and no path"),
    ({"train": 3}, {}, "3 is no list of records, and no path"),
    ({"dev": texts}, {}, "own cannot be evaluated without training: "),
    (rows, {}, "data, record 1 has no 'text' but 'id', 'review', 'stars'"),
    ([("a", "")], {}, "data, record 1: no label"),
  ):
    with pytest.raises(UserError, match=re.escape(message)):
      finetune.finetune(run, data, **how | more)


def test_a_head_that_cannot_be_exported_is_told_before_training(
  run, tmp_path, capsys, monkeypatch
):
  data = write(tmp_path / "films.csv", reviews(120))

  def interrupted(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(finetune, "perform", interrupted)
  for more, words in (
    (("--head=norms",), "EuroBERT has no head like that of"),
    (("--attention=causal", "--head=plain"), "Llama has no head like that of"),
  ):
    for save in ((), ("--save",)):
      with pytest.raises(KeyboardInterrupt):
        finetune.main(args(run, data, *more, *save, "--overwrite"))
      said = capsys.readouterr().out
      assert (words in said) == ("tip: `antlm export`" in said) == bool(save)


def test_a_folder_of_splits_and_pairs_of_texts(run, tmp_path):
  for name, count in (("train", 6), ("valid", 2), ("test", 3)):
    lines = [{"a": f"x{i}", "b": "z", "y": bool(i % 2)} for i in range(count)]
    runs.write_lines(tmp_path / f"{name}.jsonl", lines)
  options = (
    classification.ClassifierOptions(),
    labelled.Columns(("a", "b"), "y"),
  )
  task = labelled.classify(str(tmp_path), "own", "causal", *options)
  name = task.name
  assert task.evaluations == (f"{name}-dev", f"{name}-test")
  assert [len(task.load(s)) for s in ("train", *task.evaluations)] == [6, 2, 3]
  assert task.head.labels == ("false", "true")
  assert task.load(f"{name}-test")[1] == (("x1", "z"), 1, "line 2")


def test_equal_texts_are_on_one_side(capsys):
  """Catches dev texts that occur in train; the labels here are random."""
  draw = np.random.default_rng(0)
  texts = [(f"text {i}", str(draw.integers(2))) for i in range(40)]
  rows = [(text.upper(), label) for text, label in texts] + texts * 9
  options = classification.ClassifierOptions(), labelled.Columns()
  task = labelled.classify(rows, "own", "bidirectional", *options)
  train, dev = (
    {e.texts[0].lower() for e in task.load(s)} for s in ("train", "own-dev")
  )
  assert (len(train), len(dev)) == (35, 5) and not train & dev
  said = capsys.readouterr().out
  assert "own: 360 of 400 examples repeat the text of another" in said
  labelled.classify(
    {"train": rows[:30], "dev": rows[:20], "test": rows[10:40]},
    *("own", "causal", *options),
  )
  said = capsys.readouterr().out
  assert "20 of 20 texts of dev are also in train" in said
  assert "20 of 30 texts of test are also in train" in said
  assert "10 of 30 texts of test are also in dev" in said


@pytest.mark.parametrize("preset", ["classification", "pairs", "simcse"])
def test_a_folder_with_test_alone_is_not_trained_on(tmp_path, preset):
  """Catches a folder that is refused although such a mapping is not."""
  row = {"text": "a b", "label": 1, "query": "a", "positive": "b"}
  runs.write_lines(tmp_path / "test.jsonl", [row])
  plan = functools.partial(tuned.planned, f"--data={tmp_path}")
  if preset != "classification":
    (job,) = plan(f"--preset={preset}")
    assert not job.task.trained and job.task.evaluations[0].endswith("-test")
    return
  with pytest.raises(UserError, match="cannot be evaluated without training"):
    plan(f"--preset={preset}", "--labels=1,2")


def test_a_mapping_of_other_names_and_paths_is_trained_on(tmp_path, capsys):
  """Catches a set named training that is not trained on, and a path refused."""
  path = write(tmp_path / "films.csv", [{"text": "a b", "label": "x"}] * 3)
  rows = [(f"a {i}", "xy"[i % 2]) for i in range(9)]
  for train in ("train", "training", "train_sft"):
    data = {train: rows, "test": path, "more": rows}
    (job,), _ = finetune.plan_tasks(
      tuned.checkpoint_at("none"),
      "llama",
      None,
      data,
      "classification",
      "all",
      output=None,
      save=False,
      overwrite=False,
    )
    assert job.task.trained and len(job.task.load("train")) == 8
    assert len(job.task.load("own-test")) == 3
    assert capsys.readouterr().out.count("'more'") == 1


def test_own_names_are_not_those_of_known_sets():
  """Catches results that `antlm report` would confuse with GLUE's."""
  names = "cola.csv", "rte", "nfcorpus", "films.csv"
  expected = ["own_cola", "own_rte", "own_nfcorpus", "films"]
  assert [sets.task_name(f"data/{name}") for name in names] == expected


MANY = " ".join(f"a,{i}" for i in range(30))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"head": "review,mark"}, "no column 'stars' but 'review', 'mark'"),
    ({"dev": "a,z"}, "line 2: the label 'z' is not one of x, y"),
    ({"train": "a,x b,x"}, "all labels to train on are 'x'"),
    ({"train": "a,x ,y"}, "train.csv, line 3: no text"),
    ({"train": "a,x b,"}, "train.csv, line 3: no label"),
    ({"train": MANY}, "30 different labels in 30 records"),
    ({"train": ""}, "holds no records to train on"),
    ({"head": "", "train": ""}, "holds no records to train on"),
    ({"dev": ""}, "its files hold too few examples: none is left for"),
  ],
)
def test_bad_records(run, tmp_path, changes, message):
  found = {"head": "review,stars", "train": "a,x b,y", "dev": "a,x"} | changes
  for name in ("train", "dev"):
    lines = f"{found['head']} {found[name]}".replace(" ", "\n")
    (tmp_path / f"{name}.csv").write_text(lines + "\n")
  line = runs.refused("antlm_jax.evals.finetune", *args(run, tmp_path))
  assert message in line


@pytest.mark.parametrize("preset", ["classification", "simcse"])
def test_no_text_column(run, tmp_path, preset):
  data = write(tmp_path / "films.csv", reviews(4))
  more = f"--preset={preset}", "--text_column=,"
  told = runs.refused("antlm_jax.evals.finetune", *args(run, data, *more))
  assert re.search("text_column names no|one text_column", told)


def write_tables(folder, names):
  """Writes a table of one example under each of these names."""
  for name in names.split():
    (folder / name).parent.mkdir(exist_ok=True, parents=True)
    (folder / name).write_text("text,label\na,1\n")


@pytest.mark.parametrize(
  ("names", "sizes"),
  [
    ("train-00000-of-00002.csv train-00001-of-00002.csv", [2]),
    ("train_0.csv train_1.csv test.csv", [2, 1]),
    ("train/a.csv train/b/c.csv dev/a.csv", [2, 1]),
    ("a.csv b/c.csv test.csv", [2, 1]),
    ("train.csv eval.csv", [1, 1]),
  ],
)
def test_a_split_is_one_file_or_its_parts(tmp_path, capsys, names, sizes):
  """Catches parts of a split of which only one is read, or is there."""
  write_tables(tmp_path, names)
  opened = sets.open_data(str(tmp_path))
  assert [len(examples) for examples in opened.values()] == sizes
  assert "warning" not in capsys.readouterr().out
  if "-of-" in names:
    (tmp_path / names.split()[0]).unlink()
    sets.open_data(str(tmp_path))
    assert "train-*: only 1 of 2 parts are there" in capsys.readouterr().out


CLAIM = "several files claim to be"


@pytest.mark.parametrize(
  ("names", "message"),
  [
    ("train.csv train.jsonl dev.csv", f"{CLAIM} train: .*train.csv, .*jsonl;"),
    (
      "a/train.csv b/train.csv",
      f"{CLAIM} train: .*a/train.csv, .*b/train.csv;",
    ),
    ("train.csv valid.csv dev.csv", f"{CLAIM} dev: .*dev.csv, .*valid.csv;"),
    ("train_10M.csv train_100M.csv", f"{CLAIM} train: .*100M.csv, .*10M.csv;"),
    ("train.csv my-dev.csv dev.csv", f"{CLAIM} dev: .*my-dev"),
    ("train.csv dev.xlsx", "is dev.xlsx the dev set. give files that .*csv"),
    (
      "films.csv films_dev.csv",
      "is films_dev.csv the dev set. name it dev.csv",
    ),
    ("a.csv dev.csv my-dev.csv", "is my-dev.csv the dev set. name it dev.csv"),
    ("a.csv b-train.csv", "is b-train.csv the train set. name it train.csv"),
  ],
)
def test_an_unclear_split_is_refused(tmp_path, names, message):
  """Catches files that are joined, and a held-out set that is trained on."""
  write_tables(tmp_path, names)
  runs.refusal(message, sets.open_data, str(tmp_path))


def test_a_file_that_is_not_used_is_told(tmp_path, capsys):
  """Catches a held-out set that is left out in silence."""
  write_tables(tmp_path, "train.csv extra.csv")
  assert [*sets.open_data(str(tmp_path))] == ["train"]
  assert "not used: extra.csv" in capsys.readouterr().out


def test_a_set_has_the_name_of_its_folder(tmp_path, monkeypatch):
  """Catches one name, and so one folder of results, for several sets."""
  for name in ("rec.v1", "rec.v2"):
    (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / f"{name}.csv").touch()
    own = name.replace(".", "_")
    monkeypatch.chdir(tmp_path / name / "inside")
    for data in ("..", str(tmp_path / name), str(tmp_path / f"{name}.csv")):
      assert sets.task_name(data) == own


@pytest.mark.slow
@pytest.mark.parametrize(
  "preset, columns, record",
  [
    (
      "classification",
      ("text_column=left,right", "label_column=y"),
      lambda i: {"left": "Tom sat", "right": "the dogs " * i, "y": "ab"[i % 2]},
    ),
    pytest.param(
      "tagging",
      ("tokens_column=words", "tags_column=y"),
      lambda i: {"words": ["Tom", "sat"] * i, "y": ["B-PER", "O"] * i},
      marks=pytest.mark.nightly,
    ),
    ("simcse", ("text_column=line",), lambda i: {"line": "the dogs sat " * i}),
  ],
)
def test_predictions_read_the_columns_of_training(
  run, tmp_path, capsys, preset, columns, record
):
  """Catches a model that does not remember its text columns, or any option."""
  records = [record(i) for i in range(1, 21)]
  data = runs.write_lines(tmp_path / "own.jsonl", records)
  how = f"--output={tmp_path}/out", "--epochs=1", "--lrs=1e-3", "--save"
  finetune.main(
    [
      *(f"--checkpoint={run}", f"--data={data}", f"--preset={preset}", *how),
      *(f"--{column}" for column in columns),
    ]
  )
  (model,) = (tmp_path / "out").rglob("model")
  command = "embed" if preset == "simcse" else "predict"
  words = f"--checkpoint={model}", f"--data={data}"
  words += (f"--output={tmp_path / 'found.jsonl'}",)
  runs.main(f"antlm_jax.evals.{command}", *words)
  found = (tmp_path / "found.jsonl").read_text().splitlines()
  assert len(found) == len(records)
  if preset == "classification":
    texts = [(one["left"], one["right"]) for one in records]
    expected = [one.to_json() for one in predict(model, texts)]
    assert found == [json.dumps(one) for one in expected]
  # Another file may still have other columns.
  rows = [{"text": "the dogs", "more": "Tom sat"}]
  other = runs.write_lines(tmp_path / "other.jsonl", rows)
  words = words[0], f"--data={other}", words[2]
  (first, *_) = (name.partition("=")[2].split(",")[0] for name in columns)
  with pytest.raises(UserError, match=f"has no column '{first}'.* but 'text'"):
    runs.main(f"antlm_jax.evals.{command}", *words)
  both = "text,more" if preset == "classification" else "text"
  runs.main(f"antlm_jax.evals.{command}", *words, f"--text_column={both}")
