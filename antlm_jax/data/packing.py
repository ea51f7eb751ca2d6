"""Packs documents into rows of equal length, in segments.

A packer takes an iterator of token arrays, one for each document, and yields
blocks `(tokens int32 [n, T], starts bool [n, T])`. `starts` marks the first
token of each segment; a token attends only within its segment. Position 0 of a
row always starts a segment. A block holds about `_WINDOW` tokens, which bounds
the memory.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from antlm_jax import hashing

Documents = Iterable[np.ndarray]
Block = tuple[np.ndarray, np.ndarray]

PACKINGS = ("stream", "documents", "chunks")
# Special tokens before and after a document, as attributes of `Tokenizer`.
BOUNDARIES = {
  "bos_eos": ("bos_id", "eos_id"),
  "bos": ("bos_id", None),
  "eos": (None, "eos_id"),
  "none": (None, None),
}

# The shortest chunk of `chunks` (arXiv 2507.00994, footnote 6).
SHORTEST_CHUNK = 12
_WINDOW = 1 << 20
_CHUNK_PURPOSE = 0x63686E6B


def boundary_ids(tokenizer, boundary: str) -> tuple[int | None, int | None]:
  """Returns the ids before and after a document in rows, or None."""
  names = BOUNDARIES[boundary]
  return tuple(name and getattr(tokenizer, name) for name in names)


def boundary_of(tokenizer) -> str:
  """Returns the boundary with each of `<s>` and `</s>` that exists.

  If both are one token, it is once between two documents: before each if the
  tokenizer adds it there alone, else after it.
  """
  if tokenizer.bos_id is not None and tokenizer.bos_id == tokenizer.eos_id:
    return "bos" if tokenizer.frame == ([tokenizer.bos_id], []) else "eos"
  return next(
    boundary
    for boundary, names in BOUNDARIES.items()
    if all(
      bool(name) == (getattr(tokenizer, role) is not None)
      for name, role in zip(names, ("bos_id", "eos_id"), strict=True)
    )
  )


def frame_ids(tokenizer, boundary: str) -> tuple[int | None, int | None]:
  """Returns the ids before and after a text on its own, or None."""
  before, after = boundary_ids(tokenizer, boundary)
  # In such rows, a document follows the `</s>` of the document before it.
  return after if boundary == "eos" else before, after


def bound(
  tokens: np.ndarray,
  bos_id: int | None,
  eos_id: int | None,
  begins: bool = True,
  ends: bool = True,
) -> np.ndarray:
  """Puts boundary tokens around a document `[n]`; None adds no token.

  `begins` and `ends` say whether the tokens begin and end their document.
  """
  # Not by np.concatenate, which takes as long as encoding a short document.
  first = int(begins and bos_id is not None)
  last = int(ends and eos_id is not None)
  out = np.empty(first + len(tokens) + last, np.int32)
  out[first : first + len(tokens)] = tokens
  if first:
    out[0] = bos_id
  if last:
    out[-1] = eos_id
  return out


def pack_stream(sequences: Documents, seq_len: int) -> Iterator[Block]:
  """Cuts the concatenated documents into rows, one segment each (BabyLlama).

  Tokens at the end that do not fill a row are dropped.
  """
  left = np.zeros(0, np.int32)
  for window in _packing_windows(sequences):
    # Tokens left over begin the next window's first row.
    joined = np.concatenate([left, *window])
    full = len(joined) // seq_len * seq_len
    tokens = joined[:full].reshape(-1, seq_len)
    left = joined[full:]
    starts = np.zeros(tokens.shape, bool)
    starts[:, 0] = True
    yield tokens, starts


def chunks(
  sequences: Documents, seq_len: int, seed: int, span: int = 0
) -> Iterator[Block]:
  """Like `pack_stream`, with each row cut in two segments (arXiv 2507.00994).

  The first segment has r tokens, with r uniform on [12, T - 12] and a function
  of (seed, span, row) only.
  """
  lengths = seq_len - 2 * SHORTEST_CHUNK + 1
  row = 0
  for tokens, starts in pack_stream(sequences, seq_len):
    rows = np.arange(row, row + len(tokens))
    # By the row's number, so that windows do not change the cuts.
    draw = hashing.uniform(seed, _CHUNK_PURPOSE, span, rows)
    cut = SHORTEST_CHUNK + (draw * lengths).astype(np.int64)
    starts[np.arange(len(tokens)), cut] = True
    yield tokens, starts
    row += len(tokens)


def pack_documents(
  sequences: Documents, seq_len: int, pad_id: int
) -> Iterator[Block]:
  """Packs each document as a segment, and cuts documents longer than a row.

  Nothing is dropped. Within a window, the longest pieces are placed first, each
  where it fits best. The rest of a row is padding, in a separate segment.
  """
  for window in _packing_windows(sequences):
    pieces = [
      sequence[start : start + seq_len]
      for sequence in window
      for start in range(0, len(sequence), seq_len)
    ]
    begins = best_fit([len(piece) for piece in pieces], seq_len)
    yield fill_rows(
      pieces, begins, begins.max() // seq_len + 1, seq_len, pad_id
    )


def best_fit(lengths: Sequence[int], seq_len: int) -> np.ndarray:
  """Places n pieces in rows, the longest first, each where it fits best.

  Returns:
    Index of each piece's first token in the flat rows, int64 `[n]`.
  """
  begins = np.zeros(len(lengths), np.int64)
  # The fullest row that still has room for a piece is the lowest set bit at or
  # above its length. One shift of a long int replaces a search over rows.
  with_room = [[] for _ in range(seq_len + 1)]
  rooms = 0  # bit r is set where a row has room for exactly r more tokens
  count = 0
  for piece in np.argsort(-np.asarray(lengths), kind="stable").tolist():
    length = int(lengths[piece])
    if fitting := rooms >> length:
      room = length + (fitting & -fitting).bit_length() - 1
      row = with_room[room].pop()
      if not with_room[room]:
        rooms ^= 1 << room
    else:
      room = seq_len
      row = count
      count = count + 1
    begins[piece] = (row + 1) * seq_len - room
    # The row now has less room. Full rows (bit 0) are never looked up again.
    with_room[room - length].append(row)
    rooms |= 1 << (room - length)
  return begins


def fill_rows(
  pieces: Sequence[np.ndarray],
  begins: np.ndarray,
  rows: int,
  seq_len: int,
  pad_id: int,
) -> Block:
  """Writes n pieces into rows as segments, at the places of `best_fit`."""
  # Copies all pieces at once, by the flat index of each token. A loop over
  # millions of pieces would take longer than the tokenizer.
  lengths = np.array([len(piece) for piece in pieces], np.int64)
  used = np.bincount(begins // seq_len, lengths, rows).astype(np.int64)
  tokens = np.full((rows, seq_len), pad_id, np.int32)
  starts = np.zeros(tokens.shape, bool)
  # A token's place is its piece's begin and its index in the piece.
  first = np.cumsum(lengths) - lengths
  inside = np.arange(lengths.sum()) - np.repeat(first, lengths)
  tokens.flat[np.repeat(begins, lengths) + inside] = np.concatenate(pieces)
  starts.flat[begins] = True
  # Padding is a separate segment, so that no token sees it.
  padded = np.flatnonzero(used < seq_len)
  starts[padded, used[padded]] = True
  return tokens, starts


def _packing_windows(sequences: Documents) -> Iterator[list[np.ndarray]]:
  """Groups documents until each group holds `_WINDOW` tokens."""
  window = []
  size = 0
  for sequence in sequences:
    window.append(sequence)
    size += len(sequence)
    if size >= _WINDOW:
      yield window
      window = []
      size = 0
  if size:
    yield window
