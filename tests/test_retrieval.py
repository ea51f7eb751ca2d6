"""Retrieval: rankings, metrics, chunks of a batch, files and training."""

import functools
import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import (
  bm25,
  loop,
  ranking,
  retrieval,
  summary,
  trial,
)
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.evals.finetuning.ranking import Towers
from antlm_jax.runtime import progress
from tests import random_models, runs, tuned

run = random_models.run(layers=2)


def test_the_measures_are_scikit_learns():
  metrics = pytest.importorskip("sklearn.metrics", reason="the hf extra")
  draw = np.random.default_rng(0)
  names = [f"d{i}" for i in range(40)]
  whole, of_ranked = [], []
  for _ in range(1000):
    gains = draw.choice([0.0, 1.0, 2.0], 40, p=[0.7, 0.25, 0.05])
    scores = draw.permutation(40)  # no ties, which scikit-learn averages
    first = np.argsort(-scores)[:10]
    found = [names[i] for i in first]
    relevant = {n: g for n, g in zip(names, gains, strict=True) if g}
    whole.append(ranking.ndcg(found, relevant))
    of_ranked.append(ranking.ndcg_of_ranked(found, relevant))
    theirs = metrics.ndcg_score([gains], [scores], k=10)
    assert whole[-1] == pytest.approx(theirs)
    theirs = metrics.ndcg_score([gains[first] > 0], [scores[first]], k=10)
    assert of_ranked[-1] == pytest.approx(theirs)
  assert np.mean(of_ranked) > np.mean(whole) + 0.25
  for measure in (ranking.ndcg, ranking.ndcg_of_ranked):
    assert measure(["x"], {"a": 2.0}) == 0
    assert measure(["x"], {"x": -1.0}) == 0  # some sets have such judgements


def test_documents_are_ranked_by_their_cosine():
  draw = np.random.default_rng(0)
  vectors = draw.normal(size=(30, 8)).astype(np.float32)
  vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
  queries = [Example(("q",), {"d3": 1, "d7": 1}, f"q{i}") for i in range(5)]
  documents = [Example(("d",), None, f"d{i}") for i in range(25)]
  rows = type("Rows", (), {"origins": queries + documents})
  found = Towers(0.05).decode(vectors, rows)
  for query, one in zip(vectors[:5], found, strict=True):
    scores = {f"d{i}": float(query @ v) for i, v in enumerate(vectors[5:])}
    order = sorted(scores, key=scores.get, reverse=True)
    assert one["all"] == order[:10]
    assert one["labelled"] == [d for d in order if d in ("d3", "d7")]


def test_bm25_is_its_definition():
  texts = ["A cat, a CAT!", "the dog", "cat and dog and fox", "¿?"]
  (found,) = bm25.bm25_scores(["dog cat cat bird"], texts)
  cat = dog = np.log(1 + 2.5 / 2.5)

  def gain(count, length):  # of 11 words in 4 texts
    return 2.2 * count / (count + 1.2 * (0.25 + 0.75 * length / 2.75))

  third = (2 * cat + dog) * gain(1, 5)
  expected = [2 * cat * gain(2, 4), dog * gain(1, 2), third, 0]
  assert found == pytest.approx(expected)
  assert list(bm25.bm25_scores(["a"], ["¿?"])) == [0]


def gradients(loaded, at_once, batch, length=16):
  """Returns the gradient of a batch of pairs, and its program's memory."""
  head = Towers(0.05)
  draw = np.random.default_rng(0)
  tokens = draw.integers(5, loaded.tokenizer.vocab_size, (batch, 2, length))
  lengths = draw.integers(4, length + 1, (batch, 2)).astype(np.int32)
  rows = tokens.astype(np.int32), lengths, jax.random.key(0)

  def loss(params):
    compute = functools.partial(
      trial.outputs, loaded.model, head, False, params, {}
    )
    out = trial.in_chunks(compute, at_once, *rows)
    return head.loss(out, np.False_, jnp.ones(batch))

  compiled = jax.jit(jax.grad(loss)).lower(loaded.params).compile()
  used = compiled.memory_analysis().temp_size_in_bytes
  return compiled(loaded.params), used


