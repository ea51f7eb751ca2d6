"""Imported models compared with transformers: scores, texts and gradients.

Random models of each family score sentences and continue prompts. Some have an
output layer. AutoModel saves an encoder without its output layer.
"""

import copy
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from antlm_jax import embed, generate, score
from antlm_jax.data import toy_english
from antlm_jax.hf import export, import_, mapping
from antlm_jax.hf import weights as hf_weights
from antlm_jax.hf.architecture import EXPORT_RECORD
from antlm_jax.inference import framing
from antlm_jax.inference.model import load
from antlm_jax.masks import AttentionMask
from tests import helpers, hub, random_models, runs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = hub.MARKS

# With this short original length, 64 positions use all of RoPE's regimes. With
# many end tokens, some texts end early.
LLAMA_3 = {
  "rope_parameters": {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
  },
  "eos_token_id": [2, *range(50, 200)],
}
# Layers three and six of seven see all keys.
GEMMA_3 = {
  "num_hidden_layers": 7,
  "sliding_window_pattern": 3,
  "sliding_window": 8,
  "head_dim": 10,
  "query_pre_attn_scalar": 20,
  "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
BOTH_WAYS = {
  "use_bidirectional_attention": True,
  "sliding_window": 8,
  "head_dim": 10,
}
QWEN = {"tie_word_embeddings": True, "vocab_size": 408}
# Windows are shorter than the texts, and the last pattern is incomplete.
MODERNBERTS = "modernbert-decoder", "modernbert"
MODERNBERT = {"num_hidden_layers": 5, "local_attention": 8}
ULTRABERT = {
  "num_hidden_layers": 5,
  "sliding_window": 4,
  "head_dim": 10,
  "prediction_head_size": 24,
}
# A family's class, its config, and the tokenizer's template around a text $A.
FAMILIES = {
  "Llama": ("Llama", {"tie_word_embeddings": True}, "<s> $A"),
  "Llama, untied": ("Llama", {"head_dim": 10, "attention_bias": False}, "$A"),
  "Llama 3": ("Llama", LLAMA_3, "<s> $A"),
  "Mistral": ("Mistral", {"sliding_window": 8, "head_dim": 10}, "<s> $A"),
  "Qwen2": ("Qwen2", QWEN, "$A"),
  "Qwen3": ("Qwen3", {**QWEN, "head_dim": 10}, "$A"),
  "Gemma 3": ("Gemma3Text", GEMMA_3, "<s> $A"),
  "Gemma 3, both ways": ("Gemma3Text", BOTH_WAYS, "<s> $A </s>"),
  "EuroBERT": ("EuroBert", {"mask_token_id": 3}, "<s> $A </s>"),
  "ModernBERT": ("ModernBert", MODERNBERT, "<s> $A </s>"),
  "ModernBERT's decoder": ("ModernBertDecoder", MODERNBERT, "<s> $A"),
  "BERT": ("Bert", {}, "<s> $A </s>"),
  "RoBERTa": ("Roberta", {"type_vocab_size": 1}, "<s> $A </s>"),
  "UltraBERT": ("Ultrabert", ULTRABERT, "<s> $A </s>"),
  "UltraBERT, tied": (
    "Ultrabert",
    ULTRABERT | {"tie_word_embeddings": True},
    "<s> $A </s>",
  ),
}


SENTENCES = list(toy_english.make_sentences(0, 50))
# These have both masks, windows, tied and untied output layers; the others are
# nightly.
KEPT = "Llama, untied", "ModernBERT", "BERT"


@pytest.fixture(
  scope="module",
  params=[
    name if name in KEPT else pytest.param(name, marks=pytest.mark.nightly)
    for name in FAMILIES
  ],
)
def family(request, tmp_path_factory):
  """A model opened by us and by transformers, its tokenizer and its folder."""
  kind, settings, single = FAMILIES[request.param]
  folder = tmp_path_factory.mktemp("family")
  ours = random_models.tokenizer()
  roles = "pad", "bos", "eos"
  shape = {f"{role}_token_id": getattr(ours, f"{role}_id") for role in roles}
  model = hub.drawn(kind, **{"vocab_size": 400, **shape, **settings})
  model.save_pretrained(folder / "hf", max_shard_size="50KB")
  assert len(list((folder / "hf").glob("*.safetensors"))) > 1
  backend = tokenizers.Tokenizer.from_str(ours.to_json())
  added = [t for t in single.split() if t != "$A"]
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single=single, special_tokens=[(t, backend.token_to_id(t)) for t in added]
  )
  names = {"eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
  # AutoTokenizer would rebuild Qwen2's tokenizer from its vocabulary alone.
  fast = transformers.PreTrainedTokenizerFast
  fast(tokenizer_object=backend, **names).save_pretrained(folder / "hf")
  import_.write_imported_run(import_.Imported(folder / "hf"), folder / "run")
  tokenizer = fast.from_pretrained(folder / "hf")
  return load(folder / "run"), model, tokenizer, folder


def both_ways(model):
  flag = getattr(model.config, "use_bidirectional_attention", False)
  encoders = [name.lower() for name in hub.ENCODERS]
  return flag or model.config.model_type in encoders


def their_score(model, tokenizer, text):
  ids = tokenizer(text)["input_ids"]
  special = tokenizer.get_special_tokens_mask(
    ids, already_has_special_tokens=True
  )
  places = [at for at in range(1, len(ids)) if not special[at]]
  how = (0, tokenizer.mask_token_id) if both_ways(model) else ()
  return hub.log_probability(model, ids, places, *how)


def test_scores_are_theirs(family):
  loaded, model, tokenizer, _ = family
  texts = SENTENCES[:20]
  theirs = [their_score(model, tokenizer, text) for text in texts]
  ours = score(loaded, texts, "mlm" if both_ways(model) else "causal")
  assert np.ptp(ours) > 10
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_greedy_texts_are_theirs(family):
  loaded, model, tokenizer, _ = family
  if both_ways(model):
    pytest.skip("it reads both ways")
  prompts = [" ".join(text.split()[:3]) for text in SENTENCES[:20:2]]
  ours = generate(loaded, prompts, tokens=16, temperature=0)
  # A half character at the end is left out. A random model may also end with
  # more bytes than a character has, which are kept.
  ends = [len(text) - len(text.rstrip("\ufffd")) for text in ours]
  assert 1 not in ends
  ours = [text.rstrip("\ufffd") for text in ours]
  theirs = []
  for prompt in prompts:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0]
    out = out[:-1] if out[-1] in loaded.meta.ends else out
    text = loaded.tokenizer.decode(out.tolist())
    theirs.append(text.rstrip("\ufffd"))
  assert ours == theirs


