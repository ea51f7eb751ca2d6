"""Makes a checkpoint of a transformers model, to continue or evaluate.

  antlm import --model=FOLDER --workdir=RUN
  antlm import --model=ORG/NAME --workdir=RUN

Reads a Llama, Mistral, Qwen2 or Qwen3, Gemma 3, EuroBERT, ModernBERT or its
decoder, our LTG-BERT, or the LTG-BERT and GPT-BERT of their authors. Evaluate
RUN, generate with it, or continue it with any curriculum, on data prepared with
its tokenizer:

  antlm prepare --tokenizer=RUN/tokenizer.json ...
  antlm train --config=continued:model=RUN ...
"""

from collections.abc import Sequence

from antlm_jax import cli, units
from antlm_jax.data import packing
from antlm_jax.hf import import_


def main(argv: Sequence[str]) -> None:
  """The command."""
  parser = cli.Parser(description=__doc__)
  add = parser.add_argument
  add("--model", required=True, help="path to a folder, or a name on the Hub")
  add("--workdir", type=cli.here, required=True, help="path to the new run")
  add(
    "--boundary",
    choices=tuple(packing.BOUNDARIES),
    help="special tokens around a text (default: those of its tokenizer)",
  )
  args = parser.parse_args(argv)
  import_.check_workdir(args.workdir)
  imported = import_.read(args.model, args.boundary)
  path = import_.write(imported, args.workdir)
  size = sum(value.size for value in imported.params.values())
  name = imported.meta.config.model.name
  print(f"{name} of {units.quantity(size)} parameters: {path}")
  for note in imported.notes:
    print(f"note: {note}")


if __name__ == "__main__":
  cli.run(main)
