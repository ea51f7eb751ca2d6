"""Fills masks in a text.

antlm fill_mask --checkpoint=RUN --text="The <mask> sat."
"""

from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.inference.filling import MASK, Filling, fill_mask
from antlm_jax.inference.model import add_arguments, from_args


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(description=__doc__)
  add_arguments(parser)
  settings.add_arguments(parser, Filling)
  args = parser.parse_args(argv)
  filling = settings.from_args(Filling, args)
  loaded = from_args(args)
  filled = fill_mask(loaded, filling.text, filling.top)
  for number, candidates in enumerate(filled, start=1):
    if len(filled) > 1:
      print(f"{MASK} {number}")
    for token, probability in candidates:
      print(f"{probability:8.4f}  {token}")


if __name__ == "__main__":
  cli.run(main)
