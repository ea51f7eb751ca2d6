"""Minimal pairs and other choices, and accuracy on them.

A folder's *.jsonl hold one item a line. Of a minimal pair that is
`sentence_good` and `sentence_bad`, and, if known, `UID`, `linguistics_term`,
`field` and `pair_id`. BabyLM's filtered BLiMP and its supplement are such
folders. The UID is the file's name where a line names none, as in the
supplement.
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
  """A text that is scored, and what it follows, or ""."""

  context: str
  text: str


@dataclasses.dataclass(frozen=True)
class Item:
  """What a model decides between: choices, of which the first one is right.

  Attributes:
    choices: Two of them for a minimal pair.
    item_id: Its name among those of its UID.
    groups: What accuracies are taken by, name to value, as the data names
      them: always `UID`, the paradigm or domain.
    rating: How people judge the first choice, where they were asked.
  """

  choices: tuple[Choice, ...]
  item_id: str
  groups: Mapping[str, str]
  rating: float | None = None

  @property
  def uid(self) -> str:
    """The paradigm or domain."""
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


# ------------------------------------------------------------------- reading


class Line(NamedTuple):
  """A line of a file of items."""

  path: pathlib.Path
  number: int
  fields: Mapping[str, Any]

  def text(self, name: str) -> str:
    """Returns a field that is a text.

    Raises:
      UserError: if there is none, or an empty one.
    """
    found = self.fields.get(name)
    if not isinstance(found, str) or not found:
      raise self.error(f"no text {name!r}")
    return found

  def error(self, why: str) -> UserError:
    """Returns the error that says what is wrong with the line."""
    return UserError(f"{self.path}, line {self.number}: {why}")


def read(
  folder, parse: Callable[[Line], Item], limit: int = 0, what: str = "items"
) -> list[Item]:
  """Reads the items of a folder.

  Args:
    folder: Holds *.jsonl files.
    parse: Makes an item of a line.
    limit: At most so many items of each file; 0 for all.
    what: What they are, for errors.

  Raises:
    UserError: if there are none, or a line is not an item.
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


def minimal_pair(line: Line) -> Item:
  """Makes the item of a minimal pair's line."""
  fields = {"UID": line.path.stem} | dict(line.fields)
  return pair(
    context="",
    good=line.text("sentence_good"),
    bad=line.text("sentence_bad"),
    item_id=str(fields.get("pair_id", line.number - 1)),
    groups={name: str(fields[name]) for name in _GROUPS if name in fields},
  )


def minimal_pairs(folder, limit: int = 0) -> list[Item]:
  """Reads the minimal pairs of a folder, as `read` does."""
  return read(folder, minimal_pair, limit, "pairs")


# ------------------------------------------------------------------- scoring


def scores(
  loaded: TextModel, items: Sequence[Item], mode: str, **options
) -> np.ndarray:
  """Scores the choices of n items; `options` are those of `scoring.score`.

  Returns:
    float64 `[C, n]`, or `[C, n, K]` for K temperatures, for at most C choices
    of an item: what is missing is -inf, so that nothing chooses it.
  """
  # All choices in one call, item by item: they are batched by length.
  choices = [choice for item in items for choice in item.choices]
  found = scoring.score(
    loaded,
    [choice.text for choice in choices],
    mode,
    contexts=[choice.context for choice in choices],
    **options,
  )
  counts = np.array([len(item.choices) for item in items])
  there = np.arange(counts.max()) < counts[:, None]  # [n, C]
  out = np.full((*there.shape, *found.shape[1:]), -np.inf)
  out[there] = found
  return out.swapaxes(0, 1)


def correct(scores: np.ndarray) -> np.ndarray:
  """Returns which items are right, bool `[n, ...]`, of scores `[C, n, ...]`.

  One is when its first choice's score is higher than those of all others.
  """
  return scores[0] > scores[1:].max(axis=0)


def rows_by(group: str, items: Sequence[Item]) -> dict[str, list[int]]:
  """Returns by a group's values which items have them.

  `group` is one of the names in `Item.groups`; items without it are left out.
  """
  rows = collections.defaultdict(list)
  for row, item in enumerate(items):
    if group in item.groups:
      rows[item.groups[group]].append(row)
  return dict(rows)


def accuracy_by(
  group: str, items: Sequence[Item], correct: np.ndarray
) -> dict[str, tuple[int, np.ndarray]]:
  """Returns by a group's values the number of items and accuracy `[...]`.

  Args:
    group: As for `rows_by`.
    items: n items.
    correct: Which ones are right, bool `[n, ...]`.
  """
  rows = rows_by(group, items)
  return {n: (len(r), correct[r].mean(axis=0)) for n, r in rows.items()}


def accuracy(loaded: TextModel, items: Sequence[Item], mode: str) -> float:
  """Returns the share of right items, the mean over UIDs: BabyLM's number."""
  found = correct(scores(loaded, items, mode))
  by_uid = accuracy_by("UID", items, found)
  return float(np.mean([share for _, share in by_uid.values()]))
