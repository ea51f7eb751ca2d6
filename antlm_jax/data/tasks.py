"""Prepares a text in numbered tasks, on one machine or on many.

*sample* trains the tokenizer. *pack* number i of n writes a shard of rows,
`train-0000i-of-0000n.array_record`. *seal*, when all are there, writes the rows
that are held out, and the manifest. All of them work in the output folder. Each
does nothing if its result is there, so a text is prepared by the same commands
after any kill.

The unit is a span: some small files, or a part of a large file. Its rows depend
on the settings, the seed and its text alone, and a task packs consecutive
spans. So the rows are the same for any number of tasks.
"""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from antlm_jax.data import document_store, hold_out, packing, readers, rows
from antlm_jax.data import prepared_folder as folder_lib
from antlm_jax.data.document_store import Texts
from antlm_jax.data.prepared_folder import SPLITS, Manifest, Shard, Split
from antlm_jax.data.readers import RULES, Part
from antlm_jax.data.text_files import Corpus
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, progress

STAGING = "preparing"  # folder of the plan, and of the finished tasks' counts
_PLAN = "plan.json"
_LOCK = "preparing.lock"
# Bytes of text encoded at once. The tokenizers library needs 30 times as much.
_BATCH_BYTES = 1 << 22  # 4 MiB
# Bytes of a span. At least 2,048 rows or so: the last tokens of a span, which
# fill no row, are dropped.
_LEAST, _MOST, _ROWS = 1 << 19, 1 << 22, 2048


class Span(NamedTuple):
  """Parts of sources that are read, divided and packed by themselves."""

  number: int
  parts: tuple[tuple[str, Part], ...]
  bytes: int


def spans(corpus: Corpus, seq_len: int) -> list[Span]:
  """Divides the text to train on."""
  rule = RULES[corpus.documents]
  extents = [(path, *readers.extent(path, rule)) for path in corpus.train]
  total = sum(size for _, size, _ in extents)
  unit = max(min(max(total >> 12, _LEAST), _MOST), _ROWS * seq_len)
  out, held, held_bytes = [], [], 0
  for path, size, most in extents:
    count = min(most, max(1, round(size / unit)))
    for index in range(count):
      held.append((path, Part(index, count)))
      held_bytes += size / count
      if held_bytes >= unit / 2:
        out.append(Span(len(out), tuple(held), round(held_bytes)))
        held, held_bytes = [], 0
  if held:
    out.append(Span(len(out), tuple(held), round(held_bytes)))
  return out


