"""The report of rows that are compared with their controls.

AntLM's table (arXiv 2412.03275) is one. A row's controls are those that it is
claimed to be better than (`Row.against`), in each objective that the control
trained. Pairs score a control as it was trained: causally, or with masks.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from antlm_jax.evals.design import CAUSAL
from antlm_jax.evals.finetuning import glue
from antlm_jax.evals.finetuning.trial import ATTENTIONS
from antlm_jax.evals.reporting import measured, plots, statistics
from antlm_jax.evals.reporting import switches as switches_lib
from antlm_jax.evals.reporting.claims import Claim, Claims, Contrast
from antlm_jax.evals.reporting.findings import Findings, Side
from antlm_jax.evals.reporting.measured import KEY, benchmarks
from antlm_jax.evals.reporting.render import Figure, Report, Row, fill
from antlm_jax.evals.reporting.runs import TrainedRun, ended, with_shared_steps
from antlm_jax.evals.reporting.statistics import Estimate, Mean

MACRO = "macro-average"
_BLIMP = "BLiMP"
_BABYLM = (_BLIMP, "BLiMP supplement", "EWoK")  # in the macro-average
_ODDS = f"{_BLIMP} (log-odds)"  # by how much pairs are right, in nats
*_, _LOWEST = _WHEN = "end", "lowest"  # when a held-out loss counts


def report(study: Findings, absent: Sequence[str]) -> Report:
  """Makes the report.

  Args:
    study: The study; which of its scores count is decided here.
    absent: Lines to add to those about missing results.
  """
  trials = measured.latest(study.table[study.table.chosen])
  study = dataclasses.replace(study, scores=_scores(trials, study.items))
  families = [Family(study, *found) for found in study.families.items()]
  every = [claim for family in families for claim in family.claims]
  claims = Claims(every, study.fixed)
  for family in families:
    family.confidence = claims.confidence
  tables = collections.defaultdict(dict, claims={"": claims.rows()})
  for family in families:
    for kind, title, rows in family.tables():
      tables[kind][title] = rows
  if not study.scores.empty:
    theirs = measured.published("controls").astype(object)
    theirs = theirs.where(theirs.notna(), None)
    tables["published"]["Published"] = theirs.to_dict("records")
  about = {
    "pipeline": study.pipeline,
    "confidence": claims.confidence,
    "missing": [*study.gaps(_lacks), *study.repeated(), *absent],
  }
  context = {
    "study": study,
    "claims": claims,
    "families": families,
    "tables": dict(tables),
    "collapsed": trials[trials.collapsed & trials.task.isin(glue.SCORES)],
  }
  text = fill("controls.md.j2", **context, **about)
  figures = [f for one in families for f in (*one.curves, *one.phenomena)]
  return Report(text, about, tables, figures)


def _scores(trials: pd.DataFrame, items: measured.ItemFiles) -> pd.DataFrame:
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
  confidence: float = 0.0  # of all intervals; known when all claims are

  def tables(self) -> Iterator[tuple[str, str, list[Row]]]:
    """Yields the rows of all tables, with their kind and title."""
    yield "held_out", self.name, self._held_out()
    yield "switches", f"{self.name}, switches", self._switched()
    if self.study.scores.empty:
      return
    for task, rows in self.by_part.items():
      yield "parts", f"{self.name}, {task}", rows
    yield "scores", self.name, self._scored()
    if tuned := self._fine_tuned():
      yield "fine_tuned", f"{self.name}, fine-tuned", tuned

  # ----------------------------------------------------------- differences

  @property
  def compared(self) -> list[tuple[str, str]]:
    """Each mixed variant with each of its controls."""
    return [
      (name, control)
      for name in self.variants
      for control in self.study.variants[name].against
      if control in self.study.runs
    ]

  def _sides(self, name: str, control: str) -> list[Side]:
    """Returns both with their mode: the one that the control was trained in."""
    attention = self.study.runs[control][0].attention
    both = name, control
    return [(x, self.study.variants[x].mode(attention)) for x in both]

  def _difference(
    self, task: str, name: str, control: str, part: str = ""
  ) -> Estimate | None:
    """Estimates a difference in pairs, in points or nats."""
    one, other = self._sides(name, control)
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
          "row": title(*sides[0]),
          "against": title(*sides[1]),
          "on": part,
          "seeds": found.seeds,
          "interval": found.interval(self.confidence),
          "_name": sides[0][0],
        }
        for both in self.compared
        for part in sorted(common.parts if common else ())
        if (found := self._difference(task, *both, part)) and found.interval()
        for sides in [self._sides(*both)]
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
        draw = functools.partial(plots.differences, title, found, unit=unit)
        figures.append(Figure(f"phenomena_{name}{suffix}.png", draw))
    return figures

  # ---------------------------------------------------------------- claims

  @functools.cached_property
  def claims(self) -> list[Claim]:
    """That each mixed variant is better than each of its controls."""
    title = self.study.title
    return [
      Claim(
        f"{title(name)} is better than {title(control)}",
        self.name,
        [*self._by_losses(name, control), *self._by_pairs(name, control)],
      )
      for name, control in self.compared
    ]

  def _by_losses(self, name: str, control: str) -> Iterator[Contrast]:
    """Yields losses in each objective that the control trained."""
    run = self.study.runs[control][0]
    for kind in (run.names[objective] for objective in run.objectives):
      lowest = (self._loss(side, kind, _LOWEST) for side in (name, control))
      above = {
        self.study.title(side): _apart(self._entropies(side), of)
        for side, of in zip((name, control), lowest, strict=True)
      }
      for when in _WHEN:
        a, b = (self._loss(side, kind, when) for side in (name, control))
        yield Contrast(
          f"held-out {kind} loss, {when} (nats)",
          _apart(a, b),
          sign=-1,
          digits=3,
          above={side: of for side, of in above.items() if of},
          each=True,
        )

  def _loss(self, name: str, kind: str, when: str) -> Mapping[str, float]:
    mean = self.losses.get((name, kind, when))
    return mean.values if mean else {}

  def _entropies(self, name: str) -> dict[str, float]:
    """Losses, in nats, of whoever knows the tokens' frequencies alone."""
    runs = ended(self.study.runs[name])
    return {run.seed: run.summary["unigram_entropy"] for run in runs}

  def _by_pairs(self, name: str, control: str) -> Iterator[Contrast]:
    """Yields scores of pairs, in the mode that the control was trained in."""
    sides = self._sides(name, control)
    for task in (_ODDS, *_pairs()):
      if found := self._difference(task, name, control):
        unit = "nats" if task == _ODDS else "points"
        on = f"{task}, {sides[1][1]} ({unit})"
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
    if not any(row[MACRO] for row in rows):
      rows = [{k: v for k, v in row.items() if k != MACRO} for row in rows]
    return rows

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

  @functools.cached_property
  def losses(self) -> dict[tuple[str, str, str], Mean]:
    """Held-out losses in nats by variant, objective, and `end` or `lowest`."""
    out = {}
    for name in self.variants:
      runs = ended(self.study.runs[name])
      for kind in runs[0].names.values() if runs else ():
        for when in _WHEN:
          found = {run.seed: getattr(run, when)(kind) for run in runs}
          found = {s: x for s, x in found.items() if x is not None}
          if mean := statistics.mean(found):
            out[name, kind, when] = mean
    return out

  def _held_out(self) -> list[Row]:
    heads = dict.fromkeys((kind, when) for _, kind, when in self.losses)
    rows = []
    for name in self.variants:
      row = {"row": self.study.title(name), "_untrained": []}
      for kind, when in heads:
        row[f"{kind}, {when}"] = self.losses.get((name, kind, when))
        if kind not in self.study.runs[name][0].seen:
          row["_untrained"].append(f"{kind}, {when}")
      rows.append(row)
    return rows if heads else []

  @property
  def entropy(self) -> Mean | None:
    """The mean loss of whoever knows the tokens' frequencies alone."""
    found = (self._entropies(name) for name in self.variants)
    each = {
      (n, seed): x for n, of in enumerate(found) for seed, x in of.items()
    }
    return statistics.mean(each)

  @functools.cached_property
  def curves(self) -> list[Figure]:
    """The picture of held-out losses, if any run is at its end."""
    study, runs = self.study, {}
    for name in self.variants:
      found = [run for run in ended(study.runs[name]) if run.losses]
      if found:
        whole = [with_shared_steps(run, study.runs) for run in found]
        runs[study.title(name)] = whole
    draw = functools.partial(plots.curves, self.name, runs)
    name = self.name.lower().replace("-", "_")
    return [Figure(f"curves_{name}.png", draw)] if runs else []

  # -------------------------------------------------------------- switches

  @functools.cached_property
  def _switches(self) -> list[tuple[str, list[switches_lib.Switch]]]:
    return [
      (self.study.title(name), list(switches_lib.read(self.study.runs[name])))
      for name in self.variants
    ]

  def _switched(self) -> list[Row]:
    return [
      {
        "row": title,
        "switch": f"{switch.phases} after {switch.step:,}",
        "loss of": f"{switch.kind}, {'left' if switch.left else 'taken up'}",
        "best before": switch.mean("best"),
        "at the switch": switch.mean("at"),
        "at the end of the phase": switch.mean("end"),
        # What is taken up was not forgotten.
        "forgotten by": switch.mean("forgotten") if switch.left else None,
        "trained again": switch.mean("again") if switch.left else None,
      }
      for title, found in self._switches
      for switch in found
    ]


