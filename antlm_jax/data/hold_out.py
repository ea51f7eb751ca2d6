"""Dividing documents into what is trained on and what is held out."""

import array
import dataclasses
import math
from collections.abc import Iterable, Iterator

import numpy as np

from antlm_jax.data.readers import Piece
from antlm_jax.data.text_files import Corpus

SPLITS = ("train", "dev")


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
  """Which documents of a corpus are of which split."""

  corpus: Corpus
  sizes: np.ndarray  # of its train sources' documents, in bytes, int64 `[n]`
  # Where in each the held-out part begins, int64 `[n]`: at 0 in what is held
  # out, at its end in all others.
  begins: np.ndarray
  share: float  # of the documents to train on

  @classmethod
  def of(cls, corpus: Corpus, dev_share: float, share: float) -> "Division":
    """Reads the corpus, and holds out `dev_share` if nothing in it is dev."""
    sizes = measure(corpus.pieces("train"))
    whole = len(corpus.dev) > 0 or not len(sizes)
    begins = sizes if whole else hold_out(sizes, dev_share)
    return cls(corpus, sizes, begins, share)

  @property
  def cut(self) -> int | None:
    """The number of the document, from 1 on, whose end is held out, if any."""
    (cut,) = np.nonzero((self.begins > 0) & (self.begins < self.sizes))
    return int(cut[0]) + 1 if len(cut) else None

  def size(self, split: str) -> float:
    """Returns the size of a split in bytes, about."""
    if split == "train":
      return self.share * self.begins.sum()
    return (self.sizes - self.begins).sum()

  def texts(self, split: str) -> Iterator[str]:
    """Yields the documents of a split, in order; of train, a share.

    The share is spread evenly, and begins with the first.
    """
    if split == "dev" and self.corpus.dev:
      yield from (piece.text for piece in self.corpus.pieces("dev"))
      return
    pieces = self.corpus.pieces("train")
    found = divide(pieces, self.sizes, self.begins, split)
    share, count, last = self.share if split == "train" else 1.0, 0, None
    for document, text in found:
      # Of what is left to train on, so that dev does not depend on the share.
      count, last = count + (document != last), document
      # Taken where the sum of shares steps over a whole number.
      if math.ceil(share * count) > math.ceil(share * (count - 1)):
        yield text


def measure(pieces: Iterable[Piece]) -> np.ndarray:
  """Returns the sizes of documents in bytes of UTF-8, int64 `[n]`."""
  # Bytes are near to tokens in any script, as neither characters nor words are.
  sizes = array.array("q")
  for text, first in pieces:
    size = len(text.encode("utf-8"))
    if first:
      sizes.append(size)
    else:
      sizes[-1] += size
  return np.array(sizes, np.int64)


def hold_out(sizes: np.ndarray, share: float) -> np.ndarray:
  """Returns where in each document the held-out part begins, int64 `[n]`.

  Of the documents' sizes `[n]` that is between half and twice the share (of at
  most a half), in whole ones, spread evenly. Where they are too few or too
  large, it is the one whose size is nearest; or else the end of a long one.
  """
  begins = sizes.copy()
  wanted = share * sizes.sum()
  # None that is larger than all that is wanted, and at most half of the others.
  small = np.flatnonzero(sizes <= wanted)
  if sizes[small].sum() >= 2 * wanted:
    begins[small[_spread(sizes[small], wanted)]] = 0
    return begins
  most = min(2 * wanted, sizes.sum() / 2)
  near = np.flatnonzero((sizes >= wanted / 2) & (sizes <= most))
  if len(near):
    begins[near[np.abs(sizes[near] - wanted).argmin()]] = 0
  else:
    begins[np.flatnonzero(sizes > wanted)[-1]] -= round(wanted)
  return begins


def _spread(sizes: np.ndarray, wanted: float) -> np.ndarray:
  """Returns the indices of sizes, evenly spread, whose sum is about wanted."""
  # Every so many, whatever their size, so that they are like the others; of all
  # ways to begin the one that comes nearest.
  step = sizes.sum() / wanted
  ways = [
    np.arange(step * phase, len(sizes) - 1e-3, step).astype(np.int64)
    for phase in np.linspace(0, 1, 16, endpoint=False)
  ]
  off = [abs(sizes[taken].sum() / wanted - 1) for taken in ways]
  if min(off) < 0.25:
    return ways[np.argmin(off)]
  # They are few, and unequal: each that brings their sum nearer to its share.
  due, taken = 0.0, []
  for index, size in enumerate(sizes.tolist()):
    due += size / step
    if size / 2 <= due:
      due -= size
      taken.append(index)
  return np.array(taken)


def divide(
  pieces: Iterable[Piece], sizes: np.ndarray, begins: np.ndarray, split: str
) -> Iterator[tuple[int, str]]:
  """Yields what is of a split, each with the index of its document.

  Documents have `sizes` in bytes and held-out parts from `begins` on, `[n]`.
  """
  sizes, begins = memoryview(sizes), memoryview(begins)
  document, at = -1, 0  # byte in the document
  for text, first in pieces:
    if first:
      document, at = document + 1, 0
    size, left = len(text.encode("utf-8")), begins[document] - at
    at += size
    if 0 < left < size:
      parts = _cut(text, left, (sizes[document] - begins[document]) // 4)
      text = parts[SPLITS.index(split)].strip()
    elif (left > 0) != (split == "train"):
      continue
    if text:
      yield document, text


def _cut(text: str, at: int, spare: int) -> tuple[str, str]:
  """Cuts at a byte, or before its word if that moves at most `spare`."""
  before = text.encode("utf-8")[:at].decode("utf-8", errors="ignore")
  space = max(before.rfind(" "), before.rfind("\n")) + 1
  if len(before) - space <= spare:
    before = before[:space]
  return before, text[len(before) :]
