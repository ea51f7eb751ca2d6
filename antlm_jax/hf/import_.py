"""Reads a transformers model as a checkpoint."""

import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

import jax

from antlm_jax import models
from antlm_jax.config import Config, Init
from antlm_jax.data import packing
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import config as hf_config
from antlm_jax.hf import hub, layouts, weights
from antlm_jax.hf.architecture import NATIVE
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.inference import framing
from antlm_jax.inference import model as model_lib
from antlm_jax.inference.model import FineTuned, Loaded
from antlm_jax.models import Params
from antlm_jax.runtime import files
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Checkpoint, Meta
from antlm_jax.training.step import TrainState

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


class Imported(NamedTuple):
  """A transformers model as a checkpoint."""

  meta: Meta  # metadata of the checkpoint
  step: int  # 0 unless export wrote the folder
  notes: tuple[str, ...]  # notes for the user
  weights: Callable[[], Params]  # reads the parameters, float32

  @property
  def params(self) -> Params:
    """Parameters, float32; each access reads the files."""
    return self.weights()


def open_start(model: str) -> Checkpoint:
  """Opens the checkpoint or transformers model from which a run starts."""
  return Foreign(model) if is_foreign(model) else Checkpoint(model)


class Foreign(Checkpoint):
  """A transformers model from which a run starts, opened on first use."""

  @functools.cached_property
  def _found(self) -> Imported:
    return read_model_folder(self._where.removeprefix(hub.PREFIX))

  @property
  def name(self) -> str:
    """Name of the model on the Hub, or absolute path to its folder."""
    # The run's config keeps the path, which must be valid from any folder.
    name = self._where.removeprefix(hub.PREFIX)
    return hub.PREFIX + name if hub.is_name(name) else os.path.abspath(name)

  @property
  def meta(self) -> Meta:
    """Metadata of the model as a checkpoint."""
    return self._found.meta

  def restore(self, like: TrainState, with_optimizer: bool) -> TrainState:
    """Returns a state with the model's parameters."""
    if with_optimizer:
      raise UserError(
        f"{self.name} has no optimizer state: set init.optimizer=reset"
      )
    params = {
      path: jax.make_array_from_callback(
        value.shape, like.params[path].sharding, value.__getitem__
      )
      # Read them for each run, so that no copy stays in memory.
      for path, value in self._found.params.items()
    }
    return checkpoint.complete_state(like, {"params": params})


def is_foreign(model: str | os.PathLike) -> bool:
  """Whether `model` is a transformers folder or a name on the Hub."""
  name = os.fspath(model)
  if name.startswith(hub.PREFIX) or hub.is_name(name):
    return True
  # Our runs also have a config.json.
  folder = pathlib.Path(name)
  ours = checkpoint.checkpoint_steps(folder) or (folder / "params").is_dir()
  return (folder / hf_config.CONFIG).is_file() and not ours


def load_model(model: str) -> Loaded:
  """Loads a run or a transformers model; UserError if it is neither."""
  if not is_foreign(model):
    return model_lib.load(model)
  name = model.removeprefix(hub.PREFIX)
  found = read_model_folder(name)
  meta, params = found.meta, found.params
  return Loaded(
    **vars(meta),
    path=pathlib.Path(name),
    step=found.step,
    model=models.build_model(meta.config.model, meta.tokenizer.vocab_size),
    params=params,
    digest=checkpoint.json_checksum(checkpoint.bit_sums(params)),
  )


def read_model_folder(
  path: str | os.PathLike, boundary: str | None = None
) -> Imported:
  """Opens a model folder and checks it, without reading its parameters.

  Args:
    path: Folder with config.json, tokenizer.json and weights, or ORG/NAME, a
      model on the Hub.
    boundary: Special tokens around a text, a key of `packing.BOUNDARIES`; by
      default those that the folder's tokenizer adds.

  Raises:
    UserError: It is no such folder, or no encoder computes the model.
  """
  name = os.fspath(path)
  path = hub.download_model(name) if hub.is_name(name) else pathlib.Path(name)
  fields, tensors = hf_config.read_config_json(path), weights.read_weights(path)
  layout = layouts.find_layout(tensors)
  file = path / hf_config.CONFIG
  described = hf_config.describe(file, layout.fields_of(fields))
  encoder, settings = described.encoder, dict(described.settings)
  rows = settings.pop("vocab_size")
  try:
    model = models.build_model({"name": encoder, **settings}, rows)
  except UserError as error:
    raise UserError(f"{file}: {error}") from error
  tokenizer = Tokenizer.load(path / TOKENIZER)
  _check_tokenizer(path, tokenizer, rows, described.special)
  # The files bound the config's sizes, so check them before any allocation.
  stored, unused = layout.tensors_of(tensors), ARCHITECTURES[encoder].unused
  names = layout.weights or described.weights
  params = weights.reader(stored, names, model.shapes, unused)
  if (path / NATIVE).exists():
    return _import_own_export(path, params, model, boundary)
  notes = list(layout.notes)
  if known := rows - tokenizer.vocab_size:
    names = [f"<no_token_{i}>" for i in range(rows - known, rows)]
    try:
      tokenizer = tokenizer.extended(names)
    except UserError as error:
      raise UserError(f"{path / TOKENIZER}: {error}") from error
    notes.insert(
      0,
      f"{known} rows of the embedding have no token; their new names are"
      f" {names[0]}, ...",
    )
  config = Config(
    model=models.ENCODERS[encoder](**settings),
    curriculum=layout.curriculum or f"1{described.objective}",
    init=Init(checkpoint=hub.PREFIX + name if hub.is_name(name) else ""),
  )
  boundary = boundary or layout.boundary
  if not boundary:
    boundary = framing.OWN
    notes += _frame_notes(path, tokenizer)
  if tokenizer.mask_id is None:
    notes.append(
      f"the tokenizer has no {MASK}; training that needs it adds it, with the"
      " mean of all embeddings"
    )
  ends, longest = (
    hf_config.end_ids(path, fields, rows),
    model.config.max_seq_len,
  )
  meta = Meta(
    config, tokenizer, boundary, data="", ends=ends, row_tokens=longest
  )
  return Imported(meta, 0, tuple(notes), params)


