"""Turns text into a prepared folder: documents, tokenizer, packed rows.

antlm prepare --text corpus/ --output prepared/
antlm prepare --verify --output prepared/
"""

import argparse
import contextlib
import glob
import hashlib
import itertools
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from antlm_jax import cli, settings, units
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.data import (
  coverage,
  document_store,
  first_words,
  in_memory,
  prepared_folder,
  readers,
  splits,
  text_files,
)
from antlm_jax.data.packing import (
  BOUNDARIES,
  PACKINGS,
  SHORTEST_CHUNK,
  boundary_ids,
  boundary_of,
)
from antlm_jax.data.preparation import Preparation, is_ready
from antlm_jax.data.prepared_folder import Manifest, PreparedData
from antlm_jax.data.shards import Recipe
from antlm_jax.data.tokenizer import (
  KINDS,
  Tokenizer,
  letters_of_kind,
  side_files,
)
from antlm_jax.errors import UserError
from antlm_jax.inference import inputs
from antlm_jax.runtime import files, jobs, progress, records
from antlm_jax.settings import PythonOnly, argument

_VOCAB_SIZE = 16_000
_KIND = "bpe"
_LEAST_VOCABULARY = 261  # of bytes and special tokens
# Variables of the processes that run tasks.
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


class _PathText(str):
  """A path, or a dataset of the Hub, rather than a document."""


Text = files.Path | Iterable[object]
_PATHS = {
  "nargs": "+",
  "action": "extend",
  "metavar": "PATH",
  "read": _PathText,
}


def _parse_words(text: str) -> int:
  """Reads a number of words, such as `10M`."""
  try:
    return int(units.parse_quantity(text))
  except (ValueError, OverflowError) as error:
    raise argparse.ArgumentTypeError(
      f"{text!r} is no number of words: write 10M or 10000000"
    ) from error


