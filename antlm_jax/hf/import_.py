"""Reads a transformers model as a checkpoint."""

import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from antlm_jax import models
from antlm_jax.config import Config, Init
from antlm_jax.data import packing
from antlm_jax.data.tokenizer import MASK, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.hf import config as hf_config
from antlm_jax.hf import gguf, layouts, model_folder, weights
from antlm_jax.hf.architecture import EXPORT_RECORD
from antlm_jax.hf.config import ModelDescription
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.hf.model_folder import TOKENIZER, TOKENIZER_CONFIG
from antlm_jax.inference import framing
from antlm_jax.inference import model as model_lib
from antlm_jax.inference.model import FineTuned
from antlm_jax.models import Params
from antlm_jax.runtime import files, progress
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import HUB_PREFIX, Checkpoint, Meta
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
  """Whether `model` is a transformers folder, GGUF, or a name on the Hub."""
  if (
    model.startswith(HUB_PREFIX)
    or checkpoint.is_hub_name(model)
    or gguf.is_gguf(model)
  ):
    return True
  # Our runs also have a config.json.
  folder = files.absolute_path(model)
  return model_folder.is_model_folder(folder) and not is_own(folder)


def is_own(folder: pathlib.Path) -> bool:
  """Whether a folder is one of our runs, or one of its checkpoints."""
  steps = checkpoint.checkpoint_steps(folder)
  return bool(steps) or (folder / "params").is_dir()


class _OpenedModel(NamedTuple):
  """A transformers model, checked, but for its parameters' values."""

  meta: Meta
  step: int
  notes: Sequence[str]
  read_params: Callable[[], Params]
  headless: bool  # whether it has no output layer
  causal: bool  # whether its config.json says so


