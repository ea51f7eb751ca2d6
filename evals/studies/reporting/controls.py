"""The report of rows that are compared with their controls.

AntLM's table (arXiv 2412.03275) is an example. A row's controls are those that
it is claimed to be better than (`Row.against`), in each objective that the
control trained. Pairs score a control as it was trained: causally, or with
masks.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from antlm_jax.evals import statistics
from antlm_jax.evals.finetuning import glue
from antlm_jax.evals.studies.reporting import plots, scores
from antlm_jax.evals.studies.reporting.claims import Claim, Contrast, Report
from antlm_jax.evals.studies.reporting.findings import Findings, Side
from antlm_jax.evals.studies.reporting.render import Figure
from antlm_jax.evals.studies.reporting.runs import ended
from antlm_jax.evals.studies.reporting.scores import (
  BLIMP,
  END,
  LOWEST,
  ODDS,
  WHEN,
  Score,
  Scores,
)
from antlm_jax.evals.studies.study import CAUSAL
from antlm_jax.training.metrics import CHOOSE, HALVES, REPORT

MACRO = "macro-average"
GLUE = "GLUE"
_BABYLM = (BLIMP, "BLiMP supplement", "EWoK")  # with GLUE the macro-average


def report_controls(study: Findings) -> Report:
  """Makes the report; which scores of the study count is decided here."""
  trials = study.table.where(chosen=True, main=True).latest()
  held_out = _held_out(study)
  study = dataclasses.replace(
    study, scores=Scores([*held_out, *_counted(study, trials)])
  )
  tables = collections.defaultdict(dict)
  figures = []
  claims = []
  borders = []
  benchmarks = scores.benchmarks()
  tasks = *(b.name for b in benchmarks), MACRO, GLUE, *glue.SCORES
  for family, names in study.families.items():
    pairs = list(_compared(study, names))
    claims += [_better(study, family, *sides) for sides in pairs]
    kinds = {k: 0 for n in names for k in study.runs[n][0].names.values()}
    held_out = [scores.loss_measure(*x) for x in itertools.product(kinds, WHEN)]
    rows = study.score_rows(names, held_out)
    for name, row in zip(names, rows[-len(names) :], strict=True):
      row |= _lowest_steps(study, name, kinds)
    tables["held_out"][family] = rows
    if study.table:
      tables["scores"][family] = study.score_rows(names, tasks)
    figures += _curves(study, family, names)
    borders += _grid_borders(study, family, names)
  if study.table:
    tables["collapsed"][""] = [
      {
        "row": study.title(trial.row, trial.mode),
        "task": trial.measure,
        "seed": trial.trial,
        "rate": trial.lr,
        "run": trial.seed,
      }
      for trial in trials.where(collapsed=True, measure=glue.SCORES)
    ]
  gaps = study.gaps(benchmarks, glue.SCORES)
  gaps = [*borders, *gaps]
  return Report("controls", study, claims, tables, figures, gaps)


def _held_out(study: Findings) -> Iterator[Score]:
  """Yields the losses of all rows, on each half of the held-out text.

  If two compared rows share their first steps, both also have their lowest loss
  after these steps.
  """
  starts = {name: {0} for name in study.runs}
  for names in study.families.values():
    for sides in _compared(study, names):
      rows = [name for name, _ in sides]
      for name in rows:
        starts[name].add(study.shared_steps(*rows))
  for name, steps in starts.items():
    for after, half in itertools.product(steps, HALVES):
      yield from scores.losses(study.runs[name], half, after)


def _lowest_steps(
  study: Findings, name: str, kinds: Iterable[str]
) -> dict[str, str]:
  """Returns the steps of a row's lowest losses, by heading."""
  columns = {}
  for kind in kinds:
    measure = scores.loss_measure(kind, LOWEST)
    lines = study.scores.where(row=name, measure=measure)
    if steps := sorted(lines.distinct("step")):
      span = dict.fromkeys(f"{step:,}" for step in (steps[0], steps[-1]))
      columns[f"{measure} at step"] = " to ".join(span)
  return columns


def _grid_borders(
  study: Findings, family: str, names: Sequence[str]
) -> Iterator[str]:
  """Yields the best choices that lie on the border of a grid of settings.

  A grid is the rows of a curriculum that differ in numbers alone, with three or
  more values of a setting.
  """
  grids = collections.defaultdict(list)
  for name in names:
    numbers = dict(_numbers(study, name))
    settings = study.rows[name].settings.items()
    others = {key: x for key, x in settings if key not in numbers}
    grids[study.runs[name][0].text, str(others)].append(name)
  for (text, _), cells in grids.items():
    values = collections.defaultdict(set)
    for key, value in ((k, x) for n in cells for k, x in _numbers(study, n)):
      values[key].add(value)
    run = study.runs[cells[0]][0]
    objectives = study.rows[cells[0]].measured or run.objectives
    for kind in (run.names[x] for x in objectives):
      measure = scores.loss_measure(kind, END)
      means = {name: study.mean(name, "", measure) for name in cells}
      means = {name: mean.mean for name, mean in means.items() if mean}
      best = min(means, key=means.get, default=None)
      borders = [
        f"{key}={value:g}"
        for key, value in _numbers(study, best)
        if len(values[key]) > 2
        and (value == max(values[key]) or 0 < value == min(values[key]))
      ]
      if borders:
        yield (
          f"{family}, `{text}`: the best {kind} loss is on the border of the"
          f" grid ({', '.join(borders)}), so a wider grid may have a lower one"
        )


