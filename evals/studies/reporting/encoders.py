"""The report of CLM, MLM or both (arXiv 2507.00994).

Scores are of the test sets, at the rate that is best on those to choose on.
Each pretraining has several fine-tunings. Scores before the end are those of
modes of their own, such as "bidirectional, step 40".
"""

import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax.evals import statistics
from antlm_jax.evals.finetuning.protocol import TASKS_BY_KIND
from antlm_jax.evals.statistics import MeanEstimate
from antlm_jax.evals.studies.reporting import claims, scores
from antlm_jax.evals.studies.reporting.claims import Claim, Contrast, Report
from antlm_jax.evals.studies.reporting.findings import Findings
from antlm_jax.evals.studies.reporting.render import Row
from antlm_jax.evals.studies.reporting.scores import Score, Scores
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import OBJECTIVES

ATTENTION = "bidirectional"
_EARLY = 2 / 42  # of the longest row's steps
_TEST = "-test"
_TASKS = [task for tasks in TASKS_BY_KIND.values() for task in tasks]
_RATES = 1e-5, 1e-4  # lowest and highest learning rate of figure 5


def report_encoders(study: Findings) -> Report:
  """Makes the report of a study, and decides which of its scores count.

  It takes scores of test sets at the best learning rate. They are main metrics,
  means over a kind of task, other metrics, and scores before the end.
  """
  study = dataclasses.replace(study, table=_test_scores(study.table))
  trials = study.table.latest()
  best_trials = trials.where(chosen=True)
  main_scores = best_trials.where(main=True)
  # The main scores alone tell which results are absent or not learnt.
  study = dataclasses.replace(study, scores=main_scores)
  gaps = study.gaps((), _TASKS)
  unlearnt = _unlearnt(study)
  if unlearnt:
    gaps.append(
      f"not learnt: {', '.join(unlearnt)}: no row is above the trivial answer"
      " by more than its interval, so no claim counts this"
    )
  other_metrics = _other_metrics(best_trials)
  other_measures = other_metrics.distinct("measure")
  other_measures.sort(key=lambda measure: _TASKS.index(measure.split()[0]))
  scores_that_count = Scores(
    [
      *main_scores,
      *_kind_scores(main_scores, unlearnt),
      *other_metrics,
      *_early_scores(study, unlearnt),
    ]
  )
  study = dataclasses.replace(study, scores=scores_that_count)
  tables = collections.defaultdict(dict)
  for name, rows in study.families.items():
    tables["scores"][name] = study.score_rows(
      rows, [*TASKS_BY_KIND, *_TASKS, *other_measures]
    )
    tables["rates"][name] = _rate_rows(study, rows, trials)
  tables["published"][""] = scores.published_numbers("encoders")
  facts = {"not_learnt": unlearnt}
  paper_claims = list(_paper_claims(study))
  return Report("encoders", study, paper_claims, tables, [], gaps, facts)


# -------------------------------------------------------------------- scores


def _mode(step: int = 0) -> str:
  """Returns the mode of scores at the end, or of those after a step."""
  return f"{ATTENTION}, step {step:,}" if step else ATTENTION


def _test_scores(table: Scores) -> Scores:
  """Returns the scores of the tasks' test sets, by the names of the tasks."""
  renamed = Scores(
    line._replace(measure=line.measure.removesuffix(_TEST))
    for line in table
    if line.measure.endswith(_TEST)
  )
  return renamed.where(measure=_TASKS)


def _other_metrics(trials: Scores) -> Scores:
  """Returns the scores by metrics other than the main, each as a measure."""
  return Scores(
    line._replace(measure=f"{line.measure} ({line.metric})", metric="")
    for line in trials.where(main=False)
  )


def _early_scores(
  study: Findings, unlearnt: Collection[str]
) -> Iterator[Score]:
  """Yields the scores of each kind of task at steps before the end."""
  early_steps = {
    step
    for row in study.rows.values()
    for steps in row.looks.values()
    for step in steps
  }
  for step in sorted(early_steps):
    trials = study.table.where(step=step, chosen=True, main=True)
    for line in _kind_scores(trials, unlearnt):
      yield line._replace(mode=_mode(step))


def _kind_scores(trials: Scores, unlearnt: Collection[str]) -> Iterator[Score]:
  """Yields the scores of each kind of task.

  A kind is the mean of its learnt tasks, or of all if none is learnt.
  """
  scored = trials.distinct("measure")
  for kind, tasks in TASKS_BY_KIND.items():
    tasks = [task for task in tasks if task in scored]
    learnt = [task for task in tasks if task not in unlearnt]
    yield from scores.mean_of(trials, learnt or tasks, kind)


def _unlearnt(study: Findings) -> list[str]:
  """Returns the tasks on which no row is above the trivial answer."""
  tasks = []
  for task in filter(study.scores.distinct("measure").__contains__, _TASKS):
    lines = study.scores.where(measure=task, mode=ATTENTION)
    gains = [
      study.above(task, (name, ATTENTION)) for name in lines.distinct("row")
    ]
    # Without scores of items nothing is known.
    if all(gains) and not any(map(claims.is_above, gains)):
      tasks.append(task)
  return tasks