@pytest.mark.slow
@pytest.mark.parametrize(
  ("batch", "at_once", "share"),
  [(16, 4, 0.6), pytest.param(512, 16, 0.1, marks=pytest.mark.nightly)],
)
def test_a_batch_in_chunks_has_the_same_gradient(loaded, batch, at_once, share):
  whole, all_bytes = gradients(loaded, 0, batch)
  chunks, some = gradients(loaded, at_once, batch)
  for name, expected in whole.items():
    error = np.abs(chunks[name] - expected).max()
    assert error <= 1e-5 * max(np.abs(expected).max(), 1e-3), name
  print(f"batch {batch} by {at_once}: {some / all_bytes:.3f} of the memory")
  assert some < share * all_bytes


def test_a_chunk_that_does_not_divide_is_told(loaded):
  with pytest.raises(UserError, match="rows_at_once=3 does not divide"):
    gradients(loaded, 3, 8)


def beir(data, name="nfcorpus", splits=("train", "dev", "test")):
  """Returns the task of a folder that `tuned.write_beir` writes."""
  tuned.write_beir(data / name, splits)
  return retrieval.make_retrieval_task(
    data, name, "bidirectional", retrieval.RetrievalOptions()
  )


def test_beirs_files_are_read(tmp_path):
  task = beir(tmp_path)
  pairs, test = task.load("train"), task.load("nfcorpus-test")
  assert len(pairs) == 64 and len(test) == 16 + 8
  query, document = pairs[0].texts
  assert query.startswith("Tom ") and document.startswith("Tom ")
  assert task.head.prompts == ("Query: ", "Document: ")
  assert test[0].label == {"d0": 1.0} and test[-1].label is None


def test_packed_files_are_read(tmp_path):
  """Catches gzip and parquet that are not found, and numbers as ids."""
  expected = beir(tmp_path / "plain").load("nfcorpus-test")
  beir(tmp_path)
  folder = tmp_path / "nfcorpus"
  corpus = folder / "corpus.jsonl"
  rows = [json.loads(line) for line in corpus.read_text().splitlines()]
  parquet.write_table(
    pyarrow.Table.from_pylist(rows), folder / "corpus.parquet"
  )
  for path in (folder / "queries.jsonl", folder / "qrels/test.tsv"):
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
  options = retrieval.RetrievalOptions()
  make = functools.partial(retrieval.make_retrieval_task, tmp_path, "nfcorpus")
  with pytest.raises(
    UserError, match=r"has corpus.jsonl, corpus.parquet: keep"
  ):
    make("bidirectional", options)
  corpus.unlink()
  task = make("bidirectional", options)
  assert task.load("nfcorpus-test") == expected
  assert folder / "corpus.parquet" in task.files


def test_judgements_of_numbers_are_read(tmp_path):
  """Catches scores and ids of jsonl that must be text, as in tsv."""
  folder = tmp_path / "own"
  (folder / "qrels").mkdir(parents=True)
  for name, ids in (("corpus", (7, "8")), ("queries", (1,))):
    lines = [{"_id": number, "text": "a"} for number in ids]
    runs.write_lines(folder / f"{name}.jsonl", lines)

  def load(*rows):
    columns = "query-id", "corpus-id", "score"
    rows = [dict(zip(columns, row, strict=True)) for row in rows]
    runs.write_lines(folder / "qrels/test.jsonl", rows)
    options = retrieval.RetrievalOptions()
    task = retrieval.make_retrieval_task(folder, "own", "causal", options)
    return task.load("own-test")[0].label

  assert load((1, 7, 2), ("1", "8", 0.5)) == {"7": 2.0, "8": 0.5}
  with pytest.raises(UserError, match="1: the field 'score' is not text"):
    load((1, 7, True))


def test_bm25_has_a_column_next_to_the_runs(tmp_path):
  task = beir(tmp_path)
  read = task.load("nfcorpus-test")
  found = task.references["BM25"](read)
  # A query's first word occurs only in its document.
  firsts = [p["all"][0] for p in found]
  assert firsts == [f"d{i}" for i in range(8) for _ in "ab"]
  examples = {name: task.load(name)[:-8] for name in task.evaluations}
  metrics = {name: dict.fromkeys(task.metrics, 0.5) for name in examples}
  predictions = {name: found[: len(e)] for name, e in examples.items()}
  outcome = loop.TuningOutcome(TrialRun(1e-3, 0))
  outcome.add_epoch(task, 1.0, metrics, predictions)
  about = tuned.summarised(task, examples, [outcome])
  beside = about.evaluations["nfcorpus-test"]["references"]
  assert beside["BM25"]["ndcg"] == 1
  lines = summary.scores_table([about], retrieval.PRESET).splitlines()
  assert lines[0].split("  ")[-1].strip() == "BM25 (%)"
  assert [line.split()[-1] for line in lines[1:3]] == ["100.0"] * 2


