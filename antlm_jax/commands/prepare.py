"""Turns text into a prepared folder: documents, tokenizer, packed rows.

antlm prepare --text corpus/ --output prepared/
antlm prepare --verify --output prepared/
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

from antlm_jax import cli, settings
from antlm_jax.arguments import add_arguments, read_arguments
from antlm_jax.data import (
  coverage,
  document_store,
  in_memory,
  prepared_folder,
  readers,
  text_files,
)
from antlm_jax.data.packing import (
  BOUNDARIES,
  PACKINGS,
  SHORTEST_CHUNK,
  boundary_of,
)
from antlm_jax.data.preparation import Preparation, is_ready
from antlm_jax.data.prepared_folder import Manifest, PreparedData
from antlm_jax.data.shards import Recipe
from antlm_jax.data.tokenizer import KINDS, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.inference import inputs
from antlm_jax.runtime import files, jobs, progress
from antlm_jax.settings import PythonOnly, argument

# Characters of a command. Linux allows 2 MiB, with the environment.
_LONGEST = 1 << 19
# Variables of the processes that run tasks.
_ENVIRONMENT = {"RAYON_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}


class _GivenPath(str):
  """A path, or a dataset of the Hub, rather than a document."""


Text = files.Path | Iterable[str] | Sequence[pathlib.Path]
_PATHS = {
  "nargs": "+",
  "action": "extend",
  "metavar": "PATH",
  "read": _GivenPath,
}


@settings.checked
def prepare(
  text: Annotated[Text, argument(**_PATHS, required=False)],
  output: Annotated[
    files.Path | None, argument(read=cli.here, required=True)
  ] = None,
  *,
  dev: Annotated[Text, argument(**_PATHS)] = (),
  column: str = "text",
  tokenizer: files.Path | Tokenizer | None = None,
  vocab_size: Annotated[int, argument(least=261, most=1 << 20)] = 16_000,
  kind: Annotated[str, argument(choices=tuple(KINDS))] = "bpe",
  seq_len: Annotated[int, argument(least=2, most=1 << 20)] = 128,
  packing: Annotated[str, argument(choices=PACKINGS)] = "stream",
  documents: Annotated[str, argument(choices=tuple(readers.RULES))] = "auto",
  boundary: Annotated[str | None, argument(choices=tuple(BOUNDARIES))] = None,
  dev_share: Annotated[float, argument(over=0, most=0.5)] = 0.02,
  share: Annotated[float, argument(over=0, most=1)] = 1.0,
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
      a list of `pathlib.Path`, or a list or iterator of documents (str).
    output: Path to the folder to make. If it was made with the same settings
      and text, it is opened. In Python, without it, the data stay in memory.
    dev: Text to hold out, given as the text to train on.
    column: Column of jsonl, parquet, csv or tsv records that holds the text.
    tokenizer: Path to a `tokenizer.json`, or a model with the tokenizer to use
      (a run, a folder of transformers or a name on the Hub). Of a folder
      without a model that antlm reads, it takes `tokenizer.json`. By default,
      train it. In Python, it may be a `Tokenizer`.
    vocab_size: Vocabulary size of the trained tokenizer.
    kind: Kind of the trained tokenizer.
    seq_len: Tokens in a row, T.
    packing: Layout of documents in rows: joined (stream), in segments of their
      own (documents), or joined and cut into two segments a row at random, as
      in arXiv 2507.00994 (chunks).
    documents: End of a document in plain text: a line end (line), the file's
      end (file), or a blank line, 64 KiB or a heading ` = Title = ` (auto).
    boundary: Special tokens around a document: <s> and </s>, <s> before it,
      </s> after it, or none. By default those of both that the tokenizer has.
    dev_share: Share of the text to hold out if no file is named dev.
    share: Share of the train documents to use, spread evenly.
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
  given = dict(locals())
  with contextlib.ExitStack() as stack:
    stack.enter_context(progress.quietly(quiet))
    folder = output or stack.enter_context(tempfile.TemporaryDirectory())
    recipe, own = _recipe(given)
    _check(recipe, own, tokenizer)
    if task is not None and not output:
      raise UserError(f"task={task} needs an output folder, for all tasks")
    _check_task(task, tasks)
    if not boundary and recipe.boundary != "bos_eos":
      lacking = {"eos": "bos", "bos": "eos"}.get(recipe.boundary, "bos or eos")
      progress.say(
        f"boundary {recipe.boundary}: the tokenizer has no {lacking} token"
      )
    paths = [stack.enter_context(_text_paths(one)) for one in (text, dev)]
    corpus = text_files.find_corpus(*paths, documents=documents, column=column)
    progress.say(str(corpus))
    if not is_ready(folder, recipe, corpus):
      asked = Preparation(recipe, corpus, folder, own, tasks)
      words = _words(asked, *paths, tokenizer)
      if not _run_preparation(asked, task, words):
        return None
    made = PreparedData.open(folder)
    return made if output else in_memory.copy(made)


def _recipe(given: dict) -> tuple[Recipe, Tokenizer | None]:
  """Returns the recipe of all arguments, and the tokenizer they name."""
  tokenizer = given["tokenizer"]
  if tokenizer is None:
    own = {"boundary": given["boundary"] or "bos_eos"}
    return Recipe.of(given | own, None), None
  content = None
  if not isinstance(tokenizer, Tokenizer):
    name = os.fspath(tokenizer)
    if name.endswith(".json") or os.path.isfile(name):
      tokenizer = Tokenizer.load(name)
      content = pathlib.Path(name).read_bytes()
    else:
      from antlm_jax.hf import import_  # slow to import

      tokenizer = import_.open_tokenizer(name)
  # Its path does not matter, but its content.
  content = content or tokenizer.to_json().encode()
  own = {"boundary": given["boundary"] or boundary_of(tokenizer)}
  sha256 = hashlib.sha256(content).hexdigest()
  return Recipe.of(given | own, sha256), tokenizer


def _check(recipe: Recipe, own: Tokenizer | None, name) -> None:
  """Checks settings that depend on each other."""
  length, least = recipe.seq_len, 2 * SHORTEST_CHUNK
  if recipe.packing == "chunks" and length < least:
    raise UserError(
      f"seq_len {length} is too small: chunks packing needs at least {least}"
    )
  if own is None:
    return
  needed = [name for name in BOUNDARIES[recipe.boundary] if name]
  needed += ["pad_id"] if recipe.packing == "documents" else []
  for token in needed:
    if getattr(own, token) is None:
      raise UserError(
        f"{'the tokenizer' if name is own else name} has no {token[:3]} token,"
        f" which boundary {recipe.boundary} with {recipe.packing} packing"
        " needs; choose another boundary, packing or tokenizer"
      )


def _check_task(task: int | None, tasks: int | None) -> None:
  if task is not None and tasks is None:
    raise UserError(f"task={task} needs the number of tasks: --tasks=N")
  if task is not None and task >= tasks:
    raise UserError(
      f"task={task}: {tasks} tasks have the numbers 0 to {tasks - 1}"
    )


@contextlib.contextmanager
def _text_paths(text: Text) -> Iterator[tuple[str, ...]]:
  """Returns the paths to a text, which is written to a file if it has none."""
  if isinstance(text, str | os.PathLike):
    yield (os.fspath(text),)
    return
  inputs.check_rows(text)
  if not isinstance(text, Iterable):
    raise UserError(f"text={text!r:.60} is no text, path or list of them")
  documents = iter(text)
  first = next(documents, None)
  if first is None:
    yield ()
    return
  if not isinstance(first, str | pathlib.Path):
    raise UserError(f"{first!r:.60} is no text: give str, or a path")
  if isinstance(first, pathlib.Path | _GivenPath):
    yield tuple(map(str, (first, *documents)))
    return
  if "\n" not in first[:256] and os.path.exists(first[:256]):
    raise UserError(
      f"{first!r} is a path, but a list of str holds documents: give it alone,"
      " or a list of pathlib.Path"
    )
  with tempfile.TemporaryDirectory(prefix=text_files.WRITTEN) as folder:
    path = pathlib.Path(folder, "given.jsonl")
    with files.writing(path), path.open("w", encoding="utf-8") as file:
      for index, one in enumerate(itertools.chain([first], documents)):
        if one is not None:  # a record without text, which is counted
          inputs.check_is_text(one, f"text {index}")
        file.write(json.dumps({"text": one}) + "\n")
    yield (str(path),)


def _run_preparation(
  asked: Preparation, task: int | None, words: Sequence[str]
) -> bool:
  """Runs one task or all, and returns whether the folder is ready.

  `words` are the arguments of a command that prepares the same.
  """
  start = time.monotonic()
  if not asked.is_begun:
    for line in asked.corpus.copies():
      progress.say(line)
  asked.begin()
  if task is None:
    with asked.sealing():
      manifest = _run_all(asked, words)
  else:
    manifest = _run_one(asked, task)
  if manifest is None:
    return False
  progress.say(
    f"vocabulary {manifest.tokenizer['vocab_size']:,}, rows of"
    f" {manifest.seq_len} tokens; {asked.output} ready in"
    f" {time.monotonic() - start:.0f} s"
  )
  for line in _coverage(asked.output, manifest):
    progress.say(line)
  return True


def _run_all(asked: Preparation, words: Sequence[str]) -> Manifest:
  """Runs the tasks that are left; if one fails, deletes its own files."""
  try:
    asked.sample()
    left = asked.remaining()
    alone = len(left) < 2 or not all(map(readers.is_own, asked.corpus.train))
    if not alone and sum(map(len, words)) > _LONGEST:
      progress.say("tip: for a process for each core, give folders, not files")
      alone = True
    packed = (
      _run_here(asked, left) if alone else _in_processes(asked, left, words)
    )
    total = sum(map(asked.size, left))
    # Closing `packed` ends its processes.
    with (
      contextlib.closing(packed),
      progress.Amount(total, "B", "train") as bar,
    ):
      for size in packed:
        bar.add(size)
    return asked.seal()
  except UserError:
    asked.discard()
    raise


def _run_one(asked: Preparation, task: int) -> Manifest | None:
  """Runs a task; if no other is left, makes the folder ready."""
  asked.sample()
  with progress.Amount(asked.size(task), "B", "train") as bar:
    for size in asked.pack(task):
      bar.add(size)
  if left := asked.remaining():
    some = ", ".join(map(str, left[:8])) + ", ..." * (len(left) > 8)
    progress.say(f"task {task} is done; tasks left: {len(left)} ({some})")
    return None
  with asked.sealing(refuse=False) as mine:
    if mine:
      return asked.seal()
  # Another task ended at the same time, or a process runs all tasks.
  progress.say(f"task {task} is done; another process makes the folder ready")
  return None


def _words(
  asked: Preparation,
  text: Sequence[str],
  dev: Sequence[str],
  tokenizer: files.Path | Tokenizer | None,
) -> list[str]:
  """Returns the arguments of a command that prepares the same."""
  given = vars(asked.recipe) | {"output": asked.output, "tasks": asked.tasks}
  if tokenizer is None:
    del given["tokenizer"]
  else:
    is_file = not isinstance(tokenizer, Tokenizer) and os.path.isfile(tokenizer)
    made = asked.output / prepared_folder.TOKENIZER
    given["tokenizer"] = tokenizer if is_file else made
  pairs = [*given.items(), *(("text", path) for path in text)]
  pairs += [("dev", path) for path in dev]
  return [f"--{name}={value}" for name, value in pairs]


def _run_here(asked: Preparation, tasks: Sequence[int]) -> Iterator[int]:
  """Runs tasks in this process; yields the bytes that they pack."""
  for task in tasks:
    yield from asked.pack(task)


def _in_processes(
  asked: Preparation, tasks: Sequence[int], words: Sequence[str]
) -> Iterator[int]:
  """Runs `antlm prepare --task=I` for each task, a process for each core.

  Yields the bytes that the tasks pack meanwhile.
  """
  remedy = "run the same command again, or with more --tasks"
  waiting = list(tasks)
  finished = 0  # bytes, as those below
  shown = 0
  with jobs.running_children() as children:
    while waiting or children:
      while waiting and children.has_room():
        task = waiting.pop(0)
        command = "antlm_jax", "prepare", *words, f"--task={task}"
        children[task] = jobs.Child(
          f"task {task}", command, _ENVIRONMENT, remedy=remedy
        )
      for task, child in children.pop_ended():
        if error := child.failure():
          raise error
        finished += asked.size(task)
      packed = finished + sum(map(asked.packed, children))
      if packed > shown:
        yield packed - shown
        shown = packed


def _coverage(output: pathlib.Path, manifest: Manifest) -> Iterator[str]:
  """Yields lines about characters that the tokenizer cannot read."""
  used = Tokenizer.load(output / prepared_folder.TOKENIZER)
  kept = document_store.read_kept_documents(output, "train")
  texts = (document.text for document in kept)
  split = manifest.splits["train"]
  size = split.text_bytes / max(1, split.documents)
  found = coverage.measure_coverage(used, texts, split.documents, size)
  return found.lines("train", trained=not manifest.settings["tokenizer"])


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  args = _parse_prepare(argv)
  if args.text:
    prepare(**read_arguments(prepare, args))
  if args.verify:
    PreparedData.open(args.output).verify()
    print(f"{args.output} is as it was prepared")


def done(argv: Sequence[str]) -> bool:
  """Returns whether the folder was made with these settings, from this text.

  It compares the files' sizes, and reads no text. If that is gone, it does not
  count.

  Raises:
    UserError: The arguments or the folder's files cannot be read.
  """
  args = _parse_prepare(argv)
  recipe, _ = _recipe(vars(args))
  manifest = PreparedData.open(args.output).manifest
  if manifest.settings != recipe.recorded:
    return False
  how = {"documents": args.documents, "column": args.column}
  try:
    corpus = text_files.find_corpus(args.text, args.dev or (), **how)
  except UserError:
    return True
  found = [
    (split, os.path.getsize(path))
    for split, path in corpus.prepared
    if not path.startswith(readers.HUB)
  ]
  there = [
    (source["split"], source["bytes"])
    for source in manifest.sources
    if not source["path"].startswith(readers.HUB)
  ]
  return found == there


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
  if not args.text and not args.verify:
    parser.error("give --text, or --verify")
  return args
