"""Greedy generation, ours compared with transformers' with its cache.

Prompts are of unequal lengths. Ours is `antlm_jax.generate`, from text to text,
theirs `generate` alone, from tokens to tokens. Nothing ends early.
"""

import dataclasses
import pathlib

import numpy as np

from antlm_jax.evals.benchmarks import turns
from antlm_jax.evals.benchmarks.beside import models
from antlm_jax.inference import generation

_PROMPTS = 4, 24  # words of the shortest and of the longest


@dataclasses.dataclass(frozen=True)
class Generation(turns.Work):
  """Prompts to continue."""

  kind = "generate"
  unit = "tokens"

  size: str
  prompts: int  # at once
  tokens: int  # after each prompt

  def __str__(self) -> str:
    return f"generate {self.size}, {self.prompts} x {self.tokens}"

  def texts(self) -> list[str]:
    """Makes prompts of words drawn at random, the first one the longest."""
    draw = np.random.default_rng(0)
    least, most = _PROMPTS
    words = models.SIZES[self.size].vocab_size // 2
    rest = draw.integers(least, most, self.prompts - 1, endpoint=True)
    return [
      " ".join(f"w{n}" for n in draw.integers(0, words, length))
      for length in (most, *rest)
    ]

  def tiny(self) -> "Generation":
    return Generation(models.tiny(self.size), self.prompts, 5)

  def same(self, ours, theirs) -> bool:
    # Rounding may choose another one of two that are as likely.
    return bool((ours == theirs).mean() > 0.9)


def ours(work: Generation, folder: pathlib.Path) -> tuple[turns.Call, float]:
  """Prepares our generation; a call returns tokens `[prompts, tokens]`."""
  tokenizer = models.word_tokenizer(work.size)
  loaded = models.make_benchmark_model(work.size, tokenizer, "causal", folder)
  texts = work.texts()

  def call():
    continued = generation.generate(
      loaded, texts, tokens=work.tokens, temperature=0
    )
    token_ids = tokenizer.encode_batch(continued)
    return np.stack([ids[-work.tokens :] for ids in token_ids])

  return call, work.prompts * work.tokens


def theirs(work: Generation, folder: pathlib.Path) -> tuple[turns.Call, float]:
  """Prepares transformers' generation, of prompts padded on the left."""
  transformers, _ = models.torch_modules()
  model = models.in_transformers("causal", folder).eval()
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    models.exported(folder), padding_side="left"
  )
  batch = tokenizer(work.texts(), padding=True, return_tensors="pt")
  arguments = {
    name: batch[name].to(model.device)
    for name in ("input_ids", "attention_mask")
  }
  length = arguments["input_ids"].shape[1]

  def call():
    out = model.generate(
      **arguments, max_new_tokens=work.tokens, do_sample=False
    )
    return out[:, length:].cpu().numpy()

  return call, work.prompts * work.tokens
