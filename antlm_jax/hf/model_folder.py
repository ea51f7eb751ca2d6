"""Finds the transformers model in a folder that another program wrote.

sentence-transformers may keep it in a subfolder, and PEFT saves adapters in
place of whole models.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import gguf, hub
from antlm_jax.hf.config import CONFIG
from antlm_jax.runtime import files
from antlm_jax.training import checkpoint

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Files of sentence-transformers.
_MODULES = "modules.json"
_LIMITS = "sentence_*_config.json"  # also of other models than BERT
_SETTINGS = "config_sentence_transformers.json"
_EMBEDDER = ["Transformer", "mean", "Normalize"]  # modules of our embedders
_ADAPTER = "adapter_config.json"  # of PEFT
PROMPTS = "query", "document"  # names of an embedder's prompts
# Files of tokenizers from which transformers writes tokenizer.json.
_OLDER = "vocab.txt", "vocab.json", "*.model", "*.tiktoken"
_ADAPTED = {  # class that PEFT adapts for a task; others adapt AutoModel
  "CAUSAL_LM": "AutoModelForCausalLM",
  "SEQ_CLS": "AutoModelForSequenceClassification",
  "TOKEN_CLS": "AutoModelForTokenClassification",
}


def is_model_folder(folder: pathlib.Path) -> bool:
  """Whether a folder has a file of transformers, its users or PEFT."""
  return any((folder / name).is_file() for name in (CONFIG, _MODULES, _ADAPTER))


class ModelFolder(NamedTuple):
  """Folder with a whole transformers model and its tokenizer."""

  path: pathlib.Path
  notes: tuple[str, ...] = ()  # on modules that import leaves out
  # Prefixes by name if it is an embedder: the mean over tokens, of length 1.
  prompts: Mapping[str, str] | None = None
  longest: int = 0  # tokens of a text that sentence-transformers reads


def find_model(model: str) -> ModelFolder:
  """Finds a transformers model in a folder, a GGUF file or on the Hub.

  Raises a UserError if the download fails, or if there is no whole model with a
  tokenizer.
  """
  on_hub = checkpoint.is_hub_name(model)
  if gguf.is_gguf(model):
    folder = gguf.unpack(model)
  elif on_hub:
    folder = hub.download_model(model)
  else:
    folder = pathlib.Path(model)
  _check_merged(folder, model)
  modules = _read_modules(folder)
  if on_hub:
    for module in modules:
      if module["path"]:
        hub.download_model(model, module["path"])
  path = folder
  if not (folder / CONFIG).is_file():
    transformers = [m for m in modules if m["type"].endswith(".Transformer")]
    path /= transformers[0]["path"] if transformers else ""
  if not (path / CONFIG).is_file():
    raise UserError(
      f"{path} is not a folder of a transformers model: it has no {CONFIG}"
    )
  if not (path / TOKENIZER).is_file():
    raise UserError(_tokenizer_remedy(path, model if on_hub else ""))
  if not modules:
    return ModelFolder(path)
  notes = [*_module_notes(folder, modules)]
  limits = _limits(path)
  if limits.get("do_lower_case") is True and _reads_case(path):
    notes.append(
      "warning: sentence-transformers writes texts in lower case first, but"
      " antlm does not (do_lower_case)"
    )
  prompts, default = _prompts(folder)
  embeds = [_kind(folder, module) for module in modules] == _EMBEDDER
  notes += _prompt_notes(prompts, default, PROMPTS if embeds else ())
  return ModelFolder(
    path, tuple(notes), prompts if embeds else None, _longest_text(limits)
  )


def _prompt_notes(
  prompts: Mapping[str, str], default: str, kept: Sequence[str]
) -> Iterator[str]:
  """Yields notes on prompts that antlm does not use, or not by itself."""
  if prompts.get(default):
    yield (
      "warning: sentence-transformers begins texts with"
      f" {prompts[default]!r} (default_prompt_name={default}) unless told"
      " another prompt, and antlm does not"
    )
  left_out = [name for name in prompts if name not in kept and prompts[name]]
  if left_out:
    yield (
      f"the prompts {', '.join(left_out)} are left out: antlm keeps"
      f" {' and '.join(PROMPTS)}, and only of a normalized mean"
    )


def _read_modules(folder: pathlib.Path) -> list[Mapping[str, Any]]:
  """Reads the modules of a sentence-transformers model; empty without any.

  Raises a UserError if their list is damaged, or names another folder.
  """
  path = folder / _MODULES
  if not path.is_file():
    return []
  try:
    modules = json.loads(files.read_text(path, "the list of modules"))
  except ValueError as error:
    raise UserError(f"{path}: not JSON: {error}") from error
  if not isinstance(modules, list) or not all(
    isinstance(module, dict)
    and isinstance(module.get("type"), str)
    and isinstance(module.get("path"), str)
    for module in modules
  ):
    raise UserError(f"{path} is not a list of modules with types and paths")
  for module in modules:
    inside = pathlib.PurePath(module["path"])
    if inside.is_absolute() or ".." in inside.parts:
      raise UserError(f"{path} names {str(inside)!r}, not in its folder")
  return modules


def _module_notes(
  folder: pathlib.Path, modules: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
  """Yields notes on modules of sentence-transformers that antlm_jax lacks."""
  for module in modules:
    kind = _kind(folder, module)
    if kind not in _EMBEDDER:
      path = module["path"]
      yield (
        f"warning: sentence-transformers' module {path} ({kind}) is left out:"
        " `antlm embed` averages the tokens"
      )


def _kind(folder: pathlib.Path, module: Mapping[str, Any]) -> str:
  """Returns the class of a module, or the poolings of a pooling."""
  kind = module["type"].rpartition(".")[2]
  if kind != "Pooling":
    return kind
  path = folder / module["path"] / CONFIG
  fields = files.read_json(path, "the pooling's") if path.is_file() else {}
  kind = _pooling(fields).removesuffix("_tokens")
  inside = fields.get("include_prompt", True)
  return kind if inside else f"{kind}, without the prompt's tokens"


def _limits(folder: pathlib.Path) -> dict[str, Any]:
  """Reads how sentence-transformers prepares texts for a transformer."""
  out = {}
  for path in (folder / TOKENIZER_CONFIG, *sorted(folder.glob(_LIMITS))):
    if path.is_file():
      out |= files.read_json(path, "sentence-transformers' settings")
    if path.name == TOKENIZER_CONFIG:
      out.pop("do_lower_case", None)  # tokenizer.json does it
  return out


def _reads_case(folder: pathlib.Path) -> bool:
  """Whether the tokenizer reads upper and lower case differently."""
  tokenizer = Tokenizer.load(folder / TOKENIZER)
  return tokenizer.encode("A").tolist() != tokenizer.encode("a").tolist()


def _longest_text(fields: Mapping[str, Any]) -> int:
  """Returns the most tokens of a text, or 0 if nothing limits them."""
  # Version 6 writes only the tokenizer's limit.
  for name in ("max_seq_length", "model_max_length"):
    if type(length := fields.get(name)) is int and length > 0:
      return length
  return 0


def _prompts(folder: pathlib.Path) -> tuple[Mapping[str, str], str]:
  """Reads the prompts by name, and the name of the default one or ""."""
  path = folder / _SETTINGS
  fields = files.read_json(path, "the embedder's") if path.is_file() else {}
  prompts = fields.get("prompts") or {}
  if not isinstance(prompts, dict) or not all(
    isinstance(text, str) for text in prompts.values()
  ):
    raise UserError(
      f"{path}: prompts={prompts!r:.60} has values that are no text"
    )
  return prompts, str(fields.get("default_prompt_name") or "")


def _pooling(fields: Mapping[str, Any]) -> str:
  """Returns the names of the poolings in a module's config.json."""
  prefix = "pooling_mode_"
  used = [name for name in fields if name.startswith(prefix) and fields[name]]
  modes = fields.get("pooling_mode", [n.removeprefix(prefix) for n in used])
  return ", ".join([modes] if isinstance(modes, str) else map(str, modes))