@dataclasses.dataclass
class Job:
  """A text to prepare, into a folder, in a number of tasks."""

  settings: "make_folder.Preparation"  # noqa: F821
  asked: dict  # settings that the result depends on, for the manifest
  corpus: Corpus
  tokenizer: Tokenizer | None  # given, or from `sample`
  tasks: int
  spans: list[Span]

  def __post_init__(self):
    self.output = pathlib.Path(self.settings.output)
    self._staging = self.output / STAGING

  def begin(self) -> None:
    """Makes the folder, or checks that its tasks are of the same plan.

    Raises:
      UserError: The folder has other files, or tasks of other text or settings.
    """
    plan = {"settings": self.asked | {"tasks": self.tasks}}
    plan["text"] = {
      path: [os.path.getsize(path), os.stat(path).st_mtime_ns]
      for split in SPLITS
      for path in getattr(self.corpus, split)
      if not path.startswith(readers.HUB)
    }
    there = self._staging / _PLAN
    # Before any work that could not be written after it.
    files.check_writable(self.output, folder=True)
    self._made = not self.output.exists()
    if not there.exists():
      own = {STAGING, _LOCK}  # of a task that begins now as well
      if not self._made and {p.name for p in self.output.iterdir()} - own:
        raise UserError(
          f"output {self.output} is not empty; choose another --output"
        )
      with files.writing(self.output):
        self._staging.mkdir(parents=True, exist_ok=True)
      files.write_json(there, plan)
    begun = files.read_json(there, "the plan")
    differ = differences(begun["settings"], plan["settings"])
    if begun["text"] != plan["text"]:
      differ.append("files of other names, sizes or times")
    if differ:
      raise UserError(
        f"{self.output} was begun otherwise ({'; '.join(differ)}); delete it,"
        " or choose another --output"
      )

  def locked(self, wait: bool):
    """Holds the folder: for all of the work, or for `sample` and `seal`."""
    return files.locked(self.output / _LOCK, wait)

  def sample(self) -> None:
    """Trains the tokenizer, or uses a given or existing tokenizer."""
    path = self.output / folder_lib.TOKENIZER
    if path.exists():
      self.tokenizer = Tokenizer.load(path)
      return
    if self.tokenizer is None:
      # Train text alone: the held-out text stays unseen. Spread over the text,
      # since the tokenizer may see only a part of it.
      order = sorted(self.spans, key=lambda span: span.number * 0.618 % 1)
      shown = progress.track(order, "part", "tokenizer")
      self.tokenizer = Tokenizer.train(
        (text for span in shown for text in self._divided(span)[0].read()),
        self.settings.vocab_size,
        self.settings.kind,
      )
    files.write_text(path, self.tokenizer.to_json())

  def remaining(self) -> list[int]:
    """Returns the numbers of the tasks that are not finished."""
    if (self.output / folder_lib.MANIFEST).exists():
      return []
    left = [i for i in range(self.tasks) if not self._is_finished(i)]
    for task in filter(lambda task: self._counts(task).exists(), left):
      progress.say(
        f"warning: files of task {task} are missing or changed: it is not done"
      )
    return left

  def _is_finished(self, task: int) -> bool:
    """Whether a task's results are there, made with the present tokenizer."""
    path, tokenizer = self._counts(task), self.output / folder_lib.TOKENIZER
    if not path.exists():
      return False
    counts = files.read_json(path, "the counts of a task")
    return tokenizer.is_file() and (
      counts.get("tokenizer") == folder_lib.sha256(tokenizer)
      and counts["files"] == self._sizes(task)
    )

  def _sizes(self, task: int) -> dict[str, int]:
    """Returns the sizes of the files that a task leaves, by path."""
    output, place = self.output, _documents(self.output, "train", task)
    rows_file = output / folder_lib.rows_file("train", task, self.tasks)
    found = [path for path in (rows_file, *place.rglob("*")) if path.is_file()]
    return {str(p.relative_to(output)): p.stat().st_size for p in found}

  def size(self, task: int) -> int:
    """Returns the bytes that a task reads."""
    return sum(span.bytes for span in self._spans(task))

  def _spans(self, task: int) -> list[Span]:
    first, end = (len(self.spans) * i // self.tasks for i in (task, task + 1))
    return self.spans[first:end]

  def pack(self, task: int, done: Callable[[int], None]) -> None:
    """Writes a shard; `done` is called with the bytes of each finished span."""
    if self._is_finished(task):
      return
    counts, tally = {"sources": {}, "cut": []}, readers.Tally()
    with files.locked(self._lock(task)):
      self._counts(task).unlink(missing_ok=True)
      writer = _Writer(self, "train", task, self.tasks)
      for span in self._spans(task):
        for path, part in span.parts:
          if part.index == 0:
            counts["sources"][path] = source(self.corpus, path)
        train, dev, cut = self._divided(span, tally)
        counts["cut"] += [] if cut is None else [cut]
        writer.keep("dev", dev.read())
        writer.write(train, span.number)
        done(span.bytes)
      counts["split"] = dataclasses.asdict(writer.close())
      counts["records"] = tally
      counts["files"] = self._sizes(task)
      counts["tokenizer"] = folder_lib.sha256(
        self.output / folder_lib.TOKENIZER
      )
      files.write_json(self._counts(task), counts)

  def seal(self) -> Manifest:
    """Writes the held-out split and the manifest, unless they exist.

    Raises:
      UserError: There are too few words to train on, or held out.
    """
    where = self.output / folder_lib.MANIFEST
    if where.exists():
      return Manifest.load(self.output)
    parts = [
      files.read_json(self._counts(task), "the counts of a task")
      for task in range(self.tasks)
    ]
    train = _sum([Split.load(part["split"]) for part in parts])
    sources = {path: source(self.corpus, path) for path in self.corpus.dev}
    for part in parts:
      sources |= part["sources"]
    records = {"train": readers.Tally(), "dev": readers.Tally()}
    for part in parts:
      records["train"].update(part.get("records", {}))
    pieces = self.corpus.pieces("dev", records["dev"])
    if not self.corpus.dev:
      pieces = map(readers.Piece, document_store.read(self.output, "dev"))
    writer = _Writer(self, "dev", 0, 1)
    dev = document_store.spool(pieces, self._staging)
    if self.corpus.dev:
      writer.keep("dev", dev.read())
    writer.write(dev, 0)
    splits = {"train": train, "dev": writer.close()}
    self._check(splits)
    self._say(splits, [number for part in parts for number in part["cut"]])
    for name, tally in records.items():
      if left_out := readers.left_out(tally):
        progress.say(f"{name}: {left_out}")
    path = self.output / folder_lib.TOKENIZER
    vocab_size = self.tokenizer.vocab_size
    manifest = Manifest(
      settings=self.asked,
      sources=[
        {"split": name, "path": path} | sources[path]
        for name in SPLITS
        for path in getattr(self.corpus, name)
      ],
      tokenizer={"sha256": folder_lib.sha256(path), "vocab_size": vocab_size},
      seq_len=self.settings.seq_len,
      dtype=rows.token_dtype(vocab_size),
      segmented=self.settings.packing != "stream",
      splits=splits,
    )
    files.write_json(where, dataclasses.asdict(manifest))
    self._clear()
    return manifest

  def discard(self) -> None:
    """Deletes its own files, unless a task of several has finished."""
    done = any(self._counts(task).exists() for task in range(self.tasks))
    if self.tasks > 1 and done:
      progress.say("finished tasks are kept: run the same command to resume")
      return
    (self.output / folder_lib.TOKENIZER).unlink(missing_ok=True)
    for split, count in (("train", self.tasks), ("dev", 1)):
      for index in range(count):
        name = folder_lib.rows_file(split, index, count)
        (self.output / name).unlink(missing_ok=True)
        place = _documents(self.output, split, index)
        shutil.rmtree(place, ignore_errors=True)
    self._clear()
    # Only if they hold nothing else.
    with contextlib.suppress(OSError):
      (self.output / "documents").rmdir()
    with contextlib.suppress(OSError):
      if self._made:
        self.output.rmdir()

  def _clear(self) -> None:
    """Deletes the plan, the counts and the locks."""
    for task in range(self.tasks):
      for path in (self._counts(task), self._lock(task)):
        path.unlink(missing_ok=True)
    (self._staging / _PLAN).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # somebody else's files
      self._staging.rmdir()
    (self.output / _LOCK).unlink(missing_ok=True)

  def _counts(self, task: int) -> pathlib.Path:
    return self._staging / f"{task:05}.json"

  def _lock(self, task: int) -> pathlib.Path:
    return self._staging / f"{task:05}.lock"

  def _divided(
    self, span: Span, tally: readers.Tally | None = None
  ) -> tuple[Texts, Texts, int | None]:
    """Reads a span: training text, held-out text, and counts of cut text."""
    column, rule = self.corpus.column, RULES[self.corpus.documents]
    pieces = (
      piece
      for path, part in span.parts
      for piece in readers.pieces(path, rule, column, part, tally)
    )
    whole = document_store.spool(pieces, self._staging)
    share = 0.0 if self.corpus.dev else self.settings.dev_share
    number, count = span.number, len(self.spans)
    return hold_out.divide(whole, share, self.settings.share, number, count)

  def _check(self, splits: dict[str, Split]) -> None:
    for name, split in splits.items():
      if not split.documents:
        where = " ".join((*self.settings.text, *self.settings.dev))
        raise UserError(f"no words for {name} in {where}; give more text")
    for name, split in splits.items():
      if not split.rows:
        raise UserError(
          f"the {name} split has {split.tokens} tokens, less than a row of"
          f" {self.settings.seq_len}; give more text, a smaller --seq_len or,"
          " if it is held out, a larger --dev_share"
        )

  def _say(self, splits: dict[str, Split], cut: list[int]) -> None:
    count = len(self.spans)
    if cut:
      where = f"documents in {len(cut):,} of {count:,} parts of the text"
      if count == 1:
        where = f"document {cut[0] + 1}"
      progress.say(
        f"dev: no dev file is given, so the end of {where} is held out; the"
        " documents are too few or too large to hold out whole documents"
      )
    elif not self.corpus.dev:
      train, dev = (splits[name].text_bytes for name in SPLITS)
      share = dev / (dev + train)
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
        f" {split.padding / (split.rows * self.settings.seq_len):.1%} padding"
      )


