"""Continues a prompt from left to right.

antlm generate --checkpoint=RUN --prompt="Once upon a time"

A single text is shown as it grows.
"""

import sys
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.inference import generation
from antlm_jax.inference.generation import Sampling
from antlm_jax.inference.model import add_arguments, from_args

_CUT = "\ufffd"  # shown for the first bytes of a character


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__, may_be_empty=("prompt",))
  add_arguments(parser)
  parser.add_argument("--prompt", required=True, help="Text to continue")
  settings.add_arguments(parser, Sampling)
  args = parser.parse_args(argv)
  how = settings.from_args(Sampling, args)
  loaded = from_args(args)
  longest = loaded.model.config.max_seq_len
  if len(generation.encode(loaded, args.prompt)) + how.tokens > longest:
    note = f"warning: texts stop at the model's max_seq_len={longest} tokens"
    print(note, file=sys.stderr)
  shown = 0
  for texts in generation.stream(loaded, args.prompt, how):
    if how.count == 1:
      whole = texts[0].rstrip(_CUT)
      print(whole[shown:], end="", flush=True)
      shown = max(shown, len(whole))
  print("\n---\n".join(texts)[shown:])
