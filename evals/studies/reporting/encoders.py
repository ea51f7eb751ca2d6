"""The report of CLM, MLM or both (arXiv 2507.00994).

Scores are of the test sets, at the rate that is best on those to choose on.
Each pretraining has several fine-tunings.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from antlm_jax import units
from antlm_jax.evals import statistics
from antlm_jax.evals.finetuning.protocol import KINDS
from antlm_jax.evals.statistics import Interval
from antlm_jax.evals.studies.reporting import claims, measured, plots
from antlm_jax.evals.studies.reporting.claims import Claim, Claims, Contrast
from antlm_jax.evals.studies.reporting.findings import Findings
from antlm_jax.evals.studies.reporting.render import (
  Figure,
  Report,
  Row,
  fill_template,
)
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import OBJECTIVES

ATTENTION = "bidirectional"
_EARLY = 2 / 42  # of the longest row's steps
_TEST = "-test"
_TASKS = [task for tasks in KINDS.values() for task in tasks]
_RATES = 1e-5, 1e-4  # lowest and highest learning rate of figure 5

# -------------------------------------------------------------------- scores


def _trials(table: pd.DataFrame, step: int = 0) -> pd.DataFrame:
  """Returns the trials on test sets, at one step or at each task's last."""
  found = table[table.task.str.endswith(_TEST)]
  found = found[found.step == step] if step else measured.latest_scores(found)
  return found.assign(task=found.task.str.removesuffix(_TEST))


def _scores_at(
  study: Findings, step: int = 0, left_out: Collection[str] = ()
) -> Findings:
  """Returns a study whose scores are of one step, and of kinds of task.

  A kind is the mean of its tasks but those left out, unless these are all.
  """
  trials = _trials(study.table, step)
  scores = trials[trials.chosen & trials.task.isin(_TASKS)]
  there = set(scores.task)
  out = [scores]
  for kind, tasks in KINDS.items():
    present = [task for task in tasks if task in there]
    counted = [task for task in present if task not in left_out] or present
    found = _mean_of_tasks(
      scores[scores.task.isin(counted)], kind, len(counted)
    )
    found.complete &= len(counted) == len(tasks)
    out.append(found)
  return dataclasses.replace(study, scores=pd.concat(out, ignore_index=True))


def _mean_of_tasks(scores: pd.DataFrame, kind: str, count: int) -> pd.DataFrame:
  """Averages tasks, for the seeds that have a number of them."""
  out = []
  by = ["variant", "seed", "trial", "mode"]
  for _, rows in scores.groupby(by, sort=False):
    if len(rows) == count:
      rows = rows.sort_values("task")
      mean = {"task": kind, **rows[["value", "baseline"]].mean()}
      mean["complete"] = rows.complete.all()
      mean["items"] = rows["items"].sum() if rows["items"].all() else ()
      out.append(rows.iloc[0].to_dict() | mean)
  return pd.DataFrame(out, columns=scores.columns).astype(scores.dtypes)


def _not_learnt(study: Findings) -> list[str]:
  """Returns the tasks on which no row is above the trivial answer."""
  scores = study.scores[study.scores["mode"] == ATTENTION]
  out = []
  for task in filter(set(scores.task).__contains__, _TASKS):
    names = scores[scores.task == task].variant.unique()
    found = [study.above(task, (name, ATTENTION)) for name in names]
    # Without scores of items nothing is known.
    if all(found) and not any(map(claims.is_above, found)):
      out.append(task)
  return out


# ----------------------------------------------------------------- the report


