"""Sets of examples: named files, their records, and splits.

A known set is files of known names in a folder. The user's own set is a file
(csv, tsv, jsonl, parquet, and others that a preset reads). A tenth of it is
held out as the dev set. The own set may also be a list of records, or a folder
of files named train, dev (or valid) and test. Or it is a mapping of train, dev
and test to lists or files.
"""

import collections
import itertools
import math
import os
import pathlib
import re
import zlib
from collections.abc import (
  Callable,
  Collection,
  Container,
  Hashable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
from typing import Any, NamedTuple

import numpy as np

from antlm_jax.data import readers, splits, text_files
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import record_values
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.runtime import files, progress
from antlm_jax.runtime import records as parsing

OWN = "own"  # task of a preset that reads the user's own set
# Names of all known tasks and evaluation sets, which no own set gets.
NAMES: set[str] = set()
_SHOWN = 5  # names in a list of files
_TRAIN_SHARE = 0.9  # share of train that is trained on if there is no dev
# Columns that change a record's meaning, in any case.
_MEANINGFUL = {
  *("label", "labels", "gold_label", "target", "class", "y", "rating"),
  *("score", "similarity", "similarity_score", "relevance", "is_duplicate"),
  *("negative", "negatives", "hard_negative", "hard_negatives"),
  *("weight", "sample_weight", "is_impossible", "split"),
  # Texts that belong to another text.
  *("text2", "text_2", "text_b", "text_pair", "sentence2", "sentence_2"),
  *("hypothesis", "question2"),
  *(f"negative_{i}" for i in range(10)),
}

# Examples in memory: columns by name, or values in the columns' order.
Record = str | Mapping[str, object] | Sequence[object]
Records = (
  Iterable[Record] | Mapping[str, str | os.PathLike[str] | Iterable[Record]]
)
Data = str | Records


class Absent(UserError):
  """A set whose files do not exist."""


class InMemory(NamedTuple):
  """Records in memory, and their name in errors."""

  name: str
  records: Iterable[Record]


Source = str | InMemory  # a file or dataset, or records


def dev_and_test(names: Sequence[str]) -> dict[str, tuple[str, str]]:
  """Returns the usual evaluation sets of tasks: `NAME-dev`, `NAME-test`."""
  return {name: (f"{name}-dev", f"{name}-test") for name in names}


def find_set_files(
  folder, name: str, *layouts: Mapping[str, str], further: Sequence[str] = ()
) -> dict[str, pathlib.Path]:
  """Finds the files of a known set in a folder, by split.

  They are those of the first layout of which all files exist, except the splits
  in `further`. Raises a UserError if another layout has other files, and an
  `Absent` error, which lists the layouts, if there is none.
  """
  complete = []
  for layout in layouts:
    paths = {s: pathlib.Path(folder, file) for s, file in layout.items()}
    existing = {split: path for split, path in paths.items() if path.is_file()}
    if not paths.keys() - existing.keys() - {*further}:
      complete.append(existing)
  for other in complete[1:]:
    for split, path in complete[0].items():
      if path != other.get(split, path):
        twins = str(path), str(other[split])
        raise _twins(f"{name} in {folder}", split, twins)
  if complete:
    return complete[0]
  if absent := files.absent(pathlib.Path(folder)):
    raise UserError(f"data={folder}: {absent}")
  expected = " or ".join(
    " with ".join(file for s, file in layout.items() if s not in further)
    for layout in layouts
  )
  raise Absent(f"{name} is not in {folder}: looked for {expected}")


def open_data(data: Data, any_kind: bool = False) -> dict[str, list[Source]]:
  """Returns the sources of an own set's train, dev and test, if they exist.

  Names say which file is which split, as for `antlm prepare`
  (`data.splits`). Files have the endings of text and records or, with
  `any_kind`, any ending. Each split is a file, or its numbered parts. A single
  file is train; a warning says so if it is named dev or test.
  Raises a UserError if there is no file, or a split has several.
  """
  if isinstance(data, str):
    if not os.path.isfile(data):
      return _open_folder(data, any_kind)
    (named,) = splits.split_names([os.path.basename(data)])
    if named.split in ("dev", "test"):
      progress.say(
        f"warning: {data} is named {named.split}, but trained on: epochs=0"
        " evaluates a fine-tuned model on it"
      )
  data = by_split(data)
  by_name = isinstance(data, Mapping)
  result = {}
  for split, source in (data if by_name else {"train": data}).items():
    # A table of pyarrow has no iterator.
    if not isinstance(source, Iterable) and not hasattr(source, "columns"):
      raise UserError(
        f"data: {source!r:.60} is no list of records, and no path"
      )
    name = f"data of {split}" if by_name else "data"
    is_path = isinstance(source, str)
    result[split] = [source if is_path else InMemory(name, source)]
  return result


def by_split(data: Data) -> Data:
  """Returns a mapping with the splits as keys, and paths as text.

  Other data are returned as they are.
  """
  if not isinstance(data, Mapping):
    return data
  return {
    split: os.fspath(source) if isinstance(source, os.PathLike) else source
    for split, source in splits.by_key(data).items()
  }


def _open_folder(folder: str, any_kind: bool) -> dict[str, list[Source]]:
  """Returns the files of a folder by split, as `open_data` does."""
  (candidates,) = text_files.search([folder], any_kind)
  files_by_split = {}
  for split in splits.WORDS:
    if split_files := _split_files(folder, split, candidates):
      files_by_split[split] = split_files
  if not any_kind and "train" not in files_by_split:
    files_by_split = {"train": _without_names(candidates)} | files_by_split
  _check_unused(folder, candidates, files_by_split)
  return {
    split: [file.source for file in split_files]
    for split, split_files in files_by_split.items()
    if split_files
  }


def _split_files(
  folder: str, split: str, candidates: Sequence[text_files.Found]
) -> list[text_files.Found]:
  """Returns the file of a split, or its parts; UserError if it has several."""
  result = [
    file
    for file in candidates
    if file.split == split or (file.alone and split == "train")
  ]
  paths_by_stem = {file.stem: file.source for file in reversed(result)}
  if len(paths_by_stem) > 1:
    raise _twins(folder, split, sorted(paths_by_stem.values()))
  return result


def _without_names(
  candidates: Sequence[text_files.Found],
) -> list[text_files.Found]:
  """Returns the files that name no split, which are to train on."""
  unnamed = [file for file in candidates if not file.split]
  # Next to records, text is a description such as README.md.
  records = [
    file for file in unnamed if readers.READERS.get(readers.kind(file.source))
  ]
  return records or unnamed


def _check_unused(
  folder: str,
  candidates: Sequence[text_files.Found],
  files_by_split: Mapping[str, Sequence[text_files.Found]],
) -> None:
  """Says which files of a folder belong to no set.

  Raises a UserError if there is no set, or a file seems to be another set.
  """
  names = {file: os.path.relpath(file.source, folder) for file in candidates}
  if not any(files_by_split.values()):
    listed = ", ".join([*names.values()][:_SHOWN]) or "no files"
    raise Absent(
      f"{folder} has {listed}: looked for files named train, dev (valid) and"
      " test"
    )
  used = [
    file for split_files in files_by_split.values() for file in split_files
  ]
  for file, name in names.items():
    # Names such as web-dev.md have a split's word, but say no split.
    split = splits.split_word(name)
    is_unclear = split and file.split in ("", "unknown")
    is_only_train = len(used) == 1 and split == "train"
    is_needed = file in used or not files_by_split.get(split)
    if is_unclear and not is_only_train and is_needed:
      advice = f"name it {split}{''.join(pathlib.Path(name).suffixes)}"
      if file.split == "unknown":
        advice = f"give files that end in {readers.endings()}"
      raise UserError(
        f"{folder}: is {name} the {split} set? {advice}, or move it"
      )
  if unused := [names[file] for file in candidates if file not in used]:
    ellipsis = ", ..." if unused[_SHOWN:] else ""
    progress.say(
      f"{folder}: not used: {', '.join(unused[:_SHOWN])}{ellipsis}; files named"
      " train, dev (valid) and test are"
    )


def _twins(place: str, split: str, paths: Sequence[str]) -> UserError:
  return UserError(
    f"{place}: several files claim to be {split}: {', '.join(paths)}; keep one"
    " of them there"
  )


def read_own_set(
  data: Data, examples: Callable[[Source], Iterable], any_kind: bool = False
) -> dict[str, list]:
  """Reads the examples of an own set, by split; see `open_data`."""
  return {
    split: [example for source in sources for example in examples(source)]
    for split, sources in open_data(data, any_kind).items()
  }


def record_fields(
  path: pathlib.Path, texts: Sequence[str] = ()
) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yields the place of each record of a known set's file, and its fields.

  Raises a UserError if one of the fields `texts` is absent or is not text.
  """
  for line, fields in readers.mappings(str(path), {}):
    place = f"{path}, {line}"
    if not isinstance(fields, dict):
      raise UserError(f"{place}: not a JSON object")
    require_texts(fields, texts, place)
    yield place, fields


def require_texts(fields: Mapping, texts: Sequence[str], place: str) -> None:
  """Raises a UserError if one of the fields `texts` is absent or no text."""
  for name in texts:
    if not isinstance(fields.get(name), str):
      problem = "is not text" if name in fields else "is absent"
      raise UserError(f"{place}: the field {name!r} {problem}")


def class_names(source: Source, column: str) -> tuple[str, ...]:
  """Returns the names of a column's classes, if a dataset keeps them."""
  if isinstance(source, str):
    features = readers.features(source)
  else:
    features = getattr(source.records, "features", None)
    features = features.to_dict() if hasattr(features, "to_dict") else {}
  feature = features.get(column)
  if isinstance(feature, Mapping):
    feature = feature.get("feature", feature)  # of the items of a list
  is_mapping = isinstance(feature, Mapping)
  is_class = is_mapping and feature.get("_type") == "ClassLabel"
  names = feature.get("names") if is_class else None
  return tuple(map(str, names)) if isinstance(names, list) else ()


def _with_names(value: Any, names: Sequence[str]) -> Any:
  """Replaces numbers of classes, also in lists, by the classes' names."""
  if isinstance(value, list):
    return [_with_names(item, names) for item in value]
  is_class = type(value) is int and 0 <= value < len(names)
  return names[value] if is_class else value


def source_records(
  source: Source,
  columns: Mapping[str, str],
  counts: Container[int] = (),
  optional: Sequence[str] = (),
  watched: Collection[str] = _MEANINGFUL,
) -> Iterator[tuple[str, list | tuple]]:
  """Yields each record's place and values, in the order of the columns.

  Values of columns that are `optional` are last, None if they are absent. The
  values of a sequence in memory are a tuple; `counts` are their possible
  numbers, by default that of the columns. All values become plain Python, and
  all sequences in them lists. Classes of a dataset have their names. Says which
  of the `watched` columns exist but are not used. Raises a UserError for
  another form, or text that no file can hold.
  """
  form = f"give ({', '.join(columns)})"
  all_columns = [*columns, *optional]
  watched = {*watched} - {*all_columns}
  optional_columns = [*optional, *sorted(watched)]
  names = [class_names(source, column) for column in all_columns]
  unused = set()
  for place, record in _placed_records(source, columns, optional_columns):
    if isinstance(record, Mapping):
      if absent := [column for column in columns if column not in record]:
        has = parsing.listed(record)
        raise UserError(f"{place} has no {absent[0]!r} but {has}")
      unused |= {
        name
        for name in record.keys() - {*all_columns}
        if str(name).casefold() in watched
      }
      values = readers.column_values(record, all_columns)
      try:
        values = record_values.plain_python(values, place)
      except RecursionError as error:
        raise UserError(f"{place}: it is nested too deeply") from error
      yield place, [*map(_with_names, values, names)]
      continue
    record = record_values.plain_python(record, place)
    values = (record,) if isinstance(record, str) else record
    if not isinstance(values, list | tuple):
      raise UserError(f"{place} is {record!r:.40}: {form}")
    if len(values) not in (counts or (len(columns),)):
      raise UserError(f"{place} has {len(values)} values: {form}")
    yield place, (*values, *[None] * len(optional))
  if unused:
    path = source if isinstance(source, str) else source.name
    progress.say(
      f"warning: {path}: columns that are not used:"
      f" {', '.join(map(repr, sorted(unused)))}"
    )


def _placed_records(
  source: Source, columns: Mapping[str, str], optional: Sequence[str]
) -> Iterator[tuple[str, Record]]:
  """Yields each record of a file, or in memory, and its place."""
  if isinstance(source, str):
    for line, record in readers.mappings(source, columns, optional):
      yield f"{source}, {line}", record
    return
  records = _table_records(source.records, columns)
  for number, record in enumerate(records, start=1):
    yield f"{source.name}, record {number}", record


def _table_records(
  source: Iterable, columns: Iterable[str]
) -> Iterable[Record]:
  """Returns the records of a table, whose own items are columns or names.

  It is one of pandas, polars or pyarrow. Others are returned as they are.
  """
  if not hasattr(source, "columns"):
    return source
  names = [*getattr(source, "column_names", source.columns)]  # of pyarrow
  for column in columns:
    if names.count(column) > 1:
      raise UserError(
        f"data: two columns have the name {column!r}: rename a column"
      )
  for method in ("to_pylist", "to_dicts"):
    if hasattr(source, method):
      return getattr(source, method)()
  return source.to_dict("records")


def source_texts(
  source: Source, columns: Sequence[str], words: bool = False
) -> Iterator[tuple[str, ...]]:
  """Yields the texts of a source: a file's lines, or columns of its records.

  With `words`, the only column may hold lists of words, which are yielded.
  Raises a UserError if it cannot be read, is of no known kind, or a record has
  no text.
  """
  path = source if isinstance(source, str) else ""
  if path and readers.is_saved_dataset(path):
    source = path = readers.HUB + os.path.normpath(path)
  if path and not os.path.exists(path) and not path.startswith(readers.HUB):
    raise files.not_a_path(path)
  if path and readers.READERS.get(readers.kind_of_file(path)) is None:
    yield from ((line,) for line in _text_lines(path))
    return
  count = blank = 0
  for place, values in source_records(
    source, dict.fromkeys(columns, "text_column"), watched=()
  ):
    if words and len(values) == 1 and isinstance(values[0], list):
      values = values[0]
    for text in values:
      if not isinstance(text, str):
        raise UserError(f"{place}: {text!r:.40} is not one text")
    count += 1
    blank += not all(map(str.strip, values or [""]))
    yield tuple(values)
  if blank:
    progress.say(
      f"warning: {path or 'data'}: {blank:,} of {count:,} records are blank"
    )


def _text_lines(path: str) -> Iterator[str]:
  """Yields the lines of a text file, and says how many are blank."""
  tally = readers.Tally()
  yield from readers.whole_documents(
    readers.read_documents(path, readers.RULES["line"], "", tally=tally)
  )
  if blank := tally["blank lines"]:
    progress.say(f"warning: {path}: {blank:,} blank lines are left out")
  elif left_out := readers.left_out(tally):
    progress.say(f"warning: {left_out}")


def divide_training_set(
  examples: Sequence[Any],
  train_share: float = 0.95,
  key: Callable[[Any], Hashable] | None = None,
  strata: Sequence[Hashable] | None = None,
) -> tuple[list, list]:
  """Divides a training set in two, as Hugging Face's datasets library does.

  The first part, `train_share`, is trained on; the second chooses the epoch.
  Examples of one `key` are in one part, of which the second has no key with
  more than half of the examples. With the examples' `strata`, this holds for
  each stratum, and the second part has its share of each. Examples of one key
  have the stratum of the first of them.
  """
  groups = collections.defaultdict(list)
  group_strata = {}
  for number, example in enumerate(examples):
    name = key(example) if key else number
    groups[name].append(example)
    group_strata.setdefault(name, strata[number] if strata else None)
  group_counts = collections.Counter(group_strata.values())
  if strata and max(group_counts.values()) == 1:
    group_strata = dict.fromkeys(groups)  # nothing to divide in any stratum
    group_counts = {None: len(groups)}
  sizes = collections.Counter()
  for name, group in groups.items():
    sizes[group_strata[name]] += len(group)
  dev_count = len(examples) - math.floor(train_share * len(examples))
  divisible = {x: size for x, size in sizes.items() if group_counts[x] > 1}
  places = _shares(divisible, dev_count)
  train = []
  dev = []
  names = [*groups]
  for i in np.random.default_rng(42).permutation(len(names)):
    group = groups[names[i]]
    stratum = group_strata[names[i]]
    small = not key or 2 * len(group) <= sizes[stratum]
    if small and places.get(stratum, 0) > 0:
      places[stratum] -= len(group)
      dev += group
    else:
      train += group
  return train, dev


def _shares(sizes: Mapping[Hashable, int], count: int) -> dict[Hashable, int]:
  """Divides a count by the largest remainders, at most half of each size."""
  total = sum(sizes.values())
  products = {name: count * size for name, size in sizes.items()}
  shares = {name: product // total for name, product in products.items()}
  by_remainder = sorted(sizes, key=lambda x: products[x] % total, reverse=True)
  for name in by_remainder[: count - sum(shares.values())]:
    shares[name] += 1
  return {name: min(share, sizes[name] // 2) for name, share in shares.items()}


def known_task_fields(
  name: str,
  paths: Mapping[str, pathlib.Path],
  examples: Callable[[pathlib.Path, str], list[Example]],
  key: Callable[[Example], Hashable] | None = None,
) -> dict[str, Any]:
  """Returns the fields of a `Task` of a known set.

  `paths` are the files of `train`, `test` and maybe `dev`. Without `dev`, a
  twentieth of train is held out by `key`, as `divide_training_set` does.
  `examples` reads a file, of `train` or of an evaluation set by its name.
  """

  def load(set_name: str) -> list[Example]:
    split = set_name.removeprefix(f"{name}-")
    if split in paths and (split != "train" or "dev" in paths):
      return examples(paths[split], set_name)
    train, dev = divide_training_set(examples(paths["train"], "train"), key=key)
    return train if split == "train" else dev

  return {
    "name": name,
    "load": load,
    "evaluations": (f"{name}-dev", f"{name}-test"),
    "files": tuple(paths.values()),
  }


def path_or_name(data: Data) -> str:
  """Returns the path of data, or a name for data in memory."""
  if isinstance(data, Mapping):
    data = next(iter(data.values()), "")
  return data if isinstance(data, str) else OWN


def task_name(data: Data) -> str:
  """Returns the name of the task of data, never that of a known task."""
  path = pathlib.Path(os.path.abspath(path_or_name(data)))  # also of ".."
  name = re.sub(r"\W+", "_", path.name if path.is_dir() else path.stem)
  return f"own_{name}" if name in NAMES else name


def own_task_fields(
  data: Data,
  examples: Mapping[str, list[Example]],
  make_queries: Callable[[list[Example]], list[Example]] = list,
  key: Callable[[Example], Sequence[str]] = lambda example: example.texts,
  classes_of: Callable[[Example], Collection[str]] | None = None,
  class_names: Collection[str] = (),
) -> dict[str, Any]:
  """Returns the fields of a `Task` of an own set, which has the data's name.

  `examples` are those of `train`, `dev` and `test`, as far as they exist;
  without `dev`, a tenth of `train` is held out. `make_queries` turns a set's
  examples into those that are evaluated. Examples with the same texts, those of
  `key`, are on one side. `classes_of` returns the names of an example's
  classes, of each of which a tenth is held out; `class_names` may name more.
  Prints how many texts sets share, and which classes train or dev lacks.
  """
  name = task_name(data)
  examples = {**examples}

  def plain_texts(example: Example) -> tuple[str, ...]:
    return tuple(map(record_values.same_text, key(example)))

  train = examples.get("train", [])
  if train and "dev" not in examples:
    if repeated := len(train) - len(set(map(plain_texts, train))):
      progress.say(
        f"{name}: {repeated:,} of {len(train):,} examples repeat the text of"
        " another; equal texts are all in train or all in dev"
      )
    strata = _rarest_classes(train, classes_of) if classes_of else None
    examples["train"], examples["dev"] = divide_training_set(
      train, _TRAIN_SHARE, plain_texts, strata
    )
  texts = {
    split: [plain_texts(example) for example in examples[split]]
    for split in splits.WORDS
    if split in examples
  }
  _warn_of_shared_texts(name, texts)
  if classes_of:
    classes = {
      split: {*itertools.chain.from_iterable(map(classes_of, examples[split]))}
      for split in texts
    }
    _warn_of_absent_classes(name, classes, class_names)
  evaluations = {
    f"{name}-{split}": make_queries(examples[split])
    for split in ("dev", "test")
    if split in examples
  }
  return {
    "name": name,
    "load": {"train": examples.get("train"), **evaluations}.__getitem__,
    "evaluations": tuple(evaluations),
    "facts": {"examples_crc32": zlib.crc32(repr(examples).encode())},
    "trained": "train" in examples,
  }


def _warn_of_shared_texts(
  name: str, texts: Mapping[str, Sequence[tuple[str, ...]]]
) -> None:
  """Warns of texts that are in two sets."""
  for first, second in itertools.combinations(texts, 2):
    first_texts = {*texts[first]}
    if shared := sum(text in first_texts for text in texts[second]):
      progress.say(
        f"warning: {name}: {shared:,} of {len(texts[second]):,} texts of"
        f" {second} are also in {first}"
      )


def _rarest_classes(
  examples: Sequence[Example], classes_of: Callable[[Example], Iterable[str]]
) -> list[str]:
  """Returns each example's rarest class; "" if it has none."""
  classes = [{*classes_of(example)} for example in examples]
  counts = collections.Counter(itertools.chain(*classes))
  return [
    min(names, key=lambda name: (counts[name], name), default="")
    for names in classes
  ]


def _warn_of_absent_classes(
  name: str, classes: Mapping[str, set[str]], class_names: Collection[str]
) -> None:
  """Warns of classes without an example in train, or in dev."""
  all_classes = {*class_names}.union(*classes.values())
  for split in ("train", "dev"):
    absent = sorted(all_classes - classes.get(split, all_classes))
    if absent:
      ellipsis = ", ..." if absent[_SHOWN:] else ""
      shown = ", ".join(f"{label!r:.40}" for label in absent[:_SHOWN])
      progress.say(
        f"warning: {name}: {len(absent):,} of {len(all_classes):,} classes have"
        f" no example in {split}: {shown}{ellipsis}"
      )
