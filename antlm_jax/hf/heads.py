"""Fine-tuned heads in transformers: a table by the kind of head.

A head whose kind has no row here has no place in transformers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.hf.architecture import Target
from antlm_jax.inference.model import FineTuned, Loaded

_POOLS = {  # ours, and theirs
  "EuroBERT": {"first": "bos", "mean": "mean"},
  "ModernBERT": {"first": "cls", "mean": "mean"},
}


@dataclasses.dataclass(frozen=True)
class Place:
  """A kind of head in transformers."""

  auto: str  # the auto class that opens it
  tag: str  # what the Hub calls what it does
  weights: Mapping[str, str]  # our parameters and its tensors
  # What config.json says of it, by the checkpoint and the model_type.
  config: Callable[[Loaded, str], dict[str, Any]]
  embeds: bool = False  # what sentence-transformers opens, as lengths of 1


def _labels(loaded: Loaded, model_type: str) -> dict[str, Any]:
  labels = list(enumerate(loaded.task.settings["labels"]))
  return {
    "id2label": {str(i): label for i, label in labels},
    "label2id": {label: i for i, label in labels},
  }


def _classifier(loaded: Loaded, model_type: str) -> dict[str, Any]:
  head = loaded.task.settings
  out = {
    "problem_type": "single_label_classification",
    **_labels(loaded, model_type),
  }
  if model_type == "ltg_bert":
    return out | {
      "classifier_pooling": head["pool"],
      "classifier_norms": head["norms"],
      "classifier_dropout": head["dropout"],
    }
  last_norm = head.get("last_norm", False)  # not said by older checkpoints
  family, name = ("EuroBERT", "plain")
  if modern := model_type == "modernbert":
    family, name = "ModernBERT", "last_norm"
  if head["norms"] or last_norm != modern or head["pool"] not in _POOLS[family]:
    raise UserError(
      f"{loaded.path} has a head that transformers' {family} has not:"
      f" fine-tune with --head={name} and --pool=mean or first"
    )
  out["classifier_pooling"] = _POOLS[family][head["pool"]]
  if modern:
    out |= {"classifier_bias": True, "classifier_dropout": head["dropout"]}
  return out


HEADS = {  # by `FineTuned.kind`
  "classifier": Place(
    auto="AutoModelForSequenceClassification",
    tag="text-classification",
    weights={
      "norm/scale": "norm.weight",
      "dense/kernel": "dense.weight",
      "dense/bias": "dense.bias",
      "classes/kernel": "classifier.weight",
      "classes/bias": "classifier.bias",
    },
    config=_classifier,
  ),
  "tagger": Place(
    auto="AutoModelForTokenClassification",
    tag="token-classification",
    weights={
      "classes/kernel": "classifier.weight",
      "classes/bias": "classifier.bias",
    },
    config=_labels,
  ),
  "towers": Place(
    auto="AutoModel",
    tag="sentence-similarity",
    weights={},
    config=lambda loaded, model_type: {},
    embeds=True,
  ),
}


def place(task: FineTuned) -> Place:
  """Returns where a task's head stands in transformers.

  Raises:
    UserError: if it has no place there.
  """
  if task.kind not in HEADS:
    raise UserError(
      f"transformers has no head like that of {task.name} ({task.kind}): only"
      f" {', '.join(HEADS)} can be exported"
    )
  return HEADS[task.kind]


def prompts(loaded: Loaded) -> dict[str, str] | None:
  """Returns what an embedder puts before texts; None if it is none."""
  if not (loaded.task and place(loaded.task).embeds):
    return None
  names = "query", "document"
  return dict(
    zip(names, loaded.task.settings.get("prompts", ("", "")), strict=True)
  )


def config(loaded: Loaded, target: Target) -> dict[str, Any]:
  """Returns what config.json says of a fine-tuned head.

  Raises:
    UserError: if transformers has no such head on such an encoder.
  """
  found = place(loaded.task)
  if found.auto not in target.classes:
    causal = loaded.task.attention == "causal"
    raise UserError(
      f"{loaded.path} was fine-tuned reading {loaded.task.attention}ly, and"
      f" transformers' {target.model_type} has no {found.auto} for that"
      + ": fine-tune with --attention=bidirectional"
      * causal
    )
  about = found.config(loaded, target.model_type)
  return {"architectures": [target.classes[found.auto]], **about}
