"""Your own records: a text, or several that are read together, and a label.

A label is the name of a class, or a whole number for it, or a list of names for
multi-label classification. `regression` predicts numbers.
"""

import collections
import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import (
  classification,
  multi_label,
  regression,
  sets,
)
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import Predicted, Suite, Task, TaskHead
from antlm_jax.runtime import progress
from antlm_jax.settings import Section, setting

_FEW = 20  # more labels than this must be at most half as many as examples


@dataclasses.dataclass(frozen=True)
class Classes(Section):
  """Command-line options of own sets with classes."""

  labels: tuple[str, ...] = setting(
    (),
    "Names of the classes in your own files, separated by commas; by default"
    " the labels in train, or those of the fine-tuned model without training",
  )


@dataclasses.dataclass(frozen=True)
class Columns(Section):
  """Command-line options of your own files."""

  text_column: tuple[str, ...] = setting(
    ("text",),
    "Column of the text in your own files, or two columns A,B that are read"
    " together",
  )
  label_column: str = setting("label", "Column of the label in your own files")


def classify(
  data: sets.Data,
  name: str,
  attention: str,
  head: classification.ClassifierOptions,
  options: Columns,
  classes: Classes = Classes(),
) -> Task:
  """Makes a task of records with classes, which has the data's name.

  Raises a UserError if there are no records, or a record lacks a text or a
  known label. Labels with fractions, or too many for classes, also raise it.
  """
  found = _read_labelled(data, options, _label_names)
  lists = [[e.label for _, e in those] for those in found.values()]
  first = next((label for labels in lists for label in labels), "")
  of = multi_label if isinstance(first, list) else classification
  given = [name.strip() for name in sets.plain_python(classes.labels, "labels")]
  labels = given or _class_names(data, lists[0])
  made = head.classifier(labels, attention, of.HEADS)
  own = sets.own_task_fields(data, _indexed(found, labels))
  own["by_class"] = functools.partial(of.class_counts, labels)
  return _labelled_task(own, made, of.FIELDS, options)


def regress(
  data: sets.Data,
  name: str,
  attention: str,
  head: classification.ClassifierOptions,
  options: Columns,
) -> Task:
  """Makes a task of records with numbers, which has the data's name.

  Raises a UserError if there are no records, or a record lacks a text or a
  number, or all numbers to train on are equal.
  """
  found = {
    split: [example for _, example in those]
    for split, those in _read_labelled(data, options, _label_number).items()
  }
  made = head.classifier(regression.OUTPUTS, attention, regression.HEADS)
  own = sets.own_task_fields(data, found)
  if numbers := [example.label for example in own["load"]("train") or ()]:
    mean, deviation = float(np.mean(numbers)), float(np.std(numbers))
    if not 0 < deviation < math.inf:
      raise UserError(
        f"{sets.path_or_name(data)}: the labels to train on have the standard"
        f" deviation {deviation}: give numbers that differ"
      )
    made = dataclasses.replace(made, mean=mean, deviation=deviation)
  for name in own["evaluations"]:
    if len({example.label for example in own["load"](name)}) == 1:
      progress.say(f"warning: {name}: all numbers are equal, so scores are 0")
  return _labelled_task(own, made, regression.FIELDS, options)


_DATA = (
  "--data is a file of records (csv, tsv, jsonl, parquet), of which a tenth is"
  " held out, or a folder of files named train, dev and test"
)
CLASSIFICATION = Suite(
  "classification",
  "your own texts, or pairs of texts, and labels; a list of labels makes it"
  f" multi-label: {_DATA}",
  {"own": ("own",)},
  classify,
  heads=(
    classification.Classifier,
    classification.LinearHead,
    classification.Chooser,
    *multi_label.HEADS,
  ),
  settings=(classification.ClassifierOptions, Columns, Classes),
  exportable=True,
  in_memory=True,
)
REGRESSION = Suite(
  "regression",
  "your own texts, or pairs of texts, and numbers, such as similarities; files"
  " as for classification",
  {"own": ("own",)},
  regress,
  heads=regression.HEADS,
  settings=(classification.ClassifierOptions, Columns),
  exportable=True,
  in_memory=True,
)


def _labelled_task(
  own: Mapping[str, Any], head: TaskHead, fields: Mapping, options: Columns
) -> Task:
  texts, columns = (
    functools.partial(_prediction_files, head),
    options.text_column,
  )
  some = itertools.chain.from_iterable(map(own["load"], own["evaluations"]))
  first = next(some, None)
  if first and len(first.texts) != len(columns):  # of records in memory
    columns = tuple(f"text{i + 1}" for i in range(len(first.texts)))
  return Task(**own, head=head, texts=texts, columns=columns, **fields)


def _read_labelled(
  data: sets.Data, options: Columns, label_of: Callable[[object, str], Any]
) -> dict[str, list[tuple[str, Example]]]:
  """Reads each split's examples, with their places.

  `label_of` reads a label, given its place. All records have as many texts,
  and lists for labels or none has.
  """
  if not options.text_column:
    raise UserError("text_column names no column: give one, or two as A,B")
  if options.label_column in options.text_column:
    raise UserError(f"label_column={options.label_column} is a text column")
  columns = dict.fromkeys(options.text_column, "text_column")
  columns |= {options.label_column: "label_column"}
  out, first = {}, None
  for split, sources in sets.open_data(data).items():
    out[split] = []
    records = (
      sets.source_records(one, columns, (2, len(columns))) for one in sources
    )
    for where, values in itertools.chain.from_iterable(records):
      *texts, label = values
      nested = [isinstance(text, list) for text in texts] == [True]
      if nested and isinstance(values, tuple):
        (texts,) = texts
      sets.nonempty(texts, where)
      label = label_of(label, where)
      form = _record_form(texts, label)
      first = first or (form, where)
      if form != first[0]:
        raise UserError(f"{where} has {form}, but {first[1]} has {first[0]}")
      example = Example(tuple(texts), label, where.rpartition(", ")[2])
      out[split].append((where, example))
    if not first:
      use = " to train on" * (split == "train")
      raise UserError(f"{sets.path_or_name(data)} holds no records{use}")
  return out


