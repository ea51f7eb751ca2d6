"""Libraries that serve exported folders compute our numbers.

`test_transformers` tests more of the libraries in the documentation's table.
"""

import importlib
import re

import numpy as np
import pytest

from antlm_jax.data import toy_english
from antlm_jax.evals.embed import embed
from antlm_jax.evals.finetuning import ranking, saved
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.hf import export, import_
from antlm_jax.inference.model import load
from tests import hub, random_models, runs

sbert = pytest.importorskip("sentence_transformers")

pytestmark = hub.MARKS

HALVES = [s.split() for s in toy_english.make_sentences(0, 60)]
QUERIES = {f"q{i}": " ".join(w[::2]) for i, w in enumerate(HALVES)}
DOCUMENTS = {f"d{i}": " ".join(w[1::2]) for i, w in enumerate(HALVES)}
RELEVANT = {f"q{i}": {f"d{i}": 1} for i in range(len(HALVES))}
PROMPTS = "the dogs ", "a cat "
HEAD = ranking.Towers(0.05, PROMPTS)


def exported(folder):
  """Returns a random embedder and its exported folder."""
  loaded = random_models.tuned(folder, HEAD)
  (out,) = export.export_model(loaded, folder / "hf")
  return loaded, out


def test_the_page_cuts_vectors_and_keeps_those_of_tokens(tmp_path):
  """Catches a folder that sentence-transformers cuts or converts otherwise."""
  loaded, folder = exported(tmp_path)
  page = (runs.ROOT / "docs/how_to/embedders.md").read_text()
  (code,) = re.findall("```py\n(.*?)```", page, re.DOTALL)
  texts = ["the dogs rest .", "Ann"]
  names = {"texts": texts}
  exec(code.replace("FOLDER", str(folder)).replace("64", "8"), names)
  ours = embed(loaded, texts)[:, :8]
  ours /= np.linalg.norm(ours, axis=-1, keepdims=True)
  np.testing.assert_allclose(names["vectors"], ours, atol=1e-5)
  scores = ours @ ours.T
  np.testing.assert_allclose(names["scores"], scores, atol=1e-5)
  for name, before in (("tokens", ""), ("multi", PROMPTS[1])):
    ids = loaded.tokenizer.encode_batch([before + text for text in texts])
    lengths = [len(row) + 2 for row in ids]
    assert [len(vectors) for vectors in names[name]] == lengths


def test_mteb_gives_our_ndcg(tmp_path):
  """On a custom task, with the folder's prompts."""
  mteb = pytest.importorskip("mteb")
  from mteb.abstasks import AbsTaskRetrieval
  from mteb.abstasks.task_metadata import TaskMetadata

  class Halves(AbsTaskRetrieval):
    metadata = TaskMetadata(
      name="Halves",
      description="Second halves of sentences.",
      dataset={"path": "none", "revision": "none"},
      type="Retrieval",
      category="t2t",
      eval_langs=["eng-Latn"],
      main_score="ndcg_at_10",
    )

    def load_data(self, **options):
      self.queries, self.corpus = {"test": QUERIES}, {"test": DOCUMENTS}
      self.relevant_docs = {"test": RELEVANT}
      self.data_loaded = True

  loaded, folder = exported(tmp_path)
  model = sbert.SentenceTransformer(str(folder), device="cpu")
  results = mteb.evaluate(model, Halves(), cache=None)
  (theirs,) = results[0].scores["test"]
  examples = [Example((QUERIES[q],), RELEVANT[q], q) for q in QUERIES]
  examples += [Example((t,), None, name) for name, t in DOCUMENTS.items()]
  vectors, rows = saved.compute(loaded, examples, 48)
  ours = ranking.METRICS["ndcg"](
    HEAD.decode(vectors, rows), list(RELEVANT.values())
  )
  assert 0.01 < ours < 0.99
  assert theirs["ndcg_at_10"] == pytest.approx(ours, abs=1e-5)


@pytest.mark.parametrize(
  ("encoder", "form"),
  [
    pytest.param("llama", "causal", marks=pytest.mark.nightly),
    ("llama", "bidirectional"),
    pytest.param("modernbert", "bidirectional", marks=pytest.mark.nightly),
    pytest.param("ltg_bert", "bidirectional", marks=pytest.mark.nightly),
  ],
)
def test_onnxruntime_gives_our_logits(encoder, form, tmp_path):
  """With more and longer rows than the traced call."""
  runtime = pytest.importorskip("onnxruntime")
  pytest.importorskip("onnxscript")
  import torch
  import transformers

  tokenizer = random_models.tokenizer()
  random_models.save(tmp_path / "run", tokenizer, encoder)
  export.export_model(load(tmp_path / "run"), tmp_path / "hf", [form])
  model = hub.opened(tmp_path / "hf", form, attn_implementation="eager")
  model.config.use_cache = False
  tokenize = transformers.AutoTokenizer.from_pretrained(
    tmp_path / "hf", trust_remote_code=True
  )
  options = {"padding": True, "return_tensors": "pt"}
  traced = tokenize(["the dogs rest .", "Ann"], **options)
  free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
  torch.onnx.export(
    model,
    (),
    tmp_path / "model.onnx",
    kwargs=dict(traced),
    input_names=list(traced),
    output_names=["logits"],
    dynamic_shapes=dict.fromkeys(traced, free),
    dynamo=True,
    verbose=False,
  )
  session = runtime.InferenceSession(tmp_path / "model.onnx")
  texts = ["the dogs near the house often rest .", "Ann", "a cat sat ."]
  rows = tokenize(texts, **options)
  found = session.run(None, {name: x.numpy() for name, x in rows.items()})[0]
  with torch.no_grad():
    expected = model(**rows).logits.numpy()
  real = rows["attention_mask"].numpy() > 0
  np.testing.assert_allclose(found[real], expected[real], atol=5e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_sentence_transformers_own_files_are_read(pooling, tmp_path):
  """Catches vectors of another pooling, prompt or length than the folder's."""
  modules = importlib.import_module("sentence_transformers.models")
  random_models.save(tmp_path / "run", random_models.tokenizer(), tied=False)
  (path,) = export.export_model(
    load(tmp_path / "run"), tmp_path / "hf", ["bidirectional"]
  )
  made = sbert.SentenceTransformer(
    modules=[
      modules.Transformer(str(path), max_seq_length=12),
      modules.Pooling(32, pooling),
      modules.Normalize(),
    ],
    prompts={"query": "the dogs ", "document": ""},
    device="cpu",
  )
  made.save(str(tmp_path / "saved"))
  found = import_.Imported(tmp_path / "saved")
  assert any("(cls" in n for n in found.notes) == (pooling == "cls")
  assert (found.task is not None) == (pooling == "mean")
  if found.task is None:
    return
  loaded = load(import_.write_imported_run(found, tmp_path / "again"))
  assert loaded.headless
  texts = ["the dogs rest .", "a cat sat .", "Ann", "the dogs near " * 6]
  for prompt, theirs in (
    ("query", made.encode_query(texts)),
    ("document", made.encode_document(texts)),
  ):
    ours = embed(loaded, texts, prompt=prompt, quiet=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
