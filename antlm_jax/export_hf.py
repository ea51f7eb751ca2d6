"""Writes a trained model as a folder of Hugging Face's transformers.

  antlm export --checkpoint=RUN --output=FOLDER

A llama opens without code of ours: causal as a Llama (AutoModelForCausalLM),
bidirectional as a EuroBERT (AutoModelForMaskedLM, AutoModel, ...). A modernbert
opens as a ModernBERT or as its decoder. LTG-BERT, and a EuroBERT that predicts
masked tokens one position before them, include code (trust_remote_code=True).
--as=both writes FOLDER/causal and FOLDER/bidirectional, the weights once.
--revisions writes FOLDER/main, the newest step, and a folder for each step of
the run's checkpoint.words: FOLDER/chck_1M, ..., BabyLM's names of revisions.

Only --repo uses the network.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.errors import UserError
from antlm_jax.hf import card, export, hub, weights
from antlm_jax.hf.architecture import ATTENTIONS
from antlm_jax.inference.model import Loaded, add_arguments, from_args, load
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(card.About):
  """The command's arguments, except the checkpoint and the attention."""

  output: str = setting(help="path to a new folder", read=cli.here)
  dtype: str = setting("float32", "dtype of weights", choices=weights.DTYPES)
  shard_gb: float = setting(5.0, "largest file, in GB", over=0, most=1e6)
  sentence_transformers: bool = setting(
    False, "add files of sentence-transformers: the mean over tokens"
  )
  revisions: bool = setting(False, "also export the steps of checkpoint.words")
  repo: str = setting("", "push to this repository of the Hub")


def _parser() -> cli.Parser:
  parser = cli.Parser(description=__doc__)
  add_arguments(parser)
  parser.add_argument(
    "--as",
    dest="attention",
    choices=(*ATTENTIONS, "both"),
    help="attention of the export (default: those of its training)",
  )
  settings.add_arguments(parser, Settings)
  return parser


def main(argv: Sequence[str]) -> None:
  """The command."""
  args = _parser().parse_args(argv)
  wanted = settings.from_args(Settings, args)
  export.check_new(wanted.output)  # before minutes of reading
  loaded = from_args(args)
  step = args.step and f"step-{args.step}"
  if not wanted.revisions:
    _export(loaded, args.attention, wanted, wanted.output, step)
    return
  steps = _steps(loaded)
  _export(loaded, args.attention, wanted, f"{wanted.output}/main", None)
  for name, path in steps.items():
    output = f"{wanted.output}/{name}"
    _export(load(path), args.attention, wanted, output, name)


def _steps(loaded: Loaded) -> dict[str, pathlib.Path]:
  """Returns the kept steps of `checkpoint.words`, by revision."""
  there = checkpoint.steps(loaded.run)
  names = loaded.milestones
  if not names or not there.keys() & names.values():
    raise UserError(
      f"{loaded.run} has no steps by words: train with"
      " --config.checkpoint.words=babylm, or 1M,2M and so on"
    )
  if lacking := [name for name, step in names.items() if step not in there]:
    print(f"left out, not kept: {', '.join(lacking)}")
  return {name: there[s] for name, s in names.items() if s in there}


def _export(
  loaded: Loaded,
  attention: str | None,
  wanted: Settings,
  output: str,
  revision: str | None,
) -> None:
  """Writes one model, and pushes it if --repo is given."""
  chosen = ATTENTIONS if attention == "both" else (attention,)
  if attention is None:
    chosen = export.trained_attentions(loaded)
  how = wanted.dtype, round(1e9 * wanted.shard_gb), wanted.sentence_transformers
  folders = export.export(loaded, output, chosen, *how, about=wanted)
  for path, attention in zip(folders, chosen, strict=True):
    opens = ", ".join(export.target_of(loaded, attention).classes)
    print(f"{path}: {attention}, opens by {opens}")
  if wanted.repo:
    hub.push(folders, wanted.repo, revision)


if __name__ == "__main__":
  cli.run(main)
