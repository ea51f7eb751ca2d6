"""Continues a prompt, left to right.

python -m antlm_jax.generate --checkpoint=RUN --prompt="Once upon a time"
"""

import sys
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.inference import generation
from antlm_jax.training import checkpoint


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(
    prog="python -m antlm_jax.generate",
    description=__doc__,
    may_be_empty=("prompt",),
  )
  checkpoint.add_arguments(parser)
  parser.add_argument("--prompt", required=True, help="the text to continue")
  settings.add_arguments(parser, generation.Sampling)
  args = parser.parse_args(argv)
  sampling = settings.from_args(generation.Sampling, args)
  loaded = checkpoint.from_args(args)
  texts = generation.generate(loaded, args.prompt, **vars(sampling))
  longest = loaded.model.config.max_seq_len
  start = generation.encode(loaded, args.prompt)
  if len(start) + sampling.tokens > longest:
    note = f"note: texts stop at the model's max_seq_len={longest} tokens"
    print(note, file=sys.stderr)
  print("\n---\n".join(texts))


if __name__ == "__main__":
  cli.run(main)