class _Writer:
  """Encodes, packs, counts and writes the documents of a shard."""

  def __init__(self, job: Job, split: str, index: int, count: int):
    self._settings, self._tokenizer = job.settings, job.tokenizer
    self._split, self._digest = split, 0
    self._tally = collections.Counter()
    self._path = job.output / folder_lib.rows_file(split, index, count)
    dtype = rows.token_dtype(job.tokenizer.vocab_size)
    segmented = job.settings.packing != "stream"
    with files.writing(self._path):
      self._rows = rows.Writer(self._path, dtype, segmented)
    place = _documents(job.output, split, index)
    shutil.rmtree(place, ignore_errors=True)  # left by a kill
    with files.writing(place):
      self._documents = document_store.writer(place, SPLITS)

  def keep(self, split: str, texts: Iterable[str]) -> None:
    """Writes documents, as they are."""
    with files.writing(self._path):
      self._documents.add_examples({split: ({"text": t} for t in texts)})

  def write(self, texts: Texts, span: int) -> None:
    """Writes the texts of a span."""
    # Generators all the way: no more than a block of rows is in memory.
    length, encoded = self._settings.seq_len, self._encoded(texts)
    if self._settings.packing == "chunks":
      blocks = packing.chunks(encoded, length, self._settings.seed, span)
    elif self._settings.packing == "documents":
      blocks = packing.documents(encoded, length, self._tokenizer.pad_id)
    else:
      blocks = packing.stream(encoded, length)
    before = self._tally["tokens"]
    with files.writing(self._path):
      count, digest = self._rows.write(blocks)
    # Packing either drops the last tokens or pads: one of the two is 0.
    spare = count * length - (self._tally["tokens"] - before)
    self._tally["dropped"] += max(-spare, 0)
    self._tally["padding"] += max(spare, 0)
    self._tally["rows"] += count
    if count:
      self._digest += folder_lib.span_hash(span, digest)

  def close(self) -> Split:
    with files.writing(self._path):
      self._rows.close()
      self._documents.close_all()
    shard = Shard(
      rows=self._tally["rows"],
      bytes=self._path.stat().st_size,
      sha256=folder_lib.sha256(self._path),
    )
    return Split(
      **{name: self._tally[name] for name in folder_lib.COUNTS},
      sha256=folder_lib.hexadecimal(self._digest),
      shards=(shard,),
    )

  def _encoded(self, texts: Texts) -> Iterator[np.ndarray]:
    """Yields the tokens of each document."""
    # By size, not by number: a text may have five bytes or a million.
    batch_of = np.cumsum(texts.sizes) // _BATCH_BYTES
    ends = np.flatnonzero(np.diff(batch_of, append=-1)) + 1
    settings, tokenizer = self._settings, self._tokenizer
    around = packing.boundary_ids(tokenizer, settings.boundary)
    for begin, end in itertools.pairwise([0, *ends.tolist()]):
      batch = texts.read(begin, end)
      if self._split == "train":
        self.keep("train", batch)
      self._tally["documents"] += len(batch)
      self._tally["words"] += sum(len(text.split()) for text in batch)
      self._tally["text_bytes"] += sum(len(t.encode("utf-8")) for t in batch)
      for tokens in packing.bound(tokenizer.encode_batch(batch), *around):
        self._tally["tokens"] += len(tokens)
        yield tokens


