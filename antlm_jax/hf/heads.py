"""Fine-tuned heads in transformers, by kind of head.

You can export only these kinds, and heads whose `export_as` names one of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from antlm_jax.errors import UserError
from antlm_jax.hf.architecture import Target, tensor_names
from antlm_jax.inference.model import FineTuned, Loaded

_CLASSES = {"classes": "classifier"}
_POOLS = {  # our pooling to that of transformers
  "EuroBERT": {"first": "bos", "mean": "mean"},
  "ModernBERT": {"first": "cls", "mean": "mean"},
}


@dataclasses.dataclass(frozen=True)
class HeadPlace:
  """A kind of head in transformers."""

  auto: str  # auto class that opens it
  tag: str  # name of its task on the Hub
  # Our parameters to its tensors.
  weights: Mapping[str, str] = dataclasses.field(default_factory=dict)
  # Returns fields of config.json, given the checkpoint and the model_type.
  config: Callable[[Loaded, str], dict[str, Any]] = lambda loaded, kind: {}
  # Returns the head's arrays with our names, as transformers computes them.
  params: Callable[[FineTuned], Mapping[str, Any]] = lambda task: task.params
  pipeline: str = ""  # further arguments of its pipeline, in the card
  # Class of sentence-transformers that opens it and returns unit vectors.
  embedder: str = ""
  projection: str = ""  # our kernel that maps token states to vectors


def _label_config(loaded: Loaded, model_type: str) -> dict[str, Any]:
  labels = list(enumerate(loaded.task.settings["labels"]))
  return {
    "id2label": {str(i): label for i, label in labels},
    "label2id": {label: i for i, label in labels},
  }


def _classifier_config(
  problem_type: str, loaded: Loaded, model_type: str
) -> dict[str, Any]:
  head = loaded.task.settings
  out = {"problem_type": problem_type, **_label_config(loaded, model_type)}
  if model_type == "ltg_bert":
    return out | {
      "classifier_pooling": head["pool"],
      "classifier_norms": head["norms"],
      "classifier_dropout": head["dropout"],
    }
  modern = model_type == "modernbert"
  family = "ModernBERT" if modern else "EuroBERT"
  name = "last_norm" if modern else "plain"
  last_norm = head.get("last_norm", False)  # older checkpoints lack it
  if head["norms"] or last_norm != modern or head["pool"] not in _POOLS[family]:
    raise UserError(
      f"{family} has no head like that of {loaded.path}: fine-tune with"
      f" --head={name} --pool=mean (or --pool=first)"
    )
  out["classifier_pooling"] = _POOLS[family][head["pool"]]
  if modern:
    out |= {"classifier_bias": True, "classifier_dropout": head["dropout"]}
  return out


def _unscaled(task: FineTuned) -> dict[str, Any]:
  """Returns arrays whose output is the number itself, not its deviations."""
  mean, deviation = task.settings["mean"], task.settings["deviation"]
  last = {n: deviation * p for n, p in task.params.items() if "classes" in n}
  last["classes/bias"] = last["classes/bias"] + mean
  return {**task.params, **last}


_CLASSIFIER = HeadPlace(
  auto="AutoModelForSequenceClassification",
  tag="text-classification",
  weights=tensor_names({"norm": "norm", "dense": "dense", **_CLASSES}),
  config=functools.partial(_classifier_config, "single_label_classification"),
)
# First version of sentence-transformers that has each class.
EMBEDDERS = {"SentenceTransformer": "5", "MultiVectorEncoder": "6"}
HEADS = {  # by `FineTuned.kind` or `FineTuned.export_as`
  "classifier": _CLASSIFIER,
  "multi_label_classifier": dataclasses.replace(
    _CLASSIFIER,
    config=functools.partial(_classifier_config, "multi_label_classification"),
    pipeline=", top_k=None",
  ),
  "regressor": dataclasses.replace(
    _CLASSIFIER,
    config=functools.partial(_classifier_config, "regression"),
    params=_unscaled,
  ),
  "tagger": HeadPlace(
    auto="AutoModelForTokenClassification",
    tag="token-classification",
    weights=tensor_names(_CLASSES),
    config=_label_config,
  ),
  "towers": HeadPlace(
    auto="AutoModel", tag="sentence-similarity", embedder="SentenceTransformer"
  ),
  "token_towers": HeadPlace(
    auto="AutoModel",
    tag="sentence-similarity",
    embedder="MultiVectorEncoder",
    projection="projection/kernel",
  ),
}


def head_place(task: FineTuned) -> HeadPlace:
  """Returns a task's head in transformers; UserError if there is none."""
  kind = task.export_as or task.kind
  if kind not in HEADS:
    raise UserError(
      f"transformers has no head like that of {task.name} ({task.kind}):"
      f" export supports only {', '.join(HEADS)}"
    )
  return HEADS[kind]


def export_classes(
  loaded: Loaded, target: Target, sentences: bool = False
) -> tuple[str, ...]:
  """Returns names of the classes that open an export, the main class first.

  `sentences` says that it has the files of sentence-transformers.
  """
  embedder, autos = "", tuple(target.classes)
  if loaded.task:
    found = head_place(loaded.task)
    embedder, autos = found.embedder, (found.auto,) * bool(found.auto)
  if embedder:
    return embedder, *autos
  return *autos, *("SentenceTransformer",) * sentences


def classifier_options(encoder: str, attention: str) -> dict[str, str]:
  """Returns options of `antlm eval finetune` for an exportable classifier.

  They are `head` and `pool`; empty if there is no such classifier.
  """
  if attention == "causal":
    return {}
  head, pool = {
    "ltg_bert": ("norms", "first"),
    "modernbert": ("last_norm", "mean"),
  }.get(encoder, ("plain", "mean"))
  return {"head": head, "pool": pool}


def embedder_prompts(loaded: Loaded) -> dict[str, str] | None:
  """Returns an embedder's prefixes of texts; None for other models."""
  if not (loaded.task and head_place(loaded.task).embedder):
    return None
  query, document = loaded.task.settings.get("prompts", ("", ""))
  return {"query": query, "document": document}


def head_config(loaded: Loaded, target: Target) -> dict[str, Any]:
  """Returns fields of config.json for a head; UserError if there is none."""
  found = head_place(loaded.task)
  if found.auto not in target.classes:
    causal = loaded.task.attention == "causal"
    hint = ": fine-tune with --attention=bidirectional" if causal else ""
    raise UserError(
      f"{loaded.path} was fine-tuned with {loaded.task.attention} attention,"
      f" and transformers' {target.model_type} has no {found.auto}{hint}"
    )
  about = found.config(loaded, target.model_type)
  return {"architectures": [target.classes[found.auto]], **about}
