"""Export and import of transformers folders, without PyTorch."""

import dataclasses
import json
import pathlib
import re
import shutil
import sys

import huggingface_hub
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import tokenizers

from antlm_jax import config as config_lib
from antlm_jax.commands import export as export_command
from antlm_jax.commands import import_ as import_command
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import export, hub, import_
from antlm_jax.hf import tokenizer as hf_tokenizers
from antlm_jax.hf import weights as folders
from antlm_jax.hf.architecture import ATTENTIONS, EXPORT_RECORD
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference import framing
from antlm_jax.inference.model import load
from antlm_jax.inference.model import write_checkpoint as write_model
from antlm_jax.training import checkpoint
from tests import helpers, random_models, runs
from tests.hub import FakeHub, import_error

LTG_BERT = {
  "encoder": "ltg_bert",
  "position_buckets": 8,
  "longest_distance": 20,
}
VARIANTS = {
  "grouped": {},
  "untied": {"tied": False, "kv_heads": 2, "qk_norm": True},
  "gemma": {"encoder": "gemma", "rope_scaling": (8.0,)},
  "ltg_bert": LTG_BERT,
  "gpt_bert": LTG_BERT | {"attention_gate": True, "depth_weights": True},
  "mntp": {},
  "modernbert": {"encoder": "modernbert"},
}


NORM, HEAD = "model.norm.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def tokenizer():
  return random_models.tokenizer()


@pytest.fixture(scope="module", params=VARIANTS)
def loaded(request, tokenizer, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param)
  random_models.save(folder, tokenizer, **VARIANTS[request.param])
  loaded = load(folder)
  if request.param == "mntp":
    return random_models.with_curriculum(loaded, "24N")
  return loaded


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
  """A llama, and its export as a causal model."""
  run = tmp_path_factory.mktemp("run")
  random_models.save(run, tokenizer, tied=False)
  loaded = load(run)
  (path,) = export.export_model(loaded, run / "hf", ["causal"])
  return loaded, path


@pytest.fixture
def foreign(llama, tmp_path):
  """The folder as others write it, without our own file."""
  path = tmp_path / "foreign"
  shutil.copytree(llama[1], path)
  (path / EXPORT_RECORD).unlink()
  return path


def contents(path):
  return {
    str(p.relative_to(path)): p.read_bytes()
    for p in pathlib.Path(path).rglob("*")
    if p.is_file()
  }


def change(path, **fields):
  """Changes fields of a folder's config.json."""
  config = json.loads((path / "config.json").read_text())
  (path / "config.json").write_text(json.dumps(config | fields))


def tensors_of(path):
  return safetensors.numpy.load_file(path / folders.SINGLE)


def rewrite(path, changes):
  """Changes a folder's tensors; None takes one out."""
  tensors = {
    n: x for n, x in (tensors_of(path) | changes).items() if x is not None
  }
  safetensors.numpy.save_file(tensors, path / folders.SINGLE)


@pytest.mark.sample(1, 2)
def test_export_import_export_is_bit_for_bit(loaded, tmp_path):
  paths = export.export_model(loaded, tmp_path / "hf", ATTENTIONS)
  inodes = {(path / folders.SINGLE).stat().st_ino for path in paths}
  # One file, but ModernBERT's decoder has other names of tensors.
  assert len(inodes) == 1 + (loaded.config.model.name == "modernbert")
  for form, folder in zip(ATTENTIONS, paths, strict=True):
    imported = import_.Imported(folder)
    again = load(import_.write_imported_run(imported, tmp_path / form))
    assert helpers.equal(again.params, loaded.params)
    assert again.step == loaded.step == random_models.STEP
    assert again.config.to_dict() == loaded.config.to_dict()
    assert again.tokenizer.to_json() == loaded.tokenizer.to_json()
    export.export_model(again, tmp_path / f"again-{form}", ATTENTIONS)
    assert contents(tmp_path / f"again-{form}") == contents(tmp_path / "hf")


