"""The PyTorch LTG-BERT of exported folders, compared with ours."""

import ast
import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from antlm_jax import attention
from antlm_jax.hf import config as configs
from antlm_jax.hf import export
from antlm_jax.hf import weights as folder
from antlm_jax.hf.ltg_bert import LTG_BERT
from antlm_jax.inference.model import load
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models.ltg_bert import LtgBertConfig
from tests import helpers, hub, random_models, reference
from tests.helpers import MASK, PAD

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = hub.MARKS

CODE = pathlib.Path(configs.__file__).parent / "remote"
VARIANTS = {
  "ltg_bert": {},
  "gpt_bert": {"attention_gate": True, "depth_weights": True, "norm_eps": 1e-5},
}
SHAPE = {"heads": 4, "position_buckets": 8, "longest_distance": 20}
AUTO = {
  "causal": "AutoModelForCausalLM",
  "bidirectional": "AutoModelForMaskedLM",
}
OURS = {"causal": CAUSAL, "bidirectional": BIDIRECTIONAL}
KERNELS = ("eager", "sdpa")
T = 24  # over the longest distance
LONG = 60
LENGTHS = (T, 15)  # of two rows; the second is padded


@pytest.fixture(scope="module", autouse=True)
def one_thread():
  """Uses a single torch thread, which is fastest for tiny tensors."""
  before = torch.get_num_threads()
  torch.set_num_threads(1)
  yield
  torch.set_num_threads(before)


class Exported:
  """A random model of ours, and its exported folder."""

  def __init__(self, path, changes):
    tokenizer, shape = random_models.tokenizer(), SHAPE | changes
    run = random_models.save(
      path / "run", tokenizer, "ltg_bert", max_seq_len=64, **shape
    )
    loaded = load(run)
    self.model = loaded.model
    self.params = helpers.random_params(self.model)
    loaded = dataclasses.replace(loaded, params=self.params)
    (self.path,) = export.export_model(loaded, path / "hf", ["bidirectional"])
    self.config = json.loads((self.path / "config.json").read_text())
    self.tensors = self.of_torch(self.params)

  def of_torch(self, tree):
    """Returns parameters or gradients under the names of transformers."""
    return folder.params_to_tensors(tree, LTG_BERT.weights, "float32")

  def open(self, auto, **settings):
    found = getattr(transformers, auto).from_pretrained(
      self.path, trust_remote_code=True, **settings
    )
    assert type(found).__module__.startswith("transformers_modules.")
    return found.eval()

  def hidden(self, tokens, mask):
    """Returns our states, float32 `[B, T, D]`."""
    return self._run(tokens, mask)[0]

  def logits(self, tokens, mask):
    """Returns our logits, float32 `[B, T, V]`."""
    return self._run(tokens, mask)[1]

  def _run(self, tokens, mask):
    ids = np.asarray(tokens, np.int32)
    return [np.asarray(x) for x in self._compute(ids, mask)]

  @functools.cached_property
  def _compute(self):
    def compute(tokens, mask):
      hidden = self.model.encode(self.params, tokens, None, mask)
      return hidden, self.model.logits(self.params, hidden)

    return jax.jit(compute)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  path = tmp_path_factory.mktemp("folders")
  return functools.cache(lambda name: Exported(path / name, VARIANTS[name]))


@pytest.fixture(scope="module", params=VARIANTS)
def exported(request, folders):
  return folders(request.param)


@pytest.fixture(scope="module")
def gpt_bert(folders):
  return folders("gpt_bert")


def tensor(ids):
  return torch.tensor(np.asarray(ids), dtype=torch.long)


@torch.no_grad()
def run(model, tokens, *args, **options):
  return model(tensor(tokens), *args, **options).logits.numpy()


def close(found, expected, limit=1e-4):
  assert np.ptp(expected) > 1
  assert np.abs(found - expected).max() < limit


