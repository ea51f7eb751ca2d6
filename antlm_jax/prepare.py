"""Turns text into a prepared folder: documents, tokenizer, packed rows.

antlm prepare --text corpus/ --output prepared/
antlm prepare --verify --output prepared/
"""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator, Sequence

from antlm_jax import cli, settings
from antlm_jax.data.make_folder import Settings, prepare
from antlm_jax.data.prepared_folder import Prepared
from antlm_jax.errors import UserError


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
    with _with_tokenizer(settings.from_args(Settings, args)) as wanted:
      prepare(wanted)
  if args.verify:
    Prepared.open(args.output).verify()
    print(f"{args.output} is as it was prepared")


@contextlib.contextmanager
def _with_tokenizer(wanted: Settings) -> Iterator[Settings]:
  """Makes a file of a model's tokenizer, where a model is named."""
  if not wanted.tokenizer or wanted.tokenizer.endswith(".json"):
    yield wanted
    return
  from antlm_jax.hf import import_  # slow to import

  tokenizer = import_.start(wanted.tokenizer).meta.tokenizer
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "tokenizer.json")
    path.write_text(tokenizer.to_json(), "utf-8")
    try:
      yield dataclasses.replace(wanted, tokenizer=str(path))
    except UserError as error:  # what was asked for, not where it lay
      text = str(error).replace(str(path), wanted.tokenizer)
      raise UserError(text) from error


if __name__ == "__main__":
  cli.run(main)
