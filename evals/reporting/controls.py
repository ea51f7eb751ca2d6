"""The report of rows that are compared with their controls.

AntLM's table (arXiv 2412.03275) is one. A row's controls are those that it is
claimed to be better than (`Row.against`), in each objective that the control
trained. Pairs score a control as it was trained: causally, or with masks.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import pandas as pd

from antlm_jax.evals.design import CAUSAL
from antlm_jax.evals.finetuning import glue
from antlm_jax.evals.finetuning.trial import ATTENTIONS
from antlm_jax.evals.reporting import claims, measured, plots, statistics
from antlm_jax.evals.reporting import switches as switches_lib
from antlm_jax.evals.reporting.claims import Claim, Contrast
from antlm_jax.evals.reporting.findings import Delta, Findings, Pair
from antlm_jax.evals.reporting.measured import HELD_OUT, KEY, benchmarks
from antlm_jax.evals.reporting.render import Figure, Report, Row, fill
from antlm_jax.evals.reporting.runs import TrainedRun, ended, with_shared_steps
from antlm_jax.evals.reporting.statistics import Mean

MACRO = "macro-average"
_BLIMP = "BLiMP"
_BABYLM = (_BLIMP, "BLiMP supplement", "EWoK")  # in the macro-average
_ODDS = f"{_BLIMP} (log-odds)"  # by how much pairs are right, in nats
_WHEN = ("end", "lowest")  # when a held-out loss counts


def report(study: Findings, absent: Sequence[str]) -> Report:
  """Makes the report.

  Args:
    study: The study; which of its scores count is decided here.
    absent: Lines to add to those about missing results.
  """
  trials = study.table[study.table.chosen & (study.table.task != HELD_OUT)]
  trials = measured.latest(trials)
  study = dataclasses.replace(study, scores=_scores(trials, study.items))
  families = [Family(study, *found) for found in study.families.items()]
  tables = collections.defaultdict(dict)
  for family in families:
    for kind, title, rows in family.tables():
      tables[kind][title] = rows
  if not study.scores.empty:
    theirs = measured.published("controls").astype(object)
    theirs = theirs.where(theirs.notna(), None)
    tables["published"]["Published"] = theirs.to_dict("records")
  about = {"pipeline": study.pipeline, "missing": [*_missing(study), *absent]}
  context = {
    "study": study,
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
  scores = trials.assign(value=means).drop_duplicates(KEY)
  scored = scores[(scores.task == _BLIMP) & scores["items"].map(bool)]
  places = [((path, "log-odds"),) for ((path, _),) in scored["items"]]
  odds = scored.assign(
    task=_ODDS,
    metric="log-odds",
    value=[items.of(place).scores.mean() for place in places],
    items=places,
  )
  return pd.concat([scores, odds], ignore_index=True)


@dataclasses.dataclass(frozen=True)
class Family:
  """Variants that have runs, and how they differ."""

  study: Findings
  name: str
  variants: Sequence[str]

  def tables(self) -> Iterator[tuple[str, str, list[Row]]]:
    """Yields the rows of all tables, with their kind and title."""
    standing = claims.rows(self.claims, self.study.confidence)
    yield "claims", f"{self.name}: what the verdicts stand on", standing
    yield "held_out", self.name, self._held_out()
    yield "switches", f"{self.name}, switches", self._switched()
    yield "forgetting", f"{self.name}, forgetting", self._forgotten()
    if self.study.scores.empty:
      return
    alike = [self._difference(d) for d in self.deltas if d.pair.alike]
    yield "alike", self.name, alike
    for task in (*_pairs(), _ODDS):
      rows = [self._difference(d) for d in self.deltas if d.task == task]
      yield "differences", f"{self.name}, {task}", rows
    for task in (_BLIMP, _ODDS):
      rows = [self._difference(d) for d in self._by_part(task)]
      yield "parts", f"{self.name}, {task}", rows
    yield "scores", self.name, self._scored()
    if tuned := self._fine_tuned():
      yield "fine_tuned", f"{self.name}, fine-tuned", tuned

  # ----------------------------------------------------------- differences

  @functools.cached_property
  def deltas(self) -> list[Delta]:
    """Differences of each mixed variant, in both modes, from its controls."""
    pairs = [
      Pair((name, mode), (control, self._own_mode(control)))
      for name in self.variants
      for mode in self.study.variants[name].modes
      for control in self._controls(name)
    ]
    return [
      d
      for task in (*_pairs(), _ODDS)
      for d in self.study.differences(task, pairs)
    ]

  def _controls(self, name: str) -> list[str]:
    against = self.study.variants[name].against
    return [control for control in against if control in self.study.runs]

  def _own_mode(self, control: str) -> str:
    """The mode in which a control was trained, as all of its runs were."""
    attention = self.study.runs[control][0].attention
    return self.study.variants[control].mode(attention)

  def _difference(self, delta: Delta) -> Row:
    row, against = (self.study.title(*side) for side in delta.pair)
    return {
      "row": row,
      "against": against,
      "on": delta.part or delta.task,
      "seeds": delta.seeds,
      "difference": delta.by_items.estimate,
      "95 % by items": delta.by_items,
      "95 % by items and seeds": delta.by_seeds,
      "interval": delta.verdict,
      "_nats": delta.task == _ODDS,
    }

  def _by_part(self, task: str) -> list[Delta]:
    """Compares those scored alike on each phenomenon of a task."""
    pairs = [d.pair for d in self.deltas if d.task == task and d.pair.alike]
    return self.study.differences(task, pairs, by_part=True)

  @functools.cached_property
  def phenomena(self) -> list[Figure]:
    """Pictures of the differences by phenomenon, for each variant."""
    figures = []
    for task, suffix, unit in (
      (_BLIMP, "", "points"),
      (_ODDS, "_odds", "nats"),
    ):
      panels = collections.defaultdict(lambda: collections.defaultdict(list))
      for delta in self._by_part(task):
        against = f"against {self.study.title(*delta.pair.control)}"
        panels[delta.pair.variant[0]][against].append(delta)
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
      for name in self.variants
      for control in self._controls(name)
    ]

  def _by_losses(self, name: str, control: str) -> Iterator[Contrast]:
    """Yields what losses say, in each objective that the control trained."""
    run = self.study.runs[control][0]
    for objective in run.objectives:
      yield from self._by_loss(name, control, run.names[objective])

  def _by_loss(self, name: str, control: str, kind: str) -> Iterator[Contrast]:
    unlearnt = [
      self.study.title(side)
      for side in (name, control)
      if (loss := self.losses.get((side, kind, "lowest")))
      and loss.mean >= _entropy(self.study, [side]).mean
    ]
    for when in _WHEN:
      found = (self.losses.get((n, kind, when)) for n in (name, control))
      a, b = (mean.values if mean else {} for mean in found)
      apart = [a[seed] - b[seed] for seed in a if seed in b]
      yield Contrast(
        f"held-out {kind} loss, {when} (nats)",
        statistics.paired(a, b, self.study.confidence),
        sign=-1,
        digits=3,
        here=sum(apart) / len(apart) if apart else None,
        but=f"{unlearnt[0]} knows frequencies at most" if unlearnt else "",
      )

  def _by_pairs(self, name: str, control: str) -> Iterator[Contrast]:
    """Yields what pairs say, scored as the control was trained."""
    mode = self._own_mode(control)
    pair = Pair((name, self.study.variants[name].mode(mode)), (control, mode))
    for task in (_ODDS, *_pairs()):
      scale, unit = (1, "nats") if task == _ODDS else (100, "points")
      for delta in self.deltas:
        if delta.task == task and delta.pair == pair:
          interval = delta.by_seeds and delta.by_seeds * scale
          here = delta.by_items.estimate * scale
          yield Contrast(f"{task}, {mode} ({unit})", interval, here=here)

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
    table = self.study.table
    table = table[(table.task == HELD_OUT) & table.ended]
    out = {}
    for name in self.variants:
      of_variant = table[table.variant == name]
      for kind, losses in of_variant.groupby("mode", sort=False):
        by_seed = losses.groupby("seed", sort=False).value
        end = by_seed.agg(lambda values: values.iloc[-1])
        for when, found in zip(_WHEN, (end, by_seed.min()), strict=True):
          # Losses that are not finite are not compared.
          if mean := statistics.mean(found.dropna().to_dict()):
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
    """The loss, in nats, of who knows tokens' frequencies alone."""
    return _entropy(self.study, self.variants)

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

  def _forgotten(self) -> list[Row]:
    rows = []
    for title, found in self._switches:
      left = [m for s in found if s.left for m in s.moments.values()]
      changes = [moment.forgotten for moment in left]
      gaps = [m.again - m.best for m in left if m.again is not None]
      row = {
        "row": title,
        "forgets": _how_often([change > 0 for change in changes]),
        "by (nats)": changes,
        "gets back": _how_often([gap <= 0 for gap in gaps]),
        "over its best before (nats)": gaps,
      }
      # A variant that leaves nothing has nothing to forget.
      rows += [row] if left else []
    return rows


