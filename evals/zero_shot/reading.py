"""Reading times, explained by the surprisal of words.

The folder holds reading_data.csv of babylm-eval (de Varda et al., 2023). Each
row is a word: the text before it (`item`, `word`), the previous word and the
text before that (`prev_item`, `prev_word`), predictors and times.

The figures are the share that surprisal explains of the variance that a
baseline leaves. For eye tracking, it is the mean over four times, and the
baseline has the word's frequency, length and place. For self-paced reading, the
baseline also has the length and surprisal of the previous word. A baseline has
main effects and products of two; surprisal itself has its main effect alone.
"""

import itertools
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import pipelines, texts
from antlm_jax.evals.zero_shot.task import (
  TASKS,
  PipelineSettings,
  ZeroShotOutcome,
  ZeroShotTask,
)
from antlm_jax.inference import framing, scoring
from antlm_jax.runtime import files

FILE = "reading_data.csv"
_EYES = ("RTfirstfix", "RTfirstpass", "RTgopast", "RTrightbound")
_PACED = "self_paced_reading_time"
_PREDICTORS = ("Subtlex_log10", "length", "context_length")
_PREVIOUS = ("prev_length", "prev_pred")
_NUMBERS = (*_PREDICTORS, _PREVIOUS[0], *_EYES, _PACED)  # columns of the file
_MASKS = 3  # at the end of a text that masked modes read


class MeasuredWord(NamedTuple):
  """A word in its place, with its measurements."""

  word: tuple[str, str]  # the text before it, and the word
  previous: tuple[str, str] | None  # the same of the previous word
  values: dict[str, float]  # predictors and times by name; NaN if missing


def read_measured_words(settings) -> list[MeasuredWord]:
  """Reads the words, or raises a UserError."""
  path = pathlib.Path(settings.data) / FILE
  rows = files.read_csv(path, "reading times")
  rows = itertools.islice(rows, settings.limit or None)
  words = [_word(f"{path}, line {number}", row) for number, row in rows]
  if not words:
    raise UserError(f"{path} holds no word")
  return words


def _word(place: str, row: dict[str, str]) -> MeasuredWord:
  needed = "item", "word", "prev_item", "prev_word", *_NUMBERS
  if missing := [n for n in needed if row.get(n) is None]:
    raise UserError(f"{place}: no {', '.join(missing)}")
  # The pipeline puts the word "None" before a word with nothing before it.
  item = "None" if row["item"] in pipelines.NOTHING else row["item"]
  previous = None
  if row["prev_item"] not in pipelines.NOTHING:
    previous = row["prev_item"], row["prev_word"]
  try:
    values = {name: pipelines.csv_number(row[name]) for name in _NUMBERS}
  except ValueError as error:
    raise UserError(f"{place}: {error}") from error
  return MeasuredWord((item, row["word"]), previous, values)


def surprisals(
  loaded, words: Sequence[tuple[str, str]], settings
) -> np.ndarray:
  """Returns the surprisals of n words, each after a text, float64 `[n]`.

  As in the pipeline, a word is read token by token, each after the text so far,
  which is encoded anew. In masked modes, the text ends with three masks (arXiv
  2406.04823), and the first is predicted. `words` are (text before, word).
  Raises a UserError if a text is too long, or a word holds no token.
  """
  passes = scoring.passes_of_mode(loaded, settings.mode)
  masked = any(p.masked for p in passes)
  masks = [framing.mask_id(loaded)] * (_MASKS - 1) if masked else []
  # Each is scored once: most words are also the word before another.
  unique = list(dict.fromkeys(words))
  before, after = loaded.frame

  def encoded(text: str, target: int) -> scoring.EncodedText:
    # A mask takes the space before it, as in exported tokenizers.
    ids = loaded.tokenizer.encode(text.rstrip() if masked else text)
    head = np.concatenate([before, ids])
    tokens = np.concatenate([head, [target], masks, after]).astype(np.int32)
    framing.check_length(loaded, len(tokens), text)
    return scoring.EncodedText(tokens, len(head), len(head) + 1)

  parts = [
    [
      encoded(text, token)
      for text, token in _tokens_of_word(loaded.tokenizer, *word)
    ]
    for word in unique
  ]
  totals = texts.score_text_parts(loaded, parts, passes, settings)
  index = {word: i for i, word in enumerate(unique)}
  return -totals.logprobs[[index[word] for word in words]]