def _numbers(study: Findings, name: str | None) -> list[tuple[str, float]]:
  """Returns the numbers among a row's settings."""
  settings = study.rows[name].settings.items() if name else ()
  return [(key, x) for key, x in settings if type(x) in (int, float)]


def _counted(study: Findings, trials: Scores) -> Scores:
  """Averages the trials of each measure, and adds means over measures."""
  counted = Scores()
  for lines in trials.groups("row", "seed", "measure", "mode").values():
    values = [line.value for line in lines]
    mean = statistics.mean_of_seeds(dict(enumerate(values))).mean
    counted.append(lines[0]._replace(value=mean, trial=""))
  tasks = [task for task in glue.SCORES if counted.where(measure=task)]
  tuned = scores.mean_of(counted, tasks, GLUE)
  full = Scores(line for line in tuned if len(tasks) == len(glue.SCORES))
  # The mode's own attention counts, or the other one without it.
  macro = counted.where(measure=_BABYLM, complete=True)
  for (name, seed, mode), _ in macro.groups("row", "seed", "mode").items():
    glue_mean = full.where(row=name, seed=seed, complete=True)
    glue_mean.sort(key=lambda line: (line.mode == CAUSAL) != (mode == CAUSAL))
    macro += [line._replace(mode=mode) for line in glue_mean[:1]]
  macro = scores.mean_of(macro, [*_BABYLM, GLUE], MACRO)
  macro = [line._replace(metric="", items=()) for line in macro]
  return Scores([*counted, *tuned, *macro])


# --------------------------------------------------------------- differences


def _compared(
  study: Findings, names: Sequence[str]
) -> Iterator[tuple[Side, Side]]:
  """Yields each mixed row with each of its controls.

  Both have the mode that the control was trained in.
  """
  for name in names:
    for control in filter(study.runs.__contains__, study.rows[name].against):
      attention = study.runs[control][0].attention
      yield tuple((x, study.rows[x].mode(attention)) for x in (name, control))


def _better(study: Findings, family: str, side: Side, control: Side) -> Claim:
  """Claims that a row is better than a control.

  They have losses in each objective that the control trained, and scores of
  pairs in the mode that it was trained in. If the rows share their first steps,
  a lowest loss is that of the steps afterwards.
  """
  run = study.runs[control[0]][0]
  shared = study.shared_steps(side[0], control[0])
  contrasts = []
  for objective in study.rows[control[0]].measured or run.objectives:
    kind = run.names[objective]
    sides = (side[0], ""), (control[0], "")
    above = study.gains(scores.loss_measure(kind, LOWEST), sides)
    for when in WHEN:
      estimate, other_half = (
        study.difference(
          scores.loss_measure(kind, when, half, shared),
          {sides[0]: 1.0, sides[1]: -1.0},
        )
        for half in (REPORT, CHOOSE)
      )
      if estimate and estimate.items > 1:
        other_half = None  # the interval covers other rows
      contrasts.append(
        Contrast(
          f"held-out {kind} loss, {scores.when_name(when, shared)} (nats)",
          estimate,
          sign=-1,
          above=above,
          all_above=True,
          other_half=other_half,
        )
      )
  for measure in (ODDS, *(b.name for b in scores.benchmarks() if b.pairs)):
    if estimate := study.difference(measure, {side: 1.0, control: -1.0}):
      unit = "nats" if measure == ODDS else "points"
      above = study.gains(measure, (side, control))
      on = f"{measure}, {control[1]} ({unit})"
      estimate = estimate.times(1 if measure == ODDS else 100)
      contrasts.append(Contrast(on, estimate, above=above))
  text = f"{study.title(side[0])} is better than {study.title(control[0])}"
  return Claim(text, family, contrasts)


# -------------------------------------------------------------------- curves


def _curves(
  study: Findings, family: str, names: Sequence[str]
) -> Iterator[Figure]:
  """Yields the picture of a family's held-out losses, if any run has ended.

  Each row with ended runs has a panel: a line for the mean of each loss, and
  the shaded phases of its curriculum.
  """
  runs_by_title = {}
  for name in names:
    runs = [run for run in ended(study.runs[name]) if run.loss_names]
    if runs:
      runs_by_title[study.title(name)] = runs
  panels = {}
  objectives = {}
  # Losses that the y axis must include: those of token frequencies alone, and
  # the last loss of each objective in the curriculum.
  tops = []
  for title, runs in runs_by_title.items():
    panels[f"{title}: {runs[0].text}"] = {
      f"{kind}, held out": line
      for kind in runs[0].names.values()
      if (line := plots.mean_line([run.held_out(kind) for run in runs]))
    }
    for run in runs:
      run_objectives = {name: run.names[name] for name in run.objectives}
      objectives |= run_objectives
      ends = filter(None, (run.end(kind) for kind in run_objectives.values()))
      tops += [run.summary["unigram_entropy"], *(loss for _, loss in ends)]
  if any(panels.values()):
    draw = functools.partial(
      plots.draw_losses,
      family,
      "step",
      panels,
      tops,
      phases=[runs[0].curriculum for runs in runs_by_title.values()],
      names=dict(sorted(objectives.items())),  # equal colours in all pictures
    )
    yield Figure(f"curves_{family.lower().replace('-', '_')}.png", draw)