def _pairs() -> list[str]:
  """Returns the benchmarks whose items are pairs."""
  return [benchmark.name for benchmark in benchmarks() if benchmark.pairs]


def _apart(a: Mapping[str, float], b: Mapping[str, float]) -> Estimate | None:
  """Estimates the mean of a minus b, over the seeds of both."""
  both = {(seed, ""): a[seed] - b[seed] for seed in a if seed in b}
  return statistics.over_seeds(both)


def _macro(study: Findings, name: str, mode: str) -> Mean | None:
  """Returns the macro-average of the seeds that have all of it in full.

  GLUE is with the mode's own attention, or with the other one without it.
  """
  pairs = study.mean(name, _BABYLM, mode, complete=True)
  tuned, count = {}, len(_BABYLM)
  # Its own comes last, and so takes the other one's place.
  for attention in sorted(
    ATTENTIONS, key=lambda a: (a == CAUSAL) == (mode == CAUSAL)
  ):
    found = study.mean(name, glue.SCORES, attention, complete=True)
    tuned |= found.values if found else {}
  return statistics.mean(
    {
      seed: (count * score + tuned[seed]) / (count + 1)
      for seed, score in (pairs.values if pairs else {}).items()
      if seed in tuned
    }
  )


# ----------------------------------------------------------------------- gaps


def _lacks(study: Findings, run: TrainedRun) -> Iterator[str]:
  """Yields what one run lacks."""
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
