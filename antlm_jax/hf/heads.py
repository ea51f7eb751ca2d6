"""Fine-tuned heads in transformers, by kind of head.

You can export only these kinds, and heads whose `export_as` names one of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from antlm_jax.errors import UserError
from antlm_jax.hf import tokenizer
from antlm_jax.hf.architecture import Target, tensor_names
from antlm_jax.inference.model import FineTuned, Loaded

_CLASSES = {"classes": "classifier"}
# Name, --head and poolings of each family with such a head, by model_type. The
# poolings are ours to those of transformers.
_CLASSIFIERS = {
  "ltg_bert": ("LTG-BERT", "norms", {}),
  "modernbert": ("ModernBERT", "last_norm", {"first": "cls", "mean": "mean"}),
  "ultrabert": ("UltraBERT", "linear", {"first": "cls", "mean": "mean"}),
}
# Causal families: a layer without a bias on the last token before padding.
_DECODERS = {
  model_type: (family, "linear", {"last": "last"})
  for model_type, family in (
    ("llama", "Llama"),
    ("mistral", "Mistral"),
    ("qwen3", "Qwen3"),
  )
}
_EUROBERT = "EuroBERT", "plain", {"first": "bos", "mean": "mean"}


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
  embedder: bool = False  # whether `EMBEDDER` opens it, with unit vectors


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
  head_option = _head_option(head)
  out = {"problem_type": problem_type, **_label_config(loaded, model_type)}
  families = _CLASSIFIERS | _DECODERS
  name, option, pools = families.get(model_type, _EUROBERT)
  # For LTG-BERT, the folder has our own code.
  if model_type == "ltg_bert" and head_option in ("norms", "plain"):
    return out | {
      "classifier_pooling": head["pool"],
      "classifier_norms": head["norms"],
      "classifier_dropout": head["dropout"],
    }
  if head_option != option or head["pool"] not in pools:
    raise UserError(
      f"{name} has no head like that of {loaded.path}: fine-tune with"
      f" head={option} and pool={' or '.join(reversed(pools))}"
    )
  if model_type in _DECODERS:
    _check_decoder(loaded, problem_type)
  out["classifier_pooling"] = pools[head["pool"]]
  if option == "last_norm":
    out |= {"classifier_bias": True, "classifier_dropout": head["dropout"]}
  return out


def _check_decoder(loaded: Loaded, problem_type: str) -> None:
  """Raises a UserError if a causal family computes something else."""
  if problem_type == "regression":
    raise UserError(
      f"transformers' causal models have no bias, which the numbers of"
      f" {loaded.path} need: fine-tune with --attention=bidirectional"
    )
  before, after = (ids.tolist() for ids in loaded.frame)
  if tokenizer.special_ids(loaded.tokenizer, before)["pad"] in after[-1:]:
    raise UserError(
      f"the tokenizer of {loaded.path} pads with the token that ends a text,"
      " but transformers' causal models classify the last token before padding"
    )


def _head_option(head: Mapping[str, Any]) -> str:
  """Returns the --head of a classifier's settings."""
  if "norms" not in head:
    return "linear"
  last_norm = head.get("last_norm", False)  # older checkpoints lack it
  return "norms" if head["norms"] else "last_norm" if last_norm else "plain"


def _with_bias(task: FineTuned) -> dict[str, Any]:
  """Returns the arrays; a linear head has no bias, but transformers' has."""
  bias = np.zeros(task.params["classes/kernel"].shape[-1], np.float32)
  return {"classes/bias": bias, **task.params}


def _unscaled(task: FineTuned) -> dict[str, Any]:
  """Returns arrays whose output is the number itself, not its deviations."""
  mean = task.settings["mean"]
  deviation = task.settings["deviation"]
  params = _with_bias(task)
  last = {n: deviation * p for n, p in params.items() if "classes" in n}
  last["classes/bias"] = last["classes/bias"] + mean
  return {**params, **last}


_CLASSIFIER = HeadPlace(
  auto="AutoModelForSequenceClassification",
  tag="text-classification",
  weights=tensor_names({"norm": "norm", "dense": "dense", **_CLASSES}),
  config=functools.partial(_classifier_config, "single_label_classification"),
  params=_with_bias,
)
_MULTI_LABEL = dataclasses.replace(
  _CLASSIFIER,
  config=functools.partial(_classifier_config, "multi_label_classification"),
  pipeline=", top_k=None",
)
_REGRESSOR = dataclasses.replace(
  _CLASSIFIER,
  config=functools.partial(_classifier_config, "regression"),
  params=_unscaled,
)
EMBEDDER = "SentenceTransformer"  # class of sentence-transformers
HEADS = {  # by `FineTuned.kind` or `FineTuned.export_as`
  "classifier": _CLASSIFIER,
  "linear": _CLASSIFIER,
  "multi_label_classifier": _MULTI_LABEL,
  "multi_label_linear": _MULTI_LABEL,
  "regressor": _REGRESSOR,
  "linear_regressor": _REGRESSOR,
  "tagger": HeadPlace(
    auto="AutoModelForTokenClassification",
    tag="token-classification",
    weights=tensor_names(_CLASSES),
    config=_label_config,
  ),
  "towers": HeadPlace(
    auto="AutoModel", tag="sentence-similarity", embedder=True
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
  embedder = False
  autos = tuple(target.classes)
  if loaded.task:
    place = head_place(loaded.task)
    embedder = place.embedder
    autos = (place.auto,) * bool(place.auto)
  elif loaded.headless:
    autos = ("AutoModel",)
  if embedder:
    return EMBEDDER, *autos
  return *autos, *(EMBEDDER,) * sentences


def classifier_options(encoder: str, attention: str) -> dict[str, str]:
  """Returns options of `antlm eval finetune` for an exportable classifier.

  They are `head` and `pool`; empty if there is no such classifier.
  """
  if attention == "causal":
    return {}
  if encoder == "ltg_bert":
    return {"head": "norms", "pool": "first"}
  _, head, _ = _CLASSIFIERS.get(encoder, _EUROBERT)
  return {"head": head, "pool": "mean"}


def embedder_prompts(loaded: Loaded) -> dict[str, str] | None:
  """Returns an embedder's prefixes of texts; None for other models."""
  if not (loaded.task and head_place(loaded.task).embedder):
    return None
  query, document = loaded.task.settings.get("prompts", ("", ""))
  return {"query": query, "document": document}


def head_config(loaded: Loaded, target: Target) -> dict[str, Any]:
  """Returns fields of config.json for a head; UserError if there is none."""
  place = head_place(loaded.task)
  if place.auto not in target.classes:
    causal = loaded.task.attention == "causal"
    hint = ": fine-tune with --attention=bidirectional" if causal else ""
    raise UserError(
      f"{loaded.path} was fine-tuned with {loaded.task.attention} attention,"
      f" and antlm exports no {place.auto} of a {target.model_type}{hint}"
    )
  fields = place.config(loaded, target.model_type)
  return {"architectures": [target.classes[place.auto]], **fields}
