"""Turns text into a prepared folder, in four steps.

Step      writes in the folder
begin     preparing/plan.json: the text, the settings and the number of tasks,
          and tokenizer.json, if it is given
divide    preparing/0000i.npz, hashes of the documents of task i,
          preparing/division.npz, the documents to hold out, and
          tokenizer.json, if it is trained, on a sample of the others
pack(i)   train-0000i-of-0000n.array_record, the rows of the spans of task i,
          documents/train-0000i, their text, and preparing/0000i.json, counts
seal      dev-00000-of-00001.array_record, the rows of the held-out documents,
          and manifest.json; it deletes preparing/

`spans` says how text is divided, and `shards` writes rows. A process that runs
tasks in other processes writes preparing/arguments.json for them. Tasks run in
any order, in any processes, on any machines that share the folder. A step does
nothing if its result exists, so the same steps resume after any kill.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from antlm_jax import hashing
from antlm_jax.data import (
  document_store,
  hold_out,
  marks,
  readers,
  rows,
  shards,
  words,
)
from antlm_jax.data import prepared_folder as folder_lib
from antlm_jax.data.document_store import DocumentFile, Fingerprints
from antlm_jax.data.hold_out import Division
from antlm_jax.data.prepared_folder import Manifest, PreparedSplit
from antlm_jax.data.shards import Recipe, ShardWriter
from antlm_jax.data.spans import Span, make_spans
from antlm_jax.data.text_files import Corpus
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.runtime import cores, files, progress

STAGING = "preparing"  # folder of the plan, and of the finished tasks' counts
_LOCK = "preparing.lock"
_ARGUMENTS = "arguments.json"
# Bytes: smaller texts are a single task, and larger tasks are divided.
_SMALL = 1 << 26
_SHARD = 1 << 30


@dataclasses.dataclass(frozen=True)
class _TaskCounts:
  """Contents of the file of a finished task."""

  sources: dict[str, dict]  # bytes and sha256 of each source, by name
  split: PreparedSplit  # of its rows to train on
  records: dict[str, int]  # the `readers.Tally`
  files: dict[str, int]  # bytes of each file that it leaves, by path
  tokenizer: str  # sha256 of the tokenizer's file


class Preparation:
  """A text to prepare into a folder, in a number of tasks."""

  def __init__(
    self,
    recipe: Recipe,
    corpus: Corpus,
    output: files.Path,
    tokenizer: Tokenizer | None = None,
    tasks: int | None = None,
  ):
    """Makes the spans; by default, trains a tokenizer and chooses `tasks`."""
    self.recipe = recipe
    self.corpus = corpus
    self.output = pathlib.Path(output)
    self.tokenizer = tokenizer
    self.spans = make_spans(corpus, recipe.seq_len)
    self._staging = self.output / STAGING
    self._plan_file = self._staging / "plan.json"
    if not tasks and self.is_begun:  # maybe by a process with other cores
      tasks = files.read_json(self._plan_file, "the plan")["settings"]["tasks"]
    self.tasks = tasks or _number_of_tasks(corpus, self.spans)

  def write_arguments(self) -> None:
    """Writes all that a process needs to run a task, for `of_arguments`."""
    arguments = {
      "recipe": dataclasses.asdict(self.recipe),
      "corpus": dataclasses.asdict(self.corpus),
      "tasks": self.tasks,
    }
    files.write_json(self._staging / _ARGUMENTS, arguments)

  @classmethod
  def of_arguments(cls, output: files.Path) -> "Preparation":
    """Returns the preparation whose arguments a process wrote to a folder.

    Raises a UserError if there is none.
    """
    path = pathlib.Path(output, STAGING, _ARGUMENTS)
    if not path.exists():
      raise UserError(f"no process prepares {output} now: give --text")
    arguments = files.read_json(path, "the preparation of other processes")
    recipe = Recipe(**arguments["recipe"])
    corpus = Corpus(**arguments["corpus"])
    return cls(recipe, corpus, output, tasks=arguments["tasks"])

  @property
  def is_begun(self) -> bool:
    """Whether the folder has a plan."""
    return os.path.exists(self._plan_file)  # Path raises for very long names

  def begin(self) -> None:
    """Makes the folder and its plan, or checks that its plan is the same.

    Raises:
      UserError: The folder has other files, or tasks of other text or settings.
    """
    plan = {
      "settings": self.recipe.recorded | {"tasks": self.tasks},
      "text": dict(
        _identity(self.corpus, split, path)
        for split, path in self.corpus.prepared
        if not path.startswith(readers.HUB)
      ),
    }
    # Before any work that could not be written after it.
    files.check_writable(self.output, folder=True)
    self._made = not self.output.exists()
    if not self.is_begun:
      temporary = {STAGING, _LOCK}  # of a task that begins now as well
      if not self._made and {p.name for p in self.output.iterdir()} - temporary:
        raise UserError(
          f"output {self.output} is not empty; choose another output"
        )
      with files.writing(self.output):
        self._staging.mkdir(parents=True, exist_ok=True)
      files.write_json(self._plan_file, plan)
    begun = files.read_json(self._plan_file, "the plan")
    if not isinstance(begun.get("settings"), dict):
      raise UserError(
        f"{self._plan_file} has no settings: delete {self.output}, or choose"
        " another output"
      )
    differ = differences(begun["settings"], plan["settings"])
    if begun.get("text") != plan["text"]:
      differ.append("files of other names, sizes or times")
    if differ:
      raise UserError(
        f"{self.output} was begun otherwise ({'; '.join(differ)}); delete it,"
        " or choose another output"
      )
    tokenizer_file = self.output / folder_lib.TOKENIZER
    if self.tokenizer is not None and not tokenizer_file.exists():
      files.write_text(tokenizer_file, self.tokenizer.to_json())

  def sealing(self, refuse: bool = True):
    """Locks the folder for the one process that will seal it.

    If it is another process, raises a UserError; with `refuse=False`, yields
    False.
    """
    return files.file_lock(self.output / _LOCK, refuse=refuse)

  def divide(self) -> None:
    """Chooses the documents to hold out; trains the tokenizer on the others.

    A given or existing tokenizer is used as it is.
    """
    path = self.output / folder_lib.TOKENIZER
    self._hash_documents()
    # The other tasks wait for the first task.
    with files.file_lock(self._staging / "tokenizer.lock", wait=True):
      if not self._division_file.exists():
        _write_arrays(self._division_file, self._choose_held_out()._asdict())
      if path.exists():
        self.tokenizer = Tokenizer.load(path)
        return
      # Train text alone: the held-out text stays unseen. Spread over the text,
      # since the tokenizer may see only a part of it.
      order = sorted(self.spans, key=lambda s: hashing.spread(s.number))
      spans = progress.track(order, "part", "tokenizer")
      divided = map(self._read_train_and_dev, spans)
      self.tokenizer = Tokenizer.train(
        (piece.text for train, _ in divided for piece in train.read()),
        self.recipe.vocab_size,
        self.recipe.kind,
      )
      files.write_text(path, self.tokenizer.to_json())

  def _hash_documents(self) -> None:
    """Hashes the documents of all tasks, together with other processes."""
    # First the tasks that no process is at, then those of killed processes.
    for wait in (False, True):
      for task in range(self.tasks):
        if self._hashes_file(task).exists() or self._division_file.exists():
          continue
        lock = self._lock_file(task)
        with files.file_lock(lock, wait, refuse=False) as is_free:
          if is_free and not self._hashes_file(task).exists():
            arrays = {}
            for span in self._spans(task):
              documents = self.corpus.read_parts(span.parts)
              hashes, sizes = document_store.fingerprints(documents)
              arrays |= {f"h{span.number}": hashes, f"s{span.number}": sizes}
            _write_arrays(self._hashes_file(task), arrays)

  def _choose_held_out(self) -> Division:
    """Chooses the held-out documents by the hashes of all tasks."""
    dev = None
    if self.corpus.dev:
      dev = document_store.fingerprints(self.corpus.read("dev"))
    spans = []
    for task in range(self.tasks):
      with np.load(self._hashes_file(task)) as arrays:
        spans += [
          Fingerprints(arrays[f"h{span.number}"], arrays[f"s{span.number}"])
          for span in self._spans(task)
        ]
    return hold_out.divide_documents(
      spans, self.recipe.dev_share, self.recipe.dedup, dev
    )

  @functools.cached_property
  def _marks(self) -> re.Pattern:
    return marks.marks_of(self.tokenizer)

  @functools.cached_property
  def _division(self) -> Division:
    with np.load(self._division_file) as arrays:
      return Division(**arrays)

  def remaining(self) -> list[int]:
    """Returns the numbers of the tasks that are not finished."""
    if (self.output / folder_lib.MANIFEST).exists():
      return []
    left = [i for i in range(self.tasks) if not self._is_finished(i)]
    for task in filter(lambda task: self._counts_file(task).exists(), left):
      progress.say(
        f"warning: files of task {task} are missing or changed: it is not done"
      )
    return left

  def size(self, task: int) -> int:
    """Returns the bytes that a task reads."""
    return sum(span.bytes for span in self._spans(task))

  def packed(self, task: int) -> int:
    """Returns the bytes that a task has packed, in this or another process."""
    spans = self._spans(task)
    path = self._progress_file(task)
    done = path.stat().st_size if path.exists() else 0
    return sum(span.bytes for span in spans[:done])

  def pack(self, task: int) -> Iterator[int]:
    """Writes a task's shard, documents and counts, unless they exist.

    Yields the bytes of each span once it is packed.
    """
    # If a killed process left the task running, wait: it may finish it.
    with files.file_lock(self._lock_file(task), wait=True):
      if self._is_finished(task):
        return
      for path in (self._counts_file(task), self._progress_file(task)):
        path.unlink(missing_ok=True)
      sources = {}
      tally = readers.Tally()
      writer = self._writer("train", task, self.tasks)
      for span in self._spans(task):
        for path, (index, _) in span.parts:
          # The task of a source's first part records the source.
          if index == 0:
            name = self.corpus.source_name("train", path)
            sources[name] = fingerprint(self.corpus, path)
        train, dev = self._read_train_and_dev(span, tally)
        writer.keep("dev", dev.read())  # `seal` packs these
        writer.pack(train, span.number)  # and keeps its documents, too
        with (
          files.writing(self.output),
          self._progress_file(task).open("ab") as file,
        ):
          file.write(b".")  # a byte for each span: see `packed`
        yield span.bytes
      counts = _TaskCounts(
        sources=sources,
        split=writer.close(),
        records=dict(tally),
        files=self._file_sizes(task),
        tokenizer=folder_lib.sha256(self.output / folder_lib.TOKENIZER),
      )
      files.write_json(self._counts_file(task), dataclasses.asdict(counts))

  def seal(self) -> Manifest:
    """Writes the held-out split and the manifest, unless they exist.

    Raises:
      UserError: There are too few words to train on, or held out.
    """
    manifest_file = self.output / folder_lib.MANIFEST
    if manifest_file.exists():
      return Manifest.load(self.output)
    counts_of_tasks = [self._read_counts(task) for task in range(self.tasks)]
    records = {"train": readers.Tally(), "dev": readers.Tally()}
    sources = {
      self.corpus.source_name("dev", path): fingerprint(self.corpus, path)
      for path in self.corpus.dev
    }
    for counts in counts_of_tasks:
      records["train"].update(counts.records)
      sources |= counts.sources
    splits = {
      "train": shards.joined(counts.split for counts in counts_of_tasks),
      "dev": self._write_held_out(records["dev"]),
    }
    tally = sum(records.values(), readers.Tally())
    self._check(splits, tally)
    self._say(splits, tally)
    for name, tally in records.items():
      if left_out := readers.left_out(tally):
        progress.say(f"{name}: {left_out}")
    path = self.output / folder_lib.TOKENIZER
    vocab_size = self.tokenizer.vocab_size
    manifest = Manifest(
      settings=self.recipe.recorded,
      sources=[
        {"split": split, "path": name} | sources[name]
        for split, path in self.corpus.prepared
        for name in [self.corpus.source_name(split, path)]
      ],
      tokenizer={"sha256": folder_lib.sha256(path), "vocab_size": vocab_size},
      seq_len=self.recipe.seq_len,
      dtype=rows.token_dtype(vocab_size),
      segmented=self.recipe.segmented,
      splits=splits,
    )
    files.write_json(manifest_file, dataclasses.asdict(manifest))
    self._clear()
    return manifest

  def discard(self) -> None:
    """Deletes this preparation's files, unless a task of several is done."""
    done = any(self._counts_file(task).exists() for task in range(self.tasks))
    if self.tasks > 1 and done:
      progress.say("finished tasks are kept: run the same command to resume")
      return
    (self.output / folder_lib.TOKENIZER).unlink(missing_ok=True)
    for split, count in (("train", self.tasks), ("dev", 1)):
      for index in range(count):
        self._rows_file(split, index, count).unlink(missing_ok=True)
        shutil.rmtree(self._documents_folder(split, index), ignore_errors=True)
    self._clear()
    # Only if they hold nothing else.
    with contextlib.suppress(OSError):
      (self.output / "documents").rmdir()
    with contextlib.suppress(OSError):
      if self._made:
        self.output.rmdir()

  def _is_finished(self, task: int) -> bool:
    """Whether a task's results are there, made with the present tokenizer."""
    tokenizer = self.output / folder_lib.TOKENIZER
    if not self._counts_file(task).exists() or not tokenizer.is_file():
      return False
    counts = self._read_counts(task)
    return counts is not None and (
      counts.tokenizer == folder_lib.sha256(tokenizer)
      and counts.files == self._file_sizes(task)
    )

  def _read_counts(self, task: int) -> _TaskCounts | None:
    """Returns the counts of a task that has ended; None if some are missing."""
    fields = files.read_json(self._counts_file(task), "the counts of a task")
    try:
      split = PreparedSplit.load(fields["split"])
      return _TaskCounts(**fields | {"split": split})
    except (AttributeError, KeyError, TypeError):
      return None

  def _file_sizes(self, task: int) -> dict[str, int]:
    """Returns the sizes of the files that a task leaves, by path."""
    rows_file = self._rows_file("train", task, self.tasks)
    texts = self._documents_folder("train", task).rglob("*")
    paths = [path for path in (rows_file, *texts) if path.is_file()]
    return {
      str(path.relative_to(self.output)): path.stat().st_size for path in paths
    }

  def _spans(self, task: int) -> list[Span]:
    first, end = (len(self.spans) * i // self.tasks for i in (task, task + 1))
    return self.spans[first:end]

  def _read_train_and_dev(
    self, span: Span, tally: readers.Tally | None = None
  ) -> tuple[DocumentFile, DocumentFile]:
    """Reads a span, and divides it into texts to train on and held-out texts.

    Raises a UserError if it has other documents than when it was divided.
    """
    read = self.corpus.read_parts(span.parts, tally)
    if tally is not None:
      read = marks.counted(read, self._marks, tally)
    documents = document_store.spool(read, self._staging)
    train_sizes = self._division.of_span(span.number)
    if len(np.unique(documents.documents)) != len(train_sizes):
      raise UserError(
        f"{span.parts[0][0]} has changed meanwhile: delete {self.output}, and"
        " prepare it again"
      )
    share = self.recipe.share
    return hold_out.divide_texts(documents, train_sizes, share, span.number)

  def _write_held_out(self, tally: readers.Tally) -> PreparedSplit:
    """Writes the rows of the held-out documents of all tasks, or of files."""
    writer = self._writer("dev", 0, 1)
    if self.corpus.dev:
      documents = self.corpus.read("dev", tally)
      documents = marks.counted(documents, self._marks, tally)
    else:
      documents = document_store.read_kept_documents(self.output, "dev")
    held_out = document_store.spool(documents, self._staging)
    if self.corpus.dev:
      writer.keep("dev", held_out.read())
    writer.pack(held_out, 0)
    return writer.close()

  def _writer(self, split: str, index: int, count: int) -> ShardWriter:
    return ShardWriter(
      self.recipe,
      self.tokenizer,
      self._rows_file(split, index, count),
      self._documents_folder(split, index),
      split,
    )

  def _clear(self) -> None:
    """Deletes the plan, the counts and the locks."""
    files_of_task = (
      self._counts_file,
      self._progress_file,
      self._lock_file,
      self._hashes_file,
    )
    for task in range(self.tasks):
      for file_of in files_of_task:
        file_of(task).unlink(missing_ok=True)
    lock = self._staging / "tokenizer.lock"
    arguments = self._staging / _ARGUMENTS
    for path in (self._plan_file, self._division_file, lock, arguments):
      path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else's files
      self._staging.rmdir()
    (self.output / _LOCK).unlink(missing_ok=True)

  def _counts_file(self, task: int) -> pathlib.Path:
    return self._staging / f"{task:05}.json"

  def _progress_file(self, task: int) -> pathlib.Path:
    return self._staging / f"{task:05}.spans"

  def _hashes_file(self, task: int) -> pathlib.Path:
    return self._staging / f"{task:05}.npz"

  @property
  def _division_file(self) -> pathlib.Path:
    return self._staging / "division.npz"

  def _lock_file(self, task: int) -> pathlib.Path:
    return self._staging / f"{task:05}.lock"

  def _rows_file(self, split: str, index: int, count: int) -> pathlib.Path:
    return self.output / folder_lib.rows_file(split, index, count)

  def _documents_folder(self, split: str, index: int) -> pathlib.Path:
    return self.output / "documents" / f"{split}-{index:05}"

  def _check(
    self, splits: dict[str, PreparedSplit], tally: readers.Tally
  ) -> None:
    if self.corpus.separator and not tally["separators"]:
      raise UserError(
        f"the separator {self.corpus.separator!r} is nowhere in the text"
      )
    for name, split in splits.items():
      if not split.documents:
        names = " ".join(
          self.corpus.source_name("the list", path)
          for path in self.corpus.paths
        )
        raise UserError(f"no words for {name} in {names}; give more text")
    for name, split in splits.items():
      if not split.rows:
        raise UserError(
          f"the {name} split has {split.tokens} tokens, less than a row of"
          f" {self.recipe.seq_len}; give more text, a smaller seq_len or,"
          " if it is held out, a larger dev_share"
        )

  def _say(
    self, splits: dict[str, PreparedSplit], tally: readers.Tally
  ) -> None:
    """Prints counts."""
    progress.say(readers.document_ends(tally))
    # The size of a copy that is left out is negative.
    sizes = self._division.train_sizes.clip(0)
    if warning := readers.warning_of_headings(tally, sizes):
      progress.say(warning)
    if warning := marks.warning(tally, self.tokenizer):
      progress.say(warning)
    division = self._division
    if division.copies or division.leaked:
      total = len(division.train_sizes)
      line = (
        f"copies: {division.copies:,} of {total:,} documents repeat another"
      )
      if self.recipe.dedup:
        line += " and are left out"
      else:
        line += (
          f"; {division.leaked:,} of {division.held_out:,} held-out documents"
          " are also trained on (--dedup leaves copies out)"
        )
      progress.say(line)
    if division.cut >= 0:
      progress.say(
        "dev: no dev file is given, so the end of document"
        f" {division.cut + 1:,} is held out; the documents are too few or too"
        " large to hold out whole documents"
      )
    elif not self.corpus.dev:
      share = splits["dev"].text_bytes / division.text_bytes
      progress.say(
        f"dev: no dev file is given, so {share:.1%} of the text is held out, in"
        " whole documents"
      )
    for name, split in splits.items():
      progress.say(
        f"{name}: {split.documents:,} documents, {split.words:,} words,"
        f" {split.tokens:,} tokens ({split.tokens / split.words:.2f} per word,"
        f" {split.text_bytes / split.tokens:.2f} bytes each),"
        f" {split.rows:,} rows, {split.dropped:,} tokens dropped,"
        f" {split.padding / (split.rows * self.recipe.seq_len):.1%} padding"
      )
    train = splits["train"]
    if note := words.note_of_words(train.text_bytes, train.words):
      progress.say(note)


def is_ready(folder: files.Path, recipe: Recipe, corpus: Corpus) -> bool:
  """Returns whether a folder is prepared with this recipe from this text.

  Raises:
    UserError: It is prepared otherwise.
  """
  if not os.path.exists(os.path.join(folder, folder_lib.MANIFEST)):
    return False
  manifest = Manifest.load(folder)
  differ = differences(manifest.settings, recipe.recorded)
  # Other paths to the same text are fine.
  before = [(source["split"], source["sha256"]) for source in manifest.sources]
  now = [
    (split, fingerprint(corpus, path)["sha256"])
    for split, path in corpus.prepared
  ]
  if before != now:
    differ.append("other text")
  if differ:
    raise UserError(
      f"{folder} is already prepared otherwise ({'; '.join(differ)}); choose"
      " another output"
    )
  progress.say(
    f"{folder} is already prepared with these settings and this text"
  )
  return True


def _write_arrays(path: pathlib.Path, arrays: Mapping) -> None:
  """Writes arrays to a file, whole or not at all."""
  with files.replacing(path) as temporary, temporary.open("wb") as file:
    np.savez(file, **arrays)


def _number_of_tasks(corpus: Corpus, spans: Sequence[Span]) -> int:
  """Returns the number of tasks that fits the text and the process."""
  size = sum(span.bytes for span in spans)
  # The readers of a script are not in other processes.
  if size < _SMALL or not all(map(readers.is_own, corpus.train)):
    return 1
  return min(len(spans), max(cores.count_cores(), -(-size // _SHARD)))


def _identity(corpus: Corpus, split: str, path: str) -> tuple[str, object]:
  """Returns a file's name in a plan, and values that change with the file."""
  if (name := corpus.source_name(split, path)) != path:
    return name, fingerprint(corpus, path)
  return path, [os.path.getsize(path), os.stat(path).st_mtime_ns]


def fingerprint(corpus: Corpus, path: str) -> dict:
  """Returns the size and hash of a source, for the manifest."""
  if not path.startswith(readers.HUB):
    return {"bytes": os.path.getsize(path), "sha256": folder_lib.sha256(path)}
  # A dataset of a hub is not one file: its text counts.
  size = 0
  digest = hashlib.sha256()
  for piece in corpus.read_parts([(path, readers.WHOLE)]):
    text = piece.text.encode("utf-8")
    size += len(text)
    digest.update(text + b"\0")
  return {"bytes": size, "sha256": digest.hexdigest()}


def differences(recorded: dict, requested: dict) -> list[str]:
  """Returns the settings that differ, with both values, for an error."""
  pairs = {
    name: (recorded.get(name), requested.get(name))
    for name in recorded | requested
  }
  return [f"{n} {a} there, {b} asked" for n, (a, b) in pairs.items() if a != b]
