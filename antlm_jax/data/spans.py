"""Divides text into spans, and reads the documents of a span.

Two words name text on its way from files to rows:

- A *document* is a unit of meaning: an article, a record or a line, as its
  file's kind and `--documents` say. Documents are held out, bounded by special
  tokens and packed. A document that is too long for memory is read in pieces,
  each a `readers.Document`; only the first piece `begins` it.
- A *span* is a unit of work: some small files, or a part of a large file. A
  span is read and packed by itself. So its rows depend on its documents to
  train on, the settings and the seed alone. A task packs consecutive spans into
  one file of rows, a shard. The rows are therefore the same for any number of
  tasks.
"""

from typing import NamedTuple

from antlm_jax.data import readers
from antlm_jax.data.text_files import Corpus

# Bytes of a span. At least 2,048 rows or so: the last tokens of a span, which
# fill no row, are dropped.
_LEAST = 1 << 19
_MOST = 1 << 22
_ROWS = 2048


class Span(NamedTuple):
  """Text that is read and packed by itself."""

  number: int
  # Each source, and its part as (index, count): one of `count` equal parts.
  parts: tuple[tuple[str, tuple[int, int]], ...]
  bytes: int


def make_spans(corpus: Corpus, seq_len: int) -> list[Span]:
  """Divides the text to train on into spans."""
  extents = [
    (path, *readers.extent(path, corpus.rule)) for path in corpus.train
  ]
  total = sum(size for _, size, _ in extents)
  unit = max(min(max(total >> 12, _LEAST), _MOST), _ROWS * seq_len)
  out = []
  parts = []
  size_of_parts = 0
  for path, size, most in extents:
    count = min(most, max(1, round(size / unit)))
    for index in range(count):
      parts.append((path, (index, count)))
      size_of_parts += size / count
      if size_of_parts >= unit / 2:
        out.append(Span(len(out), tuple(parts), round(size_of_parts)))
        parts = []
        size_of_parts = 0
  if parts:
    out.append(Span(len(out), tuple(parts), round(size_of_parts)))
  return out
