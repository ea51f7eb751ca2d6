"""What the report says in numbers: means, differences, what a switch does.

A row's *control* is a row of the same encoder that was trained with one
objective alone. It is read as it was trained: causally, or with masks.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from evals.finetuning import glue
from evals.finetuning.loop import ATTENTIONS
from evals.reporting import statistics
from evals.reporting.runs import (
  BENCHMARKS,
  BLIMP,
  READINGS,
  Benchmark,
  Row,
  Run,
  ZeroShot,
)
from evals.reporting.statistics import Interval, Resampled


@dataclasses.dataclass(frozen=True)
class Mean:
  """A number over seeds.

  Attributes:
    values: By seed.
  """

  values: Mapping[str, float]

  @property
  def mean(self) -> float:
    """The mean."""
    return float(np.mean([*self.values.values()]))

  @property
  def std(self) -> float | None:
    """The sample's standard deviation; None of one seed."""
    if len(self.values) < 2:
      return None
    return float(np.std([*self.values.values()], ddof=1))


@dataclasses.dataclass(frozen=True)
class Common:
  """A benchmark's items on which runs compare.

  Attributes:
    uids: The UIDs.
    column: Index of each (row, seed, mode) among the runs of `resampled`.
    resampled: The runs on resampled items.
    others: (row, seed, mode) that were scored on other items.
  """

  uids: tuple[str, ...]
  column: Mapping[tuple[str, str, str], int]
  resampled: Resampled
  others: tuple[tuple[str, str, str], ...]


@dataclasses.dataclass(frozen=True)
class Study:
  """The rows, and the runs that there are.

  Attributes:
    rows: Every row of the table, in order.
    runs: Runs by row; rows without any are left out.
    pipeline: By which pair scores are.
  """

  rows: Mapping[str, Row]
  runs: Mapping[str, Sequence[Run]]
  pipeline: str

  @property
  def families(self) -> tuple[str, ...]:
    """The encoders, in order."""
    return tuple(dict.fromkeys(row.family for row in self.rows.values()))

  def of_family(self, family: str) -> list[str]:
    """Returns the names of an encoder's rows that have runs."""
    return [name for name in self.runs if self.rows[name].family == family]

  def controls(self, family: str) -> list[str]:
    """Returns the rows of one objective."""
    return [
      name
      for name in self.of_family(family)
      if len(self.runs[name][0].objectives) == 1
    ]

  def mixed(self, family: str) -> list[str]:
    """Returns the rows of several objectives."""
    controls = self.controls(family)
    return [name for name in self.of_family(family) if name not in controls]

  def reading(self, control: str) -> str:
    """Returns how a control is read."""
    return self.runs[control][0].reading

  def zero_shot(
    self, name: str, benchmark: Benchmark, reading: str
  ) -> dict[str, ZeroShot]:
    """Returns the results of a row by seed."""
    key = self.pipeline, benchmark.folder, self.rows[name].mode(reading)
    return {
      run.seed: run.zero_shot[key]
      for run in self.runs[name]
      if key in run.zero_shot
    }

  def score(self, name: str, benchmark: Benchmark, reading: str) -> Mean | None:
    """Returns a row's score, or None if it is not there."""
    found = self.zero_shot(name, benchmark, reading)
    return _mean({seed: result.score for seed, result in found.items()})

  @property
  def majorities(self) -> dict[str, tuple[str, float]]:
    """The metric, and what one class gets, by evaluation set."""
    found = {
      name: (tuned.metric, share)
      for runs in self.runs.values()
      for run in runs
      for tuned in run.tuned.values()
      for name, share in tuned.majority.items()
    }
    return {name: found[name] for name in glue.SCORES if name in found}

  @property
  def terms(self) -> dict[str, str]:
    """BLiMP's phenomenon by UID."""
    return {
      uid: about["term"]
      for runs in self.runs.values()
      for run in runs
      for (_, benchmark, _), result in run.zero_shot.items()
      if benchmark == BLIMP.folder
      for uid, about in result.summary["by_uid"].items()
    }

  # Kept: every comparison of a benchmark uses the same draws.
  @functools.cached_property
  def common(self) -> dict[str, Common]:
    """The items on which runs compare, by the benchmark's folder."""
    found = {b.folder: _common(self, b) for b in BENCHMARKS}
    return {folder: common for folder, common in found.items() if common}


