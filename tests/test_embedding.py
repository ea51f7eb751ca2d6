"""Embedders of a user's own texts: losses, files and training."""

import itertools
import re

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax.data import toy_english
from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.finetuning import (
  batching,
  embedding,
  labelled,
  loop,
  retrieval,
  trial,
)
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.evals.finetuning.ranking import Towers
from antlm_jax.evals.finetuning.trial import Hyperparameters
from antlm_jax.hf import export
from antlm_jax.inference.model import load
from tests import random_models, runs, tuned

OPTIONS = retrieval.RetrievalOptions(), embedding.EmbedderOptions()
WEIGHTS = np.float32([1, 1, 1, 0])  # 0 marks an empty row
NO_LABELS = np.False_  # every other document is a negative
run = random_models.run()


def test_infonce_with_negatives_is_its_definition():
  """Negatives of other queries count; those of empty rows do not."""
  draw = np.random.default_rng(0)
  x = draw.normal(size=(5, 4, 8))  # query, positive, two negatives
  x /= np.linalg.norm(x, axis=-1, keepdims=True)
  weights = np.array([1.0, 1, 1, 1, 0])
  nats = []
  for i in range(4):
    scores = np.array([x[i, 0] @ x[j, k] for k in (1, 2, 3) for j in range(4)])
    nats.append(np.log(np.exp(scores / 0.1).sum()) - x[i, 0] @ x[i, 1] / 0.1)
  found = Towers(0.1).loss(jnp.float32(x), NO_LABELS, jnp.float32(weights))
  assert found == pytest.approx(np.mean(nats), rel=1e-5)


def test_prompts_stand_before_queries_and_others(loaded):
  head = Towers(0.05, ("the dogs ", "a cat "))
  bare = Towers(0.05)
  asks = embedding._pair_queries([embedding.Example(("sat", "rest", "often"))])
  for examples, told in (
    ([embedding.Example(("sat", "rest"))], [("the dogs sat", "a cat rest")]),
    (asks, [("the dogs sat",), ("a cat rest",), ("a cat often",)]),
  ):
    found = head.encode(loaded, examples, 32)
    plain = [embedding.Example(texts) for texts in told]
    expected = bare.encode(loaded, plain, 32)
    assert np.array_equal(found.tokens, expected.tokens)


def pairs(data, options):
  ranking = retrieval.RetrievalOptions()
  return embedding.pairs_task(data, "own", "bidirectional", ranking, options)


def simcse(data):
  return embedding.simcse(
    str(data), "own", "causal", *OPTIONS, labelled.Columns()
  )


def test_files_of_pairs(tmp_path):
  rows = [
    {"query": f"q{i % 19}", "positive": f"p{i}", "no": [f"n{i}", "n"]}
    for i in range(20)
  ]
  options = embedding.EmbedderOptions(negative_column=("no",))
  data = str(runs.write_lines(tmp_path / "my.jsonl", rows))
  task = pairs(data, options)
  (dev,) = task.evaluations
  train, asked = task.load("train"), task.load(dev)
  assert (task.name, dev, len(train)) == ("my", "my-dev", 18)
  assert all(e.texts[2:] == (f"n{e.texts[1][1:]}", "n") for e in train)
  queries = [e for e in asked if e.label is not None]
  assert len(queries) == 2 and len(asked) == 2 + 2 + 3  # "n" is one document
  # A query in two records asks for both documents.
  both = embedding._pair_queries(
    [embedding.Example(("q", text)) for text in "ab"]
  )
  assert both[0].label == {"d0": 1.0, "d1": 1.0} and len(both) == 3


def test_a_folder_in_beirs_form_is_no_file_of_pairs(tmp_path):
  """Catches advice about columns, where another preset reads the folder."""
  tuned.write_beir(tmp_path / "beir")
  with pytest.raises(UserError, match=r"BEIR's form, .* preset=retrieval"):
    pairs(str(tmp_path / "beir"), embedding.EmbedderOptions())


