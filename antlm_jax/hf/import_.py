"""Reads a transformers model as a checkpoint."""

import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from antlm_jax import models
from antlm_jax.config import Config, Init
from antlm_jax.data import packing
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import config as hf_config
from antlm_jax.hf import hub, layouts, model_folder, weights
from antlm_jax.hf.architecture import NATIVE
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.hf.model_folder import TOKENIZER, TOKENIZER_CONFIG
from antlm_jax.inference import framing
from antlm_jax.inference import model as model_lib
from antlm_jax.inference.model import FineTuned
from antlm_jax.models import Params
from antlm_jax.runtime import files, progress
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Checkpoint, Meta
from antlm_jax.training.step import TrainState

_TEMPERATURE = 0.05  # of an embedder's similarities, which only training uses


def open_start(model: str) -> Checkpoint:
  """Opens the checkpoint or transformers model from which a run starts."""
  return Imported(model) if _is_foreign(model) else Checkpoint(model)


def open_tokenizer(model: str) -> Tokenizer:
  """Opens the tokenizer of a run, or of a folder or name of transformers.

  `open_start` need not know the model, and its folder may hold only the
  tokenizer.

  Raises:
    UserError: There is no tokenizer, or it cannot be read.
  """
  if not _is_foreign(model):
    alone = pathlib.Path(model, TOKENIZER)
    if alone.is_file() and not is_own(alone.parent):
      return Tokenizer.load(alone)
    return Checkpoint(model).meta.tokenizer
  imported = Imported(model)
  tokenizer = Tokenizer.load(imported.path / TOKENIZER)
  try:
    # It also names the embedding's rows that have no token.
    return imported.meta.tokenizer
  except UserError as error:
    progress.say(f"{model}: only its tokenizer is read ({error})")
    return tokenizer


def _is_foreign(model: str) -> bool:
  """Whether `model` is a transformers folder or a name on the Hub."""
  if model.startswith(hub.PREFIX) or hub.is_name(model):
    return True
  # Our runs also have a config.json.
  folder = pathlib.Path(model)
  return model_folder.is_model_folder(folder) and not is_own(folder)


def is_own(folder: pathlib.Path) -> bool:
  """Whether a folder is one of our runs, or one of its checkpoints."""
  steps = checkpoint.checkpoint_steps(folder)
  return bool(steps) or (folder / "params").is_dir()


class _Opened(NamedTuple):
  """A transformers model, checked, but for its parameters' values."""

  meta: Meta
  step: int
  notes: Sequence[str]
  params: Callable[[], Params]
  headless: bool  # whether it has no output layer
  causal: bool  # whether its config.json says so


