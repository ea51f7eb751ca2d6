"""Checkpoints: plain `{path: array}` trees, with all that reading them needs.

Orbax writes a step aside and renames it, so a step that has its name was whole
once (in a bucket, one that has a commit file); sums of its arrays' bits, saved
with it, tell whether it still is.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from ml_collections import ConfigDict

from antlm_jax import config as config_lib
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.runtime import files
from antlm_jax.training.step import TrainState

FOLDER = "checkpoints"
_COMMITTED = "commit_success.txt"  # what orbax writes last, in a bucket
_SPARE = 1 << 20  # bytes for what orbax writes beside the arrays
# Of errors that orbax and tensorstore raise for files that are not as written;
# most go on for hundreds of lines.
_DAMAGED = ("TensorStore", "DATA_LOSS", "does not exist", "not found")


class Unreadable(UserError):
  """A checkpoint is there, but cannot be read, or is not what was saved."""


@dataclasses.dataclass(frozen=True)
class Meta:
  """What a checkpoint says beside its arrays."""

  config: ConfigDict  # the run's, resolved
  tokenizer: Tokenizer
  boundary: str  # special tokens around documents: `antlm_jax.data.packing`
  data: str  # hash of the rows that it was trained on
  _: dataclasses.KW_ONLY
  row_tokens: int = 0  # in the longest of them; 0 in checkpoints of old
  # What ends a generated text; the tokenizer's end of text if empty.
  ends: tuple[int, ...] = ()
  # The run's steps by words of text seen, as `Run.milestones`.
  milestones: Mapping[str, int] = dataclasses.field(default_factory=dict)
  merged: str = ""  # what it was merged of, if it was

  def to_json(self) -> dict[str, Any]:
    """Returns plain JSON, for orbax to write."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(Meta)}
    return fields | {
      "config": config_lib.to_json(self.config),
      "tokenizer": self.tokenizer.to_json(),
      "milestones": dict(self.milestones),
      "ends": list(self.ends),
    }

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Meta":
    """Reads what `to_json` returns."""
    return cls(
      config_lib.from_json(fields["config"]),
      Tokenizer.from_json(fields["tokenizer"]),
      fields["boundary"],
      fields["data"],
      milestones=fields.get("milestones", {}),
      row_tokens=fields.get("row_tokens", 0),
      ends=tuple(fields.get("ends", ())),
      merged=fields.get("merged", ""),
    )


def to_items(state: TrainState) -> dict[str, dict[str, Any]]:
  """Returns a state as named groups of `{path: array}`."""
  items = {
    "params": state.params,
    "optimizer": _flatten(state.opt_state),
    "counters": {"step": state.step},
  }
  return items if state.ema is None else items | {"ema": state.ema}


@jax.jit
def _sums_of_bits(items):
  def total(x):
    # Bits, since sums of floats depend on the order, and a NaN has no equal.
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, kind)
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)

  return jax.tree.map(total, items)


def _sums(items) -> dict[str, dict[str, int]]:
  """Sums the bits of each array modulo 2^32: the same for every sharding."""
  return jax.tree.map(int, jax.device_get(_sums_of_bits(items)))


def _crc32(fields: Mapping[str, Any]) -> int:
  return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _flatten(tree) -> dict[str, Any]:
  """Names each leaf by its path, such as `1/mu/blocks/mlp/up/kernel`."""
  # Paths, not positions: optax may reorder a state without our notice.
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


def check_space(folder: pathlib.Path, arrays) -> None:
  """Fails before anything is written rather than in the middle.

  Raises:
    OSError: if the folder cannot be written, or the arrays do not fit.
  """
  if files.is_remote(folder):
    return
  needed = sum(array.nbytes for array in jax.tree.leaves(arrays)) + _SPARE
  # A process that failed later would be waited for by the others, for long.
  if not os.access(folder, os.W_OK):
    raise OSError("it cannot be written")
  free = shutil.disk_usage(folder).free
  if free < needed:
    raise OSError(
      f"{files.FULL} ({needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free)"
    )


def save_args(items, fields: Mapping[str, Any]) -> ocp.args.Composite:
  """Returns what orbax is to write: `to_items`' arrays, and `fields` as JSON.

  Sums of both, which tell whether they are still what was saved, are added.
  """
  # The arrays' sums are among what the CRC is of, so it covers everything.
  fields = {**fields, "sums": _sums(items)}
  fields["crc32"] = _crc32(fields)
  saves = {name: ocp.args.StandardSave(item) for name, item in items.items()}
  return ocp.args.Composite(**saves, meta=ocp.args.JsonSave(fields))


def find(path, step: int | None = None) -> pathlib.Path:
  """Returns the step folder, by default the newest, that `path` is or holds.

  Raises:
    UserError: if there is no such checkpoint.
  """
  path = files.path(path)
  if (path / "meta").is_dir() and (path / "params").is_dir():
    if step is not None and path.name != str(step):
      raise UserError(f"{path} is not step {step}: name the run's folder")
    return path
  there = steps(path)
  if not there:
    raise UserError(
      f"{path} holds no checkpoint: give a run's workdir or one of its"
      f" {FOLDER}/STEP folders"
    )
  if step is not None and step not in there:
    steps_there = ", ".join(map(str, sorted(there)))
    raise UserError(f"{path} has no step {step}, but steps {steps_there}")
  return there[max(there) if step is None else step]


