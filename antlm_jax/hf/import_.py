"""A folder of transformers, read as a checkpoint of ours."""

import dataclasses
import functools
import os
import pathlib
import shutil
from collections.abc import Callable

import jax

from antlm_jax import config as config_lib
from antlm_jax import models
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
from antlm_jax.training.checkpoint import Meta, Start
from antlm_jax.training.step import TrainState

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True)
class Imported:
  """A model of transformers as a checkpoint of ours."""

  weights: Callable[[], Params]  # reads them
  meta: Meta  # what a checkpoint says beside its arrays
  step: int  # 0 of a foreign one
  notes: tuple[str, ...]  # what a person should know

  @property
  def params(self) -> Params:
    """Its parameters, float32."""
    return self.weights()


def start(model: str) -> Start:
  """Returns what a run begins from: a checkpoint or a model of transformers."""
  return Foreign(model) if is_foreign(model) else Start(model)


class Foreign(Start):
  """A model of transformers that a run begins from, opened when first used."""

  @functools.cached_property
  def _found(self) -> Imported:
    return opened(self._path.removeprefix(hub.PREFIX))

  @property
  def name(self) -> str:
    """The model's name on the Hub, or the path to its folder."""
    # The run remembers it, wherever it resumes.
    name = self._path.removeprefix(hub.PREFIX)
    return hub.PREFIX + name if hub.is_name(name) else os.path.abspath(name)

  @property
  def meta(self) -> Meta:
    """The metadata of the checkpoint that the model would be."""
    return self._found.meta

  def restore(self, like: TrainState, with_optimizer: bool) -> TrainState:
    """Returns a state that begins with the model's parameters."""
    if with_optimizer:
      raise UserError(
        f"{self.name} has no optimizer's state: set init.optimizer=reset"
      )
    params = {
      path: jax.make_array_from_callback(
        value.shape, like.params[path].sharding, value.__getitem__
      )
      # Read anew, not kept: what is begun from stays with its run.
      for path, value in self._found.weights().items()
    }
    return checkpoint.complete(like, {"params": params})


def is_foreign(model: str | os.PathLike) -> bool:
  """Whether it is a model of transformers, by its folder or on the Hub."""
  name = os.fspath(model)
  if name.startswith(hub.PREFIX) or hub.is_name(name):
    return True
  # A run has a config.json, too.
  there = pathlib.Path(name)
  ours = checkpoint.steps(there) or (there / "params").is_dir()
  return (there / hf_config.CONFIG).is_file() and not ours


def load(model: str) -> Loaded:
  """Loads a run's model, or one of transformers, with all of its parameters.

  Raises:
    UserError: if it is neither, or cannot be read.
  """
  if not is_foreign(model):
    return model_lib.load(model)
  name = model.removeprefix(hub.PREFIX)
  found = read(name)
  meta = found.meta
  return Loaded(
    **vars(meta),
    path=pathlib.Path(name),
    step=found.step,
    model=models.build(meta.config.model, meta.tokenizer.vocab_size),
    params=found.params,
  )


def read(path: str | os.PathLike, boundary: str | None = None) -> Imported:
  """Reads a model folder, with its parameters; see `opened`."""
  found = opened(path, boundary)
  params = found.weights()  # raises now what is wrong with them
  return dataclasses.replace(found, weights=lambda: params)


def opened(path: str | os.PathLike, boundary: str | None = None) -> Imported:
  """Reads what a model folder says, but for its parameters.

  Args:
    path: Holds config.json, tokenizer.json and weights; or ORG/NAME, a model on
      the Hub.
    boundary: Which special tokens stand around a text, one of
      `packing.BOUNDARIES`; what the folder's tokenizer adds by default.

  Raises:
    UserError: if it is no such folder, or not a model that we compute.
  """
  name = os.fspath(path)
  path = hub.folder(name) if hub.is_name(name) else pathlib.Path(name)
  fields, tensors = hf_config.fields(path), weights.read(path)
  layout = layouts.layout(tensors)
  tensors = layout.tensors_of(tensors)
  described = hf_config.describe(
    path / hf_config.CONFIG, layout.fields_of(fields)
  )
  settings = dict(described.settings)
  rows = settings.pop("vocab_size")
  try:
    model = models.build({"name": described.encoder, **settings}, rows)
  except UserError as error:
    raise UserError(f"{path / hf_config.CONFIG}: {error}") from error
  tokenizer = Tokenizer.load(path / TOKENIZER)
  _check_tokenizer(path, tokenizer, rows, described.special)
  unused = ARCHITECTURES[described.encoder].unused
  params = functools.partial(
    weights.params, tensors, described.weights, model.shapes, unused
  )
  if (path / NATIVE).exists():
    return _native(path, params, model, boundary)
  tokenizer, notes = _with_names(path, tokenizer, rows)
  config = config_lib.default(described.encoder)
  config.model.update(settings)
  if hub.is_name(name):
    config.init.checkpoint = hub.PREFIX + name
  # What the weights were trained for, as far as their form tells.
  config.curriculum = layout.curriculum or f"1{described.objective}"
  notes += layout.notes
  boundary = boundary or layout.boundary
  if not boundary:
    boundary = framing.OWN
    notes += _frame(path, tokenizer)
  if tokenizer.mask_id is None:
    notes.append(
      f"the tokenizer has no {MASK}: training that needs one adds it, its"
      " embedding the mean of the others"
    )
  meta = Meta(
    *(config.lock(), tokenizer, boundary),
    data="",
    ends=hf_config.ends(path, fields, rows),
    row_tokens=model.config.max_seq_len,  # as far as its maker says
  )
  return Imported(params, meta, 0, tuple(notes))


