"""Text as a tensorflow-datasets dataset of documents, in their order."""

import contextlib
import dataclasses
import functools
import io
import math
import os
from collections.abc import Callable, Iterator

import tensorflow_datasets as tfds
from absl import logging

from antlm_jax.data import text

# tensorflow-datasets holds the shard that it writes in memory.
_SHARD_CHARACTERS = 32 << 20


@dataclasses.dataclass(eq=False, kw_only=True)
class TextConfig(tfds.core.BuilderConfig):
  """What to read, and what a document is: see `text.split_documents`."""

  sources: text.Sources
  documents: str = "auto"  # a name in `text.RULES`
  dev_share: float = 0.02
  share: float = 1.0


class Babylm(tfds.core.ShardBasedBuilder):
  """BabyLM's corpora, or any text: `{"text": Text}`, splits train and dev.

  Shard based, since a GeneratorBasedBuilder keeps up to 1 GB in memory to
  shuffle, and needs TensorFlow beyond that.
  """

  VERSION = tfds.core.Version("1.0.0")

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description="Documents of plain text, in the order of their files.",
      features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
      homepage="https://babylm.github.io",
      disable_shuffling=True,
    )

  def _shard_iterators_per_split(self, dl_manager):
    return {split: _shards(self.builder_config, split) for split in text.SPLITS}


def build(folder: str | os.PathLike, config: TextConfig) -> Babylm:
  """Writes the documents that `config` names under `folder`, as ArrayRecord.

  Returns:
    The builder: `build(...).as_data_source("train")[0]["text"]` is bytes.

  Raises:
    UserError: As `text.documents`.
  """
  options = tfds.download.DownloadConfig(try_download_gcs=False)
  with _quiet():
    builder = Babylm(data_dir=folder, config=config, file_format="array_record")
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


def _shards(config: TextConfig, split: str) -> list[Callable[[], Iterator]]:
  """Makes the generators of a split's shards, to be called in order.

  They share one stream of documents, and the last takes what is left: their
  number must be known before the text is read, so it is an estimate.
  """
  # Without files of its own, dev is a share of train's.
  own = getattr(config.sources, split)
  share = 1.0 if own else config.dev_share
  if split == "train":
    share *= config.share
  size = share * sum(f.stat().st_size for f in own or config.sources.train)
  found = text.split_documents(
    config.sources,
    split,
    text.RULES[config.documents],
    config.dev_share,
    config.share,
  )
  # One stream under all shards: tensorflow-datasets runs them in order, and
  # each takes up where the one before stopped.
  examples = ((i, {"text": document}) for i, document in enumerate(found))
  count = math.ceil(size / _SHARD_CHARACTERS) or 1
  limits = [_SHARD_CHARACTERS] * (count - 1) + [math.inf]
  return [functools.partial(_take, examples, limit) for limit in limits]


def _take(examples: Iterator, limit: float) -> Iterator:
  """Yields examples until their text reaches `limit` characters."""
  taken = 0
  while taken < limit and (example := next(examples, None)):
    taken += len(example[1]["text"])
    yield example
