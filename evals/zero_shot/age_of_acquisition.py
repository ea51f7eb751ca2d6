"""Age of acquisition: learning words in the order of children.

The folder holds cdi_childes.json of evaluation-pipeline-2025, the contexts of
each word, and cdi_human.csv, the share of children that say a word at 16 to 30
months of age. --revisions names checkpoints by the words that they have seen:
chck_1M=STEP for a step of the run, or chck_1M=CHECKPOINT for another one.

  antlm eval score --task=aoa --checkpoint=RUN --data=FOLDER --mode=causal \\
    --revisions=chck_1M=100,chck_2M=200,chck_5M=500

A child's age is where a sigmoid, fitted to the shares by month, reaches one
half. A model's age is where one that is fitted to the word's surprisals by the
logarithm of words seen is halfway from chance to the lowest (Chang & Bergen,
2022). The figure is the correlation of both ages over words.
"""

import dataclasses
import json
import pathlib
import re
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

from antlm_jax.errors import UserError
from antlm_jax.evals import results
from antlm_jax.evals.zero_shot import command, metrics
from antlm_jax.evals.zero_shot.command import TASKS, Outcome
from antlm_jax.inference import scoring
from antlm_jax.inference.model import Identity, identify, load
from antlm_jax.runtime import files
from antlm_jax.settings import setting

CONTEXTS, CHILDREN = "cdi_childes.json", "cdi_human.csv"
_MONTHS = range(16, 31)
_CHANCE = np.log2(300_000)  # in bits there, although surprisals are in nats
_FEWEST = 3  # points of a curve, and words of a correlation
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcquisitionSettings(command.PipelineSettings):
  """The arguments of the task."""

  revisions: tuple[str, ...] = setting(
    help="Checkpoints by the words they have seen, three or more: NAME=STEP or"
    " NAME=CHECKPOINT, with commas between them",
    metavar="R,...",
  )

  @property
  def names(self) -> dict[str, str]:
    """The step or checkpoint of each revision."""
    return dict(one.split("=", 1) for one in self.revisions if "=" in one)

  def __post_init__(self):
    if len(self.names) < max(_FEWEST, len(self.revisions)):
      raise UserError(
        f"--revisions: {_FEWEST} or more are needed, each NAME=STEP or"
        " NAME=CHECKPOINT, with commas between them"
      )
    if nameless := [name for name in self.names if words_seen(name) is None]:
      raise UserError(f"--revisions: no number of words in {nameless[0]!r}")


class Word(NamedTuple):
  """A word, the texts before it, and the age at which children say it."""

  text: str
  contexts: tuple[str, ...]
  child: float | None  # in months, if known


def read(asked: AcquisitionSettings) -> list[Word]:
  """Reads the words, or raises a UserError."""
  folder, out = pathlib.Path(asked.data), []
  path, children = folder / CONTEXTS, _children(folder / CHILDREN)
  for text, rows in files.read_json(path, "the contexts").items():
    try:
      contexts = tuple("" + row["context"] for row in rows)
    except (KeyError, TypeError) as error:
      raise UserError(f"{path}: {text!r} has no list of contexts") from error
    if len(text) > 1 and contexts:  # letters are left out there
      out.append(Word(text, contexts, children.get(text)))
  if not out:
    raise UserError(f"{path} holds no words with contexts")
  return out[: asked.limit or None]


def _children(path: pathlib.Path) -> dict[str, float | None]:
  """Returns the age at which children say each word."""
  out = {}
  for number, row in files.read_csv(path, "children's words"):
    try:
      shares = {m: metrics.number(row.get(str(m)) or "") for m in _MONTHS}
      there = {m: share for m, share in shares.items() if share == share}
      age = child_age(np.array([*there]), np.array([*there.values()]))
      out.setdefault(row["word"], age)
    except (KeyError, ValueError) as error:
      raise UserError(f"{path}, line {number}: {error!r}") from error
  return out


def words_seen(name: str) -> float | None:
  """Reads the number in a revision's name: 10,000,000 in chck_10M."""
  match = re.search(r"(\d+(?:\.\d+)?)\s*([KMB]?)", name, re.IGNORECASE)
  return match and float(match[1]) * _UNITS[match[2].upper()]


def _found(loaded, asked: AcquisitionSettings) -> dict[str, Identity]:
  """Finds the revisions, without reading their weights."""
  return {
    name: identify(*((loaded.run, int(at)) if at.isdecimal() else (at,)))
    for name, at in asked.names.items()
  }


def request(loaded, asked: AcquisitionSettings) -> dict:
  """Identifies the revisions."""
  found = _found(loaded, asked).items()
  return {"revisions": {name: results.model_digest(one) for name, one in found}}