@pytest.mark.sample(2, 3)
@pytest.mark.parametrize("form", ATTENTIONS)
def test_without_our_file_the_names_alone_give_it_back(loaded, form, tmp_path):
  export.export_model(loaded, tmp_path / "hf", [form])
  (tmp_path / "hf" / EXPORT_RECORD).unlink()
  imported = import_.Imported(tmp_path / "hf")
  assert helpers.equal(dict(imported.params), dict(loaded.params))
  model = imported.meta.config.model
  for name in ARCHITECTURES[model.name].settings:
    if name != "vocab_size":
      assert getattr(model, name) == getattr(loaded.config.model, name), name
  masks = "1N" if loaded.mask_shift else "1M"
  curricula = {"causal": "1C", "bidirectional": masks}
  assert imported.meta.config.curriculum == curricula[form]
  again = import_.write_imported_run(imported, tmp_path / "run")
  export.export_model(load(again), tmp_path / "b", [form])
  assert "imported its weights" in (tmp_path / "b/README.md").read_text()


def test_shards_hold_the_same(llama, tmp_path):
  loaded, whole = llama
  (path,) = export.export_model(
    loaded, tmp_path / "hf", ["causal"], shard_bytes=50_000
  )
  files = sorted(path.path.glob("*.safetensors"))
  assert len(files) > 2
  assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
  # A tensor larger than a shard has a separate file.
  assert all(
    f.stat().st_size < 60_000 or len(safetensors.numpy.load_file(f)) == 1
    for f in files
  )
  assert helpers.equal(
    import_.Imported(path).params, import_.Imported(whole).params
  )
  # All files follow the umask.
  assert {f.stat().st_mode for f in path.path.iterdir()} == {
    (path / "README.md").stat().st_mode
  }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_dtype_rounds_once(llama, dtype, tmp_path):
  loaded, whole = llama
  (path,) = export.export_model(loaded, tmp_path / "a", ["causal"], dtype)
  assert json.loads((path / "config.json").read_text())["dtype"] == dtype
  imported = import_.Imported(path)
  exact = import_.Imported(whole).params
  step = 2.0 ** (-8 if dtype == "bfloat16" else -11)
  for name, value in imported.params.items():
    np.testing.assert_allclose(value, exact[name], rtol=step, atol=1e-7)
  again = load(import_.write_imported_run(imported, tmp_path / "run"))
  (path_again,) = export.export_model(again, tmp_path / "b", ["causal"], dtype)
  assert contents(path_again) == contents(path)


def test_the_form_is_the_one_it_was_trained_in(llama):
  def forms(curriculum):
    changed = random_models.with_curriculum(llama[0], curriculum)
    return export.trained_attentions(changed)

  assert forms("24C") == ("causal",)
  assert forms("24M") == forms("24N") == ("bidirectional",)
  assert forms("4C+16M+4C") == forms("C:N=1:15") == ATTENTIONS
  assert forms("2P") == ("causal",)
  blocks = random_models.with_curriculum(llama[0], "8D")
  changed = config_lib.load_config(
    blocks.config, {"objectives.D.attention": "block"}
  )
  blocks = random_models.with_meta(blocks, config=changed)
  assert blocks.mask_shift == 1
  assert "only with attention in blocks" in runs.told(
    export.trained_attentions, blocks
  )


def test_generation_draws_no_special_token_but_the_end(llama):
  config = json.loads((llama[1] / "generation_config.json").read_text())
  tokenizer = llama[0].tokenizer
  others = {tokenizer.pad_id, tokenizer.bos_id, tokenizer.mask_id}
  assert set(config["suppress_tokens"]) == others
  assert config["eos_token_id"] == tokenizer.eos_id
  # On the right, transformers continues a shorter text of a batch after pads.
  settings = json.loads((llama[1] / "tokenizer_config.json").read_text())
  assert settings["padding_side"] == "left"