def _rate_rows(
  study: Findings, names: Sequence[str], trials: Scores
) -> list[Row]:
  """Returns by kind how much tasks' scores deviate over rates and seeds.

  They deviate over the rates of figure 5, and over all.
  """
  rows = []
  for name in names:
    all_rates = trials.where(row=name, mode=ATTENTION, main=True)
    near = _near_rates(all_rates)
    selections = [near, all_rates]
    if len(near) == len(all_rates):
      selections = [all_rates]
    for lines in selections:
      rates = sorted(set(lines.distinct("lr")))
      deviations = _deviations(lines, "seed", "measure")
      by_task = collections.defaultdict(list)
      for (_, task), deviation in deviations.items():
        by_task[task].append(deviation)
      row = {
        kind: float(np.mean([np.mean(by_task[task]) for task in scored]))
        for kind, tasks in TASKS_BY_KIND.items()
        if (scored := [task for task in tasks if task in by_task])
      }
      if row and len(rates) > 1:
        text = f"{rates[0]:g} to {rates[-1]:g}"
        rows.append({"row": study.title(name), "rates": text} | row)
  return rows


def _near_rates(lines: Scores) -> Scores:
  """Returns the lines at learning rates of figure 5."""
  low, high = _RATES
  return Scores(line for line in lines if low <= line.lr <= high)


def _deviations(lines: Scores, *fields: str) -> dict[tuple, float]:
  """Returns the deviation of values, by some fields."""
  return {
    key: float(np.std([line.value for line in group], ddof=1))
    for key, group in lines.groups(*fields).items()
    if len(group) > 1
  }


# -------------------------------------------------------------------- claims


def _paper_claims(study: Findings) -> Iterator[Claim]:
  """Yields the paper's claims: for each family, or for several at once."""
  families = list(dict.fromkeys(row.family for row in study.rows.values()))
  for statement in scores.published_numbers("encoders_claims"):
    claims_by_rows = {}
    for family in families:
      # A family's row, or a row of this very name.
      sides = [
        tuple(
          n if n in study.rows else f"{family.lower()}_{n}"
          for n in side.split()
        )
        for side in (statement["plus"], statement["minus"])
      ]
      if study.rows.keys() >= {*itertools.chain(*sides)}:
        early = statement["measure"] == "early"
        step = round(_EARLY * _longest_steps(study, family)) if early else 0
        contrasts = [
          _contrast(study, _mode(step), kind, *sides, statement)
          for kind in statement["kinds"].split()
        ]
        text = statement["text"] + f" ({family})" * (len(families) > 1)
        # Families that a claim compares have it once.
        claims_by_rows.setdefault(
          tuple(sides), Claim(text, statement["source"], contrasts)
        )
    yield from claims_by_rows.values()
    if not claims_by_rows:
      yield Claim(statement["text"], statement["source"], ())


def _contrast(
  study: Findings,
  mode: str,
  kind: str,
  plus: Sequence[str],
  minus: Sequence[str],
  statement: Mapping[str, Any],
) -> Contrast:
  """Compares rows on a kind of task, by the measure of a claim."""
  measure = statement["measure"]
  weights = {(name, mode): 1.0 for name in plus}
  weights |= {(name, mode): -1.0 for name in minus}
  on = f"{kind}: {statement['plus']} - {statement['minus']}"
  published = None
  if measure in ("rates", "ratios"):
    lines = study.scores.where(measure=kind)
    on += f", deviation over {measure}"
    if measure == "rates":
      lines = _common_rates(study, kind, [*plus, *minus])
      on += " from {:g} to {:g}".format(*_RATES)
    estimate = _deviation_difference(lines, plus, minus)
  else:
    estimate = study.difference(kind, weights)
    numbers = {
      line["row"]: line[kind]
      for line in scores.published_numbers("encoders")
      if line["early"] == (measure == "early")
    }
    published = float(
      sum(numbers[name] for name in statement["plus"].split())
      - sum(numbers[name] for name in statement["minus"].split())
    )
  above = study.gains(kind, weights)
  return Contrast(on, estimate and estimate.times(100), published, above=above)


def _common_rates(study: Findings, kind: str, names: Sequence[str]) -> Scores:
  """Returns the trials at those rates of figure 5 that all rows have."""
  trials = _near_rates(study.table.latest())
  trials = trials.where(row=names, measure=TASKS_BY_KIND[kind], main=True)
  groups = trials.groups("mode", "seed", "trial", "measure", "lr").values()
  return Scores(
    line
    for group in groups
    if len(group.distinct("row")) == len(names)
    for line in group
  )


def _deviation_difference(
  lines: Scores, plus: Sequence[str], minus: Sequence[str]
) -> MeanEstimate | None:
  """Estimates how much more some rows' scores deviate than others'."""
  fields = "seed", "trial", "measure"
  sides = []
  for rows in (plus, minus):
    selected = lines.where(row=rows, mode=ATTENTION)
    groups = selected.groups(*fields)
    complete = {
      k for k, x in groups.items() if len(x.distinct("row")) == len(rows)
    }
    deviations = _deviations(selected, *fields)
    sides.append({k: x for k, x in deviations.items() if k in complete})
  # Only tasks, seeds and trials that both have count.
  differences = collections.defaultdict(list)
  for key in sides[0].keys() & sides[1].keys():
    differences[key[:2]].append(sides[0][key] - sides[1][key])
  means = {key: np.mean(values) for key, values in differences.items()}
  return statistics.estimate_over_seeds(means)


def _longest_steps(study: Findings, family: str) -> int:
  """Returns the steps of a family's longest row, trained or not."""
  return max(
    curriculum.parse_curriculum(text, OBJECTIVES, 1000, 1000).steps
    for row in study.rows.values()
    if row.family == family and not row.after
    for text in row.curriculum.values()
  )
