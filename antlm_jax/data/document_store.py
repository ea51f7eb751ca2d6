"""Documents on disk: in a temporary file, and in a prepared folder."""

import array
import dataclasses
import mmap
import os
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from antlm_jax.data.readers import Piece
from antlm_jax.errors import UserError

# Documents read at once. Reading them one by one is ten times slower.
_BATCH = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
  """Pieces of documents in a file, in order."""

  data: mmap.mmap | bytes
  begins: np.ndarray  # byte where each begins, int64 [n]
  ends: np.ndarray  # byte after each, int64 [n]
  documents: np.ndarray  # number of the document of each, int64 [n]

  @property
  def sizes(self) -> np.ndarray:
    """Sizes in bytes, int64 `[n]`."""
    return self.ends - self.begins

  def read(self, first: int = 0, end: int | None = None) -> list[str]:
    """Reads pieces by number, stripped, and leaves out blank pieces."""
    spans = np.stack([self.begins[first:end], self.ends[first:end]], axis=1)
    texts = (self.decode(*span).strip() for span in spans.tolist())
    return [text for text in texts if text]

  def decode(self, begin: int, end: int) -> str:
    """Returns the text between two bytes, without half a character."""
    return self.data[begin:end].decode("utf-8", errors="ignore")


def spool(pieces: Iterable[Piece], folder: str | os.PathLike) -> Texts:
  """Writes pieces to a file without a name, so that sources are read once."""
  sizes, firsts, data = array.array("q"), array.array("b"), b""
  with tempfile.TemporaryFile(dir=folder) as file:
    for text, first in pieces:
      sizes.append(file.write(text.encode("utf-8")))
      firsts.append(first)
    file.flush()
    # The mapping keeps the file until it is collected.
    if sizes:
      data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  ends = np.cumsum(sizes, dtype=np.int64)
  return Texts(data, ends - sizes, ends, np.cumsum(firsts, dtype=np.int64) - 1)


def writer(folder: str | os.PathLike, splits: Sequence[str]):
  """Returns a `SequentialWriter` of a dataset `{"text": Text}` of documents."""
  import tensorflow_datasets as tfds  # slow to import: not for --help
  from tensorflow_datasets.core import dataset_info

  os.makedirs(folder)
  identity = dataset_info.DatasetIdentity(
    name="documents",
    version=tfds.core.Version("1.0.0"),
    data_dir=os.fspath(folder),
    module_name=__name__,
  )
  info = tfds.core.DatasetInfo(
    builder=identity,
    description="Documents of plain text, in the order of their files.",
    features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
    disable_shuffling=True,
  )
  out = tfds.core.SequentialWriter(
    info, max_examples_per_shard=1 << 20, file_format="array_record"
  )
  out.initialize_splits(list(splits))
  return out


def read(prepared: str | os.PathLike, split: str) -> Iterator[str]:
  """Yields the documents of a split of a prepared folder.

  Raises:
    UserError: The folder holds no documents.
  """
  import tensorflow_datasets as tfds

  # Each task of a preparation writes a dataset.
  found = sorted(pathlib.Path(prepared).rglob("dataset_info.json"))
  if not found:
    raise UserError(f"{prepared} holds no documents; prepare its text again")
  for info in found:
    builder = tfds.builder_from_directory(info.parent)
    if not builder.info.splits[split].num_examples:
      continue
    source = builder.as_data_source(split)
    for first in range(0, len(source), _BATCH):
      block = range(first, min(first + _BATCH, len(source)))
      for example in source.__getitems__(block):
        yield example["text"].decode("utf-8")