def test_the_card_tells_the_curriculum_and_the_figures(tokenizer, tmp_path):
  """Catches results that the card, or the Hub's model-index, lacks."""
  run = random_models.save(tmp_path / "run", tokenizer)
  record = {"step": random_models.STEP, "eval/mlm/loss": 3.25}
  record |= {"eval/clm/perplexity": 20.0, "eval/clm/b/loss": 3.0}
  (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
  pairs = run / "evals" / "blimp" / f"{random_models.STEP}-mlm"
  pairs.mkdir(parents=True)
  summary = {
    "request": {"mode": "mlm", "step": random_models.STEP, "limit": 0},
    "macro_accuracy": 0.7123,
    "pairs": 1000,
  }
  (pairs / "summary.json").write_text(json.dumps(summary))
  loaded = load(run)
  settings = config_lib.load_config(
    loaded.config,
    {
      "data.path": f"a={tmp_path}/own/data,b={tmp_path}/b",
      "init.checkpoint": str(tmp_path / "base/checkpoints/9"),
    },
  )
  loaded = random_models.with_meta(loaded, config=settings, row_tokens=32)
  facts = {"license": "mit", "language": ["en", "de"], "base_model": "me/base"}
  paths = export.export_model(loaded, tmp_path / "hf", facts=facts)
  for path in paths:
    text = (path / "README.md").read_text()
    front = huggingface_hub.ModelCard(text).data
    assert (front.license, front.language) == ("mit", ["en", "de"])
    assert front.base_model == "me/base"
    for row in "Initial checkpoint | base", "Longest row | 32 tokens":
      assert f"| {row} |" in text
    assert "| Data | a=data,b=b |" in text
    # No file contains a path of this machine.
    for file in contents(path).values():
      assert str(tmp_path).encode() not in file
    tokenizer_config = json.loads((path / "tokenizer_config.json").read_text())
    assert tokenizer_config["model_max_length"] == 32
    assert "`4C+16M+4C` (clm, mlm)" in text
    own = "held-out text of a=data,b=b"
    assert f"| {own}: loss (mlm, nats) | 3.250 |" in text
    assert "| blimp: accuracy (mlm, 1,000 pairs) | 71.2 % |" in text
    found = {
      (r.task_type, r.dataset_name, r.metric_type): r.metric_value
      for r in front.eval_results
    }
    assert found == {
      ("fill-mask", own, "loss"): 3.25,
      ("text-generation", own, "perplexity"): 20.0,
      ("text-generation", "held-out text of b", "loss"): 3.0,
      ("fill-mask", "blimp", "accuracy"): 0.7123,
    }
  assert "AutoModelForCausalLM" in (paths[0] / "README.md").read_text()
  assert "AutoModelForMaskedLM" in (paths[1] / "README.md").read_text()


def test_the_cards_text_has_no_markup_of_names(tokenizer, tmp_path):
  """Catches HTML, links and headings in a stranger's names of data and runs."""
  loaded = load(random_models.save(tmp_path / "run", tokenizer))
  names = {
    "data.path": "<img src=x>\n# Title",
    "init.checkpoint": "[x](javascript:alert(1))",
    "curriculum": "4C\n+16M",
  }
  settings = config_lib.load_config(loaded.config, names)
  loaded = random_models.with_meta(loaded, config=settings)
  (path,) = export.export_model(loaded, tmp_path / "hf", ["causal"])
  card_text = huggingface_hub.ModelCard((path / "README.md").read_text()).text
  assert "| &lt;img src=x> # Title |" in card_text
  assert "| [x]\\(javascript:alert(1)) |" in card_text
  assert "the curriculum `4C +16M`." in card_text
  assert "$" not in card_text


def test_a_failure_leaves_nothing(llama, tmp_path, monkeypatch):
  def fail(*args):  # the error of a full disk
    raise safetensors.SafetensorError("I/O error: No space left on device")

  monkeypatch.setattr(safetensors.numpy, "save_file", fail)
  assert "No space left" in runs.told(
    export.export_model, llama[0], tmp_path / "hf"
  )
  assert not list(tmp_path.iterdir())


def test_a_name_on_the_hub(foreign, hub_cache, tmp_path):
  """A cached model is read; otherwise the error names a command."""
  words = [f"--workdir={tmp_path / 'run'}", "--model=some/llama"]
  assert "run `hf download some/llama" in runs.told(import_command.main, words)
  hub_cache(foreign, "some/llama")
  import_command.main(words)
  loaded = load(tmp_path / "run")
  here = import_.Imported(foreign)
  assert helpers.equal(dict(loaded.params), dict(here.params))
  tokenizer = import_.open_tokenizer("some/llama")
  assert tokenizer.to_json() == loaded.tokenizer.to_json()
  (path,) = export.export_model(loaded, tmp_path / "hf", ["causal"])
  assert "base_model: some/llama\n" in (path / "README.md").read_text()
  assert not checkpoint.is_hub_name(
    tmp_path.name
  ) and not checkpoint.is_hub_name(str(foreign))


@pytest.mark.parametrize("begin", ["run", "run/checkpoints/7", "some/llama"])
def test_a_card_follows_a_start_on_this_machine_alone(
  tokenizer, tmp_path, monkeypatch, begin
):
  """Catches an endless loop for a run that starts from itself, and a download
  for a start whose folder is gone."""

  def download(name):
    raise AssertionError(f"{name} would be downloaded")

  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(hub, "download_model", download)
  random_models.save(tmp_path / "other", tokenizer)
  other = load(tmp_path / "other")
  settings = config_lib.load_config(other.config, {"init.checkpoint": begin})
  meta = dataclasses.replace(other.meta, config=settings)
  write_model(tmp_path / "run/checkpoints/7", 7, other.params, meta)
  (path,) = export.export_model(
    load(tmp_path / "run"), tmp_path / "hf", ["causal"]
  )
  front = huggingface_hub.ModelCard((path / "README.md").read_text()).data
  assert front.base_model is None


def test_pushing_a_step_is_a_revision(llama, tmp_path, monkeypatch):
  monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
  monkeypatch.setattr(FakeHub, "calls", [])
  words = [f"--checkpoint={llama[0].path.parents[1]}", "--as=both"]
  step = str(random_models.STEP)
  export_command.main(
    [*words, f"--output={tmp_path / 'a'}", "--repo=it", "--step", step]
  )
  for form in ATTENTIONS:
    name = f"me/it-{form}"
    assert ("repo", f"it-{form}") in FakeHub.calls
    assert ("branch", name, f"step-{step}") in FakeHub.calls
    assert ("upload", name, form, f"step-{step}") in FakeHub.calls
    card = (tmp_path / "a" / form / "README.md").read_text()
    assert f'from_pretrained("{name}", revision="step-{step}"' in card
    assert "FOLDER" not in card
  monkeypatch.setattr(FakeHub, "refuses", True)
  words = [words[0], f"--output={tmp_path / 'b'}", "--repo=me/it", "--as=both"]
  line = runs.told(export_command.main, [*words, "--private"])
  assert "to me/it-causal failed (Token is required), but " in line
  for form in ATTENTIONS:
    folder = tmp_path / "b" / form
    assert f"`hf upload me/it-{form} {folder} --private`" in line
    assert (folder / folders.SINGLE).exists()
    assert f'"me/it-{form}"' in (folder / "README.md").read_text()


def test_what_cannot_be_padded_is_padded_with_the_end(llama, foreign):
  spec = json.loads((foreign / "tokenizer.json").read_text())
  text = json.dumps(spec).replace('"<pad>"', '"<first>"')
  tokenizer = Tokenizer.from_json(text)
  assert tokenizer.pad_id is None
  made = hf_tokenizers.files(tokenizer, [1], [2], 48)
  assert made["tokenizer_config.json"]["pad_token"]["content"] == "</s>"
  assert made["tokenizer_config.json"]["padding_side"] == "right"
  assert hf_tokenizers.special_ids(tokenizer)["pad"] == tokenizer.eos_id


def test_a_foreign_folder_is_read(llama, foreign, tmp_path):
  """Reads a config of transformers 4 without the optional fields."""
  config = json.loads((foreign / "config.json").read_text())
  for name in ("rope_parameters", "head_dim", "attention_bias", "mlp_bias"):
    del config[name]
  config |= {"rope_scaling": None, "rope_theta": 10000.0}
  (foreign / "config.json").write_text(json.dumps(config))
  imported = import_.Imported(foreign)
  assert helpers.equal(dict(imported.params), dict(llama[0].params))
  assert (imported.step, imported.meta.boundary) == (0, framing.OWN)
  assert import_.Imported(foreign, boundary="eos").meta.boundary == "eos"
  settings = imported.meta.config.model
  assert settings.rope_theta == 10000.0
  assert not settings.tied


def test_our_file_and_their_config_must_agree(llama, tmp_path):
  path = tmp_path / "hf"
  shutil.copytree(llama[1], path)
  change(path, rms_norm_eps=1e-3)
  assert "disagree on norm_eps" in import_error(path)
  assert import_.Imported(llama[1], boundary="eos").meta.boundary == "eos"
  fields = json.loads((path / EXPORT_RECORD).read_text())
  (path / EXPORT_RECORD).write_text(json.dumps(fields | {"boundary": "both"}))
  assert "boundary 'both' is unknown" in import_error(path)


def framed(tokenizer, single):
  """Returns a tokenizer that adds special tokens itself, e.g. `<s> $A`."""
  backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
  ids = [(t, backend.token_to_id(t)) for t in single.split() if t != "$A"]
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single=single, special_tokens=ids
  )
  return Tokenizer(backend)


