"""The report of CLM, MLM or both (arXiv 2507.00994), as a value.

Scores are of the test sets, at the rate that is best on those to choose on.
Runs of fine-tuning are the seeds here: pretraining has one, as the paper's.
"""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from antlm_jax import units
from antlm_jax.evals.finetuning.protocol import KINDS
from antlm_jax.evals.reporting import claims, compare, plots, render, sections
from antlm_jax.evals.reporting.claims import Claim, Contrast
from antlm_jax.evals.reporting.compare import Mean, Pair, Study
from antlm_jax.evals.reporting.render import Cell, Figure, Section, Table
from antlm_jax.evals.reporting.runs import Items, Result, TrainedRun, Tuned
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.objective import OBJECTIVES

ATTENTION = "bidirectional"
_LONGEST = 42  # thousands of steps of the paper
_TEST = "-test"

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

_SCORES = """\
In percent: the mean over fine-tuning's seeds, ± half of its 95 % interval
(Student's t over these seeds; that another pretraining would differ, it does
not know). SC, TC, QA and IR are the unweighted means of their tasks: sentences,
words, answers, retrieval."""
_CLAIMS = """\
Differences in points, with 95 % intervals by a paired bootstrap over the test
items and over fine-tuning's seeds. A claim is *confirmed* or *contradicted*
where an interval excludes zero. Each row is one pretraining: what holds of
these very models need not hold of others."""
_RATES = """\
Standard deviation over all rates and seeds of a task's test score, in points,
mean over the tasks: how much a model depends on the rate that it is given."""
_PUBLISHED = """\
In percent, 610M on 100B tokens (arXiv 2507.00994, tables 10 to 17; 1,000 steps
are 2.4B tokens). Its measures are those above."""


# ------------------------------------------------------ fine-tuned as results


@dataclasses.dataclass(frozen=True)
class Combined(Result):
  """A kind of task: the unweighted mean of its tasks."""

  results: Sequence[Result]
  parts: ClassVar[Mapping[str, str]] = types.MappingProxyType({})  # none

  @functools.cached_property
  def items(self) -> Items | None:
    """Those of all tasks, each task a stratum."""
    found = [result.items for result in self.results]
    if None in found:
      return None
    strata = [np.full(len(part.scores), i) for i, part in enumerate(found)]
    return Items(
      key=" ".join(part.key for part in found),
      uids=tuple(uid for part in found for uid in part.uids),
      strata=np.concatenate(strata),
      scores=np.concatenate([part.scores for part in found]),
    )


@dataclasses.dataclass(frozen=True)
class TunedStudy(Study):
  """A study whose results are test scores, a seed for each run that tunes."""

  step: int = 0  # of the checkpoints that are looked at; 0: each one's last

  @functools.cached_property
  def results(self) -> dict[tuple[str, str, str], dict[str, Result]]:
    """All results by (variant, task or kind, attention) and then seed."""
    out = collections.defaultdict(dict)
    for name, runs in self.runs.items():
      for run in runs:
        for (task, attention), tuned in self.tuned(run).items():
          for seed, result in tuned.seeds.items():
            out[name, task, attention][f"{run.seed}/{seed}"] = result
    return dict(out) | _kinds(out)

  def tuned(self, run: TrainedRun) -> dict[tuple[str, str], Tuned]:
    """Returns what a run gets on test sets, by task and attention."""
    found = run.looks.get(self.step, {}) if self.step else run.tuned
    return {
      (task.removesuffix(_TEST), attention): tuned
      for (task, attention), tuned in found.items()
      if task.endswith(_TEST)
    }

  @property
  def tasks(self) -> list[str]:
    """The tasks that any variant has, in the paper's order."""
    there = {task for _, task, _ in self.results}
    return [t for tasks in KINDS.values() for t in tasks if t in there]

  @property
  def kinds(self) -> list[str]:
    """The kinds that any variant has."""
    there = {task for _, task, _ in self.results}
    return [kind for kind in KINDS if kind in there]


def _kinds(found) -> dict[tuple[str, str, str], dict[str, Result]]:
  """Combines the tasks of each kind, for the seeds that have all of them."""
  there, out = {task for _, task, _ in found}, {}
  for kind, tasks in KINDS.items():
    present = [task for task in tasks if task in there]
    for name, attention in {(n, a) for n, _, a in found}:
      each = [found.get((name, task, attention), {}) for task in present]
      for seed in each[0] if each else ():
        if all(seed in results for results in each):
          parts = [results[seed] for results in each]
          score = float(np.mean([part.score for part in parts]))
          whole = all(part.complete for part in parts) and present == [*tasks]
          out.setdefault((name, kind, attention), {})[seed] = Combined(
            parts[0].step, score, whole, parts
          )
  return out


# ----------------------------------------------------------------- the report


class Recipe(NamedTuple):
  """How a row was trained, in steps."""

  clm: int
  mlm: int
  ratio: float  # of the masked, if any
  after: str  # the row that it goes on from


