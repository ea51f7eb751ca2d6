"""Your own records: a text, or several that are read together, and a label.

A label is the name of a class, or a whole number for it, or a list of names for
multi-label classification. `regression` predicts numbers.
"""

import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import (
  classification,
  multi_label,
  record_values,
  regression,
  sets,
)
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.task import (
  Answers,
  Examples,
  Preset,
  Task,
  TaskHead,
)
from antlm_jax.runtime import progress
from antlm_jax.settings import Section, setting

_FEW = 20  # more labels than this must be at most half as many as examples
# Labels that programs write as texts: [a, b], {a,b}, (a, b), a|b, a;b, 0 1 0.
# Also with the semicolon and the commas of Chinese.
_BIT = r"(?:[01](?:\.0*)?|true|false)"
_SEVERAL = re.compile(
  rf"\[.*\]|\{{.*\}}|\(.*,.*\)|.*[|;\uff1b\n\t].*|{_BIT}(?:[\s,]+{_BIT})+",
  re.DOTALL | re.IGNORECASE,
)
# Marks of a missing label, which as tags may be signs.
_BLANKS = "?", ".", "--"
_WHOLE = re.compile(r"([-+]?\d{1,18})\.0+")  # as pandas writes whole numbers
_LABEL = "label_column"  # argument that names the labels
# Signs between labels, if all parts are labels themselves.
_JOINTS = re.compile("[,\uff0c\u3001/+&]"), re.compile(r"[\W_]")


@dataclasses.dataclass(frozen=True)
class Classes(Section):
  """Command-line options of own sets with classes."""

  labels: tuple[str, ...] = setting(
    (),
    "Names of the classes in your own files, separated by commas; by default"
    " the labels in train, or those of the fine-tuned model without training",
  )

  @property
  def names(self) -> tuple[str, ...]:
    """Names without space around them.

    Raises a UserError if a class is named twice, or all in one text.
    """
    labels = record_values.plain_python(self.labels, "labels")
    names = tuple(label.strip() for label in labels)
    if len({*names}) < len(names):
      raise UserError(f"labels={','.join(names):.200} names a class twice")
    if len(names) == 1 and "," in names[0]:
      raise UserError(
        f"labels={names[0]!r:.60} is one name: give a list of names"
      )
    return names