def test_the_card_compares_an_embedder_with_its_baselines(run, tmp_path):
  """Catches a card with a score that is no better than chance, unsaid."""
  texts = [f"{a} {b}" for a, b in itertools.permutations(tuned.WORDS, 2)]
  data = [(text, text.split()[1]) for text in texts]
  how = {"epochs": 1, "max_length": 16, "batch_size": 8, "quiet": True}
  model = finetune.finetune(
    run, data, preset="pairs", output=tmp_path / "out", save=True, **how
  )
  (path,) = export.export_model(load(model), tmp_path / "hf")
  text = (path / "README.md").read_text()
  # sentence-transformers 5.0 and 5.1 need transformers 4.
  assert "sentence-transformers 5.2 and transformers 5.3, or later" in text
  front = huggingface_hub.ModelCard(text).data
  (result,) = front.eval_results
  assert front.model_name.startswith("eurobert-")
  assert result.metric_type == "ndcg_at_10"
  name = r"NDCG@10, fine-tuned \(a random order [\d.]+ %, BM25 [\d.]+ %\)"
  assert re.fullmatch(name, result.metric_name)


def test_texts_that_differ_in_case_are_one_document():
  """Catches a right answer that counts as wrong, as its case is another's."""
  pairs = ("A q", "Dogs rest"), ("a  Q", "cats"), ("b", "dogs  rest", "Cats")
  examples = embedding._pair_queries([*map(embedding.Example, pairs)])
  assert [(e.texts[0], e.label) for e in examples] == [
    ("A q", {"d0": 1.0, "d1": 1.0}),
    ("b", {"d0": 1.0}),
    ("Dogs rest", None),
    ("cats", None),
  ]


@pytest.mark.parametrize(
  ("row", "columns", "words"),
  [
    ({"positive": " "}, {}, "line 1: no text to read"),
    ({"positive": []}, {}, "not one query and a positive"),
    ({"query": ["a", "b"], "positive": "c"}, {}, "not one query and a"),
    ({}, {}, "choose one with --positive_column"),
    ({"positive": "b", "no": []}, {"negative": "no"}, "more texts in negati"),
    ({"positive": "b"}, {"positive": "query"}, "query, positive_"),
    ({"positive": "b"}, {"negative": "positive"}, "=positive must differ"),
  ],
)
def test_bad_pairs_are_told(tmp_path, row, columns, words):
  fine = {"query": "a", "positive": "b", "no": "c"}
  rows = [{"query": "a", **row}, fine]
  data = str(runs.write_lines(tmp_path / "my.jsonl", rows))
  options = embedding.EmbedderOptions(
    positive_column=columns.get("positive", "positive"),
    negative_column=tuple(filter(None, [columns.get("negative")])),
  )
  with pytest.raises(UserError, match=words):
    pairs(data, options)


def test_a_list_in_a_table_is_no_text(tmp_path):
  """Catches positives that pandas wrote to csv, as one text with brackets."""
  path = tmp_path / "my.csv"
  path.write_text("query,positive\na,\"['b', 'c']\"\nd,e\n")
  with pytest.raises(UserError, match=r"line 2: the text .*list that"):
    pairs(str(path), embedding.EmbedderOptions())


RECORDS = [
  ("one q", ["Dogs rest", "cats"], "the hills"),
  ("One  Q", ["dogs  rest "], "often"),
  ("two q", ["cats", "near"], "dogs rest"),
  ("three q", ["sat"], "three q"),
  ("four q", ["x " * 40 + "y"], "house"),
  ("five q", ["x " * 40 + "z"], "near"),
]
# Relevant documents of each query, by hand. The documents of the fourth and
# fifth are equal after they are cut. The third has its query as a negative.
RELEVANT = {
  "one q": {"dogs rest", "cats"},
  "two q": {"cats", "near"},
  "three q": {"sat", "three q"},
  "four q": {"x"},
  "five q": {"x"},
}


def plain(text):
  """Returns a text as `RELEVANT` has it."""
  return "x" if text.startswith("x x") else " ".join(text.lower().split())


