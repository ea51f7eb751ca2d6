"""Folders that sentence-transformers, PEFT and fine-tuning leave behind."""

import json
import shutil

import numpy as np
import pytest

from antlm_jax import embed, prepare
from antlm_jax.commands import import_ as import_command
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.evals import score as score_command
from antlm_jax.evals.finetuning import ranking
from antlm_jax.evals.finetuning.classification import Classifier, LinearHead
from antlm_jax.evals.zero_shot.task import evaluate
from antlm_jax.hf import export, import_
from antlm_jax.hf.architecture import EXPORT_RECORD
from antlm_jax.inference.model import load
from tests import helpers, random_models, runs
from tests.hub import import_error

TRANSFORMER = {
  "path": "0_Transformer",
  "type": "sentence_transformers.models.Transformer",
}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "a.Normalize"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
MEAN = {"pooling_mode": "mean"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  """A run, and its export as others write it."""
  folder = tmp_path_factory.mktemp("model")
  random_models.save(folder / "run", random_models.tokenizer())
  whole = load(folder / "run")
  (path,) = export.export_model(whole, folder / "hf", ["bidirectional"])
  (path / EXPORT_RECORD).unlink()
  return whole, path


def start_error(path):
  """Returns the message that refuses to start a training from a folder."""
  return runs.told(lambda: import_.open_start(str(path)).meta)


@pytest.fixture
def foreign(exported, tmp_path):
  path = tmp_path / "foreign"
  shutil.copytree(exported[1], path)
  return path


def write(path, content):
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(content))


def sentences(path, pooling, *more):
  """Moves a model into a subfolder, as old sentence-transformers do."""
  inner = path.with_name("inner")
  path.rename(inner)
  path.mkdir()
  inner.rename(path / TRANSFORMER["path"])
  write(path / "modules.json", [TRANSFORMER, POOLING, *more])
  write(path / POOLING["path"] / "config.json", pooling)


def warnings(path):
  return [n for n in import_.Imported(path).notes if n.startswith("warning:")]


@pytest.mark.parametrize(
  ("pooling", "last", "said"),
  [
    (
      {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False},
      NORMALIZE,
      (),
    ),
    (MEAN, NORMALIZE, ()),
    ({"pooling_mode_cls_token": True}, NORMALIZE, ("1_Pooling (cls_token)",)),
    (
      MEAN | {"include_prompt": False},
      NORMALIZE,
      ("1_Pooling (mean, without the prompt's tokens)",),
    ),
    ({"pooling_mode": ["mean", "max"]}, NORMALIZE, ("1_Pooling (mean, max)",)),
    (MEAN, DENSE, ("module 2_Dense (Dense) is left out",)),
  ],
)
def test_the_transformer_of_a_subfolder_is_read(
  exported, foreign, pooling, last, said
):
  """Catches a folder called no model, and another pooling, or a layer of the
  vectors, left out in silence."""
  sentences(foreign, pooling, last)
  found = import_.open_start(str(foreign))
  assert isinstance(found, import_.Imported)
  assert helpers.equal(dict(found.params), dict(exported[0].params))
  assert found.path == foreign / TRANSFORMER["path"]
  told = warnings(foreign)
  assert len(told) == len(said)
  assert all(part in note for part, note in zip(said, told, strict=True))


def test_prompts_that_are_left_out_are_named(foreign):
  """Catches vectors without the prompt that a plain text begins with."""
  sentences(foreign, MEAN, NORMALIZE)
  prompts = {"search_query": "q: ", "search_document": "d: ", "query": "a "}
  about = {"prompts": prompts, "default_prompt_name": "search_document"}
  write(foreign / "config_sentence_transformers.json", about)
  imported = import_.Imported(foreign)
  assert imported.task.settings["prompts"] == ["a ", ""]
  (told,) = warnings(foreign)
  assert "'d: ' (default_prompt_name=search_document)" in told
  assert "prompts search_query, search_document are" in imported.notes[-2]


def test_prompts_of_another_pooling_are_named(foreign):
  """Catches prompts that vanish, and --prompt that changes nothing."""
  sentences(foreign, {"pooling_mode": "cls"}, NORMALIZE)
  about = {"prompts": {"query": "a ", "document": ""}}
  write(foreign / "config_sentence_transformers.json", about)
  imported = import_.Imported(foreign)
  assert imported.task is None
  assert any("the prompts query are left out" in n for n in imported.notes)
  run = import_.write_imported_run(imported, foreign.with_name("run"))
  said = runs.told(lambda: embed(load(run), ["a cat"], prompt="query"))
  assert said == "prompt='query': the model has no prompts"


