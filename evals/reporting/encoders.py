"""The report of CLM, MLM or both (arXiv 2507.00994).

Scores are of the test sets, at the rate that is best on those to choose on.
Trials of fine-tuning are the seeds here: pretraining has one, as the paper's.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from antlm_jax import units
from antlm_jax.evals.finetuning.protocol import KINDS
from antlm_jax.evals.reporting import claims, measured, plots
from antlm_jax.evals.reporting.claims import Claim, Contrast
from antlm_jax.evals.reporting.controls import sizes
from antlm_jax.evals.reporting.findings import Findings, Pair
from antlm_jax.evals.reporting.measured import KEY
from antlm_jax.evals.reporting.render import Figure, Report, Row, fill
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import OBJECTIVES

ATTENTION = "bidirectional"
_LONGEST = 42  # thousands of steps of the paper
_TEST = "-test"
_TASKS = [task for tasks in KINDS.values() for task in tasks]

# Group averages in percent: SC, TC, QA, IR; 610M, tables 10 to 17.
PUBLISHED = {
  "clm_42": (83.58, 92.69, 42.09, 76.20),
  "mlm40_42": (87.00, 92.21, 62.77, 79.55),
  "mlm40_12": (83.04, 91.58, 41.51, 69.90),
  "clm3_mlm40_12": (83.67, 92.16, 43.77, 74.94),
  "clm6_mlm40_12": (83.63, 92.15, 42.78, 75.22),
  "clm9_mlm40_12": (82.32, 92.53, 41.53, 74.99),
  "clm_12": (80.86, 92.14, 39.07, 72.77),
  "mlm40_22": (86.07, 92.28, 51.44, 77.54),
  "clm5_mlm40_22": (86.31, 92.77, 54.43, 77.29),
  "clm11_mlm40_22": (86.33, 92.83, 55.97, 77.47),
  "clm17_mlm40_22": (85.29, 92.82, 53.39, 77.81),
  "clm_22": (82.97, 92.63, 41.14, 75.71),
  "clm10_mlm40_42": (87.85, 93.07, 67.77, 79.88),
  "clm21_mlm40_42": (87.58, 92.89, 59.51, 79.67),
  "clm32_mlm40_42": (87.06, 92.92, 61.41, 79.79),
  "clm_42_more_2": (85.39, 92.88, 47.85, 78.57),
  "clm_42_more_12": (87.84, 92.77, 63.21, 80.27),
  "clm_42_more_22": (88.40, 92.70, 66.62, 80.70),
  "mlm40_42_more_2": (87.08, 92.16, 63.56, 80.42),
  "mlm40_42_more_12": (87.61, 92.27, 66.57, 79.92),
  "mlm40_42_more_22": (87.47, 92.11, 67.66, 80.45),
}
# After 2,000 steps, undecayed: tables 6 to 9.
_EARLY = {"clm_42": (73.61, 89.52, 26.89, 47.77)}
_EARLY["mlm40_42"] = (68.23, 86.80, 17.00, 30.55)


# -------------------------------------------------------------------- scores


def _trials(table: pd.DataFrame, step: int = 0) -> pd.DataFrame:
  """Returns the trials on test sets, at one step or at each task's last."""
  found = table[table.task.str.endswith(_TEST)]
  found = found[found.step == step] if step else measured.latest(found)
  return found.assign(task=found.task.str.removesuffix(_TEST))


def _at(study: Findings, step: int = 0) -> Findings:
  """Returns a study whose scores are of one step: a seed for each trial."""
  trials = _trials(study.table, step)
  chosen = trials[trials.chosen & trials.task.isin(_TASKS)]
  scores = chosen.assign(seed=chosen.seed + "/" + chosen.trial)
  return dataclasses.replace(study, scores=pd.concat([scores, _kinds(scores)]))


