"""Classification by files of one's own: a text, or two, and a label a record.

`--data` is a file of records (csv, tsv, jsonl, parquet), of which a tenth is
left out to choose on, or a folder with files named train and, if there are
any, dev (or valid) and test. The classes are the labels that train has.
"""

import csv
import dataclasses
import functools
import io
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from antlm_jax.data import readers, text_files
from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import classification
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import Predicted, Suite, Task, held_out
from antlm_jax.settings import setting

_KEPT = 0.9  # of train, where there is no dev
_FEW = 20  # so many classes may be over half as many as examples


@dataclasses.dataclass(frozen=True)
class Options:
  """The settings of own files that a command offers."""

  text_column: tuple[str, ...] = setting(
    ("text",), "own files: of the text; of two that are read together, A,B"
  )
  label_column: str = setting("label", "own files: of what to predict")


def make(data: str, name: str, options, attention: str) -> Task:
  """Makes a task of records; it is named as the data is.

  Raises:
    UserError: if there are none, one has no text or no label, a label is not
      one of train's, or those are no classes.
  """
  if options.label_column in options.text_column:
    raise UserError(f"--label_column={options.label_column} is a text column")
  corpus = text_files.find([data])
  train = list(_read(corpus.train, options, "train"))
  labels = _classes(data, [example.label for example in train])
  sets = {"train": train}
  for split in ("dev", "test"):
    if sources := getattr(corpus, split):
      sets[split] = list(_read(sources, options, split, labels))
  sets = {
    split: [e._replace(label=labels.index(e.label)) for e in those]
    for split, those in sets.items()
  }
  made = classification.task(
    **of_sets(data, sets),
    head=options.classifier(labels, attention),
    texts=functools.partial(_predictions, labels),
    also=("macro_f1",),
  )
  metrics = {
    "accuracy": classification.accuracy,
    "macro_f1": classification.macro_f1,
  }
  return dataclasses.replace(made, metrics=metrics)


SUITE = Suite("classification", {"own": ("own",)}, make)


def of_sets(
  data: str,
  sets: Mapping[str, list[Example]],
  asked: Callable[[list[Example]], list[Example]] = list,
) -> dict[str, Any]:
  """Returns what a `Task` says of one's own examples: its name, as the data is.

  Args:
    data: Where they are from.
    sets: Of `train`, and of `dev` and `test` if there are. Without `dev` a
      tenth of `train` is left out to choose on.
    asked: Makes what is evaluated of a set.
  """
  name, sets = re.sub(r"\W+", "_", pathlib.Path(data).absolute().stem), {**sets}
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
  sources: Sequence[str], options, split: str, known: Sequence[str] = ()
) -> Iterator[Example]:
  """Yields the examples of sources, with their labels' names."""
  columns = dict.fromkeys(options.text_column, "text_column")
  columns |= {options.label_column: "label_column"}
  for source in sources:
    for where, (*texts, label) in readers.records(source, columns):
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
  """Returns the names of the classes, numbers in their order."""
  found = set(labels)
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
  """What is predicted of each set, by the classes' names, as CSV."""
  texts = {}
  for which, those in found.items():
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(("record", "label", "predicted"))
    for example, one in zip(those.examples, those.predictions, strict=True):
      rows.writerow((example.id, names[example.label], names[one]))
    texts[f"{which}.csv"] = file.getvalue()
  return texts
