"""GLUE and SuperGLUE, fine-tuned and evaluated as in BabyLM's pipelines.

2024 has ten tasks and eleven scores: MNLI is evaluated matched and mismatched.
2026 has seven of the tasks, with other settings. A task's files are
`NAME.train.jsonl` and `NAME.valid.jsonl`, in the folder or its
`glue_filtered/`, or those that SuperGLUE publishes, such as `RTE/train.jsonl`.
BabyLM's validation set is also its test set, so the epoch is chosen on the
reported scores. For SuperGLUE, a part of the training set chooses it.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from string import Formatter
from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import classification, sets
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.classification import ClassifierOptions
from antlm_jax.evals.finetuning.task import Answers, Examples, Preset, Task


@dataclasses.dataclass(frozen=True)
class GlueFormat:
  """Form of a task's files, and its metric."""

  texts: tuple[str, ...]  # of an example, as templates over a record's fields
  metric: str = "accuracy"
  classes: tuple[str, ...] = ("0", "1")
  words: tuple[str, ...] = ()  # other names of the classes
  also: tuple[str, ...] = ()  # further metrics
  evaluations: tuple[str, ...] = ()  # names of further evaluation sets
  superglue: str = ""  # its folder in SuperGLUE
  best_by: str = "f1"  # metric that chooses the epoch, as in 2024
  heads: classification.Heads = classification.HEADS


_NLI = ("{premise}", "{hypothesis}")
_BOOL = ("false", "true")
_PAIR = ("{sentence1}", "{sentence2}")
# Texts as in both years' pipelines, in their order.
FORMATS = {
  "boolq": GlueFormat(
    ("{question}", "{passage}"), words=_BOOL, superglue="BoolQ"
  ),
  "cola": GlueFormat(("{sentence}",), metric="mcc"),
  "mnli": GlueFormat(
    _NLI,
    classes=("entailment", "neutral", "contradiction"),
    evaluations=("mnli-mm",),
    best_by="accuracy",
  ),
  "mrpc": GlueFormat(_PAIR, metric="f1"),
  "multirc": GlueFormat(
    ("Question: {question} Answer: {answer}", "{paragraph}"),
    superglue="MultiRC",
  ),
  "qnli": GlueFormat(("{question}", "{sentence}")),
  "qqp": GlueFormat(("{question1}", "{question2}"), metric="f1"),
  "rte": GlueFormat(
    _PAIR, words=("entailment", "not_entailment"), superglue="RTE"
  ),
  "sst2": GlueFormat(("{sentence}",)),
  "wsc": GlueFormat(
    ('Does "{span2_text}" refer to "{span1_text}" in this passage?', "{text}"),
    words=_BOOL,
    superglue="WSC",
  ),
}
SCORES_OF = {
  name: (name, *format.evaluations) for name, format in FORMATS.items()
}
SCORES = tuple(name for names in SCORES_OF.values() for name in names)
SUPERGLUE = {
  "boolq": FORMATS["boolq"],
  "cb": GlueFormat(
    _NLI,
    classes=("entailment", "contradiction", "neutral"),
    also=("macro_f1",),
    superglue="CB",
  ),
  "copa": GlueFormat(
    ("{premise} {asked}", "{choice1}", "{choice2}"),
    superglue="COPA",
    heads=classification.CHOOSERS,
  ),
  # F1 over all answers, SuperGLUE's F1a.
  "multirc": dataclasses.replace(FORMATS["multirc"], metric="f1"),
  "rte": FORMATS["rte"],
  "wic": GlueFormat(
    ("{word}: {sentence1}", "{sentence2}"), words=_BOOL, superglue="WiC"
  ),
  "wsc": FORMATS["wsc"],
}
_COPA = {"cause": "What was the cause?", "effect": "What was the result?"}

# Training and evaluation files with other names. The MNLI of BabyLM's
# multilingual track is cut out of the mismatched validation set, so it is not
# evaluated on that set.
_OTHER_FILES = {
  "sst2": ("sst2/train_full.tsv", "glue_filtered/sst2.valid.jsonl"),
  "mnli": (
    "mnli_en_babylm_eval/mnli_en.train.jsonl",
    "mnli_en_babylm_eval/mnli_en.valid.jsonl",
  ),
}