def _kinds(scores: pd.DataFrame) -> pd.DataFrame:
  """Averages each kind's tasks, for the seeds that have all that any has."""
  out = []
  for kind, tasks in KINDS.items():
    found = scores[scores.task.isin(tasks)]
    present = [task for task in tasks if task in set(found.task)]
    for _, rows in found.groupby(["variant", "seed", "mode"], sort=False):
      if len(rows) == len(present):
        rows = rows.set_index("task").loc[present]
        mean = {"task": kind, "value": rows.value.mean()}
        mean["complete"] = rows.complete.all() and len(present) == len(tasks)
        mean["items"] = rows["items"].sum() if rows["items"].all() else ()
        out.append(rows.iloc[0].to_dict() | mean)
  return pd.DataFrame(out, columns=scores.columns)


# ----------------------------------------------------------------- the report


class Recipe(NamedTuple):
  """How a row was trained, in steps."""

  clm: int
  mlm: int
  ratio: float  # of the masked, if any
  after: str  # the row that it goes on from


def report(study: Findings, absent: Sequence[str]) -> Report:
  """Makes the report.

  Args:
    study: The study; which of its scores count is decided here.
    absent: What is missing, in addition to what is found to be.
  """
  study = _at(study)
  tables, families = collections.defaultdict(dict), []
  for name, variants in study.families.items():
    made = list(_claims(study, name))
    run = [c for c in made if any(x.found for x in c.contrasts)]
    tables["claims"][f"{name}: what the verdicts stand on"] = claims.rows(run)
    tables["scores"][name] = _scores(study, variants)
    tables["rates"][name] = _rates(study, variants)
    families.append(
      {
        "name": name,
        "claims": run,
        "not_run": [c for c in made if c not in run],
        "sizes": sizes(study, variants),
        "figures": dict(_figures(study, name, variants)),
      }
    )
  tables["published"]["Published"] = [
    {"published": name} | dict(zip(KINDS, found, strict=True))
    for name, found in PUBLISHED.items()
  ]
  about = {"missing": [*_missing(study), *absent]}
  text = fill(
    "encoders.md.j2",
    title=study.name,
    families=families,
    tables=dict(tables),
    **about,
  )
  figures = [figure for f in families for figure in f["figures"].values()]
  return Report(text, about, tables, figures)


def _scores(study: Findings, variants: Sequence[str]) -> list[Row]:
  there = set(study.scores.task)
  return [
    {
      "row": study.title(name),
      "curriculum": study.runs[name][0].text,
      **{
        head: study.mean(name, [head], ATTENTION)
        for head in (*KINDS, *_TASKS)
        if head in there
      },
    }
    for name in variants
  ]


def _rates(study: Findings, variants: Sequence[str]) -> list[Row]:
  """Returns by kind how much tasks' scores deviate over rates and seeds."""
  trials = _trials(study.table)
  trials = trials[trials["mode"] == ATTENTION]
  rows = []
  for name in variants:
    # The first run stands for the row: pretraining has one seed.
    own = trials[trials.variant == name]
    own = own[own.seed == study.runs[name][0].seed]
    deviations = own.groupby("task").value.std().dropna()
    row = {
      kind: float(np.mean(found))
      for kind, tasks in KINDS.items()
      if (found := [deviations[t] for t in tasks if t in deviations])
    }
    rows += [{"row": study.title(name)} | row] if row else []
  return rows


# -------------------------------------------------------------------- claims


class _Claimed(NamedTuple):
  """That a row is above another."""

  text: str
  source: str
  sides: tuple[str, str]
  kinds: Sequence[str] = tuple(KINDS)
  early: bool = False  # after 2,000 steps, rather than at the end


