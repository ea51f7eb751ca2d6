"""Continues a prompt, left to right.

antlm generate --checkpoint=RUN --prompt="Once upon a time"

One continuation is shown as it grows.
"""

import sys
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.inference import generation
from antlm_jax.training import checkpoint

_CUT = "\ufffd"  # what the first bytes of a character are shown as


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(
    description=__doc__,
    may_be_empty=("prompt",),
  )
  checkpoint.add_arguments(parser)
  parser.add_argument("--prompt", required=True, help="the text to continue")
  settings.add_arguments(parser, generation.Sampling)
  args = parser.parse_args(argv)
  sampling = settings.from_args(generation.Sampling, args)
  loaded = checkpoint.from_args(args)
  longest = loaded.model.config.max_seq_len
  start = generation.encode(loaded, args.prompt)
  if len(start) + sampling.tokens > longest:
    note = f"note: texts stop at the model's max_seq_len={longest} tokens"
    print(note, file=sys.stderr)
  if sampling.count == 1:
    _show(generation.stream(loaded, args.prompt, **vars(sampling)))
  else:
    texts = generation.generate(loaded, args.prompt, **vars(sampling))
    print("\n---\n".join(texts))


def _show(growing) -> None:
  """Prints a text as it grows."""
  text, shown = "", 0
  for (text,) in growing:
    whole = text.rstrip(_CUT)
    print(whole[shown:], end="", flush=True)
    shown = max(shown, len(whole))
  print(text[shown:])


if __name__ == "__main__":
  cli.run(main)
