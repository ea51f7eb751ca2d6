"""Okapi BM25 scores documents by the words that they share with a query."""

import collections
import re
from collections.abc import Iterator, Sequence

import numpy as np

# Lucene's defaults: the weight of a word's repetitions, and the penalty of long
# documents.
_K1, _B = 1.2, 0.75


def bm25_scores(
  queries: Sequence[str], documents: Sequence[str]
) -> Iterator[np.ndarray]:
  """Yields each query's scores of all documents, float32 `[documents]`.

  A word is letters, digits and underscores, in lower case. Words are neither
  stemmed nor left out. Their weight is Lucene's, which is never below 0.
  """
  ids: dict[str, int] = {}
  found = [collections.Counter(_bm25_words(text)) for text in documents]
  words = _flat_array(
    (ids.setdefault(w, len(ids)) for w in one) for one in found
  )
  # One entry for each document that a word is in, those of a word together.
  order = np.argsort(words, kind="stable")
  starts = np.searchsorted(words[order], np.arange(len(ids) + 1))
  at = _flat_array([number] * len(one) for number, one in enumerate(found))[
    order
  ]
  often = _flat_array(one.values() for one in found)[order]
  lengths = np.array([one.total() for one in found])
  norm = 1 - _B + _B * lengths / max(1, lengths.mean())
  there = np.diff(starts)
  weight = np.log1p((len(found) - there + 0.5) / (there + 0.5))
  gains = (_K1 + 1) * often / (often + _K1 * norm[at])
  gains = (np.repeat(weight, there) * gains).astype(np.float32)
  for query in queries:
    total = np.zeros(len(found), np.float32)
    for word in filter(ids.__contains__, _bm25_words(query)):
      these = slice(*starts[ids[word] : ids[word] + 2])
      total[at[these]] += gains[these]
    yield total


def _bm25_words(text: str) -> list[str]:
  return re.findall(r"\w+", text.lower())


def _flat_array(parts) -> np.ndarray:
  return np.fromiter((x for part in parts for x in part), np.int64)