@pytest.mark.parametrize("attention", ["causal", "bidirectional"])
def test_an_embedder_keeps_its_attention(attention, tmp_path):
  """Catches the attention of the pretraining in place of the embedder's."""
  head = ranking.Towers(0.05, ("", ""))
  tuned = random_models.tuned(tmp_path, head, attention=attention)
  (path,) = export.export_model(tuned, tmp_path / "hf")
  import_.write_imported_run(import_.Imported(path), tmp_path / "again")
  again, texts = load(tmp_path / "again"), ["the dogs rest .", "a cat sat ."]
  assert again.task.attention == attention
  np.testing.assert_allclose(
    embed(again, texts), embed(tuned, texts), atol=1e-6
  )


def test_a_causal_model_without_a_task_is_embedded_causally(foreign):
  """Catches vectors of an attention that the model never had in training."""
  sentences(foreign, MEAN)
  inner = foreign / TRANSFORMER["path"]
  fields = json.loads((inner / "config.json").read_text())
  write(inner / "config.json", fields | {"model_type": "llama"})
  run = import_.write_imported_run(
    import_.Imported(foreign), foreign.with_name("run")
  )
  loaded, texts = load(run), ["the dogs rest .", "a cat sat ."]
  causal = embed(loaded, texts, attention="causal")
  np.testing.assert_array_equal(embed(loaded, texts), causal)
  assert np.abs(causal - embed(loaded, texts, attention="bidirectional")).max()


@pytest.mark.parametrize(
  ("limits", "own", "longest"),
  [
    ({}, {}, 48),
    ({"max_seq_length": 16}, {"model_max_length": 20}, 16),
    ({"do_lower_case": True}, {"model_max_length": 20}, 20),
    ({}, {"do_lower_case": True}, 48),
    ({"max_seq_length": None}, {"model_max_length": 10**30}, 48),
  ],
)
def test_its_longest_text_is_that_of_sentence_transformers(
  foreign, limits, own, longest
):
  """Catches vectors of longer texts, lower case left out in silence, and a
  false warning if the tokenizer itself writes lower case."""
  (foreign / "tokenizer_config.json").unlink()
  sentences(foreign, MEAN, NORMALIZE)
  inner = foreign / TRANSFORMER["path"]
  write(inner / "sentence_bert_config.json", limits)
  write(inner / "tokenizer_config.json", own)
  assert import_.Imported(foreign).meta.row_tokens == longest
  told = any("lower case" in note for note in warnings(foreign))
  assert told == ("do_lower_case" in limits)
  tokenizer = json.loads((inner / "tokenizer.json").read_text())
  steps = [{"type": "Lowercase"}, tokenizer["normalizer"]]
  tokenizer["normalizer"] = {"type": "Sequence", "normalizers": steps}
  write(inner / "tokenizer.json", tokenizer)
  assert not any("lower case" in note for note in warnings(foreign))


@pytest.mark.parametrize(
  ("modules", "said"),
  [
    ("[", "modules.json: not JSON"),
    ('{"0": 1}', "is not a list of modules with types and paths"),
    ('[{"type": "a.Transformer", "path": "../b"}]', "names '../b', not in"),
    ('[{"type": "a.Transformer", "path": "/etc"}]', "names '/etc', not in"),
    ('[{"type": "a.WordEmbeddings", "path": "0"}]', "it has no config.json"),
  ],
)
def test_a_damaged_list_of_modules_is_refused(tmp_path, modules, said):
  """Catches a traceback, and files that are read outside of the folder."""
  (tmp_path / "modules.json").write_text(modules)
  assert said in start_error(tmp_path)


