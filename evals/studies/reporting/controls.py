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
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from antlm_jax.evals import statistics
from antlm_jax.evals.finetuning import glue
from antlm_jax.evals.finetuning.trial import ATTENTIONS
from antlm_jax.evals.statistics import Mean, MeanEstimate
from antlm_jax.evals.studies.design import CAUSAL
from antlm_jax.evals.studies.reporting import measured, plots, switches
from antlm_jax.evals.studies.reporting.claims import Claim, Claims, Contrast
from antlm_jax.evals.studies.reporting.findings import Findings, Side
from antlm_jax.evals.studies.reporting.measured import KEY, benchmarks
from antlm_jax.evals.studies.reporting.render import (
  Figure,
  Report,
  Row,
  fill_template,
  without_empty,
)
from antlm_jax.evals.studies.reporting.runs import TrainedRun, ended

MACRO = "macro-average"
_BLIMP = "BLiMP"
_BABYLM = (_BLIMP, "BLiMP supplement", "EWoK")  # in the macro-average
_ODDS = f"{_BLIMP} (log-odds)"  # by how much pairs are right, in nats
*_, _LOWEST = _WHEN = "end", "lowest"  # when a held-out loss counts


def report_controls(study: Findings, absent: Sequence[str]) -> Report:
  """Makes the report.

  Args:
    study: The study; which of its scores count is decided here.
    absent: Lines to add to those about missing results.
  """
  trials = measured.latest_scores(study.table[study.table.chosen])
  study = dataclasses.replace(
    study, scores=_average_trials(trials, study.items)
  )
  families = [Family(study, *found) for found in study.families.items()]
  every = [claim for family in families for claim in family.claims]
  claims = Claims(every, study.fixed)
  tables = collections.defaultdict(dict, claims={"": claims.rows()})
  for family in families:
    for kind, title, rows in family.tables():
      tables[kind][title] = rows
  if not study.scores.empty:
    theirs = measured.published_numbers("controls").astype(object)
    theirs = theirs.where(theirs.notna(), None)
    tables["published"]["Published"] = theirs.to_dict("records")
  about = {
    "pipeline": study.pipeline,
    "confidence": claims.confidence,
    "missing": [
      *study.gaps(_missing_control_results),
      *study.repeated(),
      *absent,
    ],
  }
  text = fill_template(
    "controls.md.j2",
    study=study,
    claims=claims,
    families=families,
    tables=dict(tables),
    collapsed=trials[trials.collapsed & trials.task.isin(glue.SCORES)],
    **about,
  )
  figures = [f for one in families for f in (*one.curves, *one.phenomena)]
  return Report(text, about, tables, figures)


def _average_trials(
  trials: pd.DataFrame, items: measured.ItemFiles
) -> pd.DataFrame:
  """Averages a task's trials, and adds the log-odds behind BLiMP's accuracy."""
  means = trials.groupby(KEY).value.transform("mean")
  scores = trials.assign(value=means, trial="").drop_duplicates(KEY)
  scored = scores[(scores.task == _BLIMP) & scores["items"].map(bool)]
  places = [((path, "log-odds"),) for ((path, _),) in scored["items"]]
  odds = scored.assign(
    task=_ODDS,
    metric="log-odds",
    baseline=0.0,
    value=[items.of(place).scores.mean() for place in places],
    items=places,
  )
  return pd.concat([scores, odds], ignore_index=True)


