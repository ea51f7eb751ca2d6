"""Findings of a study: means over seeds, and paired differences of variants.

Nothing here knows which variants a study has, or on what they are compared.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from antlm_jax.evals.design import CAUSAL, Row
from antlm_jax.evals.reporting import statistics
from antlm_jax.evals.reporting.runs import TrainedRun
from antlm_jax.evals.reporting.statistics import Interval, Mean, Resampled

if TYPE_CHECKING:
  import pandas as pd

  from antlm_jax.evals.reporting.measured import ItemFiles, Items


class Pair(NamedTuple):
  """Two sides to compare: a variant and the mode in which it is scored."""

  variant: tuple[str, str]
  control: tuple[str, str]

  @property
  def alike(self) -> bool:
    """Whether both are scored causally, or neither is."""
    return (self.variant[1] == CAUSAL) == (self.control[1] == CAUSAL)


class Delta(NamedTuple):
  """A variant's score minus its control's, in [-1, 1] or in nats."""

  task: str
  part: str  # of the task; "" for all of it
  pair: Pair
  seeds: tuple[int, int]  # number of runs of the variant, and of the control
  by_items: Interval  # for these very runs
  by_seeds: Interval | None  # for other seeds, too; None if a side has only one

  @property
  def interval(self) -> Interval:
    """The one that says more: by seeds, where there are several."""
    return self.by_seeds or self.by_items

  @property
  def verdict(self) -> str:
    """What may be said of it: above, below, or that the interval contains 0."""
    if self.interval.contains_zero:
      return "contains 0"
    return "above" if self.interval.estimate > 0 else "below"


class Common(NamedTuple):
  """A task's items on which runs compare."""

  # Indices of the UIDs of each phenomenon, by name.
  parts: Mapping[str, Sequence[int]]
  # Indices among `resampled`'s runs, by variant and mode.
  runs: Mapping[tuple[str, str], Sequence[int]]
  resampled: Resampled
  # (variant, mode, seed) that were scored on other items.
  others: Collection[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True)
class Findings:
  """A study's variants, their runs, and the runs' scores."""

  name: str
  pipeline: str  # how items of zero-shot scores were scored
  variants: Mapping[str, Row]  # by name, in order, with runs or without
  runs: Mapping[str, Sequence[TrainedRun]]  # of the variants that have any
  table: "pd.DataFrame"  # all that was measured, see `measured.read`
  scores: "pd.DataFrame"  # those that count: one for each seed, task and mode
  items: "ItemFiles"  # scores of single items
  confidence: float = statistics.CONFIDENCE  # of intervals over paired seeds
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

    Tasks have the same weight. With `complete`, only scores on all of a task's
    data count.
    """
    found = self.at(variant, tasks, mode)
    found = found[found.complete] if complete else found
    by_seed = found.groupby("seed", sort=False).value
    # A mean over fewer tasks is of something else.
    means = by_seed.mean()[by_seed.size() == len(tasks)]
    return statistics.mean(means.to_dict())

  def differences(
    self, task: str, pairs: Iterable[Pair], by_part: bool = False
  ) -> list[Delta]:
    """Compares pairs, as far as both sides have runs on the same items.

    That is on all of the task, or on each part of it.
    """
    common = self.common(task)
    if common is None:
      return []
    parts = sorted(common.parts.items()) if by_part else [("", None)]
    out = []
    for pair, (part, uids) in itertools.product(pairs, parts):
      runs = [common.runs.get(side, ()) for side in pair]
      if all(runs):
        sides = [common.resampled.scores(r, uids) for r in runs]
        seeds = tuple(map(len, runs))
        by_items, by_seeds = statistics.difference(*sides), None
        # One run does not say how much others of its kind would differ.
        if min(seeds) > 1:
          by_seeds = statistics.difference(*sides, by_seeds=True)
        out.append(Delta(task, part, pair, seeds, by_items, by_seeds))
    return out

  def common(self, task: str) -> Common | None:
    """Returns the items on which most runs compare; None if there are none."""
    if task not in self._kept:  # every comparison of a task has the same draws
      rows = self.scores[self.scores.task == task]
      items = map(self.items.of, rows["items"])
      places = zip(rows.variant, rows["mode"], rows.seed, strict=True)
      found = {p: of for p, of in zip(places, items, strict=True) if of}
      terms = (uids.items() for uids in rows.phenomena if uids)
      phenomena = dict(itertools.chain.from_iterable(terms))
      self._kept[task] = _common(found, phenomena) if found else None
    return self._kept[task]


def _common(
  found: Mapping[tuple[str, str, str], "Items"], phenomena: Mapping[str, str]
) -> Common:
  """Finds the items of most runs, by (variant, mode, seed), and resamples them.

  Runs that were scored on others (another --limit, say) cannot be paired: the
  report names them.
  """
  names = collections.Counter(items.names for items in found.values())
  most = names.most_common(1)[0][0]
  same = {p: items.scores for p, items in found.items() if items.names == most}
  uids = dict.fromkeys(uid for uid, _ in most)
  index = {uid: i for i, uid in enumerate(uids)}
  runs, parts = collections.defaultdict(list), collections.defaultdict(list)
  # One matrix of all runs, resampled once: that is what pairs the differences.
  for i, (variant, mode, _) in enumerate(same):
    runs[variant, mode].append(i)
  for uid, i in index.items():
    if phenomena.get(uid):
      parts[phenomena[uid]].append(i)
  strata = np.array([index[uid] for uid, _ in most])
  resampled = statistics.resample(np.stack([*same.values()]), strata)
  return Common(parts, runs, resampled, found.keys() - same.keys())
