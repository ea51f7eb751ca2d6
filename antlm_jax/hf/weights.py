"""Weights of a model folder, in safetensors files or PyTorch pickles."""

import argparse
import collections
import dataclasses
import functools
import operator
import pathlib
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from antlm_jax.errors import UserError
from antlm_jax.hf.architecture import Architecture
from antlm_jax.models import Params
from antlm_jax.runtime import files

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = ".bin"
DTYPES = ("float32", "bfloat16", "float16")
_FLOATS = ("F64", "F32", "F16", "BF16")
# Errors that PyTorch raises for a damaged or unsafe pickle.
_DAMAGED = (
  OSError,
  RuntimeError,
  ValueError,
  EOFError,
  LookupError,
  pickle.UnpicklingError,
)
# Buffers in old Llama, LTG-BERT and BERT files, which the config determines.
_FOLLOW = (
  "rotary_emb.inv_freq",
  ".position_indices",
  "embeddings.position_ids",
  "embeddings.token_type_ids",
)

# Last layers of fine-tuned models in transformers.
_TASK_HEAD = re.compile(r"(classifier|score|qa_outputs)\.")


def params_to_tensors(
  params: Params, names: Mapping[str, str], dtype: str
) -> dict[str, np.ndarray]:
  """Returns parameters as tensors of transformers, rounded to a dtype."""
  parts = collections.defaultdict(list)
  for path, name in names.items():
    if path not in params:
      continue
    value = np.asarray(params[path]).astype(jnp.dtype(dtype), copy=False)
    if path.endswith("/kernel"):
      value = value.swapaxes(-1, -2)
    for i, layer in enumerate(value if "{}" in name else [value]):
      parts[name.format(i)].append(layer)
  # Transposed arrays are in column order, but files need row order.
  return {n: np.ascontiguousarray(np.concatenate(p)) for n, p in parts.items()}


def write_weights(
  folder: pathlib.Path, tensors: Mapping, shard_bytes: int
) -> None:
  """Writes one file, or an index and files of at most `shard_bytes`."""
  import huggingface_hub  # slow to import

  split = huggingface_hub.split_state_dict_into_shards_factory(
    dict(tensors),
    get_storage_size=operator.attrgetter("nbytes"),
    filename_pattern="model{suffix}.safetensors",
    max_shard_size=shard_bytes,
  )
  for file, names in split.filename_to_tensors.items():
    path = folder / file
    path.touch()
    mode = path.stat().st_mode  # safetensors would leave 0600
    shard = {name: tensors[name] for name in names}
    safetensors.numpy.save_file(shard, path, {"format": "pt"})
    path.chmod(mode)
  if split.is_sharded:
    file_names = {name: split.tensor_to_filename[name] for name in tensors}
    index = {"metadata": split.metadata, "weight_map": file_names}
    files.write_json(folder / INDEX, index)


class StoredTensor(NamedTuple):
  """A tensor in a file."""

  shape: tuple[int, ...]
  dtype: str  # name in safetensors, such as BF16
  read: Callable[[], np.ndarray]  # loads the tensor


@dataclasses.dataclass(frozen=True)
class Weights:
  """Tensors of a folder by name, loaded one at a time."""

  folder: pathlib.Path
  tensors: Mapping[str, StoredTensor]

  def __iter__(self) -> Iterator[str]:
    return iter(self.tensors)

  def __getitem__(self, name: str) -> np.ndarray:
    """Reads a tensor as float32; UserError if a value is not finite."""
    with np.errstate(over="ignore"):
      value = self.tensors[name].read().astype(np.float32)
    if not np.isfinite(value).all():
      raise UserError(
        f"the weights in {self.folder} are damaged: {name} has NaN, infinity or"
        " numbers too large for float32"
      )
    return value


def read_weights(folder: pathlib.Path) -> Weights:
  """Opens a folder's weights, safetensors in preference to a pickle.

  Raises a UserError if the folder has no weights, or they cannot be read.
  """
  tensors = {}
  for path in _weight_files(folder):
    tensors |= _pickled(path) if path.suffix == PICKLE else _open_tensors(path)
  return Weights(
    folder, {n: t for n, t in tensors.items() if not n.endswith(_FOLLOW)}
  )


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files with a folder's weights."""
  for single in (SINGLE, "pytorch_model.bin"):
    index = folder / f"{single}.index.json"
    if (folder / single).is_file():
      return [folder / single]
    if index.is_file():
      return _index_files(index)
  pickles = sorted(folder.glob(f"*{PICKLE}"))  # training code names it
  if len(pickles) == 1:
    return pickles
  several = ", ".join(path.name for path in pickles)
  remedy = f", but several pickles ({several}): leave one" if pickles else ""
  raise UserError(f"{folder} holds no {SINGLE}{remedy}")