def test_vectors_are_their_mean_states(family):
  """Catches a pooled vector of other tokens, or under another mask."""
  loaded, model, _, _ = family
  texts = SENTENCES[:3]
  rows = [framing.encode_framed(loaded, text)[None] for text in texts]
  with torch.no_grad():
    states = [model.base_model(torch.tensor(row))[0][0] for row in rows]
  means = np.stack([state.mean(axis=0).numpy() for state in states])
  attention = "bidirectional" if both_ways(model) else "causal"
  vectors = embed(loaded, texts, attention=attention, quiet=True)
  np.testing.assert_allclose(vectors, means, atol=1e-5 * np.abs(means).max())


def test_gradients_are_theirs(family):
  """Catches a gradient that differs from the exact one by more than rounding.

  The exact gradient is transformers' in float64. Its gradient in float32 shows
  how much is lost by rounding.
  """
  loaded, model, tokenizer, _ = family
  ids = tokenizer(SENTENCES[0], return_tensors="pt")["input_ids"]
  mask = AttentionMask(causal=not both_ways(model))
  weights = torch.randn(ids.shape[1], model.config.vocab_size)
  exact = copy.deepcopy(model).double()
  for theirs in (model, exact):
    (theirs(ids).logits[0] * weights).sum().backward()

  def loss(params):
    rows = jnp.asarray(ids.numpy())
    at = jnp.arange(rows.shape[1])[None]
    hidden = loaded.model.encode(params, rows, at, mask)
    scores = loaded.model.logits(params, hidden)[0]
    return (scores * weights.numpy()).sum(), hidden

  ours, hidden = jax.jit(jax.grad(loss, has_aux=True))(loaded.params)
  expected = model.base_model(ids).last_hidden_state.detach().numpy()
  limit = 1e-5 * np.abs(expected).max()
  np.testing.assert_allclose(hidden, expected, atol=limit)
  _, architecture, target = mapping.of_model_type(model.config.model_type)
  ours = hf_weights.params_to_tensors(
    ours, architecture.names(target), "float32"
  )
  checked = 0
  rounded = {name: value.grad for name, value in model.named_parameters()}
  for name, value in exact.named_parameters():
    if value.grad is not None and name in ours:
      expected, checked = value.grad.numpy(), checked + 1
      lost = np.abs(rounded[name].numpy() - expected).max()
      np.testing.assert_allclose(
        ours[name],
        expected,
        atol=2e-5 * np.abs(expected).max() + 4 * lost,
        err_msg=name,
      )
  assert checked > 9 * model.config.num_hidden_layers // 2
  model.zero_grad()


