"""Our scores compared with the rules of BabyLM's pipelines.

This file reimplements the rules with an exported folder's model and tokenizer.

2026 (evaluation_pipeline/sentence_zero_shot) scores the tokens that end after
the context. Backend `mlm` masks one token at a time and reads its logits.
`mntp` reads the logits one position before. `causal` reads from left to right.

2024 (AutoMaskedLM by minicons) masks and scores every token other than padding,
cls_token and sep_token.
"""

import jax
import numpy as np
import pytest

from antlm_jax import fill, score
from antlm_jax.data import toy_english
from antlm_jax.hf import export
from antlm_jax.hf.architecture import ATTENTIONS
from antlm_jax.inference.model import load
from antlm_jax.masks import BIDIRECTIONAL
from tests import hub, random_models

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = hub.MARKS


FAMILIES = {"llama": {"tied": False}, "ltg_bert": {"encoder": "ltg_bert"}}
FAMILIES["gpt_bert"] = {"encoder": "ltg_bert"}
FAMILIES["gpt_bert"] |= {"attention_gate": True, "depth_weights": True}
SENTENCES = list(toy_english.make_sentences(1, 12))
TEXTS = ("the <mask> often rest .", "a <mask> rests<mask>", "<mask><mask> .")
TRUSTED = {"trust_remote_code": True}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
  """A random model of ours."""
  folder = tmp_path_factory.mktemp(request.param)
  tokenizer = random_models.tokenizer()
  random_models.save(folder, tokenizer, **FAMILIES[request.param])
  return load(folder)


class Folder:
  """A model as if trained by a curriculum, and its exported folders."""

  def __init__(self, loaded, curriculum, path):
    self.loaded = random_models.with_curriculum(loaded, curriculum)
    paths = export.export_model(self.loaded, path, ATTENTIONS)
    self.paths = dict(zip(ATTENTIONS, paths, strict=True))
    self.tokenizers = {
      a: transformers.AutoTokenizer.from_pretrained(path, **TRUSTED)
      for a, path in self.paths.items()
    }

  def open(self, auto="AutoModelForMaskedLM"):
    path = self.paths["causal" if "Causal" in auto else "bidirectional"]
    found = getattr(transformers, auto).from_pretrained(path, **TRUSTED)
    return found.eval()


@pytest.fixture(params=["24N", "24M"])
def folder(request, family, tmp_path):
  return Folder(family, request.param, tmp_path / "hf")


@pytest.fixture
def shifted(family, tmp_path):
  return Folder(family, "24N", tmp_path / "hf")


def of_2026(folder, model, backend, context, text):
  form = "causal" if backend == "causal" else "bidirectional"
  tokenizer, joined = folder.tokenizers[form], f"{context} {text}".lstrip()
  out = tokenizer(joined, return_offsets_mapping=True)
  ids, spans = out["input_ids"], out["offset_mapping"]
  begins = len(joined) - len(text)
  positions = [i for i, (_, end) in enumerate(spans) if end > begins]
  if not context and form == "bidirectional":
    assert positions == of_2024(tokenizer, ids)
  mask = None if backend == "causal" else tokenizer.mask_token_id
  return hub.log_probability(model, ids, positions, backend != "mlm", mask)


def of_2024(tokenizer, ids):
  """Returns the scored positions."""
  names = (f"{role}_token_id" for role in ("pad", "cls", "sep"))
  unscored = {getattr(tokenizer, name) for name in names}
  return [i for i, token in enumerate(ids) if token not in unscored]


def mode(folder, backend):
  """Returns our mode for a backend.

  Exported folders of models trained by MNTP shift the logits of masks, so the
  backend `mlm` is right for them, too.
  """
  trained = folder.loaded.config.curriculum
  return "mntp" if trained == "24N" and backend == "mlm" else backend


@pytest.mark.sample(0, 4)
@pytest.mark.parametrize("backend", ["mlm", "mntp", "causal"])
def test_scores_are_the_pipelines(folder, backend):
  auto = "AutoModelFor" + ("CausalLM" if backend == "causal" else "MaskedLM")
  model = folder.open(auto)
  for contexts in ([""] * len(SENTENCES), SENTENCES[::-1]):
    how = mode(folder, backend)
    ours = score(folder.loaded, SENTENCES, how, contexts=contexts)
    pairs = zip(contexts, SENTENCES, strict=True)
    theirs = [of_2026(folder, model, backend, c, t) for c, t in pairs]
    assert np.ptp(ours) > 1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.sample(0, 1)
def test_a_mask_has_the_logits_before_it_and_all_else_its_own(shifted):
  loaded, model = shifted.loaded, shifted.open()
  mask = loaded.tokenizer.mask_id
  ids = np.random.default_rng(0).integers(4, 400, (2, 16))
  ids[0, [0, 5, 9, 10]] = mask
  own = hub.our_logits(loaded, ids, BIDIRECTIONAL)
  labels = np.where(np.arange(16) % 5 < 2, ids, -100)
  given = {"labels": torch.tensor(labels)}
  with torch.no_grad():
    out = model(torch.tensor(ids), **given)
    loss, logits = model(torch.tensor(ids), **given, return_dict=False)
  expected = own.copy()
  expected[0, [5, 9, 10]] = own[0, [4, 8, 9]]
  expected[0, 0] = 0
  assert np.abs(out.logits.numpy() - expected).max() < 1e-4
  assert torch.equal(out.logits, logits) and torch.equal(out.loss, loss)
  # The logits before a label predict it, masked or not, except for the first.
  logprobs = np.asarray(jax.nn.log_softmax(own[:, :-1]))
  wanted = labels[:, 1:]
  nats = np.take_along_axis(logprobs, np.maximum(wanted, 0)[..., None], -1)
  assert abs(loss.item() + nats[wanted >= 0].mean()) < 1e-4


@pytest.mark.sample(0, 2)
def test_one_step_is_the_pipeline_fill_mask(folder):
  path, decode = folder.paths["bidirectional"], folder.loaded.tokenizer.decode
  pipeline = transformers.pipeline("fill-mask", model=str(path), **TRUSTED)
  for text in TEXTS:
    theirs = pipeline(text, top_k=5)
    (ours,) = fill(folder.loaded, text, steps=1)
    theirs = [theirs] if len(ours.masks) == 1 else theirs
    for mask, found in zip(ours.masks, theirs, strict=True):
      tokens, shares = zip(*mask.candidates, strict=True)
      assert list(tokens) == [decode([c["token"]], False) for c in found]
      expected = [c["score"] for c in found]
      np.testing.assert_allclose(shares, expected, atol=1e-5)


AUTOS = "AutoModelForMaskedLM", "AutoModel", "AutoModelForTokenClassification"


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize("auto", AUTOS)
def test_what_is_saved_again_opens_again(shifted, auto, tmp_path):
  model = shifted.open(auto)
  model.save_pretrained(tmp_path / "again")
  auto = getattr(transformers, auto)
  again = auto.from_pretrained(tmp_path / "again", **TRUSTED)
  ids = torch.randint(4, 400, (2, 9))
  with torch.no_grad():
    assert torch.equal(again.eval()(ids)[0], model(ids)[0])