def test_blank_texts_of_a_folder_are_counted(tmp_path, capsys):
  task = beir(tmp_path)
  path = tmp_path / "nfcorpus/queries.jsonl"
  first, *others = map(json.loads, path.read_text().splitlines())
  runs.write_lines(path, [{**first, "title": " ", "text": " "}, *others])
  task.load("nfcorpus-test")
  count = 1 + len(others)
  said = f"queries.jsonl: 1 of {count:,} texts are blank"
  assert said in capsys.readouterr().out


def arguana(folder, count=40):
  """Writes a folder like ArguAna's, in which queries are also documents."""
  (folder / "qrels").mkdir(parents=True)
  draw = np.random.default_rng(0)
  texts = {
    f"{i}-{side}": " ".join(draw.choice(tuned.WORDS, 6))
    for i in range(count)
    for side in ("pro", "con")
  }
  lines = [{"_id": n, "title": "", "text": text} for n, text in texts.items()]
  asked = [line for line in lines if line["_id"].endswith("pro")]
  for name, those in (("corpus", lines), ("queries", asked)):
    runs.write_lines(folder / f"{name}.jsonl", those)
  rows = [f"{i}-pro\t{i}-con\t1" for i in range(count)]
  rows += [f"0-pro\tlost-{i}\t2" for i in range(3)]  # not in the corpus
  (folder / "qrels/test.tsv").write_text(HEAD + "\n".join(rows))
  return texts


def bm25_ndcg(texts, judged):
  """Returns NDCG@10 of BM25 without a query's own document."""
  names, found = list(texts), []
  for query, relevant in judged.items():
    (scores,) = bm25.bm25_scores([texts[query]], list(texts.values()))
    order = [names[i] for i in np.argsort(-scores, kind="stable")]
    order.remove(query)
    found.append(ranking.ndcg(order[:10], relevant))
  return np.mean(found)


def test_a_folder_with_test_alone_is_scored_as_by_beir(tmp_path, capsys):
  """Catches hits of the query itself, and lost documents that do not count."""
  texts = arguana(tmp_path / "arguana")
  options = retrieval.RetrievalOptions()
  task = retrieval.make_retrieval_task(
    tmp_path / "arguana", "own", "bidirectional", options
  )
  assert not task.trained and task.evaluations == ("arguana-test",)
  read = task.load("arguana-test")
  told = capsys.readouterr().out
  assert told.startswith("warning: ") and "3 of 43 judgements are of" in told
  asked = {e.id: e.label for e in read if e.label is not None}
  labels = list(asked.values())
  ours = task.metrics["ndcg"](task.references["BM25"](read), labels)
  assert 0.05 < ours < 0.9
  assert ours == pytest.approx(bm25_ndcg(texts, asked), abs=1e-9)
  # The trivial answer is a random order of 79 documents with one relevant.
  (order,) = task.trivial(read)
  for query, one in zip(asked, order, strict=True):
    assert len({*one["all"]} - {query}) == 10
  expected = (1 / np.log2(np.arange(10) + 2)).sum() / 79
  found = task.metrics["ndcg"](order, labels)
  assert found == pytest.approx(expected, abs=0.06)


def test_a_model_is_scored_without_training(
  loaded, tmp_path, capsys, monkeypatch
):
  """Catches a folder with a test set only that is refused or trained on.

  Also catches a silent evaluation, and a table that Python does not show.
  """
  arguana(tmp_path / "arguana")
  how = {"preset": "retrieval"}
  tracked = []

  def track(items, unit, name):
    tracked.append(name)
    return items

  monkeypatch.setattr(progress, "track", track)
  result = finetune.finetune(loaded, tmp_path / "arguana", **how)
  found = result["arguana"]
  assert tracked == ["arguana-test"]
  said = capsys.readouterr().out  # nobody asked for the known sets
  assert "arguana" in said and "left out" not in said
  assert said.endswith(f"{result}\n")
  (row,) = re.findall(r"arguana-test +ndcg +- +1 +(\d+) ", said)
  items = (found.folder / "items.jsonl").read_text()
  assert int(row) == items.count("\n")  # number of queries
  about = json.loads((found.folder / "summary.json").read_text())
  assert about["train_examples"] == 0 and about["request"]["epochs"] == 0
  assert 0 < found.score < 0.5 and found.folder.parts[-3] == "untrained"
  with pytest.raises(UserError, match=r"no set of .*nfcorpus, .* task=own"):
    finetune.finetune(loaded, tmp_path, **how)


