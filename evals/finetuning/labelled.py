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
  records = _read_labelled(data, options, _label_names)
  labels = [
    [example.label for _, example in split_records]
    for split_records in records.values()
  ]
  is_multi_label = isinstance(next(itertools.chain(*labels), ""), list)
  kind = multi_label if is_multi_label else classification
  names = [name.strip() for name in sets.plain_python(classes.labels, "labels")]
  names = names or _class_names(data, labels[0])
  fields = sets.own_task_fields(data, _indexed(records, names))
  fields["by_class"] = functools.partial(kind.class_counts, names)
  task_head = head.classifier(names, attention, kind.HEADS)
  return _labelled_task(task_head, options, **fields, **kind.FIELDS)


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
  records = _read_labelled(data, options, _label_number)
  examples = {
    split: [example for _, example in records[split]] for split in records
  }
  regressor = head.classifier(regression.OUTPUTS, attention, regression.HEADS)
  fields = sets.own_task_fields(data, examples)
  load = fields["load"]
  if numbers := [example.label for example in load("train") or ()]:
    deviation = float(np.std(numbers))
    if not 0 < deviation < math.inf:
      raise UserError(
        f"{sets.path_or_name(data)}: the labels to train on have the standard"
        f" deviation {deviation}: give numbers that differ"
      )
    regressor = dataclasses.replace(
      regressor, mean=float(np.mean(numbers)), deviation=deviation
    )
  for name in fields["evaluations"]:
    if len({example.label for example in load(name)}) == 1:
      progress.say(f"warning: {name}: all numbers are equal, so scores are 0")
  return _labelled_task(regressor, options, **fields, **regression.FIELDS)


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


def _labelled_task(head: TaskHead, options: Columns, **fields) -> Task:
  columns = options.text_column
  examples = itertools.chain(*map(fields["load"], fields["evaluations"]))
  example = next(examples, None)
  if example and len(example.texts) != len(columns):  # of records in memory
    columns = tuple(f"text{i + 1}" for i in range(len(example.texts)))
  return Task(
    head=head,
    texts=functools.partial(_prediction_files, head),
    columns=columns,
    **fields,
  )


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
  out = {}
  first_form = ""
  first_place = ""
  for split, sources in sets.open_data(data).items():
    out[split] = []
    records = (
      sets.source_records(source, columns, (2, len(columns)))
      for source in sources
    )
    for place, values in itertools.chain.from_iterable(records):
      *texts, label = values
      nested = [isinstance(text, list) for text in texts] == [True]
      if nested and isinstance(values, tuple):
        (texts,) = texts
      sets.nonempty(texts, place)
      label = label_of(label, place)
      form = _record_form(texts, label)
      first_form = first_form or form
      first_place = first_place or place
      if form != first_form:
        raise UserError(
          f"{place} has {form}, but {first_place} has {first_form}"
        )
      example = Example(tuple(texts), label, place.rpartition(", ")[2])
      out[split].append((place, example))
    if not first_form:
      purpose = " to train on" * (split == "train")
      raise UserError(f"{sets.path_or_name(data)} holds no records{purpose}")
  return out


def _record_form(texts: Sequence[str], label: object) -> str:
  plural = "s" * (len(texts) != 1)
  labels = "a list of labels" if isinstance(label, list) else "one label"
  return f"{len(texts)} text{plural} and {labels}"


def _label_names(label: object, place: str) -> str | list[str]:
  """Returns the name of a record's class, or of all its labels if a list."""
  if isinstance(label, list):
    return [_class_name(item, place) for item in label]
  return _class_name(label, place)


def _class_name(label: object, place: str) -> str:
  """Returns the name of a class, without space around it."""
  _require_label(label, place)
  if isinstance(label, str):
    sets.refuse_list(label, place, "label")
    return label.strip()
  if isinstance(label, bool | int):
    return json.dumps(label)
  if isinstance(label, float) and math.isfinite(label):
    return str(int(label)) if label.is_integer() else repr(label)
  raise UserError(
    f"{place}: the label {label!r:.60} is not text, a number or a list of these"
  )