@pytest.mark.parametrize(
  ("single", "before", "after"),
  [("<s> $A", [1], []), ("$A </s>", [], [2]), ("<s> <mask> $A", [1, 3], [])],
)
def test_the_frame_is_what_the_tokenizer_adds(
  single, before, after, llama, foreign, tmp_path
):
  """The frame is also exported again unchanged."""
  own = framed(llama[0].tokenizer, single)
  (foreign / "tokenizer.json").write_text(own.to_json())
  imported = import_.Imported(foreign)
  path = import_.write_imported_run(imported, tmp_path / "run")
  loaded = load(path)
  assert [x.tolist() for x in loaded.frame] == [before, after]
  assert "its tokenizer adds" in imported.notes[0]
  assert len(imported.notes) == 1
  (out,) = export.export_model(loaded, tmp_path / "hf", ["bidirectional"])
  again = Tokenizer.load(out / "tokenizer.json")
  assert again.frame == (before, after)
  assert import_.Imported(out).meta.boundary == framing.OWN
  config = json.dumps({"add_bos_token": not before, "add_eos_token": None})
  (foreign / "tokenizer_config.json").write_text(config)
  note = import_.Imported(foreign).notes[1]
  assert note.startswith("warning: ") and "but tokenizer.json decides" in note


def test_a_boundary_needs_its_tokens(llama, foreign):
  """Catches --boundary=bos that means none in a tokenizer without bos."""
  path = foreign / "tokenizer.json"
  own = llama[0].tokenizer.to_json()
  path.write_text(own.replace('"<s>"', '"<mark>"'))
  (foreign / "tokenizer_config.json").unlink()
  assert import_.Imported(foreign, boundary="eos").meta
  said = runs.told(lambda: import_.Imported(foreign, boundary="bos_eos").meta)
  assert said.startswith(f"{path} has no bos token, which boundary bos_eos")


