"""Turns text into a prepared folder: documents, tokenizer, packed rows.

antlm prepare --text corpus/ --output prepared/
antlm prepare --verify --output prepared/
"""

from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.data.make_folder import Settings, prepare
from antlm_jax.data.prepared_folder import Prepared


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  parser = cli.Parser(
    description="Turn text into documents, a tokenizer and packed rows."
  )
  settings.add_arguments(parser, Settings)
  parser.add_argument(
    "--verify",
    action="store_true",
    help="Read all rows of the folder and compare them with their hashes",
  )
  args = parser.parse_args(argv)
  if not args.text and not args.verify:
    parser.error("give --text, or --verify")
  if args.text:
    wanted, tokenizer = settings.from_args(Settings, args), None
    if wanted.tokenizer and not wanted.tokenizer.endswith(".json"):
      from antlm_jax.hf import import_  # slow to import

      tokenizer = import_.start(wanted.tokenizer).meta.tokenizer
    prepare(wanted, tokenizer)
  if args.verify:
    Prepared.open(args.output).verify()
    print(f"{args.output} is as it was prepared")


if __name__ == "__main__":
  cli.run(main)