def _label_number(label: object, place: str) -> float:
  """Returns a record's number."""
  _require_label(label, place)
  if isinstance(label, str | int | float) and not isinstance(label, bool):
    with contextlib.suppress(ValueError, OverflowError):
      if math.isfinite(number := float(label)):
        return number
  raise UserError(f"{place}: the label {label!r:.60} is not a number")


def _require_label(label: object, place: str) -> None:
  """Raises a UserError if a label is missing: null, NaN or blank."""
  blank = isinstance(label, str) and not label.strip()
  if label is None or blank or (isinstance(label, float) and label != label):
    raise UserError(f"{place}: no label")


def _class_names(
  data: sets.Data, labels: Sequence[str | list[str]]
) -> tuple[str, ...]:
  """Returns the names of the classes, sorted; numbers by their values."""
  path = sets.path_or_name(data)
  lists = [label if isinstance(label, list) else [label] for label in labels]
  names = {*itertools.chain(*lists)}
  if len(set(map(frozenset, lists))) < 2:
    raise UserError(f"{path}: all labels to train on are {labels[0]!r:.60}")
  numbers = _finite_numbers(names)
  if fractions := [name for name, value in numbers.items() if value % 1]:
    raise UserError(
      f"{path}: labels are numbers with fractions, such as {fractions[0]}:"
      " choose preset=regression, or name classes with labels"
    )
  if len(names) > max(_FEW, len(labels) / 2):
    raise UserError(
      f"{path}: {len(names):,} different labels in {len(labels):,} records"
      " are too many for classes: choose another label_column"
    )
  _warn_of_twins(path, names)
  if len(numbers) < len(names):
    return tuple(sorted(names))
  return tuple(sorted(names, key=lambda name: (numbers[name], name)))


def _finite_numbers(names: Iterable[str]) -> dict[str, float]:
  """Returns the values of the names that are finite numbers."""
  out = {}
  for name in sorted(names):
    with contextlib.suppress(ValueError):
      if math.isfinite(value := float(name)):
        out[name] = value
  return out


def _warn_of_twins(path: str, names: Iterable[str]) -> None:
  """Warns of two classes that differ only in their writing: '1' and '1.0'."""
  forms = collections.defaultdict(list)
  numbers = _finite_numbers(names)
  for name in sorted(names):
    form = unicodedata.normalize("NFKC", name).casefold()
    forms[numbers.get(name, form)].append(name)
  for twins in forms.values():
    if len(twins) > 1:
      text = ", ".join(map(ascii, twins))
      progress.say(f"warning: {path}: different classes: {text:.200}")


def _indexed(
  records: Mapping[str, Sequence[tuple[str, Example]]], names: Sequence[str]
) -> dict[str, list[Example]]:
  """Replaces classes' names by their indices.

  Raises a UserError for a label that is not among the names.
  """
  indices = {name: index for index, name in enumerate(names)}
  out = {split: [] for split in records}
  for split, split_records in records.items():
    for place, example in split_records:
      label = example.label
      labels = label if isinstance(label, list) else [label]
      if unknown := [name for name in labels if name not in indices]:
        raise UserError(
          f"{place}: the label {unknown[0]!r:.60} is not one of"
          f" {', '.join(names):.200}"
        )
      classes = sorted({indices[name] for name in labels})
      new_label = classes if isinstance(label, list) else classes[0]
      out[split].append(example._replace(label=new_label))
  return out


def _prediction_files(
  head: TaskHead, predicted: Mapping[str, Predicted]
) -> dict[str, str]:
  """Returns a csv of each set, with the classes' names."""

  def text(label: Any) -> str:
    (value,) = head.prediction_fields(label).values()
    if isinstance(value, str):
      return value
    return json.dumps(value, ensure_ascii=False)

  files = {}
  for name, evaluation in predicted.items():
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(("record", "label", "predicted"))
    for example, prediction in zip(
      evaluation.examples, evaluation.predictions, strict=True
    ):
      rows.writerow((example.id, text(example.label), text(prediction)))
    files[f"{name}.csv"] = file.getvalue()
  return files