@dataclasses.dataclass
class Family:
  """Variants that have runs, and how they differ."""

  study: Findings
  name: str
  variants: Sequence[str]

  def tables(self) -> Iterator[tuple[str, str, list[Row]]]:
    """Yields the rows of all tables, with their kind and title."""
    yield "held_out", self.name, self._held_out()
    switched = [
      row
      for name in self.variants
      for row in switches.switch_rows(
        self.study.title(name), self.study.runs[name]
      )
    ]
    yield "switches", f"{self.name}, switches", switched
    if self.study.scores.empty:
      return
    for task, rows in self.by_part.items():
      yield "parts", f"{self.name}, {task}", rows
    yield "scores", self.name, self._scored()
    if tuned := self._fine_tuned():
      yield "fine_tuned", f"{self.name}, fine-tuned", tuned

  # ----------------------------------------------------------- differences

  @property
  def compared(self) -> Iterator[tuple[Side, Side]]:
    """Each mixed variant with each of its controls.

    Both have the mode that the control was trained in.
    """
    variants, runs = self.study.variants, self.study.runs
    for name in self.variants:
      for control in filter(runs.__contains__, variants[name].against):
        attention = runs[control][0].attention
        one, other = (variants[x].mode(attention) for x in (name, control))
        yield (name, one), (control, other)

  def _difference(
    self, task: str, one: Side, other: Side, part: str = ""
  ) -> MeanEstimate | None:
    """Estimates a difference in pairs, in points or nats."""
    found = self.study.difference(task, {one: 1.0, other: -1.0}, part)
    return found and found.times(1 if task == _ODDS else 100)

  @functools.cached_property
  def by_part(self) -> dict[str, list[Row]]:
    """Differences by phenomenon of each task."""
    title, out = self.study.title, {}
    for task in (_BLIMP, _ODDS):
      common = self.study.common(task)
      out[task] = [
        {
          "row": title(*one),
          "against": title(*other),
          "on": part,
          "seeds": found.seeds,
          "interval": found.interval(),
          "_name": one[0],
        }
        for one, other in self.compared
        for part in sorted(common.parts if common else ())
        if (found := self._difference(task, one, other, part))
        and found.interval()
      ]
    return out

  @functools.cached_property
  def phenomena(self) -> list[Figure]:
    """Pictures of the differences by phenomenon, for each variant."""
    figures = []
    for (task, rows), suffix, unit in zip(
      self.by_part.items(), ("", "_odds"), ("points", "nats"), strict=True
    ):
      panels = collections.defaultdict(lambda: collections.defaultdict(dict))
      for row in rows:
        against = f"against {row['against']}"
        panels[row["_name"]][against][row["on"]] = row["interval"]
      for name, found in panels.items():
        title = f"{self.study.title(name)}: {task} by phenomenon"
        title += f", with {100 * statistics.CONFIDENCE:g} % intervals"
        draw = functools.partial(
          plots.draw_differences, title, found, unit=unit
        )
        figures.append(Figure(f"phenomena_{name}{suffix}.png", draw))
    return figures

  # ---------------------------------------------------------------- claims

  @property
  def claims(self) -> Iterator[Claim]:
    """That each mixed variant is better than each of its controls."""
    for sides in self.compared:
      one, other = (self.study.title(name) for name, _ in sides)
      contrasts = *self._by_losses(*sides), *self._by_pairs(*sides)
      yield Claim(f"{one} is better than {other}", self.name, contrasts)

  def _by_losses(self, *sides: Side) -> Iterator[Contrast]:
    """Yields losses in each objective that the control trained."""
    runs = {name: self.study.runs[name] for name, _ in sides}
    control = runs[sides[1][0]][0]
    measured = self.study.variants[sides[1][0]].measured or control.objectives
    for kind in (control.names[objective] for objective in measured):
      above = {
        self.study.title(name): found
        for name, own in runs.items()
        if (
          found := _difference_estimate(
            _unigram_entropies(own), _losses_by_seed(own, kind, _LOWEST)
          )
        )
      }
      for when in _WHEN:
        found = _difference_estimate(
          *(_losses_by_seed(own, kind, when) for own in runs.values())
        )
        on = f"held-out {kind} loss, {when} (nats)"
        how = {"sign": -1, "digits": 3, "above": above, "each": True}
        yield Contrast(on, found, **how)

  def _by_pairs(self, *sides: Side) -> Iterator[Contrast]:
    """Yields scores of pairs, in the mode that the control was trained in."""
    _, (_, mode) = sides
    for task in (_ODDS, *(b.name for b in benchmarks() if b.pairs)):
      if found := self._difference(task, *sides):
        on = f"{task}, {mode} ({'nats' if task == _ODDS else 'points'})"
        above = {self.study.title(*x): self.study.above(task, x) for x in sides}
        yield Contrast(on, found, above=above)

  # ---------------------------------------------------------------- scores

  def _scored(self) -> list[Row]:
    study = self.study
    rows = [
      {
        "row": study.title(name),
        "curriculum": study.runs[name][0].text,
        "seeds": [run.seed for run in study.runs[name] if run.summary],
        "mode": mode,
        **{b.name: study.mean(name, [b.name], mode) for b in benchmarks()},
        MACRO: _macro(study, name, mode),
      }
      for name in self.variants
      for mode in study.variants[name].modes
    ]
    # An official number that nobody has is not even a column.
    return without_empty(rows, MACRO)

  def _fine_tuned(self) -> list[Row]:
    """Returns scores of fine-tuned tasks, below those of a constant answer."""
    study = self.study
    scores = study.scores[study.scores.variant.isin(self.variants)]
    tasks = [task for task in glue.SCORES if task in set(scores.task)]
    # A task's metric and baseline are the same in all of its results.
    about = scores.drop_duplicates("task", keep="last").set_index("task")
    heads = {task: f"{task} ({about.metric[task]})" for task in tasks}
    rows = [{"row": "always one class", "attention": "", "mean": ""}]
    for task, head in heads.items():
      rows[0][head] = Mean({}, float(about.baseline[task]), None)
    for name, attention in itertools.product(self.variants, ATTENTIONS):
      found = study.at(name, tasks, attention)
      # The mean is over the tasks that all of the seeds have.
      seeds = found.groupby("task").seed.nunique()
      whole = seeds[seeds == found.seed.nunique()].index
      common = [task for task in tasks if task in whole]
      row = {
        "row": study.title(name),
        "attention": attention,
        "mean": study.mean(name, common, attention),
        "_common": common if common != tasks else [],
      }
      for task, head in heads.items():
        row[head] = study.mean(name, [task], attention)
      rows += [] if found.empty else [row]
    return rows if tasks else []

  # ---------------------------------------------------------------- losses

  def _held_out(self) -> list[Row]:
    rows = []
    for name in self.variants:
      runs = self.study.runs[name]
      row = {"row": self.study.title(name), "_untrained": []}
      for kind, when in itertools.product(runs[0].names.values(), _WHEN):
        row[f"{kind}, {when}"] = statistics.mean_of_seeds(
          _losses_by_seed(runs, kind, when)
        )
        if kind not in runs[0].seen:
          row["_untrained"].append(f"{kind}, {when}")
      rows.append(row)
    rows = without_empty(rows)
    return rows if any(len(row) > 2 for row in rows) else []

  @property
  def entropy(self) -> Mean | None:
    """The mean loss of predicting token frequencies."""
    of = [_unigram_entropies(self.study.runs[name]) for name in self.variants]
    every = itertools.chain.from_iterable(found.values() for found in of)
    return statistics.mean_of_seeds(dict(enumerate(every)))

  @functools.cached_property
  def curves(self) -> list[Figure]:
    """The picture of held-out losses, if any run is at its end."""
    study, runs = self.study, {}
    for name in self.variants:
      found = [run for run in ended(study.runs[name]) if run.losses]
      if found:
        runs[study.title(name)] = found
    draw = functools.partial(plots.draw_study_curves, self.name, runs)
    name = self.name.lower().replace("-", "_")
    return [Figure(f"curves_{name}.png", draw)] if runs else []