def test_the_files_stand_alone():
  for path in CODE.glob("*.py"):
    text = path.read_text()
    assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    assert "antlm" not in text
    modules = set()
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, ast.Import):
        modules |= {alias.name.split(".")[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom):
        modules.add("." * node.level + node.module.split(".")[0])
    own = {".configuration_ltg_bert", ".masked_prediction"}
    known = {"torch", "transformers", "math", "functools"}
    assert modules <= known | own


def test_the_defaults_are_ours(gpt_bert):
  config_type = type(gpt_bert.open("AutoModel").config)
  found = config_type()
  ours = LtgBertConfig(vocab_size=found.vocab_size)
  for name, theirs in LTG_BERT.settings.items():
    assert getattr(found, theirs) == getattr(ours, name), name
  assert found.mask_token_id is None
  # The class declares every field of a folder's config.
  fields = set(gpt_bert.config) - {"architectures", "auto_map", "torch_dtype"}
  assert fields <= set(found.to_dict()) | {"model_type", "dtype"}
  for size in (4, 6, 16, 32, 64):
    for longest in (size + 1, size + 9, 129, 512, 1025):
      settings = {"position_buckets": size, "longest_distance": longest}
      edges = config_type(**settings).distance_edges
      assert edges == attention.log_edges(size, longest)
  for settings in (
    {"hidden_size": 100, "num_attention_heads": 3},
    {"position_buckets": 7},
    {"longest_distance": 32},
    {"mask_shift": 2},
    {"classifier_pooling": "cls"},
    {"tie_word_embeddings": False},
  ):
    with pytest.raises(ValueError, match=next(iter(settings))):
      config_type(**settings)


def test_fresh_weights_are_drawn_as_ours(gpt_bert):
  config = gpt_bert.open("AutoModel").config
  config.hidden_size, config.num_hidden_layers = 64, 4
  config.initializer_range = std = (2 / (5 * 64)) ** 0.5
  model = transformers.AutoModelForMaskedLM.from_config(
    config, trust_remote_code=True
  )
  # Initially each sublayer reads only the output before it.
  begin = 0
  for n in range(2, 2 * 4 + 2):
    weights = model.model.depth_weights[begin : begin + n].tolist()
    assert weights == [0.0] * (n - 1) + [1.0]
    begin += n
  assert begin == len(model.model.depth_weights)
  for name, value in model.named_parameters():
    layer = int(name.split(".")[2]) if ".mlp." in name else 0
    scale = (0.5 / (1 + layer)) ** 0.5 if ".mlp." in name else 1.0
    largest = value.abs().max()
    if name.endswith("bias"):
      assert largest == 0, name
    elif name.endswith("norm.weight"):
      assert (value == 1).all(), name
    elif not name.endswith("depth_weights"):
      assert 1.9 * std * scale < largest <= 2.001 * std * scale, name


def whole_rows(form):
  for length in (T, LONG):
    yield helpers.tokens(2, length), None, OURS[form]


def padded_rows(form):
  """Yields rows of 24 and of 15 tokens, padded on the right and the left."""
  tokens = helpers.tokens(2, T)
  for start in (0, T - LENGTHS[1]):
    at, starts = np.arange(T), np.array([[0], [start]])
    ends = starts + np.array(LENGTHS)[:, None]
    real = (at >= starts) & (at < ends)
    bounds = [np.repeat(x, T, 1).astype(np.int32) for x in (starts, ends)]
    ids = np.where(real, tokens, PAD)
    yield ids, tensor(real), AttentionMask(form == "causal", *bounds)


def packed_rows(form):
  """Yields rows of two documents, with a mask of each type of torch."""
  ends = np.array([[0, 9], [9, T]], np.int32)
  bounds = (np.repeat(x, [9, T - 9])[None].repeat(2, 0) for x in ends)
  mask = AttentionMask(form == "causal", *bounds)
  seen = tensor(mask.dense(T, T))[:, None].bool()
  scores = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
  for torch_mask in (seen, scores):
    yield helpers.tokens(2, T), torch_mask, mask


@pytest.mark.sample(0, 3)
@pytest.mark.parametrize("rows", [whole_rows, padded_rows, packed_rows])
@pytest.mark.parametrize("form", AUTO)
def test_logits(exported, form, rows):
  """Catches another mask, also at rows longer than the longest distance."""
  for kernel in KERNELS:
    model = exported.open(AUTO[form], attn_implementation=kernel)
    assert model.config._attn_implementation == kernel
    for ids, torch_mask, mask in rows(form):
      logits = run(model, ids, torch_mask)
      real = np.ones(ids.shape, bool)
      if rows is padded_rows:
        real = torch_mask.numpy() > 0
      close(logits[real], exported.logits(ids, mask)[real])
      assert np.isfinite(logits).all()


def test_what_is_seen_on_the_way(exported):
  tokens = tensor(helpers.tokens(2, T))
  settings = {"output_hidden_states": True, "output_attentions": True}
  for kernel in KERNELS:
    model = exported.open("AutoModelForCausalLM", attn_implementation=kernel)
    with torch.no_grad():
      out = model(tokens, **settings)
      plain = model.model(tokens, is_causal=True)
      loss, logits, *_ = model(tokens, labels=tokens, return_dict=False)
    assert len(out.hidden_states) == len(out.attentions) + 1 == 3
    assert torch.allclose(out.hidden_states[-1], plain[0], atol=1e-5)
    assert torch.equal(logits, out.logits) or kernel == "sdpa"
    assert torch.allclose(logits, out.logits, atol=1e-4) and loss.shape == ()
    for weights in out.attentions:
      assert weights.shape == (2, 4, T, T)
      assert torch.allclose(weights.sum(-1), torch.ones(()))
      assert not weights.triu(1).any()


def test_bfloat16(exported):
  tokens, real = helpers.tokens(2, T), torch.ones(2, T)
  real[1, :9] = 0
  expected = exported.logits(tokens, CAUSAL)[:1]
  for kernel in KERNELS:
    settings = {"attn_implementation": kernel, "dtype": torch.bfloat16}
    model = exported.open("AutoModelForCausalLM", **settings)
    with torch.no_grad():
      found = model(tensor(tokens), real).logits
    assert found.dtype == torch.bfloat16 and found.isfinite().all()
    assert reference.relative_error(found[:1].float(), expected) < 0.05


def test_losses_and_gradients(exported):
  """Next-token prediction, compared with ours, for every parameter."""
  tokens = helpers.tokens(2, T)
  labels = np.where(np.arange(T) % 5 == 3, -100, tokens)
  model = exported.open("AutoModelForCausalLM")
  loss = model(tensor(tokens), labels=tensor(labels)).loss
  loss.backward()

  def ours(params):
    hidden = exported.model.encode(params, tokens, None, CAUSAL)
    logits = exported.model.logits(params, hidden)[:, :-1]
    nats = optax.softmax_cross_entropy_with_integer_labels(
      logits, jnp.maximum(labels[:, 1:], 0)
    )
    return jnp.mean(nats, where=labels[:, 1:] >= 0)

  value, gradients = jax.jit(jax.value_and_grad(ours))(exported.params)
  assert abs(loss.item() - float(value)) < 1e-5 * float(value)
  expected = exported.of_torch(gradients)
  assert set(expected) == {name for name, _ in model.named_parameters()}
  for name, parameter in model.named_parameters():
    assert np.abs(expected[name]).max() > 0, name
    error = reference.relative_error(parameter.grad, expected[name])
    assert error < 1e-4, (name, error)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(exported, reentrant):
  """Catches layers that recompute something else, or lose a gradient.

  Only one early layer trains, as with an adapter, so that the gradient passes
  through layers without any trained parameter.
  """
  tokens = tensor(helpers.tokens(2, T))
  found = []
  for checkpointed in (False, True):
    model = exported.open("AutoModelForCausalLM").train()
    if checkpointed:
      kwargs = {"use_reentrant": reentrant}
      model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    calls = []
    norm = model.model.layers[1].self_attn.norm
    norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
    for name, parameter in model.named_parameters():
      own = "layers.0.self_attn.q_proj" in name or "depth_weights" in name
      parameter.requires_grad_(own)
    torch.manual_seed(0)
    model(tokens, labels=tokens).loss.backward()
    assert len(calls) == 1 + checkpointed  # it is computed again
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    found.append(grads)
  assert found[0].keys() == found[1].keys()
  for name, grad in found[0].items():
    assert grad.abs().max() > 0, name
    np.testing.assert_allclose(grad, found[1][name], atol=1e-6, rtol=1e-4)


@pytest.mark.sample(0, 1)
@pytest.mark.parametrize("shift", [0, 1])
def test_vectors_instead_of_ids(exported, shift):
  """Catches vectors that are read otherwise, also where masks are searched."""
  tokens = helpers.tokens(2, T)
  tokens[:, 5::7] = MASK
  ids, real = tensor(tokens), torch.ones(2, T)
  for auto in AUTO.values():
    model = exported.open(auto, mask_shift=shift)
    assert model.get_input_embeddings() is model.model.embed_tokens
    vectors = model.get_input_embeddings()(ids)
    with torch.no_grad():
      expected = model(ids, real).logits
      found = model(inputs_embeds=vectors, attention_mask=real).logits
      assert torch.equal(found, expected)
      for both in ({}, {"input_ids": ids, "inputs_embeds": vectors}):
        with pytest.raises(ValueError, match="either input_ids or"):
          model(**both)
  settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD}
  settings["attention_mask"] = real.long()
  model = exported.open("AutoModelForCausalLM")
  model.generation_config.eos_token_id = None
  out = model.generate(inputs_embeds=vectors, **settings)
  assert torch.equal(out, model.generate(ids, **settings)[:, T:])
  new = torch.nn.Embedding(9, vectors.shape[-1])
  model.set_input_embeddings(new)
  assert model.model.embed_tokens is new


