"""Continues a prompt, from left to right or by masked diffusion.

antlm generate --checkpoint=RUN --prompt="Once upon a time"
antlm generate --checkpoint=RUN --prompt="Once" --mode=diffusion --steps=8
antlm generate --checkpoint=RUN --text="Once <mask> <mask> ." --mode=diffusion

A single text is shown as it grows. On a terminal, diffusion shows it as it is
filled.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence

from antlm_jax import cli, settings
from antlm_jax.data.tokenizer import MASK
from antlm_jax.errors import UserError
from antlm_jax.inference import generation, unmasking
from antlm_jax.inference.generation import Sampling
from antlm_jax.inference.model import add_arguments, from_args
from antlm_jax.inference.unmasking import Unmasking

_CUT = "\ufffd"  # what the first bytes of a character are shown as


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__, may_be_empty=("prompt",))
  add_arguments(parser)
  text = parser.add_mutually_exclusive_group(required=True)
  text.add_argument("--prompt", help="Text to continue")
  text.add_argument(
    "--text",
    help=f"Text with one or more {MASK}, each for one token, for diffusion",
  )
  parser.add_argument(
    "--mode",
    choices=("causal", "diffusion"),
    default="causal",
    help="Draw tokens from left to right, or fill masks in few steps",
  )
  settings.add_arguments(parser, Unmasking)
  args = parser.parse_args(argv)
  how = settings.from_args(Unmasking, args)
  if args.mode == "causal":
    sampling = settings.from_args(Sampling, args)
    if args.text is not None or how != Unmasking(**vars(sampling)):
      raise UserError(
        "--text, --steps, --order and --block_length are for --mode=diffusion"
      )
    loaded = from_args(args)
    longest = loaded.model.config.max_seq_len
    start = generation.encode(loaded, args.prompt)
    if len(start) + how.tokens > longest:
      note = f"note: texts stop at the model's max_seq_len={longest} tokens"
      print(note, file=sys.stderr)
    growing = generation.stream(loaded, args.prompt, **vars(sampling))
    return _print(growing, how.count, _show_growing)
  if args.text is not None and MASK not in args.text:
    raise UserError(f"--text={args.text!a} holds no {MASK}")
  text = args.prompt if args.text is None else args.text
  filling = unmasking.stream(from_args(args), text, **vars(how))
  return _print(filling, how.count, _show_filling)


def _print(growing: Iterable[list[str]], count: int, show: Callable) -> None:
  """Prints one text as it grows, or several texts when they are complete."""
  if count == 1:
    return show(text for (text,) in growing)
  *_, texts = growing
  print("\n---\n".join(texts))


def _show_growing(states: Iterable[str]) -> None:
  text, shown = "", 0
  for text in states:
    whole = text.rstrip(_CUT)
    print(whole[shown:], end="", flush=True)
    shown = max(shown, len(whole))
  print(text[shown:])


def _show_filling(states: Iterable[str]) -> None:
  text, start = "", "\r\x1b[K" if sys.stdout.isatty() else ""
  for text in states:
    if start:  # on one line
      line = " ".join(text.replace(MASK, "_").split())
      print(start + line[: shutil.get_terminal_size().columns - 1], end="")
      sys.stdout.flush()
  print(start + text)


if __name__ == "__main__":
  cli.run(main)
