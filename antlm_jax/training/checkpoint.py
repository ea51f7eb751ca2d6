"""The format of checkpoints: trees of arrays by path, and their metadata.

Orbax writes a checkpoint aside and renames it when it is whole. In a bucket,
which cannot rename, it writes a commit file last. The item `meta` is JSON. It
holds a sum of the bits of every array, which reading verifies.
"""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from antlm_jax import config as config_lib
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.models import EncoderConfig, divided, lacks_head
from antlm_jax.runtime import files, progress
from antlm_jax.training import metrics, milestones
from antlm_jax.training.step import TrainState

FOLDER = "checkpoints"
_COMMITTED = "commit_success.txt"  # orbax writes it last, in a bucket
_SPARE = 1 << 20  # bytes that orbax writes in addition to the arrays
# Files of a model of transformers, of which a run has none.
_FOREIGN = (
  "tokenizer_config.json",
  "model.safetensors",
  "pytorch_model.bin",
  "model.safetensors.index.json",
  "modules.json",
  "adapter_config.json",
)
_NOT_A_RUN = "is a model of transformers, not a run"
HUB_PREFIX = "hf://"  # prefix of a Hub name in a config's init.checkpoint
# A name on the Hub, which may also be a path.
HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# Words of the errors that orbax and tensorstore raise for damaged files. Most
# of these errors have hundreds of lines.
_DAMAGED = ("TensorStore", "DATA_LOSS", "does not exist", "not found")


class Unreadable(UserError):
  """A checkpoint exists, but its files are damaged or do not fit the model."""


@dataclasses.dataclass(frozen=True)
class Meta:
  """The metadata of a checkpoint: all that its arrays need to be used."""

  config: config_lib.Config  # of its run, resolved
  tokenizer: Tokenizer
  boundary: str  # special tokens around documents: `packing.BOUNDARIES`
  data: str  # hash of the rows that it was trained on
  _: dataclasses.KW_ONLY
  row_tokens: int = 0  # in the longest of these rows; 0 in old checkpoints
  held_out: str = ""  # hash of its held-out rows; "" in old checkpoints
  rope_theta: float | None = None  # of its last step, if a phase changed it
  # Tokens that end a text; if empty, the tokenizer's `</s>` does.
  ends: tuple[int, ...] = ()
  milestones: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def encoder(self) -> EncoderConfig:
    """Settings of the encoder, with RoPE's base after the last step."""
    encoder = self.config.model
    if self.rope_theta is None:
      return encoder
    return dataclasses.replace(encoder, rope_theta=self.rope_theta)

  def to_json(self) -> dict[str, Any]:
    """Returns plain JSON, for orbax to write."""
    return {
      **vars(self),
      "config": config_lib.to_json(self.config),
      "tokenizer": self.tokenizer.to_json(),
    }

  @classmethod
  def from_json(cls, fields: Mapping[str, Any]) -> "Meta":
    """Reads the result of `to_json`, from any version of this library."""
    names = {f.name for f in dataclasses.fields(cls)} & fields.keys()
    values = {name: fields[name] for name in names}
    values["config"] = config_lib.config_from_json(fields["config"])
    values["tokenizer"] = Tokenizer.from_json(fields["tokenizer"])
    values["ends"] = tuple(fields.get("ends", ()))
    milestones.check_milestones(fields.get("milestones", {}))
    return cls(**values)


def to_items(state: TrainState) -> dict[str, dict[str, Any]]:
  """Returns a state as named groups of `{path: array}`."""
  items = {
    "params": state.params,
    "optimizer": _flatten(state.opt_state),
    "counters": {"step": state.step},
  }
  return items if state.ema is None else items | {"ema": state.ema}


def _flatten(tree) -> dict[str, Any]:
  """Names each leaf by its path, such as `1/mu/blocks/mlp/up/kernel`."""
  # Positions would change where optax reorders a state.
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): leaf
    for path, leaf in jax.tree.leaves_with_path(tree)
  }


@jax.jit
def _sums_of_bits(arrays):
  def total(x):
    # Sums of floats depend on the order, and NaN equals nothing.
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)

  return jax.tree.map(total, arrays)


def bit_sums(arrays):
  """Sums the bits of each array modulo 2^32: the same for every sharding."""
  return jax.tree.map(int, jax.device_get(_sums_of_bits(arrays)))


def json_checksum(sums: Mapping[str, Any]) -> int:
  """Returns the CRC-32 of plain JSON, such as the arrays' sums."""
  return zlib.crc32(json.dumps(sums, sort_keys=True).encode())