def test_dropout(exported):
  rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
  tokens = tensor(helpers.tokens(4, T))
  for name, rate in rates.items():
    model = exported.open(AUTO["bidirectional"], **{name: rate}).train()
    assert (model(tokens).logits != model(tokens).logits).any(), name
    model.eval()
    assert torch.equal(model(tokens).logits, model(tokens).logits)


def test_greedy_generation(exported):
  model = exported.open("AutoModelForCausalLM")
  model.generation_config.eos_token_id = None
  new, tokens = 12, helpers.tokens(2, T, special=0)
  prompts = [tokens[i, :length] for i, length in enumerate((10, 6))]
  expected = []
  for prompt in prompts:
    out = list(prompt)
    for end in range(len(prompt), len(prompt) + new):
      row = np.pad(out, (0, T - end))  # one shape to compile
      out.append(int(exported.logits([row], CAUSAL)[0, end - 1].argmax()))
    expected.append(out[len(prompt) :])
  settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": PAD}
  for prompt, wanted in zip(prompts, expected, strict=True):
    found = model.generate(tensor([prompt]), **settings)
    assert found[0, len(prompt) :].tolist() == wanted
  # Together, padded on the left.
  ids, real = torch.full((2, 10), PAD), torch.zeros(2, 10, dtype=torch.long)
  for i, prompt in enumerate(prompts):
    ids[i, 10 - len(prompt) :] = tensor(prompt)
    real[i, 10 - len(prompt) :] = 1
  wanted = "output_logits", "output_hidden_states", "return_dict_in_generate"
  more = dict.fromkeys(wanted, True)
  out = model.generate(ids, attention_mask=real, **settings, **more)
  assert out.sequences[:, 10:].tolist() == expected
  assert len(out.logits) == len(out.hidden_states) == new
  beams = model.generate(ids, attention_mask=real, **settings, num_beams=2)
  assert beams.shape == (2, 10 + new)