def _losses_by_seed(
  runs: Sequence[TrainedRun], kind: str, when: str
) -> dict[str, float]:
  """Returns held-out losses in nats by seed, at the `end` or the `lowest`."""
  found = {run.seed: getattr(run, when)(kind) for run in ended(runs)}
  return {seed: loss for seed, loss in found.items() if loss is not None}


def _unigram_entropies(runs: Sequence[TrainedRun]) -> dict[str, float]:
  """Returns the losses of predicting token frequencies."""
  return {run.seed: run.summary["unigram_entropy"] for run in ended(runs)}


def _difference_estimate(
  a: Mapping[str, float], b: Mapping[str, float]
) -> MeanEstimate | None:
  """Estimates the mean of a minus b, over the seeds of both."""
  both = {(seed, ""): a[seed] - b[seed] for seed in a if seed in b}
  return statistics.estimate_over_seeds(both)


def _macro(study: Findings, name: str, mode: str) -> Mean | None:
  """Returns the macro-average of the seeds that have all of it in full.

  GLUE is with the mode's own attention, or with the other one without it.
  """
  pairs = study.mean(name, _BABYLM, mode, complete=True)
  tuned, count = {}, len(_BABYLM)
  # The last wins: the mode's own attention.
  for attention in ATTENTIONS if mode == CAUSAL else reversed(ATTENTIONS):
    found = study.mean(name, glue.SCORES, attention, complete=True)
    tuned |= found.values if found else {}
  return statistics.mean_of_seeds(
    {
      seed: (count * score + tuned[seed]) / (count + 1)
      for seed, score in (pairs.values if pairs else {}).items()
      if seed in tuned
    }
  )


# ----------------------------------------------------------------------- gaps


def _missing_control_results(study: Findings, run: TrainedRun) -> Iterator[str]:
  """Yields the names of a run's missing results."""
  if run.summary is None:
    yield "training is not at its end"
  elif run.kinds and not run.halves:
    yield "no losses of half of the held-out rows, so no lowest loss"
  if study.scores.empty:
    yield "neither scored on pairs nor fine-tuned"
    return
  own = study.scores[study.scores.variant == run.variant]
  own = own[own.seed == run.seed]
  modes = study.variants[run.variant].modes
  for benchmark, mode in itertools.product(benchmarks(), modes):
    found = own[(own.task == benchmark.name) & (own["mode"] == mode)]
    about = f"{benchmark.name}, {mode}"
    if found.empty:
      yield f"{about}: not evaluated"
    for score in found.to_dict("records") if benchmark.pairs else ():
      if run.summary and score["step"] != run.summary["steps"]:
        step = f"{score['step']:,}"
        yield f"{about}: evaluated at step {step}, before the end"
      if not score["complete"]:
        yield f"{about}: {score['pairs']:,} pairs of {benchmark.pairs:,}"
      common = study.common(benchmark.name)
      if not score["items"]:
        yield f"{about}: no items.jsonl, so no interval"
      elif (run.variant, mode, run.seed, "") in common.others:
        yield f"{about}: other items than most, so not compared"
  tuned = own[own.task.isin(glue.SCORES)]
  absent = [task for task in glue.SCORES if task not in set(tuned.task)]
  if absent:
    what = "anything" if tuned.empty else ", ".join(absent)
    yield f"not fine-tuned on {what}"
  if not tuned.complete.all():
    yield "fine-tuned on a part of a training set (--limit)"
