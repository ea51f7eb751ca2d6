"""Paired differences of rows, by their scores of the same items."""

import collections
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from antlm_jax.evals import statistics
from antlm_jax.evals.statistics import MeanEstimate
from antlm_jax.evals.studies.reporting.items import ItemFiles
from antlm_jax.evals.studies.reporting.scores import LOSS, Scores

Side = tuple[str, str]  # a row, and the mode in which it is scored
Weights = Mapping[Side, float]


class Pairing(NamedTuple):
  """A measure's items on which runs compare."""

  strata: np.ndarray  # number of each item's UID, int `[n]`
  texts: np.ndarray  # number of each item's text, int `[n]`
  # Scores of the items, by side, then pretraining and fine-tuning.
  values: Mapping[Side, Mapping[tuple[str, str], np.ndarray]]
  excluded: Scores  # lines that were scored on other items

  def difference(self, weights: Weights) -> MeanEstimate | None:
    """Estimates a weighted sum of scores, such as one minus another.

    All sides have the same seeds and items; None if they share none.
    """
    if not self.values.keys() >= weights.keys():
      return None
    sides = {side: self.values[side] for side in weights}
    trials = set.intersection(*map(set, sides.values()))
    values = {
      trial: sum(w * sides[side][trial] for side, w in weights.items())
      for trial in next(iter(sides.values()))
      if trial in trials
    }
    return statistics.estimate_over_seeds(
      values, strata=self.strata, texts=self.texts
    )


def pair_scores(scores: Scores, items: ItemFiles) -> Pairing | None:
  """Pairs the scores of a measure by the items that most of them have.

  Scores of other items (another --limit, or other texts of the same names)
  cannot be paired. None if no items are known.
  """
  scored = [(line, items.of(line)) for line in scores]
  names_and_texts = {known and known[:2] for _, known in scored}
  if len(names_and_texts) > 1 and scores[0].metric == LOSS:
    # Some runs have losses of other rows, or none: the rows do not pair.
    without = [line._replace(items=None) for line in scores]
    scored = [(line, items.of(line)) for line in without]
  scored = [(line, known) for line, known in scored if known]
  if not scored:
    return None
  counts = collections.Counter(known[:2] for _, known in scored)
  ((names, texts), _) = counts.most_common(1)[0]
  values = collections.defaultdict(dict)
  excluded = Scores()
  for line, known in scored:
    if known[:2] == (names, texts):
      values[line.row, line.mode][line.seed, line.trial] = known.scores
    else:
      excluded.append(line)
  uids = {uid: i for i, uid in enumerate(dict.fromkeys(u for u, _ in names))}
  # The same text under another UID is another question.
  questions = [(uid, text) for (uid, _), text in zip(names, texts, strict=True)]
  numbers = {key: i for i, key in enumerate(dict.fromkeys(questions))}
  return Pairing(
    strata=np.array([uids[uid] for uid, _ in names]),
    texts=np.array([numbers[question] for question in questions]),
    values=values,
    excluded=excluded,
  )
