"""Own sets: a file of records, a folder of files, or records in memory.

A set is a file (csv, tsv, jsonl, parquet, and others that a preset reads), of
which a tenth is held out as the dev set; or a folder of files named train, dev
(or valid) and test; or a list of records, or a mapping of train, dev and test
to lists or files. The preset `classification` reads a text, or two, and a label
of each record. Its classes are the labels in train.
"""

import csv
import functools
import io
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from antlm_jax.data import readers, text_files
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import classification, sets
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import Predicted, Suite, Task
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting

_KEPT = 0.9  # share of train that is trained on if there is no dev
_FEW = 20  # more classes than this must be at most half as many as examples

# Examples in memory: columns by name, or values in the columns' order.
Record = str | Mapping[str, object] | Sequence[object]
Records = Iterable[Record] | Mapping[str, str | Iterable[Record]]
Data = str | Records
# Words in a file's name that name its split.
_SPLITS = {
  "train": {"train", "training"},
  "dev": {"dev", "valid", "validation", "val", "testa"},
  "test": {"test", "testb"},
}


@dataclass(frozen=True)
class Classes:
  """Command-line options of own sets with classes."""

  labels: tuple[str, ...] = setting(
    (),
    "your own files: names of the classes, with commas; by default those in"
    " train, or of the fine-tuned model if nothing is trained",
  )


@dataclass(frozen=True)
class Options:
  """Command-line options of your own files."""

  text_column: tuple[str, ...] = setting(
    ("text",),
    "your own files: column of the text, or two as A,B that are read together",
  )
  label_column: str = setting("label", "your own files: column of the label")


def make(
  data: Data,
  name: str,
  attention: str,
  head: classification.Options,
  options: Options,
  classes: Classes = Classes(),
) -> Task:
  """Makes a task of records, which has the data's name.

  Raises a UserError if there are no records, one has no text, or no label of
  the classes, or the labels are no classes.
  """
  if not options.text_column:
    raise UserError("--text_column names no column: give one, or two as A,B")
  if options.label_column in options.text_column:
    raise UserError(f"--label_column={options.label_column} is a text column")
  sources, labels, found = by_split(data), classes.labels, {}
  for split, those in sources.items():
    found[split] = list(_read(those, options, labels))
    labels = labels or _classes(named(data), [e.label for e in found[split]])
  found = {
    split: [e._replace(label=labels.index(e.label)) for e in those]
    for split, those in found.items()
  }
  return classification.task(
    **of_sets(data, found, key=lambda example: example.texts),
    head=head.classifier(labels, attention),
    metrics=classification.METRICS,
    texts=functools.partial(_predictions, labels),
    also=("macro_f1",),
  )


SUITE = Suite(
  "classification",
  "your own texts, or pairs of texts, and labels: --data is a file of records"
  " (csv, tsv, jsonl, parquet), of which a tenth is held out, or a folder of"
  " files named train, dev and test",
  {"own": ("own",)},
  make,
  settings=(classification.Options, Options, Classes),
  exportable=True,
  in_memory=True,
)


class Memory(list[Record]):
  """A set of records in memory, which errors call `data`."""

  def __str__(self) -> str:
    return "data"


def texts_of(
  source: str | Memory, columns: Sequence[str]
) -> Iterator[tuple[str, ...]]:
  """Yields the texts of a source: a file's lines, or columns of its records.

  Raises a UserError if it cannot be read, or a record has no text.
  """
  path = source if isinstance(source, str) else ""
  if path and not os.path.exists(path):
    raise files.not_a_path(path)
  if path and readers.READERS.get(readers.kind(path) or ".txt") is None:
    lines = readers.pieces(path, readers.RULES["line"], "")
    yield from ((line.text,) for line in lines)
    return
  for where, values in records(source, dict.fromkeys(columns, "text_column")):
    if not all(isinstance(text, str) for text in values):
      raise UserError(f"{source}, {where}: no text to read")
    yield tuple(values)


def named(data: Data) -> str:
  """Returns the path of data, or a name for data in memory."""
  if isinstance(data, Mapping):
    data = next(iter(data.values()), "")
  return data if isinstance(data, str) else sets.OWN


def name_of(data: Data) -> str:
  """Returns the name of the task of data, never that of a known one."""
  name = re.sub(r"\W+", "_", pathlib.Path(named(data)).absolute().stem)
  return f"own_{name}" if name in sets.NAMES else name


def by_split(
  data: Data, any_ending: bool = False
) -> dict[str, Sequence[str | Memory]]:
  """Returns the sources of train, dev and test, as far as they exist.

  Files have the endings of text and records, or any. Raises a UserError if
  there is none.
  """
  if isinstance(data, str):
    if any_ending and os.path.exists(data):
      return _by_name(data)
    corpus = text_files.find([data])
    return {s: those for s in _SPLITS if (those := getattr(corpus, s))}
  given = data if isinstance(data, Mapping) else {"train": data}
  if not given or given.keys() - _SPLITS.keys():
    names = ", ".join(map(repr, given)) or "none"
    raise UserError(f"data has the sets {names}: give train, dev and test")
  return {
    split: [one if isinstance(one, str) else Memory(one)]
    for split in _SPLITS
    if (one := given.get(split)) is not None
  }