@settings.checked
def prepare(
  text: Annotated[Text, argument(**_PATHS, required=False)],
  output: Annotated[
    files.Path | None, argument(read=cli.local_path, required=True)
  ] = None,
  *,
  dev: Annotated[Text, argument(**_PATHS)] = (),
  column: str = "text",
  tokenizer: files.Path | Tokenizer | None = None,
  vocab_size: Annotated[int, argument(least=6, most=1 << 20)] = _VOCAB_SIZE,
  kind: str = _KIND,
  seq_len: Annotated[int, argument(least=2, most=1 << 20)] = 128,
  packing: Annotated[str, argument(choices=PACKINGS)] = "stream",
  documents: Annotated[str, argument(choices=tuple(readers.RULES))] = "auto",
  separator: str = "",
  dedup: bool = False,
  boundary: Annotated[str | None, argument(choices=tuple(BOUNDARIES))] = None,
  dev_share: Annotated[float, argument(over=0, most=0.5)] = 0.02,
  share: Annotated[float, argument(over=0, most=1)] = 1.0,
  words: Annotated[
    int | None, argument(read=_parse_words, least=1, most=10**15)
  ] = None,
  seed: int = 0,
  tasks: Annotated[int | None, argument(least=1)] = None,
  task: Annotated[int | None, argument(least=0)] = None,
  quiet: PythonOnly[bool] = False,
) -> PreparedData | None:
  """Turns text into a tokenizer and packed rows of tokens.

  Args:
    text: Text to train on: files, folders, globs or
      `hf://NAME[:CONFIG][:SPLIT]`.
      Files named dev or validation are held out. In Python, give one of these,
      a list of `pathlib.Path`, a list or iterator of documents (str) or
      records, a table (Dataset, DataFrame), or a mapping of train and dev to
      these.
    output: Path to the folder to make. If it was made with the same settings
      and text, it is opened. In Python, without it, the data stay in memory.
    dev: Text to hold out, given as the text to train on.
    column: Column of a record or table that holds the text.
    tokenizer: Path to a `tokenizer.json`, or a model with the tokenizer to use
      (a run, a folder of transformers or a name on the Hub). Of a folder
      without a model that antlm reads, it takes `tokenizer.json`. By default,
      train it. In Python, it may be a `Tokenizer`, or one of the libraries
      transformers and tokenizers.
    vocab_size: Vocabulary size of the trained tokenizer.
    kind: Kind of the trained tokenizer: bpe, wordpiece, characters, or kmer:K
      with K letters of DNA a token, such as kmer:6, without overlap.
    seq_len: Tokens in a row, T.
    packing: Layout of documents in rows: joined (stream), in segments of their
      own (documents), or joined and cut into two segments a row at random, as
      in arXiv 2507.00994 (chunks).
    documents: End of a document in plain text: a line end (line), the file's
      end (file), or a blank line, 64 KiB or a heading ` = Title = ` (auto).
    separator: Text at which documents end instead, also within records, such as
      `<|endoftext|>`. It is no part of them.
    dedup: Leave out documents that repeat an earlier or a held-out document.
    boundary: Special tokens around a document: <s> and </s>, <s> before it,
      </s> after it, or none. By default those of both that the tokenizer has;
      its own files say which tokens they are.
    dev_share: Share of the text to hold out if no file is named dev.
    share: Share of the train documents to use, spread evenly.
    words: Number of words of the first documents to take, such as 10M, also of
      held-out files. A dataset of the Hub is streamed. By default all.
    seed: Random seed of the chunks' lengths.
    tasks: Number of tasks, and of files of rows; the rows are the same for any.
      By default as many as fit the text and this machine's cores.
    task: Number of the one task to run, from 0, here or on another machine with
      the same files. The last one to end makes the folder ready. By default all
      run here.
    quiet: Show nothing.

  Returns:
    The data; None after one task, if others are not finished.

  Raises:
    UserError: The settings, the text or the folder cannot be used. Without
      `task`, the folder is then as it was before.
  """
  arguments = dict(locals())
  with contextlib.ExitStack() as stack:
    stack.enter_context(progress.quietly(quiet))
    folder = output or stack.enter_context(tempfile.TemporaryDirectory())
    recipe, opened = _recipe(arguments)
    _check_length(recipe)
    if opened is not None:
      is_path = isinstance(tokenizer, str | os.PathLike)
      _check_tokens(recipe, opened, tokenizer if is_path else "the tokenizer")
      _say_boundary(recipe, opened)
    _check_task(task, tasks, output)
    if separator and documents != "auto":
      raise UserError(f"give separator, or documents={documents}, not both")
    if isinstance(text, Mapping) and column not in text:  # else a table
      text, dev = splits.train_and_dev(text, dev)
    text_paths = stack.enter_context(_text_paths(text, column))
    dev_paths = stack.enter_context(_text_paths(dev, column))
    stack.enter_context(readers.streaming(bool(words)))
    corpus = text_files.find_corpus(
      text_paths,
      dev_paths,
      documents=documents,
      separator=separator,
      column=column,
    )
    progress.say(str(corpus))
    if words:
      corpus = stack.enter_context(first_words.selection(corpus, words))
    if not is_ready(folder, recipe, corpus):
      preparation = Preparation(recipe, corpus, folder, opened, tasks)
      if opened is not None and not preparation.is_begun:
        from antlm_jax.hf import check  # slow to import

        check.check_exportable(opened, recipe.boundary)
      if not _run_preparation(preparation, task):
        return None
    data = PreparedData.open(folder)
    return data if output else in_memory.copy(data)


