"""GLUE and SuperGLUE, fine-tuned and evaluated as in BabyLM's pipelines.

2024 has ten tasks and eleven scores: MNLI is evaluated matched and mismatched.
2026 has seven of the tasks, with other settings. A task's files are
`NAME.train.jsonl` and `NAME.valid.jsonl`, in the folder or its
`glue_filtered/`. BabyLM's validation set is also its test set, so the epoch is
chosen on the reported scores.
"""

import csv
import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from string import Formatter

from antlm_jax.errors import UserError
from antlm_jax.evals.finetuning import classification
from antlm_jax.evals.finetuning.batching import Example
from antlm_jax.evals.finetuning.classification import Options
from antlm_jax.evals.finetuning.task import Predicted, Suite, Task, records


@dataclasses.dataclass(frozen=True)
class Format:
  """Form of a task's files, and its metric."""

  texts: tuple[str, ...]  # of an example, as templates over a line's fields
  metric: str = "accuracy"
  classes: tuple[str, ...] = ("0", "1")  # their names in the files
  evaluations: tuple[str, ...] = ()  # names of further evaluation sets


# Texts as in both years' pipelines, in their order.
FORMATS = {
  "boolq": Format(("{question}", "{passage}")),
  "cola": Format(("{sentence}",), metric="mcc"),
  "mnli": Format(
    ("{premise}", "{hypothesis}"),
    classes=("entailment", "neutral", "contradiction"),
    evaluations=("mnli-mm",),
  ),
  "mrpc": Format(("{sentence1}", "{sentence2}"), metric="f1"),
  "multirc": Format(("Question: {question} Answer: {answer}", "{paragraph}")),
  "qnli": Format(("{question}", "{sentence}")),
  "qqp": Format(("{question1}", "{question2}"), metric="f1"),
  "rte": Format(("{sentence1}", "{sentence2}")),
  "sst2": Format(("{sentence}",)),
  "wsc": Format(
    ('Does "{span2_text}" refer to "{span1_text}" in this passage?', "{text}")
  ),
}
SCORES_OF = {
  name: (name, *format.evaluations) for name, format in FORMATS.items()
}
SCORES = tuple(name for those in SCORES_OF.values() for name in those)


# Other training and evaluation files. The MNLI of BabyLM's multilingual track
# is cut out of the mismatched validation set, so it is not evaluated on it.
_OTHERS = {
  "sst2": ("sst2/train_full.tsv", "glue_filtered/sst2.valid.jsonl"),
  "mnli": (
    "mnli_en_babylm_eval/mnli_en.train.jsonl",
    "mnli_en_babylm_eval/mnli_en.valid.jsonl",
  ),
}


def find(folder, name: str) -> dict[str, pathlib.Path]:
  """Finds the files of a task: `train`, and evaluation sets by their names.

  Raises a UserError if there is no training set, or no evaluation set.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise UserError(f"--data={folder}: no such folder")
  sources = []
  for inside in (folder, folder / "glue_filtered"):
    sets = {e: inside / f"{e}.valid.jsonl" for e in SCORES_OF[name]}
    sources.append({"train": inside / f"{name}.train.jsonl", **sets})
  if name in _OTHERS:
    train, valid = (folder / path for path in _OTHERS[name])
    sources.append({"train": train, name: valid})
  for paths in sources:
    if paths["train"].is_file():
      if not paths[name].is_file():
        raise UserError(f"{name} cannot be evaluated: {paths[name]} is absent")
      return {split: path for split, path in paths.items() if path.is_file()}
  raise UserError(
    f"{name} cannot be trained: {sources[0]['train']} is absent, and so is"
    " glue_filtered/ with it"
  )


def texts_2024(found: Mapping[str, Predicted]) -> dict[str, str]:
  """Files of 2024: predictions.json, and predictions.txt for each set.

  collect_results.py writes the first, finetune_classification.py the others.
  """
  texts = {"predictions.json": json.dumps({"glue": _predictions(found)})}
  for name, those in found.items():
    lines = [f"{i}\t{one}\n" for i, one in enumerate(those.predictions)]
    texts[f"{name}/predictions.txt"] = "".join(["index\tprediction\n", *lines])
  return texts


def texts_2026(found: Mapping[str, Predicted]) -> dict[str, str]:
  """File of finetune/run.py."""
  return {"predictions.json": json.dumps(_predictions(found))}


def _predictions(found: Mapping[str, Predicted]) -> dict[str, dict]:
  return {
    name: {
      "predictions": [
        {"id": example.id, "pred": one}
        for example, one in zip(those.examples, those.predictions, strict=True)
      ]
    }
    for name, those in found.items()
  }


def make(
  folder, name: str, attention: str, options: Options, year: int = 2024
) -> Task:
  """Makes a task, a key of `FORMATS`, of the files in a folder.

  In 2024, F1 chooses the epoch of tasks of two classes, and MNLI is also
  evaluated mismatched. In 2026, the main metric chooses the epoch.
  """
  form, paths = FORMATS[name], find(folder, name)
  if year == 2026:
    paths = {split: paths[split] for split in ("train", name)}
  by_f1 = year == 2024 and len(form.classes) == 2
  _, *evaluations = paths
  return classification.task(
    name,
    functools.partial(load, paths, form),
    evaluations,
    options.classifier(form.classes, attention),
    main_metric=form.metric,
    best_by="f1" if by_f1 else form.metric,
    texts=texts_2024 if year == 2024 else texts_2026,
    files=tuple(paths.values()),
  )


_SEVEN = ("boolq", "mnli", "mrpc", "multirc", "qqp", "rte", "wsc")
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
OF_2024 = Suite(
  "GLUE",
  "GLUE and SuperGLUE as BabyLM's pipeline of that year: ten tasks",
  SCORES_OF,
  make,
  heads=(classification.Classifier, classification.Linear),
  settings=(Options,),
)
OF_2026 = Suite(
  "GLUE of 2026",
  "seven of them, with the settings of that year's pipeline",
  {name: (name,) for name in _SEVEN},
  functools.partial(make, year=2026),
  settings=(Options,),
  defaults={n: _SETTINGS_2026 | _OWN_2026.get(n, {}) for n in _SEVEN},
  folder="finetune-2026",
  reported=False,  # its scores have the names of 2024's
)


def load(
  paths: Mapping[str, pathlib.Path], form: Format, split: str
) -> list[Example]:
  """Reads the examples of `train`, or of an evaluation set by its name.

  Raises a UserError if a line is not an example.
  """
  parts = (part for text in form.texts for part in Formatter().parse(text))
  texts = [field for _, field, _, _ in parts if field]
  # A label is a word, or a number, also in quotes.
  known = {str(number): number for number in range(len(form.classes))}
  known |= {word: number for number, word in enumerate(form.classes)}
  out = []
  for where, fields in records(paths[split], texts, csv.QUOTE_NONE):
    if "label" not in fields:
      raise UserError(f"{where}: the field 'label' is absent")
    if (label := str(fields["label"])) not in known:
      raise UserError(
        f"{where}: the label {fields['label']!r:.60} is not one of"
        f" {', '.join(known)}"
      )
    made = tuple(text.format_map(fields) for text in form.texts)
    out.append(Example(made, known[label], f"{split}_{len(out)}"))
  return out