def _tokens_of_word(
  tokenizer: Tokenizer, text: str, word: str
) -> Iterator[tuple[str, int]]:
  """Yields for each token of a word the text before it, and the token."""
  lead = tokenizer.encode("a")
  targets = tokenizer.encode(word)
  if not len(targets):
    raise UserError(f"the word {word!r} after {text!r} holds no token")
  for number, token in enumerate(targets):
    # Behind another token, so that the space it may begin with is kept.
    decoded = tokenizer.decode([*lead, token], skip_special=False)
    piece = decoded.removeprefix(tokenizer.decode(lead))
    # All but the first are encoded by themselves there, as a word's beginning.
    yield text, token if not number else tokenizer.encode(piece)[0]
    text += piece


def _explained_gain(
  columns: dict[str, np.ndarray], time: str, predictors: Sequence[str]
) -> float:
  """Returns the share that surprisal explains of the variance that is left.

  `columns` are the surprisal `pred` and all others `[n]`, with NaN for missing
  numbers. The predictors of `time` are those of the baseline.
  """
  table = np.stack([columns[name] for name in (*predictors, time, "pred")])
  # The same words for both: a surprisal is there for each of them.
  *columns, times, surprisal = table[:, ~np.isnan(table).any(axis=0)]
  if len(times) <= len(columns) * (len(columns) + 1) // 2 + 2:
    return math.nan  # no more words than weights
  products = [a * b for a, b in itertools.combinations(columns, 2)]
  base = _explained([*columns, *products], times)
  full = _explained([*columns, *products, surprisal], times)
  return (full - base) / (1 - base)


def _explained(predictors: Sequence[np.ndarray], target: np.ndarray) -> float:
  """Returns R^2 of least squares, with an intercept, for a target `[n]`."""
  design = np.stack([np.ones_like(target), *predictors], axis=1)
  weights, *_ = np.linalg.lstsq(design, target)
  residuals = target - design @ weights
  deviations = target - target.mean()
  return float(1 - residuals @ residuals / (deviations @ deviations))


def score_measured_words(
  loaded, items: Sequence[MeasuredWord], settings
) -> ZeroShotOutcome:
  """Scores words, and the share of reading times that surprisal explains.

  The outcome has the shares of the module's docstring, a line for each word,
  and predictions.json of BabyLM's pipeline.
  """
  pred, prev_pred = _item_surprisals(loaded, items, settings)
  columns = {n: np.array([item.values[n] for item in items]) for n in _NUMBERS}
  columns |= {"prev_pred": prev_pred, "pred": pred}
  eye_shares = {
    name: _explained_gain(columns, name, _PREDICTORS) for name in _EYES
  }
  eye_share = float(np.mean(list(eye_shares.values())))
  paced_share = _explained_gain(columns, _PACED, (*_PREDICTORS, *_PREVIOUS))
  lines = [
    {"id": i, "context": context, "word": word, "surprisal": surprisal}
    for i, ((context, word), surprisal) in enumerate(
      zip((item.word for item in items), pred.tolist(), strict=True)
    )
  ]
  predictions = [
    {"id": i, "pred": surprisal, "prev_pred": previous}
    for i, (surprisal, previous) in enumerate(
      zip(pred.tolist(), prev_pred.tolist(), strict=True)
    )
  ]
  # The form of BabyLM's pipeline of 2026.
  pipeline_file = json.dumps({"reading": {"predictions": predictions}})
  summary = {
    "words": len(items),
    "eye_tracking": eye_share,
    "self_paced_reading": paced_share,
    "by_time": eye_shares,
  }
  return ZeroShotOutcome(summary, lines, {"predictions.json": pipeline_file})


def _item_surprisals(
  loaded, items: Sequence[MeasuredWord], settings
) -> tuple[np.ndarray, np.ndarray]:
  """Returns surprisals `[n]` of the words, and of the words before them.

  They are in nats, and NaN if no word precedes.
  """
  words = [item.word for item in items]
  previous = [item.previous for item in items if item.previous]
  nats = surprisals(loaded, words + previous, settings)
  prev_pred = np.full(len(items), math.nan)
  prev_pred[[item.previous is not None for item in items]] = nats[len(items) :]
  return nats[: len(items)], prev_pred


TASKS["reading"] = ZeroShotTask(
  about=__doc__,
  read=read_measured_words,
  score=score_measured_words,
  figure="eye_tracking",
  table={
    "eye tracking, explained": "{eye_tracking:.2%}",
    "self paced reading, explained": "{self_paced_reading:.2%}",
  },
  settings=PipelineSettings,
)