def _check_tokenizer(path, tokenizer: Tokenizer, rows: int, special) -> None:
  """Refuses a tokenizer that is not the model's."""
  size = tokenizer.vocab_size
  if size > rows:
    raise UserError(
      f"{path}: tokenizer.json has {size:,} tokens, but config.json says"
      f" vocab_size={rows:,}"
    )
  # Defaults of transformers that were written out may be of no token at all.
  for role in ("bos", "eos"):
    if size <= special.get(role, 0) < rows:
      raise UserError(
        f"{path}: config.json says {role}_token_id={special[role]}, which"
        f" tokenizer.json has not: it ends at {size - 1}"
      )
  mask = special.get("mask", rows)
  if mask < size and tokenizer.special[mask] and tokenizer.mask_id is None:
    raise UserError(
      f"{path}: the mask is token {mask}, by a name that is not known here:"
      f" call it {MASK} in tokenizer.json"
    )


def _native(
  path: pathlib.Path,
  params: Callable[[], Params],
  model: models.Model,
  boundary: str | None,
) -> Imported:
  """Gives back the checkpoint that export_hf wrote."""
  fields = files.read_json(path / NATIVE, "what export_hf wrote of the run:")
  try:
    meta = Meta.from_json(fields)
    step = int(fields["step"])
    if meta.boundary not in packing.BOUNDARIES:
      raise ValueError(f"boundary {meta.boundary!r} is unknown")
  except (KeyError, ValueError, TypeError, AttributeError) as error:
    raise UserError(f"{path / NATIVE} is not whole: {error}") from error
  own = models.build(meta.config.model, meta.tokenizer.vocab_size).config
  shared = ARCHITECTURES[meta.config.model.name].settings
  changed = [n for n in shared if getattr(own, n) != getattr(model.config, n)]
  if changed:
    raise UserError(
      f"{path}: {NATIVE} and config.json disagree on {', '.join(changed)}:"
      f" remove {NATIVE} to go by config.json"
    )
  if boundary:
    meta = dataclasses.replace(meta, boundary=boundary)
  return Imported(params, meta, step, ())


def _with_names(
  path: pathlib.Path, tokenizer: Tokenizer, rows: int
) -> tuple[Tokenizer, list[str]]:
  """Gives every row of the embedding a token; a note says so."""
  known = tokenizer.vocab_size
  if known == rows:
    return tokenizer, []
  note = (
    f"{rows - known} rows of the embedding have no token: <no_token_{known}>"
  )
  try:
    names = [f"<no_token_{i}>" for i in range(known, rows)]
    return tokenizer.extended(names), [f"{note}, ..."]
  except UserError as error:
    raise UserError(f"{path / TOKENIZER}: {error}") from error


def _frame(path: pathlib.Path, tokenizer: Tokenizer) -> list[str]:
  """Says what the tokenizer adds, and where that is not what its config says.

  As in transformers 5, which goes by tokenizer.json.
  """
  before, after = (
    tokenizer.decode(ids, skip_special=False) for ids in tokenizer.frame
  )
  notes = [f"texts are framed by its tokenizer: {before or 'nothing'} before"]
  notes[0] += f", {after or 'nothing'} after"
  file = path / TOKENIZER_CONFIG
  fields = files.read_json(file, "the tokenizer's") if file.exists() else {}
  for name, adds in (("add_bos_token", before), ("add_eos_token", after)):
    if fields.get(name) not in (None, bool(adds)):
      notes.append(
        f"{file} says {name}={fields[name]}, but {TOKENIZER} decides, as in"
        " transformers 5 (--boundary changes it)"
      )
  return notes


def write(
  imported: Imported, workdir: str | os.PathLike, task: FineTuned | None = None
) -> pathlib.Path:
  """Writes a run of one checkpoint, and its tokenizer beside it.

  Returns:
    The checkpoint's folder.

  Raises:
    UserError: if the workdir holds a run already, or cannot be written.
  """
  workdir = pathlib.Path(workdir).absolute()
  check_workdir(workdir)
  path = workdir / checkpoint.FOLDER / str(imported.step)
  model_lib.write(path, imported.step, imported.params, imported.meta, task)
  try:
    files.write_text(workdir / TOKENIZER, imported.meta.tokenizer.to_json())
  except BaseException:  # the same command is to work when there is room again
    shutil.rmtree(path)
    raise
  return path


def check_workdir(workdir: str | os.PathLike) -> None:
  """Fails where a run or a model is, before any work is done.

  Raises:
    UserError: if the workdir is not free.
  """
  workdir = pathlib.Path(workdir)
  if checkpoint.steps(workdir):
    raise UserError(f"{workdir} holds a run: give another --workdir")
  if (workdir / TOKENIZER).exists():
    raise UserError(
      f"{workdir} holds a {TOKENIZER}: give another --workdir, or remove it"
    )
