"""Findings of a study: means over seeds, and paired differences of rows.

This module does not depend on a study's rows or their comparisons.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax.evals import statistics
from antlm_jax.evals.statistics import Mean, MeanEstimate
from antlm_jax.evals.studies.reporting.differences import (
  Pairing,
  Side,
  Weights,
  pair_scores,
)
from antlm_jax.evals.studies.reporting.items import ItemFiles
from antlm_jax.evals.studies.reporting.render import without_empty
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.evals.studies.reporting.scores import LOSS, Scores
from antlm_jax.evals.studies.study import Row
from antlm_jax.evals.zero_shot.task import Reported

# An estimate's measure, and weights of sides.
EstimateKey = tuple[str, frozenset[tuple[Side, float]]]


@dataclasses.dataclass(frozen=True)
class Findings:
  """A study's rows, their runs, and the runs' scores.

  Attributes:
    name: Title of the study.
    rows: The rows by name, in order, with runs or without.
    runs: The runs of each row that has any.
    table: The long table of all scores.
    scores: The scores that count.
    items: Scores of single items.
    estimates: Differences over items. A record has these in place of items.
    notes: Lines about items that do not compare.
  """

  name: str
  rows: Mapping[str, Row]
  runs: Mapping[str, Sequence[TrainedRun]]
  table: Scores
  scores: Scores
  items: ItemFiles
  estimates: dict[EstimateKey, MeanEstimate | None] = dataclasses.field(
    default_factory=dict
  )
  notes: list[str] = dataclasses.field(default_factory=list)

  @functools.cached_property
  def families(self) -> dict[str, list[str]]:
    """The rows that have runs, by family, in order."""
    families = collections.defaultdict(list)
    for name in self.runs:
      families[self.rows[name].family].append(name)
    return dict(families)

  def title(self, name: str, mode: str = "") -> str:
    """Returns a row's title, with a mode or an attention."""
    return self.rows[name].title + (f" ({mode})" if mode else "")

  def sizes(self, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Returns parameters, steps and rows of a batch of runs at their end."""
    runs = (r for name in names for r in self.runs[name] if r.summary)
    sizes = (
      (
        run.summary["parameters"],
        run.summary["steps"],
        run.config["train"]["batch_size"],
      )
      for run in runs
    )
    return list(dict.fromkeys(sizes))

  def shared_steps(self, name: str, other: str) -> int:
    """Returns the number of first steps that runs of two rows share."""
    settings = [dict(self.rows[row].settings) for row in (name, other)]
    same_settings = settings[0] == settings[1]
    others = {run.seed: run for run in self.runs[other]}
    return max(
      (
        run.shared_steps(others[run.seed], same_settings)
        for run in self.runs[name]
        if run.seed in others
      ),
      default=0,
    )

  # ------------------------------------------------------------------ means

  @functools.cached_property
  def _lines(self) -> dict[tuple[str, str, str], Scores]:
    return self.scores.groups("row", "mode", "measure")

  def mean(self, name: str, mode: str, measure: str) -> Mean | None:
    """Returns the mean score of a row in a mode.

    It is over pretrainings, or over the fine-tunings of the only one.
    """
    by_seed = collections.defaultdict(dict)
    for line in self._lines.get((name, mode, measure), ()):
      by_seed[line.seed][line.trial] = float(line.value)
    if len(by_seed) == 1:
      (by_trial,) = by_seed.values()
      if len(by_trial) > 1:
        return statistics.mean_of_seeds(by_trial)
    return statistics.mean_of_seeds(
      {
        seed: float(np.mean(list(by_trial.values())))
        for seed, by_trial in by_seed.items()
      }
    )

  # ------------------------------------------------------------ differences

  def difference(self, measure: str, weights: Weights) -> MeanEstimate | None:
    """Estimates a weighted sum of scores, as `Pairing.difference` does.

    Args:
      measure: The measure.
      weights: Weight of each side's score.
    """
    key = measure, frozenset(weights.items())
    if key not in self.estimates:
      pairing = self._pairing(measure, *{mode for _, mode in weights})
      self.estimates[key] = pairing and pairing.difference(weights)
    return self.estimates[key]

  def above(self, measure: str, side: Side) -> MeanEstimate | None:
    """Estimates by how much a side is better than the trivial answer."""
    lines = self._lines.get((*side, measure), ())
    if lines and lines[0].metric == LOSS:
      # Losses of the trivial answer by row are unknown, and would be paired.
      values = {(line.seed, line.trial): line.value for line in lines}
      estimate = statistics.estimate_over_seeds(values)
    else:
      estimate = self.difference(measure, {side: 1.0})
    if estimate is None:
      return None
    baseline = np.mean([line.baseline for line in lines])
    gain = estimate._replace(value=float(estimate.value - baseline))
    return gain.times(-1) if lines[0].metric == LOSS else gain

  @functools.cached_property
  def _pairings(self) -> dict[tuple[str, frozenset[str]], Pairing | None]:
    return {}

  def _pairing(self, measure: str, *modes: str) -> Pairing | None:
    key = measure, frozenset(modes)
    if key not in self._pairings:
      lines = self.scores.where(measure=measure, mode=modes)
      self._pairings[key] = pair_scores(lines, self.items)
    return self._pairings[key]

  def gains(
    self, measure: str, sides: Iterable[Side]
  ) -> dict[str, MeanEstimate]:
    """Returns `above` of the sides that have it, by title."""
    gains = {side: self.above(measure, side) for side in sides}
    return {
      str(self.rows[name]) + (f" ({mode})" if mode else ""): gain
      for (name, mode), gain in gains.items()
      if gain
    }

  # ------------------------------------------------------------------ tables

  def score_rows(
    self, names: Sequence[str], measures: Sequence[str]
  ) -> list[dict[str, Any]]:
    """Returns the means of rows in each mode, after the trivial answer's."""
    lines = self.scores.where(row=names).groups("measure")
    lines = {name: lines[name,] for name in measures if (name,) in lines}
    heads = {}
    columns = dict.fromkeys(("row", "curriculum", "seeds", "mode"))
    baseline = columns | {"row": "trivial answer"}
    for name, scores in lines.items():
      metric = ", ".join(
        m for m in scores.distinct("metric") if m and m != LOSS
      )
      heads[name] = f"{name} ({metric})" if metric else name
      trivial = [x.baseline for x in scores if x.baseline is not None]
      if trivial:
        baseline[heads[name]] = Mean({}, float(np.mean(trivial)), None)
    rows = []
    for name in names:
      run = self.runs[name][0]
      modes = self.scores.where(row=name, measure=lines).distinct("mode")
      untrained = set(run.names.values()) - run.trained_names
      outside = [h for m, h in heads.items() if m.split(",")[0] in untrained]
      rows += [
        {
          "row": self.title(name),
          "curriculum": run.text,
          "seeds": len(self.runs[name]),
          "mode": mode or None,
          **{head: self.mean(name, mode, m) for m, head in heads.items()},
          "_untrained": outside,
        }
        for mode in modes or [""]
      ]
    if len(baseline) > len(columns):
      rows.insert(0, baseline)
    return without_empty(rows, "mode")

  # -------------------------------------------------------------------- gaps

  def gaps(
    self, benchmarks: Sequence[Reported], tasks: Sequence[str]
  ) -> list[str]:
    """Returns the missing results, each with its rows and seeds.

    Args:
      benchmarks: Benchmarks that each row should have in all of its modes.
      tasks: Tasks to fine-tune on.
    """
    tuned = [task for task in tasks if self.scores.where(measure=task)]
    lacking = collections.defaultdict(lambda: collections.defaultdict(list))
    for name in self.rows:
      if name not in self.runs:
        lacking["not trained"][name] = []
      for run in self.runs.get(name, ()):
        for result in dict.fromkeys(self._missing(run, benchmarks, tuned)):
          lacking[result][name].append(run.seed)
    # Results that all runs lack are named once, not run by run.
    runs = {name: [run.seed for run in self.runs[name]] for name in self.runs}
    gaps = [
      f"{result}: {'every run' if rows == runs else self._listed(rows)}"
      for result, rows in lacking.items()
    ]
    absent = [task for task in tasks if task not in tuned]
    if absent and self.table:
      gaps.append(f"no row is fine-tuned on {', '.join(absent)}")
    return gaps

  def _missing(self, run, benchmarks, tasks) -> Iterator[str]:
    """Yields the names of a run's missing results."""
    if run.summary is None:
      yield "training is not at its end"
    elif run.loss_names and not run.has_halves:
      yield "no losses of half of the held-out rows, so no lowest loss"
    if not self.table:
      yield "neither scored on pairs nor fine-tuned"
      return
    lines = self.scores.where(row=run.variant, seed=run.seed)
    modes = self.rows[run.variant].modes
    for benchmark, mode in itertools.product(benchmarks, modes):
      if not lines.where(measure=benchmark.name, mode=mode):
        yield f"{benchmark.name}, {mode}: not evaluated"
    if absent := [task for task in tasks if not lines.where(measure=task)]:
      yield f"not fine-tuned on {', '.join(absent)}"
    sizes = {benchmark.name: benchmark.pairs for benchmark in benchmarks}
    for line in lines.where(measure=[*sizes, *tasks]):
      place = f"{line.measure}, {line.mode}"
      if run.summary and line.step != run.summary["steps"]:
        yield f"{place}: evaluated at step {line.step:,}, before the end"
      if not line.complete and line.pairs:
        yield f"{place}: {line.pairs:,} pairs of {sizes[line.measure]:,}"
      elif not line.complete:
        yield f"{place}: fine-tuned on a part of its training set (--limit)"
      if line.pairs and not line.items:
        yield f"{place}: no items.jsonl, so no interval"

  def _listed(self, rows: Mapping[str, Sequence[str]]) -> str:
    """Names rows with seeds."""
    return ", ".join(
      str(self.rows[name]) + (f" (seed {', '.join(seeds)})" if seeds else "")
      for name, seeds in rows.items()
    )

  def item_notes(self) -> list[str]:
    """Returns lines about repeated texts, and items that do not compare."""
    for measure, mode in self.scores.groups("measure", "mode"):
      pairing = self._pairing(measure, mode)
      if pairing is None:
        continue
      if pairing.excluded:
        seeds = {
          name: lines.distinct("seed")
          for (name,), lines in pairing.excluded.groups("row").items()
        }
        self._note(
          f"{measure}, {mode}: other items than most, so not compared:"
          f" {self._listed(seeds)}"
        )
      items = len(pairing.texts)
      texts = pairing.texts.max() + 1
      if texts < items:
        self._note(
          f"{measure}: {items:,} items have {texts:,} texts; in intervals,"
          " items of one text count as one"
        )
    return self.notes

  def _note(self, line: str) -> None:
    if line not in self.notes:
      self.notes.append(line)
