"""Tasks on texts, from files of any kind or from a prepared folder."""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from antlm_jax.data import prepared_folder, readers, splits, text_files
from antlm_jax.data.readers import RULES
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import command
from antlm_jax.inference import inputs, scoring
from antlm_jax.inference.scoring import EncodedText, Pass
from antlm_jax.runtime import files, progress
from antlm_jax.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings(command.TaskSettings):
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
  asked: TextSettings, given: files.Path | Iterable[str] = ""
) -> list[str]:
  """Reads the texts of a path, `data` by default, or takes given texts.

  Raises a UserError if there are none.
  """
  if isinstance(given, str | os.PathLike):
    asked = dataclasses.replace(asked, data=os.fspath(given) or asked.data)
    if "\n" in asked.data or len(asked.data) > 255:
      raise files.not_a_path(asked.data)
    where, given = asked.data, readers.whole_documents(_asked_pieces(asked))
  else:
    where = "the list of texts"
  found = inputs.as_texts(given, most=asked.limit or None)
  if not found:
    raise UserError(f"{where} holds no text")
  return found


def _asked_pieces(asked: TextSettings) -> Iterator[readers.Document]:
  folder = pathlib.Path(asked.data)
  if (folder / prepared_folder.MANIFEST).exists():
    from antlm_jax.data import document_store  # slow to import: not for --help

    if asked.split not in prepared_folder.SPLITS:
      raise UserError(f"{asked.data}: a prepared folder has no {asked.split}")
    # Text, not rows: the model has a tokenizer of its own.
    yield from document_store.read_kept_documents(folder, asked.split)
    return
  corpus = text_files.find_corpus(
    [asked.data],
    needs_train=asked.split != "test",
    documents=asked.documents,
    column=asked.column,
  )
  split = asked.split
  # A file is read if its own path is given, also with another name. Without
  # files named train, one named test is in train.
  named = {splits.split_word(path) for path in corpus.train}
  if (
    (split == "dev" and not corpus.dev)
    or (split == "test" and named == {"test"})
    or os.path.isfile(asked.data)
  ):
    split = "train"
  if corpus.unused:
    progress.say(f"{asked.data}: {split} is read\n{corpus}")
  tally = readers.Tally()
  yield from corpus.read(split, tally)
  if left_out := readers.left_out(tally):
    progress.say(f"warning: {asked.data}: {left_out}")


_READS = (
  "Path to a text, jsonl, csv or parquet file, a folder of them, or a prepared"
  " folder"
)
Task = functools.partial(
  command.ZeroShotTask, settings=TextSettings, reads=_READS
)


def perplexity_of_nats(nats: float) -> float:
  """Returns e to a mean of nats; it is finite even if that overflows."""
  return math.exp(min(nats, 700))


def score_text_parts(
  loaded,
  parts: Sequence[Sequence[EncodedText]],
  wanted: tuple[Pass, ...],
  asked,
) -> scoring.Totals:
  """Scores n texts in parts.

  Returns the sums over the parts of each text, float64 `[n]`. Positions are
  those in a part.
  """
  flat = [part for those in parts for part in those]
  found = scoring.totals(loaded, flat, wanted, **asked.batches)
  owner = np.repeat(np.arange(len(parts)), [len(those) for those in parts])
  logprobs = np.bincount(owner, found.logprobs[:, 0], len(parts))
  likeliest = np.bincount(owner, found.likeliest, len(parts))
  return scoring.Totals(logprobs, likeliest, found.by_position)