class Imported(Checkpoint):
  """A transformers model as a checkpoint, opened when first used.

  `where` is its folder, with config.json, tokenizer.json and weights, or its
  name on the Hub. `boundary` names the special tokens around a text, a key of
  `packing.BOUNDARIES`; by default they are those that its tokenizer adds.

  The properties raise a UserError if there is no such model, or if no encoder
  computes it. The first of them checks all of it but the parameters' values.
  """

  def __init__(
    self, where: str | os.PathLike[str], boundary: str | None = None
  ):
    super().__init__(os.fspath(where).removeprefix(hub.PREFIX))
    self._boundary = boundary

  @property
  def name(self) -> str:
    """Name of the model on the Hub, or absolute path to its folder."""
    # The run's config keeps the path, which must be valid from any folder.
    where = self._where
    return hub.PREFIX + where if hub.is_name(where) else os.path.abspath(where)

  @property
  def path(self) -> pathlib.Path:
    """Path to the model's folder, after a download from the Hub."""
    return self._folder.path

  @functools.cached_property
  def _folder(self) -> model_folder.ModelFolder:
    return model_folder.find_model(self._where)

  @property
  def meta(self) -> Meta:
    return self._opened.meta

  @property
  def step(self) -> int:
    """Number of steps done: 0 unless export wrote the folder."""
    return self._opened.step

  @property
  def notes(self) -> Sequence[str]:
    """Notes on the model, for the user."""
    return self._opened.notes

  @property
  def params(self) -> Params:
    """Parameters, float32; each access reads the files."""
    return self._opened.params()

  @property
  def task(self) -> FineTuned | None:
    """Task of an embedder of sentence-transformers."""
    prompts = self._folder.prompts
    if prompts is None:
      return None
    both = [prompts.get(name, "") for name in model_folder.PROMPTS]
    return FineTuned(
      name="embedder",
      attention="causal" if self._opened.causal else "bidirectional",
      kind="towers",
      settings={"temperature": _TEMPERATURE, "prompts": both},
      params={},
    )

  def lacks_head(self, shapes: Mapping[str, Any]) -> bool:
    return self._opened.headless

  def restore(
    self, like: TrainState, with_optimizer: bool = True
  ) -> TrainState:
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
      for path, value in self.params.items()
    }
    return checkpoint.complete_state(like, {"params": params})

  @functools.cached_property
  def _opened(self) -> _Opened:
    path = self.path
    file = path / hf_config.CONFIG
    fields = files.read_json(file, "the model's")
    tensors = weights.read_weights(path)
    layout = layouts.find_layout(tensors)
    described = hf_config.describe(file, layout.fields_of(fields))
    encoder, settings = described.encoder, dict(described.settings)
    rows = settings.pop("vocab_size")
    try:
      model = models.build_model({"name": encoder, **settings}, rows)
    except UserError as error:
      raise UserError(f"{file}: {error}") from error
    tokenizer = Tokenizer.load(path / TOKENIZER)
    causal, beyond = described.objective == "C", tokenizer.vocab_size - rows
    if beyond > 0:
      tokenizer = tokenizer.without_special(rows)
    _check_tokenizer(path, tokenizer, rows, described.special)
    # The files bound the config's sizes, so check them before any allocation.
    names = layout.weights or described.weights
    stored, notes = weights.tidied(
      layout.tensors_of(tensors), names["embedding"], ARCHITECTURES[encoder]
    )
    shapes, there = model.shapes, [n for n in names if names[n] in stored]
    if headless := models.lacks_head(shapes, there):
      shapes, _ = models.divided(shapes)
    unused = ARCHITECTURES[encoder].unused
    params = weights.reader(stored, names, shapes, unused)
    if (path / NATIVE).exists():
      meta, step = _read_native(path, model, self._boundary)
      return _Opened(meta, step, notes, params, headless, causal)
    notes = [*layout.notes, *self._folder.notes, *notes]
    if fields.get("auto_map") and not layout.weights:
      notes.append(
        f"antlm does not run the code that {file} names (auto_map): it takes"
        f" the model for transformers' {fields.get('model_type')}"
      )
    if headless:
      notes.append(
        "the folder has no output layer: scores and masks need one, and"
        " training makes it"
      )
    if beyond > 0:
      notes.append(
        f"special tokens from {rows:,} on are left out: the embedding has no"
        " row for them"
      )
    if rows > tokenizer.vocab_size:
      tokenizer, note = _with_all_names(path, tokenizer, rows)
      notes.insert(0, note)
    boundary = self._boundary or layout.boundary
    if not boundary:
      boundary = framing.OWN
      notes += _frame_notes(path, tokenizer)
    if tokenizer.mask_id is None:
      notes.append(
        f"the tokenizer has no {MASK}; training that needs it adds it, with the"
        " mean of all embeddings"
      )
    start = self.name if hub.is_name(self._where) else ""
    config = Config(
      model=models.ENCODERS[encoder](**settings),
      curriculum=layout.curriculum or f"1{described.objective}",
      init=Init(checkpoint=start),
    )
    ends = hf_config.end_ids(path, fields, rows)
    longest = model.config.max_seq_len
    longest = min(self._folder.longest or longest, longest)
    meta = Meta(
      config, tokenizer, boundary, data="", ends=ends, row_tokens=longest
    )
    return _Opened(meta, 0, notes, params, headless, causal)


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


def _with_all_names(
  path: pathlib.Path, tokenizer: Tokenizer, rows: int
) -> tuple[Tokenizer, str]:
  """Returns a tokenizer with a token for each of a model's rows, and a note."""
  known = tokenizer.vocab_size
  names = [f"<no_token_{i}>" for i in range(known, rows)]
  try:
    tokenizer = tokenizer.extended(names)
  except UserError as error:
    raise UserError(f"{path / TOKENIZER}: {error}") from error
  return tokenizer, (
    f"{rows - known} rows of the embedding have no token; their new names are"
    f" {names[0]}, ..."
  )


def _read_native(
  path: pathlib.Path, model: models.Model, boundary: str | None
) -> tuple[Meta, int]:
  """Reads the metadata and the step that export wrote into a folder."""
  fields = files.read_json(path / NATIVE, "the export's record of the run:")
  try:
    meta = Meta.from_json(fields)
    step = int(fields["step"])
    if meta.boundary not in (*packing.BOUNDARIES, framing.OWN):
      raise ValueError(f"boundary {meta.boundary!r} is unknown")
  except (KeyError, ValueError, TypeError, AttributeError) as error:
    raise UserError(f"{path / NATIVE} is incomplete: {error}") from error
  own = models.build_model(meta.encoder, meta.tokenizer.vocab_size).config
  shared = ARCHITECTURES[meta.config.model.name].settings
  changed = [n for n in shared if getattr(own, n) != getattr(model.config, n)]
  if changed:
    raise UserError(
      f"config.json and {path / NATIVE} disagree on {', '.join(changed)}:"
      " remove the latter to use config.json"
    )
  meta = dataclasses.replace(meta, boundary=boundary or meta.boundary)
  return meta, step


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
  imported: Imported, workdir: str | os.PathLike
) -> pathlib.Path:
  """Writes a run with a tokenizer and a checkpoint, and returns its path.

  Raises a UserError if the workdir holds a run, or cannot be written.
  """
  workdir = pathlib.Path(workdir).absolute()
  check_workdir(workdir)
  path = workdir / checkpoint.FOLDER / str(imported.step)
  model_lib.write_checkpoint(
    path, imported.step, imported.params, imported.meta, imported.task
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
  checkpoint.check_path(workdir)
  if checkpoint.checkpoint_steps(workdir):
    raise UserError(f"{workdir} holds a run: give another workdir")
  if (workdir / TOKENIZER).exists():
    raise UserError(
      f"{workdir} holds a {TOKENIZER}: give another workdir, or remove it"
    )
