"""Continues a prompt from left to right.

antlm generate --checkpoint=RUN --prompt="Once upon a time"

A single text is shown as it grows.
"""

import sys
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.inference import generation
from antlm_jax.inference.generation import generate
from antlm_jax.inference.model import load

_CUT = "\ufffd"  # shown for the first bytes of a character


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  arguments = cli.parsed(generate, argv, __doc__)
  model = load(arguments.pop("model"), arguments.pop("step"))
  longest = model.model.config.max_seq_len
  prompt = generation.encode_prompt(model, arguments["prompt"])
  if len(prompt) + arguments["tokens"] > longest:
    note = f"warning: texts stop at the model's max_seq_len={longest} tokens"
    print(note, file=sys.stderr)
  shown = 0

  def show(texts: list[str]) -> None:
    nonlocal shown
    text = texts[0].rstrip(_CUT)
    print(text[shown:], end="", flush=True)
    shown = max(shown, len(text))

  single = arguments["count"] == 1
  texts = generate(model, **arguments, watch=show if single else None)
  print("\n---\n".join(texts)[shown:])