def _how_often(found: Sequence[bool]) -> str | None:
  word = {0: "no", len(found): "yes"}.get(sum(found), "sometimes")
  return f"{word}: {sum(found)} of {len(found)} times" if found else None


def _pairs() -> list[str]:
  """Returns the benchmarks whose items are pairs."""
  return [benchmark.name for benchmark in benchmarks() if benchmark.pairs]


def _entropy(study: Findings, variants: Sequence[str]) -> Mean | None:
  runs = [run for name in variants for run in ended(study.runs[name])]
  entropies = (run.summary["unigram_entropy"] for run in runs)
  return statistics.mean({str(i): found for i, found in enumerate(entropies)})


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


def _missing(study: Findings) -> list[str]:
  """Returns what the report lacks, and of which variants, a line each."""
  lacking = collections.defaultdict(lambda: collections.defaultdict(list))
  for name, variant in study.variants.items():
    if name not in study.runs:
      lacking["not trained"][str(variant)] = []
    for run in study.runs.get(name, ()):
      for what in _lacks(study, run):
        lacking[what][str(variant)].append(run.seed)
  # What all runs lack is said once, not run by run.
  every = {
    str(study.variants[name]): [run.seed for run in runs]
    for name, runs in study.runs.items()
  }
  out = []
  for what, rows in lacking.items():
    named = ", ".join(
      f"{title} (seed {', '.join(seeds)})" if seeds else title
      for title, seeds in rows.items()
    )
    out.append(f"{what}: {'every run' if rows == every else named}")
  return out


def _lacks(study: Findings, run: TrainedRun) -> Iterator[str]:
  """Yields what one run lacks."""
  if run.summary is None:
    yield "training is not at its end"
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
      place, common = (
        (run.variant, mode, run.seed),
        study.common(benchmark.name),
      )
      if not score["items"]:
        yield f"{about}: no items.jsonl, so no interval"
      elif place in common.others:
        yield f"{about}: other items than most, so not compared"
  tuned = own[own.trial != ""]
  absent = [task for task in glue.SCORES if task not in set(tuned.task)]
  if absent:
    what = "anything" if tuned.empty else ", ".join(absent)
    yield f"not fine-tuned on {what}"
  if not tuned.complete.all():
    yield "fine-tuned on a part of a training set (--limit)"