def _reaches(level, x, y, guess, **options) -> float | None:
  """Returns where, in x, a sigmoid fitted to points comes to a level."""

  def sigmoid(x, height, slope, middle, base):
    return height / (1 + np.exp(-slope * (x - middle))) + base

  with warnings.catch_warnings(), np.errstate(all="ignore"):
    warnings.simplefilter("ignore")  # of a covariance that nobody asks for
    try:
      (height, slope, middle, base), _ = optimize.curve_fit(
        sigmoid, x, y, p0=guess, maxfev=1000, **options
      )
    except (RuntimeError, TypeError, ValueError):  # no such curve is found
      return None
  if slope <= 0 or height <= 0 or not base < level < base + height:
    return None
  found = float(middle - np.log(height / (level - base) - 1) / slope)
  return found if x.min() <= found <= x.max() else None


def child_age(months: np.ndarray, shares: np.ndarray) -> float | None:
  """Returns the age at which half of the children say a word, or None.

  `months` rise, `[n]`; `shares` are those of the children that say it then.
  """
  if len(months) < _FEWEST:
    return None
  bounds = [0, 0, months[0], -0.5], [2.0, 1.0, months[-1], 0.5]
  guess = [1.0, 0.1, np.mean(months), 0.0]
  return _reaches(0.5, months, shares, guess, bounds=bounds)


def model_age(seen: np.ndarray, surprisals: np.ndarray) -> float | None:
  """Returns log10 of the words seen after which a word is known, or None.

  `seen` are numbers of words, `[n]`; `surprisals` are the word's after them.
  """
  level = -(_CHANCE + surprisals.min()) / 2
  x, y = np.log10(seen + 1), -surprisals
  guess = [np.ptp(y), 1.0, x.mean(), y.min()]
  return _reaches(level, x, y, guess)


def outcome(
  words: Sequence[Word],
  revisions: Sequence[str],
  surprisals: Sequence[np.ndarray],
) -> Outcome:
  """Returns the correlation, 0 if it is of fewer than three words.

  The surprisals of n words are `[revisions, contexts]` each.
  """
  seen = np.array([words_seen(name) for name in revisions])
  ages = [
    model_age(np.repeat(seen, found.shape[1]), found.ravel())
    for found in surprisals
  ]
  lines = [
    {
      "word": word.text,
      "model_log10_words": age,  # seen, before it is known
      "child_months": word.child,
      "surprisal": dict(zip(revisions, found.mean(1).tolist(), strict=True)),
    }
    for word, age, found in zip(words, ages, surprisals, strict=True)
  ]
  both = zip(ages, (word.child for word in words), strict=True)
  both = [pair for pair in both if None not in pair]
  few = len(both) < _FEWEST
  fit = 0.0 if few else metrics.pearson(*zip(*both, strict=True))
  summary = {"words": len(words), "compared": len(both), "correlation": fit}
  rows = [
    {
      "step": name,
      "word_count": int(words_seen(name)),
      "target_word": word.text,
      "context_id": i,
      "context": context,
      "surprisal": found[step, i].item(),
    }
    for step, name in enumerate(revisions)
    for word, found in zip(words, surprisals, strict=True)
    for i, context in enumerate(word.contexts)
  ]
  steps = dict.fromkeys(("total_steps", "completed_steps"), len(revisions))
  about = {"use_bos_only": False, **steps}
  # The file of `AoA_word` in 2025.
  own = {"surprisal.json": json.dumps({"metadata": about, "results": rows})}
  return Outcome(summary, lines, own)


def score(loaded, items: Sequence[Word], asked: AcquisitionSettings) -> Outcome:
  """Scores the words with each revision."""
  texts = [word.text.strip() for word in items for _ in word.contexts]
  contexts = [c.strip() + " " for word in items for c in word.contexts]
  how = {"text_format": scoring.Format(separator=""), **asked.batches}
  revisions, found = _found(loaded, asked), []
  for one in revisions.values():  # one of them in memory at a time
    model = loaded if one.path == loaded.path else load(one.path)
    found.append(-scoring.score(model, texts, asked.mode, contexts, **how))
  ends = np.cumsum([len(word.contexts) for word in items])
  by_word = np.split(np.stack(found), ends[:-1], axis=1)
  return outcome(items, list(revisions), by_word)


TASKS["aoa"] = command.Task(
  about=__doc__,
  read=read,
  score=score,
  figure="correlation",
  table={"words": "{compared} of {words}", "correlation": "{correlation:.3f}"},
  settings=AcquisitionSettings,
  request=request,
)
