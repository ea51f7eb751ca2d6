"""Known sets of examples: their files, the files' records, and splits."""

import collections
import csv
import math
import pathlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.runtime import files as io

OWN = "own"  # task of a preset that reads the user's own set
# Names of all known tasks and evaluation sets, which no own set gets.
NAMES: set[str] = set()


class Absent(UserError):
  """A set whose files do not exist.

  Attributes:
    looked: Names of the files.
  """

  def __init__(self, message: str, looked: str):
    super().__init__(f"{message}: looked for {looked}")
    self.looked = looked


def dev_and_test(names: Sequence[str]) -> dict[str, tuple[str, str]]:
  """Returns the usual evaluation sets of tasks: `NAME-dev`, `NAME-test`."""
  return {name: (f"{name}-dev", f"{name}-test") for name in names}


def find(
  folder, name: str, *layouts: Mapping[str, str], further: Sequence[str] = ()
) -> dict[str, pathlib.Path]:
  """Finds the files of a set in a folder, by split.

  They are those of the first layout of which all files exist, except the splits
  in `further`. Raises an `Absent` error, which lists the layouts, if there is
  none.
  """
  for layout in layouts:
    paths = {
      split: pathlib.Path(folder, file) for split, file in layout.items()
    }
    there = {split: path for split, path in paths.items() if path.is_file()}
    if not paths.keys() - there.keys() - {*further}:
      return there
  wanted = " or ".join(
    " with ".join(
      file for split, file in layout.items() if split not in further
    )
    for layout in layouts
  )
  if not pathlib.Path(folder).is_dir():
    raise UserError(f"--data={folder}: no such folder")
  raise Absent(f"{name} is not in {folder}", wanted)


def records(
  path: pathlib.Path, texts: Sequence[str], quoting: int = csv.QUOTE_MINIMAL
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yields the place of each record of a file, jsonl or tsv, and its fields.

  Raises a UserError if one of the fields `texts` is absent or is not text.
  """
  rows = io.read_jsonl(path, "examples")
  if path.suffix == ".tsv":
    rows = io.read_csv(path, "examples", delimiter="\t", quoting=quoting)
  for number, fields in rows:
    where = f"{path}, line {number}"
    if None in fields:  # as the csv module has it
      raise UserError(f"{where}: more columns than the first line names")
    require(fields, texts, where)
    yield where, fields


def require(fields: Mapping, texts: Sequence[str], where: str) -> None:
  """Raises a UserError if one of the fields `texts` is absent or no text."""
  for name in texts:
    if not isinstance(fields.get(name), str):
      problem = "is not text" if name in fields else "is absent"
      raise UserError(f"{where}: the field {name!r} {problem}")


def held_out(
  examples: Sequence[Any],
  kept: float = 0.95,
  key: Callable[[Any], Hashable] | None = None,
) -> tuple[list, list]:
  """Divides a training set in two, as Hugging Face's datasets library does.

  The first part, a share `kept`, is trained on; the second chooses the epoch.
  Examples of one `key` are in one part, of which the second has no key with
  more than half of the examples.
  """
  groups = collections.defaultdict(list)
  for number, example in enumerate(examples):
    groups[key(example) if key else number].append(example)
  groups = list(groups.values())
  count = len(examples) - math.floor(kept * len(examples))
  train, left_out = [], []
  for i in np.random.default_rng(42).permutation(len(groups)):
    small = not key or 2 * len(groups[i]) <= len(examples)
    part = left_out if small and len(left_out) < count else train
    part += groups[i]
  return train, left_out


def split_of(
  split: str,
  train: Callable[[], Sequence],
  test: Callable[[], Sequence],
  key: Callable[[Any], Hashable] | None = None,
) -> Sequence:
  """Reads the set of a name, of a task whose dev set is held out of `train`."""
  if split.endswith("-test"):
    return test()
  return held_out(train(), key=key)[split != "train"]