def test_a_chat_template_that_is_left_out_is_mentioned(foreign):
  """Catches a chat model that an export makes useless for chat in silence."""
  (foreign / "chat_template.jinja").write_text("{{ messages }}")
  assert "chat template is left out" in import_.Imported(foreign).notes[-1]


def without_mask(path):
  """Turns the mask of a tokenizer's file into a word."""
  path.write_text(random_models.without_mask(path.read_text()))


def test_a_tokenizer_without_a_mask_stays_so(llama, foreign):
  """The vocabulary does not grow before training needs a mask."""
  without_mask(foreign / "tokenizer.json")
  imported = import_.Imported(foreign)
  assert imported.meta.tokenizer.mask_id is None
  assert imported.params["head/kernel"].shape == (32, 400)
  assert "has no <mask>; training that needs it adds it" in imported.notes[-1]


def test_rows_without_a_token_get_one(llama, foreign):
  tensors, names = tensors_of(foreign), ("model.embed_tokens.weight", HEAD)
  padding = (0, 7), (0, 0)
  rewrite(foreign, {name: np.pad(tensors[name], padding) for name in names})
  size = llama[0].tokenizer.vocab_size
  change(foreign, vocab_size=size + 7)
  imported = import_.Imported(foreign)
  assert imported.meta.tokenizer.vocab_size == size + 7
  assert imported.meta.tokenizer.special[size:].all()
  assert "7 rows of the embedding have no token" in imported.notes[0]
  assert "<no_token_400>" in imported.notes[0]