def test_other_positives_of_a_query_are_no_negatives(loaded, capsys):
  """Catches false negatives: a list's texts, equal texts, another's negative.

  PyTorch computes the loss and its gradient from the texts.
  """
  torch = pytest.importorskip("torch")
  options = embedding.EmbedderOptions(negative_column=("n",))
  sets = {"train": RECORDS, "dev": RECORDS[:1]}
  task = pairs(sets, options)
  rows = loop.read_rows(loaded, task, 16)["train"]
  said = "1 of 8 negatives are positives of their query, or equal to it"
  assert said in capsys.readouterr().out
  texts = [e.texts for e in rows.examples]
  assert [t[1] for t in texts[:2]] == ["Dogs rest", "cats"] and len(texts) == 8
  chosen = np.array([0, 2, 3, 5, 6, 7, 1, 0])
  weights = np.float32([1] * 7 + [0])  # the last place is empty
  slots = batching.BatchRows(16, chosen, weights)
  batch = batching.gather(rows, [slots])
  outputs = np.random.default_rng(0).normal(size=(8, 3, 6)).astype(np.float32)
  outputs /= np.linalg.norm(outputs, axis=-1, keepdims=True)

  def expected(known):
    x = torch.tensor(outputs, requires_grad=True)
    nats = []
    for i in range(7):
      left, (query, *_) = [x[i, 0] @ x[i, 1]], texts[chosen[i]]
      for j, k in itertools.product(range(7), (1, 2)):
        relevant = plain(texts[chosen[j]][k]) in known.get(plain(query), ())
        if (j, k) != (i, 1) and not relevant:
          left.append(x[i, 0] @ x[j, k])
      nats.append(torch.logsumexp(torch.stack(left), 0) - left[0])
    loss = sum(nats) / 7
    loss.backward()
    return loss.item(), x.grad.numpy()

  of = jax.value_and_grad(Towers(1.0).loss)
  for labels, known in ((batch.labels[0], RELEVANT), (NO_LABELS, {})):
    loss, gradient = of(outputs, labels, weights)
    theirs, their_gradient = expected(known)
    assert loss == pytest.approx(theirs, rel=1e-5)
    np.testing.assert_allclose(gradient, their_gradient, atol=1e-5)
  masked, _ = of(outputs, batch.labels[0], weights)
  assert masked < loss - 0.1


def test_a_limit_forgets_no_positive(loaded):
  """Catches positives that become negatives because `limit` drops their row."""
  words = [f"hill {i}" for i in range(10)]
  records = [("q", words), *((f"ask {i}", w) for i, w in enumerate(words))]
  sets = {"train": records, "dev": records[:1]}
  task = pairs(sets, embedding.EmbedderOptions())
  rows = loop.read_rows(loaded, task, 16, limit=10)["train"]
  asks = [example.texts[0] == "q" for example in rows.examples]
  assert 2 < sum(asks) < 8
  # Every document is relevant to q, and one to each other query.
  for own, labels in zip(asks, rows.labels[np.arange(10)], strict=True):
    assert labels.sum() == 9 if own else labels.sum() < 2


def test_texts_alone_are_their_own_pairs(tmp_path):
  lines = [f"{word} near the hills" for word in map(str, range(30))]
  (tmp_path / "a.txt").write_text("\n\n".join(lines))
  task = simcse(tmp_path)
  train, asked = task.load("train"), task.load(*task.evaluations)
  assert len(train) == 27 and all(a == b for a, b in (e.texts for e in train))
  held_out = {e.texts[0] for e in asked if e.label is not None}
  assert all(text.endswith(" near") for text in held_out)
  assert not held_out & {" ".join(e.texts[0].split()[:2]) for e in train}


@pytest.mark.slow
def test_dropout_is_on_where_it_is_asked_for(loaded, tmp_path):
  """Only dropout makes two encodings of a text differ."""
  (tmp_path / "a.txt").write_text("\n".join(toy_english.make_sentences(0, 40)))
  task = simcse(tmp_path)
  data = loop.read_rows(loaded, task, 16)

  def loss(**changes):
    settings = Hyperparameters(
      batch_size=36, epochs=1, max_length=16, **changes
    )
    (outcome,) = loop.fit(loaded, task, data, settings, [TrialRun(0.0, 0)])
    return outcome.best["train_loss"]

  without, dropped = loss(), loss(encoder_dropout=0.3)
  rows = data["train"].tokens, data["train"].lengths
  how = loaded.model, task.head, False
  vectors = trial.outputs(*how, loaded.params, {}, *rows)
  alike = task.head.loss(vectors, NO_LABELS, jnp.ones(len(vectors)))
  assert without == pytest.approx(float(alike), rel=1e-4)
  assert dropped > without + 0.1