QUICK = {"epochs": 1, "batch_size": 32, "max_length": 16, "quiet": True}


def test_no_mean_has_an_untrained_score(loaded, tmp_path):
  """Catches untrained scores in a mean with trained scores."""
  beir(tmp_path)
  tuned.write_beir(tmp_path / "nq", ("test",), seed=1)
  how = {**QUICK, "preset": "retrieval", "task": "nfcorpus,nq"}
  found = finetune.finetune(loaded, tmp_path, **how)
  assert found["nq"].lr == 0 and found["nfcorpus"].lr > 0
  score = found["nfcorpus"].scores["nfcorpus-test"].mean  # the dev set chooses
  assert found.score == pytest.approx(score)
  assert found["nq"].score != pytest.approx(found.score)
  last = str(found).splitlines()[-1]
  assert "these 1 of 5 scores" in last and "without nq, not trained" in last
  assert last.endswith(f": {100 * score:.1f}")


def test_evaluating_takes_no_settings_of_training(loaded, tmp_path):
  """Catches steps after which a model is not trained."""
  tuned.write_beir(tmp_path / "nq", ("test",))
  how = {"preset": "retrieval", "task": "nq", "quiet": True, "epochs": 0}
  with pytest.raises(UserError, match=r"epochs=0 .* leave out steps"):
    finetune.finetune(loaded, tmp_path, steps=3, **how)


def test_validation_judgements_choose(tmp_path):
  """Catches a twentieth of train that replaces the user's own dev set."""
  folder = tmp_path / "nfcorpus/qrels"
  expected = beir(tmp_path).load("nfcorpus-dev")
  (folder / "dev.tsv").rename(folder / "validation.tsv")
  task = retrieval.make_retrieval_task(
    tmp_path, "nfcorpus", "bidirectional", retrieval.RetrievalOptions()
  )
  assert task.load("nfcorpus-dev") == expected
  assert len(task.load("train")) == 64


def test_queries_and_documents_with_numbers_of_their_own(tmp_path):
  """Catches a judged document that is left out as the query itself."""
  (tmp_path / "own/qrels").mkdir(parents=True)
  lines = [{"_id": str(i), "text": f"unique{i} word"} for i in range(12)]
  for name in ("corpus", "queries"):
    runs.write_lines(tmp_path / f"own/{name}.jsonl", lines)
  rows = "\n".join(f"{i}\t{i}\t1" for i in range(12))
  (tmp_path / "own/qrels/test.tsv").write_text(HEAD + rows)
  task = retrieval.make_retrieval_task(
    tmp_path / "own", "own", "bidirectional", retrieval.RetrievalOptions()
  )
  read = task.load("own-test")
  labels = [e.label for e in read if e.label is not None]
  assert task.metrics["ndcg"](task.references["BM25"](read), labels) == 1


def test_a_folders_name_may_have_a_dot(tmp_path):
  """Catches a folder that is taken for a file with an ending."""
  tuned.write_beir(tmp_path / "v1.2", ("train", "dev", "test"))
  arguments = "--preset=retrieval", f"--data={tmp_path / 'v1.2'}"
  (job,) = tuned.planned(*arguments)
  assert job.task.evaluations == ("v1_2-dev", "v1_2-test")


def test_without_a_set_to_choose_on_training_queries_are_left_out(tmp_path):
  task = beir(tmp_path, "scifact", splits=("train", "test"))
  with open(tmp_path / "scifact/qrels/train.tsv", "a") as file:
    file.writelines(f"\nq0.{k}\td7\t1" for k in range(8))  # a second document
  pairs, dev, test = map(task.load, ("train", *task.evaluations))
  learnt = {e.id.split()[0] for e in pairs}
  left_out = {e.id: e.label for e in dev if e.label is not None}
  assert len(left_out) == 4 and len(learnt) == 60  # of 64 queries
  assert not learnt & left_out.keys()
  assert len(pairs) + sum(map(len, left_out.values())) == 72
  assert len(dev) - 4 == len(test) - 16 == 8  # all documents