def test_special_tokens_without_a_row_are_left_out(llama, foreign):
  """Catches a Gemma 3 that is refused for the name of its images."""
  tokenizer, path = llama[0].tokenizer, foreign / "tokenizer.json"
  more = tokenizer.extended(["<image_soft_token>"])
  path.write_text(more.to_json())
  imported = import_.Imported(foreign)
  assert imported.meta.tokenizer.vocab_size == tokenizer.vocab_size
  assert "special tokens from 400 on are left out" in " ".join(imported.notes)
  text = "an <image_soft_token> in a text"
  found = imported.meta.tokenizer.encode(text).tolist()
  assert found == tokenizer.encode(text).tolist()


def test_code_of_its_own_is_mentioned(foreign):
  """Catches a changed Llama, such as LLM2Vec's, imported as a common Llama."""
  change(foreign, auto_map={"AutoModel": "modeling_other.OtherModel"})
  (told,) = (n for n in import_.Imported(foreign).notes if "auto_map" in n)
  assert "it takes the model for transformers' llama" in told


def test_a_causal_folder_gives_the_vectors_of_embed(llama, tmp_path):
  """Catches a text without its end token, which `antlm embed` averages too."""
  how = {"attentions": ["causal"], "sentences": True}
  (path,) = export.export_model(llama[0], tmp_path / "hf", **how)
  found = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
  ours = framing.encode_framed(llama[0], "the dogs rest .").tolist()
  assert len(llama[0].frame[1]) and found.encode("the dogs rest .").ids == ours


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"model_type": "lfm2"}, "layers are short convolutions"),
    ({"model_type": "neobert"}, "rotates neighbouring channels"),
    ({"model_type": "gpt2"}, "model_type='gpt2' is not one of llama"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"attention_bias": True}, "weights are missing: model.layers.0.self_attn"),
    ({"attention_bias": 1}, "attention_bias=1 is not of type bool"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"sliding_window": 47}, "sliding_window is 47"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window is 0"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "factor is None"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
    ({"rope_parameters": {"rope_type": ["linear"]}}, "rope_type is ['linear']"),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters is {"),
    ({"layer_types": ["sliding_attention"]}, "layer_types"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"rope_theta": None, "rope_parameters": None}, "rope_theta is missing"),
    ({"vocab_size": -1}, "vocab_size is -1"),
    ({"max_position_embeddings": {}}, "max_position_embeddings={} is not of"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' is not of type float"),
    ({"num_attention_heads": 0}, "config.json: model.heads=0 is not at least"),
    ({"model_type": ["llama"]}, "model_type=['llama'] is not one of"),
    ({"layer_types": 3}, "layer_types is 3"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ({"eos_token_id": 400, "vocab_size": 410}, "eos_token_id=400"),
    ({"vocab_size": 399}, "has 400 tokens, but"),
    ({"vocab_size": 10**9}, "lm_head.weight [400, 32], not [1000000000, 32]"),
    ({"num_hidden_layers": 2**30}, "model.layers=1073741824 is not"),
    ({"num_hidden_layers": 3}, "weights are missing: model.layers.2."),
    ({"num_hidden_layers": 1}, "no place for model.layers.1."),
    ({"intermediate_size": 50}, "mlp.down_proj.weight [32, 48], not [32, 50]"),
  ],
)
def test_what_we_would_compute_differently_is_refused(foreign, fields, words):
  change(foreign, **fields)
  assert words in import_error(foreign)


