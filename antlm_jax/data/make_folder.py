"""Makes a prepared folder from text: documents, a tokenizer and packed rows.

The text is read once, into a temporary file. A first pass over a sample of it
trains the tokenizer. A second pass encodes, packs and writes all of it.
"""

import collections
import dataclasses
import hashlib
import itertools
import os
import pathlib
import time
from collections.abc import Iterator

import numpy as np

from antlm_jax import cli
from antlm_jax import settings as settings_lib
from antlm_jax.data import document_store, hold_out, packing, readers, rows
from antlm_jax.data import prepared_folder as folder_lib
from antlm_jax.data.document_store import Texts
from antlm_jax.data.packing import BOUNDARIES, PACKINGS
from antlm_jax.data.prepared_folder import SPLITS, Manifest, Prepared, Split
from antlm_jax.data.readers import RULES
from antlm_jax.data.text_files import Corpus, find
from antlm_jax.data.tokenizer import KINDS, Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting

# Bytes of text encoded at once. The tokenizers library needs 30 times as much.
_BATCH_BYTES = 1 << 22  # 4 MiB
_SAMPLED = 64  # pieces in a row that train the tokenizer
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
    "Path to a tokenizer.json; or a model whose tokenizer to use: a run, a"
    " folder of transformers or a name on the Hub. Without it, prepare trains"
    " one",
  )
  vocab_size: int = setting(
    16_000, "Vocabulary size of the trained tokenizer", least=260, most=1 << 20
  )
  kind: str = setting(
    "bpe", "Kind of the trained tokenizer", choices=tuple(KINDS)
  )
  seq_len: int = setting(128, "Tokens in a row", least=2, most=1 << 20)
  packing: str = setting(
    "stream",
    "How documents fill rows: one after the other (stream), each in its own"
    " segment (documents), or one after the other with each row cut in two"
    " segments at random, as in arXiv 2507.00994 (chunks)",
    choices=PACKINGS,
  )
  documents: str = setting(
    "auto",
    "Where a document of plain text ends: at a blank line, after 64 KiB or at"
    " the next heading ` = Title = ` (auto), at each line end (line), or with"
    " the file (file)",
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


def make(settings: Preparation, tokenizer: Tokenizer | None = None) -> Manifest:
  """Prepares a folder, or finds that it is already prepared.

  A `tokenizer` replaces the file `settings.tokenizer`, which then only names it
  in errors.

  Raises:
    UserError: The settings, the text or the folder cannot be used. The folder
      is then as it was before.
  """
  if settings.tokenizer and tokenizer is None:
    tokenizer = Tokenizer.load(settings.tokenizer)
  _check(settings, tokenizer)
  reading = {"documents": settings.documents, "column": settings.column}
  corpus = find(settings.text, settings.dev, **reading)
  progress.say(str(corpus))
  wanted = _asked(settings, tokenizer), _sources(corpus)
  output = pathlib.Path(settings.output)
  if os.path.exists(output / folder_lib.MANIFEST):
    manifest = Prepared.open(output).manifest
    _check_same(output, manifest, *wanted)
    progress.say(
      f"{output} is already prepared with these settings and this text"
    )
    return manifest
  # Before any work that could not be written after it.
  files.check_writable(output, folder=True)
  if output.exists() and any(output.iterdir()):
    raise UserError(f"output {output} is not empty; choose another --output")
  if os.path.ismount(output.resolve()):
    raise UserError(
      f"output {output} is a mount point, which nothing can replace; choose a"
      f" folder in it, such as --output={output / 'prepared'}"
    )
  begin = time.monotonic()
  with files.replacing(output.resolve()) as folder:
    folder.mkdir()
    manifest = _make(settings, tokenizer, corpus, wanted, folder)
  progress.say(
    f"vocabulary {manifest.tokenizer['vocab_size']:,}, rows of"
    f" {settings.seq_len} tokens; {output} ready in"
    f" {time.monotonic() - begin:.0f} s"
  )
  return manifest


def is_prepared(
  settings: Preparation, tokenizer: Tokenizer | None = None
) -> bool:
  """Returns whether `make` made the folder with these settings.

  It does not read the text. The arguments are those of `make`.

  Raises:
    UserError: The tokenizer, or what is in the folder, cannot be read.
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
    size, special = settings.vocab_size, len(KINDS[settings.kind])
    if size < 256 + special:
      raise UserError(
        f"vocab_size {size} is too small: 256 bytes and {special} special"
        f" tokens need at least {256 + special}"
      )
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
  del asked["output"], asked["text"], asked["dev"]
  if tokenizer is not None:
    file = pathlib.Path(settings.tokenizer or "")
    json = file.read_bytes() if file.is_file() else tokenizer.to_json().encode()
    asked["tokenizer"] = hashlib.sha256(json).hexdigest()
    del asked["vocab_size"], asked["kind"]
  return asked


def _sources(corpus: Corpus) -> list[dict]:
  """Returns the size and hash of each source, for the manifest."""
  out = []
  for split, path in ((s, path) for s in SPLITS for path in getattr(corpus, s)):
    if path.startswith(readers.HUB):
      # A dataset of a hub is not one file: its text counts.
      size, digest = 0, hashlib.sha256()
      only = dataclasses.replace(corpus, train=(path,))
      for text, _ in only.pieces("train"):
        size += len(text.encode("utf-8"))
        digest.update(text.encode("utf-8") + b"\0")
      sha256 = digest.hexdigest()
    else:
      size, sha256 = os.path.getsize(path), folder_lib.sha256(path)
    out.append({"split": split, "path": path, "bytes": size, "sha256": sha256})
  return out


def _check_same(
  output: pathlib.Path, there: Manifest, asked: dict, sources: list[dict]
) -> None:
  differ = [
    f"{name} {there.settings.get(name)} there, {asked.get(name)} asked"
    for name in asked | there.settings
    if there.settings.get(name) != asked.get(name)
  ]
  # Other paths to the same text are fine.
  before, now = (
    [(source["split"], source["sha256"]) for source in those]
    for those in (there.sources, sources)
  )
  if before != now:
    differ.append("other text")
  if differ:
    raise UserError(
      f"{output} is already prepared otherwise ({'; '.join(differ)}); choose"
      " another --output"
    )


def _make(
  settings: Preparation,
  tokenizer: Tokenizer | None,
  corpus: Corpus,
  wanted: tuple[dict, list[dict]],
  folder: pathlib.Path,
) -> Manifest:
  """Fills an empty folder."""
  texts = _read(settings, corpus, folder)
  if tokenizer is None:
    # Train text alone: the held-out text stays unseen.
    sample = _sample(texts["train"])
    tokenizer = Tokenizer.train(sample, settings.vocab_size, settings.kind)
  path = folder / folder_lib.TOKENIZER
  path.write_text(tokenizer.to_json(), "utf-8")
  store = document_store.writer(folder / "documents", SPLITS)
  splits = {
    name: _write(settings, tokenizer, texts[name], folder, name, store)
    for name in SPLITS
  }
  store.close_all()
  vocab_size = tokenizer.vocab_size
  manifest = Manifest(
    *wanted,
    tokenizer={"sha256": folder_lib.sha256(path), "vocab_size": vocab_size},
    seq_len=settings.seq_len,
    dtype=rows.token_dtype(vocab_size),
    segmented=settings.packing != "stream",
    splits=splits,
  )
  files.write_json(folder / folder_lib.MANIFEST, dataclasses.asdict(manifest))
  return manifest


def _read(
  settings: Preparation, corpus: Corpus, folder: pathlib.Path
) -> dict[str, Texts]:
  """Reads the text of each split."""
  whole = document_store.spool(corpus.pieces("train"), folder)
  dev_share = 0.0 if corpus.dev else settings.dev_share
  train, dev, cut = hold_out.divide(whole, dev_share, settings.share)
  if corpus.dev:
    dev = document_store.spool(corpus.pieces("dev"), folder)
  found = {"train": train, "dev": dev}
  for name, texts in found.items():
    if not len(texts.sizes):
      where = " ".join((*settings.text, *settings.dev))
      raise UserError(f"no words for {name} in {where}; give more text")
  if cut is not None:
    progress.say(
      f"dev: the end of document {cut + 1}, since documents are too few or too"
      " large to hold out whole ones"
    )
  elif not corpus.dev:
    share = dev.sizes.sum() / whole.sizes.sum()
    progress.say(f"dev: {share:.1%} of the text, in whole documents")
  return found


def _sample(texts: Texts) -> Iterator[str]:
  # Spread over the text, since the tokenizer may see only a part of it.
  firsts = range(0, len(texts.sizes), _SAMPLED)
  order = sorted(firsts, key=lambda first: first * 0.618 % 1)
  for first in progress.track(order, f"{_SAMPLED} documents", "tokenizer"):
    yield from texts.read(first, first + _SAMPLED)


def _write(
  settings: Preparation,
  tokenizer: Tokenizer,
  texts: Texts,
  folder: pathlib.Path,
  name: str,
  store,
) -> Split:
  """Encodes, packs, counts and writes the texts of a split."""
  # By size, not by number: a text may have five bytes or a million.
  batch_of = np.cumsum(texts.sizes) // _BATCH_BYTES
  ends = np.flatnonzero(np.diff(batch_of, append=-1)) + 1
  batches = list(itertools.pairwise([0, *ends.tolist()]))
  around = packing.boundary_ids(tokenizer, settings.boundary)
  tally = collections.Counter()

  def documents() -> Iterator[np.ndarray]:
    for begin, end in progress.track(batches, "4 MiB", name):
      batch = texts.read(begin, end)
      store.add_examples({name: ({"text": text} for text in batch)})
      tally["documents"] += len(batch)
      tally["words"] += sum(len(text.split()) for text in batch)
      tally["text_bytes"] += sum(len(text.encode("utf-8")) for text in batch)
      for tokens in packing.bound(tokenizer.encode_batch(batch), *around):
        tally["tokens"] += len(tokens)
        yield tokens

  # Generators all the way: no more than a block of rows is in memory.
  length = settings.seq_len
  if settings.packing == "chunks":
    blocks = packing.chunks(documents(), length, settings.seed)
  elif settings.packing == "documents":
    blocks = packing.documents(documents(), length, tokenizer.pad_id)
  else:
    blocks = packing.stream(documents(), length)
  path = folder / folder_lib.rows_file(name)
  dtype = rows.token_dtype(tokenizer.vocab_size)
  count = rows.write(path, blocks, dtype, settings.packing != "stream")
  if not count:
    raise UserError(
      f"the {name} split has {tally['tokens']} tokens, less than a row of"
      f" {length}; give more text, a smaller --seq_len or, if it is held out, a"
      " larger --dev_share"
    )
  # Packing either drops the last tokens or pads: one of the two is 0.
  spare = count * length - tally["tokens"]
  split = Split(
    rows=count,
    **tally,
    dropped=max(-spare, 0),
    padding=max(spare, 0),
    file=path.name,
    bytes=path.stat().st_size,
    sha256=folder_lib.sha256(path),
  )
  progress.say(
    f"{name}: {split.documents:,} documents, {split.words:,} words,"
    f" {split.tokens:,} tokens ({split.tokens / split.words:.2f} per word,"
    f" {split.text_bytes / split.tokens:.2f} bytes each), {count:,} rows,"
    f" {split.dropped:,} tokens dropped,"
    f" {split.padding / (count * length):.1%} padding"
  )
  return split
