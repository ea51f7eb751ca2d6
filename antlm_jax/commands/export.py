"""Writes a trained model as a folder of Hugging Face's transformers.

  antlm export --checkpoint=RUN --output=FOLDER

A llama opens without code of ours: causal as a Llama (AutoModelForCausalLM),
bidirectional as a EuroBERT (AutoModelForMaskedLM, AutoModel, ...). A modernbert
opens as a ModernBERT or as its decoder, and a bidirectional ultrabert as an
UltraBERT. LTG-BERT, and a EuroBERT that predicts
masked tokens one position before them, include code (trust_remote_code=True).
--as=both writes FOLDER/causal and FOLDER/bidirectional, the weights once.
--revisions writes the newest step to FOLDER/main. It writes each step of
checkpoint.words to a folder with BabyLM's name, such as FOLDER/chck_1M.

Only --repo, and a checkpoint in a bucket (gs://), use the network.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Annotated

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.hf import export as export_lib
from antlm_jax.hf import hub, weights
from antlm_jax.hf.architecture import ATTENTIONS
from antlm_jax.hf.export import Exported
from antlm_jax.inference import model as model_lib
from antlm_jax.inference.model import Loaded, ModelOrPath, open_model
from antlm_jax.runtime import files, progress
from antlm_jax.settings import PythonOnly, argument


@settings.checked
def export(
  model: ModelOrPath[Loaded],
  output: files.LocalPath,
  *,
  attention: Annotated[
    str | None, argument("--as", choices=(*ATTENTIONS, "both"))
  ] = None,
  dtype: Annotated[str, argument(choices=weights.DTYPES)] = "float32",
  shard_gb: Annotated[float, argument(over=0, most=1e6)] = 5.0,
  sentence_transformers: bool = False,
  revisions: bool = False,
  repo: str = "",
  private: bool = False,
  license: str = "",
  language: Sequence[str] = (),
  base_model: str = "",
  step: int | None = None,
  quiet: PythonOnly[bool] = False,
) -> list[Exported]:
  """Writes a trained model as folders of Hugging Face's transformers.

  Args:
    model: A model, a run, or a path to one; a fine-tuned model keeps its head.
    output: Path to a new folder.
    attention: Attention of the export; by default those of its training.
    dtype: Data type of the weights.
    shard_gb: Largest size of a weights file, in GB.
    sentence_transformers: Add the files of sentence-transformers, which average
      over tokens, also those around a text. An embedder always has them.
    revisions: Also export the steps that `checkpoint.words` saved.
    repo: Repository of the Hub to push to, USER/NAME.
    private: Make a new repository private.
    license: License name on the Hub for the card, such as apache-2.0.
    language: Languages of the text for the card, such as en,de.
    base_model: Hub name of the model from which training began.
    step: Step of the run; by default the newest.
    quiet: Show nothing.

  Raises:
    UserError: The output exists, transformers has no such model, the run has no
      steps by words, or private lacks a repo.
  """
  export_lib.check_new(output)  # before minutes of reading
  if private and not repo:
    raise UserError("private is for a repository of the Hub: give repo, too")
  loaded = open_model(model, step)
  attentions = ATTENTIONS if attention == "both" else (attention,)
  facts = {
    "license": license,
    # Python may give en,de as one text, too.
    "language": [name for text in language for name in text.split(",")],
    "base_model": base_model,
  }
  write = functools.partial(
    export_lib.export_model,
    attentions=() if attention is None else attentions,
    dtype=dtype,
    shard_bytes=round(1e9 * shard_gb),
    sentences=sentence_transformers,
    facts={name: value for name, value in facts.items() if value},
  )
  with progress.quietly(quiet):
    if revisions:
      exports = _write_revisions(loaded, output, write)
    else:
      exports = {f"step-{step}" if step else None: write(loaded, output)}
    written = [folder for folders in exports.values() for folder in folders]
    for folder in written:
      progress.say(folder.about)
    if repo:
      paths = {x: [y.path for y in exports[x]] for x in exports}
      hub.push(paths, repo, private)
    return written


def _write_revisions(
  loaded: Loaded,
  output: files.LocalPath,
  write: Callable[[Loaded, files.Path], list[Exported]],
) -> dict[str | None, list[Exported]]:
  """Writes the newest step and those of `checkpoint.words`, or nothing.

  Returns the folders by revision; the newest step has None.
  """
  revisions = model_lib.revisions(loaded)
  target = pathlib.Path(output).absolute()
  with files.replacing(target) as aside:
    exports: dict[str | None, list[Exported]] = {
      None: write(loaded, aside / "main")
    }
    for name, path in revisions.items():
      exports[name] = write(model_lib.load(path), aside / name)
  return {
    revision: [
      dataclasses.replace(folder, path=target / folder.path.relative_to(aside))
      for folder in folders
    ]
    for revision, folders in exports.items()
  }


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  cli.call_with_arguments(export, argv, __doc__)
