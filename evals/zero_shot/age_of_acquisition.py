"""Age of acquisition: learning words in the order of children.

The folder holds two files of babylm-eval. cdi_childes.json has the contexts of
each word. cdi_human.csv has the share of children that say it at 16 to 30
months. The run has kept its steps by words seen:
--config.checkpoint.words=babylm.

  antlm eval score --task=aoa --checkpoint=RUN --data=FOLDER --mode=causal

A child's age is where a sigmoid, fitted to the shares by month, reaches one
half. For a model, the sigmoid is fitted to the word's mean surprisals by the
logarithm of words seen. Its age is where the sigmoid is halfway from chance
(all tokens equally likely) to the lowest (Chang & Bergen, 2022). The figure is
Pearson's correlation of both ages over words, or 0 if p > 0.1 or there are
fewer than three words.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from antlm_jax import units
from antlm_jax.errors import UserError
from antlm_jax.evals.zero_shot import pipelines
from antlm_jax.evals.zero_shot.task import (
  TASKS,
  PipelineSettings,
  ZeroShotOutcome,
  ZeroShotTask,
)
from antlm_jax.inference import scoring
from antlm_jax.inference.model import load, revisions
from antlm_jax.runtime import files

CONTEXTS = "cdi_childes.json"
CHILDREN = "cdi_human.csv"
_MONTHS = range(16, 31)
_FEWEST = 3  # points of a curve, and words of a correlation
_LARGEST_P = 0.1  # of a correlation that counts


class AcquiredWord(NamedTuple):
  """A word, the texts before it, and the age at which children say it."""

  text: str
  contexts: tuple[str, ...]
  child: float | None  # in months, if known


def read_acquired_words(settings: PipelineSettings) -> list[AcquiredWord]:
  """Reads the words, or raises a UserError."""
  path = pathlib.Path(settings.data, CONTEXTS)
  children = _children(path.with_name(CHILDREN))
  words = []
  for text, rows in files.read_json(path, "the contexts").items():
    try:
      contexts = tuple("" + row["context"] for row in rows)
    except (KeyError, TypeError) as error:
      raise UserError(f"{path}: {text!r} has no list of contexts") from error
    if len(text) > 1 and contexts:  # letters are left out there
      words.append(AcquiredWord(text, contexts, children.get(text)))
  if not words:
    raise UserError(f"{path} holds no words with contexts")
  return words[: settings.limit or None]


def _children(path: pathlib.Path) -> dict[str, float | None]:
  """Returns the age at which children say each word."""
  ages = {}
  for number, row in files.read_csv(path, "children's words"):
    try:
      shares = {m: pipelines.csv_number(row.get(str(m)) or "") for m in _MONTHS}
      known = {m: x for m, x in shares.items() if not np.isnan(x)}
      age = child_age(np.array([*known]), np.array([*known.values()]))
      ages.setdefault(row["word"], age)
    except (KeyError, ValueError) as error:
      raise UserError(f"{path}, line {number}: {error!r}") from error
  return ages


def words_seen(name: str) -> int:
  """Reads the number in a revision's name: 10,000,000 in chck_10M."""
  return round(units.parse_quantity(name.removeprefix("chck_")))


def _reaches(level, x, y, guess, bounds, evaluations: int) -> float | None:
  """Returns the x at which a sigmoid fitted to points reaches a level."""

  def sigmoid(x, height, slope, middle, base):
    return height / (1 + np.exp(-slope * (x - middle))) + base

  with np.errstate(all="ignore"):
    fit = optimize.least_squares(
      lambda p: sigmoid(x, *p) - y, guess, bounds=bounds, max_nfev=evaluations
    )
  height, slope, middle, base = fit.x
  rises = fit.success and min(slope, height) > 1e-6
  if not rises or not base < level < base + height:
    return None
  crossing = float(middle - np.log(height / (level - base) - 1) / slope)
  return crossing if x.min() <= crossing <= x.max() else None


def child_age(months: np.ndarray, shares: np.ndarray) -> float | None:
  """Returns the age at which half of the children say a word, or None.

  `months` rise, `[n]`; `shares` are those of the children that say it then.
  """
  if len(months) < _FEWEST:
    return None
  bounds = [0, 0, months[0], -0.5], [2.0, 1.0, months[-1], 0.5]
  guess = [1.0, 0.1, np.mean(months), 0.0]
  return _reaches(0.5, months, shares, guess, bounds, 1000)


