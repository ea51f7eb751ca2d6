"""Holds out a share of the documents, and takes a share of the others."""

import dataclasses

import numpy as np

from antlm_jax import hashing
from antlm_jax.data.document_store import DocumentFile


def hold_out_documents(
  texts: DocumentFile,
  dev_share: float,
  share: float,
  span: int = 0,
  spans: int = 1,
) -> tuple[DocumentFile, DocumentFile, int | None]:
  """Divides documents into those to train on and those held out.

  Holds out `dev_share` of the bytes, and takes `share` of the other documents,
  spread evenly from the first. The documents are those of one span of `spans`,
  and each span is divided alone. If a span's documents are too large to hold
  out whole, and there are enough spans, every n-th span is held out entirely.

  Returns:
    Texts to train on, held-out texts, and the number of the document that is
    cut (only its end is held out), or None.
  """
  sizes = np.bincount(texts.documents, texts.sizes).astype(np.int64)
  train_sizes = _train_sizes(sizes, dev_share, span, spans)
  # The byte of the file after each document's part to train on.
  train_ends = np.cumsum(sizes) - sizes + train_sizes
  cut = _partly(sizes, train_sizes)
  if cut is not None:
    spare = (sizes[cut] - train_sizes[cut]) // 4
    train_ends[cut] = _word_before(texts, train_ends[cut], spare)
  # A piece of text may be before that byte, after it, or on both sides.
  middle = np.clip(train_ends[texts.documents], texts.begins, texts.ends)
  train = _part_of_texts(texts, texts.begins, middle)
  dev = _part_of_texts(texts, middle, texts.ends)
  return _taken(train, share, span, len(sizes)), dev, cut


def _train_sizes(
  sizes: np.ndarray, dev_share: float, span: int, spans: int
) -> np.ndarray:
  """Returns the bytes of each document before its held-out end, int64 `[n]`.

  That is 0 in a document that is held out, and its size if nothing is.
  """
  if not dev_share or not len(sizes):
    return sizes
  train_sizes = sizes_to_train(sizes, dev_share)
  enough_spans = spans * dev_share >= 2
  if _partly(sizes, train_sizes) is None or not enough_spans:
    return train_sizes
  interval = round(1 / dev_share)
  is_held_out = span % interval == interval // 2
  return np.zeros_like(sizes) if is_held_out else sizes


def _partly(sizes: np.ndarray, train_sizes: np.ndarray) -> int | None:
  """Returns the number of the document of which a part is held out, or None."""
  divided = np.flatnonzero((train_sizes > 0) & (train_sizes < sizes))
  return int(divided[0]) if len(divided) else None


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
  """Returns the bytes of each document to train on, int64 `[n]`.

  A held-out document has 0. The held-out documents are whole and evenly spread,
  with between half and twice the share of the bytes. If documents are too few
  or too large for that, it is the document of the nearest size, or the end of a
  long document. Sizes are in bytes, int64 `[n]`, which predict tokens best in
  any script.
  """
  target_size = share * sizes.sum()
  train_sizes = sizes.copy()
  # Several documents, if the small documents have enough text. None is larger
  # than all that is wanted, and at most half of their bytes are held out.
  small = np.flatnonzero(sizes <= target_size)
  if sizes[small].sum() >= 2 * target_size:
    train_sizes[small[_evenly_spread(sizes[small], target_size)]] = 0
    return train_sizes
  # One document, if its size is near the number of bytes that is wanted.
  most = min(2 * target_size, sizes.sum() / 2)
  near = np.flatnonzero((sizes >= target_size / 2) & (sizes <= most))
  if len(near):
    nearest = near[np.abs(sizes[near] - target_size).argmin()]
    train_sizes[nearest] = 0
    return train_sizes
  # The end of the last long document.
  last = np.flatnonzero(sizes > target_size)[-1]
  train_sizes[last] -= round(target_size)
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
