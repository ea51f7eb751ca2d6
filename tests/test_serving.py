"""Libraries that serve exported folders compute our numbers.

`test_transformers` tests more of the libraries in the documentation's table.
"""

import jax
import numpy as np
import pytest

from antlm_jax.data import toy_english
from antlm_jax.errors import UserError
from antlm_jax.evals.embed import embed
from antlm_jax.evals.finetuning import retrieval, saved
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.hf import export
from antlm_jax.inference.model import FineTuned, load, write_checkpoint
from tests import hub, random_models

sbert = pytest.importorskip("sentence_transformers")

pytestmark = hub.MARKS

HALVES = [s.split() for s in toy_english.make_sentences(0, 60)]
QUERIES = {f"q{i}": " ".join(w[::2]) for i, w in enumerate(HALVES)}
DOCUMENTS = {f"d{i}": " ".join(w[1::2]) for i, w in enumerate(HALVES)}
RELEVANT = {f"q{i}": {f"d{i}": 1} for i in range(len(HALVES))}
PROMPTS = "the dogs ", "a cat "
HEADS = {
  "SentenceTransformer": retrieval.Towers(0.05, PROMPTS),
  "MultiVectorEncoder": retrieval.TokenTowers(0.05, PROMPTS, size=8),
}


def exported(folder, head, encoder="llama"):
  """Returns a random embedder and its exported folder."""
  run = random_models.save(folder / "run", random_models.tokenizer(), encoder)
  base = load(run)
  params = head.init(jax.random.key(0), base.model.config.width)
  task = FineTuned("own", "bidirectional", head.kind, head.settings, params)
  path = write_checkpoint(
    folder / "model", base.step, base.params, base.meta, task
  )
  (out,) = export.export_model(load(path), folder / "hf")
  return load(path), out


@pytest.mark.parametrize("encoder", ["llama", "ltg_bert"])
def test_multi_vectors_score_as_ours(encoder, tmp_path):
  """With prompts, padding and special tokens."""
  head = HEADS["MultiVectorEncoder"]
  loaded, folder = exported(tmp_path, head, encoder)
  model = sbert.MultiVectorEncoder(
    str(folder), device="cpu", trust_remote_code=True
  )
  texts = ["the dogs rest .", "Ann", "the dogs near the house often rest ."]
  queries, _ = saved.compute(loaded, [Example((t,), {}) for t in texts], 32)
  documents, _ = saved.compute(loaded, texts, 32)
  found = model.encode_query(texts), model.encode_document(texts)
  for ours, theirs in zip((queries, documents), found, strict=True):
    for vectors, matrix in zip(ours, theirs, strict=True):
      real = vectors[(vectors != 0).any(axis=-1)]
      np.testing.assert_allclose(real, matrix, atol=2e-5)
  scores = head.similarity(queries, documents)
  np.testing.assert_allclose(scores, model.similarity(*found), atol=1e-5)
  assert "import MultiVectorEncoder" in (folder / "README.md").read_text()
  with pytest.raises(UserError, match="has a vector for each token"):
    embed(loaded, texts)


@pytest.mark.parametrize("kind", HEADS)
def test_mteb_gives_our_ndcg(kind, tmp_path):
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

  loaded, folder = exported(tmp_path, HEADS[kind])
  model = getattr(sbert, kind)(str(folder), device="cpu")
  results = mteb.evaluate(model, Halves(), cache=None)
  (theirs,) = results[0].scores["test"]
  examples = [Example((QUERIES[q],), RELEVANT[q], q) for q in QUERIES]
  examples += [Example((t,), None, name) for name, t in DOCUMENTS.items()]
  vectors, rows = saved.compute(loaded, examples, 48)
  ours = retrieval.METRICS["ndcg"](
    HEADS[kind].decode(vectors, rows), list(RELEVANT.values())
  )
  assert 0.01 < ours < 0.99
  assert theirs["ndcg_at_10"] == pytest.approx(ours, abs=1e-5)


@pytest.mark.parametrize(
  ("encoder", "form"),
  [
    ("llama", "causal"),
    ("llama", "bidirectional"),
    ("modernbert", "bidirectional"),
    ("ltg_bert", "bidirectional"),
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