def _mean(values: Mapping[str, float]) -> Mean | None:
  return Mean(values) if values else None


def _common(study: Study, benchmark: Benchmark) -> Common | None:
  found = {
    (name, seed, reading): result.items
    for name in study.runs
    for reading in READINGS
    for seed, result in study.zero_shot(name, benchmark, reading).items()
    if result.items is not None
  }
  if not found:
    return None
  keys = collections.Counter(items.key for items in found.values())
  key = keys.most_common(1)[0][0]
  same = {run: items for run, items in found.items() if items.key == key}
  first = next(iter(same.values()))
  correct = np.stack([items.correct for items in same.values()])
  return Common(
    uids=first.uids,
    column={run: i for i, run in enumerate(same)},
    resampled=statistics.resample(correct, first.strata),
    others=tuple(run for run in found if run not in same),
  )


# --------------------------------------------------------------- differences


@dataclasses.dataclass(frozen=True)
class Delta:
  """A row's score minus its control's, in [-1, 1].

  Attributes:
    benchmark: Its name.
    row: The row's name.
    reading: How it is read.
    control: The control's name.
    control_reading: How that is read.
    seeds: Number of runs of the row, and of the control.
    by_items: The interval for these very runs.
    by_seeds: The one for other seeds, too; None if a side has only one.
    phenomenon: What part of the benchmark it is of; "" for all of it.
  """

  benchmark: str
  row: str
  reading: str
  control: str
  control_reading: str
  seeds: tuple[int, int]
  by_items: Interval
  by_seeds: Interval | None
  phenomenon: str = ""

  @property
  def interval(self) -> Interval:
    """The one that says more: by seeds, where there are several."""
    return self.by_seeds or self.by_items

  @property
  def verdict(self) -> str:
    """What may be said of it."""
    if self.interval.contains_zero:
      return "contains 0"
    return "above" if self.interval.estimate > 0 else "below"


def deltas(study: Study, family: str) -> list[Delta]:
  """Compares every mixed row, both ways read, with every control."""
  found = (
    _delta(study, benchmark, name, reading, control)
    for benchmark in BENCHMARKS
    for name in study.mixed(family)
    for reading in READINGS
    for control in study.controls(family)
  )
  return [delta for delta in found if delta]


def phenomena(study: Study, family: str) -> list[Delta]:
  """Compares mixed rows with each control, read alike, by phenomenon.

  Args:
    study: The runs.
    family: Of which encoder.
  """
  common = study.common.get(BLIMP.folder)
  if common is None:
    return []
  terms, strata = study.terms, collections.defaultdict(list)
  for i, uid in enumerate(common.uids):
    if terms.get(uid):
      strata[terms[uid]].append(i)
  found = (
    _delta(study, BLIMP, name, study.reading(control), control, term, those)
    for name in study.mixed(family)
    for control in study.controls(family)
    for term, those in sorted(strata.items())
  )
  return [delta for delta in found if delta]


def _delta(
  study: Study,
  benchmark: Benchmark,
  name: str,
  reading: str,
  control: str,
  phenomenon: str = "",
  strata: Sequence[int] | None = None,
) -> Delta | None:
  common = study.common.get(benchmark.folder)
  if common is None:
    return None
  control_reading = study.reading(control)
  a, b = (
    [
      column
      for (row, _, read), column in common.column.items()
      if (row, read) == side
    ]
    for side in ((name, reading), (control, control_reading))
  )
  if not a or not b:
    return None
  sides = [common.resampled.scores(runs, strata) for runs in (a, b)]
  several = min(len(a), len(b)) > 1
  return Delta(
    benchmark=benchmark.name,
    row=name,
    reading=reading,
    control=control,
    control_reading=control_reading,
    seeds=(len(a), len(b)),
    by_items=statistics.difference(*sides),
    by_seeds=statistics.difference(*sides, by_seeds=True) if several else None,
    phenomenon=phenomenon,
  )


