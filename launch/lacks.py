"""Prints the packages that a study needs and this Python lacks."""

import importlib
import logging

NEEDED = (
  "jax flax optax orbax.checkpoint grain array_record ml_collections"
  " tensorflow_datasets.core.dataset_info huggingface_hub matplotlib packaging"
  " pyarrow safetensors tokenizers tqdm jinja2 pandas"
)


def lacking(name: str) -> str | None:
  """Returns the missing package that makes an import fail, or None."""
  try:
    importlib.import_module(name)
  except ModuleNotFoundError as error:
    return error.name


if __name__ == "__main__":
  logging.disable()  # tensorflow_datasets logs a failed import
  found = map(lacking, NEEDED.split())
  print(*dict.fromkeys(name for name in found if name), sep=", ")
