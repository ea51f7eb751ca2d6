"""GLUE and SuperGLUE as BabyLM fine-tunes and evaluates them.

Eleven scores of ten trainings: BoolQ, CoLA, MNLI (which is evaluated matched
and mismatched), MRPC, MultiRC, QNLI, QQP, RTE, SST-2, WSC. A task's files are
`NAME.train.jsonl` and `NAME.valid.jsonl`, in the folder or its
`glue_filtered/`. BabyLM's validation set is also its test set: the best epoch
is chosen on what is reported.
"""

import csv
import dataclasses
import functools
import json
import pathlib
from collections.abc import Hashable, Iterator, Mapping
from string import Formatter
from typing import NamedTuple

from antlm_jax.errors import UserError
from antlm_jax.runtime import files as io
from evals.finetuning import classification
from evals.finetuning.classification import Options
from evals.finetuning.rows import Example
from evals.finetuning.task import Suite, Task

_NLI = {"entailment": 0, "neutral": 1, "contradiction": 2}


@dataclasses.dataclass(frozen=True)
class Format:
  """How a task is written in its files, and measured.

  Attributes:
    texts: The texts of an example: templates over a line's fields.
    metric: The main metric.
    classes: Number of classes.
    labels: Labels that are words, and their classes.
    evaluations: Other names under which it is evaluated.
  """

  texts: tuple[str, ...]
  metric: str = "accuracy"
  classes: int = 2
  labels: Mapping[str, int] = dataclasses.field(default_factory=dict)
  evaluations: tuple[str, ...] = ()

  @property
  def fields(self) -> list[str]:
    """The fields of a line that its texts are made of."""
    parts = (part for text in self.texts for part in Formatter().parse(text))
    return [field for _, field, _, _ in parts if field]

  @property
  def names(self) -> tuple[str, ...]:
    """The classes' names: words where the files have words, or numbers."""
    words = {number: word for word, number in self.labels.items()}
    return tuple(words.get(c, str(c)) for c in range(self.classes))


# The question comes first or last as in SuperGLUE's own fields. WSC's spans
# are asked for in words: BabyLM's files mark them by position alone.
FORMATS = {
  "boolq": Format(("{question}", "{passage}")),
  "cola": Format(("{sentence}",), metric="mcc"),
  "mnli": Format(
    ("{premise}", "{hypothesis}"),
    classes=3,
    labels=_NLI,
    evaluations=("mnli-mm",),
  ),
  "mrpc": Format(("{sentence1}", "{sentence2}"), metric="f1"),
  "multirc": Format(("{paragraph}", "{question} {answer}")),
  "qnli": Format(("{question}", "{sentence}")),
  "qqp": Format(("{question1}", "{question2}"), metric="f1"),
  "rte": Format(("{sentence1}", "{sentence2}")),
  "sst2": Format(("{sentence}",)),
  "wsc": Format(("{text}", "{span2_text} refers to {span1_text}")),
}
SCORES_OF = {
  name: (name, *format.evaluations) for name, format in FORMATS.items()
}
SCORES = tuple(name for those in SCORES_OF.values() for name in those)


class Files(NamedTuple):
  """Where a task is read.

  Attributes:
    train: Its training set.
    evaluations: Its evaluation sets, by name.
  """

  train: pathlib.Path
  evaluations: Mapping[str, pathlib.Path]


# Other forms in which whole training sets are passed around. The MNLI of
# BabyLM's multilingual track is cut out of the mismatched validation set, so
# it comes with its own and without `mnli-mm`, which it would have seen.
_OTHERS = {
  "sst2": [("sst2/train_full.tsv", {"sst2": "glue_filtered/sst2.valid.jsonl"})],
  "mnli": [
    (
      "mnli_en_babylm_eval/mnli_en.train.jsonl",
      {"mnli": "mnli_en_babylm_eval/mnli_en.valid.jsonl"},
    )
  ],
}


