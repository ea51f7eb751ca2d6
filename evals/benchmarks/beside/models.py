"""Models of random weights, in this library and in transformers."""

import functools
import pathlib

import jax
import numpy as np
import tokenizers

from antlm_jax import config, models
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.hf import export
from antlm_jax.inference.model import Loaded, load, write_checkpoint
from antlm_jax.models.llama import SHAPES
from antlm_jax.runtime import cores
from antlm_jax.training.checkpoint import Meta

_SPECIAL = ("<pad>", "<s>", "<mask>")  # and no end of text
SIZES = {
  "tiny": dict(layers=2, width=64, mlp_width=96, heads=2, kv_heads=1),
  "7M": dict(layers=6, width=256, mlp_width=704, heads=4, kv_heads=4),
  "97M": SHAPES["97M"],
}


def vocab_size(size: str) -> int:
  """Returns the number of tokens V of a size's vocabulary."""
  return 16_000 if size == "97M" else 8_192


def word_tokenizer(size: str) -> Tokenizer:
  """Makes a tokenizer of words w0, w1, ..., a token each."""
  names = [f"w{n}" for n in range(vocab_size(size) - len(_SPECIAL))]
  ids = {word: n for n, word in enumerate([*_SPECIAL, *names])}
  level = tokenizers.models.WordLevel(ids, unk_token=names[-1])
  backend = tokenizers.Tokenizer(level)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(list(_SPECIAL))
  return Tokenizer(backend)


def make_benchmark_model(
  size: str, tokenizer: Tokenizer, folder: pathlib.Path
) -> Loaded:
  """Makes a model, in float32, whose likeliest tokens are so by far."""
  changes = config.changes()
  changes.model.update(SIZES[size], max_seq_len=512, init_std=0.1)
  settings = config.load_config(changes)
  model = models.build_model(settings.model, tokenizer.vocab_size)
  params = jax.jit(functools.partial(model.init, 0))()
  meta = Meta(settings, tokenizer, "bos", data="random")
  return load(write_checkpoint(folder / "random", 0, params, meta))


def in_transformers(loaded: Loaded, attention: str, folder):
  """Exports a model, and returns it in transformers, with where it lies."""
  transformers, torch = torch_modules()
  (path,) = export.export_model(loaded, folder / attention, [attention])
  kind = {"causal": "CausalLM", "bidirectional": "MaskedLM"}[attention]
  auto = getattr(transformers, f"AutoModelFor{kind}")
  return auto.from_pretrained(path, dtype=torch.float32), path


def torch_modules():
  """Imports transformers and torch, with a thread for each of our cores."""
  import torch
  import transformers

  transformers.logging.disable_progress_bar()
  torch.set_num_threads(cores.count_cores())
  return transformers, torch


def alike(ours, theirs) -> bool:
  """Whether numbers are the same to a thousandth."""
  return bool(np.allclose(ours, theirs, rtol=1e-3, atol=1e-3))