@pytest.mark.parametrize(
  ("fields", "adapted"),
  [
    ({"task_type": "CAUSAL_LM"}, "AutoModelForCausalLM"),
    ({"task_type": "FEATURE_EXTRACTION"}, "AutoModel"),
    (
      {"auto_mapping": {"base_model_class": "EuroBertForMaskedLM"}},
      "EuroBertForMaskedLM",
    ),
  ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_tells_how_to_merge_it(foreign, whole, fields, adapted):
  """Catches a base model that is read without its adapter, as if it were all.

  transformers applies an adapter even if the folder also holds a whole model.
  """
  if not whole:
    shutil.rmtree(foreign)
  write(
    foreign / "adapter_config.json",
    {"base_model_name_or_path": "org/base", **fields},
  )
  merge = (
    f"PeftModel.from_pretrained({adapted}.from_pretrained('org/base'),"
    f" '{foreign}').merge_and_unload()"
  )
  assert merge in start_error(foreign)


@pytest.mark.parametrize(
  ("location", "model"),
  [
    ("foreign", "foreign"),
    ("some/llama", "some/llama"),
    ("hf://some/llama@v1", "some/llama@v1"),
    ("mine.Q4_1.gguf", "mine.Q4_1.gguf"),
  ],
)
def test_a_model_that_is_no_run_tells_how_to_import_it(
  foreign, monkeypatch, location, model
):
  """Catches an error that says only that there is no checkpoint."""
  monkeypatch.chdir(foreign.parent)
  remedy = f"`antlm import --model={model} --workdir=RUN`, or in Python import"
  words = "--data=pairs", f"--checkpoint={location}"
  for call in (
    lambda: load(location),
    lambda: evaluate(location, "blimp", "pairs"),
    lambda: score_command.main(["--task=blimp", *words]),
  ):
    assert remedy in runs.told(call)


def test_a_missing_tokenizer_tells_how_to_write_it(foreign):
  """Catches an error that names the file, but not the way to make it."""
  (foreign / "tokenizer.json").unlink()
  call = "AutoTokenizer.from_pretrained({!r}).save_pretrained({!r})"
  none = call.format("NAME OF ITS BASE MODEL", str(foreign))
  assert none in import_error(foreign)
  (foreign / "vocab.txt").write_text("[PAD]\n")
  assert call.format(str(foreign), str(foreign)) in import_error(foreign)


def test_a_subfolder_on_the_hub(exported, foreign, hub_cache):
  """Catches a subfolder that the download leaves out."""
  sentences(foreign, {"pooling_mode_cls_token": True})
  hub_cache(foreign, "some/embedder")
  found = import_.Imported("some/embedder")
  assert helpers.equal(dict(found.params), dict(exported[0].params))
  assert any("1_Pooling (cls_token)" in note for note in found.notes)


def test_a_name_without_a_tokenizer(foreign, hub_cache):
  """Catches a remedy that would write into the cache."""
  (foreign / "tokenizer.json").unlink()
  hub_cache(foreign, "some/llama")
  said = import_error("some/llama")
  assert said.startswith("some/llama has no tokenizer.json: run `hf download")
  assert "AutoTokenizer.from_pretrained('FOLDER')" in said


HEADS = {
  "llama": Classifier(("a", "b", "c"), "mean", norms=False),
  "ltg_bert": Classifier(("a", "b", "c"), "first"),
  "modernbert": Classifier(("a", "b"), "mean", norms=False, last_norm=True),
  "ultrabert": LinearHead(("a", "b"), "mean"),
}


@pytest.mark.sample(2, 2)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("encoder", HEADS)
def test_a_fine_tuned_export_is_an_encoder_again(encoder, own, tmp_path):
  """Catches an own export that import refuses, and a ModernBERT classifier's
  `head.dense` that is read as a part of the output layer."""
  base = random_models.tuned(tmp_path, HEADS[encoder], encoder)
  (folder,) = export.export_model(base, tmp_path / "hf")
  if not own:
    (folder / EXPORT_RECORD).unlink()
  made = import_command.import_model(folder, tmp_path / "again", quiet=True)
  expected = {n: p for n, p in base.params.items() if "head/" not in n}
  found = {n: p for n, p in made.params.items() if "head/" not in n}
  assert helpers.equal(found, expected)
  assert made.headless == any("head/" in name for name in base.params)
  (told,) = (n for n in import_.Imported(folder).notes if "fine-tuned" in n)
  assert "classifier.weight" in told
  export.export_model(made, tmp_path / "out", ["bidirectional"])


@pytest.mark.parametrize("model_type", ["gpt2", None])
def test_prepare_takes_the_tokenizer_of_any_folder(
  tmp_path, capsys, model_type
):
  """Catches --tokenizer=FOLDER that needs a model that antlm computes."""
  lines = [f"the cat number {i} sat on the mat" for i in range(300)]
  trained = Tokenizer.train(lines, 300)
  folder = tmp_path / "other"
  folder.mkdir()
  (folder / "tokenizer.json").write_text(trained.to_json())
  if model_type:
    fields = {"model_type": model_type, "vocab_size": trained.vocab_size}
    (folder / "config.json").write_text(json.dumps(fields))
  made = prepare(lines, tokenizer=folder, seq_len=16)
  assert made.tokenizer.to_json() == trained.to_json()
  said = capsys.readouterr().out
  assert ("only its tokenizer is read" in said) == bool(model_type)
