"""Holds out a share of the documents, and takes a share of the others.

All documents of a text are compared by hash before any is packed, so that
copies are held out together, wherever they are.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax import hashing
from antlm_jax.data.document_store import DocumentFile, Fingerprints

LEFT_OUT = -1  # in place of the size of a copy that is left out


class Division(NamedTuple):
  """Which documents of a text are held out or left out."""

  # Bytes of each document before its held-out end, int64 `[documents]`. It is 0
  # for a document that is held out whole, and `LEFT_OUT` for a copy.
  train_sizes: np.ndarray
  # Index of each span's first document, and the number of documents.
  starts: np.ndarray
  cut: int  # index of the document of which only the end is held out, or -1
  text_bytes: int  # of the documents that are not left out
  copies: int  # documents that repeat an earlier or a held-out file's document
  held_out: int  # held-out documents
  leaked: int  # held-out documents that are also trained on

  def of_span(self, span: int) -> np.ndarray:
    """Returns the `train_sizes` of a span."""
    return self.train_sizes[self.starts[span] : self.starts[span + 1]]


def divide_documents(
  spans: Sequence[Fingerprints],
  dev_share: float,
  dedup: bool = False,
  dev: Fingerprints | None = None,
) -> Division:
  """Chooses the documents to hold out and, with `dedup`, those to leave out.

  Holds out `dev_share` of the bytes, unless there are `dev` documents. Copies
  of a text are held out together, in the place of the first.
  """
  # All arrays are [documents], but for `first_documents` [texts], and
  # `held_out_hashes` and `is_leaked` [held-out documents].
  hashes, sizes = map(np.concatenate, zip(*spans, strict=True))
  first_documents, text_of_document = _distinct_texts(hashes)
  is_copy = np.ones(len(sizes), bool)
  is_copy[first_documents] = False
  train_sizes = sizes
  if dev is not None:
    is_copy |= np.isin(hashes, dev.hashes)
  elif len(sizes):
    train_sizes = _hold_out_texts(
      sizes, first_documents, text_of_document, dev_share, dedup
    )
  if dedup:
    train_sizes = np.where(is_copy, LEFT_OUT, train_sizes)
  is_cut = (train_sizes > 0) & (train_sizes < sizes)
  held_out_hashes = hashes[is_cut | (train_sizes == 0)]
  if dev is not None:
    held_out_hashes = dev.hashes
  is_leaked = np.isin(held_out_hashes, hashes[train_sizes == sizes])
  return Division(
    train_sizes,
    starts=np.cumsum([0, *(len(span.sizes) for span in spans)]),
    cut=np.flatnonzero(is_cut).max(initial=-1),
    text_bytes=sizes[train_sizes != LEFT_OUT].sum(),
    copies=is_copy.sum(),
    held_out=len(held_out_hashes),
    leaked=is_leaked.sum(),
  )


def _distinct_texts(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Numbers the different texts in the order of their first documents.

  Returns the index of each text's first document, int64 `[texts]`, and the
  number of each document's text, int64 `[documents]`.
  """
  # Here the texts are in the order of their hashes.
  _, first_documents, text_of_document = np.unique(
    hashes, return_index=True, return_inverse=True
  )
  return np.unique(first_documents[text_of_document], return_inverse=True)


def _hold_out_texts(
  sizes: np.ndarray,
  first_documents: np.ndarray,
  text_of_document: np.ndarray,
  share: float,
  dedup: bool,
) -> np.ndarray:
  """Holds out a share of the bytes; returns the `train_sizes` `[documents]`.

  A text is held out with all its copies. `sizes` are int64 `[documents]`, and
  the next two arguments are the result of `_distinct_texts`.
  """
  # By text [texts]: the number of its remaining documents, and their bytes.
  document_counts = np.bincount(text_of_document)
  if dedup:
    document_counts = np.ones_like(first_documents)
  text_sizes = sizes[first_documents] * document_counts
  text_train_sizes = sizes_to_train(text_sizes, share)
  is_held_out = text_train_sizes == 0
  is_cut = ~is_held_out & (text_train_sizes < text_sizes)
  if (document_counts[is_cut] > 1).any():
    # There are too few different texts to hold out copies together.
    return sizes_to_train(sizes, share)
  # By document [documents]. Sizes of copies may differ by white space.
  train_sizes = np.where(is_held_out[text_of_document], 0, sizes)
  train_sizes[first_documents[is_cut]] = text_train_sizes[is_cut]
  return train_sizes


