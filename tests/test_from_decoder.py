"""From a decoder to an encoder: configs/from_decoder.py, and its roads."""

import pathlib

import numpy as np
import pytest

from antlm_jax import config, models
from antlm_jax.commands.export import export
from antlm_jax.commands.prepare import prepare
from antlm_jax.data import toy_english
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.evals.embed import embed
from antlm_jax.inference.model import load
from antlm_jax.objectives.objective import OBJECTIVES
from tests import hub, random_models, runs

NAMES = {"<s>": "bos", "</s>": "eos"}


def begun(folder: pathlib.Path, encoder="llama", **changes) -> pathlib.Path:
  """Writes a random decoder of transformers, whose tokenizer has no mask."""
  run = random_models.save(
    folder / "run", random_models.tokenizer(), encoder, **changes
  )
  loaded = random_models.with_curriculum(load(run), "1C")
  (made,) = export(loaded, folder / "hf", quiet=True)
  (made / "antlm_jax.json").unlink()
  file = made / "tokenizer.json"
  file.write_text(random_models.without_mask(file.read_text()))
  return made.path


def loaded_config(folder, *words):
  spec = ",".join((f"from_decoder:model={folder}", *words))
  return config.load_config(spec)


def test_phases_schedule_and_masks(tmp_path):
  """Catches phases of another length, and a setting that is overwritten."""
  folder = begun(tmp_path)
  made = loaded_config(folder, "steps=50", "objective=N", "mask_ratio=0.2")
  assert made.curriculum == "5C+45N steps"
  assert loaded_config(folder, "causal=0").curriculum == "2000M steps"
  (causal, masked) = made.trained
  assert causal == OBJECTIVES["C"]
  assert (masked.mask_ratio, masked.mask_token, masked.shift) == (0.2, 1.0, 1)
  rate = made.schedule.build(50)
  peak = made.schedule.peak_lr
  # Three steps of warmup, ten of decay.
  assert [round(float(rate(s)) / peak, 4) for s in (0, 2, 39)] == [0.3333, 1, 1]
  assert abs(float(rate(44)) / peak - 0.5) < 1e-6 and float(rate(49)) == 0


@pytest.mark.parametrize(
  "encoder, changes, words, said",
  [
    ("llama", {"windows": (8, 0)}, "", "no eurobert with model.windows"),
    ("modernbert", {}, "objective=N", "train with M"),
    ("llama", {}, "causal=1", "leaves no step with masks"),
  ],
)
def test_what_cannot_become_an_encoder_is_told_before_training(
  encoder, changes, words, said, tmp_path
):
  """Catches a run whose encoder turns out not to export after hours."""
  run = random_models.save(
    tmp_path / "run", random_models.tokenizer(), encoder, **changes
  )
  assert said in runs.told(loaded_config, run, words or "steps=9")


def test_an_encoder_is_refused(tmp_path):
  """Catches an encoder that would train causally without a word."""
  run = random_models.save(tmp_path / "run", random_models.tokenizer())
  loaded = random_models.with_curriculum(load(run), "1M")
  (folder,) = export(loaded, tmp_path / "hf", quiet=True)
  line = runs.told(loaded_config, folder.path)
  assert f"--config=continued:model={folder.path}" in line


def test_a_window_of_all_layers_is_dropped_for_rows_within_it(tmp_path):
  """Catches Mistral's window, with which no encoder of transformers exists."""
  folder = begun(tmp_path, windows=(16,))
  made = loaded_config(folder)
  assert (made.model.windows, made.model.max_seq_len) == ((), 16)
  assert models.build_model(made.model, 400).config.layer_windows == (0, 0)


@pytest.mark.parametrize("names", ["", "<s>", "</s>", "<s> </s>"])
def test_documents_get_the_special_tokens_that_a_tokenizer_has(
  names, tmp_path, capsys
):
  """Catches a default boundary that most decoders' tokenizers refuse."""
  text = random_models.tokenizer().to_json()
  for name in NAMES.keys() - {*names.split()}:
    text = text.replace(f'"{name}"', f'"other{NAMES[name]}"')
  own = Tokenizer.from_json(text)
  lines = list(toy_english.make_sentences(0, 300))
  made = prepare(lines, tokenizer=own, seq_len=16)
  said = capsys.readouterr().out
  boundary = "_".join(NAMES[name] for name in names.split()) or "none"
  assert made.manifest.settings["boundary"] == boundary
  assert f"boundary {boundary}:" in said
  rows, _ = made.train.read(range(len(made.train)))
  for name in names.split():
    assert np.sum(rows == getattr(own, f"{NAMES[name]}_id")) > 10


MARKS = [mark for mark in hub.MARKS if mark.name != "usefixtures"]


@pytest.mark.parametrize(
  "objective",
  [
    pytest.param("M", marks=MARKS),
    pytest.param("N", marks=[*MARKS, pytest.mark.nightly]),
  ],
)
def test_an_exported_encoder_gives_our_vectors(
  objective, tmp_path, capsys, offline
):
  """Catches a mask, a frame or a pooling that an export has otherwise."""
  sbert = pytest.importorskip("sentence_transformers")
  folder = begun(tmp_path)
  lines = list(toy_english.make_sentences(0, 600))
  (tmp_path / "mine.txt").write_text("\n".join(lines))
  words = f"--text={tmp_path}/mine.txt", f"--output={tmp_path}/data"
  words += f"--tokenizer={folder}", "--seq_len=16", "--documents=line"
  runs.main("antlm_jax.commands.prepare", *words)
  spec = (
    f"from_decoder:model={folder},objective={objective},steps=12,causal=.25"
  )
  words = f"--config={spec}", f"--workdir={tmp_path}/new"
  words += f"--config.data.path={tmp_path}/data", "--config.eval.rows=8"
  words += "--config.train.batch_size=8", "--config.schedule.peak_lr=3e-3"
  runs.main("antlm_jax.commands.train", *words)
  assert "<mask> is added to the vocabulary" in capsys.readouterr().out
  loaded = load(tmp_path / "new")
  assert loaded.model.config.vocab_size == 401
  (out,) = export(
    loaded,
    tmp_path / "out",
    attention="bidirectional",
    sentence_transformers=True,
    quiet=True,
  )
  assert "SentenceTransformer" in out.classes
  model = sbert.SentenceTransformer(
    str(out), device="cpu", trust_remote_code=objective == "N"
  )
  ours, texts = embed(loaded, lines[-9:], quiet=True), lines[-9:]
  np.testing.assert_allclose(model.encode(texts), ours, atol=1e-5)
  assert np.abs(ours - embed(load(tmp_path / "run"), texts)).max() > 1e-3
