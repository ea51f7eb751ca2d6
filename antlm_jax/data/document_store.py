"""Documents on disk: in a temporary file, and in a prepared folder."""

import array
import dataclasses
import hashlib
import mmap
import os
import pathlib
import shutil
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax import units
from antlm_jax.data.readers import Document
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, records

# Documents read at once. Reading them one by one is ten times slower.
_BATCH = 64
_CHECKED = 1 << 28  # bytes of text between two looks at the free space
_PIECES = 1024  # pieces of a file read at once
_NAME = "documents"
_FORMAT = "array_record"
_CONTINUED = "continued.json"  # numbers of examples that begin no document


@dataclasses.dataclass(frozen=True, eq=False)
class DocumentFile:
  """Documents in a file, in order.

  A document that is too long for memory is in several pieces. All others are
  one piece.
  """

  data: mmap.mmap | bytes
  begins: np.ndarray  # byte where each piece begins, int64 [n]
  ends: np.ndarray  # byte after each piece, int64 [n]
  documents: np.ndarray  # number of the document of each, int64 [n]

  @property
  def sizes(self) -> np.ndarray:
    """Sizes in bytes, int64 `[n]`."""
    return self.ends - self.begins

  def read(self) -> Iterator[Document]:
    """Yields the pieces, stripped, and leaves out blank pieces."""
    last = None  # number of the document of the piece before
    for first in range(0, len(self.begins), _PIECES):
      block = slice(first, first + _PIECES)
      columns = self.begins[block], self.ends[block], self.documents[block]
      for begin, end, number in np.stack(columns, axis=1).tolist():
        if text := records.stripped(self.decode(begin, end)):
          yield Document(text, number != last)
          last = number

  def decode(self, begin: int, end: int) -> str:
    """Returns the text between two bytes, without half a character."""
    return self.data[begin:end].decode("utf-8", errors="ignore")


class Fingerprints(NamedTuple):
  """Hashes uint64 `[n]` and sizes in bytes int64 `[n]` of documents."""

  hashes: np.ndarray
  sizes: np.ndarray


def fingerprints(documents: Iterable[Document]) -> Fingerprints:
  """Hashes documents in Unicode's NFC, without the space at their ends."""
  hashes = array.array("Q")
  sizes = array.array("q")
  digest = hashlib.blake2b(digest_size=8)
  for text, begins, before in documents:
    if begins:
      digest = hashlib.blake2b(digest_size=8)
      hashes.append(0)
      sizes.append(0)
    content = text.lstrip() if begins else before + text
    digest.update(unicodedata.normalize("NFC", content).encode("utf-8"))
    hashes[-1] = int.from_bytes(digest.digest())
    sizes[-1] += len(text.encode("utf-8"))
  return Fingerprints(np.array(hashes, np.uint64), np.array(sizes, np.int64))


def spool(
  documents: Iterable[Document], folder: str | os.PathLike
) -> DocumentFile:
  """Writes documents to a temporary file, so that sources are read once."""
  sizes = array.array("q")
  firsts = array.array("b")
  data = b""
  total = checked = 0  # bytes
  # The errors of sources are UserErrors, so that others are of the file.
  with files.writing(folder), tempfile.TemporaryFile(dir=folder) as file:
    for text, begins, _ in documents:
      sizes.append(file.write(text.encode("utf-8")))
      firsts.append(begins)
      total += sizes[-1]
      if total - checked > _CHECKED:
        _check_space(folder, total)
        checked = total
    file.flush()
    # The mapping keeps the file until it is collected.
    if sizes:
      data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  ends = np.cumsum(sizes, dtype=np.int64)
  numbers = np.cumsum(firsts, dtype=np.int64) - 1
  return DocumentFile(data, ends - sizes, ends, numbers)


def _check_space(folder: str | os.PathLike, size: int) -> None:
  """Raises a UserError if a disk cannot take the rows of some bytes of text."""
  free = shutil.disk_usage(folder).free
  if free < size / 2:  # a token of two bytes has about four characters
    raise UserError(
      f"{folder} is on a disk with {units.quantity(free, 'B')} left, too little"
      f" for the rows of over {units.quantity(size, 'B')} of text: free space,"
      " or prepare less text"
    )