def source(corpus: Corpus, path: str) -> dict:
  """Returns the size and hash of a source, for the manifest."""
  if not path.startswith(readers.HUB):
    return {"bytes": os.path.getsize(path), "sha256": folder_lib.sha256(path)}
  # A dataset of a hub is not one file: its text counts.
  size, digest = 0, hashlib.sha256()
  for text, _ in dataclasses.replace(corpus, train=(path,)).pieces("train"):
    size += len(text.encode("utf-8"))
    digest.update(text.encode("utf-8") + b"\0")
  return {"bytes": size, "sha256": digest.hexdigest()}


def differences(there: dict, asked: dict) -> list[str]:
  """Returns the settings that differ, with both values, for an error."""
  pairs = {name: (there.get(name), asked.get(name)) for name in there | asked}
  return [f"{n} {a} there, {b} asked" for n, (a, b) in pairs.items() if a != b]


def _documents(output: pathlib.Path, split: str, index: int) -> pathlib.Path:
  """Returns the folder of a task's documents."""
  return output / "documents" / f"{split}-{index:05}"


def _sum(splits: list[Split]) -> Split:
  """Returns the split of all shards, in order."""
  return Split(
    **{
      name: sum(getattr(split, name) for split in splits)
      for name in folder_lib.COUNTS
    },
    sha256=folder_lib.hexadecimal(sum(int(s.sha256, 16) for s in splits)),
    shards=tuple(shard for split in splits for shard in split.shards),
  )
