"""Turns text into a prepared folder: documents, tokenizer, packed rows.

antlm prepare --text corpus/ --output prepared/
antlm prepare --verify --output prepared/
"""

from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.data.preparation import Settings, prepare
from antlm_jax.data.prepared import Prepared


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(
    description="Turns text into documents, a tokenizer and packed rows.",
  )
  settings.add_arguments(parser, Settings)
  parser.add_argument(
    "--verify",
    action="store_true",
    help="read all rows of the folder and compare it with its hashes",
  )
  args = parser.parse_args(argv)
  if not args.text and not args.verify:
    parser.error("give --text, or --verify")
  if args.text:
    prepare(settings.from_args(Settings, args))
  if args.verify:
    Prepared.open(args.output).verify()
    print(f"{args.output} is as it was prepared")


if __name__ == "__main__":
  cli.run(main)