def model_age(
  word_counts: np.ndarray, surprisals: np.ndarray, chance: float
) -> float | None:
  """Returns log10 of the words seen after which a word is known, or None.

  `word_counts` are numbers of words seen, `[n]`; `surprisals` are the word's
  after them, in nats. `chance` is the word's surprisal if all tokens are
  equally likely.
  """
  if len(word_counts) < _FEWEST:
    return None
  x = np.log10(word_counts + 1)
  y = -surprisals
  spread = np.ptp(y)
  lowest = y.min()
  guess = [spread, 1.0, x.mean(), lowest]
  bounds = (
    [0, 0, x.min() - 1, lowest - 2 * spread - 1],
    [10 * spread + 1, 100, x.max() + 1, y.max() + 1],
  )
  level = -(chance + surprisals.min()) / 2
  return _reaches(level, x, y, guess, bounds, 20_000)


def outcome(
  words: Sequence[AcquiredWord],
  names: Sequence[str],
  surprisals: Sequence[np.ndarray],
  chances: Sequence[float],
) -> ZeroShotOutcome:
  """Returns the correlation of n words, and 2026's files.

  Their surprisals are `[revisions, contexts]` each, by the names of revisions;
  `chances` are those of `model_age`.
  """
  word_counts = [words_seen(name) for name in names]
  lines = []
  for word, nats, chance in zip(words, surprisals, chances, strict=True):
    means = nats.mean(axis=1)
    lines.append(
      {
        "word": word.text,
        "model_log10_words": model_age(np.array(word_counts), means, chance),
        "child_months": word.child,
        "surprisal": dict(zip(names, means.tolist(), strict=True)),
      }
    )
  ages = [(line["model_log10_words"], line["child_months"]) for line in lines]
  ages = [pair for pair in ages if None not in pair]
  correlation = 0.0
  if len(ages) >= _FEWEST:
    test = stats.pearsonr(*zip(*ages, strict=True))
    if test.pvalue <= _LARGEST_P:
      correlation = float(test.statistic)
  summary = {
    "words": len(words),
    "compared": len(ages),
    "correlation": correlation,
  }
  rows = [
    {
      "step": name,
      "word_count": word_count,
      "target_word": word.text,
      "context_id": i,
      "context": context,
      "surprisal": nats[step, i].item(),
    }
    for step, (name, word_count) in enumerate(
      zip(names, word_counts, strict=True)
    )
    for word, nats in zip(words, surprisals, strict=True)
    for i, context in enumerate(word.contexts)
  ]
  metadata = {
    "use_bos_only": False,
    "total_steps": len(names),
    "completed_steps": len(names),
  }
  surprisal_file = json.dumps({"metadata": metadata, "results": rows})
  score_file = json.dumps({"aoa": correlation})
  pipeline_files = {
    "surprisal.json": surprisal_file,
    "aoa_score.json": score_file,
  }
  return ZeroShotOutcome(summary, lines, pipeline_files)


def score_acquired_words(
  loaded, items: Sequence[AcquiredWord], settings: PipelineSettings
) -> ZeroShotOutcome:
  """Scores the words with each revision."""
  texts = [word.text.strip() for word in items for _ in word.contexts]
  contexts = [c.strip() + " " for word in items for c in word.contexts]
  text_format = scoring.TextFormat(separator="")
  options = {"text_format": text_format, **settings.batches}
  checkpoints = revisions(loaded)
  surprisals = []
  for path in checkpoints.values():  # one of them in memory at a time
    model = loaded if path == loaded.path else load(path)
    logprobs = scoring.score(model, texts, settings.mode, contexts, **options)
    surprisals.append(-logprobs)
  ends = np.cumsum([len(word.contexts) for word in items])
  by_word = np.split(np.stack(surprisals), ends[:-1], axis=1)
  tokenizer = loaded.tokenizer
  sizes = [
    max(1, len(tokenizer.encode(text)) - len(tokenizer.encode("The")))
    for text in (f"The {word.text}" for word in items)
  ]
  chances = np.log(tokenizer.vocab_size) * np.array(sizes)
  return outcome(items, list(checkpoints), by_word, chances)


TASKS["aoa"] = ZeroShotTask(
  about=__doc__,
  read=read_acquired_words,
  score=score_acquired_words,
  figure="correlation",
  table={"words": "{compared} of {words}", "correlation": "{correlation:.3f}"},
  settings=PipelineSettings,
)