def _check_merged(folder: pathlib.Path, model: str) -> None:
  """Raises a UserError for an adapter, which transformers would apply."""
  path = folder / _ADAPTER
  if not path.is_file():
    return
  fields = files.read_json(path, "the adapter's")
  base = fields.get("base_model_name_or_path")
  adapted = _ADAPTED.get(str(fields.get("task_type")), "AutoModel")
  mapping = fields.get("auto_mapping")
  if isinstance(mapping, dict):
    adapted = mapping.get("base_model_class", adapted)
  raise UserError(
    f"{model} holds a PEFT adapter of {base}, not a whole model: merge them by"
    f" PeftModel.from_pretrained({adapted}.from_pretrained({base!r}),"
    f" {model!r}).merge_and_unload().save_pretrained('MERGED'), save its"
    " tokenizer there too, and import MERGED"
  )


def _tokenizer_remedy(folder: pathlib.Path, name: str) -> str:
  """Returns the error for a folder without tokenizer.json."""
  local = f"run `hf download {name} --local-dir=FOLDER`, then " if name else ""
  target = "FOLDER" if name else str(folder)
  older_tokenizer = any(next(folder.glob(form), None) for form in _OLDER)
  source = target if older_tokenizer or name else "NAME OF ITS BASE MODEL"
  return (
    f"{name or folder} has no {TOKENIZER}: {local}write it with"
    f" transformers.AutoTokenizer.from_pretrained({source!r})"
    f".save_pretrained({target!r})"
  )