# ------------------------------------------------------------------ switches


@dataclasses.dataclass(frozen=True)
class Moment:
  """An objective's held-out loss around a switch, in nats.

  Attributes:
    best: The lowest before, the switch included.
    at: At the switch.
    end: At the end of the phase after it.
    again: At the end of the next phase that trains it, if there is one.
  """

  best: float
  at: float
  end: float
  again: float | None

  @property
  def change(self) -> float:
    """What the phase after the switch adds."""
    return self.end - self.at


@dataclasses.dataclass(frozen=True)
class Switch:
  """What becomes of an objective at a switch.

  Attributes:
    row: The row's name.
    phases: Such as `C→M`.
    step: Steps done by then, in the first run.
    steps: Length of that run.
    kind: The objective's logged name.
    left: Whether it is the one that is left; else it is taken up.
    moments: By seed.
  """

  row: str
  phases: str
  step: int
  steps: int
  kind: str
  left: bool
  moments: Mapping[str, Moment]

  def mean(self, what: str) -> float | None:
    """Returns the mean over seeds of a Moment's attribute."""
    values = [getattr(moment, what) for moment in self.moments.values()]
    return None if None in values else float(np.mean(values))


def switches(study: Study, family: str) -> list[Switch]:
  """Returns what becomes of every objective left or taken up, in order."""
  out = []
  for name in study.of_family(family):
    runs = [run for run in study.runs[name] if run.curriculum is not None]
    runs = [run for run in runs if run.text == runs[0].text]
    for index in range(len(runs[0].curriculum.phases) - 1 if runs else 0):
      out += _switch(runs, index)
  return out


def _switch(runs: Sequence[Run], index: int) -> Iterator[Switch]:
  """Yields what becomes of the objectives at the end of a phase."""
  first = runs[0]
  before, after = first.curriculum.phases[index : index + 2]
  for name, kind in first.names.items():
    if (name in before.shares) == (name in after.shares):
      continue
    moments = {run.seed: _moment(run, name, index) for run in runs}
    moments = {seed: moment for seed, moment in moments.items() if moment}
    if moments:
      yield Switch(
        row=first.row,
        phases=f"{before}→{after}",
        step=after.start,
        steps=first.curriculum.steps,
        kind=kind,
        left=name in before.shares,
        moments=moments,
      )


def _moment(run: Run, name: str, index: int) -> Moment | None:
  """Reads a run's losses, or None if they were not measured there."""
  losses = dict(run.held_out(run.names[name]))
  _, after, *later = run.curriculum.phases[index:]
  again = next((p.stop for p in later if name in p.shares), None)
  if after.start not in losses or after.stop not in losses:
    return None
  return Moment(
    best=min(loss for step, loss in losses.items() if step <= after.start),
    at=losses[after.start],
    end=losses[after.stop],
    again=losses.get(again),
  )


# --------------------------------------------------------------- fine-tuning


@dataclasses.dataclass(frozen=True)
class Tuning:
  """A row's fine-tuning with one attention.

  Attributes:
    row: The row's name.
    attention: How it was read.
    scores: By evaluation set, in GLUE's order.
    mean: Over the sets that all of the seeds have, which `tasks` names.
    tasks: See there.
    collapsed: The runs that give nearly one answer.
  """

  row: str
  attention: str
  scores: Mapping[str, Mean]
  mean: Mean | None
  tasks: tuple[str, ...]
  collapsed: tuple[str, ...]