@pytest.mark.sample(0, 2)
@pytest.mark.parametrize("auto", [*AUTO.values(), "AutoModel"])
def test_saved_again(exported, auto, tmp_path):
  model = exported.open(auto)
  model.save_pretrained(tmp_path / "again")
  again = getattr(transformers, auto).from_pretrained(
    tmp_path / "again", trust_remote_code=True
  )
  before, after = model.state_dict(), again.state_dict()
  if auto == "AutoModel":
    tensors = {f"model.{name}": value for name, value in after.items()}
    expected = {n: t for n, t in exported.tensors.items() if "lm_head" not in n}
  else:
    tensors, expected = after, exported.tensors
    written = folder.read_weights(tmp_path / "again")
    assert set(written) == set(expected)
  assert set(before) == set(after)
  assert set(tensors) == set(expected)
  for name, value in tensors.items():
    assert np.array_equal(value.numpy(), expected[name]), name
  for name in LTG_BERT.targets["causal"][0].code:
    assert (tmp_path / "again" / name).read_text() == (CODE / name).read_text()
  config = json.loads((tmp_path / "again" / "config.json").read_text())
  assert config["auto_map"] == exported.config["auto_map"]


def test_another_vocabulary(gpt_bert, tmp_path):
  model = gpt_bert.open("AutoModelForMaskedLM")
  tokens = helpers.tokens(2, T)
  before = run(model, tokens)
  vocabulary = before.shape[-1]
  for size in (vocabulary + 5, vocabulary):
    model.resize_token_embeddings(size, mean_resizing=False)
    after = run(model, tokens)
    assert after.shape[-1] == model.config.vocab_size == size
    np.testing.assert_allclose(after[..., :vocabulary], before, atol=1e-5)


