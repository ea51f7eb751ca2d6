"""Turns text into a prepared folder: documents, tokenizer, packed rows.

antlm prepare --text corpus/ --output prepared/
antlm prepare --verify --output prepared/
"""

import argparse
from collections.abc import Sequence

from antlm_jax import cli, settings
from antlm_jax.data.make_folder import Settings, is_prepared, prepare
from antlm_jax.data.prepared_folder import Prepared
from antlm_jax.data.tokenizer import Tokenizer


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parse(argv)
  if args.text:
    prepare(*_settings(args))
  if args.verify:
    Prepared.open(args.output).verify()
    print(f"{args.output} is as it was prepared")


def done(argv: Sequence[str]) -> bool:
  """Returns whether the folder was made with these settings; reads no text.

  Raises:
    UserError: The arguments or the folder's files cannot be read.
  """
  return is_prepared(*_settings(_parse(argv)))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
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
  return args


def _settings(args: argparse.Namespace) -> tuple[Settings, Tokenizer | None]:
  """Returns the settings, and their tokenizer if it is a model's."""
  wanted = settings.from_args(Settings, args)
  if not wanted.tokenizer or wanted.tokenizer.endswith(".json"):
    return wanted, None
  from antlm_jax.hf import import_  # slow to import

  return wanted, import_.start(wanted.tokenizer).meta.tokenizer


if __name__ == "__main__":
  cli.run(main)