def _record_form(texts: Sequence[str], label: object) -> str:
  several = "s" * (len(texts) != 1)
  what = "a list of labels" if isinstance(label, list) else "one label"
  return f"{len(texts)} text{several} and {what}"


def _label_names(label: object, where: str) -> str | list[str]:
  """Returns the name of a record's class, or of all its labels if a list."""
  if isinstance(label, list):
    return [_name(one, where) for one in label]
  return _name(label, where)


def _name(label: object, where: str) -> str:
  """Returns the name of a class, without space around it."""
  _require_label(label, where)
  if isinstance(label, str):
    sets.refuse_list(label, where, "label")
    return label.strip()
  if isinstance(label, bool | int):
    return json.dumps(label)
  if isinstance(label, float) and math.isfinite(label):
    return str(int(label)) if label.is_integer() else repr(label)
  raise UserError(
    f"{where}: the label {label!r:.60} is not text, a number or a list of these"
  )


def _label_number(label: object, where: str) -> float:
  """Returns a record's number."""
  _require_label(label, where)
  if isinstance(label, str | int | float) and not isinstance(label, bool):
    with contextlib.suppress(ValueError, OverflowError):
      if math.isfinite(number := float(label)):
        return number
  raise UserError(f"{where}: the label {label!r:.60} is not a number")


def _require_label(label: object, where: str) -> None:
  """Raises a UserError if a label is missing: null, NaN or blank."""
  blank = isinstance(label, str) and not label.strip()
  if label is None or blank or (isinstance(label, float) and label != label):
    raise UserError(f"{where}: no label")


def _class_names(
  data: sets.Data, labels: Sequence[str | list[str]]
) -> tuple[str, ...]:
  """Returns the names of the classes, sorted; numbers by their values."""
  lists = [label if isinstance(label, list) else [label] for label in labels]
  found, data = {name for one in lists for name in one}, sets.path_or_name(data)
  if len({frozenset(one) for one in lists}) < 2:
    raise UserError(f"{data}: all labels to train on are {labels[0]!r:.60}")
  numbers = _finite_numbers(found)
  if parts := [name for name, value in numbers.items() if value % 1]:
    raise UserError(
      f"{data}: labels are numbers with fractions, such as {parts[0]}: choose"
      " preset=regression, or name classes with labels"
    )
  if len(found) > max(_FEW, len(labels) / 2):
    raise UserError(
      f"{data}: {len(found):,} different labels in {len(labels):,} records"
      " are too many for classes: choose another label_column"
    )
  _warn_of_twins(data, found)
  if len(numbers) < len(found):
    return tuple(sorted(found))
  return tuple(sorted(found, key=lambda name: (numbers[name], name)))


def _finite_numbers(names: Iterable[str]) -> dict[str, float]:
  """Returns the values of the names that are finite numbers."""
  out = {}
  for name in sorted(names):
    with contextlib.suppress(ValueError):
      if math.isfinite(value := float(name)):
        out[name] = value
  return out


def _warn_of_twins(data: str, names: Iterable[str]) -> None:
  """Warns of two classes that differ only in their writing: '1' and '1.0'."""
  forms, numbers = collections.defaultdict(list), _finite_numbers(names)
  for name in sorted(names):
    form = unicodedata.normalize("NFKC", name).casefold()
    forms[numbers.get(name, form)].append(name)
  for twins in forms.values():
    if len(twins) > 1:
      shown = ", ".join(map(ascii, twins))
      progress.say(f"warning: {data}: different classes: {shown:.200}")


def _indexed(
  found: Mapping[str, Sequence[tuple[str, Example]]], labels: Sequence[str]
) -> dict[str, list[Example]]:
  """Replaces names by indices; UserError for a name that is not a label."""
  indices = {label: index for index, label in enumerate(labels)}

  def index(name: str, where: str) -> int:
    if name not in indices:
      raise UserError(
        f"{where}: the label {name!r:.60} is not one of"
        f" {', '.join(labels):.200}"
      )
    return indices[name]

  def of(label: str | list[str], where: str) -> int | list[int]:
    if isinstance(label, list):
      return sorted({index(name, where) for name in label})
    return index(label, where)

  return {
    split: [e._replace(label=of(e.label, where)) for where, e in those]
    for split, those in found.items()
  }


def _prediction_files(
  head: TaskHead, found: Mapping[str, Predicted]
) -> dict[str, str]:
  """Returns a csv of each set, with the classes' names."""

  def shown(label: Any) -> str:
    (value,) = head.told(label).values()
    if isinstance(value, str):
      return value
    return json.dumps(value, ensure_ascii=False)

  texts = {}
  for which, those in found.items():
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(("record", "label", "predicted"))
    for example, one in zip(those.examples, those.predictions, strict=True):
      rows.writerow((example.id, shown(example.label), shown(one)))
    texts[f"{which}.csv"] = file.getvalue()
  return texts