def test_queries_that_sets_share_are_told(tmp_path, capsys):
  """Catches a test set whose queries were trained on, in silence."""
  (tmp_path / "qrels").mkdir()
  for name in ("corpus", "queries"):
    rows = [{"_id": f"{i}", "text": f"{name} {i}"} for i in range(4)]
    runs.write_lines(tmp_path / f"{name}.jsonl", rows)
  for split, numbers in (("train", "01"), ("dev", "23"), ("test", "12")):
    rows = "\n".join(f"{number}\t{number}\t1" for number in numbers)
    (tmp_path / f"qrels/{split}.tsv").write_text(HEAD + rows)

  def said():
    retrieval.make_retrieval_task(
      tmp_path, "own", "causal", retrieval.RetrievalOptions()
    ).load("train")
    return capsys.readouterr().out.splitlines()[-1]

  name = f"warning: {tmp_path.name}"
  assert said() == f"{name}-test: 1 of 2 queries are also in train.tsv"
  pairs = [{"anchor": "Queries  3 ", "positive": "p"}]
  runs.write_lines(tmp_path / "pairs.jsonl", pairs)
  assert said() == f"{name}-dev: 1 of 2 queries are also in pairs.jsonl"


def test_pairs_are_read(tmp_path, capsys):
  """Catches judgements, and columns of pairs, that are unused in silence."""
  path = tmp_path / "msmarco/pairs.jsonl"
  path.parent.mkdir()
  path.write_text('{"anchor": "a", "positive": "b"}\n')
  task = beir(tmp_path, "msmarco")
  (pair,) = task.load("train")
  assert pair.texts == ("a", "b")
  train = path.parent / "qrels/train.tsv"
  assert f"{path}; {train} is not used" in capsys.readouterr().out
  path.write_text('{"anchor": "a", "positive": "b", "label": 0}\n')
  assert task.load("train") and "not used: 'label'" in capsys.readouterr().out
  path.write_text('{"anchor": "a", "positive": " "}\n')
  with pytest.raises(UserError, match="line 1: no text to read"):
    task.load("train")


HEAD = "query-id\tcorpus-id\tscore\n"
TWICE = '{"_id": "d0", "text": "a"}\n' * 2


@pytest.mark.parametrize(
  ("file", "text", "words"),
  [
    ("corpus.jsonl", '{"_id": "d0"}', "line 1: the field 'text' is absent"),
    ("corpus.jsonl", '{"_id": "x", "text": "a"}', "judges no document of"),
    ("corpus.jsonl", TWICE, "line 2: another line has the _id 'd0'"),
    (
      "qrels/dev.tsv",
      f"{HEAD}q0.1\td0",
      "line 2 has fewer columns than line 1",
    ),
    ("qrels/dev.tsv", f"{HEAD}q0.1\td0\tx", "line 2: the score 'x' is not a"),
    ("qrels/dev.tsv", f"{HEAD}q0.1\td0\tnan", "line 2: the score 'nan' is"),
    (
      "qrels/dev.tsv",
      f"{HEAD}q0.1\td0\t1\t1",
      "line 2 has more columns than line 1",
    ),
    ("qrels/dev.tsv", f"{HEAD}q9\td0\t1", "line 2: 'q9' is not in .*queries"),
    ("qrels/dev.tsv", HEAD, "holds no judgements"),
    (
      "qrels/dev.tsv",  # of TREC, or of BEIR without names
      "q0.1\t0\td0\t0\nq0.2\t0\td0\t1",
      r"no column 'query-id', 'corpus-id', 'score' but .* \(line 1 must name",
    ),
    (
      "qrels/dev.tsv",
      "q0.1\td0\t1\nq0.2\td0\t1",
      "but 'q0.1', 'd0', '1' .line 1 must name the columns",
    ),
    (
      "qrels/dev.tsv",
      f"{HEAD}q0.1\td0\t2\nq0.1\td0\t2\nq0.1\td0\t0",
      "line 4: the score is 0, but another line judges 'd0' for 'q0.1' as 2",
    ),
    ("qrels/dev.tsv", f"{HEAD}q0.1\td0\t0", "no document is relevant"),
  ],
)
def test_bad_files_are_told(tmp_path, file, text, words):
  task = beir(tmp_path)
  (tmp_path / "nfcorpus" / file).write_text(text)
  with pytest.raises(UserError, match=words):
    task.load("nfcorpus-dev")


@pytest.mark.slow
def test_it_trains_and_is_saved(loaded, tmp_path):
  how = {"batch_size": 8, "rows_at_once": 4, "epochs": 6, "max_length": 16}
  runs = [TrialRun(3e-3, 0), TrialRun(1e-9, 0)]
  outcomes = tuned.trained(loaded, beir(tmp_path), runs, tmp_path, **how)
  learnt, untrained = (o.best["nfcorpus-test"]["ndcg"] for o in outcomes)
  assert learnt > 0.9 and learnt > untrained