def _check_tokenizer(path, tokenizer: Tokenizer, rows: int, special) -> None:
  """Checks that the tokenizer belongs to the model."""
  size = tokenizer.vocab_size
  if size > rows:
    raise UserError(
      f"{path}: tokenizer.json has {size:,} tokens, but config.json says"
      f" vocab_size={rows:,}"
    )
  # transformers may write defaults that are beyond this vocabulary.
  for role in ("bos", "eos"):
    if size <= special.get(role, 0) < rows:
      raise UserError(
        f"{path}: config.json says {role}_token_id={special[role]}, but the"
        f" last token of tokenizer.json is {size - 1}"
      )
  mask = special.get("mask", rows)
  if mask < size and tokenizer.special[mask] and tokenizer.mask_id is None:
    raise UserError(
      f"the name of the mask, token {mask}, is unknown: rename it {MASK} in"
      f" {path / TOKENIZER}"
    )


def _import_own_export(
  path, params, model: models.Model, boundary: str | None
) -> Imported:
  """Returns the checkpoint that export wrote."""
  fields = files.read_json(path / NATIVE, "the export's record of the run:")
  try:
    meta = Meta.from_json(fields)
    step = int(fields["step"])
    if meta.boundary not in (*packing.BOUNDARIES, framing.OWN):
      raise ValueError(f"boundary {meta.boundary!r} is unknown")
  except (KeyError, ValueError, TypeError, AttributeError) as error:
    raise UserError(f"{path / NATIVE} is incomplete: {error}") from error
  own = models.build_model(meta.config.model, meta.tokenizer.vocab_size).config
  shared = ARCHITECTURES[meta.config.model.name].settings
  changed = [n for n in shared if getattr(own, n) != getattr(model.config, n)]
  if changed:
    raise UserError(
      f"config.json and {path / NATIVE} disagree on {', '.join(changed)}:"
      " remove the latter to use config.json"
    )
  meta = dataclasses.replace(meta, boundary=boundary or meta.boundary)
  return Imported(meta, step, (), params)


def _frame_notes(path: pathlib.Path, tokenizer: Tokenizer) -> list[str]:
  """Returns notes on the special tokens that the tokenizer adds."""
  before, after = (tokenizer.decode(ids, False) for ids in tokenizer.frame)
  notes = [
    f"its tokenizer adds {before or 'no token'} before a text and"
    f" {after or 'no token'} after it"
  ]
  file = path / TOKENIZER_CONFIG
  fields = files.read_json(file, "the tokenizer's") if file.exists() else {}
  for name, adds in (("add_bos_token", before), ("add_eos_token", after)):
    if fields.get(name) not in (None, bool(adds)):
      notes.append(
        f"warning: {file} says {name}={fields[name]}, but {TOKENIZER} decides,"
        " as in transformers 5 (set boundary to change it)"
      )
  return notes


def write_imported_run(
  imported: Imported, workdir: str | os.PathLike, task: FineTuned | None = None
) -> pathlib.Path:
  """Writes a run with a tokenizer and a checkpoint, and returns its path.

  Raises a UserError if the workdir holds a run, or cannot be written.
  """
  workdir = pathlib.Path(workdir).absolute()
  check_workdir(workdir)
  path = workdir / checkpoint.FOLDER / str(imported.step)
  model_lib.write_checkpoint(
    path, imported.step, imported.params, imported.meta, task
  )
  try:
    files.write_text(workdir / TOKENIZER, imported.meta.tokenizer.to_json())
  except BaseException:  # so that the same command works after a full disk
    shutil.rmtree(path)
    raise
  return path


def check_workdir(workdir: str | os.PathLike) -> None:
  """Raises a UserError if a folder holds a run or a model."""
  workdir = pathlib.Path(workdir)
  if checkpoint.checkpoint_steps(workdir):
    raise UserError(f"{workdir} holds a run: give another workdir")
  if (workdir / TOKENIZER).exists():
    raise UserError(
      f"{workdir} holds a {TOKENIZER}: give another workdir, or remove it"
    )
