"""Writes a trained model as a folder that transformers opens."""

import json
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.hf import card, check, heads, hub, tokenizer, weights
from antlm_jax.hf import config as hf_config
from antlm_jax.hf.architecture import EXPORT_RECORD, Architecture, Target
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference import framing
from antlm_jax.inference.model import Loaded
from antlm_jax.runtime import files

_CODE = pathlib.Path(__file__).parent / "remote"
_NO_FACTS = card.CardFacts()
_SBERT = "sentence_transformers.models"


def export_model(
  loaded: Loaded,
  output: str | os.PathLike,
  attentions: Sequence[str] = (),
  dtype: str = "float32",
  shard_bytes: int = 5 * 10**9,
  sentences: bool = False,
  facts: card.CardFacts = _NO_FACTS,
) -> list[pathlib.Path]:
  """Writes a model as a folder, or as a subfolder for each of two attentions.

  Args:
    loaded: The model. A fine-tuned model keeps its head.
    output: Path to the folder, which must not exist.
    attentions: One or two of `ATTENTIONS`; by default those of the training.
    dtype: Dtype of the weights, one of `weights.DTYPES`.
    shard_bytes: Largest size of a weights file, in bytes.
    sentences: Also write a sentence-transformers model that averages the
      tokens. Embedders are always such models.
    facts: Facts for the card that only the user knows.

  Returns:
    Paths to the folders that transformers opens.

  Raises:
    UserError: The output exists, transformers has no such model, or the
      exported tokenizer would read a text unlike ours.
  """
  output = pathlib.Path(output).absolute()
  check_new(output)
  attentions = tuple(attentions) or trained_attentions(loaded)
  if loaded.task and attentions != trained_attentions(loaded):
    raise UserError(
      f"{loaded.path} was fine-tuned with {loaded.task.attention} attention and"
      " exports only as that"
    )
  targets = {a: target_of(loaded, a) for a in attentions}
  results = card.read_results(loaded)
  text_files = {
    attention: _text_files(loaded, attention, target, dtype, sentences)
    | {card.FILE: card.card(loaded, attention, target, results, facts)}
    for attention, target in targets.items()
  }
  for attention in attentions:
    frame = _frame_tokens(loaded, attention, sentences)
    check.same_tokens(loaded, text_files[attention], *frame)
  folder_names = attentions if len(attentions) > 1 else (".",)
  first_target = targets[attentions[0]]
  with files.replacing(output) as aside:
    for name, (attention, target) in zip(
      folder_names, targets.items(), strict=True
    ):
      folder = aside / name
      _write_texts(folder, text_files[attention], target.code)
      if target is not first_target and target.has_weights_of(first_target):
        _link_weights(aside / folder_names[0], folder)
      else:
        tensors = _export_tensors(loaded, target, dtype)
        weights.write_weights(folder, tensors, shard_bytes)
  return [output / name for name in folder_names]


def check_new(output: str | os.PathLike) -> None:
  """Raises a UserError if a path already exists."""
  if os.path.lexists(output):
    raise UserError(f"{output} exists: give another folder, or remove it")


def trained_attentions(loaded: Loaded) -> tuple[str, ...]:
  """Returns the attentions of the training.

  Raises a UserError if it had only attention in blocks.
  """
  if loaded.task:
    return (loaded.task.attention,)
  trained = loaded.config.trained
  # A prefix has bidirectional attention, and the text after it causal.
  causal = ("causal",) * any(o.left_to_right for o in trained)
  bidirectional = any(o.attention == "bidirectional" for o in trained)
  if not causal and not bidirectional:
    raise UserError(
      f"{loaded.path} was trained only with attention in blocks, which"
      " transformers lacks: exported as bidirectional, it reads a text as one"
      " block"
    )
  return causal + ("bidirectional",) * bidirectional


def _architecture(loaded: Loaded) -> Architecture:
  """Returns how transformers has the encoder; UserError if it lacks it."""
  name = loaded.config.model.name
  if name not in ARCHITECTURES:
    raise UserError(
      f"transformers has no model for the encoder {name!r}: its plugin may add"
      " one to ARCHITECTURES of antlm_jax.hf.mapping"
    )
  return ARCHITECTURES[name]


def target_of(loaded: Loaded, attention: str) -> Target:
  """Returns the transformers model for an attention; UserError if none."""
  # Fine-tuned heads read hidden states, so the mask shift does not matter.
  shift = 0 if loaded.task else loaded.mask_shift
  architecture = _architecture(loaded)
  return architecture.target(loaded.model.config, attention, shift)


def _frame_tokens(
  loaded: Loaded, attention: str, sentences: bool
) -> tuple[list[int], list[int]]:
  """Returns the special tokens before and after an exported model's text."""
  before, after = (ids.tolist() for ids in loaded.frame)
  # A causal model continues the text, so no special token may follow it, unless
  # it is to give the text's vector.
  if attention == "causal" and not loaded.task and not sentences:
    after = []
  return before, after


