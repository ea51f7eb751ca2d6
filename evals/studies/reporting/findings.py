"""Findings of a study: means over seeds, and paired differences of rows.

This module does not depend on a study's variants or their comparisons.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from antlm_jax.evals import statistics
from antlm_jax.evals.statistics import Mean, MeanEstimate
from antlm_jax.evals.studies.design import Row
from antlm_jax.evals.studies.reporting.runs import TrainedRun

if TYPE_CHECKING:
  import pandas as pd

  from antlm_jax.evals.studies.reporting.measured import ItemFiles, Items


Side = tuple[str, str]  # a variant, and the mode in which it is scored
_Place = tuple[str, str, str, str]  # variant, mode, pretraining, fine-tuning


class Common(NamedTuple):
  """A task's items on which runs compare."""

  strata: np.ndarray  # number of each item's UID, int `[n]`
  texts: np.ndarray  # number of each item's text, int `[n]`
  # Numbers of the UIDs of each phenomenon, by name.
  parts: Mapping[str, Sequence[int]]
  # Scores of the items, by variant and mode, then pretraining and fine-tuning.
  scores: Mapping[Side, Mapping[tuple[str, str], np.ndarray]]
  others: Collection[_Place]  # those that were scored on other items


@dataclasses.dataclass(frozen=True)
class Findings:
  """A study's variants, their runs, and the runs' scores."""

  name: str
  pipeline: str  # how items of zero-shot scores were scored
  variants: Mapping[str, Row]  # by name, in order, with runs or without
  runs: Mapping[str, Sequence[TrainedRun]]  # of the variants that have any
  table: (
    "pd.DataFrame"  # values of main metrics, see `measured.read_measurements`
  )
  also: "pd.DataFrame"  # values of other metrics, which no claim counts
  scores: "pd.DataFrame"  # those that count
  items: "ItemFiles"  # scores of single items
  fixed: float | None = None  # confidence that was fixed beforehand
  _kept: dict[str, Common | None] = dataclasses.field(
    default_factory=dict, init=False
  )

  @functools.cached_property
  def families(self) -> dict[str, list[str]]:
    """The variants that have runs, by family, in order."""
    out = collections.defaultdict(list)
    for name in self.runs:
      out[self.variants[name].family].append(name)
    return dict(out)

  def title(self, name: str, how: str = "") -> str:
    """Returns a variant's title, with the mode or attention that is told."""
    return self.variants[name].title + (f" ({how})" if how else "")

  def sizes(self, variants: Sequence[str]) -> list[tuple[int, int, int]]:
    """Returns parameters, steps and rows of a batch of runs at their end."""
    ended = (r for name in variants for r in self.runs[name] if r.summary)
    sizes = (
      (r.summary["parameters"], r.summary["steps"], r.config["train"])
      for r in ended
    )
    return list(dict.fromkeys((p, s, of["batch_size"]) for p, s, of in sizes))

  def at(self, variant: str, tasks: Sequence[str], mode: str) -> "pd.DataFrame":
    """Returns a variant's scores in a mode: a row for each task and seed."""
    own = self.scores[self.scores.variant == variant]
    return own[own.task.isin(tasks) & (own["mode"] == mode)]

  def mean(
    self, variant: str, tasks: Sequence[str], mode: str, complete: bool = False
  ) -> Mean | None:
    """Returns a variant's mean over tasks, of the seeds that have them all.

    Tasks have the same weight. Seeds are pretrainings, or the fine-tunings of
    the only one. With `complete`, only scores on all of a task's data count.
    """
    found = self.at(variant, tasks, mode)
    found = found[found.complete] if complete else found
    by_run = found.groupby(["seed", "trial"], sort=False).value
    # A mean over fewer tasks is of something else.
    means = by_run.mean()[by_run.size() == len(tasks)]
    several = means.index.get_level_values("seed").nunique() > 1
    if several or (means.groupby("seed").size() == 1).all():
      means = means.groupby("seed", sort=False).mean()
    else:
      means = means.droplevel("seed")
    return statistics.mean_of_seeds(means.to_dict())

  def difference(
    self, task: str, weights: Mapping[Side, float], part: str = ""
  ) -> MeanEstimate | None:
    """Estimates a weighted sum of scores, such as one minus another.

    All sides have the same seeds and items; None if they share none.

    Args:
      task: The task.
      weights: Weight of each side's score.
      part: Phenomenon of the task; all of it by default.
    """
    common = self.common(task)
    if common is None or not common.scores.keys() >= weights.keys():
      return None
    chosen = slice(None)
    if part:
      chosen = np.isin(common.strata, common.parts[part])
    sides = {side: common.scores[side] for side in weights}
    first, *rest = sides.values()
    values = {
      seed: sum(w * sides[side][seed][chosen] for side, w in weights.items())
      for seed in first
      if all(seed in other for other in rest)
    }
    items = {"strata": common.strata[chosen], "texts": common.texts[chosen]}
    return statistics.estimate_over_seeds(values, **items)

  def above(self, task: str, side: Side) -> MeanEstimate | None:
    """Estimates by how much a side is above the trivial answer of a task."""
    found, (variant, mode) = self.difference(task, {side: 1.0}), side
    trivial = self.at(variant, [task], mode).baseline.mean()
    return found and found._replace(value=found.value - trivial)

  def common(self, task: str) -> Common | None:
    """Returns the items on which most runs compare; None if there are none."""
    if task not in self._kept:
      rows = self.scores[self.scores.task == task]
      items = map(self.items.of, rows["items"])
      places = zip(
        rows.variant, rows["mode"], rows.seed, rows.trial, strict=True
      )
      found = {p: of for p, of in zip(places, items, strict=True) if of}
      terms = (uids.items() for uids in rows.phenomena if uids)
      phenomena = dict(itertools.chain.from_iterable(terms))
      self._kept[task] = _common(found, phenomena) if found else None
    return self._kept[task]

  def gaps(
    self, lacks: Callable[["Findings", TrainedRun], Iterable[str]]
  ) -> list[str]:
    """Returns the missing results, each with its rows and seeds."""
    lacking = collections.defaultdict(lambda: collections.defaultdict(list))
    for name, variant in self.variants.items():
      if name not in self.runs:
        lacking["not trained"][str(variant)] = []
      for run in self.runs.get(name, ()):
        for what in lacks(self, run):
          lacking[what][str(variant)].append(run.seed)
    # Results that all runs lack are named once, not run by run.
    every = {
      str(self.variants[name]): [run.seed for run in runs]
      for name, runs in self.runs.items()
    }
    out = []
    for what, rows in lacking.items():
      named = ", ".join(
        f"{title} (seed {', '.join(seeds)})" if seeds else title
        for title, seeds in rows.items()
      )
      out.append(f"{what}: {'every run' if rows == every else named}")
    return out

  def repeated(self) -> list[str]:
    """Returns a line for each task of which some items have the same text."""
    out = []
    for task in self.scores.task.unique():
      if found := self.common(task):
        every, texts = len(found.texts), found.texts.max() + 1
        if texts < every:
          out.append(
            f"{task}: {every:,} items have {texts:,} texts; in intervals, items"
            " of one text count as one"
          )
    return out


def _common(
  found: Mapping[_Place, "Items"], phenomena: Mapping[str, str]
) -> Common:
  """Finds the items of most runs.

  Runs that were scored on others (another --limit, say) cannot be paired: the
  report names them.
  """
  names = collections.Counter(items.names for items in found.values())
  most = names.most_common(1)[0][0]
  same = {p: items for p, items in found.items() if items.names == most}
  scores = collections.defaultdict(dict)
  for (variant, mode, *seed), items in same.items():
    scores[variant, mode][tuple(seed)] = items.scores
  uids = {uid: i for i, uid in enumerate(dict.fromkeys(u for u, _ in most))}
  parts = collections.defaultdict(list)
  for uid, i in uids.items():
    if phenomena.get(uid):
      parts[phenomena[uid]].append(i)
  # The same text under another UID is another question.
  texts = next(iter(same.values())).texts
  keys = [(uid, text) for (uid, _), text in zip(most, texts, strict=True)]
  number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
  return Common(
    strata=np.array([uids[uid] for uid, _ in most]),
    texts=np.array([number[key] for key in keys]),
    parts=parts,
    scores=scores,
    others=found.keys() - same.keys(),
  )