class Imported(Checkpoint):
  """A transformers model as a checkpoint, opened when first used.

  `model` is its folder, with config.json, tokenizer.json and weights, a GGUF
  file, or its name on the Hub. `boundary` names the special tokens around a
  text, a key of `packing.BOUNDARIES`; by default they are those that its
  tokenizer adds.

  The properties raise a UserError if there is no such model, or if no encoder
  computes it. The first of them checks all of it but the parameters' values.
  """

  def __init__(
    self, model: str | os.PathLike[str], boundary: str | None = None
  ):
    super().__init__(os.fspath(model).removeprefix(HUB_PREFIX))
    self._boundary = boundary

  @property
  def name(self) -> str:
    """Name of the model on the Hub, or absolute path to its folder."""
    # The run's config keeps the path, which must be valid from any folder.
    if checkpoint.is_hub_name(self._location):
      return HUB_PREFIX + self._location
    return os.path.abspath(self._location)

  @property
  def path(self) -> pathlib.Path:
    """Path to the model's folder, after a download from the Hub."""
    return self._folder.path

  @functools.cached_property
  def _folder(self) -> model_folder.ModelFolder:
    return model_folder.find_model(self._location)

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
    return self._opened.read_params()

  @property
  def task(self) -> FineTuned | None:
    """Task of an embedder of sentence-transformers."""
    prompts = self._folder.prompts
    if prompts is None:
      return None
    texts = [prompts.get(name, "") for name in model_folder.PROMPTS]
    return FineTuned(
      name="embedder",
      attention="causal" if self._opened.causal else "bidirectional",
      kind="towers",
      settings={"temperature": _TEMPERATURE, "prompts": texts},
      params={},
    )

  def lacks_head(self, shapes: Mapping[str, Any]) -> bool:
    return self._opened.headless

  @property
  def weights(self) -> str:
    """Name of the only weights."""
    return "params"

  def restore(
    self, like: TrainState, with_optimizer: bool = True, weights: str = "params"
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
  def _opened(self) -> _OpenedModel:
    path = self.path
    config_file = path / hf_config.CONFIG
    config_fields = files.read_json(config_file, "the model's")
    tensors = weights.read_weights(path)
    layout = layouts.find_layout(tensors)
    description = hf_config.describe(
      config_file, layout.fields_of(config_fields)
    )
    model = _build_model(config_file, description)
    checked_tokenizer, tokenizer_notes = _read_tokenizer(path, description)
    read_params, headless, weight_notes = _read_weights(
      tensors, layout, description, model
    )
    opened = functools.partial(
      _OpenedModel,
      read_params=read_params,
      headless=headless,
      causal=description.objective == "C",
    )
    if (path / EXPORT_RECORD).exists():
      # The record has the run's own tokenizer; the folder's is only checked.
      meta, step = _read_export_record(path, model, self._boundary)
      return opened(meta=meta, step=step, notes=weight_notes)
    tokenizer, row_notes = _name_rows(
      path, checked_tokenizer, description.embedding_rows
    )
    _check_boundary(path, tokenizer, self._boundary)
    boundary = self._boundary or layout.boundary
    config = Config(
      model=models.ENCODERS[description.encoder](**description.settings),
      curriculum=layout.curriculum or f"1{description.objective}",
      init=Init(
        checkpoint=self.name if checkpoint.is_hub_name(self._location) else ""
      ),
    )
    longest_row = model.config.max_seq_len
    meta = Meta(
      config,
      tokenizer,
      boundary or framing.OWN,
      data="",
      ends=hf_config.end_ids(path, config_fields, description.embedding_rows),
      row_tokens=min(self._folder.longest or longest_row, longest_row),
    )
    notes = [
      *row_notes,
      *layout.notes,
      *self._folder.notes,
      *weight_notes,
      *_model_notes(config_file, config_fields, layout, headless),
      *tokenizer_notes,
      *_special_token_notes(path, tokenizer, boundary),
      *_chat_notes(path),
    ]
    return opened(meta=meta, step=0, notes=notes)


def _build_model(
  config_file: pathlib.Path, description: ModelDescription
) -> models.Model:
  """Builds the model of a config.json; UserError if we have no such model."""
  settings = {"name": description.encoder, **description.settings}
  try:
    return models.build_model(settings, description.embedding_rows)
  except UserError as error:
    raise UserError(f"{config_file}: {error}") from error


def _read_tokenizer(
  path: pathlib.Path, description: ModelDescription
) -> tuple[Tokenizer, list[str]]:
  """Reads the tokenizer without tokens beyond the embedding, and notes on it.

  Raises a UserError if it does not belong to the model.
  """
  tokenizer = Tokenizer.load(path / TOKENIZER)
  notes = []
  rows = description.embedding_rows
  if tokenizer.vocab_size > rows:
    tokenizer = tokenizer.without_special(rows)
    notes.append(
      f"special tokens from {rows:,} on are left out: the embedding has no"
      " row for them"
    )
  _check_tokenizer(path, tokenizer, rows, description.special)
  return tokenizer, notes


def _read_weights(
  tensors: weights.Weights,
  layout: layouts.TensorLayout,
  description: ModelDescription,
  model: models.Model,
) -> tuple[Callable[[], Params], bool, list[str]]:
  """Checks the weights, before anything of their size is allocated.

  Returns:
    A function that reads the parameters, whether the output layer is missing,
    and notes on tensors that are left out.
  """
  architecture = ARCHITECTURES[description.encoder]
  names = layout.weights or description.weights
  stored, notes = weights.with_export_names(
    layout.tensors_of(tensors), names["embedding"], architecture
  )
  shapes = model.shapes
  stored_paths = [path for path, name in names.items() if name in stored]
  headless = models.lacks_head(shapes, stored_paths)
  if headless:
    shapes, _ = models.divided(shapes)
  read_params = weights.reader(stored, names, shapes, architecture.unused)
  return read_params, headless, notes


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


def _name_rows(
  path: pathlib.Path, tokenizer: Tokenizer, rows: int
) -> tuple[Tokenizer, list[str]]:
  """Returns a tokenizer with a token for each row, and notes on new tokens."""
  vocab_size = tokenizer.vocab_size
  if vocab_size >= rows:
    return tokenizer, []
  names = [f"<no_token_{i}>" for i in range(vocab_size, rows)]
  try:
    tokenizer = tokenizer.extended(names)
  except UserError as error:
    raise UserError(f"{path / TOKENIZER}: {error}") from error
  return tokenizer, [
    f"{rows - vocab_size} rows of the embedding have no token; their new names"
    f" are {names[0]}, ..."
  ]


def _read_export_record(
  path: pathlib.Path, model: models.Model, boundary: str | None
) -> tuple[Meta, int]:
  """Reads the metadata and the step that export wrote into a folder."""
  record = path / EXPORT_RECORD
  fields = files.read_json(record, "the export's record of the run:")
  try:
    meta = Meta.from_json(fields)
    step = int(fields["step"])
    if meta.boundary not in (*packing.BOUNDARIES, framing.OWN):
      raise ValueError(f"boundary {meta.boundary!r} is unknown")
  except (KeyError, ValueError, TypeError, AttributeError) as error:
    raise UserError(f"{record} is incomplete: {error}") from error
  trained = models.build_model(meta.encoder, meta.tokenizer.vocab_size).config
  changed = [
    name
    for name in ARCHITECTURES[meta.config.model.name].settings
    if getattr(trained, name) != getattr(model.config, name)
  ]
  if changed:
    raise UserError(
      f"config.json and {record} disagree on {', '.join(changed)}:"
      " remove the latter to use config.json"
    )
  _check_boundary(path, meta.tokenizer, boundary)
  meta = dataclasses.replace(meta, boundary=boundary or meta.boundary)
  return meta, step


def _check_boundary(
  path: pathlib.Path, tokenizer: Tokenizer, boundary: str | None
) -> None:
  """Raises a UserError if a boundary has a token that the tokenizer lacks."""
  for name in filter(None, packing.BOUNDARIES[boundary or "none"]):
    if getattr(tokenizer, name) is None:
      raise UserError(
        f"{path / TOKENIZER} has no {name[:3]} token, which boundary {boundary}"
        " needs; choose another boundary"
      )


def _model_notes(
  config_file: pathlib.Path,
  config_fields: Mapping[str, Any],
  layout: layouts.TensorLayout,
  headless: bool,
) -> Iterator[str]:
  """Yields notes on a config.json's own code and on a missing output layer."""
  if config_fields.get("auto_map") and not layout.weights:
    yield (
      f"antlm does not run the code that {config_file} names (auto_map): it"
      f" takes the model for transformers' {config_fields.get('model_type')}"
    )
  if headless:
    yield (
      "the folder has no output layer: scores and masks need one, and"
      " training makes it"
    )


def _special_token_notes(
  path: pathlib.Path, tokenizer: Tokenizer, boundary: str | None
) -> Iterator[str]:
  """Yields notes on the tokens around a text and on a missing mask.

  A boundary decides on the tokens around a text in place of the tokenizer.
  """
  if not boundary:
    yield from _frame_notes(path, tokenizer)
  if tokenizer.mask_id is None:
    yield (
      f"the tokenizer has no {MASK}; training that needs it adds it, with the"
      " mean of all embeddings"
    )


def _frame_notes(path: pathlib.Path, tokenizer: Tokenizer) -> list[str]:
  """Returns notes on the special tokens that the tokenizer adds."""
  before, after = (tokenizer.decode(ids, False) for ids in tokenizer.frame)
  notes = [
    f"its tokenizer adds {before or 'no token'} before a text and"
    f" {after or 'no token'} after it"
  ]
  fields = _tokenizer_fields(path)
  for name, adds in (("add_bos_token", before), ("add_eos_token", after)):
    if fields.get(name) not in (None, bool(adds)):
      notes.append(
        f"warning: {path / TOKENIZER_CONFIG} says {name}={fields[name]}, but"
        f" {TOKENIZER} decides, as in transformers 5 (set boundary to change"
        " it)"
      )
  return notes


def _chat_notes(path: pathlib.Path) -> Iterator[str]:
  """Yields a note on a chat template."""
  template = _tokenizer_fields(path).get("chat_template")
  if template or any(path.glob("chat_template.*")):
    yield (
      "the chat template is left out, also from exports; names of special"
      " tokens in a text, such as <|im_start|>, are text"
    )


def _tokenizer_fields(path: pathlib.Path) -> dict[str, Any]:
  """Reads a folder's tokenizer_config.json, or returns {}."""
  file = path / TOKENIZER_CONFIG
  return files.read_json(file, "the tokenizer's") if file.exists() else {}


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