def find(folder, name: str) -> Files:
  """Finds the files of a task.

  Raises:
    UserError: if there is no training set, or none to evaluate on.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise UserError(f"--data={folder}: no such folder")
  sources = list(_sources(folder, name))
  for files in sources:
    if files.train.is_file():
      return _with_evaluations(files, name)
  raise UserError(
    f"{name} cannot be trained: {sources[0].train} is absent, and so is"
    " glue_filtered/ with it"
  )


def _sources(folder: pathlib.Path, name: str) -> Iterator[Files]:
  for inside in (folder, folder / "glue_filtered"):
    evaluations = (name, *FORMATS[name].evaluations)
    yield Files(
      inside / f"{name}.train.jsonl",
      {e: inside / f"{e}.valid.jsonl" for e in evaluations},
    )
  for train, evaluations in _OTHERS.get(name, ()):
    yield Files(
      folder / train, {e: folder / path for e, path in evaluations.items()}
    )


def _with_evaluations(files: Files, name: str) -> Files:
  there = {e: path for e, path in files.evaluations.items() if path.is_file()}
  if name not in there:
    raise UserError(
      f"{name} cannot be evaluated: {files.evaluations[name]} is absent"
    )
  return Files(files.train, there)


def task(files: Files, name: str, options: Options, attention: str) -> Task:
  """Makes the value of a task.

  Args:
    files: What `find` found.
    name: A key of `FORMATS`.
    options: Of its head.
    attention: How rows are read.
  """
  format = FORMATS[name]
  return classification.task(
    name,
    functools.partial(load, files, format),
    tuple(files.evaluations),
    options.classifier(format.names, attention),
    format.metric,
    texts=predictions,
    files=(files.train, *files.evaluations.values()),
  )


def make(folder, name: str, options: Options, attention: str) -> Task:
  """Makes a task of what is found in a folder.

  Raises:
    UserError: if there is no training set, or none to evaluate on.
  """
  return task(find(folder, name), name, options, attention)


SUITE = Suite("GLUE", SCORES_OF, Options, make)


def predictions(found: Mapping[str, tuple]) -> dict[str, str]:
  """Returns predictions.json, in the form of BabyLM's 2024 pipeline.

  Args:
    found: By evaluation set its examples, and their predictions.
  """
  sets = {
    name: {
      "predictions": [
        {"id": example.id, "pred": prediction}
        for example, prediction in zip(*those, strict=True)
      ]
    }
    for name, those in found.items()
  }
  return {"predictions.json": json.dumps({"glue": sets}) + "\n"}


# --------------------------------------------------------------------- reading


def load(files: Files, format: Format, split: str) -> list[Example]:
  """Reads the examples of `train`, or of an evaluation set by its name.

  Raises:
    UserError: if the file cannot be read, or a line is not an example.
  """
  path = files.train if split == "train" else files.evaluations[split]
  examples = [
    _example(fields, format, f"{split}_{i}", f"{path}, line {number}")
    for i, (number, fields) in enumerate(_records(path))
  ]
  if not examples:
    raise UserError(f"{path} holds no examples")
  return examples


def _records(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
  """Yields the fields of each line, and its number in the file."""
  if path.suffix == ".tsv":
    plain = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    return io.read_csv(path, "examples", **plain)
  return io.read_jsonl(path, "examples")


def _example(fields: dict, format: Format, name: str, where: str) -> Example:
  for needed in (*format.fields, "label"):
    if needed not in fields:
      raise UserError(f"{where}: no field {needed!r}")
    if needed != "label" and not isinstance(fields[needed], str):
      raise UserError(f"{where}: the field {needed!r} is not text")
  texts = tuple(text.format_map(fields) for text in format.texts)
  return Example(texts, _class(fields["label"], format, where), name)


def _class(label, format: Format, where: str) -> int:
  """Returns a label's class: it is a word, or a number, also in quotes."""
  known = dict(format.labels)
  for number in range(format.classes):
    known |= {number: number, str(number): number}
  if isinstance(label, Hashable) and label in known:
    return known[label]
  among = ", ".join(map(str, (*range(format.classes), *format.labels)))
  raise UserError(f"{where}: the label {label!r:.60} is not one of {among}")
