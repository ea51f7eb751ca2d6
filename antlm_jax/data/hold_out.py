"""Holds out a share of the documents, and takes a share of the others."""

import numpy as np

from antlm_jax.data.document_store import DocumentFile as Texts


def divide(
  texts: Texts, dev_share: float, share: float, span: int = 0, spans: int = 1
) -> tuple[Texts, Texts, int | None]:
  """Divides documents into those to train on and those held out.

  Holds out `dev_share` of the bytes, and takes `share` of the other documents,
  spread evenly from the first. The documents are those of one of `spans`, each
  of which is divided alone. If a span's documents are too large to hold out
  whole, and there are enough spans, every n-th span is held out entirely.

  Returns:
    Texts to train on, held-out texts, and the number of the document that is
    cut (only its end is held out), or None.
  """
  sizes = np.bincount(texts.documents, texts.sizes).astype(np.int64)
  held_out = np.zeros_like(sizes)
  if dev_share and len(sizes):
    held_out = sizes - hold_out(sizes, dev_share)
    partly = ((held_out > 0) & (held_out < sizes)).any()
    if partly and spans * dev_share >= 2:
      every = round(1 / dev_share)
      held_out = sizes * (span % every == every // 2)
  # The byte where the held-out part of each document begins.
  begins, cut = np.cumsum(sizes) - held_out, None
  for cut in np.flatnonzero((held_out > 0) & (held_out < sizes)).tolist():
    begins[cut] = _word_before(texts, begins[cut], held_out[cut] // 4)
  middle = np.clip(begins[texts.documents], texts.begins, texts.ends)
  dev = _part(texts, middle, texts.ends, middle < texts.ends)
  train = _part(texts, texts.begins, middle, texts.begins < middle)
  # A document is taken where the sum of the shares reaches a whole number.
  # Another number in each span, so that no span takes one too many.
  phase = span * 0.618 % 1
  taken = np.diff(np.ceil(share * np.arange(len(sizes) + 1) - phase)) > 0
  _, number = np.unique(train.documents, return_inverse=True)
  return _part(train, train.begins, train.ends, taken[number]), dev, cut


def _part(texts: Texts, begins, ends, kept: np.ndarray) -> Texts:
  return Texts(texts.data, begins[kept], ends[kept], texts.documents[kept])


def hold_out(sizes: np.ndarray, share: float) -> np.ndarray:
  """Returns where in each document the held-out part begins, int64 `[n]`.

  That is 0 in documents that are held out, and the size in all others. The
  held-out documents are whole and evenly spread, with between half and twice
  the share of the bytes. If documents are too few or too large for that, it is
  the document of the nearest size, or the end of a long document.
  Sizes are in bytes, int64 `[n]`, which predict tokens best in any script.
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
  # Every n-th of any size, so that they are like the others. Of 16 first
  # indices, the index that gives the nearest sum.
  step = sizes.sum() / wanted
  ways = [
    np.arange(step * phase, len(sizes) - 1e-3, step).astype(np.int64)
    for phase in np.linspace(0, 1, 16, endpoint=False)
  ]
  off = [abs(sizes[taken].sum() / wanted - 1) for taken in ways]
  if min(off) < 0.25:
    return ways[np.argmin(off)]
  # They are few and unequal: take each that moves the sum nearer to its share.
  due, taken = 0.0, []
  for index, size in enumerate(sizes.tolist()):
    due += size / step
    if size / 2 <= due:
      due -= size
      taken.append(index)
  return np.array(taken)


def _word_before(texts: Texts, at: int, spare: int) -> int:
  """Returns where the word at a byte begins, if `spare` characters reach it."""
  begin = int(texts.begins[np.searchsorted(texts.ends, at, side="right")])
  before = texts.decode(begin, int(at))
  space = max(before.rfind(" "), before.rfind("\n")) + 1
  if len(before) - space <= spare:
    before = before[:space]
  return begin + len(before.encode("utf-8"))
