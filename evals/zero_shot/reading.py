"""Reading times: what a word's surprisal explains of them.

The folder holds reading_data.csv of evaluation-pipeline-2025 (de Varda et al.,
2023): for each word what stands before it (`item`, `word`), the word before
with what stands before that (`prev_item`, `prev_word`), predictors and times.

What counts is how much of the variance that a baseline leaves a word's
surprisal explains, in percent: for eye tracking the mean over four times,
beside frequency, length and place; for self-paced reading beside these, and
the length and the surprisal of the word before. Main effects and products of
two are all there, of the surprisal itself its main effect alone.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import metrics, pipelines, texts
from antlm_jax.evals.zero_shot.command import Outcome, Task
from antlm_jax.inference import framing, scoring
from antlm_jax.runtime import files

FILE = "reading_data.csv"
_EYES = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound")
_PACED = "self_paced_reading_time"
_PREDICTORS = ("Subtlex_log10", "length", "context_length")
_BEFORE = ("prev_length", "prev_pred")
_NUMBERS = (*_PREDICTORS, _BEFORE[0], *_EYES, _PACED)  # columns of the file
_MASKS = 3  # a text that is read left to right ends with so many


@dataclasses.dataclass(frozen=True)
class Word:
  """A word in its place, with what was measured of it.

  Attributes:
    here: What stands before it, and the word.
    before: The same of the word before, or None.
    values: Predictors and times by name; NaN where there is none.
  """

  here: tuple[str, str]
  before: tuple[str, str] | None
  values: dict[str, float]


def read(folder, limit: int = 0) -> list[Word]:
  """Reads the words of a folder, at most `limit` of them if it is not 0.

  Raises:
    UserError: if the file is missing, or is not what it should be.
  """
  path = pathlib.Path(folder) / FILE
  rows = itertools.islice(files.read_csv(path, "reading times"), limit or None)
  found = [_word(f"{path}, line {number}", row) for number, row in rows]
  if not found:
    raise UserError(f"{path} holds no word")
  return found


def _word(where: str, row: dict[str, str]) -> Word:
  needed = "item", "word", "prev_item", "prev_word", *_NUMBERS
  if missing := [n for n in needed if row.get(n) is None]:
    raise UserError(f"{where}: no {', '.join(missing)}")
  # The pipeline has the word "None" stand before a word with nothing before.
  item = "None" if row["item"] in metrics.NOTHING else row["item"]
  before = None
  if row["prev_item"] not in metrics.NOTHING:
    before = row["prev_item"], row["prev_word"]
  try:
    values = {name: metrics.number(row[name]) for name in _NUMBERS}
  except ValueError as error:
    raise UserError(f"{where}: {error}") from error
  return Word((item, row["word"]), before, values)


# ------------------------------------------------------------------ surprisal


def surprisals(
  loaded, words: Sequence[tuple[str, str]], asked, track
) -> np.ndarray:
  """Returns the surprisals of n words, each after a text, float64 `[n]`.

  As in the pipeline a word is read token by token, each after the text so far
  encoded anew. Where tokens are predicted behind masks, the text ends with
  three of them (arXiv 2406.04823), and the first is predicted.

  Args:
    words: (text before, word), n of them.
    track: As for `scoring.score`.

  Raises:
    UserError: if a text is too long, or a word holds no token.
  """
  wanted = scoring.passes(loaded, asked.mode)
  masked = any(p.masked for p in wanted)
  masks = [framing.mask_id(loaded)] * (_MASKS - 1) if masked else []
  # Each is scored once: most words are also the word before another.
  unique = list(dict.fromkeys(words))
  before, after = loaded.frame

  def encoded(text: str, target: int) -> scoring.Text:
    # A mask takes the space before it, as in exported tokenizers.
    ids = loaded.tokenizer.encode(text.rstrip() if masked else text)
    head = np.concatenate([before, ids])
    tokens = np.concatenate([head, [target], masks, after]).astype(np.int32)
    framing.check_length(loaded, len(tokens), text)
    return scoring.Text(tokens, len(head), len(head) + 1)

  parts = [
    [encoded(*one) for one in _tokens(loaded.tokenizer, *word)]
    for word in unique
  ]
  logprobs, _ = texts.score(loaded, parts, wanted, asked, track)
  index = {word: i for i, word in enumerate(unique)}
  return -logprobs[[index[word] for word in words]]


def _tokens(
  tokenizer: Tokenizer, text: str, word: str
) -> Iterator[tuple[str, int]]:
  """Yields for each token of a word the text before it, and the token."""
  lead = tokenizer.encode("a")
  targets = tokenizer.encode(word)
  if not len(targets):
    raise UserError(f"the word {word!r} after {text!r} holds no token")
  for number, token in enumerate(targets):
    # Behind another token, so that the space it may begin with is kept.
    both = tokenizer.decode([*lead, token], skip_special=False)
    piece = both.removeprefix(tokenizer.decode(lead))
    # All but the first are encoded by themselves there, as a word's beginning.
    yield text, token if not number else tokenizer.encode(piece)[0]
    text += piece


# ----------------------------------------------------------------- regressions


def gain(
  columns: dict[str, np.ndarray], time: str, predictors: Sequence[str]
) -> float:
  """Returns what surprisal explains of the variance that is left.

  Args:
    columns: `pred`, the surprisal, and all others `[n]`; NaN where there is no
      number.
    time: What is predicted.
    predictors: By what, beside surprisal, with their products of two.
  """
  table = np.stack([columns[name] for name in (*predictors, time, "pred")])
  # The same words for both: a surprisal is there for each of them.
  *columns, times, surprisal = table[:, ~np.isnan(table).any(axis=0)]
  if len(times) <= len(columns) * (len(columns) + 1) // 2 + 2:
    return math.nan  # no more words than weights
  products = [a * b for a, b in itertools.combinations(columns, 2)]
  base = metrics.explained([*columns, *products], times)
  full = metrics.explained([*columns, *products, surprisal], times)
  return (full - base) / (1 - base)


def outcome(
  words: Sequence[Word], surprisal: np.ndarray, before: np.ndarray
) -> Outcome:
  """Makes both scores, shares of variance, of the surprisals of n words.

  `surprisal` and `before`, of the words before with NaN for none, are `[n]`.
  """
  columns = {n: np.array([w.values[n] for w in words]) for n in _NUMBERS}
  columns |= {"prev_pred": before, "pred": surprisal}
  eyes = {name: gain(columns, name, _PREDICTORS) for name in _EYES}
  eye = float(np.mean(list(eyes.values())))
  paced = gain(columns, _PACED, (*_PREDICTORS, *_BEFORE))
  rows = list(zip(words, surprisal.tolist(), before.tolist(), strict=True))
  lines = [
    {"id": i, "context": w.here[0], "word": w.here[1], "surprisal": found}
    for i, (w, found, _) in enumerate(rows)
  ]
  said = [
    {"id": i, "pred": here, "prev_pred": other}
    for i, (_, here, other) in enumerate(rows)
  ]
  # What `reading` writes in 2025, but for its tables of all regressions.
  files = {
    "predictions.json": json.dumps({"reading": {"predictions": said}}),
    "report.txt": (
      f"EYE TRACKING SCORE: {100 * eye:.2f}\n"
      f"SELF-PACED READING SCORE: {100 * paced:.2f}\n"
    ),
  }
  scores = {"eye_tracking": eye, "self_paced_reading": paced, "by_time": eyes}
  return Outcome({"words": len(words), **scores}, lines, files)


class Reading(Task):
  """The task; see `command.Task`."""

  about = "reading times, and what surprisal explains of them"
  figures: ClassVar = {
    "eye tracking, explained": "{eye_tracking:.2%}",
    "self paced reading, explained": "{self_paced_reading:.2%}",
  }
  notes = f"{__doc__}\n{pipelines.NOTES}"

  def read(self, asked) -> list[Word]:
    return read(asked.data, asked.limit)

  def score(self, loaded, items, asked, options, track) -> Outcome:
    before = [word.before for word in items if word.before]
    every = [word.here for word in items] + before
    found = surprisals(loaded, every, asked, track)
    behind = np.full(len(items), math.nan)
    behind[[word.before is not None for word in items]] = found[len(items) :]
    return outcome(items, found[: len(items)], behind)
