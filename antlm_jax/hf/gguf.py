"""Opens GGUF files, which llama.cpp and Ollama read, by transformers."""

import atexit
import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterable

from antlm_jax.errors import UserError
from antlm_jax.hf import weights
from antlm_jax.runtime import files, progress

SUFFIX = ".gguf"


def is_gguf(model: str | os.PathLike[str]) -> bool:
  """Whether `model` is the path of a GGUF file."""
  return os.fspath(model).lower().endswith(SUFFIX)


def unpack(model: str | os.PathLike[str]) -> pathlib.Path:
  """Returns a folder of transformers with a GGUF file's model and tokenizer.

  The weights are dequantized to float32. The folder is temporary, and is
  removed when this process ends.

  Raises:
    UserError: There is no such file, transformers cannot read it, or the extra
      `hf` is not installed.
  """
  path = files.absolute_path(model)
  if not path.is_file():
    raise UserError(f"{model}: there is no such file")
  return _unpack(path, path.stat().st_mtime_ns)


@functools.cache
def _unpack(path: pathlib.Path, modified: int) -> pathlib.Path:
  """Unpacks a file, once until it is modified."""
  del modified  # only tells a changed file from the one before it
  try:
    import accelerate  # noqa: F401
    import gguf  # noqa: F401
    import torch
    import transformers
  except ImportError as error:
    raise UserError(
      f"{path.name}: reading GGUF needs {error.name}:"
      " pip install 'antlm_jax[hf]'"
    ) from error
  folder = pathlib.Path(tempfile.mkdtemp(prefix="antlm_gguf_"))
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  # transformers prefers a tokenizer next to the file to the file's own.
  (folder / path.name).symlink_to(path)
  source = {
    "pretrained_model_name_or_path": str(folder),
    "gguf_file": path.name,
  }
  progress.say(f"{path.name}: its weights become float32")
  try:
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
      **source, dtype=torch.float32, output_loading_info=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
  except Exception as error:  # transformers and gguf raise many types
    why = files.failure_reason(error)
    raise UserError(f"transformers cannot read {path}: {why}") from error
  _check_whole(path, model, loading["missing_keys"])
  # transformers saves no model that was quantized.
  model.hf_quantizer = None
  model.config.__dict__.pop("quantization_config", None)
  model.save_pretrained(folder)
  tokenizer.save_pretrained(folder)
  return folder


def _check_whole(path: pathlib.Path, model, missing: Iterable[str]) -> None:
  """Raises a UserError unless transformers has read all of a file's model."""
  import gguf

  file = gguf.GGUFReader(path)
  split = file.fields.get("split.count")
  if split and split.contents() > 1:
    raise UserError(
      f"{path} is one of a model's {split.contents()} files: join them by"
      " `llama-gguf-split --merge`"
    )
  if missing:
    tensors = weights.listed_tensors(sorted(missing))
    raise UserError(f"{path}: weights are missing: {tensors}")
  architecture = file.fields["general.architecture"].contents()
  architectures = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
  names = gguf.get_tensor_name_map(
    architectures[architecture], model.config.num_hidden_layers
  )
  read = {
    names.get_name(name, (".weight", ".bias")) for name in model.state_dict()
  }
  unread = [t.name for t in file.tensors if t.name not in read]
  unread += [
    name
    for name, field in file.fields.items()
    if ".rope.scal" in name and field.contents() != "none"
  ]
  if unread:
    raise UserError(
      f"{path}: transformers does not read {weights.listed_tensors(unread)}"
      " from GGUF: import the folder from which the file was made"
    )
