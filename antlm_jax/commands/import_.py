"""Makes a checkpoint of a transformers model, to continue or evaluate.

  antlm import --model=FOLDER --workdir=RUN
  antlm import --model=ORG/NAME --workdir=RUN
  antlm import --model=FILE.gguf --workdir=RUN

Reads Llama, Mistral, Qwen2, Qwen3, Gemma 3, BERT, RoBERTa, XLM-R, EuroBERT,
UltraBERT, ModernBERT and its decoder. Also reads the LTG-BERT that antlm
exports, and the published LTG-BERT and GPT-BERT. You can evaluate RUN, generate
with it, or continue it with any curriculum. Prepare data with its tokenizer:

  antlm prepare --tokenizer=RUN/tokenizer.json ...
  antlm train --config=continued:model=RUN ...
"""

import pathlib
from collections.abc import Sequence
from typing import Annotated

from antlm_jax import cli, settings, units
from antlm_jax.data import packing
from antlm_jax.errors import UserError
from antlm_jax.hf import import_
from antlm_jax.inference.model import Loaded, load
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, argument


@settings.checked
def import_model(
  model: files.Path,
  workdir: files.LocalPath,
  *,
  boundary: Annotated[
    str | None, argument(choices=tuple(packing.BOUNDARIES))
  ] = None,
  quiet: PythonOnly[bool] = False,
) -> Loaded:
  """Makes a run of a transformers model, and returns it loaded.

  Args:
    model: Path to its folder, its GGUF file, or its name on the Hub, ORG/NAME.
    workdir: Path to the new run.
    boundary: Special tokens around a text; by default those of its tokenizer.
    quiet: Do not print notes on the model.

  Raises:
    UserError: There is no such model, antlm_jax cannot compute it, or the run
      exists.
  """
  import_.check_workdir(workdir)
  if import_.is_own(pathlib.Path(model)):
    raise UserError(f"{model} is a run of antlm: it needs no import")
  imported = import_.Imported(model, boundary)
  path = import_.write_imported_run(imported, workdir)
  with progress.quietly(quiet):
    for note in imported.notes:
      progress.say(note)
  return load(path)


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  loaded = cli.call_with_arguments(import_model, argv, __doc__)
  size = units.quantity(loaded.model.size)
  print(f"{loaded.config.model.name} of {size} parameters: {loaded.path}")
