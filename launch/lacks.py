"""Prints the packages that a study needs and this Python lacks."""

import importlib

NEEDED = (
  "jax flax optax orbax.checkpoint grain array_record ml_collections"
  " tensorflow_datasets huggingface_hub matplotlib packaging pyarrow"
  " safetensors tokenizers tqdm google.protobuf jinja2 pandas promise"
)


def lacking(name: str) -> str | None:
  """Returns what an import of `name` lacks: it, or a package that it needs."""
  try:
    importlib.import_module(name)
  except ModuleNotFoundError as error:
    return name if name.startswith(error.name) else error.name


if __name__ == "__main__":
  found = map(lacking, NEEDED.split())
  print(*dict.fromkeys(name for name in found if name), sep=", ")