@pytest.mark.parametrize(
  ("name", "content", "words"),
  [
    (NORM, None, f"weights are missing: {NORM}"),
    ("model.layers.0.x.weight", np.ones(1), "no place for model.layers.0.x."),
    (NORM, np.ones(32, np.int8), f"quantized weights cannot be read: {NORM}"),
    (NORM, np.full(32, np.nan), f"{NORM} has NaN"),
    (NORM, np.full(32, 1e300), "infinity or numbers too large"),
    ("config.json", None, "not a folder of a transformers model"),
    ("config.json", "{", "config.json, line 1: not JSON"),
    ("tokenizer.json", None, "has no tokenizer.json: write it with"),
    ("tokenizer.json", "{}", "is not a tokenizer.json"),
    ("model.safetensors", None, "holds no model.safetensors"),
    ("model.safetensors", "cut off", "is incomplete"),
  ],
)
def test_files_that_do_not_fit_are_named(foreign, name, content, words):
  if name.endswith(".weight"):
    rewrite(foreign, {name: content})
  elif content is None:
    (foreign / name).unlink()
  else:
    (foreign / name).write_text(content)
  assert words in import_error(foreign)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd"])
def test_an_index_stays_in_its_folder(foreign, name):
  (foreign / folders.SINGLE).rename(foreign.parent / "other.safetensors")
  index = {"weight_map": {NORM: name}}
  (foreign / folders.INDEX).write_text(json.dumps(index))
  assert "which is not in its folder" in import_error(foreign)


def test_a_tied_head_may_be_there_twice_if_it_is_the_same(foreign):
  change(foreign, tie_word_embeddings=True)
  assert "lm_head.weight differs" in import_error(foreign)
  rewrite(foreign, {HEAD: tensors_of(foreign)["model.embed_tokens.weight"]})
  assert "head/kernel" not in import_.Imported(foreign).params


def test_weights_of_an_encoder_alone_are_read(foreign):
  """transformers' AutoModel writes such weights."""
  rows = import_.Imported(foreign).params["embedding"]
  tensors = tensors_of(foreign)
  del tensors[HEAD]
  bare = {name.removeprefix("model."): x for name, x in tensors.items()}
  safetensors.numpy.save_file(bare, foreign / folders.SINGLE)
  change(foreign, tie_word_embeddings=True)
  assert np.array_equal(import_.Imported(foreign).params["embedding"], rows)


def test_a_full_disk_leaves_room_for_the_same_command(
  foreign, tmp_path, monkeypatch
):
  def full(where, text):
    raise UserError(f"cannot write {where}: No space left on device")

  words = [f"--model={foreign}", f"--workdir={tmp_path / 'run'}"]
  with monkeypatch.context() as patched:
    patched.setattr(import_.files, "write_text", full)
    assert "No space left" in runs.told(import_command.main, words)
  import_command.main(words)
  assert load(tmp_path / "run").step == 0


class Runs:
  """An object that runs code when it is unpickled."""

  def __reduce__(self):
    return print, ("it ran",)


def test_pickles_are_read_as_weights_alone(llama, foreign, capsys, monkeypatch):
  torch = pytest.importorskip("torch")
  tensors = tensors_of(foreign)
  (foreign / folders.SINGLE).unlink()
  path = foreign / "pytorch_model.bin"
  path.write_bytes(b"not whole")
  assert re.search(r"cannot read .*model.bin as weights", import_error(foreign))
  state = {name: torch.tensor(value) for name, value in tensors.items()}
  torch.save(state | {"more": Runs()}, path)
  assert re.search(r"only: Unsupported .*print was not", import_error(foreign))
  assert "it ran" not in capsys.readouterr().out
  torch.save(state, path)
  imported = import_.Imported(foreign).params
  assert imported.keys() == llama[0].params.keys()
  for name, value in imported.items():
    assert np.array_equal(value, llama[0].params[name]), name
  path.rename(foreign / "a.bin")
  shutil.copyfile(foreign / "a.bin", foreign / "b.bin")
  assert re.search(r"several pickles \(a.bin, b.bin\)", import_error(foreign))
  (foreign / "b.bin").unlink()
  monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
  assert re.search(
    r"may run code in torch 2.9.1.*2.10 or", import_error(foreign)
  )
  monkeypatch.setitem(sys.modules, "torch", None)
  assert re.search(
    r"install torch to read it, or convert", import_error(foreign)
  )