def tunings(study: Study, family: str) -> list[Tuning]:
  """Returns every row's fine-tuning, where there is any."""
  found = (
    _tuning(study, name, attention)
    for name in study.of_family(family)
    for attention in ATTENTIONS
  )
  return [tuning for tuning in found if tuning]


def _tuning(study: Study, name: str, attention: str) -> Tuning | None:
  by_seed, collapsed = {}, []
  for run in study.runs[name]:
    found = {t: f for (a, t), f in run.tuned.items() if a == attention}
    if found:
      by_seed[run.seed] = {
        score: value
        for f in found.values()
        for score, value in f.scores.items()
      }
    collapsed += [
      f"{task}, {which} (run {run.seed})"
      for task, f in found.items()
      for which in f.collapsed
    ]
  if not by_seed:
    return None
  tasks = [t for t in glue.SCORES if all(t in s for s in by_seed.values())]
  means = {seed: np.mean([s[t] for t in tasks]) for seed, s in by_seed.items()}
  scores = {
    task: Mean({seed: s[task] for seed, s in by_seed.items() if task in s})
    for task in glue.SCORES
    if any(task in s for s in by_seed.values())
  }
  return Tuning(
    row=name,
    attention=attention,
    scores=scores,
    mean=Mean({s: float(m) for s, m in means.items()}) if tasks else None,
    tasks=tuple(tasks),
    collapsed=tuple(collapsed),
  )


def macro(study: Study, name: str, reading: str) -> Mean | None:
  """Returns BabyLM 2024's average, or None if any part is not complete.

  The unweighted mean of BLiMP, its supplement, EWoK and GLUE, over the seeds
  that have all of them in full. GLUE is by the reading's own attention, or by
  the other one where there is no other.
  """
  values = {}
  for run in study.runs[name]:
    found = [
      study.zero_shot(name, benchmark, reading).get(run.seed)
      for benchmark in BENCHMARKS
    ]
    complete = all(
      result and result.summary["pairs"] == benchmark.pairs
      for result, benchmark in zip(found, BENCHMARKS, strict=True)
    )
    tuned = _complete_glue(run, reading)
    if complete and tuned is not None:
      values[run.seed] = float(np.mean([*(r.score for r in found), tuned]))
  return _mean(values)


def _complete_glue(run: Run, reading: str) -> float | None:
  own = "causal" if reading == "causal" else "bidirectional"
  for attention in sorted(ATTENTIONS, key=lambda a: a != own):
    found = [f for (a, _), f in run.tuned.items() if a == attention]
    scores = {t: s for f in found if f.full for t, s in f.scores.items()}
    if set(scores) == set(glue.SCORES):
      return float(np.mean([*scores.values()]))
  return None


# ---------------------------------------------------------------- all of them


@dataclasses.dataclass(frozen=True)
class Numbers:
  """All that the report says.

  Attributes:
    study: The runs.
    deltas: By encoder.
    phenomena: By row; rows without any are left out.
    switches: By encoder.
    tunings: By encoder.
    macros: By row and reading, where there is one.
  """

  study: Study
  deltas: Mapping[str, Sequence[Delta]]
  phenomena: Mapping[str, Sequence[Delta]]
  switches: Mapping[str, Sequence[Switch]]
  tunings: Mapping[str, Sequence[Tuning]]
  macros: Mapping[tuple[str, str], Mean]


def compute(study: Study) -> Numbers:
  """Computes all that the report says."""
  families = study.families
  by_row = collections.defaultdict(list)
  for family in families:
    for delta in phenomena(study, family):
      by_row[delta.row].append(delta)
  macros = {
    (name, reading): macro(study, name, reading)
    for name in study.runs
    for reading in READINGS
  }
  return Numbers(
    study=study,
    deltas={family: deltas(study, family) for family in families},
    phenomena=dict(by_row),
    switches={family: switches(study, family) for family in families},
    tunings={family: tunings(study, family) for family in families},
    macros={key: found for key, found in macros.items() if found},
  )
