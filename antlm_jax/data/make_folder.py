"""Turns text into a prepared folder: documents, tokenizer, packed rows.

`manifest.json` is written last, so a folder without one is unfinished.
"""

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import pathlib
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.data import (
  hold_out,
  packing,
  prepared_folder,
  readers,
  rows,
  text_files,
)
from antlm_jax.data.packing import BOUNDARIES, PACKINGS
from antlm_jax.data.readers import RULES
from antlm_jax.data.text_files import Corpus
from antlm_jax.data.tokenizer import KINDS, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting

_MARKER = ".antlm_jax_prepare"  # tells our unfinished folders from others
_DOCUMENTS = "documents"
# Text encoded at once; the tokenizers library needs 30 times as much for it.
_BATCH_BYTES = 1 << 22
# Documents read at once: one by one is ten times slower, and each may be 1 MiB.
_READ = 64


@dataclasses.dataclass(frozen=True)
class Settings:
  """What to prepare, and how: the arguments of `antlm_jax.prepare`."""

  text: tuple[str, ...] = setting(
    help="what to train on: files, folders, globs, or a dataset of Hugging"
    " Face's, hf://NAME[:CONFIG][:SPLIT]; what is named dev is held out",
    nargs="+",
    action="extend",
    required=False,
    metavar="PATH",
  )
  output: str = setting(help="folder to prepare", read=cli.here)
  dev: tuple[str, ...] = setting(
    (),
    "what to hold out, as --text",
    nargs="+",
    action="extend",
    metavar="PATH",
  )
  column: str = setting(
    "text", "what to read of records, of jsonl, parquet, csv and the like"
  )
  tokenizer: str | None = setting(
    None,
    "a tokenizer.json; or a model's: a run, a folder of transformers, a name on"
    " the Hub; without, one is trained",
  )
  vocab_size: int = setting(
    16_000, "vocabulary of the trained tokenizer", least=260, most=1 << 20
  )
  kind: str = setting("bpe", "of the trained tokenizer", choices=tuple(KINDS))
  seq_len: int = setting(128, "tokens in a row", least=2, most=1 << 20)
  packing: str = setting(
    "stream",
    "documents one after the other; each in a segment of its own; or the"
    " stream in random chunks, two a row (arXiv 2507.00994)",
    choices=PACKINGS,
  )
  documents: str = setting(
    "auto",
    "what one is in plain text: all under a heading ` = Title = `, or up to a"
    " blank line or 64 KiB; a line; or a file",
    choices=tuple(RULES),
  )
  boundary: str = setting(
    "bos_eos",
    "tokens around a document: <s> and </s>, <s> before, </s> after, or none",
    choices=tuple(BOUNDARIES),
  )
  dev_share: float = setting(
    0.02,
    "share of the text that is held out if nothing is named dev",
    over=0,
    most=0.5,
  )
  share: float = setting(
    1.0, "share of the train documents to take, evenly spread", over=0, most=1
  )
  seed: int = setting(0, "of the chunks' lengths")


def prepare(settings: Settings) -> prepared_folder.Manifest:
  """Prepares a folder, or finds it prepared already.

  Raises:
    UserError: The settings, the text or the folder will not do. Nothing
      half-written is left.
  """
  # All that can be refused is, before anything is written.
  _check(settings)
  corpus = text_files.find(
    settings.text,
    settings.dev,
    documents=settings.documents,
    column=settings.column,
  )
  print(corpus, flush=True)
  asked = _asked(settings)
  hashed = [
    {"split": split, "path": source, **_content(source, corpus)}
    for split in hold_out.SPLITS
    for source in getattr(corpus, split)
  ]
  output = pathlib.Path(settings.output)
  # Not pathlib's, which raises at names that cannot be.
  if os.path.exists(output / prepared_folder.MANIFEST):
    manifest = prepared_folder.Prepared.open(output).manifest
    _check_same(manifest, asked, hashed, output)
    print(f"{output} is already prepared with these settings and this text")
    return manifest
  with _claimed(output):
    return _write(settings, corpus, asked, hashed)


# ----------------------------------------------------- the settings, the text


def _check(settings: Settings) -> None:
  settings_lib.check(settings)
  smallest = 2 * packing.SHORTEST_CHUNK
  if settings.packing == "chunks" and settings.seq_len < smallest:
    raise UserError(
      f"seq_len {settings.seq_len} is too small: chunks packing needs at least"
      f" {smallest}"
    )
  if settings.tokenizer:
    _check_roles(settings, Tokenizer.load(settings.tokenizer))
    return
  smallest = 256 + len(KINDS[settings.kind])
  if settings.vocab_size < smallest:
    raise UserError(
      f"vocab_size {settings.vocab_size} is too small: 256 bytes and"
      f" {smallest - 256} special tokens need at least {smallest}"
    )


