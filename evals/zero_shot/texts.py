"""Tasks on texts, from files of any kind or from a prepared folder."""

import dataclasses
import functools
import itertools
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from antlm_jax.data import prepared_folder, readers, splits, text_files
from antlm_jax.data.readers import RULES
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot.task import TaskSettings, ZeroShotTask
from antlm_jax.inference import inputs, scoring
from antlm_jax.inference.scoring import EncodedText, Pass
from antlm_jax.runtime import files, progress
from antlm_jax.settings import require_path, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings(TaskSettings):
  """The settings of tasks on texts."""

  limit: int = setting(0, "Largest number of texts; 0 for all", least=0)
  column: str = setting("text", "Name of the field or column with the text")
  documents: str = setting(
    "auto",
    "Division of plain text into documents, as for prepare",
    choices=tuple(RULES),
  )
  split: str = setting(
    "dev",
    "Part of a divided folder; if nothing is named dev, the text that prepare"
    " trains on",
    choices=(*prepared_folder.SPLITS, "test"),
  )


def read_texts(
  settings: TextSettings, texts: files.Path | Iterable[str] = ""
) -> list[str]:
  """Returns the texts of a list or of a path, which is `data` by default.

  Raises a UserError if there are none.
  """
  origin = "the list of texts"
  if isinstance(texts, str | os.PathLike):
    origin = os.fspath(texts) or settings.data
    require_path(origin, "texts")
    settings = dataclasses.replace(settings, data=origin)
    texts = readers.whole_documents(_read_documents(settings))
  documents = inputs.as_texts(texts, most=settings.limit or None)
  if not documents:
    raise UserError(f"{origin} holds no text")
  return documents


def _read_documents(settings: TextSettings) -> Iterator[readers.Document]:
  folder = pathlib.Path(settings.data)
  split = settings.split
  if (folder / prepared_folder.MANIFEST).exists():
    from antlm_jax.data import document_store  # slow to import: not for --help

    if split not in prepared_folder.SPLITS:
      raise UserError(f"{settings.data}: a prepared folder has no {split}")
    # Text, not rows: the model has a tokenizer of its own.
    yield from document_store.read_kept_documents(folder, split)
    return
  corpus = text_files.find_corpus(
    [settings.data],
    needs_train=split != "test",
    documents=settings.documents,
    column=settings.column,
  )
  # A file is read if its own path is given, also with another name. Without
  # files named train, one named test is in train.
  named = {splits.split_word(path) for path in corpus.train}
  if (
    (split == "dev" and not corpus.dev)
    or (split == "test" and named == {"test"})
    or os.path.isfile(settings.data)
  ):
    split = "train"
  if corpus.unused:
    progress.say(f"{settings.data}: {split} is read\n{corpus}")
  tally = readers.Tally()
  yield from corpus.read(split, tally)
  if left_out := readers.left_out(tally):
    progress.say(f"warning: {settings.data}: {left_out}")


_READS = (
  "Path to a text, jsonl, csv or parquet file, a folder of them, or a prepared"
  " folder"
)
Task = functools.partial(ZeroShotTask, settings=TextSettings, reads=_READS)


def perplexity_of_nats(nats: float) -> float:
  """Returns e to a mean of nats; it is finite even if that overflows."""
  return math.exp(min(nats, 700))


def score_text_parts(
  loaded,
  parts: Sequence[Sequence[EncodedText]],
  passes: tuple[Pass, ...],
  settings: TaskSettings,
) -> scoring.Totals:
  """Scores n texts in parts.

  Returns the sums over the parts of each text, float64 `[n]`. Positions are
  those in a part.
  """
  flat = list(itertools.chain.from_iterable(parts))
  totals = scoring.totals(loaded, flat, passes, **settings.batches)
  owner = np.repeat(np.arange(len(parts)), list(map(len, parts)))
  logprobs = np.bincount(owner, totals.logprobs[:, 0], len(parts))
  likeliest = np.bincount(owner, totals.likeliest, len(parts))
  return scoring.Totals(logprobs, likeliest, totals.by_position)
