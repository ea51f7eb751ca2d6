"""Imported models compared with transformers: scores, texts and gradients.

Random models of eight families, with the tokenizer of BabyLM's GPT-BERT, score
real sentences and continue real prompts.
"""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from antlm_jax import generate, score
from antlm_jax.errors import UserError
from antlm_jax.hf import export, import_, mapping
from antlm_jax.hf import weights as hf_weights
from antlm_jax.hf.architecture import NATIVE
from antlm_jax.inference.model import load
from antlm_jax.masks import AttentionMask
from tests import helpers, hub, real

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
  "eos_token_id": [2, *range(50, 4000)],
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
QWEN = {"tie_word_embeddings": True, "vocab_size": 8200}
# Windows are shorter than the texts, and the last pattern is incomplete.
MODERNBERTS = "modernbert-decoder", "modernbert"
WINDOWED = *MODERNBERTS, "ultrabert"
MODERNBERT = {"num_hidden_layers": 5, "local_attention": 8}
ULTRABERT = {
  "num_hidden_layers": 5,
  "sliding_window": 4,
  "head_dim": 10,
  "prediction_head_size": 24,
}
# A family's class, its config, and the tokenizer's template around a text $A.
FAMILIES = {
  "Llama": ("Llama", {"tie_word_embeddings": True}, "␂ $A"),
  "Llama, untied": ("Llama", {"head_dim": 10, "attention_bias": False}, "$A"),
  "Llama 3": ("Llama", LLAMA_3, "␂ $A"),
  "Mistral": ("Mistral", {"sliding_window": 8, "head_dim": 10}, "␂ $A"),
  "Qwen2": ("Qwen2", QWEN, "$A"),
  "Qwen3": ("Qwen3", {**QWEN, "head_dim": 10}, "$A"),
  "Gemma 3": ("Gemma3Text", GEMMA_3, "␂ $A"),
  "Gemma 3, both ways": ("Gemma3Text", BOTH_WAYS, "␂ $A ␃"),
  "EuroBERT": ("EuroBert", {"mask_token_id": 4}, "␂ $A ␃"),
  "ModernBERT": ("ModernBert", MODERNBERT, "␂ $A ␃"),
  "ModernBERT's decoder": ("ModernBertDecoder", MODERNBERT, "␂ $A"),
  "BERT": ("Bert", {}, "␂ $A ␃"),
  "RoBERTa": ("Roberta", {"type_vocab_size": 1}, "␂ $A ␃"),
  "UltraBERT": ("Ultrabert", ULTRABERT, "␂ $A ␃"),
  "UltraBERT, tied": (
    "Ultrabert",
    ULTRABERT | {"tie_word_embeddings": True},
    "␂ $A ␃",
  ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  tokenizer = real.unpacked("tokenizers", folder)
  pairs = real.unpacked("blimp_filtered", folder)
  names = sorted(pairs.rglob("*.jsonl"))[:25]
  lines = [json.loads(name.read_text().splitlines()[0]) for name in names]
  texts = [x[k] for x in lines for k in ("sentence_good", "sentence_bad")]
  return next(tokenizer.rglob("tokenizer_10M.json")), texts


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, files, tmp_path_factory):
  """A model opened by us and by transformers, with a tokenizer and texts."""
  kind, settings, single = FAMILIES[request.param]
  folder = tmp_path_factory.mktemp("family")
  model = hub.drawn(kind, **settings)
  model.save_pretrained(folder / "hf", max_shard_size="500KB")
  assert len(list((folder / "hf").glob("*.safetensors"))) > 1
  backend = tokenizers.Tokenizer.from_file(str(files[0]))
  added = [t for t in single.split() if t != "$A"]
  backend.post_processor = tokenizers.processors.TemplateProcessing(
    single=single, special_tokens=[(t, backend.token_to_id(t)) for t in added]
  )
  transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, eos_token="␃", pad_token="␢", mask_token="␥"
  ).save_pretrained(folder / "hf")
  import_.write_imported_run(import_.Imported(folder / "hf"), folder / "run")
  # AutoTokenizer would rebuild Qwen2's tokenizer from its vocabulary alone.
  opened = transformers.PreTrainedTokenizerFast.from_pretrained
  tokenizer = opened(folder / "hf")
  return load(folder / "run"), model, tokenizer, files[1]


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
  loaded, model, tokenizer, texts = family
  theirs = [their_score(model, tokenizer, text) for text in texts]
  ours = score(loaded, texts, "mlm" if both_ways(model) else "causal")
  assert len(texts) == 50 and np.ptp(ours) > 10
  np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_greedy_texts_are_theirs(family):
  loaded, model, tokenizer, texts = family
  if both_ways(model):
    pytest.skip("it reads both ways")
  prompts = [" ".join(text.split()[:3]) for text in texts[:40:2]]
  ours = generate(loaded, prompts, tokens=16, temperature=0)
  theirs = []
  for prompt in prompts:
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0]
    out = out[:-1] if out[-1] in loaded.meta.ends else out
    theirs.append(tokenizer.decode(out, skip_special_tokens=True))
  assert ours == theirs


def test_gradients_are_theirs(family):
  """Catches a gradient that differs from the exact one by more than rounding.

  The exact gradient is transformers' in float64. Its gradient in float32 shows
  how much is lost by rounding.
  """
  loaded, model, tokenizer, texts = family
  ids = tokenizer(texts[0], return_tensors="pt")["input_ids"]
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

  ours, hidden = jax.grad(loss, has_aux=True)(loaded.params)
  expected = model.base_model(ids).last_hidden_state.detach().numpy()
  np.testing.assert_allclose(hidden, expected, atol=1e-4)
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


def test_packed_and_padded_rows_are_theirs(family):
  """Models with windows; `test_transformers` has the others.

  transformers reads one document a row.
  """
  loaded, model, _, _ = family
  if model.config.model_type not in WINDOWED:
    pytest.skip("no windows")
  causal = not both_ways(model)
  ids = np.random.default_rng(0).integers(16, 8192, (3, 24))
  at, cut = np.arange(24), np.array([[5], [12], [20]])
  # Each row has two documents, or a document and padding.
  for start, end in (
    (np.where(at < cut, 0, cut), np.where(at < cut, cut, 24)),
    (np.zeros_like(at + cut), np.broadcast_to(cut, ids.shape)),
  ):
    mask = AttentionMask(causal, start.astype(np.int32), end.astype(np.int32))
    ours = hub.our_logits(loaded, ids, mask, at - start)
    for row, span in enumerate(zip(start, end, strict=True)):
      for first, last in set(zip(*map(np.ndarray.tolist, span), strict=True)):
        with torch.no_grad():
          theirs = model(torch.tensor(ids[row : row + 1, first:last]))
        np.testing.assert_allclose(
          ours[row, first:last], theirs.logits[0].numpy(), atol=1e-4
        )


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
    with pytest.raises(UserError, match=said):
      export.export_model(loaded, tmp_path / "hf", [form])
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
  ids = np.random.default_rng(0).integers(16, 8192, (2, 50))
  ours = hub.our_logits(loaded, ids, AttentionMask(form == "causal"))
  with torch.no_grad():
    theirs = out(torch.tensor(ids)).logits.numpy()
  np.testing.assert_allclose(ours, theirs, atol=1e-4)
  (path / NATIVE).unlink()
  again = import_.Imported(path)
  assert again.meta.config.model == loaded.config.model
  again = {name: np.asarray(value) for name, value in again.params.items()}
  assert helpers.equal(again, dict(loaded.params))
