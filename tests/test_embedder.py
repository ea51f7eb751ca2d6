"""From a folder of transformers by detour, SimCSE and pairs to an embedder."""

import json

import numpy as np
import pytest

from antlm_jax.data import toy_english
from antlm_jax.evals import finetune
from antlm_jax.evals.embed import embed
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.hf import export
from antlm_jax.inference.model import load
from tests import hub, random_models, runs
from tests.tuned import outputs

transformers = pytest.importorskip("transformers")
sbert = pytest.importorskip("sentence_transformers")

pytestmark = hub.MARKS


def begun(tmp_path):
  """Writes a folder of transformers: a random Llama without a mask token."""
  tokenizer = random_models.tokenizer()
  shape = {"vocab_size": tokenizer.vocab_size, "hidden_size": 32}
  shape |= {"intermediate_size": 48, "num_hidden_layers": 2}
  shape |= {"num_attention_heads": 4, "max_position_embeddings": 64}
  config = transformers.LlamaConfig(**shape, bos_token_id=1, eos_token_id=2)
  folder = tmp_path / "hf"
  transformers.LlamaForCausalLM(config).save_pretrained(folder)
  bare = random_models.without_mask(tokenizer.to_json())
  (folder / "tokenizer.json").write_text(bare)
  return folder


def test_from_a_folder_to_an_embedder_and_out(tmp_path):
  folder, text = begun(tmp_path), tmp_path / "mine.txt"
  sentences = list(toy_english.make_sentences(0, 600))
  text.write_text("\n".join(sentences))
  words = f"--text={text}", f"--tokenizer={folder}", f"--output={tmp_path}/data"
  runs.main("antlm_jax.commands.prepare", *words, "--seq_len=16")
  words = [f"--config=detour:model={folder},steps=30,decay=0.4"]
  words += [f"--workdir={tmp_path}/run", f"--config.data.path={tmp_path}/data"]
  words += ["--config.train.batch_size=8", "--config.eval.every=0"]
  runs.main("antlm_jax.commands.train", *words)
  data = tmp_path / "my.csv"
  halves = (s.split() for s in sentences[:300])
  rows = [f"{' '.join(w[::2])},{' '.join(w[1::2])}" for w in halves if w[3:]]
  data.write_text("\n".join(["query,positive", *rows]))

  def tuned(model, data, *more):
    common = "--save", "--max_length=32", "--lrs=3e-3", f"--output={tmp_path}"
    words = f"--checkpoint={model}", f"--data={data}", *common, *more
    finetune.main(words)
    return tmp_path / data.stem / "30-bidirectional/model"

  model = tuned(tmp_path / "run", text, "--preset=simcse", "--batch_size=32")
  prompts = "--query_prompt=the dogs ", "--document_prompt=a cat "
  model = tuned(model, data, "--preset=pairs", "--epochs=6", *prompts)
  summary = json.loads((model.parent / "summary.json").read_text())
  (about,) = summary["runs"]
  best, first = about["scores"]["my-dev"], about["epochs"][0]["my-dev"]
  print(f"NDCG {first['ndcg']:.3f} to {best['ndcg']:.3f}")
  loaded = load(model)
  (path,) = export.export_model(loaded, tmp_path / "out")
  model = sbert.SentenceTransformer(str(path), device="cpu")
  texts = sentences[-20:]
  # Fine-tuning and inference use longer rows than pretraining.
  assert model.max_seq_length == loaded.longest_row > 16
  asks = [Example((t,), {}) for t in texts]
  queries = outputs(loaded, asks)
  documents = outputs(loaded, [(t,) for t in texts])
  asked = embed(loaded, texts, prompt="query")
  plain = embed(loaded, texts)  # without a prompt
  for ours, theirs in (
    (asked, model.encode_query(texts)),
    (plain, model.encode(texts)),
    (queries, model.encode_query(texts)),
    (documents, model.encode_document(texts)),
    (queries @ documents.T, model.similarity(queries, documents)),
  ):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
  assert np.abs(queries - documents).max() > 1e-2
  card = (path / "README.md").read_text()
  assert "library_name: sentence-transformers" in card
  assert best["ndcg"] > first["ndcg"]