_CLAIMED = (
  _Claimed(
    "MLM scores above CLM at equal steps, but in tagging words",
    "tables 2 to 5",
    ("mlm40_42", "clm_42"),
    ("SC", "QA", "IR"),
  ),
  _Claimed(
    "CLM learns from less text: it is ahead after 2,000 steps",
    "tables 6 to 9",
    ("clm_42", "mlm40_42"),
    early=True,
  ),
  *(
    _Claimed(
      f"CLM for {clm}k steps, then MLM, is above MLM alone at {total}k",
      "tables 10 to 13",
      (f"clm{clm}_mlm40_{total}", f"mlm40_{total}"),
    )
    for clm, total in ((3, 12), (10, 42))
  ),
  *(
    _Claimed(
      f"Continued with MLM for {more}k, a CLM model is above an MLM model",
      "tables 14 to 17; but in answers",
      (f"clm_42_more_{more}", f"mlm40_42_more_{more}"),
      ("SC", "TC", "IR"),
    )
    for more in (12, 22)
  ),
)


def _claims(study: Findings, family: str) -> Iterator[Claim]:
  early = _at(study, round(2 * _unit(study, family)))
  for claimed in _CLAIMED:
    at = early if claimed.early else study
    contrasts = [_contrast(at, family, claimed, k) for k in claimed.kinds]
    yield Claim(claimed.text, claimed.source, contrasts)


def _contrast(
  study: Findings, family: str, claimed: _Claimed, kind: str
) -> Contrast:
  a, b = claimed.sides
  published = _EARLY if claimed.early else PUBLISHED
  index = [*KINDS].index(kind)
  sides = [(f"{family.lower()}_{name}", ATTENTION) for name in (a, b)]
  deltas = study.differences(kind, [Pair(*sides)])
  found = deltas[0].interval * 100 if deltas else None
  theirs = published[a][index] - published[b][index]
  return Contrast(f"{kind}: {a} - {b}", found, theirs)


def _unit(study: Findings, family: str) -> float:
  """Returns the steps that stand for a thousand of the paper's."""
  texts = (
    text
    for row in study.variants.values()
    if row.family == family and not row.after
    for text in row.curriculum.values()
  )
  # All rows of the family, trained or not.
  steps = (curriculum.parse(text, OBJECTIVES, 1000, 1000) for text in texts)
  return max(found.steps for found in steps) / _LONGEST


# ------------------------------------------------------------------- figures

# Points of a figure by line: where each is, and of which study and row.
_Lines = Mapping[str, list[tuple[float, str, Findings]]]


def _figures(
  study: Findings, family: str, variants: Sequence[str]
) -> Iterator[tuple[str, Figure]]:
  """Yields by name the figures in which a line has two points."""
  recipes = {name: _recipe(study, name) for name in variants}
  recipes = {name: recipe for name, recipe in recipes.items() if recipe}
  longest = round(_LONGEST * _unit(study, family))
  for name, title, axis, lines in (
    (
      "ratios",
      "scores by the ratio that is masked",
      "masked (%)",
      _by_ratio(study, recipes, longest),
    ),
    (
      "looks",
      "scores by the steps trained, undecayed",
      "step",
      _by_steps(study, variants),
    ),
    ("splits", "CLM, then MLM", "share of CLM (%)", _by_split(study, recipes)),
    (
      "continued",
      "continued with MLM",
      "further steps",
      _by_more(study, recipes),
    ),
  ):
    panels = _panels(lines)
    title = f"{family}: {title}"
    style = {"log": True} if name == "looks" else {}
    draw = functools.partial(plots.lines, title, axis, panels, **style)
    if any(len(line) > 1 for of in panels.values() for line in of.values()):
      yield name, Figure(f"{name}_{family.lower()}.png", draw)


def _panels(lines: _Lines):
  """Returns by kind and label the points' means over seeds."""
  panels = collections.defaultdict(lambda: collections.defaultdict(list))
  for kind in KINDS:
    for label, points in lines.items():
      for x, name, study in sorted(points, key=lambda point: point[:2]):
        if mean := study.mean(name, [kind], ATTENTION):
          panels[kind][label].append((x, mean))
  return panels


