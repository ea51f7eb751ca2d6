"""Encoders without an output layer, as transformers' AutoModel saves them.

Each family's random model is imported, embeds, is trained for a step with a new
output layer, and is exported again.
"""

import importlib
import shutil

import numpy as np
import pytest

from antlm_jax import embed, fill, score
from antlm_jax.commands import import_ as import_command
from antlm_jax.hf import export, import_
from antlm_jax.hf.architecture import NATIVE
from antlm_jax.inference import framing
from antlm_jax.inference.model import load
from antlm_jax.masks import AttentionMask
from tests import helpers, hub, random_models, runs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = hub.MARKS

GEMMA = {"head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 2}
MODERN = {"local_attention": 8}
# A family's config, and its settings. Windows are shorter than the rows.
FAMILIES = {
  "Llama": {"tie_word_embeddings": False},
  "Mistral": {"tie_word_embeddings": False, "sliding_window": 8},
  "Qwen3": {"tie_word_embeddings": False, "head_dim": 8},
  "Gemma3Text": {**GEMMA, "use_bidirectional_attention": True},
  "EuroBert": {"mask_token_id": 3},
  "ModernBert": MODERN,
  "ModernBertDecoder": MODERN,
  "Ultrabert": {"sliding_window": 4},
}
CAUSAL = "Llama", "Mistral", "Qwen3", "ModernBertDecoder"
TIED = ("Gemma3Text",)  # their embeddings are the output layer
TEXTS = ["the dogs near the house often rest .", "a cat sat .", "Ann"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
  """A folder that AutoModel saved, the model, and its imported run."""
  kind, folder = request.param, tmp_path_factory.mktemp("family")
  tokenizer = random_models.tokenizer()
  ids = {
    f"{role}_token_id": getattr(tokenizer, f"{role}_id")
    for role in ("pad", "bos", "eos")
  }
  shape = {"vocab_size": tokenizer.vocab_size, "initializer_range": 0.1}
  whole = hub.drawn(kind, **shape, **ids, **FAMILIES[kind])
  model = transformers.AutoModel.from_config(whole.config).eval()
  model.load_state_dict(whole.base_model.state_dict())
  model.save_pretrained(folder / "hf", max_shard_size="50KB")
  (folder / "hf/tokenizer.json").write_text(tokenizer.to_json())
  import_command.import_model(
    folder / "hf", folder / "run", boundary="bos_eos", quiet=True
  )
  return kind, folder / "hf", model, load(folder / "run")


def test_hidden_states_and_vectors_are_theirs(family):
  """Catches a folder that import refuses, and weights in the wrong place."""
  kind, _, model, loaded = family
  ids = np.random.default_rng(0).integers(4, 400, (2, 40))
  at = np.broadcast_to(np.arange(40), ids.shape)
  mask = AttentionMask(causal=kind in CAUSAL)
  ours = loaded.model.encode(loaded.params, ids, at, mask)
  with torch.no_grad():
    theirs = model(torch.tensor(ids)).last_hidden_state.numpy()
    rows = [framing.encode_framed(loaded, text)[None] for text in TEXTS]
    states = [model(torch.tensor(row)).last_hidden_state for row in rows]
  np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
  attention = "causal" if kind in CAUSAL else "bidirectional"
  found = embed(loaded, TEXTS, attention=attention, quiet=True)
  means = np.stack([state[0].mean(axis=0).numpy() for state in states])
  np.testing.assert_allclose(found, means, atol=1e-5 * np.abs(means).max())


def test_a_pickle_is_read_as_shards_are(family, tmp_path):
  """Catches an index or a pickle whose names are not those of one file."""
  _, folder, model, loaded = family
  assert (folder / "model.safetensors.index.json").is_file()
  for name in ("config.json", "tokenizer.json"):
    shutil.copy(folder / name, tmp_path)
  torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
  again = import_.Imported(tmp_path)
  assert helpers.equal(dict(again.params), dict(loaded.params))


def test_scores_are_refused(family):
  """Catches scores of an output layer that nobody trained."""
  kind, folder, _, loaded = family
  notes = " ".join(import_.Imported(folder).notes)
  assert loaded.headless == ("no output layer" in notes) == (kind not in TIED)
  if kind in TIED:
    assert np.isfinite(score(loaded, TEXTS, "mlm")).all()
    return
  mode = "causal" if kind in CAUSAL else "mlm"
  assert "no output layer" in runs.told(score, loaded, TEXTS, mode)
  if mode == "mlm":
    told = runs.told(fill, loaded, ["the <mask> rest ."])
    assert "no output layer" in told


def test_it_trains_with_a_new_output_layer_and_goes_out(
  family, english, tmp_path
):
  """Catches a start without an output layer that training refuses."""
  kind, folder, _, loaded = family
  words = f"--text={english}/text --output={tmp_path}/data --seq_len=32"
  words += f" --tokenizer={folder}/tokenizer.json"
  runs.main("antlm_jax.commands.prepare", *words.split())
  letter = "C" if kind in CAUSAL else "M"
  runs.main(
    "antlm_jax.commands.train",
    f"--config=configs/continued.py:shrink,model={folder},curriculum=1{letter}",
    f"--workdir={tmp_path / 'run'}",
    f"--config.data.path={tmp_path / 'data'}",
    "--config.train.steps=1",
    "--config.schedule.warmup_steps=0",
  )
  trained = load(tmp_path / "run")
  assert not trained.headless
  shared = {n: p for n, p in loaded.params.items() if not n.startswith("head/")}
  for name, value in shared.items():  # one step moves them a little
    np.testing.assert_allclose(trained.params[name], value, atol=1e-2)
  form = "causal" if kind in CAUSAL else "bidirectional"
  (path,) = export.export_model(trained, tmp_path / "out", [form])
  model = hub.opened(path, form)
  ids = np.random.default_rng(0).integers(4, 400, (1, 24))
  ours = hub.our_logits(trained, ids, AttentionMask(kind in CAUSAL))
  with torch.no_grad():
    theirs = model(torch.tensor(ids)).logits.numpy()
  np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_it_goes_out_as_it_came(family, tmp_path):
  """Catches an export that invents an output layer, or loses a tensor."""
  kind, _, model, loaded = family
  form = "causal" if kind in CAUSAL else "bidirectional"
  (path,) = export.export_model(loaded, tmp_path / "out", [form])
  opened, info = transformers.AutoModel.from_pretrained(
    path, output_loading_info=True
  )
  assert not info["missing_keys"] and not info["mismatched_keys"]
  assert kind in TIED or not info["unexpected_keys"]
  theirs = {n: t.numpy() for n, t in opened.state_dict().items()}
  own = {n: t.numpy() for n, t in model.state_dict().items()}
  assert helpers.equal(theirs, own)
  (path / NATIVE).unlink()
  again = import_.Imported(path)
  assert helpers.equal(dict(again.params), dict(loaded.params))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_sentence_transformers_own_files_are_read(pooling, tmp_path):
  """Catches vectors of another pooling, prompt or length than the folder's."""
  sentence = pytest.importorskip("sentence_transformers")
  modules = importlib.import_module("sentence_transformers.models")
  random_models.save(tmp_path / "run", random_models.tokenizer(), tied=False)
  (path,) = export.export_model(
    load(tmp_path / "run"), tmp_path / "hf", ["bidirectional"]
  )
  made = sentence.SentenceTransformer(
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
  texts = [*TEXTS, " ".join(TEXTS * 3)]
  for prompt, theirs in (
    ("query", made.encode_query(texts)),
    ("document", made.encode_document(texts)),
  ):
    ours = embed(loaded, texts, prompt=prompt, quiet=True)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
