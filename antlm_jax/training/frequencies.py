"""Frequencies of the tokens in prepared rows."""

from collections.abc import Iterable

import numpy as np

from antlm_jax.data.rows import Rows

_MOST_ROWS = 1 << 16  # counted of each set; larger sets are sampled
_BLOCK = 4096  # rows in memory at once
_SAMPLE = 1 << 20  # tokens of a sample of rows


def token_counts(rows: Rows, vocab_size: int) -> np.ndarray:
  """Counts the tokens of rows, or of an even sample of them, float64 `[V]`."""
  size = min(len(rows), _MOST_ROWS)
  sample = np.linspace(0, len(rows) - 1, size).astype(int)
  out = np.zeros(vocab_size)
  for start in range(0, size, _BLOCK):
    tokens, _ = rows.read(sample[start : start + _BLOCK])
    out += np.bincount(tokens.reshape(-1), minlength=vocab_size)
  return out


def sample(rows: Rows) -> np.ndarray:
  """Returns an even sample of rows, int32 `[n, T]`."""
  size = min(len(rows), max(1, _SAMPLE // rows.seq_len))
  return rows.read(np.linspace(0, len(rows) - 1, size).astype(int))[0]


def entropy(sets: Iterable[Rows], special: np.ndarray) -> float:
  """Returns the unigram entropy of all sets' tokens, in nats.

  This is the loss of a model that always predicts the frequencies of these very
  tokens. A model cannot know them so well in advance if the text is short.
  Tokens that are `special` (bool `[V]`) do not count. Masked objectives do not
  predict them. Causal objectives soon learn where documents begin.
  """
  total = sum(token_counts(rows, len(special)) for rows in sets)
  total[special] = 0
  shares = total[total > 0] / total.sum()
  return float(-(shares * np.log(shares)).sum())
