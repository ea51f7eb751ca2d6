"""What scoring minimal pairs gives: accuracies, by UID and by temperature.

A pair is right when the good choice's score is the higher one; a tie is wrong
(BabyLM's pipelines give it to the choice that is listed first, the good one).
As there, the result is the unweighted mean of the accuracies by UID.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from antlm_jax import tables
from antlm_jax.inference.pairs import Pair, accuracy_by


@dataclasses.dataclass(frozen=True)
class Results:
  """Pairs and their scores.

  Attributes:
    pairs: n pairs.
    good: Scores of the good choices, float64 `[n, K]`, by temperature.
    bad: Scores of the bad ones, float64 `[n, K]`.
    temperatures: K temperatures.
  """

  pairs: Sequence[Pair]
  good: np.ndarray
  bad: np.ndarray
  temperatures: Sequence[float]

  @property
  def correct(self) -> np.ndarray:
    """Which pairs are right, bool `[n, K]`."""
    return self.good > self.bad

  def mean_by(self, group: str) -> dict[str, tuple[int, np.ndarray]]:
    """Returns by a group's values the number of pairs and accuracy `[K]`."""
    return accuracy_by(group, self.pairs, self.correct)

  @property
  def by_uid(self) -> dict[str, tuple[int, np.ndarray]]:
    """Number of pairs and accuracy `[K]` of each UID."""
    return self.mean_by("UID")

  @property
  def macro(self) -> np.ndarray:
    """Unweighted mean of the accuracies by UID, `[K]`: BabyLM's number."""
    return np.mean([share for _, share in self.by_uid.values()], axis=0)

  @property
  def best(self) -> int:
    """Which temperature has the highest `macro`; of equal ones the first."""
    return int(self.macro.argmax())

  def summary(self) -> dict:
    """Returns the numbers; those by UID at the first temperature."""
    macro, correct = self.macro, self.correct.mean(axis=0)
    terms = {pair.uid: pair.term for pair in self.pairs}
    return {
      "pairs": len(self.pairs),
      "ties": int((self.good == self.bad)[:, 0].sum()),
      "macro_accuracy": float(macro[0]),
      "pair_accuracy": float(correct[0]),
      "best_temperature": self.temperatures[self.best],
      "by_uid": {
        uid: {"term": terms[uid], "pairs": count, "accuracy": float(share[0])}
        for uid, (count, share) in self.by_uid.items()
      },
      "by_temperature": [
        {
          "temperature": t,
          "macro_accuracy": float(m),
          "pair_accuracy": float(c),
        }
        for t, m, c in zip(self.temperatures, macro, correct, strict=True)
      ],
    }

  def items(self) -> Iterator[dict]:
    """Yields every pair with its scores at the first temperature."""
    for i, pair in enumerate(self.pairs):
      context = {"context": pair.context} if pair.context else {}
      yield {
        "uid": pair.uid,
        "id": pair.pair_id,
        "correct": bool(self.correct[i, 0]),
        "score_good": float(self.good[i, 0]),
        "score_bad": float(self.bad[i, 0]),
        **context,
        "good": pair.good,
        "bad": pair.bad,
      }

  def table(self) -> str:
    """Lays the accuracies out in percent, by phenomenon where there are any."""
    terms = {pair.uid: pair.term for pair in self.pairs}
    by_uid, rows = self.by_uid, []
    # Of each phenomenon its own line, the mean over its paradigms, comes first.
    for term in sorted(set(terms.values())):
      uids = sorted(uid for uid in by_uid if terms[uid] == term)
      if term:
        count = sum(by_uid[uid][0] for uid in uids)
        rows.append((term, count, np.mean([by_uid[u][1][0] for u in uids])))
      for uid in uids:
        count, share = by_uid[uid]
        rows.append((f"  {uid}" if term else uid, count, share[0]))
    count, macro = len(self.pairs), self.macro
    rows.append(("mean over UIDs", count, macro[0]))
    rows.append(("mean over pairs", count, self.correct[:, 0].mean()))
    if len(macro) > 1:
      swept = zip(self.temperatures, macro, strict=True)
      rows += [(f"mean at temperature {t:g}", count, m) for t, m in swept]
    return tables.text(
      [(name, count, f"{100 * share:.2f}") for name, count, share in rows],
      head=("", "pairs", "accuracy (%)"),
      align="<>",
    )
