"""Greedy generation, ours compared with transformers' with its cache.

Prompts are of unequal lengths. Ours is `antlm_jax.generate`, from text to text,
theirs `generate` alone, from tokens to tokens. Nothing ends early.
"""

import itertools
import pathlib
from collections.abc import Iterator

import numpy as np

from antlm_jax.evals.benchmarks.beside import models
from antlm_jax.evals.benchmarks.turns import TimedCase
from antlm_jax.inference import generation

_PROMPTS = 4, 24  # words of the shortest and of the longest
_BATCHES = 1, 8  # prompts at once
_TOKENS = 50, 200  # that are generated


def generation_cases(folder: pathlib.Path, size: str) -> Iterator[TimedCase]:
  """Yields the cases of a size: one and more prompts, few and many tokens."""
  loaded = models.make_benchmark_model(
    size, models.word_tokenizer(size), folder
  )
  model, _ = models.in_transformers(loaded, "causal", folder)
  for batch, tokens in itertools.product(_BATCHES, _TOKENS):
    prompts = _random_prompts(batch, loaded.tokenizer.vocab_size)
    rows = [generation.encode_prompt(loaded, prompt) for prompt in prompts]
    yield TimedCase(
      f"generate {size}, {batch} x {tokens}",
      "transformers",
      _our_generation(loaded, prompts, tokens),
      _their_generation(model.eval(), rows, tokens),
      work=batch * tokens,
      unit="tokens",
      # Rounding may choose another one of two that are as likely.
      same=lambda a, b: (a == b).mean() > 0.9,
    )


def _random_prompts(count: int, vocab_size: int) -> list[str]:
  """Makes prompts of words drawn at random, the first one the longest."""
  draw = np.random.default_rng(0)
  least, most = _PROMPTS
  lengths = [most, *draw.integers(least, most, count - 1, endpoint=True)]
  return [
    " ".join(f"w{n}" for n in draw.integers(0, vocab_size // 2, length))
    for length in lengths
  ]


def _our_generation(loaded, prompts: list[str], tokens: int):
  def call():
    texts = generation.generate(loaded, prompts, tokens=tokens, temperature=0)
    token_ids = loaded.tokenizer.encode_batch(texts)
    return np.stack([ids[-tokens:] for ids in token_ids])

  return call


def _their_generation(model, rows: list[np.ndarray], tokens: int):
  """Continues rows of tokens, padded on the left."""
  _, torch = models.torch_modules()
  longest = max(map(len, rows))
  pads = [longest - len(row) for row in rows]
  ids = [np.pad(row, (n, 0)) for row, n in zip(rows, pads, strict=True)]
  visible = [np.arange(longest) >= n for n in pads]
  ids, visible = (
    torch.tensor(np.stack(x), dtype=torch.long) for x in (ids, visible)
  )

  def call():
    out = model.generate(
      ids, attention_mask=visible, max_new_tokens=tokens, do_sample=False
    )
    return out[:, longest:].numpy()

  return call
