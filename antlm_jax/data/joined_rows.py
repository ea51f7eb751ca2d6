"""Rows of several sources as one, wherever each of them is."""

from collections.abc import Sequence

import numpy as np

from antlm_jax.data.rows import Indices, Rows


class Joined(Rows):
  """Rows of several sources, some of which are in memory."""

  def __init__(self, parts: Sequence[Rows]):
    self.seq_len = parts[0].seq_len
    self.segmented = parts[0].segmented
    self._parts = parts
    self._part_ends = np.cumsum([len(rows) for rows in parts])
    self._row_count = int(self._part_ends[-1])

  def by_blocks(self, size: int, at_once: int) -> Rows:
    return Joined([part.by_blocks(size, at_once) for part in self._parts])

  def read(self, indices: Indices) -> tuple[np.ndarray, np.ndarray | None]:
    indices = np.asarray(indices, np.int64)
    tokens = np.empty((len(indices), self.seq_len), np.int32)
    starts = np.empty(tokens.shape, bool) if self.segmented else None
    of_part = np.searchsorted(self._part_ends, indices, side="right")
    for number in np.unique(of_part).tolist():
      in_part = of_part == number
      part = self._parts[number]
      begin = self._part_ends[number] - len(part)
      tokens[in_part], part_starts = part.read(indices[in_part] - begin)
      if starts is not None:
        starts[in_part] = part_starts
    return tokens, starts