def check_path(folder: str | os.PathLike) -> None:
  """Raises a UserError if orbax cannot save under a path.

  It takes some signs of the path for a pattern, and then loses the arrays.
  """
  if signs := sorted({*os.path.abspath(folder)} & {*"[]\\"}):
    raise UserError(
      f"{folder}: checkpoints cannot be saved under a path with"
      f" {' and '.join(signs)}: rename the folder"
    )


def save_args(
  folder: pathlib.Path, items, fields: Mapping[str, Any]
) -> ocp.args.Composite:
  """Returns orbax's arguments that save `to_items`' arrays, and JSON fields.

  Makes the folder that the checkpoint goes to. Raises an OSError if that cannot
  be written, or its disk lacks the space, and a UserError as `check_path`.
  """
  check_path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  if not files.is_remote(folder):
    # The other processes would wait long for a process that fails later.
    if not os.access(folder, os.W_OK):
      raise OSError("it cannot be written")
    needed = sum(array.nbytes for array in jax.tree.leaves(items)) + _SPARE
    free = shutil.disk_usage(folder).free
    if free < needed:
      raise OSError(
        f"{files.FULL} ({needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free)"
      )
  # The CRC-32 covers the sums, and so every array.
  fields = {**fields, "sums": bit_sums(items)}
  fields["crc32"] = json_checksum(fields)
  saves = {name: ocp.args.StandardSave(item) for name, item in items.items()}
  return ocp.args.Composite(**saves, meta=ocp.args.JsonSave(fields))


def checkpoint_steps(path) -> dict[int, pathlib.Path]:
  """Finds the whole checkpoints of a run, or of a folder of steps."""
  path = files.absolute_path(path)
  mark = _COMMITTED if files.is_remote(path) else "meta"
  with files.reaching(path):
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    folders = [entry.parent for entry in folder.glob(f"*/{mark}")]
  steps = {int(step.name): step for step in folders if step.name.isdigit()}
  return dict(sorted(steps.items()))


def torn(folder: pathlib.Path) -> list[int]:
  """Returns the steps that orbax counts although they are not whole.

  An interrupted copy or removal leaves such folders. In a bucket, orbax looks
  for the same file as `checkpoint_steps`.
  """
  if files.is_remote(folder):
    return []
  names = (entry.name for entry in folder.glob("[0-9]*"))
  steps = (int(name) for name in names if re.fullmatch(r"0|[1-9]\d*", name))
  return sorted({*steps} - checkpoint_steps(folder).keys())


def find_checkpoint(path, step: int | None = None) -> pathlib.Path:
  """Returns the folder of a checkpoint.

  `path` is this folder, or a run or folder of steps, of which it is that of
  `step`, by default the newest. Raises a UserError if there is no such
  checkpoint.
  """
  location = os.fspath(path)
  if location.startswith(HUB_PREFIX):
    raise UserError(f"{location} {_NOT_A_RUN}: {_import_remedy(location)}")
  path = files.absolute_path(path)
  with files.reaching(path):
    is_checkpoint = (path / "meta").is_dir()
  if is_checkpoint:
    if step is not None and path.name != str(step):
      raise UserError(f"{path} is not step {step}: name the run's folder")
    return path
  steps = checkpoint_steps(path)
  if not steps:
    raise _no_checkpoint(path, location)
  if step is not None and step not in steps:
    existing = ", ".join(map(str, steps))
    raise UserError(f"{path} has no step {step}, but steps {existing}")
  return steps[max(steps) if step is None else step]


def _no_checkpoint(path: pathlib.Path, location: str) -> UserError:
  """Returns the error for a path without checkpoints, with a remedy.

  `location` is the path as the user gave it.
  """
  if _is_foreign(path):
    return UserError(f"{path} {_NOT_A_RUN}: {_import_remedy(location)}")
  if is_hub_name(location):
    remedy = _import_remedy(location)
    why = f"no such folder; if it is a model on the Hub, {remedy}"
  elif not (why := files.absent(path)):
    why = f"give a run's workdir or one of its {FOLDER}/STEP folders"
    parts = (path.glob(f"*/{part}") for part in (FOLDER, "meta", "config.json"))
    inside = sorted({str(part.parent) for paths in parts for part in paths})
    if inside:
      why += f"; did you mean {' or '.join(inside[:3])}?"
  return UserError(f"{path!s:.200} holds no checkpoint: {why}")


def is_hub_name(model: str | os.PathLike) -> bool:
  """Whether `model` is a name on the Hub, not a local folder."""
  if not HUB_NAME.fullmatch(os.fspath(model)) or os.path.exists(model):
    return False
  # If runs/ exists, runs/slip is a mistyped path.
  return not pathlib.Path(model).parent.exists()