def _check_roles(settings: Settings, tokenizer: Tokenizer) -> None:
  """Checks that a given tokenizer has the special tokens that packing puts."""
  padded = settings.packing == "documents"
  ids = *BOUNDARIES[settings.boundary], "pad_id" if padded else None
  for name in filter(None, ids):
    if getattr(tokenizer, name) is None:
      raise UserError(
        f"{settings.tokenizer} has no {name[:3]} token, which boundary"
        f" {settings.boundary} with {settings.packing} packing puts; choose"
        " others, or another tokenizer"
      )


def _asked(settings: Settings) -> dict:
  """Returns what the result depends on, as the manifest keeps it."""
  # Where things lie does not matter; a given tokenizer counts by its content.
  asked = dataclasses.asdict(settings)
  del asked["output"], asked["text"], asked["dev"]
  if settings.tokenizer:
    asked["tokenizer"] = prepared_folder.sha256(settings.tokenizer)
    del asked["vocab_size"], asked["kind"]
  return asked


def _content(source: str, corpus: Corpus) -> dict:
  if not source.startswith(readers.HUB):
    size, digest = os.path.getsize(source), prepared_folder.sha256(source)
    return {"bytes": size, "sha256": digest}
  # A dataset has no file of its own: its text stands for it.
  size, digest = 0, hashlib.sha256()
  for text, _ in dataclasses.replace(corpus, train=(source,)).pieces("train"):
    size += len(text.encode("utf-8"))
    digest.update(text.encode("utf-8") + b"\0")
  return {"bytes": size, "sha256": digest.hexdigest()}


def _check_same(
  manifest: prepared_folder.Manifest, asked: dict, hashed: list[dict], output
) -> None:
  there = manifest.settings
  differ = [
    f"{name} {there.get(name)} there, {asked.get(name)} asked"
    for name in asked | there
    if there.get(name) != asked.get(name)
  ]
  contents = [
    [(source["split"], source["sha256"]) for source in sources]
    for sources in (manifest.sources, hashed)
  ]
  if contents[0] != contents[1]:  # other names of the same text are fine
    differ.append("other text")
  if differ:
    raise UserError(
      f"{output} is already prepared otherwise ({'; '.join(differ)}); choose"
      " another --output"
    )


# ----------------------------------------------------------------- the folder


@contextlib.contextmanager
def _claimed(output: pathlib.Path) -> Iterator[None]:
  """Holds a folder for one preparation, and clears it if that fails."""
  files.check_writable(output, folder=True)
  # The marker makes an unfinished folder ours, to be cleared and made again;
  # the lock on it tells whether its process still lives.
  marker, existed = output / _MARKER, output.exists()
  interrupted = marker.exists()
  if existed and any(output.iterdir()) and not interrupted:
    raise UserError(
      f"output {output} is not empty, and is no unfinished preparation; choose"
      " another --output"
    )
  with files.writing(output):
    output.mkdir(parents=True, exist_ok=True)
  with files.locked(marker):
    if interrupted:  # its process was killed, or we would not have the lock
      print(f"{output} holds an interrupted preparation: starting it again")
      _clear(output)
    try:
      with files.writing(output):
        yield
    except BaseException:  # Ctrl-C as well
      _clear(output)
      marker.unlink()
      if not existed:
        output.rmdir()
      raise


def _clear(output: pathlib.Path) -> None:
  """Deletes what a preparation writes, and nothing else."""
  shutil.rmtree(output / _DOCUMENTS, ignore_errors=True)
  rows_files = map(prepared_folder.rows_file, hold_out.SPLITS)
  for name in (
    prepared_folder.TOKENIZER,
    prepared_folder.MANIFEST,
    *rows_files,
  ):
    (output / name).unlink(missing_ok=True)


# ----------------------------------------------------------------- the stages


def _write(
  settings: Settings, corpus: Corpus, asked: dict, hashed: list[dict]
) -> prepared_folder.Manifest:
  begin, output = time.monotonic(), pathlib.Path(settings.output)
  with _stage("documents"):
    documents = _documents(settings, corpus)
  # On the train split alone: what is held out stays unseen.
  with _stage("tokenizer"):
    tokenizer = _tokenizer(settings, documents["train"])
    (output / prepared_folder.TOKENIZER).write_text(
      tokenizer.to_json(), "utf-8"
    )
  written = {}
  for split in hold_out.SPLITS:
    with _stage(f"rows of {split}"):
      written[split] = _split(settings, tokenizer, documents[split], split)
  manifest = prepared_folder.Manifest(
    settings=asked,
    sources=hashed,
    tokenizer={
      "sha256": prepared_folder.sha256(output / prepared_folder.TOKENIZER),
      "vocab_size": tokenizer.vocab_size,
    },
    seq_len=settings.seq_len,
    dtype=rows.token_dtype(tokenizer.vocab_size),
    segmented=settings.packing != "stream",
    splits=written,
  )
  manifest.save(output)  # last: from now on the folder is whole
  for name, s in written.items():
    print(
      f"{name}: {s.documents:,} documents, {s.words:,} words, {s.tokens:,}"
      f" tokens ({s.tokens / s.words:.2f} per word,"
      f" {s.text_bytes / s.tokens:.2f} bytes each), {s.rows:,} rows,"
      f" {s.dropped:,} tokens dropped,"
      f" {s.padding / (s.rows * settings.seq_len):.1%} padding"
    )
  print(
    f"vocabulary {tokenizer.vocab_size:,}, rows of {settings.seq_len} tokens;"
    f" {output} ready in {time.monotonic() - begin:.0f} s"
  )
  return manifest


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
  begin = time.monotonic()
  yield
  print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)