def _recipe(study: Findings, name: str) -> Recipe | None:
  run = study.runs[name][0]
  if run.curriculum is None:
    return None
  steps = collections.Counter()
  for phase in run.curriculum.phases:
    for objective, share in phase.shares.items():
      steps[objective] += round((phase.stop - phase.start) * share)
  ratio = run.config["objectives"]["M"]["mask_ratio"]
  return Recipe(steps["C"], steps["M"], ratio, study.variants[name].after)


def _by_ratio(
  study: Findings, recipes: Mapping[str, Recipe], longest: int
) -> _Lines:
  lines = collections.defaultdict(list)
  for name, r in recipes.items():
    if r.mlm and not r.after and r.clm + r.mlm == longest:
      point = 100 * r.ratio, name, study
      if not r.clm:
        lines["MLM alone"].append(point)
      elif r.mlm <= longest / 20:
        lines["CLM, MLM as it decays"].append(point)
  return lines


def _by_steps(study: Findings, variants: Sequence[str]) -> _Lines:
  looks = {
    name: {
      step for steps in study.variants[name].looks.values() for step in steps
    }
    for name in variants
  }
  at = {step: _at(study, step) for steps in looks.values() for step in steps}
  return {
    study.title(name): [(step, name, at[step]) for step in steps]
    for name, steps in looks.items()
  }


def _by_split(study: Findings, recipes: Mapping[str, Recipe]) -> _Lines:
  lines = collections.defaultdict(list)
  for name, r in recipes.items():
    if not r.after and (r.ratio == 0.4 or not r.mlm):
      total = r.clm + r.mlm
      label = f"{units.quantity(total)} steps"
      lines[label].append((100 * r.clm / total, name, study))
  return lines


def _by_more(study: Findings, recipes: Mapping[str, Recipe]) -> _Lines:
  lines = {}
  for name, r in recipes.items():
    if r.after in recipes:
      label = f"after {study.title(r.after)}"
      line = lines.setdefault(label, [(0, r.after, study)])
      line.append((r.mlm, name, study))
  return lines


# ---------------------------------------------------------------------- gaps


def _missing(study: Findings) -> list[str]:
  lacking = ((row, _lacks(study, n)) for n, row in study.variants.items())
  out = [f"{row}: {what}" for row, found in lacking for what in found]
  scores = study.scores[study.scores.task.isin(_TASKS)]
  there = set(scores.task)
  absent = [task for task in _TASKS if task not in there]
  if absent:
    out.append(f"no row is fine-tuned on {', '.join(absent)}")
  trials = _trials(study.table)
  means = trials[trials.chosen].groupby(KEY)[["value", "baseline"]].mean()
  best = (means.value - means.baseline).groupby("task").max()
  if flat := [task for task in _TASKS if task in there and best[task] <= 0]:
    out.append(
      f"on {', '.join(flat)} no row is above its trivial answer: what stands"
      " here of it decides nothing"
    )
  if not scores.complete.all():
    out.append("fine-tuned on a part of the training sets (--limit)")
  return out


def _lacks(study: Findings, name: str) -> Iterator[str]:
  """Yields what a row lacks."""
  runs = study.runs.get(name, ())
  if not runs:
    yield "not trained"
  elif runs[0].summary is None:
    yield "training is not at its end"
  else:
    there = set(study.scores.task)
    places = {t: study.at(name, t, ATTENTION) for t in _TASKS if t in there}
    absent = [task for task, found in places.items() if found.empty]
    if absent:
      yield f"not fine-tuned on {', '.join(absent)}"
    early = collections.defaultdict(list)
    for task, found in places.items():
      for step in set(found.step) - {runs[0].summary["steps"]}:
        early[step].append(task)
    for step, tasks in early.items():
      at = f"fine-tuned at step {step:,}, before the end"
      yield f"{at}: {', '.join(tasks)}"