def report(study: Study, absent: Sequence[str]) -> render.Report:
  """Returns the report; what `absent` says stands with what is missing."""
  study = TunedStudy(study.variants, study.runs, study.pipeline, study.name)
  absent = [*_missing(study), *absent]

  def every(
    parts: Callable[[TunedStudy, str, Sequence[str]], Iterator],
  ) -> list:
    return [p for found in study.families.items() for p in parts(study, *found)]

  parts = [
    Section("Claims", every(_claims), _CLAIMS),
    Section("Scores", [*every(_scores), _published()], _SCORES),
    Section("By the ratio that is masked", every(_ratios)),
    Section("By the steps trained", every(_looks)),
    Section("CLM, then MLM, by the share of CLM", every(_splits)),
    Section("Continued with MLM", every(_continued)),
    Section("By the rate", every(_rates), _RATES),
    Section("What is not there", [absent], otherwise="Nothing."),
  ]
  return render.Report(study.name, parts, {"missing": absent})


def _recipe(study: Study, name: str) -> Recipe | None:
  run = study.runs[name][0]
  if run.curriculum is None:
    return None
  steps = collections.Counter()
  for phase in run.curriculum.phases:
    for objective, share in phase.shares.items():
      steps[objective] += round((phase.stop - phase.start) * share)
  ratio = run.config["objectives"]["M"]["mask_ratio"]
  return Recipe(steps["C"], steps["M"], ratio, study.variants[name].after)


def _recipes(study: Study, names: Sequence[str]) -> dict[str, Recipe]:
  found = {name: _recipe(study, name) for name in names}
  return {name: recipe for name, recipe in found.items() if recipe}


def _unit(study: Study, family: str) -> float:
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


def _claims(study: TunedStudy, family: str, names) -> Iterator:
  early = dataclasses.replace(study, step=round(2 * _unit(study, family)))
  found = [
    Claim(
      claimed.text,
      claimed.source,
      [
        _contrast(early if claimed.early else study, family, claimed, kind)
        for kind in claimed.kinds
      ],
    )
    for claimed in _CLAIMED
  ]
  there = [c for c in found if any(x.found for x in c.contrasts)]
  yield f"### {family}"
  yield from claims.parts(there, family)
  yield [f"not run here: {c.text}" for c in found if c not in there]


def _contrast(
  study: TunedStudy, family: str, claimed: _Claimed, kind: str
) -> Contrast:
  a, b = claimed.sides
  published = _EARLY if claimed.early else PUBLISHED
  index = [*KINDS].index(kind)
  sides = [(f"{family.lower()}_{name}", ATTENTION) for name in (a, b)]
  deltas = study.differences(kind, [Pair(*sides)])
  found = deltas[0].interval * 100 if deltas else None
  theirs = published[a][index] - published[b][index]
  return Contrast(f"{kind}: {a} - {b}", theirs, found)


# -------------------------------------------------------------------- scores


def _scores(study: TunedStudy, family: str, names) -> Iterator[Table]:
  rows = [
    {
      "row": study.title(name),
      "curriculum": f"`{study.runs[name][0].text}`",
      **{
        head: _percent(study.mean(name, [head], ATTENTION))
        for head in (*study.kinds, *study.tasks)
      },
    }
    for name in names
  ]
  yield Table("scores", rows, family, sections.sizes(study, names))


def _percent(found: Mean | None) -> Cell:
  if found is None:
    return Cell(None, None)
  half = compare.half_width(found)
  spread = "" if half is None else f" ± {100 * half:.1f}"
  return Cell(found, f"{100 * found.mean:.1f}{spread}")


def _published() -> Table:
  rows = [
    {
      "published": name,
      **{k: Cell(x, f"{x:.2f}") for k, x in zip(KINDS, found, strict=True)},
    }
    for name, found in PUBLISHED.items()
  ]
  return Table("published", rows, "Published", _PUBLISHED)


# ------------------------------------------------------------------- figures

_Points = list[tuple[float, Mean]]


def _panels(
  study: TunedStudy, lines: Mapping[str, Sequence[tuple[float, str]]]
):
  """Returns by kind and label the points of names at their places."""
  panels = {kind: collections.defaultdict(list) for kind in study.kinds}
  for kind, panel in panels.items():
    for label, places in lines.items():
      for x, name in sorted(places):
        if found := study.mean(name, [kind], ATTENTION):
          panel[label].append((x, found))
  return panels


def _figure(name: str, family: str, title: str, axis: str, panels, **style):
  """Yields a figure, if any of its lines has two points."""
  lines = [line for panel in panels.values() for line in panel.values()]
  if any(len(line) > 1 for line in lines):
    draw = functools.partial(
      plots.lines, f"{family}: {title}", axis, panels, **style
    )
    yield Figure(f"{name}_{family.lower()}.png", draw)