def report_encoders(study: Findings, absent: Sequence[str]) -> Report:
  """Makes the report.

  Args:
    study: The study; which of its scores count is decided here.
    absent: Lines to add to those about missing results.
  """
  flat = _not_learnt(_scores_at(study))
  claimed = Claims(_paper_claims(study, flat), study.fixed)
  study = _scores_at(study, left_out=flat)
  tables, families = collections.defaultdict(dict), []
  tables["claims"][""] = claimed.rows()
  for name, variants in study.families.items():
    tables["scores"][name] = _score_rows(study, variants)
    tables["usual"][name] = _usual(study, variants)
    tables["rates"][name] = _rate_rows(study, variants)
    figures = dict(_encoder_figures(study, name, variants, flat))
    families.append({"name": name, "variants": variants, "figures": figures})
  tables["published"]["Published"] = _published_rows()
  missing = [*_missing(study, flat), *study.repeated(), *absent]
  about = {"confidence": claimed.confidence}
  about |= {"not_learnt": flat, "missing": missing}
  text = fill_template(
    "encoders.md.j2",
    study=study,
    claims=claimed,
    families=families,
    tables=dict(tables),
    **about,
  )
  figures = [figure for f in families for figure in f["figures"].values()]
  return Report(text, about, tables, figures)


def _score_headings(study: Findings) -> dict[str, str]:
  """Returns the headings of kinds and tasks that have scores: with measures."""
  measures, out = study.scores.groupby("task").metric.unique(), {}
  for name in filter(measures.index.__contains__, (*KINDS, *_TASKS)):
    tasks = [t for t in KINDS.get(name, (name,)) if t in measures]
    every = itertools.chain.from_iterable(measures[t] for t in tasks)
    out[name] = f"{name} ({', '.join(dict.fromkeys(every))})"
  return out


def _score_rows(study: Findings, variants: Sequence[str]) -> list[Row]:
  heads = _score_headings(study)
  return [
    {
      "row": study.title(name),
      "curriculum": study.runs[name][0].text,
      "seeds": len(study.runs[name]),
      **{
        head: study.mean(name, [task], ATTENTION)
        for task, head in heads.items()
      },
    }
    for name in variants
  ]


def _usual(study: Findings, variants: Sequence[str]) -> list[Row]:
  """Returns scores by the measures that others use for the same tasks."""
  trials = _trials(study.also)
  trials = trials[trials.chosen & trials.task.isin(_TASKS)]
  heads = trials.task + " (" + trials.metric + ")"
  usual = dataclasses.replace(study, scores=trials.assign(task=heads))
  order = sorted(heads.unique(), key=lambda x: _TASKS.index(x.split()[0]))
  rows = [
    {"row": study.title(name)}
    | {head: usual.mean(name, [head], ATTENTION) for head in order}
    for name in variants
  ]
  return rows if order else []


def _rate_rows(study: Findings, variants: Sequence[str]) -> list[Row]:
  """Returns by kind how much tasks' scores deviate over rates and seeds.

  They deviate over the rates of figure 5, and over all.
  """
  trials = _trials(study.table)
  trials = trials[trials["mode"] == ATTENTION]
  rows = []
  for name in variants:
    every = trials[trials.variant == name]
    some = every[every.lr.between(*_RATES)]
    for own in (some, every)[len(some) == len(every) :]:
      if own.lr.nunique() < 2:
        continue
      by_task = own.groupby(["seed", "task"]).value.std().groupby("task").mean()
      deviations = by_task.dropna()
      row = {
        kind: float(np.mean(found))
        for kind, tasks in KINDS.items()
        if (found := [deviations[t] for t in tasks if t in deviations])
      }
      about = {"rates": f"{own.lr.min():g} to {own.lr.max():g}"}
      rows += [{"row": study.title(name)} | about | row] if row else []
  return rows


# -------------------------------------------------------------------- claims


def _paper_claims(
  study: Findings, left_out: Collection[str] = ()
) -> list[Claim]:
  """Returns the paper's claims: for each family, or for several at once."""
  out, last, rows = {}, _scores_at(study, left_out=left_out), study.variants
  families = dict.fromkeys(row.family for row in rows.values())
  for claimed in measured.published_numbers("encoders_claims").itertuples():
    for family in families:
      names = [
        # A family's row, or a row of this very name.
        [n if n in rows else f"{family.lower()}_{n}" for n in side.split()]
        for side in (claimed.plus, claimed.minus)
      ]
      if not rows.keys() >= {*itertools.chain(*names)}:
        continue
      at = last
      if claimed.measure == "early":
        step = round(_EARLY * _longest_steps(study, family))
        at = _scores_at(study, step, left_out)
      contrasts = [
        _encoder_contrast(at, kind, *names, claimed)
        for kind in claimed.kinds.split()
      ]
      text = f"{claimed.text} ({family})" * (len(families) > 1) or claimed.text
      # Families that a claim compares have it once.
      key = claimed.text, *map(tuple, names)
      out.setdefault(key, Claim(text, claimed.source, contrasts))
    if not any(key[0] == claimed.text for key in out):
      out[claimed.text,] = Claim(claimed.text, claimed.source, ())
  return [*out.values()]


