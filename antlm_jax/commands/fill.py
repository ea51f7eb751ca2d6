"""Fills the masks of a text.

antlm fill --checkpoint=RUN --text="The <mask> sat."
antlm fill --checkpoint=RUN --text="Once upon" --tokens=20 --temperature=0.8

For each mask of the text, it prints the candidates at the step that filled it.
The filled text follows. A terminal shows the text as it is filled.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence

from antlm_jax import cli, settings
from antlm_jax.data.tokenizer import MASK
from antlm_jax.errors import UserError
from antlm_jax.inference.filling import Filled, Filling, stream
from antlm_jax.inference.model import add_arguments, from_args

_CLEAR = "\r\x1b[K"  # removes the line from a terminal


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__, may_be_empty=("text",))
  add_arguments(parser)
  about = f"Text with one or more {MASK}, each for one token; see --tokens"
  parser.add_argument("--text", required=True, help=about)
  settings.add_arguments(parser, Filling)
  args = parser.parse_args(argv)
  how = settings.from_args(Filling, args)
  masks = args.text.count(MASK)
  if not masks + how.tokens:
    raise UserError(f"--text={args.text!a} holds no {MASK}: give --tokens, too")
  live = how.count == 1 and sys.stdout.isatty()
  every = 1 if live else settings.LARGEST
  for filled in stream(from_args(args), args.text, how, every):
    if live:
      line = " ".join(filled[0].text.replace(MASK, "_").split())
      print(_CLEAR + line[: shutil.get_terminal_size().columns - 1], end="")
      sys.stdout.flush()
  print(_CLEAR * live, end="")
  lines = ("\n".join(_lines(one, masks)) for one in filled)
  print("\n---\n".join(lines))


def _lines(filled: Filled, masks: int) -> Iterator[str]:
  """Yields the candidates of the text's own masks, and the text."""
  for number, mask in enumerate(filled.masks[:masks], start=1):
    if masks > 1 and mask.candidates:
      yield f"{MASK} {number}"
    for token, probability in mask.candidates:
      yield f"{probability:8.4f}  {token}"
  yield filled.text
