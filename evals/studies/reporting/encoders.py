"""The report of CLM, MLM or both (arXiv 2507.00994).

Scores are of the test sets, at the rate that is best on those to choose on.
Each pretraining has several fine-tunings.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from antlm_jax.evals import statistics
from antlm_jax.evals.finetuning.protocol import TASKS_BY_KIND
from antlm_jax.evals.studies.reporting import claims, scores
from antlm_jax.evals.studies.reporting.claims import Claim, Contrast, Report
from antlm_jax.evals.studies.reporting.findings import Findings
from antlm_jax.evals.studies.reporting.render import Row
from antlm_jax.evals.studies.reporting.scores import Scores
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import OBJECTIVES

ATTENTION = "bidirectional"
_EARLY = 2 / 42  # of the longest row's steps
_TEST = "-test"
_TASKS = [task for tasks in TASKS_BY_KIND.values() for task in tasks]
_RATES = 1e-5, 1e-4  # lowest and highest learning rate of figure 5


def report_encoders(study: Findings) -> Report:
  """Makes the report; which scores of the study count is decided here."""
  named = (
    line._replace(measure=line.measure.removesuffix(_TEST))
    for line in study.table
    if line.measure.endswith(_TEST)
  )
  study = dataclasses.replace(study, table=Scores(named).where(measure=_TASKS))
  unlearnt = _unlearnt(_at_step(study))
  at_step = functools.cache(
    functools.partial(_at_step, study, unlearnt=unlearnt)
  )
  claimed = list(_paper_claims(study, at_step))
  study = at_step(0)
  trials = study.table.latest()
  tables = collections.defaultdict(dict)
  usual = Scores(
    line._replace(measure=f"{line.measure} ({line.metric})", metric="")
    for line in trials.where(main=False, chosen=True)
  )
  study = dataclasses.replace(study, scores=Scores([*study.scores, *usual]))
  also = usual.distinct("measure")
  also.sort(key=lambda measure: _TASKS.index(measure.split()[0]))
  for name, rows in study.families.items():
    tables["scores"][name] = study.score_rows(
      rows, [*TASKS_BY_KIND, *_TASKS, *also]
    )
    tables["looks"][name] = list(_look_rows(study, rows, at_step))
    tables["rates"][name] = _rate_rows(study, rows, trials)
  tables["published"][""] = scores.published_numbers("encoders")
  gaps = study.gaps((), _TASKS)
  if unlearnt:
    gaps.append(
      f"not learnt: {', '.join(unlearnt)}: no row is above the trivial answer"
      " by more than its interval, so no claim counts this"
    )
  facts = {"not_learnt": unlearnt}
  return Report("encoders", study, claimed, tables, [], gaps, facts)


# -------------------------------------------------------------------- scores


def _at_step(
  study: Findings, step: int = 0, unlearnt: Collection[str] = ()
) -> Findings:
  """Returns a study whose scores are of one step, and of kinds of task.

  Without a step, they are of each task's last. A kind is the mean of its learnt
  tasks, or of all if none is learnt.
  """
  table = study.table
  trials = table.where(step=step) if step else table.latest()
  trials = trials.where(chosen=True, main=True)
  scored = trials.distinct("measure")
  lines = Scores(trials)
  for kind, tasks in TASKS_BY_KIND.items():
    tasks = [task for task in tasks if task in scored]
    tasks = [task for task in tasks if task not in unlearnt] or tasks
    lines += scores.mean_of(trials, tasks, kind)
  subset = " ".join([f"step {step}" if step else "end", *unlearnt])
  return dataclasses.replace(study, scores=lines, subset=subset)


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


def _look_rows(
  study: Findings, names: Sequence[str], at_step: Callable[[int], Findings]
) -> Iterator[Row]:
  """Yields scores before the learning rate decays, by step."""
  looks = (study.rows[name].looks.values() for name in names)
  for step in sorted({*itertools.chain(*itertools.chain(*looks))}):
    early = at_step(step)
    scored = [name for name in names if early.scores.where(row=name)]
    for row in early.score_rows(scored, list(TASKS_BY_KIND)):
      yield {"step": step} | row


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


def _paper_claims(
  study: Findings, at_step: Callable[[int], Findings]
) -> Iterator[Claim]:
  """Yields the paper's claims: for each family, or for several at once."""
  families = list(dict.fromkeys(row.family for row in study.rows.values()))
  for statement in scores.published_numbers("encoders_claims"):
    claims_by_rows = {}
    for family in families:
      # A family's row, or a row of this very name.
      sides = [
        [
          n if n in study.rows else f"{family.lower()}_{n}"
          for n in side.split()
        ]
        for side in (statement["plus"], statement["minus"])
      ]
      if study.rows.keys() >= {*itertools.chain(*sides)}:
        early = statement["measure"] == "early"
        step = round(_EARLY * _longest_steps(study, family)) if early else 0
        contrasts = [
          _contrast(at_step(step), kind, *sides, statement)
          for kind in statement["kinds"].split()
        ]
        text = statement["text"] + f" ({family})" * (len(families) > 1)
        # Families that a claim compares have it once.
        key = tuple(map(tuple, sides))
        claims_by_rows.setdefault(
          key, Claim(text, statement["source"], contrasts)
        )
    yield from claims_by_rows.values()
    if not claims_by_rows:
      yield Claim(statement["text"], statement["source"], ())


def _contrast(
  study: Findings,
  kind: str,
  plus: Sequence[str],
  minus: Sequence[str],
  statement: Mapping[str, Any],
) -> Contrast:
  """Compares rows on a kind of task, by the measure of a claim."""
  weights = {(name, ATTENTION): 1.0 for name in plus}
  weights |= {(name, ATTENTION): -1.0 for name in minus}
  on = f"{kind}: {statement['plus']} - {statement['minus']}"
  published = None
  if statement["measure"] in ("rates", "ratios"):
    estimate = _deviation_difference(
      study, statement["measure"], kind, plus, minus
    )
    on += f", deviation over {statement['measure']}"
    if statement["measure"] == "rates":
      on += " from {:g} to {:g}".format(*_RATES)
  else:
    estimate = study.difference(kind, weights)
    numbers = {
      line["row"]: line[kind]
      for line in scores.published_numbers("encoders")
      if line["early"] == (statement["measure"] == "early")
    }
    published = float(
      sum(numbers[name] for name in statement["plus"].split())
      - sum(numbers[name] for name in statement["minus"].split())
    )
  above = study.gains(kind, weights)
  return Contrast(on, estimate and estimate.times(100), published, above=above)


def _deviation_difference(study: Findings, measure: str, kind, plus, minus):
  """Estimates how much more some rows' scores deviate than others'.

  They deviate over the learning rates of figure 5 that all rows have, or over
  rows with different masking ratios.
  """
  names = [*plus, *minus]
  lines = study.scores.where(measure=kind)
  if measure == "rates":
    trials = _near_rates(study.table.latest())
    trials = trials.where(row=names, measure=TASKS_BY_KIND[kind], main=True)
    groups = trials.groups("mode", "seed", "trial", "measure", "lr").values()
    lines = Scores(
      line
      for group in groups
      if len(group.distinct("row")) == len(names)
      for line in group
    )
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
