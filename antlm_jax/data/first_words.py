"""The first documents of a text, with a number of words."""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

from antlm_jax.data import readers, text_files
from antlm_jax.data.text_files import Corpus
from antlm_jax.errors import UserError
from antlm_jax.runtime import progress


@contextlib.contextmanager
def selection(corpus: Corpus, words: int) -> Iterator[Corpus]:
  """Writes the first documents of a corpus, and yields the corpus of those.

  Each split has whole documents, in the order of its sources, until they have
  `words`. The files are deleted at the end of the block.
  """
  with tempfile.TemporaryDirectory(prefix=text_files.WRITTEN) as folder:
    paths = {}
    names = {}
    for split, sources in (("train", corpus.train), ("dev", corpus.dev)):
      if not sources:
        continue
      path = pathlib.Path(folder, f"{split}.jsonl")
      documents = _first_documents(corpus, split, words)
      text_files.write_documents(path, documents, corpus.column)
      paths[split] = (str(path),)
      names[split] = f"first {words:,} words of {' '.join(sources):.300}"
    # The records are documents, in which the separator is no more.
    yield dataclasses.replace(corpus, **paths, separator="", written=names)


def _first_documents(corpus: Corpus, split: str, words: int) -> Iterator[str]:
  """Yields the first documents of a split, and says how many there are."""
  tally = readers.Tally()
  documents = readers.whole_documents(corpus.read(split, tally))
  word_count = 0
  document_count = 0
  with (
    contextlib.closing(documents),
    progress.Amount(words, "word", split) as bar,
  ):
    for document in documents:
      yield document
      size = len(document.split())
      bar.add(size)
      word_count += size
      document_count += 1
      if word_count >= words:
        break
  if corpus.separator and not tally["separators"]:
    raise UserError(
      f"the separator {corpus.separator!r} is nowhere in the first"
      f" {word_count:,} words of {split}"
    )
  all_text = "" if word_count >= words else ", which is all of the text"
  progress.say(
    f"{split}: the first {document_count:,} documents have {word_count:,}"
    f" words{all_text}"
  )
  if left_out := readers.left_out(tally):
    progress.say(f"{split}: {left_out}")