def find_glue_files(
  folder, name: str, form: GlueFormat
) -> dict[str, pathlib.Path]:
  """Finds a task's files by set: first `train`, then the evaluation sets.

  The folder has the layout of a BabyLM pipeline or of SuperGLUE. The sets of
  `form.evaluations` may be absent.

  Raises:
    Absent: No layout has both the training set and the evaluation set `name`.
    UserError: Several layouts have them, in different files.
  """
  layouts = [
    {"train": f"{prefix}{name}.train.jsonl"}
    | {x: f"{prefix}{x}.valid.jsonl" for x in (name, *form.evaluations)}
    for prefix in ("", "glue_filtered/")
  ]
  if name in _OTHER_FILES:
    layouts += [dict(zip(("train", name), _OTHER_FILES[name], strict=True))]
  if path := form.superglue:
    layouts += [{"train": f"{path}/train.jsonl", name: f"{path}/val.jsonl"}]
  return sets.find_set_files(folder, name, *layouts, further=form.evaluations)


def texts_2024(examples: Examples, predictions: Answers) -> dict[str, str]:
  """Files of 2024: predictions.json, and predictions.txt for each set.

  collect_results.py writes the first, finetune_classification.py the others.
  """
  answers = {"glue": _glue_predictions(examples, predictions)}
  texts = {"predictions.json": json.dumps(answers)}
  for name in examples:
    lines = [f"{i}\t{x}\n" for i, x in enumerate(predictions[name])]
    texts[f"{name}/predictions.txt"] = "".join(["index\tprediction\n", *lines])
  return texts


def texts_2026(examples: Examples, predictions: Answers) -> dict[str, str]:
  """File of finetune/run.py."""
  answers = _glue_predictions(examples, predictions)
  return {"predictions.json": json.dumps(answers)}


def _glue_predictions(
  examples: Examples, predictions: Answers
) -> dict[str, dict]:
  return {
    name: {
      "predictions": [
        {"id": example.id, "pred": prediction}
        for example, prediction in zip(
          examples[name], predictions[name], strict=True
        )
      ]
    }
    for name in examples
  }


def make_glue_task(
  folder,
  name: str,
  attention: str,
  options: ClassifierOptions,
  formats: Mapping[str, GlueFormat] = FORMATS,
  texts: Callable[[Examples, Answers], dict[str, str]] = texts_2024,
) -> Task:
  """Makes a task, a key of `formats`, of the files in a folder."""
  form = formats[name]
  paths = find_glue_files(folder, name, form)
  return classification.classification_task(
    name,
    lambda name: read_glue_examples(form, paths[name], name),
    [*paths][1:],
    options.classifier(form.classes, attention),
    main_metric=form.metric,
    best_by=form.best_by,
    texts=texts,
    files=tuple(paths.values()),
  )


def make_held_out(
  folder,
  name: str,
  form: GlueFormat,
  attention: str,
  options: ClassifierOptions,
  key=None,
) -> Task:
  """Makes a task whose test set is the validation set.

  Its dev set is held out of the training set by `key`, as in
  `sets.divide_training_set`.
  """
  paths = find_glue_files(folder, name, form)
  paths = {"train": paths["train"], "test": paths[name]}
  return classification.classification_task(
    **sets.known_task_fields(
      name, paths, functools.partial(read_glue_examples, form), key
    ),
    head=options.classifier(form.classes, attention, form.heads),
    main_metric=form.metric,
    also=form.also,
  )


