"""Turns text into a prepared folder: documents, tokenizer, packed rows.

antlm prepare --text corpus/ --output prepared/
antlm prepare --verify --output prepared/
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence

from antlm_jax import cli, settings
from antlm_jax.data import in_memory, make_folder
from antlm_jax.data.make_folder import Preparation
from antlm_jax.data.prepared_folder import Prepared
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.inference import inputs
from antlm_jax.runtime import files, progress

Text = files.Path | Iterable[str] | Sequence[pathlib.Path]


def prepare(
  text: Text,
  output: files.Path | None = None,
  *,
  dev: Text = (),
  column: str = Preparation.column,
  tokenizer: files.Path | Tokenizer | None = None,
  vocab_size: int = Preparation.vocab_size,
  kind: str = Preparation.kind,
  seq_len: int = Preparation.seq_len,
  packing: str = Preparation.packing,
  documents: str = Preparation.documents,
  boundary: str = Preparation.boundary,
  dev_share: float = Preparation.dev_share,
  share: float = Preparation.share,
  seed: int = Preparation.seed,
  tasks: int | None = None,
  task: int | None = None,
  quiet: bool = False,
) -> Prepared | None:
  """Turns text into a tokenizer and packed rows of tokens.

  Args:
    text: Text to train on: a path (a file, folder, glob or `hf://NAME`), a list
      of `pathlib.Path`, or the documents themselves, a list or iterator of str.
    output: Path to the folder to make; if it exists and has the same settings
      and text, it is opened. Without it, the data stay in memory.
    dev: Text to hold out, given as `text`; by default a share of that.
    column: Column of jsonl, parquet, csv or tsv records that holds the text.
    tokenizer: A tokenizer, a path to a `tokenizer.json`, or a model whose
      tokenizer to use; by default one is trained.
    vocab_size: Vocabulary size of the trained tokenizer.
    kind: Kind of the trained tokenizer, `bpe` or `wordpiece`.
    seq_len: Tokens in a row, T.
    packing: How documents fill rows: `stream`, `documents` or `chunks`.
    documents: Where a document of plain text ends: `auto`, `line` or `file`.
    boundary: Special tokens around a document: `bos_eos`, `bos`, `eos`, `none`.
    dev_share: Share of the text to hold out without `dev`.
    share: Share of the train documents to use.
    seed: Random seed of the chunks' lengths.
    tasks: Number of tasks, and of files of rows; the rows are the same for any.
    task: Number of the one task to run, from 0. By default all run here.
    quiet: Show nothing.

  Returns:
    The data; None after one task, if others are not finished.

  Raises:
    UserError: The settings, the text or the folder cannot be used. The folder
      is then as it was before.
  """
  own = tokenizer if isinstance(tokenizer, Tokenizer) else None
  with contextlib.ExitStack() as stack:
    stack.enter_context(progress.quietly(quiet))
    folder = output or stack.enter_context(tempfile.TemporaryDirectory())
    asked = Preparation(
      text=stack.enter_context(_paths(text)),
      dev=stack.enter_context(_paths(dev)),
      output=os.fspath(folder),
      column=column,
      tokenizer=None if own or not tokenizer else os.fspath(tokenizer),
      vocab_size=vocab_size,
      kind=kind,
      seq_len=seq_len,
      packing=packing,
      documents=documents,
      boundary=boundary,
      dev_share=dev_share,
      share=share,
      seed=seed,
      tasks=tasks,
      task=task,
    )
    if make_folder.make(asked, own or _tokenizer(asked)) is None:
      return None
    made = Prepared.open(folder)
    return made if output else in_memory.copy(made)


@contextlib.contextmanager
def _paths(text: Text) -> Iterator[tuple[str, ...]]:
  """Returns the paths to a text, which is written to a file if it has none."""
  if isinstance(text, str | os.PathLike):
    yield (os.fspath(text),)
    return
  inputs.check_rows(text)
  documents = iter(text)
  first = next(documents, None)
  if first is None:
    yield ()
    return
  if not isinstance(first, str | pathlib.Path):
    raise UserError(f"{first!r:.60} is no text: give str, or a path")
  if isinstance(first, pathlib.Path):
    yield tuple(map(str, (first, *documents)))
    return
  if "\n" not in first[:256] and os.path.exists(first[:256]):
    raise UserError(
      f"{first!r} is a path, but a list of str holds documents: give it alone,"
      " or a list of pathlib.Path"
    )
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "given.jsonl")
    with files.writing(path), path.open("w", encoding="utf-8") as file:
      for index, one in enumerate(itertools.chain([first], documents)):
        if one is not None:  # a record without text, which is counted
          inputs.check(one, f"text {index}")
        file.write(json.dumps({"text": one}) + "\n")
    yield (str(path),)


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parse(argv)
  if args.text:
    make_folder.make(*_settings(args))
  if args.verify:
    Prepared.open(args.output).verify()
    print(f"{args.output} is as it was prepared")


def done(argv: Sequence[str]) -> bool:
  """Returns whether the folder was made with these settings; reads no text.

  Raises:
    UserError: The arguments or the folder's files cannot be read.
  """
  return make_folder.is_prepared(*_settings(_parse(argv)))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = cli.Parser(
    description="Turn text into documents, a tokenizer and packed rows."
  )
  settings.add_arguments(parser, Preparation)
  parser.add_argument(
    "--verify",
    action="store_true",
    help="Read all rows of the folder and compare them with their hashes",
  )
  args = parser.parse_args(argv)
  if not args.text and not args.verify:
    parser.error("give --text, or --verify")
  return args


def _settings(args: argparse.Namespace) -> tuple[Preparation, Tokenizer | None]:
  """Returns the settings, and their tokenizer if it is a model's."""
  wanted = settings.from_args(Preparation, args)
  return wanted, _tokenizer(wanted)


def _tokenizer(wanted: Preparation) -> Tokenizer | None:
  """Returns the tokenizer of the model that `tokenizer` names, if it does."""
  name = wanted.tokenizer
  if not name or name.endswith(".json") or os.path.isfile(name):
    return None
  from antlm_jax.hf import import_  # slow to import

  return import_.start(name).meta.tokenizer
