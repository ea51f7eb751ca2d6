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


class Spool:
  """Documents in a temporary file, so that their sources are read only once.

  Attributes:
    begins, ends: Bytes where each piece begins and ends, int64 `[n]`.
    documents: Number of the document that each piece belongs to, int64 `[n]`.
  """

  def __init__(self, pieces: Iterable[Piece], folder: str | os.PathLike):
    """Writes pieces to a file without a name, in a folder."""
    sizes, firsts = array.array("q"), array.array("b")
    with tempfile.TemporaryFile(dir=folder) as file:
      for text, first in pieces:
        sizes.append(file.write(text.encode("utf-8")))
        firsts.append(first)
      file.flush()
      # The mapping keeps the file, which has no name, until it is collected.
      self._bytes = b""
      if sizes:
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    self.ends = np.cumsum(sizes, dtype=np.int64)
    self.begins = self.ends - sizes
    self.documents = np.cumsum(firsts, dtype=np.int64) - 1

  def read(self, begin: int, end: int) -> str:
    """Returns the text between two bytes, without half a character."""
    return self._bytes[begin:end].decode("utf-8", errors="ignore")


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
  """Some texts of a spool, in order."""

  spool: Spool
  spans: np.ndarray  # bytes where each begins and ends, int64 [n, 2]

  @property
  def sizes(self) -> np.ndarray:
    """Sizes in bytes, int64 `[n]`."""
    return self.spans[:, 1] - self.spans[:, 0]

  def read(self, first: int = 0, end: int | None = None) -> list[str]:
    """Reads texts by number, without blank ones and space at their ends."""
    spans = self.spans[first:end].tolist()
    texts = (self.spool.read(begin, stop).strip() for begin, stop in spans)
    return [text for text in texts if text]


class Writer:
  """Writes documents as a tensorflow-datasets dataset `{"text": Text}`."""

  def __init__(self, folder: str | os.PathLike, splits: Sequence[str]):
    import tensorflow_datasets as tfds  # slow to import: not for --help
    from tensorflow_datasets.core import dataset_info

    os.mkdir(folder)
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
    self._writer = tfds.core.SequentialWriter(
      info, max_examples_per_shard=1 << 20, file_format="array_record"
    )
    self._writer.initialize_splits(list(splits))

  def write(self, split: str, texts: Sequence[str]) -> None:
    """Appends documents to a split."""
    self._writer.add_examples({split: ({"text": text} for text in texts)})

  def close(self) -> None:
    """Completes the dataset."""
    self._writer.close_all()


def read(prepared: str | os.PathLike, split: str) -> Iterator[str]:
  """Yields the documents of a split of a prepared folder.

  Raises:
    UserError: The folder holds no documents.
  """
  import tensorflow_datasets as tfds

  found = next(pathlib.Path(prepared).rglob("dataset_info.json"), None)
  if found is None:
    raise UserError(f"{prepared} holds no documents; prepare its text again")
  source = tfds.builder_from_directory(found.parent).as_data_source(split)
  for first in range(0, len(source), _BATCH):
    block = range(first, min(first + _BATCH, len(source)))
    for example in source.__getitems__(block):
      yield example["text"].decode("utf-8")