# MNLI is not evaluated mismatched, and the main metric chooses the epoch.
FORMATS_2026 = {
  name: dataclasses.replace(form, evaluations=(), best_by=form.metric)
  for name, form in FORMATS.items()
  if name in ("boolq", "mnli", "mrpc", "multirc", "qqp", "rte", "wsc")
}
# eval_finetuning.sh, and the defaults of finetune/run.py.
_SETTINGS_2026 = {
  "lrs": (3e-5,),
  "seeds": (42,),
  "batch_size": 32,
  "patience": 0,
  "drop_last": True,
  "max_length": 512,
  "warmup": 0.06,
  "decay": "cosine",
  "floor": 0.1,
  "weight_decay": 0.01,
  "decay_scope": "all",
  "clip": 0.0,
  "head": "norms",
}
_OWN_2026 = {
  "boolq": {"batch_size": 16},
  "multirc": {"batch_size": 16},
  "wsc": {"epochs": 30},
  # The size of its own files; those of 2024 are larger.
  "mnli": {"limit": 10_000},
  "qqp": {"limit": 10_000},
}
OF_2024 = Preset(
  "GLUE",
  "GLUE and SuperGLUE as BabyLM's pipeline of that year: ten tasks",
  SCORES_OF,
  make_glue_task,
  settings=(ClassifierOptions,),
)
OF_2026 = Preset(
  "GLUE of 2026",
  "seven of them, with the settings of that year's pipeline",
  {name: (name,) for name in FORMATS_2026},
  functools.partial(make_glue_task, formats=FORMATS_2026, texts=texts_2026),
  settings=(ClassifierOptions,),
  defaults={
    name: _SETTINGS_2026 | _OWN_2026.get(name, {}) for name in FORMATS_2026
  },
  folder="finetune-2026",
  reported=False,  # its scores have the names of 2024's
)


SUPER = Preset(
  "SuperGLUE",
  "BoolQ, CB, COPA, MultiRC, RTE, WiC and WSC, as SuperGLUE publishes them",
  sets.dev_and_test(list(SUPERGLUE)),
  # MultiRC asks about a passage in many examples, all of which are in one part.
  lambda folder, name, attention, options: make_held_out(
    folder,
    name,
    SUPERGLUE[name],
    attention,
    options,
    key=lambda example: example.texts[1],
  ),
  settings=(ClassifierOptions,),
  folder="finetune-superglue",
)


def read_glue_examples(
  form: GlueFormat, path: pathlib.Path, name: str
) -> list[Example]:
  """Reads the examples of `train`, or of an evaluation set by its name.

  Raises a UserError if a line is not an example.
  """
  parts = (part for text in form.texts for part in Formatter().parse(text))
  texts = [field for _, field, _, _ in parts if field]
  # A label is a word, or a number, also in quotes.
  classes = {str(number): number for number in range(len(form.classes))}
  for words in (form.words, form.classes):
    classes |= {word: number for number, word in enumerate(words)}
  examples = []
  for place, record in sets.record_fields(path):
    for fields in _unfolded(record, place):
      sets.require_texts(fields, texts, place)
      if "label" not in fields:
        raise UserError(f"{place}: the field 'label' is absent")
      label = fields["label"]
      label = json.dumps(label) if isinstance(label, bool) else str(label)
      if label not in classes:
        raise UserError(
          f"{place}: the label {fields['label']!r:.60} is not one of"
          f" {', '.join(classes)}"
        )
      id = f"{name.removesuffix('-test')}_{len(examples)}"
      example_texts = tuple(text.format_map(fields) for text in form.texts)
      examples.append(Example(example_texts, classes[label], id))
  return examples


def _unfolded(
  record: Mapping[str, Any], place: str
) -> Iterator[Mapping[str, Any]]:
  """Yields the examples of a record, in SuperGLUE's form or BabyLM's.

  SuperGLUE nests MultiRC's answers and WSC's spans, and has other names for
  RTE's texts. Raises a UserError for other nested values.
  """
  passage = record.get("passage")
  if isinstance(passage, dict):
    for question in _objects(passage, "questions", place):
      for answer in _objects(question, "answers", place):
        yield answer | {
          "paragraph": passage.get("text"),
          "question": question.get("question"),
          "answer": answer.get("text"),
        }
    return
  fields = {}
  for name, superglue_name in (
    ("sentence1", "premise"),
    ("sentence2", "hypothesis"),
  ):
    if superglue_name in record:
      fields[name] = record[superglue_name]
  if isinstance(target := record.get("target"), dict):
    fields |= target
  for question, asked in _COPA.items():
    if record.get("question") == question:
      fields["asked"] = asked
  yield fields | record


def _objects(fields: Mapping[str, Any], name: str, place: str) -> list[dict]:
  """Returns a field's objects; raises a UserError for another value."""
  values = fields.get(name)
  is_list = isinstance(values, list)
  if not is_list or not all(isinstance(value, dict) for value in values):
    raise UserError(f"{place}: the field {name!r} is no list of objects")
  return values
