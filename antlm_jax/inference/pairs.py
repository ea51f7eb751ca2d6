"""Minimal pairs and other choices, and accuracy on them.

A folder holds *.jsonl files with one item a line. The fields of a minimal pair
are `sentence_good`, `sentence_bad` and, optionally, `UID`, `linguistics_term`,
`field` and `pair_id`. BabyLM's filtered BLiMP and its supplement are such
folders. Without a `UID`, as in the supplement, the UID is the file's name.
"""

import collections
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.inference import scoring
from antlm_jax.inference.framing import TextModel
from antlm_jax.runtime import files

_GROUPS = ("field", "UID", "linguistics_term")


class Choice(NamedTuple):
  """A text to score, and the context before it, which may be empty."""

  context: str
  text: str


@dataclasses.dataclass(frozen=True)
class Item:
  """Choices between which a model decides; the first one is right."""

  choices: tuple[Choice, ...]  # two of them for a minimal pair
  item_id: str  # its name among the items of its UID
  # Values by which accuracies are averaged, by the names in the data. They
  # include `UID`, the paradigm or domain.
  groups: Mapping[str, str]
  rating: float | None = None  # people's, of the first choice

  @property
  def uid(self) -> str:
    return self.groups["UID"]

  @property
  def term(self) -> str:
    """The phenomenon that the paradigm belongs to, or ""."""
    return self.groups.get("linguistics_term", "")


def pair(
  context: str, good: str, bad: str, item_id: str, groups: Mapping[str, str]
) -> Item:
  """Returns the item of a good and a bad choice after the same context."""
  choices = Choice(context, good), Choice(context, bad)
  return Item(choices, item_id, groups)


class Line(NamedTuple):
  """A line of a file of items."""

  path: pathlib.Path
  number: int
  fields: Mapping[str, Any]

  def text(self, name: str) -> str:
    """Returns a text field, or raises a UserError if it is missing or empty."""
    found = self.fields.get(name)
    if not isinstance(found, str) or not found:
      raise self.error(f"no text {name!r}")
    return found

  def error(self, why: str) -> UserError:
    """Returns an error that names the line."""
    return UserError(f"{self.path}, line {self.number}: {why}")


def read(
  folder, parse: Callable[[Line], Item], limit: int = 0, what: str = "items"
) -> list[Item]:
  """Reads the items of a folder.

  `parse` makes an item of a line. `limit` is the largest number of items of
  each file; 0 for all. `what` names the items in errors.
  Raises a UserError if there are none, or a line is not an item.
  """
  folder = pathlib.Path(folder)
  try:
    names = sorted(os.listdir(folder))
  except OSError as error:
    why = error.strerror
    raise UserError(f"no such folder of {what}: {folder} ({why})") from error
  found = []
  for name in names:
    if name.endswith(".jsonl") and not name.startswith("."):
      lines = files.read_jsonl(folder / name, what)
      items = (parse(Line(folder / name, n, fields)) for n, fields in lines)
      found += itertools.islice(items, limit or None)
  if not found:
    raise UserError(f"{folder} holds no {what} in *.jsonl files")
  return found


def minimal_pairs(folder, limit: int = 0) -> list[Item]:
  """Reads the minimal pairs of a folder, as `read` does."""

  def parse(line: Line) -> Item:
    fields = {"UID": line.path.stem} | dict(line.fields)
    return pair(
      context="",
      good=line.text("sentence_good"),
      bad=line.text("sentence_bad"),
      item_id=str(fields.get("pair_id", line.number - 1)),
      groups={name: str(fields[name]) for name in _GROUPS if name in fields},
    )

  return read(folder, parse, limit, "pairs")


def scores(
  loaded: TextModel, items: Sequence[Item], mode: str, **options
) -> np.ndarray:
  """Scores the choices of n items; `options` are those of `scoring.score`.

  The result is float64 `[C, n]`, or `[C, n, K]` for K temperatures; C is the
  largest number of choices. Choices that an item lacks have -inf.
  """
  choices = [choice for item in items for choice in item.choices]
  contexts, texts = zip(*choices, strict=True)
  found = scoring.score(loaded, texts, mode, contexts=contexts, **options)
  counts = np.array([len(item.choices) for item in items])
  present = np.arange(counts.max()) < counts[:, None]  # [n, C]
  out = np.full((*present.shape, *found.shape[1:]), -np.inf)
  out[present] = found
  return out.swapaxes(0, 1)


def correct(scores: np.ndarray) -> np.ndarray:
  """Returns which items are right, bool `[n, ...]`, from scores `[C, n, ...]`.

  The score of the first choice must be higher than all others.
  """
  return scores[0] > scores[1:].max(axis=0)


def rows_by(group: str, items: Sequence[Item]) -> dict[str, list[int]]:
  """Returns the indices of the items with each value of a group.

  `group` is a name in `Item.groups`. Items without it are left out.
  """
  rows = collections.defaultdict(list)
  for row, item in enumerate(items):
    if group in item.groups:
      rows[item.groups[group]].append(row)
  return dict(rows)


def accuracy(loaded: TextModel, items: Sequence[Item], mode: str) -> float:
  """Returns BabyLM's accuracy: the share of right items, averaged over UIDs."""
  right = correct(scores(loaded, items, mode))
  by_uid = rows_by("UID", items).values()
  return float(np.mean([right[rows].mean() for rows in by_uid]))
