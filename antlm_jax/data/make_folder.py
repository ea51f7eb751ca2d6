"""Makes a prepared folder from text: documents, a tokenizer and packed rows.

A first pass over a sample of the text trains the tokenizer. A second pass
encodes, packs and writes all of it, in the tasks of `tasks`.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.data import coverage, document_store, packing, readers, tasks
from antlm_jax.data import prepared_folder as folder_lib
from antlm_jax.data.packing import BOUNDARIES, PACKINGS
from antlm_jax.data.prepared_folder import SPLITS, Manifest, Prepared
from antlm_jax.data.readers import RULES
from antlm_jax.data.text_files import Corpus, find
from antlm_jax.data.tokenizer import KINDS, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.runtime import progress
from antlm_jax.settings import setting

# Bytes: smaller texts are a single task, and larger tasks are divided.
_SMALL, _SHARD = 1 << 26, 1 << 30
_PATHS = {"nargs": "+", "action": "extend", "metavar": "PATH"}


@dataclasses.dataclass(frozen=True)
class Preparation:
  """Text to prepare, and how: the arguments of `antlm prepare`."""

  text: tuple[str, ...] = setting(
    help="Text to train on: files, folders, globs or"
    " hf://NAME[:CONFIG][:SPLIT]. Files named dev or validation are held out",
    required=False,
    **_PATHS,
  )
  output: str = setting(help="Path to the folder to make", read=cli.here)
  dev: tuple[str, ...] = setting(
    (), "Text to hold out, given as for --text", **_PATHS
  )
  column: str = setting(
    "text", "Column of jsonl, parquet, csv or tsv records that holds the text"
  )
  tokenizer: str | None = setting(
    None,
    "Path to a tokenizer.json, or a model with the tokenizer to use (a run, a"
    " folder of transformers or a name on the Hub); by default, train it",
  )
  vocab_size: int = setting(
    16_000, "Vocabulary size of the trained tokenizer", least=261, most=1 << 20
  )
  kind: str = setting(
    "bpe", "Kind of the trained tokenizer", choices=tuple(KINDS)
  )
  seq_len: int = setting(128, "Tokens in a row", least=2, most=1 << 20)
  packing: str = setting(
    "stream",
    "Layout of documents in rows: joined (stream), in segments of their own"
    " (documents), or joined and cut into two segments a row at random, as in"
    " arXiv 2507.00994 (chunks)",
    choices=PACKINGS,
  )
  documents: str = setting(
    "auto",
    "End of a document in plain text: a line end (line), the file's end (file),"
    " or a blank line, 64 KiB or a heading ` = Title = ` (auto)",
    choices=tuple(RULES),
  )
  boundary: str = setting(
    "bos_eos",
    "Special tokens around a document: <s> and </s>, <s> before it, </s> after"
    " it, or none",
    choices=tuple(BOUNDARIES),
  )
  dev_share: float = setting(
    0.02,
    "Share of the text to hold out if no file is named dev",
    over=0,
    most=0.5,
  )
  share: float = setting(
    1.0, "Share of the train documents to use, spread evenly", over=0, most=1
  )
  seed: int = setting(0, "Random seed of the chunks' lengths")
  tasks: int | None = setting(
    None,
    "Number of tasks, and of files of rows; the rows are the same for any."
    " By default as many as fit the text and this machine's cores",
    least=1,
  )
  task: int | None = setting(
    None,
    "Number of the one task to run, from 0, here or on another machine with"
    " the same files. The last one to end makes the folder ready. By default"
    " all run here",
    least=0,
  )


def make(
  settings: Preparation, tokenizer: Tokenizer | None = None
) -> Manifest | None:
  """Prepares a folder, or finds that it is already prepared.

  A `tokenizer` replaces the file `settings.tokenizer`, which then only names it
  in errors.

  Returns:
    The manifest; None after one task, if others are not finished.

  Raises:
    UserError: The settings, the text or the folder cannot be used. Without
      `settings.task`, the folder is then as it was before.
  """
  if settings.tokenizer and tokenizer is None:
    tokenizer = Tokenizer.load(settings.tokenizer)
  _check(settings, tokenizer)
  reading = {"documents": settings.documents, "column": settings.column}
  corpus = find(settings.text, settings.dev, **reading)
  progress.say(str(corpus))
  asked = _asked(settings, tokenizer)
  output = pathlib.Path(settings.output)
  if os.path.exists(output / folder_lib.MANIFEST):
    manifest = Prepared.open(output).manifest
    _check_same(output, manifest, asked, corpus)
    progress.say(
      f"{output} is already prepared with these settings and this text"
    )
    return manifest
  for line in corpus.copies():
    progress.say(line)
  spans = tasks.spans(corpus, settings.seq_len)
  count = _number_of_tasks(settings, corpus, spans)
  job = tasks.Job(settings, asked, corpus, tokenizer, count, spans)
  begin = time.monotonic()
  job.begin()
  if settings.task is None:
    with job.locked(wait=False):
      manifest = _all(job)
  else:
    with job.locked(wait=True):
      job.sample()
    with progress.Amount(job.size(settings.task), "B", "train") as shown:
      job.pack(settings.task, shown.add)
    with job.locked(wait=True):
      if left := job.remaining():
        some = ", ".join(map(str, left[:8])) + ", ..." * (len(left) > 8)
        progress.say(
          f"task {settings.task} is done; tasks left: {len(left)} ({some})"
        )
        return None
      manifest = job.seal()
  progress.say(
    f"vocabulary {manifest.tokenizer['vocab_size']:,}, rows of"
    f" {settings.seq_len} tokens; {output} ready in"
    f" {time.monotonic() - begin:.0f} s"
  )
  for line in _coverage(output, manifest):
    progress.say(line)
  return manifest


def _coverage(output: pathlib.Path, manifest: Manifest) -> Iterator[str]:
  """Yields lines about characters that the tokenizer cannot read."""
  used = Tokenizer.load(output / folder_lib.TOKENIZER)
  texts = document_store.read(output, "train")
  split = manifest.splits["train"]
  size = split.text_bytes / max(1, split.documents)
  found = coverage.measure(used, texts, split.documents, size)
  return found.lines("train")


def is_prepared(
  settings: Preparation, tokenizer: Tokenizer | None = None
) -> bool:
  """Returns whether `make` made the folder with these settings.

  It does not read the text. The arguments are those of `make`.

  Raises:
    UserError: The tokenizer or the folder's contents cannot be read.
  """
  if settings.tokenizer and tokenizer is None:
    tokenizer = Tokenizer.load(settings.tokenizer)
  there = Prepared.open(settings.output).manifest.settings
  return there == _asked(settings, tokenizer)


def _check(settings: Preparation, tokenizer: Tokenizer | None) -> None:
  settings_lib.check(settings)
  length, least = settings.seq_len, 2 * packing.SHORTEST_CHUNK
  if settings.packing == "chunks" and length < least:
    raise UserError(
      f"seq_len {length} is too small: chunks packing needs at least {least}"
    )
  if tokenizer is None:
    return
  needed = [name for name in BOUNDARIES[settings.boundary] if name]
  needed += ["pad_id"] if settings.packing == "documents" else []
  for name in needed:
    if getattr(tokenizer, name) is None:
      raise UserError(
        f"{settings.tokenizer} has no {name[:3]} token, which boundary"
        f" {settings.boundary} with {settings.packing} packing needs; choose"
        " another boundary, packing or tokenizer"
      )


def _asked(settings: Preparation, tokenizer: Tokenizer | None) -> dict:
  """Returns the settings that the result depends on, for the manifest."""
  # Paths do not matter, and a given tokenizer counts by its content.
  asked = dataclasses.asdict(settings)
  for name in ("output", "text", "dev", "tasks", "task"):
    del asked[name]
  if tokenizer is not None:
    file = pathlib.Path(settings.tokenizer or "")
    json = file.read_bytes() if file.is_file() else tokenizer.to_json().encode()
    asked["tokenizer"] = hashlib.sha256(json).hexdigest()
    del asked["vocab_size"], asked["kind"]
  return asked


def _check_same(
  output: pathlib.Path, there: Manifest, asked: dict, corpus: Corpus
) -> None:
  differ = tasks.differences(there.settings, asked)
  # Other paths to the same text are fine.
  before = [(source["split"], source["sha256"]) for source in there.sources]
  now = [
    (split, tasks.source(corpus, path)["sha256"])
    for split in SPLITS
    for path in getattr(corpus, split)
  ]
  if before != now:
    differ.append("other text")
  if differ:
    raise UserError(
      f"{output} is already prepared otherwise ({'; '.join(differ)}); choose"
      " another --output"
    )


def _number_of_tasks(
  settings: Preparation, corpus: Corpus, spans: Sequence[tasks.Span]
) -> int:
  """Returns the number of tasks that is asked for, or that fits the text.

  Raises:
    UserError: There is no such task.
  """
  size = sum(span.bytes for span in spans)
  fitting = 1
  # The readers of a script are not in other processes.
  own = all(readers.is_own(path) for path in corpus.train)
  if size >= _SMALL and own:
    fitting = min(len(spans), max(os.cpu_count() or 1, -(-size // _SHARD)))
  count = fitting if settings.tasks is None else settings.tasks
  if settings.task is not None and settings.tasks is None:
    raise UserError(
      f"task={settings.task} needs the number of tasks: --tasks=N"
    )
  if settings.task is not None and settings.task >= count:
    raise UserError(
      f"task={settings.task}: {count} tasks have the numbers 0 to {count - 1}"
    )
  return count


def _all(job: tasks.Job) -> Manifest:
  """Runs all tasks that are left, in a process for each core if they are many.

  Raises:
    UserError: A task cannot be done; nothing of it is left.
  """
  try:
    job.sample()
    left = job.remaining()
    size = sum(map(job.size, left))
    alone = len(left) < 2 or not all(map(readers.is_own, job.corpus.train))
    with progress.Amount(size, "B", "train") as shown:
      if alone:
        for task in left:
          job.pack(task, shown.add)
      else:
        _in_processes(job, left, shown.add)
    return job.seal()
  except UserError:
    job.discard()
    raise


def _in_processes(
  job: tasks.Job, left: Sequence[int], done: Callable[[int], None]
) -> None:
  # Not multiprocessing, which imports the user's script again.
  code = "from antlm_jax.data import make_folder; make_folder.child()"
  environment = os.environ | {"RAYON_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
  running: set[subprocess.Popen] = set()

  def run(task: int) -> None:
    settings = dataclasses.replace(job.settings, tasks=job.tasks, task=task)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen(
      [sys.executable, "-c", code],
      env=environment,
      text=True,
      start_new_session=True,  # Ctrl-C ends this process, and it ends them
      **pipes,
    )
    running.add(process)
    with process:
      json.dump([dataclasses.asdict(settings), job.asked], process.stdin)
      process.stdin.close()
      for line in process.stdout:
        value = json.loads(line)
        if isinstance(value, str):
          raise UserError(value)
        done(value)
    running.remove(process)
    if process.returncode < 0:
      raise UserError(
        f"task {task} was killed by signal {-process.returncode}, as happens"
        " without enough memory: run the same command again, or with more"
        " --tasks"
      )
    if process.returncode:
      raise RuntimeError(f"task {task} ended with {process.returncode}")

  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    try:
      for finished in concurrent.futures.as_completed(
        [pool.submit(run, task) for task in left]
      ):
        finished.result()
    finally:
      pool.shutdown(wait=False, cancel_futures=True)
      for process in tuple(running):
        process.kill()


def child() -> None:
  """Runs a task in a process of `_in_processes`, and prints its progress."""
  fields, asked = json.load(sys.stdin)
  settings = Preparation(**fields)
  reading = {"documents": settings.documents, "column": settings.column}
  try:
    with progress.quietly():
      corpus = find(settings.text, settings.dev, **reading)
      spans = tasks.spans(corpus, settings.seq_len)
      job = tasks.Job(settings, asked, corpus, None, settings.tasks, spans)
      job.sample()
      job.pack(settings.task, lambda size: print(size, flush=True))
  except UserError as error:
    print(json.dumps(str(error)), flush=True)