def _encoder_contrast(
  study: Findings,
  kind: str,
  plus: Sequence[str],
  minus: Sequence[str],
  claimed: Any,
) -> Contrast:
  """Compares rows on a kind of task, by the measure of a claim."""
  sides = {(name, ATTENTION): 1.0 for name in plus}
  sides |= {(name, ATTENTION): -1.0 for name in minus}
  on = f"{kind}: {claimed.plus} - {claimed.minus}"
  spreads = {
    "rates": (_same_rates(study, {*plus, *minus}), KINDS[kind]),
    "ratios": (study.scores, [kind]),
  }
  if measured_on := spreads.get(claimed.measure):
    more, less = (
      _score_deviation(*measured_on, side) for side in (plus, minus)
    )
    # Only tasks, seeds and trials that both have count.
    means = (more - less).dropna().groupby(["seed", "trial"]).mean()
    found, published = statistics.estimate_over_seeds(means.to_dict()), None
    on += f", deviation over {claimed.measure}"
    if claimed.measure == "rates":
      on += " from {:g} to {:g}".format(*_RATES)
  else:
    found = study.difference(kind, sides)
    theirs = _published_averages(claimed.measure == "early")[kind]
    named = claimed.plus.split(), claimed.minus.split()
    more, less = (sum(theirs[name] for name in side) for side in named)
    published = float(more - less)
  above = {
    str(study.variants[side[0]]): above
    for side in sides
    if (above := study.above(kind, side))
  }
  return Contrast(on, found and found.times(100), published, above=above)


def _same_rates(study: Findings, names: Collection[str]) -> pd.DataFrame:
  """Returns trials of rows at the rates of figure 5 that all of them have."""
  trials = _trials(study.table)
  trials = trials[trials.variant.isin(names) & trials.lr.between(*_RATES)]
  same = trials.groupby(["mode", "seed", "trial", "task", "lr"]).variant
  return trials[same.transform("nunique") == len(names)]


def _score_deviation(
  scores: pd.DataFrame, tasks: Sequence[str], names: Sequence[str]
) -> pd.Series:
  """Returns the deviation over all scores of rows, by seed, trial and task."""
  own = scores[scores.variant.isin(names) & scores.task.isin(tasks)]
  own = own[own["mode"] == ATTENTION].groupby(["seed", "trial", "task"])
  return own.value.std()[own.variant.nunique() == len(names)]


def _published_averages(early: bool = False) -> pd.DataFrame:
  """Returns the averages of each kind in percent, by row.

  They are those of tables 10 to 17, or of 6 to 9: after 2,000 steps, undecayed.
  Rows without a size have 610M parameters.
  """
  found = measured.published_numbers("encoders").set_index("row")
  return found[found.early == early][[*KINDS]]


def _published_rows() -> list[Row]:
  """Returns the published averages with their 95 % intervals, if given."""
  theirs = measured.published_numbers("encoders")
  theirs = theirs[theirs.early == 0].set_index("row")
  return [
    {"published": name}
    | {
      kind: Interval(mean, mean - half, mean + half)
      for kind in KINDS
      for mean, half in [(float(of[kind]), float(of[f"{kind}_half"]))]
    }
    for name, of in theirs.iterrows()
  ]


def _longest_steps(study: Findings, family: str) -> int:
  """Returns the steps of a family's longest row, trained or not."""
  return max(
    curriculum.parse_curriculum(text, OBJECTIVES, 1000, 1000).steps
    for row in study.variants.values()
    if row.family == family and not row.after
    for text in row.curriculum.values()
  )


