"""The report of CLM, MLM or both (arXiv 2507.00994).

Scores are of the test sets, at the rate that is best on those to choose on.
Trials of fine-tuning are the seeds here: pretraining has one, as the paper's.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from antlm_jax import units
from antlm_jax.evals.finetuning.protocol import KINDS
from antlm_jax.evals.reporting import claims, measured, plots
from antlm_jax.evals.reporting.claims import Claim, Contrast
from antlm_jax.evals.reporting.findings import Findings, Pair
from antlm_jax.evals.reporting.measured import KEY
from antlm_jax.evals.reporting.render import Figure, Report, Row, fill
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import OBJECTIVES

ATTENTION = "bidirectional"
_LONGEST = 42  # thousands of steps of the paper
_TEST = "-test"
_TASKS = [task for tasks in KINDS.values() for task in tasks]

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
  return pd.DataFrame(out, columns=scores.columns).astype(scores.dtypes)


# ----------------------------------------------------------------- the report


def report(study: Findings, absent: Sequence[str]) -> Report:
  """Makes the report.

  Args:
    study: The study; which of its scores count is decided here.
    absent: Lines to add to those about missing results.
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
        "variants": variants,
        "figures": dict(_figures(study, name, variants)),
      }
    )
  theirs = _published().rename_axis("published").reset_index()
  tables["published"]["Published"] = theirs.to_dict("records")
  about = {"missing": [*_missing(study), *absent]}
  text = fill(
    "encoders.md.j2",
    study=study,
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


def _claims(study: Findings, family: str) -> Iterator[Claim]:
  """Yields the paper's claims: that a row is above another, by kind of task."""
  early = _at(study, round(2 * _unit(study, family)))
  for claimed in measured.published("encoders_claims").itertuples():
    at = early if claimed.early else study
    sides = claimed.row, claimed.control
    pair = Pair(*((f"{family.lower()}_{name}", ATTENTION) for name in sides))
    contrasts = []
    for kind in claimed.kinds.split():
      a, b = (_published(claimed.early)[kind][name] for name in sides)
      deltas = at.differences(kind, [pair])
      found = deltas[0].interval * 100 if deltas else None
      on = f"{kind}: {claimed.row} - {claimed.control}"
      contrasts.append(Contrast(on, found, float(a - b)))
    yield Claim(claimed.text, claimed.source, contrasts)


def _published(early: bool = False) -> pd.DataFrame:
  """Returns the averages of each kind in percent, by row; 610M parameters.

  They are those of tables 10 to 17, or of 6 to 9: after 2,000 steps, undecayed.
  """
  found = measured.published("encoders").set_index("row")
  return found[found.early == early][[*KINDS]]


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

_FIGURES = {  # titles, and what x is
  "ratios": ("scores by the ratio that is masked", "masked (%)"),
  "looks": ("scores by the steps trained, undecayed", "step"),
  "splits": ("CLM, then MLM", "share of CLM (%)"),
  "continued": ("continued with MLM", "further steps"),
}


def _figures(
  study: Findings, family: str, variants: Sequence[str]
) -> Iterator[tuple[str, Figure]]:
  """Yields by name the figures in which a line has two points."""
  for name, points in _points(study, family, variants).items():
    studies = {step: _at(study, step) for step in set(points.step) - {0}}
    panels = collections.defaultdict(lambda: collections.defaultdict(list))
    for kind, label in itertools.product(KINDS, points.label.unique()):
      line = points[points.label == label].sort_values(["x", "row"])
      for point in line.itertuples():
        at = studies.get(point.step, study)
        if mean := at.mean(point.row, [kind], ATTENTION):
          panels[kind][label].append((point.x, mean))
    if any(len(line) > 1 for of in panels.values() for line in of.values()):
      title, axis = _FIGURES[name]
      log = {"log": True} if name == "looks" else {}
      draw = functools.partial(
        plots.lines, f"{family}: {title}", axis, panels, **log
      )
      yield name, Figure(f"{name}_{family.lower()}.png", draw)


def _points(
  study: Findings, family: str, variants: Sequence[str]
) -> dict[str, pd.DataFrame]:
  """Returns the points of each figure: label of the line, x, row, and step."""
  longest = round(_LONGEST * _unit(study, family))
  recipes = [_recipe(study, name) for name in variants]
  columns = "row", "after", "ratio", "clm", "mlm"
  rows = pd.DataFrame(filter(None, recipes), columns=columns)
  rows = rows.assign(total=rows.clm + rows.mlm, step=0)
  first = rows[rows.after == ""]
  ratios = first[(first.mlm > 0) & (first.total == longest)]
  # MLM alone, or MLM while the learning rate decays.
  ratios = ratios[(ratios.clm == 0) | (ratios.mlm <= longest / 20)]
  splits = first[(first.ratio == 0.4) | (first.mlm == 0)]
  more = rows[rows.after.isin(rows.row)]
  begun = more.drop_duplicates("after")
  more = pd.concat([begun.assign(row=begun.after, mlm=0), more])
  titles = more.after.map(study.title)
  looks = [
    (study.title(name), step, name, step)
    for name in variants
    for step in sorted({*sum(study.variants[name].looks.values(), ())})
  ]
  how = np.where(ratios.clm > 0, "CLM, MLM as it decays", "MLM alone")
  return {
    "ratios": ratios.assign(x=100 * ratios.ratio, label=how),
    "looks": pd.DataFrame(looks, columns=["label", "x", "row", "step"]),
    "splits": splits.assign(
      x=100 * splits.clm / splits.total,
      label=splits.total.map(units.quantity) + " steps",
    ),
    "continued": more.assign(x=more.mlm, label="after " + titles),
  }


def _recipe(study: Findings, name: str) -> dict[str, Any] | None:
  """Returns how a row was trained, in steps."""
  run = study.runs[name][0]
  if run.curriculum is None:
    return None
  steps = collections.Counter()
  for phase in run.curriculum.phases:
    for objective, share in phase.shares.items():
      steps[objective] += round((phase.stop - phase.start) * share)
  return {
    "row": name,
    "after": study.variants[name].after,
    "ratio": run.config["objectives"]["M"]["mask_ratio"],
    "clm": steps["C"],
    "mlm": steps["M"],
  }


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
    found = study.scores[study.scores["mode"] == ATTENTION]
    own = found[found.variant == name]
    there = set(study.scores.task) - set(own.task)
    absent = [task for task in _TASKS if task in there]
    if absent:
      yield f"not fine-tuned on {', '.join(absent)}"
    early = own[own.step != runs[0].summary["steps"]]
    for step, rows in early.groupby("step", sort=False):
      tasks = [task for task in _TASKS if task in set(rows.task)]
      at = f"fine-tuned at step {step:,}, before the end"
      yield f"{at}: {', '.join(tasks)}"