def _documents(settings: Settings, corpus: Corpus) -> dict[str, Sequence]:
  """Writes the documents, and opens each split of them."""
  from antlm_jax.data import document_store  # slow to import: not for --help

  division = hold_out.Division.of(corpus, settings.dev_share, settings.share)
  if division.cut:
    print(
      "the documents are too few or too large to hold out whole ones: dev is"
      f" the end of document {division.cut}"
    )
  texts = {
    split: document_store.Texts(
      functools.partial(division.texts, split), division.size(split)
    )
    for split in hold_out.SPLITS
  }
  builder = document_store.build(
    pathlib.Path(settings.output, _DOCUMENTS), texts
  )
  for split, info in builder.info.splits.items():
    if not info.num_examples:
      where = " ".join((*settings.text, *settings.dev))
      raise UserError(f"no words for {split} in {where}; give more text")
  return {split: builder.as_data_source(split) for split in hold_out.SPLITS}


def _tokenizer(settings: Settings, documents: Sequence) -> Tokenizer:
  if settings.tokenizer:
    return Tokenizer.load(settings.tokenizer)
  # Spread over the text, since a tokenizer may be trained on a part of it.
  order = sorted(range(0, len(documents), _READ), key=lambda i: i * 0.618 % 1)
  texts = itertools.chain.from_iterable(_batches(documents, "", order))
  return Tokenizer.train(texts, settings.vocab_size, settings.kind)


def _split(
  settings: Settings, tokenizer: Tokenizer, documents: Sequence, name: str
) -> prepared_folder.Split:
  """Encodes, packs and writes the documents of a split."""
  tally = collections.Counter()
  # Generators all the way: no more than a block of rows is in memory.
  batches = _batches(documents, name, range(0, len(documents), _READ))
  encoded = _encoded(settings, tokenizer, batches, tally)
  path = pathlib.Path(settings.output, prepared_folder.rows_file(name))
  count = rows.write(
    path,
    _pack(settings, tokenizer, encoded),
    rows.token_dtype(tokenizer.vocab_size),
    settings.packing != "stream",
  )
  if not count:
    raise UserError(
      f"the {name} split has {tally['tokens']} tokens, less than a row of"
      f" {settings.seq_len}; give more text, a smaller --seq_len or, if it is"
      " held out, a larger --dev_share"
    )
  # Packing either drops the last tokens or pads: one of the two is 0.
  spare = count * settings.seq_len - tally["tokens"]
  return prepared_folder.Split(
    rows=count,
    **tally,
    dropped=max(-spare, 0),
    padding=max(spare, 0),
    file=path.name,
    bytes=path.stat().st_size,
    sha256=prepared_folder.sha256(path),
  )


def _encoded(
  settings, tokenizer: Tokenizer, batches: Iterable[list[str]], tally
) -> Iterator[np.ndarray]:
  """Yields the tokens of documents, boundaries included, and counts them."""
  ends = packing.boundary_ids(tokenizer, settings.boundary)
  for batch in batches:
    tally["documents"] += len(batch)
    tally["words"] += sum(len(document.split()) for document in batch)
    tally["text_bytes"] += sum(len(d.encode("utf-8")) for d in batch)
    for tokens in packing.bound(tokenizer.encode_batch(batch), *ends):
      tally["tokens"] += len(tokens)
      yield tokens


def _pack(
  settings: Settings, tokenizer: Tokenizer, documents: Iterable
) -> Iterator[packing.Block]:
  if settings.packing == "chunks":
    return packing.chunks(documents, settings.seq_len, settings.seed)
  if settings.packing == "documents":
    return packing.documents(documents, settings.seq_len, tokenizer.pad_id)
  return packing.stream(documents, settings.seq_len)


def _batches(
  documents: Sequence, label: str, order: Sequence[int]
) -> Iterator[list[str]]:
  """Yields documents in lists of `_BATCH_BYTES`, showing progress.

  `order` has the first of each `_READ` documents.
  """
  # By size, not by number: a document may have five bytes or a million.
  batch, size = [], 0
  for first in progress.track(order, f"{_READ} documents", label):
    indices = range(first, min(first + _READ, len(documents)))
    for example in documents.__getitems__(indices):
      batch.append(example["text"].decode("utf-8"))
      size += len(example["text"])
      if size >= _BATCH_BYTES:
        yield batch
        batch, size = [], 0
  yield batch