@dataclasses.dataclass(frozen=True)
class Columns(Section):
  """Command-line options of your own files."""

  text_column: tuple[str, ...] = setting(
    ("text",),
    "Column of the text in your own files, or two columns A,B that are read"
    " together",
  )
  label_column: tuple[str, ...] = setting(
    ("label",),
    "Column of the label in your own files, or a column A,B,C of 0 and 1 for"
    " each of several labels",
  )


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
  sources = sets.open_data(data)
  names = classes.names or _known_names(sources, options.label_column)
  label_of = functools.partial(_label_names, names=names)
  records = _read_labelled(data, sources, options, label_of, names)
  first = next(itertools.chain(*records.values()))[1]
  kind = multi_label if isinstance(first.label, list) else classification
  if kind is multi_label and _are_vectors(records, names, options):
    vector_names = _vector_names(names, options.label_column)
    records = {
      split: [
        (place, _without_vector(example, vector_names, place))
        for place, example in records[split]
      ]
      for split in records
    }
  names = names or _class_names(data, next(iter(records.values())))

  def names_of(example: Example) -> list[str]:
    return [names[label] for label in _as_list(example.label)]

  fields = sets.own_task_fields(
    data, _indexed(records, names), classes_of=names_of, class_names=names
  )
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
  if len(options.label_column) != 1:
    raise UserError("regression reads one label_column")
  records = _read_labelled(data, sets.open_data(data), options, _label_number)
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
CLASSIFICATION = Preset(
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
REGRESSION = Preset(
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
  data: sets.Data,
  sources_by_split: Mapping[str, Sequence[sets.Source]],
  options: Columns,
  label_of: Callable[[object, str], Any],
  names: Container[str] = (),
) -> dict[str, list[tuple[str, Example]]]:
  """Reads each split's examples, with their places.

  `label_of` reads a label, given its place; several label columns are a list.
  All records have as many texts, and lists for labels or none has. A test set
  without any label, as of a competition, is left out with a warning.
  """
  if not options.text_column:
    raise UserError("text_column names no column: give one, or two as A,B")
  label_count = len(options.label_column)
  if not label_count:
    raise UserError("label_column names no column")
  columns = dict.fromkeys(options.text_column, "text_column")
  for column in options.label_column:
    if column in columns:
      raise UserError(f"label_column={column} is another column, too")
    columns[column] = _LABEL
  out = {}
  first_form = ""
  first_place = ""
  counts = 1 + label_count, len(columns)
  for split, sources in sources_by_split.items():
    may_be_hidden = split == "test" and len(sources_by_split) > 1
    records = itertools.chain.from_iterable(
      _source_records(source, columns, counts, may_be_hidden)
      for source in sources
    )
    if may_be_hidden:
      records = [*records]
      labels = [x for _, values in records for x in values[-label_count:]]
      if labels and all(
        record_values.is_missing(label) and str(label).strip() not in names
        for label in labels
      ):
        progress.say(
          f"warning: {sets.path_or_name(data)}: no record of test has a label,"
          " so test is not evaluated; `antlm predict` predicts its labels"
        )
        continue
    out[split] = []
    for place, values in records:
      texts = [*values[:-label_count]]
      labels = [*values[-label_count:]]
      label = labels if label_count > 1 else labels[0]
      nested = [isinstance(text, list) for text in texts] == [True]
      if nested and isinstance(values, tuple):
        (texts,) = texts
      record_values.nonempty(texts, place)
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


def _source_records(
  source: sets.Source,
  columns: Mapping[str, str],
  counts: Container[int],
  may_lack_labels: bool,
) -> Iterable[tuple[str, list | tuple]]:
  """Returns the records of a source; files may lack the columns of labels."""
  if not may_lack_labels or not isinstance(source, str):
    return sets.source_records(source, columns, counts)
  text_columns = {x: name for x, name in columns.items() if name != _LABEL}
  labels = [x for x in columns if x not in text_columns]
  return sets.source_records(source, text_columns, optional=labels)


def _record_form(texts: Sequence[str], label: object) -> str:
  plural = "s" * (len(texts) != 1)
  labels = "a list of labels" if isinstance(label, list) else "one label"
  return f"{len(texts)} text{plural} and {labels}"


def _as_list(label: Any) -> list:
  """Returns a record's labels: those of a list, or the only one."""
  return label if isinstance(label, list) else [label]


def _label_names(
  label: object, place: str, names: Sequence[str] = ()
) -> str | list[str]:
  """Returns the name of a record's class, or of all its labels if a list."""
  if isinstance(label, list):
    return [_class_name(item, place, names) for item in label]
  return _class_name(label, place, names)


def _class_name(label: object, place: str, names: Sequence[str]) -> str:
  """Returns the name of a class, without space around it.

  Whole numbers have one name, also as pandas writes them (1.0). Raises a
  UserError if the label is missing, or seems to be several labels. The user's
  `names` are exempt.
  """
  name = ""
  if isinstance(label, str):
    name = label.strip()
  elif isinstance(label, bool | int):
    name = json.dumps(label)
  elif isinstance(label, float) and math.isfinite(label):
    name = repr(label)
  if name in names:
    return name
  if whole := _WHOLE.fullmatch(name):
    name = str(int(whole[1]))
  if name in names:
    return name
  if record_values.is_missing(label) or name in _BLANKS:
    raise UserError(
      f"{place}: no label ({label!r:.20}): leave out the record, or name all"
      " classes with labels"
    )
  if not name:
    raise UserError(
      f"{place}: the label {label!r:.60} is not text, a number or a list of"
      " these"
    )
  if isinstance(label, str) and _SEVERAL.fullmatch(name):
    error = record_values.list_as_text(f"{place}: the label", name)
    raise UserError(f"{error}, or name all classes with labels")
  return name


def _are_vectors(
  records: Mapping[str, Sequence[tuple[str, Example]]],
  names: Sequence[str],
  options: Columns,
) -> bool:
  """Whether the lists of labels say of each class if it is a label.

  Raises a UserError if the classes have no names.
  """
  all_records = [*itertools.chain(*records.values())]
  lists = [example.label for _, example in all_records]
  values = {*itertools.chain(*lists)}
  lengths = {*map(len, lists)}
  if len(options.label_column) > 1:
    return True
  if any(record_values.truth(value) is None for value in values):
    return False
  repeated = any(len({*labels}) < len(labels) for labels in lists)
  is_wide = len(lengths) == 1 and lengths != {0}
  if not repeated and (not is_wide or values <= {*names}):
    return False
  if not names:
    place, example = all_records[0]
    if lengths == {1}:
      raise UserError(
        f"{place}: [{example.label[0]}] is a list of one 0 or 1: give"
        f" {example.label[0]}, or name the label with labels=A"
      )
    raise UserError(
      f"{place}: [{', '.join(example.label):.40}] has a 0 or 1 for each label:"
      f" name the {max(lengths)} labels, in this order, with labels=A,B,..."
    )
  return True


def _vector_names(
  names: Sequence[str], label_columns: Sequence[str]
) -> Sequence[str]:
  """Returns the names of a vector's values: the columns, if there are several.

  Raises a UserError if the columns are not the names, in any order.
  """
  if len(label_columns) < 2:
    return names
  if {*label_columns} != {*names}:
    raise UserError(
      f"label_column={','.join(label_columns):.100} names other columns than"
      f" the labels {', '.join(names):.100}: give each column its label's name"
    )
  return label_columns


def _without_vector(
  example: Example, names: Sequence[str], place: str
) -> Example:
  """Returns the example with the names whose value in its vector is true."""
  vector = example.label
  if len(vector) != len(names):
    raise UserError(
      f"{place} has {len(vector)} values of 0 and 1, but there are"
      f" {len(names)} labels: {', '.join(names):.100}"
    )
  labels = []
  for value, name in zip(vector, names, strict=True):
    if (is_true := record_values.truth(value)) is None:
      raise UserError(f"{place}: {name!r:.60} is {value!r:.40}: give 0 or 1")
    labels += [name] * is_true
  return example._replace(label=labels)


def _label_number(label: object, place: str) -> float:
  """Returns a record's number."""
  if isinstance(label, str | int | float) and not isinstance(label, bool):
    with contextlib.suppress(ValueError, OverflowError):
      if math.isfinite(number := float(label)):
        return number
  if record_values.is_missing(label):
    raise UserError(f"{place}: no label ({label!r:.20})")
  raise UserError(f"{place}: the label {label!r:.60} is not a number")


def _known_names(
  sources: Mapping[str, Sequence[sets.Source]], label_column: Sequence[str]
) -> tuple[str, ...]:
  """Returns the names of several label columns, or of a dataset's classes."""
  if len(label_column) > 1:
    return tuple(label_column)
  all_sources = itertools.chain(*sources.values())
  names = (sets.class_names(source, *label_column) for source in all_sources)
  return next(filter(None, names), ())


def _class_names(
  data: sets.Data, records: Sequence[tuple[str, Example]]
) -> tuple[str, ...]:
  """Returns the names of the classes, sorted; numbers by their values."""
  path = sets.path_or_name(data)
  labels = [example.label for _, example in records]
  lists = [*map(_as_list, labels)]
  names = {*itertools.chain(*lists)}
  if len(set(map(frozenset, lists))) < 2:
    raise UserError(f"{path}: all labels to train on are {labels[0]!r:.60}")
  numbers = {
    name: value
    for name in sorted(names)
    if (value := record_values.finite_number(name)) is not None
  }
  if fractions := [name for name, value in numbers.items() if value % 1]:
    raise UserError(
      f"{path}: labels are numbers with fractions, such as {fractions[0]}:"
      " choose preset=regression, or name classes with labels"
    )
  for place, example in records:
    for name in _as_list(example.label):
      _refuse_joined(name, names, place)
  if commas := sorted(name for name in names if "," in name):
    progress.say(
      f"warning: {path}: a label with a comma is one class: {commas[0]!r:.60};"
      " for several labels, write lists to jsonl or parquet"
    )
  if len(names) > max(_FEW, len(labels) / 2):
    raise UserError(
      f"{path}: {len(names):,} different labels in {len(labels):,} records"
      " are too many for classes: choose another label_column"
    )
  record_values.warn_of_twins(path, names)
  if len(numbers) < len(names):
    return tuple(sorted(names))
  return tuple(sorted(names, key=lambda name: (numbers[name], name)))


def _refuse_joined(name: str, names: Container[str], place: str) -> None:
  """Raises a UserError if all parts of a name are other classes."""
  for joint in _JOINTS:
    parts = [*filter(None, map(str.strip, joint.split(name)))]
    if len(parts) > 1 and all(part in names for part in parts):
      raise UserError(
        f"{place}: the label {name!r:.60} joins the labels"
        f" {', '.join(parts):.60}: write lists to jsonl or parquet, or name all"
        " classes with labels"
      )


def _indexed(
  records: Mapping[str, Sequence[tuple[str, Example]]], names: Sequence[str]
) -> dict[str, list[Example]]:
  """Replaces classes' names by their indices.

  Raises a UserError for a label that is not among the names, or is repeated.
  """
  indices = {name: index for index, name in enumerate(names)}
  out = {split: [] for split in records}
  for split, split_records in records.items():
    for place, example in split_records:
      label = example.label
      labels = _as_list(label)
      if unknown := [name for name in labels if name not in indices]:
        form = record_values.visible_form(unknown[0])
        twins = [
          name for name in names if record_values.visible_form(name) == form
        ]
        written = ascii if twins else repr
        raise UserError(
          f"{place}: the label {written(unknown[0]):.60} is not one of"
          f" {', '.join(map(written, twins) if twins else names):.200}"
        )
      if repeated := [name for name in labels if labels.count(name) > 1]:
        raise UserError(
          f"{place}: the list has the label {repeated[0]!r:.60} twice: name"
          " each label once"
        )
      classes = sorted(indices[name] for name in labels)
      new_label = classes if isinstance(label, list) else classes[0]
      out[split].append(example._replace(label=new_label))
  return out


def _prediction_files(
  head: TaskHead, examples: Examples, predictions: Answers
) -> dict[str, str]:
  """Returns a csv of each set, with the classes' names."""

  def text(label: Any) -> str:
    (value,) = head.prediction_fields(label).values()
    if isinstance(value, str):
      return value
    return json.dumps(value, ensure_ascii=False)

  files = {}
  for name in examples:
    file = io.StringIO()
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(("record", "label", "predicted"))
    for example, prediction in zip(
      examples[name], predictions[name], strict=True
    ):
      rows.writerow((example.id, text(example.label), text(prediction)))
    files[f"{name}.csv"] = file.getvalue()
  return files
