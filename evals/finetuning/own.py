"""Classification of your own texts: records of a text, or two, and a label.

`--data` is a file of records (csv, tsv, jsonl, parquet), of which a tenth is
held out as the dev set, or a folder of files named train and maybe dev (or
valid) and test. From Python it may be a list of records, or a mapping of train,
dev and test to lists. The classes are the labels in train.
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
from antlm_jax.evals.finetuning import classification
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import Predicted, Suite, Task, held_out
from antlm_jax.runtime import files
from antlm_jax.settings import setting

_KEPT = 0.9  # share of train that is trained on if there is no dev
_FEW = 20  # more classes than this must be at most half as many as examples

# Examples in memory: columns by name, or values in the columns' order.
Record = str | Mapping[str, object] | Sequence[object]
Records = Iterable[Record] | Mapping[str, Iterable[Record]]
Data = str | Records
_SPLITS = "train", "dev", "test"


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
) -> Task:
  """Makes a task of records, which has the data's name.

  Raises a UserError if there are no records, one has no text, or no label of
  train's, or the labels are no classes.
  """
  if not options.text_column:
    raise UserError("--text_column names no column: give one, or two as A,B")
  if options.label_column in options.text_column:
    raise UserError(f"--label_column={options.label_column} is a text column")
  sources = by_split(data)
  sets = {"train": list(_read(sources.pop("train"), options))}
  labels = _classes(named(data), [e.label for e in sets["train"]])
  for split, those in sources.items():
    sets[split] = list(_read(those, options, labels))
  sets = {
    split: [e._replace(label=labels.index(e.label)) for e in those]
    for split, those in sets.items()
  }
  return classification.task(
    **of_sets(data, sets),
    head=head.classifier(labels, attention),
    metrics={
      "accuracy": classification.accuracy,
      "macro_f1": classification.macro_f1,
    },
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
  settings=(classification.Options, Options),
  exportable=True,
  in_memory=True,
)


def texts_of(path: str, columns: Sequence[str]) -> Iterator[tuple[str, ...]]:
  """Yields the texts of a file: its lines, or columns of its records.

  Raises a UserError if it cannot be read, or a record has no text.
  """
  if not os.path.exists(path):
    raise files.not_a_path(path)
  if readers.READERS.get(readers.kind(path) or ".txt") is None:
    lines = readers.pieces(path, readers.RULES["line"], "")
    yield from ((line.text,) for line in lines)
    return
  for where, values in readers.records(
    path, dict.fromkeys(columns, "text_column")
  ):
    if not all(isinstance(text, str) for text in values):
      raise UserError(f"{path}, {where}: no text to read")
    yield tuple(values)


class Memory(list[Record]):
  """A set of records in memory, which errors call `data`."""

  def __str__(self) -> str:
    return "data"


def named(data: Data) -> str:
  """Returns the path of data, or a name for data in memory."""
  return data if isinstance(data, str) else "own"


def by_split(data: Data) -> dict[str, Sequence[str | Memory]]:
  """Returns the sources of train, and of dev and test if they exist.

  Raises a UserError if there is nothing to train on.
  """
  if isinstance(data, str):
    corpus = text_files.find([data])
    return {s: those for s in _SPLITS if (those := getattr(corpus, s))}
  sets = data if isinstance(data, Mapping) else {"train": data}
  if "train" not in sets or (sets.keys() - set(_SPLITS)):
    names = ", ".join(map(repr, sets))
    raise UserError(f"data has the sets {names}: give train, dev and test")
  return {split: [Memory(records)] for split, records in sets.items()}


def records(
  source: str | Memory, columns: Mapping[str, str]
) -> Iterator[tuple[str, list]]:
  """Yields each record's place and values, as `readers.records` does."""
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
    else:  # ((text, text), label) has its texts one by one
      parts = (v if isinstance(v, list | tuple) else [v] for v in record)
      yield where, list(itertools.chain.from_iterable(parts))


def of_sets(
  data: Data,
  sets: Mapping[str, list[Example]],
  asked: Callable[[list[Example]], list[Example]] = list,
) -> dict[str, Any]:
  """Returns the fields of a `Task` that has the data's name.

  `sets` has the examples of `train` and maybe of `dev` and `test`; without
  `dev`, a tenth of `train` is held out. `asked` makes a set's examples into
  those that are evaluated.
  """
  name = re.sub(r"\W+", "_", pathlib.Path(named(data)).absolute().stem)
  sets = {**sets}
  if "dev" not in sets:
    sets["train"], sets["dev"] = held_out(sets["train"], _KEPT)
  tests = {f"{name}-{s}": asked(sets[s]) for s in ("dev", "test") if s in sets}
  return {
    "name": name,
    "load": {"train": sets["train"], **tests}.__getitem__,
    "evaluations": tuple(tests),
    "about": {"examples_crc32": zlib.crc32(repr(sets).encode())},
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
          f"{source}, {where}: the label {label!r:.60} is not one of those to"
          f" train on: {', '.join(known):.200}"
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
