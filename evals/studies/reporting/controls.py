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
from collections.abc import Iterator, Sequence

from antlm_jax.evals import statistics
from antlm_jax.evals.finetuning import glue
from antlm_jax.evals.studies.reporting import plots, scores, switches
from antlm_jax.evals.studies.reporting.claims import Claim, Contrast, Report
from antlm_jax.evals.studies.reporting.findings import Findings, Side
from antlm_jax.evals.studies.reporting.render import Figure, Row
from antlm_jax.evals.studies.reporting.runs import ended
from antlm_jax.evals.studies.reporting.scores import (
  BLIMP,
  LOWEST,
  ODDS,
  WHEN,
  Scores,
)
from antlm_jax.evals.studies.study import CAUSAL

MACRO = "macro-average"
GLUE = "GLUE"
_BABYLM = (BLIMP, "BLiMP supplement", "EWoK")  # with GLUE the macro-average


def report_controls(study: Findings) -> Report:
  """Makes the report; which scores of the study count is decided here."""
  trials = study.table.where(chosen=True, main=True, part="").latest()
  held_out = itertools.chain(*map(scores.losses, study.runs.values()))
  study = dataclasses.replace(
    study, scores=Scores([*held_out, *_counted(study, trials)])
  )
  tables = collections.defaultdict(dict)
  figures = []
  claims = []
  benchmarks = scores.benchmarks()
  tasks = *(b.name for b in benchmarks), MACRO, GLUE, *glue.SCORES
  for family, names in study.families.items():
    pairs = list(_compared(study, names))
    claims += [_better(study, family, *sides) for sides in pairs]
    kinds = {k: 0 for n in names for k in study.runs[n][0].names.values()}
    held_out = [scores.loss_name(*x) for x in itertools.product(kinds, WHEN)]
    tables["held_out"][family] = study.score_rows(names, held_out)
    tables["switches"][family] = [
      row
      for name in names
      for row in switches.switch_rows(study.title(name), study.runs[name])
    ]
    if study.table:
      tables["scores"][family] = study.score_rows(names, tasks)
      for measure in (BLIMP, ODDS):
        title = f"{family}, {measure}"
        tables["parts"][title] = list(_by_part(study, measure, pairs))
    figures += _curves(study, family, names)
  if study.table:
    tables["published"][""] = scores.published_numbers("controls")
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
  return Report("controls", study, claims, tables, figures, gaps)


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
  pairs in the mode that it was trained in.
  """
  run = study.runs[control[0]][0]
  contrasts = []
  for objective in study.rows[control[0]].measured or run.objectives:
    kind = run.names[objective]
    sides = (side[0], ""), (control[0], "")
    above = study.gains(scores.loss_name(kind, LOWEST), sides)
    for when in WHEN:
      measure = scores.loss_name(kind, when)
      estimate = study.difference(measure, {sides[0]: 1.0, sides[1]: -1.0})
      on = f"held-out {kind} loss, {when} (nats)"
      contrasts.append(
        Contrast(on, estimate, sign=-1, above=above, all_above=True)
      )
  for measure in (ODDS, *(b.name for b in scores.benchmarks() if b.pairs)):
    if estimate := _difference(study, measure, side, control):
      unit = "nats" if measure == ODDS else "points"
      above = study.gains(measure, (side, control))
      on = f"{measure}, {control[1]} ({unit})"
      contrasts.append(Contrast(on, estimate, above=above))
  text = f"{study.title(side[0])} is better than {study.title(control[0])}"
  return Claim(text, family, contrasts)


def _difference(study: Findings, measure, side: Side, control: Side, part=""):
  """Estimates a difference in pairs, in points or nats."""
  estimate = study.difference(measure, {side: 1.0, control: -1.0}, part)
  return estimate and estimate.times(1 if measure == ODDS else 100)


def _by_part(study: Findings, measure: str, pairs) -> Iterator[Row]:
  """Yields the differences by phenomenon."""
  for side, control in pairs:
    for part in study.parts(measure):
      estimate = _difference(study, measure, side, control, part)
      if estimate and estimate.interval():
        yield {
          "row": study.title(*side),
          "against": study.title(*control),
          "on": part,
          "seeds": estimate.seeds,
          "here": estimate.value,
          "interval": estimate.interval(),
        }


# -------------------------------------------------------------------- curves


def _curves(
  study: Findings, family: str, names: Sequence[str]
) -> Iterator[Figure]:
  """Yields the picture of held-out losses, if any run is at its end.

  It has a panel for each row, with shaded phases.
  """
  rows = {}
  for name in names:
    runs = [run for run in ended(study.runs[name]) if run.losses]
    if runs:
      rows[study.title(name)] = runs
  panels = {}
  objectives = {}
  tops = []
  for title, runs in rows.items():
    panels[f"{title}: {runs[0].text}"] = {
      f"{kind}, held out": line
      for kind in runs[0].names.values()
      if (line := plots.mean_line([run.held_out(kind) for run in runs]))
    }
    for run in runs:
      trained = {name: run.names[name] for name in run.objectives}
      objectives |= trained
      ends = (run.end(kind) for kind in trained.values())
      tops += [run.summary["unigram_entropy"], *filter(None, ends)]
  if any(panels.values()):
    draw = functools.partial(
      plots.draw_losses,
      family,
      "step",
      panels,
      tops,
      phases=[runs[0].curriculum for runs in rows.values()],
      names=dict(sorted(objectives.items())),  # equal colours in all pictures
    )
    yield Figure(f"curves_{family.lower().replace('-', '_')}.png", draw)