def _is_foreign(path: pathlib.Path) -> bool:
  """Whether a path is a folder of transformers, or a GGUF file."""
  is_gguf = path.name.lower().endswith(".gguf")
  return is_gguf or any((path / name).is_file() for name in _FOREIGN)


def _import_remedy(model: str) -> str:
  """Returns how to make a run of a model of transformers."""
  model = model.removeprefix(HUB_PREFIX)
  return (
    f"make a run first with `antlm import --model={model} --workdir=RUN`, or in"
    f" Python import_model({model!r}, 'RUN')"
  )


@contextlib.contextmanager
def readable(part: pathlib.Path) -> Iterator[None]:
  """Adds the name of a checkpoint's part to an error in its block."""
  _silence_dropped_reads()
  try:
    yield
  except (UserError, jax.errors.JaxRuntimeError):
    raise
  except Exception as error:  # orbax raises a bare one for a truncated file
    # A checkpoint that is out of reach now must not be passed over.
    away = files.out_of_reach(error)
    why = files.failure_reason(error)
    if not away and any(word in str(error) for word in _DAMAGED):
      why = "its files are damaged, or not all there"
    line = f"cannot read the checkpoint {part.parent}: {part.name}: {why}"
    raise files.failure(line, error) if away else Unreadable(line) from error


@functools.cache
def _silence_dropped_reads() -> None:
  """Keeps Python from printing lines next to the error of a failed read."""
  # When an array cannot be read, orbax drops the coroutines that read others.
  before = sys.unraisablehook

  def hook(dropped) -> None:
    name = getattr(dropped.object, "__qualname__", "")
    closed = str(dropped.exc_value) == "Event loop is closed"
    if not closed and "_read_array_index" not in name:
      before(dropped)

  sys.unraisablehook = hook


