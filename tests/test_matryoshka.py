"""Matryoshka embedders: the loss, scores and vectors of prefixes."""

import functools
import json

import jax
import numpy as np
import pytest

from antlm_jax.data import toy_english
from antlm_jax.errors import UserError
from antlm_jax.evals import finetune
from antlm_jax.evals.embed import embed
from antlm_jax.evals.finetuning import retrieval
from antlm_jax.evals.finetuning.retrieval import Towers
from antlm_jax.hf import export
from antlm_jax.inference.model import load
from tests import random_models, tuned

run = random_models.run()
SIZES = 4, 12
HALVES = [s.split() for s in toy_english.make_sentences(0, 90)]
PAIRS = [(" ".join(w[::2]), " ".join(w[1::2])) for w in HALVES if w[3:]]
QUICK = {"batch_size": 16, "max_length": 16, "overwrite": True, "save": True}


def test_the_loss_is_a_sum_over_prefixes():
  """Catches a prefix that is not scaled, counted twice, or without the mask."""
  torch = pytest.importorskip("torch")
  draw = np.random.default_rng(0)
  outputs = draw.normal(size=(5, 3, 16)).astype(np.float32)
  outputs /= np.linalg.norm(outputs, axis=-1, keepdims=True)
  labels = draw.random((5, 10)) < 0.2
  np.fill_diagonal(labels, False)
  weights = np.float32([1, 1, 1, 1, 0])
  x = torch.tensor(outputs, requires_grad=True)
  total = 0
  parts = [torch.nn.functional.normalize(x[..., :n], dim=-1) for n in SIZES]
  for cut in (*parts, x):
    documents = torch.cat([cut[:4, 1], cut[:4, 2]])
    out = torch.tensor(labels[:4, [0, 1, 2, 3, 5, 6, 7, 8]])
    scores = (cut[:4, 0] @ documents.T / 0.1).masked_fill(out, -torch.inf)
    total += torch.nn.functional.cross_entropy(scores, torch.arange(4))
  total.backward()
  head = Towers(0.1, matryoshka=(*SIZES, 16))
  loss, gradient = jax.value_and_grad(head.loss)(outputs, labels, weights)
  assert loss == pytest.approx(total.item(), rel=1e-5)
  np.testing.assert_allclose(gradient, x.grad.numpy(), atol=1e-5)
  assert loss > Towers(0.1).loss(outputs, labels, weights) + 1


def ndcg_of(model, folder, size):
  """Returns the test queries' NDCG@10 by the vectors of `embed`."""
  task = retrieval.make_retrieval_task(
    folder, "own", "bidirectional", retrieval.RetrievalOptions()
  )
  examples = task.load(task.evaluations[-1])
  asks = [e for e in examples if e.label is not None]
  documents = [e for e in examples if e.label is None]
  queries, others = (
    embed(model, [e.texts[0] for e in those], prompt=prompt, dim=size)
    for those, prompt in ((asks, "query"), (documents, "document"))
  )
  found = []
  for vector, query in zip(queries, asks, strict=True):
    order = np.argsort(-(others @ vector), kind="stable")[:10]
    ids = [documents[i].id for i in order]
    found.append(retrieval.ndcg(ids, query.label))
  return np.mean(found)


def test_a_table_has_the_scores_of_prefixes(loaded, tmp_path):
  """Catches scores of the whole vector in place of a prefix's.

  A model that was trained without prefixes is scored by them, too.
  """
  folder = tmp_path / "mine"
  tuned.write_beir(folder)
  how = {**QUICK, "preset": "retrieval", "task": "own", "max_length": 48}
  fit = functools.partial(finetune.finetune, data=folder, **how)
  trained = fit(loaded, matryoshka=SIZES, lrs=(1e-3,), epochs=2)["mine"]
  plain = fit(loaded, lrs=(1e-3,), epochs=2, output=tmp_path / "plain")["mine"]
  scored = fit(plain.model, matryoshka=SIZES, epochs=0)["mine"]
  for of, model in ((trained, trained.model), (scored, plain.model)):
    about = json.loads((of.folder / "summary.json").read_text())
    found = about["runs"][0]["scores"]["mine-test"]
    for name, size in (("ndcg", None), ("ndcg_4", 4), ("ndcg_12", 12)):
      expected = ndcg_of(model, folder, size)
      assert found[name] == pytest.approx(expected, abs=1e-6)
  assert found["ndcg_4"] != found["ndcg"]


@pytest.mark.parametrize(
  ("preset", "settings", "words"),
  [
    ("pairs", {"matryoshka": (8, 512)}, "matryoshka=512: vectors .* only 32"),
    ("pairs", {"matryoshka": (8,), "token_size": 8}, "leave out one of both"),
  ],
)
def test_sizes_that_cannot_be_are_told(loaded, preset, settings, words):
  """Catches a prefix that is the whole vector without a word."""
  with pytest.raises(UserError, match=words):
    finetune.finetune(loaded, PAIRS, preset=preset, **QUICK, **settings)
  with pytest.raises(UserError, match=r"dim=33: vectors of .* have only 32"):
    embed(loaded, ["a"], dim=33)


def test_sentence_transformers_cuts_as_embed_does(loaded, tmp_path):
  """Catches an export that cuts elsewhere, or scales before it cuts."""
  sbert = pytest.importorskip("sentence_transformers")
  how = {**QUICK, "epochs": 1, "lrs": (1e-3,), "matryoshka": SIZES}
  model = finetune.finetune(loaded, PAIRS, preset="pairs", **how).model
  (path,) = export.export_model(load(model), tmp_path / "out")
  texts = [query for query, _ in PAIRS[:9]]
  whole = sbert.SentenceTransformer(str(path), device="cpu")
  vectors = embed(model, texts)
  np.testing.assert_allclose(vectors, whole.encode(texts), atol=1e-5)
  for size in SIZES:
    ours = embed(model, texts, dim=size)
    assert ours.shape == (9, size)
    cut = sbert.SentenceTransformer(str(path), device="cpu", truncate_dim=size)
    theirs = cut.encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    # Its similarity is the cosine, so vectors need no scaling for it.
    scores = cut.similarity(cut.encode(texts), cut.encode(texts))
    np.testing.assert_allclose(ours @ ours.T, scores, atol=1e-5)
  bare = embed(model, texts, dim=4, normalize=False)
  unscaled = embed(model, texts, normalize=False)
  np.testing.assert_allclose(bare, unscaled[:, :4], atol=1e-6)
  card = (path / "README.md").read_text()
  assert "first 4 or 12 numbers" in card and "truncate_dim=4)" in card