def _recipe(arguments: dict) -> tuple[Recipe, Tokenizer | None]:
  """Returns the recipe of all arguments, and the tokenizer they name."""
  tokenizer = arguments["tokenizer"]
  boundary = arguments["boundary"]
  if tokenizer is None:
    _check_kind(arguments["kind"], arguments["vocab_size"])
    boundary = boundary or "bos_eos"
    return Recipe.of(arguments | {"boundary": boundary}, None), None
  for name, default in {"kind": _KIND, "vocab_size": _VOCAB_SIZE}.items():
    if arguments[name] != default:
      raise UserError(
        f"{name}={arguments[name]} is for a tokenizer that prepare trains:"
        " leave it out, or tokenizer"
      )
  content = b""
  if not isinstance(tokenizer, str | os.PathLike):
    tokenizer = Tokenizer.wrap(tokenizer)
  elif (name := os.fspath(tokenizer)).lower().endswith(".gguf"):
    raise UserError(
      f"{name} is a GGUF file: run `antlm import --model={name} --workdir=RUN`,"
      " then prepare with --tokenizer=RUN"
    )
  elif name.endswith(".json") or os.path.isfile(name):
    tokenizer = Tokenizer.load(name)
    paths = [name, *side_files(name)]
    content = b"".join(pathlib.Path(path).read_bytes() for path in paths)
  else:
    from antlm_jax.hf import import_  # slow to import

    tokenizer = import_.open_tokenizer(name)
  # Its path does not matter, but its content.
  content = content or tokenizer.to_json().encode()
  boundary = boundary or boundary_of(tokenizer)
  sha256 = hashlib.sha256(content).hexdigest()
  return Recipe.of(arguments | {"boundary": boundary}, sha256), tokenizer


def _check_kind(kind: str, vocab_size: int) -> None:
  """Checks the kind of a tokenizer to train, and its size."""
  if kind not in KINDS:
    letters_of_kind(kind)
  elif vocab_size < _LEAST_VOCABULARY:
    raise UserError(
      f"vocab_size={vocab_size}: {kind} needs at least {_LEAST_VOCABULARY}, its"
      " bytes and special tokens; kind=characters needs fewer"
    )


def _check_length(recipe: Recipe) -> None:
  length = recipe.seq_len
  least = 2 * SHORTEST_CHUNK
  if recipe.packing == "chunks" and length < least:
    raise UserError(
      f"seq_len {length} is too small: chunks packing needs at least {least}"
    )


def _check_tokens(
  recipe: Recipe, tokenizer: Tokenizer, name: files.Path
) -> None:
  """Checks that a tokenizer has the special tokens that the recipe needs."""
  needed = [token for token in BOUNDARIES[recipe.boundary] if token]
  needed += ["pad_id"] if recipe.packing == "documents" else []
  for token in needed:
    if getattr(tokenizer, token) is None:
      other = ""
      if token == "pad_id" and tokenizer.eos_id is not None:
        other = " other than its eos token"
      raise UserError(
        f"{name} has no {token[:3]} token{other},"
        f" which boundary {recipe.boundary} with {recipe.packing} packing"
        " needs; choose another boundary, packing or tokenizer"
      )


def _say_boundary(recipe: Recipe, tokenizer: Tokenizer) -> None:
  """Says which special tokens are around a document.

  Warns if the tokenizer itself adds several to one end of a text.
  """
  around = boundary_ids(tokenizer, recipe.boundary)
  before, after = (
    "no token" if index is None else tokenizer.token(index) for index in around
  )
  progress.say(
    f"boundary {recipe.boundary}: {before} before a document and {after} after"
    " it (--boundary changes it)"
  )
  for ids, place in zip(tokenizer.frame, ("before", "after"), strict=True):
    if len(ids) > 1:
      names = " ".join(map(tokenizer.token, ids))
      progress.say(
        f"warning: the tokenizer itself adds {names} {place} a text, of which"
        " rows have at most one"
      )


def _check_task(
  task: int | None, tasks: int | None, output: files.Path | None
) -> None:
  if task is not None and not output:
    raise UserError(f"task={task} needs an output folder, for all tasks")
  if task is not None and tasks is None:
    raise UserError(f"task={task} needs the number of tasks: --tasks=N")
  if task is not None and task >= tasks:
    raise UserError(
      f"task={task}: {tasks} tasks have the numbers 0 to {tasks - 1}"
    )


