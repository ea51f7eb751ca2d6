"""Splits: which of several names are those of train, dev and test.

The names are those of files in a folder, of a dataset's parts, or of a
mapping's keys. All of a name may be a split's: `dev.txt`, `corpus.dev`,
`train-00000-of-00002.parquet`, a folder `test`. Other names are a split's only
next to one of train, such as `a_dev.csv` next to `a_train.csv`, or
`dev_matched.tsv` next to `train.tsv`. Documents have titles such as
`web-dev.md`.
"""

import collections
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax.data import readers
from antlm_jax.errors import UserError
from antlm_jax.runtime import progress, records

# Words for the held-out split.
DEV = "dev", "validation", "valid", "val", "evaluation", "eval"
WORDS = {
  "train": ("train", "training"),
  "dev": DEV,
  "test": ("test", "testing"),
}
_SPLITS = {word: split for split, words in WORDS.items() for word in words}
_WORD = "|".join(sorted(_SPLITS, key=len, reverse=True))
_ANYWHERE = re.compile(_WORD)
_SEPARATE = re.compile(rf"(?<![^\W\d_])({_WORD})(?![^\W\d_])")
# Number of a part of a set in its file's name: train-00000-of-00002.
_NUMBER = re.compile(r"[-_.]?\d+(-of-\d+(-[0-9a-f]+)?)?(?=\.|$)")
_COMPLETE = re.compile(rf"({_WORD})([-_.]?\d+[kmb]?(-of-\d+(-[0-9a-f]+)?)?)?")
_FIRST_WORD = re.compile(r"[a-z]*")


class SplitName(NamedTuple):
  """Split that a name says."""

  split: str = ""  # train, dev, test, or "" for none
  # Path up to the folder or file that says it, without the number of a part.
  # It is equal for the parts of one set.
  stem: tuple[str, ...] = ()
  other: str = ""  # another split that the path says too, and that loses


def split_names(names: Sequence[str], files: bool = True) -> list[SplitName]:
  """Returns the split of each name, of all names that belong together.

  `files` are paths from the folder of all. Others are the names of a dataset's
  parts, which have no titles: their first word is enough.
  """
  paths = [pathlib.PurePath(name.lower()).parts for name in names]
  result = [_complete_name(parts, files) for parts in paths]
  # Folders in which all of a name is train's.
  training = {name.stem[:-1] for name in result if name.split == "train"}
  similar = collections.defaultdict(dict)
  for number, parts in enumerate(paths):
    if result[number].split:
      continue
    for place, part in enumerate(parts):
      folder = parts[:place]
      name = _split_name(parts, place, split_word(part))
      if name.split and any(folder[: len(x)] == x for x in training):
        result[number] = name
      if files and place == len(parts) - 1:
        part = _without_format(part)
      for word in _ANYWHERE.finditer(part):
        around = part[: word.start()], part[word.end() :]
        letters = (re.sub(r"[\W\d_]", "", text) for text in around)
        name = _split_name(parts, place, _SPLITS[word[0]])
        similar[*folder, *letters][number] = name
  for group in similar.values():
    if {"train"} < {name.split for name in group.values()}:
      for number, name in group.items():
        result[number] = result[number] if result[number].split else name
  return result


def split_word(path: str) -> str:
  """Returns the split of the first word of a path's name that is one, or ""."""
  word = _SEPARATE.search(os.path.basename(path).lower())
  return _SPLITS[word[0]] if word else ""


def by_key(data: Mapping[Any, Any]) -> dict[str, Any]:
  """Returns a mapping's values by the splits that its keys name.

  None is a set that is absent. As of files, sets of other names are not used
  next to train. Raises a UserError if there is no train and a key names no
  split, or if several keys name the same.
  """
  keys = [key for key, value in data.items() if value is not None]
  splits = [x.split for x in split_names([*map(str, keys)], files=False)]
  if "train" in splits and "" in splits:
    pairs = [*zip(keys, splits, strict=True)]
    unused = records.listed(key for key, split in pairs if not split)
    progress.say(f"warning: not used, beside a set named train: {unused}")
    keys = [key for key, split in pairs if split]
    splits = [split for split in splits if split]
  if not keys or "" in splits or len({*splits}) < len(splits):
    names = records.listed(data) or "none"
    raise UserError(
      f"data has the sets {names}: give train, dev and test, one of each"
    )
  return {split: data[key] for split, key in zip(splits, keys, strict=True)}


def train_and_dev(data: Mapping[Any, Any], dev: Any) -> tuple[Any, Any]:
  """Returns the sets of a mapping to train on and to hold out, or else `dev`.

  Raises a UserError if there is nothing to train on, or dev is given twice.
  """
  sets = by_key(data)
  if "train" not in sets:
    raise UserError(f"data has no set to train on, only {', '.join(sets)}")
  if "dev" in sets and not (isinstance(dev, tuple) and not dev):
    raise UserError("data has a dev set, and dev is given: leave one out")
  if "test" in sets:
    progress.say("not used, named test: a set of the data")
  return sets["train"], sets.get("dev", dev)


def _complete_name(parts: Sequence[str], files: bool) -> SplitName:
  """Returns the split of a path of which a complete name is a split's."""
  matches = [
    (place, _SPLITS[match[1]])
    for place in reversed(range(len(parts)))
    for name in _bare_names(
      parts[place], files and place == len(parts) - 1, files
    )
    if (match := _COMPLETE.fullmatch(name))
  ]
  if not matches:
    return SplitName()
  place, split = matches[0]
  other_splits = (name for _, name in matches if name != split)
  name = _split_name(parts, place, split)
  return name._replace(other=next(other_splits, ""))


def _bare_names(part: str, is_file: bool, files: bool) -> Iterator[str]:
  """Yields a name without its ending, and an ending that may be a name."""
  if not files:
    yield _FIRST_WORD.match(part)[0]
  elif not is_file:
    yield part
  else:
    stem, ending = _stem_and_ending(part)
    yield from (ending[1:], stem)


def _without_format(name: str) -> str:
  """Returns a file's name without the ending of its format."""
  stem, ending = _stem_and_ending(name)
  return name if ending[1:] in _SPLITS else stem


def _stem_and_ending(name: str) -> tuple[str, str]:
  """Divides a file's name before the ending that compression has not added."""
  stem, ending = os.path.splitext(name)
  if ending in readers.COMPRESSED:
    return os.path.splitext(stem)
  return stem, ending


def _split_name(parts: Sequence[str], place: int, split: str) -> SplitName:
  return SplitName(split, (*parts[:place], _NUMBER.sub("", parts[place])))
