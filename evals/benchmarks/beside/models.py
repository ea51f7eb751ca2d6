"""Models of random weights, in this library and in transformers.

Our process writes a model into the folder of the case, and theirs waits for it.
"""

import functools
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import tokenizers

from antlm_jax import config, models
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.hf import export
from antlm_jax.inference.model import Loaded, load, write_checkpoint
from antlm_jax.models.llama import SHAPES
from antlm_jax.runtime import cores
from antlm_jax.training.checkpoint import Meta

_SPECIAL = ("<pad>", "<s>", "<mask>")  # and no end of text
_EXPORT = "exported"


class Size(NamedTuple):
  """A size of a model."""

  vocab_size: int
  settings: Mapping[str, Any]
  model: str = "llama"


_TINY = dict(layers=2, width=64, mlp_width=96, heads=2)
_BASE = dict(layers=22, width=768, mlp_width=1152, heads=12)
SIZES = {
  "tiny": Size(512, _TINY | {"kv_heads": 1}),
  "tiny ModernBERT": Size(512, _TINY, "modernbert"),
  "7M": Size(
    8192, dict(layers=6, width=256, mlp_width=704, heads=4, kv_heads=4)
  ),
  "97M": Size(16_000, SHAPES["97M"]),
  "210M": Size(128_256, SHAPES["210M"] | {"tied": False}),
  "ModernBERT": Size(50_368, _BASE, "modernbert"),
}


def tiny(size: str) -> str:
  """Returns the tiny size of the same encoder."""
  return "tiny ModernBERT" if SIZES[size].model == "modernbert" else "tiny"


def word_tokenizer(size: str) -> Tokenizer:
  """Makes a tokenizer of words w0, w1, ..., a token each."""
  words = SIZES[size].vocab_size - len(_SPECIAL)
  names = [f"w{n}" for n in range(words)]
  ids = {word: n for n, word in enumerate([*_SPECIAL, *names])}
  level = tokenizers.models.WordLevel(ids, unk_token=names[-1])
  backend = tokenizers.Tokenizer(level)
  backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  backend.add_special_tokens(list(_SPECIAL))
  return Tokenizer(backend)


def make_benchmark_model(
  size: str,
  tokenizer: Tokenizer,
  attention: str,
  folder: pathlib.Path,
  **settings,
) -> Loaded:
  """Makes a model, and exports it for transformers.

  Its likeliest tokens are so by far, unless `init_std` differs.
  """
  shape = SIZES[size]
  changes = config.changes(shape.model)
  changes.model.update(max_seq_len=512, init_std=0.1)
  changes.model.update(shape.settings)
  changes.model.update(settings)
  typed = config.load_config(changes)
  model = models.build_model(typed.model, tokenizer.vocab_size)
  params = jax.jit(functools.partial(model.init, 0))()
  meta = Meta(typed, tokenizer, "bos", data="random")
  loaded = load(write_checkpoint(folder / "random", 0, params, meta))
  options = {"sentences": attention == "bidirectional"}
  export.export_model(loaded, folder / _EXPORT, [attention], **options)
  return loaded


def exported(folder: pathlib.Path) -> pathlib.Path:
  """Returns where our process exports its model, once it has."""
  while not (folder / _EXPORT).exists():
    time.sleep(0.1)
  return folder / _EXPORT


def in_transformers(attention: str, folder: pathlib.Path):
  """Returns our process's model in transformers."""
  transformers, torch = torch_modules()
  kind = {"causal": "CausalLM", "bidirectional": "MaskedLM"}[attention]
  auto = getattr(transformers, f"AutoModelFor{kind}")
  model = auto.from_pretrained(exported(folder), dtype=torch.float32)
  return model.to(torch_device())


def torch_modules():
  """Imports transformers and torch, with a thread for each of our cores."""
  import torch
  import transformers

  # JAX only makes the batches here, and leaves the GPU to torch.
  jax.config.update("jax_platforms", "cpu")
  transformers.logging.disable_progress_bar()
  torch.set_num_threads(cores.count_cores())
  torch.set_float32_matmul_precision("high")
  return transformers, torch


def torch_device() -> str:
  """Returns the device of torch's models."""
  import torch

  return "cuda" if torch.cuda.is_available() else "cpu"