@pytest.mark.filterwarnings("ignore:.*(CSR|nested):UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "csr", "meta", "nested"])
def test_pickled_tensors_without_an_array_are_named(kind, foreign):
  """Catches a traceback, and values that would be invented."""
  torch = pytest.importorskip("torch")
  tensors = tensors_of(foreign)
  (foreign / folders.SINGLE).unlink()
  state = {name: torch.tensor(value) for name, value in tensors.items()}
  changed = {
    "sparse": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([t[:2], t[:3]]),
  }[kind]
  name = "model.embed_tokens.weight"
  state[name] = changed(state[name])
  torch.save(state, foreign / "pytorch_model.bin")
  assert re.search(f"has tensors .*: {name}; load the", import_error(foreign))


def test_a_workdir_that_is_a_model_stays_as_it_is(foreign):
  before = contents(foreign)
  words = [f"--model={foreign}", f"--workdir={foreign}"]
  assert "holds a tokenizer.json" in runs.told(import_command.main, words)
  assert contents(foreign) == before


def test_the_commands(llama, tmp_path, capsys):
  run, output = llama[0].path, tmp_path / "hf"
  words = (f"--checkpoint={run}", f"--output={output}")
  export_command.main([*words, "--as=both", "--sentence_transformers"])
  assert "opens with AutoModelForCausalLM" in capsys.readouterr().out
  assert (output / "bidirectional/modules.json").exists()
  assert f"{output} exists" in runs.told(export_command.main, words)
  words = (f"--model={output / 'causal'}", f"--workdir={tmp_path / 'run'}")
  import_command.main(words)
  assert runs.same_params(tmp_path / "run", run)
  assert "holds a run" in runs.told(import_command.main, words)


@pytest.mark.slow
def test_an_imported_model_is_continued(english, tmp_path, tokenizer, capsys):
  """The study's "start from an existing CLM model" from start to end."""
  random_models.save(tmp_path / "old", tokenizer)
  (path,) = export.export_model(
    load(tmp_path / "old"), tmp_path / "hf", ["causal"]
  )
  (path / EXPORT_RECORD).unlink()
  without_mask(path / "tokenizer.json")
  import_.write_imported_run(import_.Imported(path), tmp_path / "run")
  words = f"--text={english}/text --output={tmp_path}/data --seq_len=32"
  words += f" --tokenizer={tmp_path}/run/tokenizer.json"
  runs.main("antlm_jax.commands.prepare", *words.split())
  config = "configs/detour.py:shrink,model="
  words = (
    f"--config={config}{path}",  # not imported before
    f"--workdir={tmp_path / 'new'}",
    f"--config.data.path={tmp_path / 'data'}",
  )
  keep = "--config.init.optimizer=keep"
  kept = runs.refused("antlm_jax.commands.train", *words, keep)
  assert "init.optimizer=reset" in kept
  # A rate of 0 changes no parameter. The mask's new embedding is the mean.
  runs.main("antlm_jax.commands.train", *words, "--config.schedule.peak_lr=0")
  assert f"starting from {path}" in capsys.readouterr().out
  new, old = (load(tmp_path / name) for name in ("new", "run"))
  assert (old.tokenizer.mask_id, new.tokenizer.mask_id) == (None, 400)
  embedding = np.asarray(old.params["embedding"])
  expected = dict(old.params)
  mean = embedding.mean(axis=0, keepdims=True)
  expected["embedding"] = np.append(embedding, mean, axis=0)
  for name, value in new.params.items():
    np.testing.assert_allclose(value, expected[name], atol=1e-6, err_msg=name)
  assert np.array_equal(new.params["embedding"][:400], embedding)