def _index_files(index: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files that an index names."""
  names = files.read_json(index, "the weights' index").get("weight_map")
  names = names.values() if isinstance(names, dict) else [None]
  if not all(isinstance(name, str) for name in names):
    raise UserError(f"{index} has no weight_map of names to files")
  for name in names:
    if pathlib.PurePath(name).name != name:  # such as ../../other
      raise UserError(f"{index} names {name!r}, which is not in its folder")
  return [index.parent / name for name in sorted(set(names))]


def _open_tensors(path: pathlib.Path) -> dict[str, StoredTensor]:
  out = {}
  try:
    file = safetensors.safe_open(path, framework="np")
    for name in file.keys():  # noqa: SIM118
      view = file.get_slice(name)
      read = functools.partial(file.get_tensor, name)
      out[name] = StoredTensor(tuple(view.get_shape()), view.get_dtype(), read)
    return out
  except OSError as error:
    reason = str(error).splitlines()[0]
    raise UserError(f"cannot read {path}: {reason}") from error
  except safetensors.SafetensorError as error:
    raise UserError(f"{path} is incomplete: {error}") from error


def _pickled(path: pathlib.Path) -> dict[str, StoredTensor]:
  """Opens a pickle of tensors, or of a training state with `model`."""
  try:
    import torch
  except ImportError as error:
    raise UserError(
      f"{path} is a pickle: install torch to read it, or convert it to"
      " safetensors on a machine with torch"
    ) from error
  if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    raise UserError(
      f"{path} is a pickle, which may run code in torch {torch.__version__}"
      " (CVE-2026-24747): install torch 2.10 or later"
    )
  try:
    # LTG-BERT's training code also saves its command's arguments.
    with torch.serialization.safe_globals([argparse.Namespace]):
      # With weights_only, no code of the file can run.
      stored = torch.load(path, map_location="cpu", weights_only=True)
  except _DAMAGED as error:
    said = str(error).split("WeightsUnpickler error:")[-1].strip()
    why = said.splitlines()[0].split(". ")[0] if said else repr(error)
    raise UserError(f"cannot read {path} as weights only: {why}") from error
  state = stored if isinstance(stored, dict) else {}
  if isinstance(state.get("model"), dict):
    state = state["model"]
  tensors = {
    str(name): value
    for name, value in state.items()
    if isinstance(value, torch.Tensor)
  }
  unusual = [
    name
    for name, tensor in tensors.items()
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided
  ]
  if unusual:
    raise UserError(
      f"{path} has tensors that are sparse, nested or without values (on the"
      f" device 'meta'): {listed_tensors(unusual)}; load the model in PyTorch"
      " and save ordinary tensors"
    )
  return {
    name: StoredTensor(
      tuple(value.shape),
      "F32" if value.is_floating_point() else str(value.dtype),
      lambda value=value: value.detach().float().numpy(),
    )
    for name, value in tensors.items()
  }


def with_export_names(
  weights: Weights, embedding: str, architecture: Architecture
) -> tuple[Weights, list[str]]:
  """Names tensors as export does, and leaves out those that we lack.

  Args:
    weights: Tensors of the folder.
    embedding: Name of the embeddings in exports.
    architecture: Its `older` and `dropped` list the changes.

  Returns:
    The tensors, and notes on those that are left out.
  """
  renamed = {}
  tensors = {}
  for name, tensor in _with_prefix(weights.tensors, embedding).items():
    new_name = name
    for pattern, replacement in architecture.older:
      new_name = re.sub(pattern, replacement, new_name)
    (tensors if new_name == name else renamed)[new_name] = tensor
  tensors |= renamed
  notes = []
  for pattern, description in architecture.dropped.items():
    if names := [name for name in tensors if re.match(pattern, name)]:
      notes.append(f"left out: {description} ({listed_tensors(names)})")
    tensors = {name: t for name, t in tensors.items() if name not in names}
  if any(map(_TASK_HEAD.match, tensors)):
    # All but the encoder is its own, also under names of an output layer.
    prefix = embedding.partition(".")[0] + "."
    head = [name for name in tensors if not name.startswith(prefix)]
    notes.append(f"left out: a fine-tuned head ({listed_tensors(head)})")
    tensors = {name: t for name, t in tensors.items() if name not in head}
  return dataclasses.replace(weights, tensors=tensors), notes


def _with_prefix(
  tensors: Mapping[str, StoredTensor], embedding: str
) -> Mapping[str, StoredTensor]:
  """Adds the first part of names, which AutoModel leaves out."""
  prefix, _, bare = embedding.partition(".")
  if embedding in tensors or bare not in tensors:
    return tensors
  return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def reader(
  weights: Weights,
  names: Mapping[str, str],
  shapes: Mapping,
  unused: Sequence[str] = (),
) -> Callable[[], Params]:
  """Checks a folder's weights and returns a function that reads parameters.

  The check reads names, shapes and dtypes. It reads values only of tensors that
  the encoder lacks.

  Args:
    weights: Tensors of the folder.
    names: Name of each parameter's tensor, as in `Architecture.weights`.
    shapes: Shapes of the parameters, by path.
    unused: Tensors that the folder lacks; their values are 1.

  Raises:
    UserError: Tensors are missing, unknown, quantized or of another shape.
  """
  parts, expected = _parts(names, shapes)
  ones = {
    n: StoredTensor(expected[n], "F32", functools.partial(np.ones, expected[n]))
    for n in unused
  }
  weights = dataclasses.replace(weights, tensors={**ones, **weights.tensors})
  if problems := list(_problems(weights, names, expected)):
    raise UserError(f"{weights.folder}: {'; '.join(problems)}")

  def params() -> Params:
    return {
      path: _read(weights, names[path], path, tensor_parts)
      for path, tensor_parts in parts.items()
    }

  return params


# A tensor, and the rows of it that are a parameter of one layer.
_TensorPart = tuple[str, slice]


def _parts(
  names: Mapping[str, str], shapes: Mapping
) -> tuple[dict[str, list[_TensorPart]], dict[str, tuple[int, ...]]]:
  """Finds the parts of tensors that hold the parameters.

  Parameters with one tensor's name are its rows, in the order of `names`.

  Returns:
    The parts of each parameter, one for each layer if layers are stacked, by
    path, and the shape of each tensor, by name.
  """
  parts: dict[str, list[_TensorPart]] = {}
  expected: dict[str, tuple[int, ...]] = {}
  for path, name in names.items():
    if path not in shapes:
      continue
    layers = 1
    shape = shapes[path].shape
    if _is_stacked(name):
      layers, *shape = shape
    if _is_transposed(path):
      shape = shape[::-1]
    rows, *columns = shape
    parts[path] = []
    for tensor in map(name.format, range(layers)):
      start = expected[tensor][0] if tensor in expected else 0
      expected[tensor] = (start + rows, *columns)
      parts[path].append((tensor, slice(start, start + rows)))
  return parts, expected


def _read(
  weights: Weights, name: str, path: str, parts: Sequence[_TensorPart]
) -> np.ndarray:
  """Reads a parameter from its parts of tensors."""
  layers = [weights[tensor][rows] for tensor, rows in parts]
  if _is_transposed(path):
    layers = [layer.T for layer in layers]
  return np.stack(layers) if _is_stacked(name) else layers[0]


def _is_stacked(name: str) -> bool:
  """Whether each layer has a tensor, with its number in the name."""
  return "{}" in name


def _is_transposed(path: str) -> bool:
  """Whether tensors hold a parameter's transpose, as PyTorch's Linear does."""
  return path.endswith("/kernel")


def _problems(weights: Weights, names: Mapping, expected) -> Iterator[str]:
  """Yields a description of each kind of mismatch."""
  names_in_files = set(weights)
  if missing := sorted(expected.keys() - names_in_files):
    yield f"weights are missing: {listed_tensors(missing)}"
  extra = names_in_files - expected.keys()
  biases = {n for n in extra if n.endswith("proj.bias")}
  extra -= {n for n in biases if not weights[n].any()}  # zeros have no effect
  tied = names.get("head/kernel")
  embedding = names["embedding"]
  # Some files have both.
  if tied in extra and embedding in names_in_files:
    extra.discard(tied)
    if not np.array_equal(weights[tied], weights[embedding]):
      yield (
        f"{tied} differs from {embedding}, although tie_word_embeddings is true"
      )
  if extra:
    yield (
      f"the encoder has no place for {listed_tensors(sorted(extra))} (import"
      " does not read task heads)"
    )
  tensors = {
    name: weights.tensors[name]
    for name in sorted(expected.keys() & names_in_files)
  }
  if other := [
    f"{n} {list(tensor.shape)}, not {list(expected[n])}"
    for n, tensor in tensors.items()
    if tensor.shape != expected[n]
  ]:
    yield f"tensor shapes do not match config.json: {listed_tensors(other)}"
  if other := [n for n, t in tensors.items() if t.dtype not in _FLOATS]:
    yield f"quantized weights cannot be read: {listed_tensors(other)}"


def listed_tensors(names: list[str]) -> str:
  """Returns the first names, and the number of the others."""
  remainder = f" and {len(names) - 8} more" if len(names) > 8 else ""
  return ", ".join(names[:8]) + remainder
