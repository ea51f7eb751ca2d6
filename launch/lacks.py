"""Prints the packages that a study needs and this Python lacks."""

from importlib import util

NEEDED = (
  "jax flax optax orbax grain array_record ml_collections tensorflow_datasets"
  " huggingface_hub matplotlib packaging pyarrow safetensors tokenizers tqdm"
  " google.protobuf jinja2 pandas"
)


def has(name: str) -> bool:
  """Returns whether a package can be imported."""
  try:
    return util.find_spec(name) is not None
  except ModuleNotFoundError:  # the package around it is missing
    return False


if __name__ == "__main__":
  print(*(name for name in NEEDED.split() if not has(name)), sep=", ")
