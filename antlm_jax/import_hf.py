"""Makes a checkpoint of a transformers folder, to continue or evaluate.

  python -m antlm_jax.import_hf --model=FOLDER --workdir=RUN

Reads Llama, EuroBERT and what export_hf wrote, from safetensors. RUN is then a
run like any other: evaluate it, generate with it, or continue it with any
curriculum, on data prepared with its tokenizer:

  python -m antlm_jax.prepare --tokenizer=RUN/tokenizer.json ...
  python -m antlm_jax.train --config=configs/continued.py:checkpoint=RUN ...
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from antlm_jax import checkpoint, cli, files, models, monitor, reading
from antlm_jax import config as config_lib
from antlm_jax.checkpoint import Meta
from antlm_jax.cli import UserError
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.export_hf import NATIVE
from antlm_jax.hf import configs, folder, names
from antlm_jax.models import Params

MASK = "<mask>"
# What the weights were trained for, where only the architecture tells.
_CURRICULA = {"llama": "1C", "eurobert": "1M", "mistral": "1C"}


@dataclasses.dataclass(frozen=True)
class Imported:
  """A model of transformers as a checkpoint of ours.

  Attributes:
    params: Its parameters, float32.
    meta: What a checkpoint says beside its arrays.
    step: Its step; 0 of a foreign one.
    notes: What a person should know.
  """

  params: Params
  meta: Meta
  step: int
  notes: tuple[str, ...]


def read(path: str | os.PathLike, boundary: str | None = None) -> Imported:
  """Reads a model folder.

  Args:
    path: Holds config.json, tokenizer.json and safetensors.
    boundary: Which special tokens stood around documents in training (see
      `antlm_jax.data.packing`); guessed from the tokenizer by default.

  Raises:
    UserError: if it is no such folder, or not a model that we compute.
  """
  path = pathlib.Path(path)
  encoder, settings = configs.read(path)
  architecture = names.ARCHITECTURES[encoder]
  rows = settings.pop("vocab_size")
  model = models.build({"name": encoder, **settings}, rows)
  weights = folder.Weights(path)
  params = folder.params(weights, architecture, model.shapes)
  if (path / NATIVE).exists():
    return _native(path, params, model)
  tokenizer = Tokenizer.load(path / "tokenizer.json")
  if tokenizer.vocab_size > rows:
    raise UserError(
      f"{path}: tokenizer.json has {tokenizer.vocab_size:,} tokens, but"
      f" config.json says vocab_size={rows:,}"
    )
  tokenizer, params, notes = _with_mask(tokenizer, params, rows)
  config = config_lib.default(encoder)
  config.model.update(settings)
  kind = configs.read_json(path / configs.CONFIG, "")["model_type"]
  config.curriculum = _CURRICULA[kind]
  if boundary is None:
    boundary = _boundary(tokenizer)
    notes += (f"texts are framed as with --boundary={boundary}, by a guess",)
  meta = Meta(config.lock(), tokenizer, boundary, data="")
  return Imported(params, meta, 0, notes)


def _native(
  path: pathlib.Path, params: Params, model: models.Model
) -> Imported:
  """Gives back the checkpoint that export_hf wrote."""
  fields = configs.read_json(path / NATIVE, "incomplete")
  try:
    meta = Meta.from_json(fields)
    step = int(fields["step"])
  except (KeyError, ValueError, TypeError) as error:
    raise UserError(f"{path / NATIVE} is not whole: {error}") from error
  own = models.build(meta.config.model, meta.tokenizer.vocab_size)
  if own.shapes != model.shapes:
    raise UserError(f"{path}: {NATIVE} and config.json are of different models")
  return Imported(params, meta, step, ())


def _with_mask(tokenizer: Tokenizer, params: Params, rows: int):
  """Gives every row a token, and the tokenizer a mask.

  The mask's row is the mean of the others: its logit is then at most the
  logarithm of the mean of theirs' exponentials, so no loss in nats changes by
  more than log(1 + 1/V).

  Returns:
    Tokenizer, parameters and what to say.
  """
  known, notes = tokenizer.vocab_size, []
  added = []
  if tokenizer.mask_id is None:
    added.append(MASK)
    notes.append(
      f"the tokenizer had no mask: {MASK} is token {known}, its embedding the"
      " mean of the others"
    )
  spare = rows - known - len(added)
  if spare > 0:
    notes.append(f"{spare} rows of the embedding have no token: <unused0>, ...")
    added += [f"<unused{i}>" for i in range(spare)]
  if not added:
    return tokenizer, params, ()
  out = dict(params)
  if tokenizer.mask_id is None:
    for path, axis in (("embedding", 0), ("head/kernel", 1), ("head/bias", 0)):
      if path in out:
        out[path] = _with_mean(out[path], axis, known)
  return tokenizer.extended(added), out, tuple(notes)


def _with_mean(value: np.ndarray, axis: int, at: int) -> np.ndarray:
  """Puts the mean of the first rows after them, in place of the next or new."""
  value = np.moveaxis(value, axis, 0)
  mean = value[:at].mean(axis=0, keepdims=True, dtype=np.float64)
  value = np.concatenate([value[:at], mean.astype(np.float32), value[at + 1 :]])
  return np.moveaxis(value, 0, axis)


def _boundary(tokenizer: Tokenizer) -> str:
  if tokenizer.bos_id is not None and tokenizer.eos_id is not None:
    return "bos_eos"
  return "none" if tokenizer.eos_id is None else "eos"


def write(imported: Imported, workdir: str | os.PathLike) -> pathlib.Path:
  """Writes a run of one checkpoint, and its tokenizer beside it.

  Returns:
    The checkpoint's folder.

  Raises:
    UserError: if the workdir holds a run already, or cannot be written.
  """
  workdir = pathlib.Path(workdir).absolute()
  if checkpoint.steps(workdir):
    raise UserError(f"{workdir} holds a run: give another --workdir")
  path = workdir / checkpoint.FOLDER / str(imported.step)
  checkpoint.write(path, imported.step, imported.params, imported.meta)
  files.write_text(
    workdir / "tokenizer.json", imported.meta.tokenizer.to_json()
  )
  return path


def _parser() -> cli.Parser:
  parser = cli.Parser(prog="python -m antlm_jax.import_hf", description=__doc__)
  add = parser.add_argument
  add("--model", required=True, help="config.json, tokenizer.json, safetensors")
  add("--workdir", required=True, help="receives the checkpoint")
  add(
    "--boundary",
    choices=tuple(reading.FRAMES),
    help="special tokens around a text; guessed from the tokenizer by default",
  )
  return parser


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parser().parse_args(argv)
  if checkpoint.steps(args.workdir):  # before minutes of reading
    raise UserError(f"{args.workdir} holds a run: give another --workdir")
  imported = read(args.model, args.boundary)
  path = write(imported, args.workdir)
  config = imported.meta.config.model
  size = sum(value.size for value in imported.params.values())
  print(f"{config.name} of {monitor.quantity(size)} parameters: {path}")
  for note in imported.notes:
    print(f"note: {note}")


if __name__ == "__main__":
  cli.run(main)
