"""Writes a trained model as a folder that transformers opens."""

import dataclasses
import json
import os
import pathlib
import shutil
import types
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from antlm_jax import models
from antlm_jax.errors import UserError
from antlm_jax.hf import card, check, heads, tokenizer, weights
from antlm_jax.hf import config as hf_config
from antlm_jax.hf.architecture import EXPORT_RECORD, Target
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference import framing
from antlm_jax.inference.model import FineTuned, Loaded
from antlm_jax.runtime import files
from antlm_jax.training.checkpoint import HUB_PREFIX

_CODE = pathlib.Path(__file__).parent / "remote"
_NO_FACTS: Mapping[str, object] = types.MappingProxyType({})
_SBERT = "sentence_transformers.models"


@dataclasses.dataclass(frozen=True, repr=False)
class Exported:
  """A folder that transformers opens: a path, with its model's attention."""

  path: pathlib.Path
  attention: str  # `causal` or `bidirectional`
  classes: tuple[str, ...]  # names of transformers' classes that open it

  def __fspath__(self) -> str:
    return str(self.path)

  def __truediv__(self, name: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a file in the folder."""
    return self.path / name

  def __str__(self) -> str:
    return str(self.path)  # which transformers opens instead of an os.PathLike

  def __repr__(self) -> str:
    return f"<{self.about}>"

  @property
  def about(self) -> str:
    """A line with the path, the attention and the classes."""
    path = files.shown_path(self.path)
    names = ", ".join(self.classes)
    return f"{path}: {self.attention}, opens with {names}"


def export_model(
  loaded: Loaded,
  output: str | os.PathLike,
  attentions: Sequence[str] = (),
  dtype: str = "float32",
  shard_bytes: int = 5 * 10**9,
  sentences: bool = False,
  facts: Mapping[str, object] = _NO_FACTS,
) -> list[Exported]:
  """Writes a model as a folder, or as a subfolder for each of two attentions.

  Args:
    loaded: The model. A fine-tuned model keeps its head.
    output: Path to the folder, which must not exist.
    attentions: One or two of `ATTENTIONS`; by default those of the training.
    dtype: Dtype of the weights, one of `weights.DTYPES`.
    shard_bytes: Largest size of a weights file, in bytes.
    sentences: Also write a sentence-transformers model that averages the
      tokens. Embedders are always such models.
    facts: Fields of the card's metadata that only the user knows: `license`,
      `language` and `base_model`.

  Returns:
    The folders that transformers opens.

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
  targets = [target_of(loaded, attention) for attention in attentions]
  results = card.read_results(loaded)
  folder_names = attentions if len(attentions) > 1 else (".",)
  exports = []
  folder_texts = []
  for name, attention, target in zip(
    folder_names, attentions, targets, strict=True
  ):
    classes = heads.export_classes(loaded, target, sentences)
    exports.append(Exported(output / name, attention, classes))
    texts = _text_files(loaded, attention, target, dtype, sentences)
    texts[card.FILE] = card.card(
      loaded, attention, target, classes[0], results, facts
    )
    folder_texts.append(texts)
  with files.replacing(output) as aside:
    first = aside / folder_names[0]
    for name, target, texts in zip(
      folder_names, targets, folder_texts, strict=True
    ):
      _write_texts(aside / name, texts, target.code)
      if name != folder_names[0] and target.has_weights_of(targets[0]):
        _link_weights(first, aside / name)
      else:
        tensors = _export_tensors(loaded, target, dtype)
        weights.write_weights(aside / name, tensors, shard_bytes)
  return exports


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


def target_of(loaded: Loaded, attention: str) -> Target:
  """Returns the transformers model for an attention; UserError if none."""
  name = loaded.config.model.name
  if name not in ARCHITECTURES:
    raise UserError(
      f"transformers has no model for the encoder {name!r}: its plugin may add"
      " one to ARCHITECTURES of antlm_jax.hf.mapping"
    )
  # Fine-tuned heads read hidden states, so the mask shift does not matter.
  shift = 0 if loaded.task else loaded.mask_shift
  return ARCHITECTURES[name].target(loaded.model.config, attention, shift)


def _text_files(
  loaded: Loaded, attention: str, target: Target, dtype: str, sentences: bool
) -> dict[str, str]:
  """Returns the contents of a folder's text files by path, except its card.

  Raises a UserError if a masked model's tokenizer has no mask token, or if the
  exported tokenizer would give other tokens than ours.
  """
  is_language_model = not loaded.task and not loaded.headless
  is_generator = attention == "causal" and is_language_model
  is_masked_model = is_language_model and not is_generator
  if is_masked_model and loaded.tokenizer.mask_id is None:
    raise UserError(
      f"the tokenizer of {loaded.path} has no <mask> token: export with"
      " attention causal"
    )
  before, after = (ids.tolist() for ids in loaded.frame)
  # A causal model continues the text, so no special token may follow it, unless
  # it is to give the text's vector.
  if attention == "causal" and not loaded.task and not sentences:
    after = []
  special_ids = tokenizer.special_ids(loaded.tokenizer, before)
  config = hf_config.make_config_json(loaded.model, special_ids, target, dtype)
  if target.code:
    config["mask_shift"] = loaded.mask_shift
  if loaded.task:
    config |= heads.head_config(loaded, target)
  elif loaded.headless:
    config["architectures"] = [target.classes["AutoModel"]]
  # Generation continues the end of a row, so its padding is on the left.
  padding_side = "left" if is_generator and not sentences else "right"
  tokenizer_files = tokenizer.files(
    loaded.tokenizer, before, after, loaded.longest_row, padding_side
  )
  check.same_tokens(loaded, tokenizer_files, before, after)
  json_values = {hf_config.CONFIG: config, **tokenizer_files}
  json_values[EXPORT_RECORD] = _import_metadata(loaded)
  if is_generator:
    json_values[hf_config.GENERATION] = hf_config.generation_config(
      special_ids, framing.end_tokens(loaded), framing.never_drawn(loaded)
    )
  prompts = heads.embedder_prompts(loaded)
  if sentences or prompts:
    json_values |= _sentence_transformers_files(loaded, prompts)
  return {
    path: json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    for path, value in json_values.items()
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


def _export_tensors(
  loaded: Loaded, target: Target, dtype: str
) -> dict[str, np.ndarray]:
  """Returns all tensors of a folder by name.

  A fine-tuned model has those of its head in place of the output layer's.
  """
  architecture = ARCHITECTURES[loaded.config.model.name]
  params = loaded.params
  head_tensors = {}
  if loaded.task:
    params, _ = models.divided(params)
    head_tensors = _head_tensors(loaded.task, target, dtype)
  tensors = weights.params_to_tensors(params, architecture.names(target), dtype)
  tensors |= head_tensors
  config = loaded.model.config
  for name in target.zeros:  # biases that transformers has, and we have not
    biases = np.zeros((config.layers, config.width), jnp.dtype(dtype))
    tensors |= {name.format(i): bias for i, bias in enumerate(biases)}
  for copy, original in target.copies.items():
    if original in tensors:  # a model without an output layer lacks both
      tensors[copy] = tensors[original]
  return {n: t for n, t in tensors.items() if n not in architecture.unused}


def _head_tensors(
  task: FineTuned, target: Target, dtype: str
) -> dict[str, np.ndarray]:
  """Returns the tensors of a fine-tuned model's head by name."""
  place = heads.head_place(task)
  names = place.weights | target.head
  names = {ours: name for ours, name in names.items() if name}
  return weights.params_to_tensors(place.params(task), names, dtype)


def _import_metadata(loaded: Loaded) -> dict[str, object]:
  """Returns the metadata that import needs, without the paths of folders."""

  def last_names(settings: dict) -> dict:
    return {
      key: card.without_folders(value)
      if isinstance(value, str) and not value.startswith(HUB_PREFIX)
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