def steps(path) -> dict[int, pathlib.Path]:
  """Finds the whole checkpoints of a workdir, or of a folder of steps."""
  path = files.path(path)
  folder = path / FOLDER if (path / FOLDER).is_dir() else path
  # On a disk, orbax renames a step when it is whole; an object store cannot
  # rename a folder, so there a file says it.
  mark = _COMMITTED if files.is_remote(path) else "meta"
  whole = sorted(entry.parent for entry in folder.glob(f"*/{mark}"))
  return {int(step.name): step for step in whole if step.name.isdigit()}


@contextlib.contextmanager
def readable(part: pathlib.Path):
  """Makes an error in its block one that names a checkpoint's part."""
  _hush()
  try:
    yield
  except (UserError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:  # orbax raises it bare for a cut file
    # A checkpoint that is out of reach now must not be passed over.
    away, why = files.out_of_reach(error), files.reason(error)
    if not away and any(word in str(error) for word in _DAMAGED):
      why = "its files are damaged, or not all there"
    raise (UserError if away else Unreadable)(
      f"cannot read the checkpoint {part.parent}: {part.name}: {why}"
    ) from error


@functools.cache
def _hush() -> None:
  """Leaves out what Python would print beside the error of a failed read."""
  # Where one array cannot be read, orbax gives up on the others in the middle:
  # their coroutines are dropped, and tensorstore's threads, which come to their
  # end later, find the event loop closed.
  before = sys.unraisablehook

  def hook(found) -> None:
    name = getattr(found.object, "__qualname__", "")
    closed = str(found.exc_value) == "Event loop is closed"
    if not closed and "_read_array_index" not in name:
      before(found)

  sys.unraisablehook = hook


def read_meta(path: pathlib.Path) -> Meta:
  """Reads what a checkpoint says of itself."""
  with readable(path / "meta"):
    return Meta.from_json(read_fields(path))


# With the handlers alone, without a Checkpointer: it would have the processes
# wait for one that could not read its part.
def read_fields(path: pathlib.Path) -> dict[str, Any]:
  fields = ocp.JsonCheckpointHandler().restore(
    epath.Path(path / "meta"), ocp.args.JsonRestore()
  )
  if fields.pop("crc32", None) != _crc32(fields):
    raise ValueError("it is not what was saved")
  return fields


def restore(
  path: pathlib.Path, like: TrainState, with_optimizer: bool = True
) -> TrainState:
  """Reads a checkpoint's state into the structure and shardings of `like`.

  What the checkpoint does not hold stays as it is in `like`; so does the
  optimizer's state, if it is not asked for.

  Raises:
    Unreadable: if it does not hold that structure, or not what was saved.
    UserError: if it has no optimizer's state.
  """
  wanted = to_items(like)
  if not with_optimizer:
    del wanted["optimizer"]
  found, fields = read(path, wanted)
  check_sums(path, found, fields)
  return complete(like, found)


class Start:
  """The checkpoint that a run begins from, opened when first used.

  Its properties raise a UserError if there is no such checkpoint, or if it
  cannot be read.
  """

  def __init__(self, path):
    self._path = path

  @functools.cached_property
  def name(self) -> str:
    """Path to the checkpoint."""
    return str(find(self._path))

  @functools.cached_property
  def meta(self) -> Meta:
    """The checkpoint's metadata."""
    return read_meta(pathlib.Path(self.name))

  def restore(self, like: TrainState, with_optimizer: bool) -> TrainState:
    """Reads the state, as the function `restore` does."""
    return restore(pathlib.Path(self.name), like, with_optimizer)


def read(path: pathlib.Path, wanted: Mapping[str, Any]):
  """Reads groups of arrays, as many as there are, and `save_args`' fields.

  Raises:
    Unreadable: if it does not hold that structure.
    UserError: if the optimizer's state is wanted, and it has none.
  """
  with readable(path / "meta"):
    fields = read_fields(path)
  there, found = fields["sums"], {}
  if "optimizer" in wanted and "optimizer" not in there:
    raise UserError(
      f"{path} has no optimizer's state: start another run from it, with"
      " init.checkpoint and init.optimizer=reset"
    )
  for name in wanted.keys() & there.keys():
    # Orbax would name all arrays of both, over many lines.
    if other := sorted(wanted[name].keys() ^ there[name].keys()):
      has = "has" if other[0] in there[name] else "has no"
      raise Unreadable(
        f"{path} is of another model or optimizer: it {has} {name}/{other[0]}"
      )
    with readable(path / name):
      found[name] = ocp.StandardCheckpointHandler().restore(
        epath.Path(path / name), args=ocp.args.StandardRestore(wanted[name])
      )
  return found, fields


def complete(like: TrainState, found: Mapping[str, Any]) -> TrainState:
  """Makes a state of what was read, and otherwise of what `like` has."""
  items = to_items(like) | found
  if "ema" in items and "ema" not in found:
    # A run without an average can start one with an average.
    items["ema"] = jax.tree.map(jnp.copy, items["params"])
  # The structure is the optimizer's of today, and the names find its leaves.
  treedef = jax.tree.structure(like.opt_state)
  opt_state = [items["optimizer"][name] for name in _flatten(like.opt_state)]
  return TrainState(
    step=items["counters"]["step"],
    params=items["params"],
    opt_state=treedef.unflatten(opt_state),
    ema=items.get("ema"),
  )


def check_sums(path: pathlib.Path, found, fields) -> None:
  """Checks that arrays are what was saved.

  Raises:
    Unreadable: if one is not, on all processes that share them.
  """
  for name, sums in _sums(found).items():
    for key, total in sums.items():
      if fields["sums"][name].get(key) != total:
        raise Unreadable(
          f"cannot read the checkpoint {path}: {name}/{key} is not what was"
          " saved: its file is damaged"
        )