@contextlib.contextmanager
def _text_paths(text: Text, column: str) -> Iterator[tuple[str, ...]]:
  """Yields the paths to a text, or no path if it has no documents.

  Documents that are values are written to a temporary file, which the end of
  the block removes.
  """
  if isinstance(text, str | os.PathLike):
    yield (os.fspath(text),)
    return
  is_table = records.column_names(text) is not None
  if isinstance(text, bytes) or not (is_table or isinstance(text, Iterable)):
    raise UserError(f"text={text!r:.60} is no text, path or list of them")
  if not is_table:
    first, text = _peek(text)
    # A `_PathText` is a str, too.
    if isinstance(first, pathlib.Path | _PathText):
      yield tuple(map(str, text))
      return
    if isinstance(first, str) and os.path.exists(first):
      raise _path_error(first)
  documents = inputs.read_documents(text, column)
  head = []
  for document in documents:
    head.append(document)
    if not _is_path_like(document):
      break
  else:
    if head:
      raise _path_error(head[0])
    yield ()
    return
  with tempfile.TemporaryDirectory(prefix=text_files.WRITTEN) as folder:
    path = pathlib.Path(folder, "given.jsonl")
    documents = itertools.chain(head, documents)
    text_files.write_documents(path, documents, column)
    yield (str(path),)


def _is_path_like(document: str | None) -> bool:
  """Whether a document is a file's name, a glob of files or a URL of a store.

  Names have no spaces here: a sentence may end in the name of a file.
  """
  name = (document or "").strip()
  if not re.fullmatch(r"[^\s\0]{1,1000}", name):
    return False
  is_store = name.startswith((readers.HUB, "gs://"))
  return is_store or bool(readers.kind(name) or glob.glob(name))


def _path_error(path: str) -> UserError:
  return UserError(
    f"{path!r} is a path, but a list of str holds documents: give it alone, or"
    " a list of pathlib.Path, each with its folder"
  )