@pytest.mark.parametrize("form", ["causal", "bidirectional"])
def test_it_goes_out_again(family, form, tmp_path):
  """The export computes the same, and is imported again without our file."""
  loaded, model, _, _ = family
  kind = model.config.model_type
  lacks = {
    ("mistral", "bidirectional"): "no eurobert with",
    ("ultrabert", "causal"): "is causal: export it as bidirectional",
  }
  if said := lacks.get((kind, form)):
    call = export.export_model, loaded, tmp_path / "hf", [form]
    assert said in runs.told(*call)
    return
  (path,) = export.export_model(loaded, tmp_path / "hf", [form])
  out = hub.opened(path, form)
  names = {  # causal, and bidirectional
    "eurobert": ("llama", "eurobert"),
    # AutoTokenizer would make a Qwen2's tokenizer anew.
    "qwen2": ("llama", "eurobert"),
    "qwen3": ("qwen3", "eurobert_plus"),
    "bert": ("bert", "bert"),
    "roberta": ("roberta", "roberta"),
    "gemma3_text": ("gemma3_text", "gemma3_text"),
    "modernbert": MODERNBERTS,
    "ultrabert": ("", "ultrabert"),
    "modernbert-decoder": MODERNBERTS,
  }.get(kind, (kind, "eurobert"))
  assert out.config.model_type == names[form == "bidirectional"]
  ids = np.random.default_rng(0).integers(4, 400, (2, 40))
  ours = hub.our_logits(loaded, ids, AttentionMask(form == "causal"))
  with torch.no_grad():
    theirs = out(torch.tensor(ids)).logits.numpy()
  np.testing.assert_allclose(ours, theirs, atol=1e-4)
  (path / EXPORT_RECORD).unlink()
  again = import_.Imported(path)
  assert again.meta.config.model == loaded.config.model
  again = {name: np.asarray(value) for name, value in again.params.items()}
  assert helpers.equal(again, dict(loaded.params))


def test_an_encoder_alone_comes_and_goes(family, tmp_path):
  """Catches an export that invents an output layer, or loses a tensor."""
  loaded, model, _, folder = family
  model.base_model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
  for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(folder / "hf" / name, tmp_path / "hf")
  imported = import_.Imported(tmp_path / "hf")
  encoder = {n: x for n, x in loaded.params.items() if "head/" not in n}
  assert helpers.equal(dict(imported.params), encoder)
  bare = load(import_.write_imported_run(imported, tmp_path / "run"))
  assert bare.headless == (len(encoder) < len(loaded.params))
  form = "bidirectional" if both_ways(model) else "causal"
  (path,) = export.export_model(bare, tmp_path / "out", [form])
  opened, info = transformers.AutoModel.from_pretrained(
    path, output_loading_info=True
  )
  # AutoModel adds a new pooler to a BERT.
  missing = {name for name in info["missing_keys"] if "pooler" not in name}
  assert not missing and not info["mismatched_keys"]
  assert not bare.headless or not info["unexpected_keys"]
  if opened.config.model_type == model.config.model_type:
    theirs = {n: x.numpy() for n, x in opened.state_dict().items()}
    expected = {n: x.numpy() for n, x in model.base_model.state_dict().items()}
    assert helpers.equal({n: theirs[n] for n in expected}, expected)
  (path / EXPORT_RECORD).unlink()
  assert helpers.equal(dict(import_.Imported(path).params), encoder)