class Checkpoint:
  """A checkpoint, found and opened when first used.

  `location` is a path to it, or to a run, whose newest step is the default. The
  properties raise a UserError if there is no such checkpoint, and Unreadable if
  its metadata is damaged. None of them reads its arrays.
  """

  def __init__(self, location, step: int | None = None):
    self._location = location
    self._step = step

  def __fspath__(self) -> str:
    return str(self.path)

  @functools.cached_property
  def path(self) -> pathlib.Path:
    return find_checkpoint(self._location, self._step)

  @property
  def name(self) -> str:
    return str(self.path)

  @property
  def run(self) -> pathlib.Path:
    """Folder of the run, or the parent folder of a single checkpoint."""
    above = self.path.parent
    return above.parent if above.name == FOLDER else above

  def say_better_step(self) -> None:
    """Says if it is a run's newest step, and the run kept a better step."""
    is_named = self.path == files.absolute_path(self._location)
    if is_named or self._step is not None:
      return
    summary = {}
    with contextlib.suppress(UserError):  # a run that has not ended has none
      summary = files.read_json(self.run / metrics.SUMMARY, "the summary")
    if not (best := summary.get("best")):
      return
    better = checkpoint_steps(self.run).get(best["step"], self.path)
    if better != self.path:
      progress.say(
        f"note: step {self.step:,} of {self.run} is taken, its newest. By"
        f" eval.watch, step {best['step']:,} is better: {better}"
      )

  @property
  def evals(self) -> pathlib.Path:
    """Folder of evaluations, RUN/evals; local runs/RUN/evals for buckets."""
    run = self.run
    folder = pathlib.Path("runs", run.name) if files.is_remote(run) else run
    return folder / "evals"

  @functools.cached_property
  def fields(self) -> Mapping[str, Any]:
    """The item `meta`, plain JSON: the metadata, `sums`, and more."""
    with readable(self.path / "meta"):
      # A Checkpointer would have all processes wait for a failed process.
      fields = ocp.JsonCheckpointHandler().restore(
        epath.Path(self.path / "meta"), ocp.args.JsonRestore()
      )
      if fields.pop("crc32", None) != json_checksum(fields):
        raise ValueError("it is not what was saved")
      return fields

  @functools.cached_property
  def meta(self) -> Meta:
    with readable(self.path / "meta"):
      return Meta.from_json(self.fields)

  @property
  def sums(self) -> Mapping[str, Mapping[str, int]]:
    """Sums of the arrays' bits, by item and path."""
    return self.fields["sums"]

  @property
  def step(self) -> int:
    """Number of steps done."""
    return self.sums["counters"]["step"]  # one number is its own sum

  @property
  def weights(self) -> str:
    """Name of the item with the weights to use: `ema` if it exists."""
    return "ema" if "ema" in self.sums else "params"

  @property
  def digest(self) -> int:
    """CRC-32 of these weights, which depends on nothing else."""
    return json_checksum(self.sums[self.weights])

  def read(self, like: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the wanted groups of arrays that it has, without verifying them.

    Raises Unreadable if it does not hold that structure, and a UserError if it
    lacks a wanted optimizer state.
    """
    if "optimizer" in like and "optimizer" not in self.sums:
      raise UserError(
        f"{self.path} has no optimizer's state: start another run from it, with"
        " init.checkpoint and init.optimizer=reset"
      )
    arrays = {}
    for name in like.keys() & self.sums.keys():
      # Orbax would name all arrays of both, over many lines.
      if other := sorted(like[name].keys() ^ self.sums[name].keys()):
        has = "has" if other[0] in self.sums[name] else "has no"
        remedy = "; init.optimizer=reset leaves its state out"
        raise Unreadable(
          f"{self.path} is of another model or optimizer: it {has}"
          f" {name}/{other[0]}{remedy * (name == 'optimizer')}"
        )
      args = ocp.args.StandardRestore(like[name])
      with readable(self.path / name):
        handler = ocp.StandardCheckpointHandler()
        arrays[name] = handler.restore(epath.Path(self.path / name), args=args)
    return arrays

  def lacks_head(self, shapes: Mapping[str, Any]) -> bool:
    """Whether it lacks the output layer of a model with these parameters."""
    return lacks_head(shapes, self.sums[self.weights])

  def without_missing_head(self, params: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out the output layer's parameters if the checkpoint lacks them."""
    return divided(params)[0] if self.lacks_head(params) else dict(params)

  def verify(self, arrays: Mapping[str, Any]) -> None:
    """Raises Unreadable, on all processes, if an array's bits have changed."""
    for name, group in bit_sums(arrays).items():
      if wrong := [key for key in group if group[key] != self.sums[name][key]]:
        saved = self._dtype(name, wrong[0])
        read = arrays[name][wrong[0]].dtype
        why = "is not what was saved: its file is damaged"
        if saved != read:
          why = f"is {saved}, but the model computes in {read}: train it again"
        raise Unreadable(
          f"cannot read the checkpoint {self.path}: {name}/{wrong[0]} {why}"
        )

  def _dtype(self, name: str, key: str) -> np.dtype:
    """Returns the data type of a saved array."""
    with readable(self.path / name):
      handler = ocp.StandardCheckpointHandler()
      return handler.metadata(epath.Path(self.path / name))[key].dtype

  def restore(
    self, like: TrainState, with_optimizer: bool = True, weights: str = "params"
  ) -> TrainState:
    """Reads the state into the structure and shardings of `like`.

    The output layer of `like` stays if the checkpoint has none, as of a model
    that was imported without it. Without `with_optimizer`, the state of the
    optimizer stays, too.

    `weights` names the item that becomes the parameters: `params`, or `ema` for
    the average. If `like` keeps an average, it becomes the checkpoint's. With
    `weights="ema"`, without the optimizer, or if the checkpoint has none, it
    becomes a copy of the restored parameters.

    Raises the errors of `read`, Unreadable if the checkpoint is damaged, and a
    KeyError if it has no item named `weights`.
    """
    items = to_items(like)
    items_to_read = {
      weights: self.without_missing_head(like.params),
      "counters": items["counters"],
    }
    if with_optimizer:
      items_to_read["optimizer"] = items["optimizer"]
      if "ema" in items and weights != "ema":
        items_to_read["ema"] = self.without_missing_head(items["ema"])
    arrays = self.read(items_to_read)
    self.verify(arrays)
    params = arrays.pop(weights)
    return complete_state(like, {**arrays, "params": params})


def complete_state(like: TrainState, arrays: Mapping[str, Any]) -> TrainState:
  """Makes a state of the arrays that were read, and of `like` for the rest."""
  items = {
    name: {**item, **arrays.get(name, {})}
    for name, item in to_items(like).items()
  }
  if "ema" in items and "ema" not in arrays:
    # A run without an average can start one with an average.
    items["ema"] = jax.tree.map(jnp.copy, items["params"])
  # The structure is that of today's optimizer, whose leaves are found by name.
  leaves = [items["optimizer"][name] for name in _flatten(like.opt_state)]
  opt_state = jax.tree.structure(like.opt_state).unflatten(leaves)
  step = items["counters"]["step"]
  return TrainState(step, items["params"], opt_state, items.get("ema"))
