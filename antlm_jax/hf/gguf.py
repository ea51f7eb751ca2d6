"""Opens GGUF files, which llama.cpp and Ollama read, by transformers."""

import atexit
import functools
import os
import pathlib
import shutil
import tempfile

from antlm_jax.errors import UserError
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
  source = {
    "pretrained_model_name_or_path": str(path.parent),
    "gguf_file": path.name,
  }
  folder = pathlib.Path(tempfile.mkdtemp(prefix="antlm_gguf_"))
  atexit.register(shutil.rmtree, folder, ignore_errors=True)
  progress.say(f"{path.name}: its weights become float32")
  try:
    auto = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(**source, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
  except Exception as error:  # transformers and gguf raise many types
    why = files.failure_reason(error)
    raise UserError(f"transformers cannot read {path}: {why}") from error
  # transformers saves no model that was quantized.
  model.hf_quantizer = None
  model.config.__dict__.pop("quantization_config", None)
  model.save_pretrained(folder)
  tokenizer.save_pretrained(folder)
  return folder
