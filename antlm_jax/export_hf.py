"""Writes a trained model as a folder of Hugging Face's transformers.

  python -m antlm_jax.export_hf --checkpoint=RUN --output=FOLDER

A llama encoder needs no code of ours there: read causally it is a Llama
(AutoModelForCausalLM), bidirectionally a EuroBERT (AutoModelForMaskedLM,
AutoModel, ...). LTG-BERT, and a EuroBERT that predicts masked tokens one
position before them, bring their code along (trust_remote_code=True).
--as=both writes FOLDER/causal and FOLDER/bidirectional, the weights once.

Nothing goes over the network without --repo.
"""

import dataclasses
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.hf import export, weights
from antlm_jax.hf.architecture import ATTENTIONS
from antlm_jax.settings import setting
from antlm_jax.training import checkpoint


@dataclasses.dataclass(frozen=True)
class Settings:
  """What the command takes, beside the checkpoint and the attention."""

  output: str = setting(help="a folder, which must not exist", read=cli.here)
  dtype: str = setting("float32", "of the weights", choices=weights.DTYPES)
  shard_gb: float = setting(5.0, "GB of a file, at most", over=0, most=1e6)
  sentence_transformers: bool = setting(
    False, "also as a sentence-transformers model, by the mean over tokens"
  )
  repo: str = setting("", "also push it to this repository of the Hub")


def _parser() -> cli.Parser:
  parser = cli.Parser(description=__doc__)
  checkpoint.add_arguments(parser)
  parser.add_argument(
    "--as",
    dest="attention",
    choices=(*ATTENTIONS, "both"),
    help="its attention there; as it was trained by default",
  )
  settings.add_arguments(parser, Settings)
  return parser


def main(argv: Sequence[str]) -> None:
  """The command."""
  args = _parser().parse_args(argv)
  wanted = settings.from_args(Settings, args)
  export.check_new(wanted.output)  # before minutes of reading
  loaded = checkpoint.from_args(args)
  chosen = ATTENTIONS if args.attention == "both" else (args.attention,)
  if args.attention is None:
    chosen = export.trained_attentions(loaded)
  folders = export.export(
    loaded,
    wanted.output,
    chosen,
    wanted.dtype,
    round(wanted.shard_gb * 10**9),
    wanted.sentence_transformers,
  )
  for path, attention in zip(folders, chosen, strict=True):
    opens = ", ".join(export.target_of(loaded, attention).classes)
    print(f"{path}: {attention}, opens by {opens}")
  if wanted.repo:
    export.push(folders, wanted.repo, args.step)


if __name__ == "__main__":
  cli.run(main)
