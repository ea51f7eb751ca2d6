"""Writes a shard: the documents of some spans, as text and as packed rows."""

import collections
import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from antlm_jax.data import document_store, packing, rows
from antlm_jax.data import prepared_folder as folder_lib
from antlm_jax.data.document_store import DocumentFile
from antlm_jax.data.prepared_folder import SPLITS, PreparedSplit, Shard
from antlm_jax.data.readers import Document
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.runtime import files

# Bytes of text encoded at once. The tokenizers library needs 30 times as much.
_BATCH_BYTES = 1 << 22  # 4 MiB


@dataclasses.dataclass(frozen=True)
class Recipe:
  """Settings that rows depend on, in addition to their text.

  Two preparations of the same text with the same recipe are equal. The
  arguments of `antlm_jax.prepare` have the same names.
  """

  column: str
  tokenizer: str | None  # SHA-256 of a given tokenizer; None to train it
  vocab_size: int  # of the trained tokenizer, as its kind
  kind: str
  seq_len: int
  packing: str
  documents: str
  separator: str  # "" for none
  dedup: bool
  boundary: str
  dev_share: float
  share: float
  seed: int
  words: int | None = None  # of the first documents; None for all text

  @classmethod
  def of(cls, arguments: Mapping, tokenizer: str | None) -> "Recipe":
    """Takes its settings from all arguments, and a tokenizer's hash."""
    names = {field.name for field in dataclasses.fields(cls)}
    values = {name: arguments[name] for name in names}
    return cls(**values | {"tokenizer": tokenizer})

  @property
  def segmented(self) -> bool:
    """Whether rows are divided into segments."""
    return self.packing != "stream"

  @property
  def recorded(self) -> dict:
    """The settings by name, as a manifest has them."""
    values = dataclasses.asdict(self)
    for name in ("separator", "dedup", "words"):  # as before there were any
      if not values[name]:
        del values[name]
    if self.tokenizer is not None:  # no setting of training one counts
      del values["vocab_size"], values["kind"]
    return values


class ShardWriter:
  """Keeps documents, and encodes, packs and counts those of one split."""

  def __init__(
    self,
    recipe: Recipe,
    tokenizer: Tokenizer,
    rows_path: pathlib.Path,
    documents_folder: pathlib.Path,
    split: str,
  ):
    self._recipe = recipe
    self._tokenizer = tokenizer
    self._path = rows_path
    self._split = split
    self._counts = collections.Counter()
    self._digest = 0
    dtype = rows.token_dtype(tokenizer.vocab_size)
    with files.writing(rows_path):
      rows_path.unlink(missing_ok=True)  # it may be a link to another file
      self._rows = rows.RowWriter(rows_path, dtype, recipe.segmented)
    shutil.rmtree(documents_folder, ignore_errors=True)  # left by a kill
    with files.writing(documents_folder):
      self._documents = document_store.DocumentWriter(documents_folder, SPLITS)

  def keep(self, split: str, documents: Iterable[Document]) -> None:
    """Writes documents as text only."""
    with files.writing(self._path):
      self._documents.add(split, documents)

  def pack(self, documents: DocumentFile, span: int) -> None:
    """Writes the rows of a span's documents."""
    # Generators all the way: no more than a block of rows is in memory.
    length = self._recipe.seq_len
    encoded = self._encoded(documents)
    if self._recipe.packing == "chunks":
      blocks = packing.chunks(encoded, length, self._recipe.seed, span)
    elif self._recipe.packing == "documents":
      blocks = packing.pack_documents(encoded, length, self._tokenizer.pad_id)
    else:
      blocks = packing.pack_stream(encoded, length)
    before = self._counts["tokens"]
    with files.writing(self._path):
      count, digest = self._rows.write(blocks)
    # Packing either drops the last tokens or pads: one of the two is 0.
    spare = count * length - (self._counts["tokens"] - before)
    self._counts["dropped"] += max(-spare, 0)
    self._counts["padding"] += max(spare, 0)
    self._counts["rows"] += count
    if count:
      self._digest += folder_lib.span_hash(span, digest)

  def close(self) -> PreparedSplit:
    """Ends the files, and returns their counts and hashes."""
    with files.writing(self._path):
      self._rows.close()
      self._documents.close()
    shard = Shard(
      rows=self._counts["rows"],
      bytes=self._path.stat().st_size,
      sha256=folder_lib.sha256(self._path),
    )
    return PreparedSplit(
      **{name: self._counts[name] for name in folder_lib.COUNTS},
      sha256=folder_lib.hexadecimal(self._digest),
      shards=(shard,),
    )

  def _encoded(self, documents: DocumentFile) -> Iterator[np.ndarray]:
    """Yields the tokens of each document, or of a long document's pieces."""
    around = packing.boundary_ids(self._tokenizer, self._recipe.boundary)
    for batch in _batches(documents.read()):
      pieces = [piece for piece, _ in batch]
      texts = [piece.text for piece in pieces]
      if self._split == "train":
        self.keep("train", pieces)
      self._counts["documents"] += sum(piece.begins for piece in pieces)
      self._counts["words"] += sum(len(text.split()) for text in texts)
      self._counts["text_bytes"] += sum(len(t.encode("utf-8")) for t in texts)
      encoded = self._tokenizer.encode_batch(texts)
      for tokens, (piece, ends) in zip(encoded, batch, strict=True):
        tokens = packing.bound(tokens, *around, piece.begins, ends)
        self._counts["tokens"] += len(tokens)
        yield tokens


def _batches(
  pieces: Iterator[Document],
) -> Iterator[list[tuple[Document, bool]]]:
  """Groups pieces by bytes; yields each with whether it ends its document."""
  # By size, not by number: a text may have five bytes or a million.
  batch = []
  size = 0
  following = itertools.chain(pieces, [Document("")])
  for piece, after in itertools.pairwise(following):
    batch.append((piece, after.begins))
    size += len(piece.text.encode("utf-8"))
    if size >= _BATCH_BYTES:
      yield batch
      batch = []
      size = 0
  if batch:
    yield batch


def joined(shards: Iterable[PreparedSplit]) -> PreparedSplit:
  """Returns the split that has some shards, in order."""
  shards = list(shards)
  return PreparedSplit(
    **{
      name: sum(getattr(split, name) for split in shards)
      for name in folder_lib.COUNTS
    },
    sha256=folder_lib.hexadecimal(sum(int(s.sha256, 16) for s in shards)),
    shards=tuple(shard for split in shards for shard in split.shards),
  )