# ------------------------------------------------------------------- figures

_FIGURES = {  # titles of the figure and its x axis
  "ratios": ("scores by mask ratio", "masked tokens (%)"),
  "looks": ("scores by steps before the learning rate decays", "step (log)"),
  "splits": ("scores by the share of CLM before MLM", "steps of CLM (%)"),
  "continued": ("scores by steps of continued MLM", "further steps"),
}


def _encoder_figures(
  study: Findings,
  family: str,
  variants: Sequence[str],
  left_out: Collection[str],
) -> Iterator[tuple[str, Figure]]:
  """Yields by name the figures in which a line has two points."""
  heads = _score_headings(study)
  for name, points in _figure_points(study, family, variants).items():
    steps = set(points.step) - {0}
    studies = {step: _scores_at(study, step, left_out) for step in steps}
    panels = collections.defaultdict(lambda: collections.defaultdict(list))
    for kind, label in itertools.product(KINDS, points.label.unique()):
      line = points[points.label == label].sort_values(["x", "row"])
      for point in line.itertuples():
        at = studies.get(point.step, study)
        if mean := at.mean(point.row, [kind], ATTENTION):
          panels[heads[kind]][label].append((point.x, mean))
    if any(len(line) > 1 for of in panels.values() for line in of.values()):
      title, axis = _FIGURES[name]
      title = f"{family}: {title}"
      log = name == "looks"
      draw = functools.partial(plots.draw_lines, title, axis, panels, log=log)
      yield name, Figure(f"{name}_{family.lower()}.png", draw)


def _figure_points(
  study: Findings, family: str, variants: Sequence[str]
) -> dict[str, pd.DataFrame]:
  """Returns the points of each figure: label of the line, x, row, and step."""
  longest = _longest_steps(study, family)
  ended = [name for name in variants if study.runs[name][0].curriculum]
  recipes = [_row_recipe(study, name) for name in ended]
  columns = "row", "after", "ratio", "clm", "mlm"
  rows = pd.DataFrame(recipes, columns=columns)
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


def _row_recipe(study: Findings, name: str) -> dict[str, Any]:
  """Returns how a row was trained, in steps."""
  run = study.runs[name][0]
  steps = collections.Counter()
  for phase in run.curriculum.phases:
    for objective, share in phase.shares.items():
      steps[objective] += round((phase.stop - phase.start) * share)
  return {
    "row": name,
    "after": study.variants[name].after,
    # Records of before 27 November 2026 have no ratio.
    "ratio": run.config["objectives"]["M"].get("mask_ratio"),
    "clm": steps["C"],
    "mlm": steps["M"],
  }


# ---------------------------------------------------------------------- gaps


def _missing(study: Findings, flat: Sequence[str]) -> list[str]:
  out = study.gaps(_missing_encoder_results)
  scores = study.scores[study.scores.task.isin(_TASKS)]
  there = set(scores.task)
  absent = [task for task in _TASKS if task not in there]
  if absent:
    out.append(f"no row is fine-tuned on {', '.join(absent)}")
  if flat:
    out.append(
      f"not learnt: {', '.join(flat)}: no row is above the trivial answer by"
      " more than its interval, so no claim counts this"
    )
  if not scores.complete.all():
    out.append("fine-tuned on a part of the training sets (--limit)")
  return out


def _missing_encoder_results(study: Findings, run: TrainedRun) -> Iterator[str]:
  """Yields the names of a run's missing results."""
  if run.summary is None:
    yield "training is not at its end"
    return
  found = study.scores[study.scores["mode"] == ATTENTION]
  own = found[(found.variant == run.variant) & (found.seed == run.seed)]
  absent = [t for t in _TASKS if t in set(found.task) - set(own.task)]
  if absent:
    yield f"not fine-tuned on {', '.join(absent)}"
  early = own[own.step != run.summary["steps"]]
  for step, rows in early.groupby("step", sort=False):
    tasks = [task for task in _TASKS if task in set(rows.task)]
    about = f"fine-tuned at step {step:,}, before the end"
    yield f"{about}: {', '.join(tasks)}"