def _text_files(
  loaded: Loaded, attention: str, target: Target, dtype: str, sentences: bool
) -> dict[str, str]:
  """Returns the text files of a folder by path, but for its card."""
  architecture = _architecture(loaded)
  predicts = not loaded.task and not loaded.headless
  if (
    predicts
    and attention == "bidirectional"
    and loaded.tokenizer.mask_id is None
  ):
    raise UserError(
      f"the tokenizer of {loaded.path} has no <mask> token: export with"
      " attention causal"
    )
  before, after = _frame_tokens(loaded, attention, sentences)
  special = tokenizer.special_ids(loaded.tokenizer, before)
  config = hf_config.make_config_json(
    loaded.model, special, architecture, target, dtype
  )
  if target.code:
    config["mask_shift"] = loaded.mask_shift
  if loaded.task:
    config |= heads.head_config(loaded, target)
  elif loaded.headless:
    config["architectures"] = [target.classes["AutoModel"]]
  values = {hf_config.CONFIG: config}
  generates = attention == "causal" and predicts
  padding_side = "left" if generates and not sentences else "right"
  values |= tokenizer.files(
    loaded.tokenizer, before, after, loaded.longest_row, padding_side
  )
  values[EXPORT_RECORD] = _import_metadata(loaded)
  if generates:
    values[hf_config.GENERATION] = hf_config.generation_config(
      special, framing.end_tokens(loaded), framing.never_drawn(loaded)
    )
  prompts = heads.embedder_prompts(loaded)
  if sentences or prompts:
    values |= _sentence_transformers_files(loaded, prompts)
  return {
    path: json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    for path, value in values.items()
  }


def _write_texts(
  folder: pathlib.Path, texts: Mapping[str, str], code: Sequence[str]
) -> None:
  """Writes the text files of a folder, and copies the Python files `code`."""
  folder.mkdir(parents=True, exist_ok=True)
  for name, text in texts.items():
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
  for name in code:
    shutil.copyfile(_CODE / name, folder / name)


def _link_weights(source: pathlib.Path, folder: pathlib.Path) -> None:
  """Gives a folder the files of another folder's weights."""
  for path in source.glob("model*.safetensors*"):
    try:
      os.link(path, folder / path.name)
    except OSError:  # the file system has no hard links
      shutil.copyfile(path, folder / path.name)


def _export_tensors(loaded: Loaded, target: Target, dtype: str) -> dict:
  """Returns a folder's weights, and the head of a fine-tuned model."""
  architecture = _architecture(loaded)
  names = architecture.names(target)
  params = loaded.params
  if loaded.task:
    params, _ = models.divided(params)
  tensors = weights.params_to_tensors(params, names, dtype)
  if loaded.task:
    place = heads.head_place(loaded.task)
    head_names = place.weights | target.head
    head_names = {ours: name for ours, name in head_names.items() if name}
    head_params = place.params(loaded.task)
    tensors |= weights.params_to_tensors(head_params, head_names, dtype)
  config = loaded.model.config
  for name in target.zeros:
    biases = np.zeros((config.layers, config.width), jnp.dtype(dtype))
    tensors |= {name.format(i): bias for i, bias in enumerate(biases)}
  tensors |= {
    copy: tensors[original]
    for copy, original in target.copies.items()
    if original in tensors
  }
  return {n: t for n, t in tensors.items() if n not in architecture.unused}


def _import_metadata(loaded: Loaded) -> dict[str, object]:
  """Returns the metadata that import needs, without the paths of folders."""

  def last_names(settings: dict) -> dict:
    return {
      key: card.without_folders(value)
      if isinstance(value, str) and not value.startswith(hub.PREFIX)
      else value
      for key, value in settings.items()
    }

  metadata = loaded.meta.to_json()
  config = json.loads(metadata["config"], object_hook=last_names)
  metadata["config"] = json.dumps(config, indent=2)
  return metadata | {"step": loaded.step}


def _sentence_transformers_files(
  loaded: Loaded, prompts: Mapping | None
) -> dict[str, object]:
  """Returns the files of sentence-transformers by path.

  A text's vector is the mean of its tokens' states; an embedder's has length 1.
  """
  modules = {
    "Pooling": {
      "word_embedding_dimension": loaded.model.config.width,
      "pooling_mode_cls_token": False,
      "pooling_mode_mean_tokens": True,
      "pooling_mode_max_tokens": False,
      "include_prompt": True,
    }
  }
  modules |= {"Normalize": {}} if prompts else {}
  paths = {f"{i}_{kind}": kind for i, kind in enumerate(modules, 1)}
  listed = {"": "Transformer", **paths}.items()
  return {
    "modules.json": [
      {"idx": i, "name": str(i), "path": path, "type": f"{_SBERT}.{kind}"}
      for i, (path, kind) in enumerate(listed)
    ],
    "sentence_bert_config.json": {
      "max_seq_length": loaded.longest_row,
      "do_lower_case": False,
    },
    "config_sentence_transformers.json": {
      "similarity_fn_name": "cosine",
      "prompts": prompts or {},
    },
    **{f"{path}/config.json": modules[kind] for path, kind in paths.items()},
  }