class DocumentWriter:
  """Writes documents as a dataset `{"text": Text}`.

  A second file names the examples that continue the example before them.
  """

  def __init__(self, folder: str | os.PathLike, splits: Sequence[str]):
    import tensorflow_datasets as tfds  # slow to import: not for --help

    os.makedirs(folder)
    self._folder = pathlib.Path(folder)
    self._writer = tfds.core.SequentialWriter(
      _info(folder), max_examples_per_shard=1 << 20, file_format=_FORMAT
    )
    self._writer.initialize_splits(list(splits))
    self._counts = dict.fromkeys(splits, 0)
    self._continued = {split: [] for split in splits}

  def add(self, split: str, documents: Iterable[Document]) -> None:
    """Writes documents, or pieces of them."""
    self._writer.add_examples({split: self._examples(split, documents)})

  def _examples(
    self, split: str, documents: Iterable[Document]
  ) -> Iterator[dict[str, str]]:
    for text, begins, _ in documents:
      if not begins:
        self._continued[split].append(self._counts[split])
      self._counts[split] += 1
      yield {"text": text}

  def close(self) -> None:
    """Ends the files."""
    self._writer.close_all()
    if any(self._continued.values()):
      files.write_json(self._folder / _CONTINUED, self._continued)


def _info(folder: str | os.PathLike):
  """Returns the `DatasetInfo` of a folder of documents, with its features."""
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core import dataset_info

  identity = dataset_info.DatasetIdentity(
    name=_NAME,
    version=tfds.core.Version("1.0.0"),
    data_dir=os.fspath(folder),
    module_name=__name__,
  )
  return tfds.core.DatasetInfo(
    builder=identity,
    description="Documents of plain text, in the order of their files.",
    features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
    disable_shuffling=True,
  )


def read_kept_documents(
  prepared: str | os.PathLike, split: str, step: int = 1
) -> Iterator[Document]:
  """Yields the documents of a split of a prepared folder, stripped.

  With a `step`, yields only every n-th piece of them.

  Raises:
    UserError: The folder holds no documents, or they cannot be read.
  """
  # Each task of a preparation writes a dataset.
  paths = sorted(pathlib.Path(prepared).rglob("dataset_info.json"))
  if not paths:
    raise UserError(f"{prepared} holds no documents; prepare its text again")
  for path in paths:
    try:
      source = _open_documents(path.parent, split)
      pieces_file = path.parent / _CONTINUED
      pieces = {}
      if pieces_file.exists():
        pieces = files.read_json(pieces_file, "pieces")
      continued = {*pieces.get(split, ())}
      numbers = range(0, len(source), step)
      for first in range(0, len(numbers), _BATCH):
        block = numbers[first : first + _BATCH]
        examples = source.__getitems__(block)
        for number, example in zip(block, examples, strict=True):
          text = example["text"].decode("utf-8")
          yield Document(text, number not in continued)
    except Exception as error:  # also assertions of tfds
      raise UserError(
        f"{path.parent} holds no documents of antlm prepare"
        f" ({files.failure_reason(error)}); prepare its text again"
      ) from error


def _open_documents(folder: pathlib.Path, split: str) -> Sequence:
  """Opens the documents of a split of one dataset.

  It reads them with the features of `_info`. A builder of tfds would import
  the Python classes that the folder's features.json names.
  """
  from tensorflow_datasets.core.data_sources import array_record

  info = _info(folder)
  info.read_from_directory(folder)
  kind = getattr(info.file_format, "value", None)
  if (info.name, kind) != (_NAME, _FORMAT):
    raise ValueError(f"it is a dataset {info.name!r} of format {kind}")
  if not info.splits[split].num_examples:
    return ()
  # The folder's own file also has a template for the names.
  for shard in info.splits[split].filepaths:
    if pathlib.Path(shard).parent != folder:
      raise ValueError(f"it names {shard}")
  return array_record.ArrayRecordDataSource(info, split=split)