def _ratios(study: TunedStudy, family: str, names) -> Iterator[Figure]:
  recipes, lines = _recipes(study, names), collections.defaultdict(list)
  longest = round(_LONGEST * _unit(study, family))
  for name, r in recipes.items():
    decayed = r.clm and r.mlm <= longest / 20
    if r.mlm and not r.after and r.clm + r.mlm == longest:
      if not r.clm:
        lines["MLM alone"].append((100 * r.ratio, name))
      elif decayed:
        lines["CLM, MLM as it decays"].append((100 * r.ratio, name))
  yield from _figure(
    *("ratios", family, "scores by the ratio that is masked"),
    *("masked (%)", _panels(study, lines)),
  )


def _looks(study: TunedStudy, family: str, names) -> Iterator[Figure]:
  panels = {kind: collections.defaultdict(list) for kind in KINDS}
  for name in names:
    steps = study.variants[name].looks
    for step in sorted({s for found in steps.values() for s in found}):
      at = dataclasses.replace(study, step=step)
      for kind in KINDS:
        if found := at.mean(name, [kind], ATTENTION):
          panels[kind][study.title(name)].append((step, found))
  panels = {kind: lines for kind, lines in panels.items() if lines}
  yield from _figure(
    *("looks", family, "scores by the steps trained, undecayed"),
    *("step", panels),
    log=True,
  )


def _splits(study: TunedStudy, family: str, names) -> Iterator[Figure]:
  recipes, lines = _recipes(study, names), collections.defaultdict(list)
  for name, r in recipes.items():
    if not r.after and (r.ratio == 0.4 or not r.mlm):
      total = r.clm + r.mlm
      lines[f"{units.quantity(total)} steps"].append(
        (100 * r.clm / total, name)
      )
  yield from _figure(
    *("splits", family, "CLM, then MLM"),
    *("share of CLM (%)", _panels(study, lines)),
  )


def _continued(study: TunedStudy, family: str, names) -> Iterator[Figure]:
  recipes, lines = _recipes(study, names), {}
  for name, r in recipes.items():
    if r.after in recipes:
      label = f"after {study.title(r.after)}"
      lines.setdefault(label, [(0, r.after)]).append((r.mlm, name))
  yield from _figure(
    *("continued", family, "continued with MLM"),
    *("further steps", _panels(study, lines)),
  )


# --------------------------------------------------------------------- rates


def _rates(study: TunedStudy, family: str, names) -> Iterator[Table]:
  rows = []
  for name in names:
    spread = {}
    for kind, tasks in KINDS.items():
      found = [_spread(study, name, task) for task in tasks]
      found = [x for x in found if x is not None]
      if found:
        mean = float(np.mean(found))
        spread[kind] = Cell(mean, f"{100 * mean:.1f}")
    if spread:
      rows.append({"row": study.title(name), **spread})
  yield Table("rates", rows, family)


def _spread(study: TunedStudy, name: str, task: str) -> float | None:
  """The deviation over all rates and seeds."""
  tuned = study.runs[name][0].tuned.get((task + _TEST, ATTENTION))
  scores = [x for those in tuned.rates.values() for x in those] if tuned else []
  return float(np.std(scores, ddof=1)) if len(scores) > 1 else None


# ----------------------------------------------------------- what is not there


def _missing(study: TunedStudy) -> list[str]:
  lacking = ((row, _lacks(study, n)) for n, row in study.variants.items())
  out = [f"{row}: {what}" for row, found in lacking for what in found]
  every = [task for tasks in KINDS.values() for task in tasks]
  absent = [task for task in every if task not in study.tasks]
  if absent:
    out.append(f"no row is fine-tuned on {', '.join(absent)}")
  parts = [
    result
    for (_, task, _), found in study.results.items()
    if task in every
    for result in found.values()
  ]
  if flat := _unlearnt(study):
    out.append(
      f"on {', '.join(flat)} no row is above its trivial answer: what stands"
      " here of it decides nothing"
    )
  if not all(result.complete for result in parts):
    out.append("fine-tuned on a part of the training sets (--limit)")
  return out


def _unlearnt(study: TunedStudy) -> list[str]:
  """Returns the tasks on which no row is above the best constant answer."""
  best = collections.defaultdict(lambda: -np.inf)
  for run in (run for runs in study.runs.values() for run in runs):
    for (task, _), tuned in study.tuned(run).items():
      best[task] = max(best[task], tuned.score - tuned.baseline)
  return [task for task in study.tasks if best[task] <= 0]


def _lacks(study: TunedStudy, name: str) -> Iterator[str]:
  """Yields what a row lacks."""
  runs = study.runs.get(name, ())
  if not runs:
    yield "not trained"
  elif runs[0].summary is None:
    yield "training is not at its end"
  else:
    end = runs[0].summary["steps"]
    places = {task: study.at(name, task, ATTENTION) for task in study.tasks}
    absent = [task for task, found in places.items() if not found]
    if absent:
      yield f"not fine-tuned on {', '.join(absent)}"
    early = collections.defaultdict(list)
    for task, found in places.items():
      for step in {result.step for result in found.values()} - {end}:
        early[step].append(task)
    for step, tasks in early.items():
      at = f"fine-tuned at step {step:,}, before the end"
      yield f"{at}: {', '.join(tasks)}"
