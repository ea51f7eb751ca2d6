"""Our scores beside minicons' on the same weights, on real minimal pairs.

BabyLM's 2024 pipeline scores masked models with minicons
(github.com/kanishkamisra/minicons). A random model of ours becomes
transformers' Llama and its EuroBERT, which is Llama with bidirectional
attention, under the same parameter names.
"""

import json
import tarfile

import numpy as np
import pytest
import tokenizers

from antlm_jax import checkpoint
from antlm_jax.data.tokenizer import Tokenizer
from evals import scoring
from tests import random_models, runs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
scorer = pytest.importorskip("minicons.scorer")

pytestmark = pytest.mark.slow  # half a minute

BLIMP = runs.ROOT / "../shared/data/blimp_filtered.tar.xz"
SHAPE = {"width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 96}
# Our linear layers by transformers' names; theirs are transposed.
LINEAR = {
  "self_attn.q_proj": "attention/q",
  "self_attn.k_proj": "attention/k",
  "self_attn.v_proj": "attention/v",
  "self_attn.o_proj": "attention/out",
  "mlp.gate_proj": "mlp/gate",
  "mlp.up_proj": "mlp/up",
  "mlp.down_proj": "mlp/down",
}
NORMS = {
  "input_layernorm": "attention_norm",
  "post_attention_layernorm": "mlp_norm",
}


@pytest.fixture(scope="module")
def sentences():
  """200 pairs of all paradigms, good and bad in turn."""
  if not BLIMP.exists():
    pytest.skip(f"{BLIMP} is absent")
  out = []
  with tarfile.open(BLIMP) as archive:
    for member in archive:
      if member.name.endswith(".jsonl"):
        lines = archive.extractfile(member).read().decode().splitlines()
        for pair in map(json.loads, lines[:3]):
          out += [pair["sentence_good"], pair["sentence_bad"]]
  return out[:400]


@pytest.fixture(scope="module")
def loaded(sentences, tmp_path_factory):
  folder = tmp_path_factory.mktemp("run")
  tokenizer = Tokenizer.train(sentences, 1500)
  random_models.save(folder, tokenizer, **SHAPE)
  return checkpoint.load(folder)


def exported(loaded, config_type, model_type):
  """The model in transformers, bit for bit the same parameters."""
  t, c = loaded.tokenizer, loaded.model.config
  config = config_type(
    vocab_size=t.vocab_size,
    hidden_size=c.width,
    intermediate_size=c.mlp_width,
    num_hidden_layers=c.layers,
    num_attention_heads=c.heads,
    num_key_value_heads=c.kv_heads,
    max_position_embeddings=c.max_seq_len,
    rms_norm_eps=c.norm_eps,
    rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    tie_word_embeddings=True,
    pad_token_id=t.pad_id,
    bos_token_id=t.bos_id,
    eos_token_id=t.eos_id,
  )
  ours = {k: torch.tensor(np.array(v)) for k, v in loaded.params.items()}
  state = {
    "model.embed_tokens.weight": ours["embedding"],
    "lm_head.weight": ours["embedding"],
    "model.norm.weight": ours["norm/scale"],
  }
  for i in range(c.layers):
    for theirs, name in LINEAR.items():
      kernel = ours[f"blocks/{name}/kernel"][i]
      state[f"model.layers.{i}.{theirs}.weight"] = kernel.T
    for theirs, name in NORMS.items():
      state[f"model.layers.{i}.{theirs}.weight"] = ours[f"blocks/{name}/scale"][
        i
      ]
  model = model_type(config)
  model.load_state_dict(state)
  return model.eval()


class PreTrainedTokenizer(transformers.PreTrainedTokenizerFast):
  """With the method that minicons calls and transformers 5 has dropped."""

  def batch_encode_plus(self, *args, **options):
    return self(*args, **options)


def tokenizer_of(loaded, framed):
  """The tokenizer in transformers, which frames a text or leaves it bare."""
  backend = tokenizers.Tokenizer.from_str(loaded.tokenizer.to_json())
  backend.encode_special_tokens = False  # "</s>" is a token, not a text
  if framed:
    backend.post_processor = tokenizers.processors.TemplateProcessing(
      single="<s> $A </s>",
      special_tokens=[
        ("<s>", loaded.tokenizer.bos_id),
        ("</s>", loaded.tokenizer.eos_id),
      ],
    )
  return PreTrainedTokenizer(
    tokenizer_object=backend,
    bos_token="<s>",
    eos_token="</s>",
    cls_token="<s>",
    sep_token="</s>",
    pad_token="<pad>",
    mask_token="<mask>",
  )


@pytest.fixture(scope="module")
def causal(loaded):
  model = exported(
    loaded, transformers.LlamaConfig, transformers.LlamaForCausalLM
  )
  return scorer.IncrementalLMScorer(
    model, "cpu", tokenizer=tokenizer_of(loaded, framed=False)
  )


@pytest.fixture(scope="module")
def masked(loaded):
  model = exported(
    loaded, transformers.EuroBertConfig, transformers.EuroBertForMaskedLM
  )
  return scorer.MaskedLMScorer(
    model, "cpu", tokenizer=tokenizer_of(loaded, framed=True)
  )


def summed(scores):
  return scores.sum().item()


def equal(ours, theirs):
  """The same to 1e-3 for every sentence, and the same choice of each pair."""
  theirs = np.array(theirs)
  np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3)
  np.testing.assert_array_equal(
    ours[::2] > ours[1::2], theirs[::2] > theirs[1::2]
  )
  assert np.ptp(theirs) > 1  # the model tells sentences apart


def test_causal_sums(loaded, causal, sentences):
  theirs = causal.sequence_score(sentences, reduction=summed, bos_token=True)
  equal(scoring.score(loaded, sentences, "causal"), theirs)
  ours = scoring.score(
    loaded, sentences, "causal", pipeline=scoring.PIPELINES["2024"]
  )
  equal(ours, theirs)


def test_causal_sums_in_a_context(loaded, causal, sentences):
  contexts = [s for good in sentences[::2] for s in (good, good)][::-1]
  theirs = causal.conditional_score(contexts, sentences, reduction=summed)
  ours = scoring.score(
    loaded,
    sentences,
    "causal",
    contexts=contexts,
    pipeline=scoring.PIPELINES["2024"],
  )
  equal(ours, theirs)


def test_pseudo_log_likelihoods(loaded, masked, sentences):
  theirs = masked.sequence_score(sentences, reduction=summed)
  equal(scoring.score(loaded, sentences, "mlm"), theirs)


def test_means_as_the_2024_pipeline_asks_for_them(loaded, masked, sentences):
  late = scoring.PIPELINES["2024"]
  choices = [f" {s}" for s in sentences]  # lm-eval's delimiter
  theirs = masked.conditional_score(["</s>"] * len(choices), choices)
  equal(scoring.score(loaded, sentences, "mlm", pipeline=late), theirs)
  contexts = [s for good in sentences[::2] for s in (good, good)][::-1]
  theirs = masked.conditional_score(contexts, choices)
  ours = scoring.score(
    loaded, sentences, "mlm", contexts=contexts, pipeline=late
  )
  equal(ours, theirs)