def test_losses_of_texts(gpt_bert):
  tokens = helpers.tokens(4, T)
  numbers = torch.tensor([0.5, -1.0, 2.0, 0.0])
  several = torch.tensor([[0.0, 1.0, 1.0]] * 4)
  f = torch.nn.functional
  for labels, classes, loss in (
    (tensor([0, 2, 1, 1]), 3, f.cross_entropy),
    (numbers, 1, lambda x, y: f.mse_loss(x[:, 0], y)),
    (several, 3, f.binary_cross_entropy_with_logits),
  ):
    model = gpt_bert.open(
      "AutoModelForSequenceClassification", num_labels=classes
    )
    out = model(tensor(tokens), labels=labels)
    assert torch.allclose(out.loss, loss(out.logits, labels))
    out.loss.backward()
    assert model.dense.weight.grad.any()
    assert model.model.embed_tokens.weight.grad.any()
  with pytest.raises(ValueError, match="mask of shape"):
    model(tensor(tokens), torch.zeros(4, 1, T, T))


def test_classified_tokens(gpt_bert):
  model = gpt_bert.open("AutoModelForTokenClassification", num_labels=5)
  tokens = helpers.tokens(2, T)
  weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
  model.classifier.weight.data.copy_(weight)
  labels = torch.where(tensor(tokens) % 2 == 0, tensor(tokens) % 5, -100)
  out = model(tensor(tokens), labels=labels)
  hidden = np.asarray(gpt_bert.hidden(tokens, BIDIRECTIONAL))
  close(out.logits.detach().numpy(), hidden @ weight.numpy().T)
  kept = labels >= 0
  assert torch.allclose(
    out.loss, torch.nn.functional.cross_entropy(out.logits[kept], labels[kept])
  )
  out.loss.backward()
  assert all(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_a_classifier_begins_with_the_encoder(gpt_bert, kind):
  model = gpt_bert.open(f"AutoModelFor{kind}Classification", num_labels=3)
  for name, value in model.named_parameters():
    if name.startswith("model."):
      assert np.array_equal(value.detach(), gpt_bert.tensors[name]), name
    else:
      assert value.isfinite().all()
      limit = 2.001 * model.config.initializer_range
      assert value.any() == name.endswith("weight")
      assert value.abs().max() <= limit, name
