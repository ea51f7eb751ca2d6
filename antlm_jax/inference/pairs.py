"""Minimal pairs, and accuracy on them.

A folder's *.jsonl hold one pair a line: `sentence_good` and `sentence_bad`,
and, if known, `UID`, `linguistics_term`, `field` and `pair_id`. BabyLM's
filtered BLiMP and its supplement are such folders. The UID is the file's name
where a line names none, as in the supplement.
"""

import collections
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.inference import scoring
from antlm_jax.inference.framing import TextModel
from antlm_jax.runtime import files

_GROUPS = ("field", "UID", "linguistics_term")


@dataclasses.dataclass(frozen=True)
class Pair:
  """A minimal pair.

  Attributes:
    context: What both choices follow, or "".
    good: The acceptable choice.
    bad: The unacceptable one.
    pair_id: Its name among those of its UID.
    groups: What accuracies are taken by, name to value, as the data names
      them: always `UID`, the paradigm or domain.
  """

  context: str
  good: str
  bad: str
  pair_id: str
  groups: Mapping[str, str]

  @property
  def uid(self) -> str:
    """The paradigm or domain."""
    return self.groups["UID"]

  @property
  def term(self) -> str:
    """The phenomenon that the paradigm belongs to, or ""."""
    return self.groups.get("linguistics_term", "")


def minimal_pairs(folder, limit: int = 0) -> list[Pair]:
  """Reads the pairs of a folder.

  Args:
    folder: Holds *.jsonl files.
    limit: At most so many pairs of each file; 0 for all.

  Raises:
    UserError: if there are none, or a line is not a pair.
  """
  folder = pathlib.Path(folder)
  try:
    names = sorted(os.listdir(folder))
  except OSError as error:
    why = error.strerror
    raise UserError(f"no such folder of pairs: {folder} ({why})") from error
  found = []
  for name in names:
    if name.endswith(".jsonl") and not name.startswith("."):
      found += itertools.islice(_pairs(folder / name), limit or None)
  if not found:
    raise UserError(f"{folder} holds no pairs in *.jsonl files")
  return found


def _pairs(path: pathlib.Path) -> Iterator[Pair]:
  for number, fields in files.read_jsonl(path, "minimal pairs"):
    for name in ("sentence_good", "sentence_bad"):
      if not isinstance(fields.get(name), str):
        raise UserError(f"{path}, line {number}: no text {name!r}")
    fields.setdefault("UID", path.stem)
    yield Pair(
      context="",
      good=fields["sentence_good"],
      bad=fields["sentence_bad"],
      pair_id=str(fields.get("pair_id", number - 1)),
      groups={name: str(fields[name]) for name in _GROUPS if name in fields},
    )


def scores(
  loaded: TextModel, pairs: Sequence[Pair], mode: str, **options
) -> tuple[np.ndarray, np.ndarray]:
  """Scores n pairs; `options` are those of `scoring.score`.

  Returns:
    Scores of the good choices and of the bad ones, float64 `[n]` each, or
    `[n, K]` for K temperatures.
  """
  # All choices in one call, good and bad in turn: they are batched by length.
  found = scoring.score(
    loaded,
    [choice for pair in pairs for choice in (pair.good, pair.bad)],
    mode,
    contexts=[pair.context for pair in pairs for _ in range(2)],
    **options,
  )
  return found[::2], found[1::2]


def accuracy_by(
  group: str, pairs: Sequence[Pair], correct: np.ndarray
) -> dict[str, tuple[int, np.ndarray]]:
  """Returns by a group's values the number of pairs and accuracy `[...]`.

  Args:
    group: One of the names in `Pair.groups`; pairs without it are left out.
    pairs: n pairs.
    correct: Which ones are right, bool `[n, ...]`.
  """
  rows = collections.defaultdict(list)
  for row, pair in enumerate(pairs):
    if group in pair.groups:
      rows[pair.groups[group]].append(row)
  return {n: (len(r), correct[r].mean(axis=0)) for n, r in rows.items()}


def accuracy(loaded: TextModel, pairs: Sequence[Pair], mode: str) -> float:
  """Returns the share of right pairs, the mean over UIDs: BabyLM's number.

  A pair is right when the good choice's score is the higher one.
  """
  good, bad = scores(loaded, pairs, mode)
  by_uid = accuracy_by("UID", pairs, good > bad)
  return float(np.mean([share for _, share in by_uid.values()]))