def divide_texts(
  texts: DocumentFile, train_sizes: np.ndarray, share: float, span: int = 0
) -> tuple[DocumentFile, DocumentFile]:
  """Returns the texts of a span to train on, and those held out.

  `train_sizes` int64 `[n]` are those of a `Division`. Takes `share` of the
  documents to train on, spread evenly from the first.
  """
  sizes = np.bincount(texts.documents, texts.sizes).astype(np.int64)
  texts = _selected(texts, train_sizes[texts.documents] != LEFT_OUT)
  # The byte of the file after each document's part to train on.
  train_ends = np.cumsum(sizes) - sizes + train_sizes
  for cut in np.flatnonzero((train_sizes > 0) & (train_sizes < sizes)):
    spare = (sizes[cut] - train_sizes[cut]) // 4
    train_ends[cut] = _word_before(texts, train_ends[cut], spare)
  # A piece of text may be before that byte, after it, or on both sides.
  middle = np.clip(train_ends[texts.documents], texts.begins, texts.ends)
  train = _part_of_texts(texts, texts.begins, middle)
  dev = _part_of_texts(texts, middle, texts.ends)
  return _taken(train, share, span, len(sizes)), dev


def _taken(
  train: DocumentFile, share: float, span: int, documents: int
) -> DocumentFile:
  """Returns a share of the documents to train on, evenly spread."""
  # A document is taken where the sum of the shares reaches a whole number.
  # Another number in each span, so that no span takes one too many.
  sums = share * np.arange(documents + 1) - hashing.spread(span)
  is_taken = np.diff(np.ceil(sums)) > 0
  # Documents that are held out whole do not count.
  _, number = np.unique(train.documents, return_inverse=True)
  return _selected(train, is_taken[number])


def _part_of_texts(
  texts: DocumentFile, begins: np.ndarray, ends: np.ndarray
) -> DocumentFile:
  """Returns the texts between these bytes, and leaves out empty texts."""
  cut = dataclasses.replace(texts, begins=begins, ends=ends)
  return _selected(cut, begins < ends)


def _selected(texts: DocumentFile, chosen: np.ndarray) -> DocumentFile:
  """Returns the texts that are kept, bool `[n]`."""
  return DocumentFile(
    texts.data,
    texts.begins[chosen],
    texts.ends[chosen],
    texts.documents[chosen],
  )


def sizes_to_train(sizes: np.ndarray, share: float) -> np.ndarray:
  """Returns the number of bytes of each document to train on, int64 `[n]`.

  The other bytes are held out: between half and twice the share of all bytes.
  They are the first of these sets that the documents allow:

  1. Several whole documents, evenly spread.
  2. The whole document whose size is nearest to the share.
  3. The end of the last long document.

  Args:
    sizes: Bytes of each document, int64 `[n]`. Bytes predict the number of
      tokens best in any script.
    share: Share of all bytes to hold out.
  """
  target_size = share * sizes.sum()
  train_sizes = sizes.copy()
  # Case 1. The small documents must have twice the target, so that at least
  # about half of their bytes remain to train on.
  small = np.flatnonzero(sizes <= target_size)
  if sizes[small].sum() >= 2 * target_size:
    train_sizes[small[_evenly_spread(sizes[small], target_size)]] = 0
    return train_sizes
  # Case 2. At least half of all bytes remain to train on.
  largest_size = min(2 * target_size, sizes.sum() / 2)
  candidates = np.flatnonzero(
    (sizes >= target_size / 2) & (sizes <= largest_size)
  )
  if len(candidates):
    distances = np.abs(sizes[candidates] - target_size)
    train_sizes[candidates[distances.argmin()]] = 0
    return train_sizes
  # Case 3. Only this case cuts a document.
  last_long = np.flatnonzero(sizes > target_size)[-1]
  train_sizes[last_long] -= round(target_size)
  return train_sizes


def _evenly_spread(sizes: np.ndarray, target_size: float) -> np.ndarray:
  """Returns indices of sizes, evenly spread, whose sum is about a target."""
  # Every n-th of any size, so that they are like the others. Of 16 first
  # indices, the index that gives the nearest sum.
  step = sizes.sum() / target_size
  ways = [
    np.arange(step * first, len(sizes) - 1e-3, step).astype(np.int64)
    for first in np.linspace(0, 1, 16, endpoint=False)
  ]
  off = [abs(sizes[taken].sum() / target_size - 1) for taken in ways]
  if min(off) < 0.25:
    return ways[np.argmin(off)]
  # They are few and unequal: take each that moves the sum nearer to its share.
  due = 0.0
  taken = []
  for index, size in enumerate(sizes.tolist()):
    due += size / step
    if size / 2 <= due:
      due -= size
      taken.append(index)
  return np.array(taken)


def _word_before(texts: DocumentFile, position: int, spare: int) -> int:
  """Returns where the word at a byte begins, if `spare` characters reach it."""
  begin = int(texts.begins[np.searchsorted(texts.ends, position, side="right")])
  before = texts.decode(begin, int(position))
  space = max(before.rfind(" "), before.rfind("\n")) + 1
  if len(before) - space <= spare:
    before = before[:space]
  return begin + len(before.encode("utf-8"))
