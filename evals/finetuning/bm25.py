"""Okapi BM25 scores documents by the words that they share with a query."""

import collections
import re
from collections.abc import Iterator, Sequence

import numpy as np

# Lucene's defaults: the weight of a word's repetitions, and the penalty of long
# documents.
_K1 = 1.2
_B = 0.75


def bm25_scores(
  queries: Sequence[str], documents: Sequence[str]
) -> Iterator[np.ndarray]:
  """Yields each query's scores of all documents, float32 `[documents]`.

  A word is letters, digits and underscores, in lower case. Words are neither
  stemmed nor left out. Their weight is Lucene's, which is never below 0.
  """
  ids: dict[str, int] = {}
  counters = [collections.Counter(_bm25_words(text)) for text in documents]
  words = _flat_array(
    (ids.setdefault(word, len(ids)) for word in counter) for counter in counters
  )
  # One entry for each document that a word is in, those of a word together.
  order = np.argsort(words, kind="stable")
  starts = np.searchsorted(words[order], np.arange(len(ids) + 1))
  numbers = _flat_array(
    [i] * len(counter) for i, counter in enumerate(counters)
  )
  numbers = numbers[order]
  repetitions = _flat_array(counter.values() for counter in counters)[order]
  lengths = np.array([counter.total() for counter in counters])
  norm = 1 - _B + _B * lengths / max(1, lengths.mean())
  document_counts = np.diff(starts)
  weight = np.log1p(
    (len(counters) - document_counts + 0.5) / (document_counts + 0.5)
  )
  gains = (_K1 + 1) * repetitions / (repetitions + _K1 * norm[numbers])
  gains = (np.repeat(weight, document_counts) * gains).astype(np.float32)
  for query in queries:
    scores = np.zeros(len(counters), np.float32)
    for word in filter(ids.__contains__, _bm25_words(query)):
      entries = slice(*starts[ids[word] : ids[word] + 2])
      scores[numbers[entries]] += gains[entries]
    yield scores


def _bm25_words(text: str) -> list[str]:
  return re.findall(r"\w+", text.lower())


def _flat_array(parts) -> np.ndarray:
  return np.fromiter((x for part in parts for x in part), np.int64)
