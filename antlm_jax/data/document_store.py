"""Text as a tensorflow-datasets dataset of documents, in their order."""

import contextlib
import functools
import io
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import tensorflow_datasets as tfds
from absl import logging

from antlm_jax.errors import UserError

# tensorflow-datasets holds the shard that it writes in memory.
_SHARD_BYTES = 32 << 20
# Documents read at once: one by one is ten times slower, and each may be 1 MiB.
_READ = 64


class Texts(NamedTuple):
  """The documents of a split."""

  read: Callable[[], Iterator[str]]  # yields them
  size: int  # bytes of UTF-8, about


class Documents(tfds.core.ShardBasedBuilder):
  """Documents of text: `{"text": Text}`, splits as they are given.

  Shard based, since a GeneratorBasedBuilder keeps up to 1 GB in memory to
  shuffle, and needs TensorFlow beyond that.
  """

  VERSION = tfds.core.Version("1.0.0")

  def __init__(self, texts: Mapping[str, Texts], **kwargs):
    self._texts = texts
    super().__init__(**kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description="Documents of plain text, in the order of their files.",
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      disable_shuffling=True,
    )

  def _shard_iterators_per_split(self, dl_manager):
    return {split: _shards(texts) for split, texts in self._texts.items()}


def build(
  folder: str | os.PathLike, texts: Mapping[str, Texts]
) -> tfds.core.DatasetBuilder:
  """Writes the documents of each split under `folder`, as ArrayRecord.

  Returns:
    The builder: `build(...).as_data_source("train")[0]["text"]` is bytes.
  """
  options = tfds.download.DownloadConfig(try_download_gcs=False)
  with _quiet():
    builder = Documents(texts, data_dir=folder, file_format="array_record")
    builder.download_and_prepare(download_config=options)
  return builder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Silences tensorflow-datasets' notes on downloads and custom configs."""
  verbosity = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    logging.set_verbosity(verbosity)


def _shards(texts: Texts) -> list[Callable[[], Iterator]]:
  """Makes the generators of a split's shards, to be called in order."""
  # One stream under all shards: tensorflow-datasets runs them in order, and
  # each takes up where the one before stopped, the last all that is left.
  examples = ((i, {"text": text}) for i, text in enumerate(texts.read()))
  count = math.ceil(texts.size / _SHARD_BYTES) or 1
  limits = [_SHARD_BYTES] * (count - 1) + [math.inf]
  return [functools.partial(_take, examples, limit) for limit in limits]


def _take(examples: Iterator, limit: float) -> Iterator:
  """Yields examples until their text reaches `limit` characters."""
  taken = 0
  while taken < limit and (example := next(examples, None)):
    taken += len(example[1]["text"])
    yield example


def read(prepared: str | os.PathLike, split: str) -> Iterator[str]:
  """Yields the documents of a split of a prepared folder.

  Raises:
    UserError: They are not there.
  """
  found = next(pathlib.Path(prepared).rglob("dataset_info.json"), None)
  if found is None:
    raise UserError(f"{prepared} holds no documents; prepare its text again")
  source = tfds.builder_from_directory(found.parent).as_data_source(split)
  for first in range(0, len(source), _READ):
    block = range(first, min(first + _READ, len(source)))
    for example in source.__getitems__(block):
      yield example["text"].decode("utf-8")