def _peek(items: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
  """Returns the first item, or None, and an iterable of all items."""
  head = [*itertools.islice(items, 1)]
  if isinstance(items, Iterator):
    items = itertools.chain(head, items)
  return (head[0] if head else None), items


def _run_preparation(preparation: Preparation, task: int | None) -> bool:
  """Runs one task or all, and returns whether the folder is ready."""
  start = time.monotonic()
  preparation.begin()
  if task is None:
    with preparation.sealing():
      manifest = _run_all(preparation)
  else:
    manifest = _run_one(preparation, task)
  if manifest is None:
    return False
  progress.say(
    f"vocabulary {manifest.tokenizer['vocab_size']:,}, rows of"
    f" {manifest.seq_len} tokens; {preparation.output} ready in"
    f" {time.monotonic() - start:.0f} s"
  )
  for line in _coverage(preparation.output, manifest):
    progress.say(line)
  return True


def _run_all(preparation: Preparation) -> Manifest:
  """Runs the tasks that are left; if one fails, deletes its own files."""
  try:
    remaining = preparation.remaining()
    sources = preparation.corpus.train
    can_divide = len(remaining) > 1 and all(map(readers.is_own, sources))
    packed = (
      _in_processes(preparation, remaining)
      if can_divide
      else _run_here(preparation, remaining)
    )
    total = sum(map(preparation.size, remaining))
    # Closing `packed` ends its processes.
    with (
      contextlib.closing(packed),
      progress.Amount(total, "B", "train") as bar,
    ):
      for size in packed:
        bar.add(size)
    return preparation.seal()
  except UserError:
    preparation.discard()
    raise


def _run_one(preparation: Preparation, task: int) -> Manifest | None:
  """Runs a task; if no other is left, makes the folder ready."""
  preparation.divide()
  with progress.Amount(preparation.size(task), "B", "train") as bar:
    for size in preparation.pack(task):
      bar.add(size)
  if tasks := preparation.remaining():
    numbers = ", ".join(map(str, tasks[:8])) + ", ..." * (len(tasks) > 8)
    progress.say(f"task {task} is done; tasks left: {len(tasks)} ({numbers})")
    return None
  with preparation.sealing(refuse=False) as is_last:
    if is_last:
      return preparation.seal()
  # Another task ended at the same time, or a process runs all tasks.
  progress.say(f"task {task} is done; another process makes the folder ready")
  return None


def _run_here(preparation: Preparation, tasks: Sequence[int]) -> Iterator[int]:
  """Runs tasks in this process; yields the bytes that they pack."""
  preparation.divide()
  for task in tasks:
    yield from preparation.pack(task)


def _in_processes(
  preparation: Preparation, tasks: Sequence[int]
) -> Iterator[int]:
  """Runs `antlm prepare --task=I` for each task, a process for each core.

  Yields the bytes that the tasks pack meanwhile.
  """
  remedy = "run the same command again, or with more --tasks"
  preparation.write_arguments()
  waiting = list(tasks)
  finished = 0  # bytes, as those below
  shown = 0
  is_divided = False
  with jobs.running_children() as children:
    while waiting or children:
      while waiting and children.has_room():
        task = waiting.pop(0)
        output = f"--output={preparation.output}"
        command = "antlm_jax", "prepare", output, f"--task={task}"
        children[task] = jobs.Child(
          f"task {task}", command, _ENVIRONMENT, remedy=remedy
        )
      if not is_divided:
        # Together with the tasks, but with all cores for the tokenizer.
        preparation.divide()
        is_divided = True
      for task, child in children.pop_ended():
        if error := child.failure():
          raise error
        finished += preparation.size(task)
      packed = finished + sum(map(preparation.packed, children))
      if packed > shown:
        yield packed - shown
        shown = packed


def _coverage(output: pathlib.Path, manifest: Manifest) -> Iterator[str]:
  """Yields lines about characters that the tokenizer cannot read."""
  tokenizer = Tokenizer.load(output / prepared_folder.TOKENIZER)
  for name, split in manifest.splits.items():
    # An odd step, as documents of two languages may alternate.
    step = split.documents // coverage.MOST_READ | 1
    documents = document_store.read_kept_documents(output, name, step)
    texts = (document.text for document in documents)
    size = split.text_bytes / step
    measured = coverage.measure_coverage(tokenizer, texts, size)
    yield from measured.lines(name, trained=not manifest.settings["tokenizer"])


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parse_prepare(argv)
  if args.text:
    prepare(**read_arguments(prepare, args))
  elif args.task is not None:
    _run_one(Preparation.of_arguments(args.output), args.task)
  if args.verify:
    PreparedData.open(args.output).verify()
    print(f"{args.output} is as it was prepared")


def done(argv: Sequence[str]) -> bool:
  """Returns whether the folder was made with these settings, from this text.

  It compares the files' sizes, and reads no text. If that is gone, or if only
  its first words were taken, it does not count.

  Raises:
    UserError: The arguments or the folder's files cannot be read.
  """
  args = _parse_prepare(argv)
  recipe, _ = _recipe(vars(args))
  manifest = PreparedData.open(args.output).manifest
  if manifest.settings != recipe.recorded:
    return False
  if recipe.words:
    return True
  try:
    reading = {
      name: getattr(args, name) for name in ("documents", "separator", "column")
    }
    corpus = text_files.find_corpus(args.text, args.dev or (), **reading)
  except UserError:
    return True
  sizes = [
    (split, os.path.getsize(path))
    for split, path in corpus.prepared
    if not path.startswith(readers.HUB)
  ]
  prepared_sizes = [
    (source["split"], source["bytes"])
    for source in manifest.sources
    if not source["path"].startswith(readers.HUB)
  ]
  return sizes == prepared_sizes


def _parse_prepare(argv: Sequence[str]) -> argparse.Namespace:
  parser = cli.Parser(
    description="Turn text into documents, a tokenizer and packed rows."
  )
  add_arguments(parser, prepare)
  parser.add_argument(
    "--verify",
    action="store_true",
    help="Read all rows of the folder and compare them with their hashes",
  )
  args = parser.parse_args(argv)
  if not args.text and not args.verify and args.task is None:
    parser.error("give --text, or --verify")
  return args
