"""Minimal pairs and other choices, and accuracy on them.

A folder holds *.jsonl files with an item per line; one file also works. The
fields of a minimal pair are `sentence_good`, `sentence_bad` and, optionally,
`UID`, `linguistics_term` and `pair_id`. BabyLM's filtered BLiMP and its
supplement have this form. The default `UID` is the file's name, as in the
supplement.
"""

import collections
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.inference import scoring
from antlm_jax.inference.framing import TextModel
from antlm_jax.runtime import files, progress

Records = Iterable[Mapping[str, Any]]  # the lines of a file, in memory


class Choice(NamedTuple):
  """A text to score after a context, which may be empty."""

  context: str
  text: str


@dataclasses.dataclass(frozen=True)
class Item:
  """Choices for a model, of which the first is right."""

  choices: tuple[Choice, ...]  # two choices in a minimal pair
  item_id: str  # name of the item, unique within its UID
  uid: str  # paradigm or domain; accuracy is averaged over these
  term: str = ""  # phenomenon of the paradigm


class Line(NamedTuple):
  """A line of a file of items."""

  path: pathlib.Path
  number: int
  fields: Mapping[str, Any]

  def text(self, name: str) -> str:
    """Returns a text field, or raises a UserError if it is missing or blank."""
    if not isinstance(self.fields, Mapping):
      raise self.error("not a mapping of fields")
    text = self.fields.get(name)
    if not isinstance(text, str) or not text.strip():
      raise self.error(f"no text {name!r}")
    return text

  def error(self, why: str) -> UserError:
    """Returns an error that names the line."""
    return UserError(f"{self.path}, line {self.number}: {why}")


def read_items(
  source: files.Path | Records,
  parse: Callable[[Line], Item | None],
  limit: int = 0,
  kind: str = "items",
) -> list[Item]:
  """Reads the items of a folder, a file or a list.

  Args:
    source: Path to the folder or the file, or the records of a file.
    parse: Function that returns the item of a line, or None to omit it.
    limit: Largest number of items per file; 0 for all.
    kind: Name of the items in errors.

  Raises:
    UserError: There are no items, or a line is not an item.
  """
  name = _name(source)
  if isinstance(source, str | os.PathLike):
    paths = _item_files(files.absolute_path(source), kind)
    lines_by_path = {path: files.read_jsonl(path, kind) for path in paths}
  else:
    lines_by_path = {pathlib.Path(name): enumerate(source, start=1)}
  read = []
  for path, lines in lines_by_path.items():
    items = (parse(Line(path, n, fields)) for n, fields in lines)
    read += itertools.islice(filter(None, items), limit or None)
  if not read:
    raise UserError(f"{name} holds no {kind} in *.jsonl files")
  return read


def _name(source: files.Path | Records) -> str:
  """Returns the name of a source in messages."""
  is_path = isinstance(source, str | os.PathLike)
  return os.fspath(files.absolute_path(source)) if is_path else "data"


def _item_files(path, kind: str) -> list[pathlib.Path]:
  """Returns the *.jsonl files of a folder, or the file itself."""
  with files.reaching(path):
    if path.is_file():
      return [path]
    if why := files.absent(path):
      raise UserError(f"{path} holds no {kind}: {why}")
    names = sorted(file.name for file in path.iterdir())
  return [
    path / name
    for name in names
    if name.endswith(".jsonl") and not name.startswith(".")
  ]


def read_minimal_pairs(
  source: files.Path | Records, limit: int = 0
) -> list[Item]:
  """Reads the minimal pairs of a folder, a file or a list: see `read_items`."""

  def parse(line: Line) -> Item:
    texts = line.text("sentence_good"), line.text("sentence_bad")
    fields = {k: v for k, v in line.fields.items() if v is not None}
    return Item(
      choices=tuple(Choice("", text) for text in texts),
      item_id=str(fields.get("pair_id", line.number - 1)),
      uid=str(fields.get("UID", line.path.stem)),
      term=str(fields.get("linguistics_term", "")),
    )

  items = read_items(source, parse, limit, "pairs")
  words = [[choice.text.strip() for choice in x.choices] for x in items]
  if equal := sum(good == bad for good, bad in words):
    progress.say(
      f"warning: {_name(source)}: {equal:,} of {len(items):,} pairs have the"
      " same sentence twice, and count as wrong"
    )
  return items


def choice_scores(
  loaded: TextModel, items: Sequence[Item], mode: str, **options
) -> np.ndarray:
  """Scores the choices of n items.

  `options` are those of `scoring.score`. The result is float64 `[C, n]`, with C
  the largest number of choices, and -inf for choices that an item lacks.
  """
  choices = [choice for item in items for choice in item.choices]
  contexts, texts = zip(*choices, strict=True)
  scores = scoring.score(loaded, texts, mode, contexts=contexts, **options)
  counts = np.array([len(item.choices) for item in items])
  present = np.arange(counts.max()) < counts[:, None]  # [n, C]
  out = np.full(present.shape, -np.inf)
  out[present] = scores
  return out.T


def correct(scores: np.ndarray) -> np.ndarray:
  """Returns which items are right, bool `[n]`, given scores `[C, n]`.

  The score of the first choice must be higher than all other scores.
  """
  return scores[0] > scores[1:].max(axis=0)


def by_uid(items: Sequence[Item], right: np.ndarray) -> dict[str, float]:
  """Returns the share of right items for each UID; `right` is bool `[n]`."""
  hits_by_uid = collections.defaultdict(list)
  for item, hit in zip(items, right, strict=True):
    hits_by_uid[item.uid].append(hit)
  return {uid: float(np.mean(hits)) for uid, hits in hits_by_uid.items()}


def pair_accuracy(loaded: TextModel, items: Sequence[Item], mode: str) -> float:
  """Returns BabyLM's accuracy, the share of right items averaged over UIDs."""
  right = correct(choice_scores(loaded, items, mode))
  return float(np.mean([*by_uid(items, right).values()]))
