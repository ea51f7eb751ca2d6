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
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from antlm_jax.errors import UserError
from evals.finetuning import task as tasks
from evals.finetuning.task import Example, Task

_BINARY = {"accuracy": tasks.accuracy, "f1": tasks.f1, "mcc": tasks.mcc}
_NLI = {"entailment": 0, "neutral": 1, "contradiction": 2}


@dataclasses.dataclass(frozen=True)
class Form:
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
  def names(self) -> tuple[str, ...]:
    """The classes' names: words where the files have words, or numbers."""
    words = {number: word for word, number in self.labels.items()}
    return tuple(words.get(c, str(c)) for c in range(self.classes))


# The question comes first or last as in SuperGLUE's own fields. WSC's spans
# are asked for in words: BabyLM's files mark them by position alone.
FORMS = {
  "boolq": Form(("{question}", "{passage}")),
  "cola": Form(("{sentence}",), metric="mcc"),
  "mnli": Form(
    ("{premise}", "{hypothesis}"),
    classes=3,
    labels=_NLI,
    evaluations=("mnli-mm",),
  ),
  "mrpc": Form(("{sentence1}", "{sentence2}"), metric="f1"),
  "multirc": Form(("{paragraph}", "{question} {answer}")),
  "qnli": Form(("{question}", "{sentence}")),
  "qqp": Form(("{question1}", "{question2}"), metric="f1"),
  "rte": Form(("{sentence1}", "{sentence2}")),
  "sst2": Form(("{sentence}",)),
  "wsc": Form(("{text}", "{span2_text} refers to {span1_text}")),
}
SCORES = tuple(
  name for task, form in FORMS.items() for name in (task, *form.evaluations)
)


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


def names(wanted: str) -> tuple[str, ...]:
  """Reads a list of tasks, such as `cola,mrpc`; `mnli-mm` is MNLI's.

  Raises:
    UserError: for a name that is none.
  """
  if wanted == "all":
    return tuple(FORMS)
  owner = {s: t for t, f in FORMS.items() for s in (t, *f.evaluations)}
  unknown = [name for name in wanted.split(",") if name not in owner]
  if unknown:
    raise UserError(
      f"--task={unknown[0]!r} is not all or of {', '.join(SCORES)}"
    )
  return tuple(dict.fromkeys(owner[name] for name in wanted.split(",")))


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


def find_all(folder) -> dict[str, Files]:
  """Finds the files of every task that can be trained, by name.

  Raises:
    UserError: if there is none.
  """
  found = {}
  for name in FORMS:
    try:
      found[name] = find(folder, name)
    except UserError as error:
      missing = error
  if not found:
    raise missing
  return found


def _sources(folder: pathlib.Path, name: str) -> Iterator[Files]:
  for inside in (folder, folder / "glue_filtered"):
    evaluations = (name, *FORMS[name].evaluations)
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


def task(
  files: Files, name: str, pool: str, dropout: float, norms: bool = True
) -> Task:
  """Makes the value of a task.

  Args:
    files: What `find` found.
    name: A key of `FORMS`.
    pool: Which vector is classified, one of `tasks.POOLS`.
    dropout: The head's.
    norms: Whether the head has norms.
  """
  form = FORMS[name]
  binary = form.classes == 2
  return Task(
    name=name,
    load=functools.partial(load, files, form),
    evaluations=tuple(files.evaluations),
    head=tasks.Classifier(form.classes, pool, dropout, norms),
    loss=tasks.cross_entropy,
    decode=tasks.likeliest,
    metrics=_BINARY if binary else {"accuracy": tasks.accuracy},
    main_metric=form.metric,
    labels=form.names,
  )


def load(files: Files, form: Form, split: str) -> list[Example]:
  """Reads the examples of `train`, or of an evaluation set by its name.

  Raises:
    UserError: if the file cannot be read, or a line is not an example.
  """
  path = files.train if split == "train" else files.evaluations[split]
  examples = [
    _example(fields, form, f"{split}_{i}", f"{path}, line {number}")
    for i, (number, fields) in enumerate(_records(path))
  ]
  if not examples:
    raise UserError(f"{path} holds no examples")
  return examples


def _records(path: pathlib.Path) -> Iterator[tuple[int, dict]]:
  """Yields the fields of each line, and its number in the file."""
  try:
    text = path.read_text(encoding="utf-8")
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f"cannot read {path}: {error}") from error
  lines = text.split("\n")  # not splitlines: U+2028 is no line's end here
  if path.suffix == ".tsv":
    rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    yield from enumerate(rows, start=2)
    return
  for number, line in enumerate(lines, start=1):
    if line.strip():
      yield number, _fields(line, f"{path}, line {number}")


def _fields(line: str, where: str) -> dict:
  try:
    fields = json.loads(line)
  except json.JSONDecodeError as error:
    raise UserError(f"{where}: not JSON: {error}") from error
  if not isinstance(fields, dict):
    raise UserError(f"{where}: not an object with fields")
  return fields


def _example(fields: dict, form: Form, name: str, where: str) -> Example:
  try:
    texts = tuple(text.format_map(fields) for text in form.texts)
    label = fields["label"]
  except KeyError as error:
    raise UserError(f"{where}: no field {error}") from error
  try:
    label = form.labels[label] if label in form.labels else int(label)
  except (TypeError, ValueError):
    label = None
  if label not in range(form.classes):
    raise UserError(
      f"{where}: the label {fields['label']!r} is not one of"
      f" {', '.join(map(str, (*range(form.classes), *form.labels)))}"
    )
  return Example(texts, label, name)