def _by_name(path: str) -> dict[str, list[str]]:
  """Returns a file as train, or a folder's files by their names' words."""
  if os.path.isfile(path):
    return {"train": [path]}
  found = {split: [] for split in _SPLITS}
  inside = sorted(p for p in pathlib.Path(path).iterdir() if p.is_file())
  for file in inside:
    words = {*re.findall("[a-z]+", file.name.lower())}
    if split := next((s for s in _SPLITS if words & _SPLITS[s]), None):
      found[split].append(str(file))
  if not any(found.values()):
    has = ", ".join(p.name for p in inside[:5]) or "no files"
    raise sets.Absent(
      f"{path} has {has}", "files named train, dev (valid) and test"
    )
  return {split: those for split, those in found.items() if those}


def records(
  source: str | Memory, columns: Mapping[str, str], nested: bool = False
) -> Iterator[tuple[str, list]]:
  """Yields each record's place and values, as `readers.records` does.

  In memory, ((text, text), label) has its texts one by one, unless values are
  `nested`.
  """
  if isinstance(source, str):
    yield from readers.records(source, columns)
    return
  for number, record in enumerate(source, start=1):
    where = f"record {number}"
    if isinstance(record, str):
      yield where, [record]
    elif isinstance(record, Mapping):
      for column in columns:
        if column not in record:
          has = ", ".join(map(repr, record))
          raise UserError(f"data, {where} has no {column!r} but {has}")
      yield where, [record[column] for column in columns]
    elif nested and len(record) == len(columns):
      yield where, list(record)
    else:
      parts = (v if isinstance(v, list | tuple) else [v] for v in record)
      yield where, list(itertools.chain.from_iterable(parts))


def of_sets(
  data: Data,
  found: Mapping[str, list[Example]],
  asked: Callable[[list[Example]], list[Example]] = list,
  key: Callable[[Example], Sequence[str]] = lambda example: example.texts[:1],
) -> dict[str, Any]:
  """Returns the fields of a `Task` that has the data's name.

  `found` has the examples of `train`, `dev` and `test`, as far as they exist;
  without `dev`, a tenth of `train` is held out. `asked` makes a set's examples
  into those that are evaluated. Examples with the same texts, those of `key`,
  are on one side. Prints how many there are.
  """
  name, found = name_of(data), {**found}

  def same(example: Example) -> tuple[str, ...]:
    return tuple(" ".join(text.casefold().split()) for text in key(example))

  train = found.get("train", [])
  texts = set(map(same, train))
  if train and "dev" not in found:
    if repeated := len(train) - len(texts):
      progress.say(
        f"{name}: {repeated:,} of {len(train):,} examples repeat the text of"
        " another; equal texts are all in train or all in dev"
      )
    found["train"], found["dev"] = sets.held_out(train, _KEPT, same)
  elif both := sum(same(example) in texts for example in found.get("dev", ())):
    count = len(found["dev"])
    progress.say(
      f"warning: {name}: {both:,} of {count:,} texts of dev are also in train"
    )
  tests = {
    f"{name}-{s}": asked(found[s]) for s in ("dev", "test") if s in found
  }
  return {
    "name": name,
    "load": {"train": found.get("train"), **tests}.__getitem__,
    "evaluations": tuple(tests),
    "about": {"examples_crc32": zlib.crc32(repr(found).encode())},
    "trained": "train" in found,
  }


def _read(
  sources: Sequence[str | Memory], options: Options, known: Sequence[str] = ()
) -> Iterator[Example]:
  """Yields the examples of sources, with their labels' names."""
  columns = dict.fromkeys(options.text_column, "text_column")
  columns |= {options.label_column: "label_column"}
  for source in sources:
    for where, (*texts, label) in records(source, columns):
      if not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f"{source}, {where}: no text to read")
      if label in (None, ""):
        raise UserError(f"{source}, {where}: no label")
      label = label if isinstance(label, str) else json.dumps(label)
      if known and label not in known:
        raise UserError(
          f"{source}, {where}: the label {label!r:.60} is not one of"
          f" {', '.join(known):.200}"
        )
      yield Example(tuple(texts), label, where)


def _classes(data: str, labels: Sequence[str]) -> tuple[str, ...]:
  """Returns the names of the classes, sorted; numbers by their values."""
  found = set(labels)
  if not found:
    raise UserError(f"{data} holds no records to train on")
  if len(found) < 2:
    raise UserError(f"{data}: all labels to train on are {min(labels)!r:.60}")
  if len(found) > max(_FEW, len(labels) / 2):
    raise UserError(
      f"{data}: {len(found):,} labels of {len(labels):,} records are no"
      " classes; choose another --label_column"
    )
  try:
    return tuple(sorted(found, key=float))
  except ValueError:
    return tuple(sorted(found))


def _predictions(
  names: Sequence[str], found: Mapping[str, Predicted]
) -> dict[str, str]:
  """Returns a csv of each set, with the classes' names."""
  texts = {}
  for which, those in found.items():
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(("record", "label", "predicted"))
    for example, one in zip(those.examples, those.predictions, strict=True):
      rows.writerow((example.id, names[example.label], names[one]))
    texts[f"{which}.csv"] = file.getvalue()
  return texts
