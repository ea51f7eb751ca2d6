"""GGUF files, which transformers reads for import."""

import numpy as np
import pytest

from antlm_jax.commands.import_ import import_model
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.hf import import_
from antlm_jax.masks import AttentionMask
from tests import hub, runs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

WIDTH = 64
LAYERS = 2


@pytest.fixture(scope="module")
def file(tmp_path_factory):
  return write(tmp_path_factory.mktemp("gguf") / "small.Q8_0.gguf")


def write(path, without=(), added=(), **fields):
  """Writes a Llama as GGUF, in Q8_0 but for its embeddings."""
  letters = [*"abcdefghijklmnopqrstuvwxyz.", "Ġ"]
  tokens = ["<|endoftext|>", *letters, "th", "the"]
  types = [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * 30
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_context_length(128)
  writer.add_embedding_length(WIDTH)
  writer.add_block_count(LAYERS)
  writer.add_feed_forward_length(2 * WIDTH)
  writer.add_head_count(4)
  writer.add_head_count_kv(2)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_rope_freq_base(10_000.0)
  writer.add_vocab_size(len(tokens))
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("default")
  writer.add_token_list(tokens)
  writer.add_token_types(types)
  writer.add_token_merges(["t h", "th e"])
  writer.add_bos_token_id(0)
  writer.add_eos_token_id(0)
  rng = np.random.default_rng(0)
  shapes = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH)}
  norms = ["output_norm"]
  for layer in range(LAYERS):
    block = f"blk.{layer}"
    shapes |= {
      f"{block}.attn_q": (WIDTH, WIDTH),
      f"{block}.attn_k": (WIDTH // 2, WIDTH),
      f"{block}.attn_v": (WIDTH // 2, WIDTH),
      f"{block}.attn_output": (WIDTH, WIDTH),
      f"{block}.ffn_gate": (2 * WIDTH, WIDTH),
      f"{block}.ffn_up": (2 * WIDTH, WIDTH),
      f"{block}.ffn_down": (WIDTH, 2 * WIDTH),
    }
    norms += [f"{block}.attn_norm", f"{block}.ffn_norm"]
  for name, value in fields.items():
    writer.add_uint32(name, value)
  for name in added:
    writer.add_tensor(name, np.ones(WIDTH, np.float32))
  for name in without:
    del shapes[name]
  for name, shape in shapes.items():
    values = rng.normal(size=shape).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    if name == "token_embd":
      kind = gguf.GGMLQuantizationType.F32
    quantized = gguf.quants.quantize(values, kind)
    writer.add_tensor(f"{name}.weight", quantized, raw_dtype=kind)
  for name in norms:
    scale = rng.uniform(0.5, 2, WIDTH).astype(np.float32)
    writer.add_tensor(f"{name}.weight", scale)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.slow
def test_a_gguf_file_is_imported_with_its_tokenizer(file, tmp_path):
  """Catches weights in another order, such as llama.cpp's of RoPE."""
  loaded = import_model(file, tmp_path / "run", quiet=True)
  assert loaded.tokenizer.encode("the cat").tolist() == [30, 28, 3, 1, 20]
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.float32
  )
  ids = np.arange(1, 31)[None]
  with torch.no_grad():
    expected = theirs.eval()(torch.tensor(ids)).logits.numpy()
  # The file's own numbers.
  table = gguf.GGUFReader(file).tensors
  written = {t.name: t.data for t in table}["token_embd.weight"]
  embedding = theirs.get_input_embeddings().weight.detach().numpy()
  np.testing.assert_array_equal(embedding, written)
  ours = hub.our_logits(loaded, ids, AttentionMask(causal=True))
  np.testing.assert_allclose(
    ours, expected[..., : ours.shape[-1]], rtol=1e-4, atol=1e-3
  )


def test_what_is_no_gguf_is_refused_in_a_line(tmp_path):
  bad = tmp_path / "bad.gguf"
  bad.write_bytes(b"text")
  for path, said in (
    (bad, "transformers cannot read"),
    (tmp_path / "absent.gguf", "there is no such file"),
  ):
    assert said in runs.told(import_model, path, tmp_path / "run")
  assert not (tmp_path / "run").exists()


SCALING = "llama.rope.scaling.factor"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    (
      {"without": ["blk.1.ffn_up"]},
      "weights are missing: model.layers.1.mlp.up_proj.weight",
    ),
    (
      {"without": ["output"], "split.count": 2},
      "is one of a model's 2 files: join them",
    ),
    ({"added": ["rope_freqs.weight"]}, "does not read rope_freqs.weight from"),
    ({"added": ["blk.0.attn_q.bias"]}, "does not read blk.0.attn_q.bias from"),
    ({SCALING: 4}, f"does not read {SCALING} from"),
  ],
)
def test_what_transformers_does_not_read_is_refused(changes, reason, tmp_path):
  """Catches missing weights that become random.

  It also catches tensors and scalings that vanish, and a part of a split model.
  """
  path = write(tmp_path / "a.gguf", **changes)
  assert reason in runs.told(import_model, path, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_tokenizer_next_to_the_file_is_not_read(tmp_path):
  """Catches ids of another tokenizer.json, which transformers prefers."""
  other = Tokenizer.train(["the cat"] * 9, 12, "characters")
  (tmp_path / "tokenizer.json").write_text(other.to_json())
  imported = import_.Imported(write(tmp_path / "a.gguf"))
  assert imported.meta.tokenizer.encode("the").tolist() == [30]
