"""The report of rows that are compared with their controls.

AntLM's table (arXiv 2412.03275) is one. A row's controls are those that it is
claimed to be better than (`Row.against`), each of one objective; a control is
scored as it was trained: causally, or with masks.
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
from antlm_jax.evals.reporting import claims, measured, plots, statistics
from antlm_jax.evals.reporting import switches as switches_lib
from antlm_jax.evals.reporting.claims import Claim, Contrast
from antlm_jax.evals.reporting.findings import Delta, Findings, Pair
from antlm_jax.evals.reporting.measured import BENCHMARKS, HELD_OUT, KEY
from antlm_jax.evals.reporting.render import Figure, Report, Row, fill
from antlm_jax.evals.reporting.runs import TrainedRun, ended, with_shared_steps
from antlm_jax.evals.reporting.statistics import Mean
from antlm_jax.evals.reporting.switches import Switch

MACRO = "macro-average"
_PAIRS = [benchmark.name for benchmark in BENCHMARKS]
_BLIMP = _PAIRS[0]
_ODDS = f"{_BLIMP} (log-odds)"  # by how much pairs are right, in nats
_COMPARED = [*_PAIRS, _ODDS]

# Name; BLiMP, supplement, EWoK, GLUE, macro-average in percent; source.
PUBLISHED = (
  ("BabyLlama, 2024 baseline", 69.8, 59.5, 50.7, 63.3, 60.8, "pipeline"),
  ("LTG-BERT, 2024 baseline", 60.6, 60.8, 48.9, 60.3, 57.7, "pipeline"),
  ("LTG-BERT, 2023", 80.6, 69.8, None, 74.5, None, "GPT-BERT"),
  ("ELC-BERT, 2023", 80.5, 67.9, 51.0, 75.3, None, "GPT-BERT"),
  ("GPT-BERT, 2024", 81.2, 69.4, 54.6, 76.5, None, "GPT-BERT"),
)
# Held-out losses by variant, objective and `end` or `lowest`, then by seed.
_Losses = Mapping[tuple[str, str, str], Mapping[str, float]]


def report(study: Findings, absent: Sequence[str]) -> Report:
  """Makes the report.

  Args:
    study: The study; which of its scores count is decided here.
    absent: What is missing, in addition to what is found to be.
  """
  trials = study.table[study.table.chosen & (study.table.task != HELD_OUT)]
  trials = measured.latest(trials)
  study = dataclasses.replace(study, scores=_scores(trials, study.items))
  families, figures = [], []
  tables = collections.defaultdict(dict)
  for name, variants in study.families.items():
    losses = _losses(study, variants)
    pairs = list(_pairs(study, variants))
    deltas = [d for task in _COMPARED for d in study.differences(task, pairs)]
    made = list(_claims(study, variants, deltas, losses))
    standing = claims.rows(made, study.confidence)
    tables["claims"][f"{name}: what the verdicts stand on"] = standing
    tables["held_out"][name] = _held_out(study, variants, losses)
    _add_switches(tables, study, name, variants)
    curves = list(_curves(study, name, variants))
    phenomena = []
    if not study.scores.empty:
      _add_scores(tables, study, name, variants, deltas)
      phenomena = _phenomena(tables, study, name, deltas)
    figures += curves + phenomena
    families.append(
      {
        "name": name,
        "claims": made,
        "sizes": sizes(study, variants),
        "entropy": _entropy(study, variants),
        "curves": curves,
        "phenomena": phenomena,
        "collapsed": _collapsed(study, trials, variants),
      }
    )
  if not study.scores.empty:
    tables["published"]["Published"] = _published()
  tables = dict(tables)  # a template asks for what is not there
  about = {"pipeline": study.pipeline, "missing": [*_missing(study), *absent]}
  text = fill(
    "controls.md.j2",
    title=study.name,
    families=families,
    tables=tables,
    **about,
  )
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
    value=[items.of(place).mean for place in places],
    items=places,
  )
  return pd.concat([scores, odds], ignore_index=True)


def _pairs(study: Findings, variants: Sequence[str]) -> Iterator[Pair]:
  """Yields each mixed variant, in both modes, with every control."""
  for name in variants:
    for mode in study.variants[name].modes:
      for control in _controls(study, name):
        # All runs of a variant have one curriculum.
        own = study.runs[control][0].attention
        yield Pair((name, mode), (control, study.variants[control].mode(own)))


def _controls(study: Findings, name: str) -> list[str]:
  return [c for c in study.variants[name].against if c in study.runs]


# -------------------------------------------------------------------- claims


def _claims(
  study: Findings,
  variants: Sequence[str],
  deltas: Sequence[Delta],
  losses: _Losses,
) -> Iterator[Claim]:
  for name in variants:
    for control in _controls(study, name):
      text = f"{study.title(name)} is better than {study.title(control)}"
      contrasts = [
        *_of_losses(study, losses, name, control),
        *_of_pairs(study, deltas, name, control),
      ]
      yield Claim(text, study.variants[name].family, contrasts)


def _of_losses(
  study: Findings, losses: _Losses, name: str, control: str
) -> Iterator[Contrast]:
  """Yields what losses say, in the objective that the control trained."""
  run = study.runs[control][0]
  kind = run.names[run.objectives[0]]
  # Who does not learn more than tokens' frequencies proves nothing.
  lowest = {
    side: statistics.mean(losses.get((side, kind, "lowest"), {}))
    for side in (name, control)
  }
  above = [
    study.title(side)
    for side, loss in lowest.items()
    if loss and loss.mean >= _entropy(study, [side]).mean
  ]
  for when in ("end", "lowest"):
    a, b = (losses.get((side, kind, when), {}) for side in (name, control))
    apart = [a[seed] - b[seed] for seed in a if seed in b]
    yield Contrast(
      f"held-out {kind} loss, {when} (nats)",
      statistics.paired(a, b, study.confidence),
      sign=-1,
      digits=3,
      here=sum(apart) / len(apart) if apart else None,
      but=f"{above[0]} knows frequencies at most" if above else "",
    )


def _of_pairs(
  study: Findings, deltas: Sequence[Delta], name: str, control: str
) -> Iterator[Contrast]:
  """Yields what pairs say, scored as the control was trained."""
  mode = study.variants[control].mode(study.runs[control][0].attention)
  pair = Pair((name, study.variants[name].mode(mode)), (control, mode))
  for task in (_ODDS, *_PAIRS):
    for delta in deltas:
      if delta.task == task and delta.pair == pair:
        scale, unit = (1, "nats") if task == _ODDS else (100, "points")
        interval = delta.by_seeds and delta.by_seeds * scale
        here = delta.by_items.estimate * scale
        yield Contrast(f"{task}, {mode} ({unit})", interval, here=here)


# -------------------------------------------------------------------- scores


def _add_scores(
  tables: Mapping[str, dict[str, list[Row]]],
  study: Findings,
  family: str,
  variants: Sequence[str],
  deltas: Sequence[Delta],
) -> None:
  """Adds the tables that stand on evaluations."""
  alike = [_difference(study, d) for d in deltas if d.pair.alike]
  tables["alike"][family] = alike
  for task in _COMPARED:
    rows = [_difference(study, d) for d in deltas if d.task == task]
    tables["differences"][f"{family}, {task}"] = rows
  rows = [
    {
      "row": study.title(name),
      "curriculum": study.runs[name][0].text,
      "seeds": [r.seed for r in study.runs[name] if r.summary is not None],
      "mode": mode,
      **{task: study.mean(name, [task], mode) for task in _PAIRS},
      MACRO: _macro(study, name, mode),
    }
    for name in variants
    for mode in study.variants[name].modes
  ]
  # An official number that nobody has is not even a column.
  if not any(row[MACRO] for row in rows):
    rows = [{k: v for k, v in row.items() if k != MACRO} for row in rows]
  tables["scores"][family] = rows
  if tuned := _fine_tuned(study, variants):
    tables["fine_tuned"][f"{family}, fine-tuned"] = tuned


def _difference(study: Findings, delta: Delta) -> Row:
  row, against = (study.title(*side) for side in delta.pair)
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


def _phenomena(
  tables: Mapping[str, dict[str, list[Row]]],
  study: Findings,
  family: str,
  deltas: Sequence[Delta],
) -> list[Figure]:
  """Compares those scored alike on each phenomenon of BLiMP."""
  figures = []
  for task, suffix, unit in ((_BLIMP, "", "points"), (_ODDS, "_odds", "nats")):
    pairs = [d.pair for d in deltas if d.task == task and d.pair.alike]
    found = study.differences(task, pairs, by_part=True)
    rows = [_difference(study, delta) for delta in found]
    tables["parts"][f"{family}, {task}"] = rows
    panels = collections.defaultdict(lambda: collections.defaultdict(list))
    for delta in found:
      against = f"against {study.title(*delta.pair.control)}"
      panels[delta.pair.variant[0]][against].append(delta)
    for name, by_control in panels.items():
      title = f"{study.title(name)}: {task} by phenomenon"
      draw = functools.partial(plots.differences, title, by_control, unit=unit)
      figures.append(Figure(f"phenomena_{name}{suffix}.png", draw))
  return figures


def _macro(study: Findings, name: str, mode: str) -> Mean | None:
  """Returns the macro-average of the seeds that have all of it in full.

  GLUE is with the mode's own attention, or with the other one without it.
  """
  pairs = study.mean(name, _PAIRS, mode, complete=True)
  tuned, count = {}, len(_PAIRS)
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


def _published() -> list[Row]:
  heads = ["published", *_PAIRS, "GLUE", MACRO, "source"]
  return [dict(zip(heads, row, strict=True)) for row in PUBLISHED]


def _fine_tuned(study: Findings, variants: Sequence[str]) -> list[Row]:
  """Returns scores of fine-tuned tasks, below those of one constant answer."""
  scores = study.scores[study.scores.variant.isin(variants)]
  tasks = [task for task in glue.SCORES if task in set(scores.task)]
  # A task's metric and baseline are the same in all of its results.
  about = scores.drop_duplicates("task", keep="last").set_index("task")
  heads = {task: f"{task} ({about.metric[task]})" for task in tasks}
  rows = [{"row": "always one class", "attention": "", "mean": ""}]
  for task, head in heads.items():
    rows[0][head] = Mean({}, float(about.baseline[task]), None)
  for name, attention in itertools.product(variants, ATTENTIONS):
    by_task = {task: study.at(name, task, attention) for task in tasks}
    seeds = {seed for found in by_task.values() for seed in found.seed}
    if seeds:
      # The mean is over the tasks that all of the seeds have.
      common = [t for t, found in by_task.items() if {*found.seed} == seeds]
      means = {h: study.mean(name, [t], attention) for t, h in heads.items()}
      rows.append(
        {
          "row": study.title(name),
          "attention": attention,
          "mean": study.mean(name, common, attention),
          **means,
          "_common": common,
          "_all": common == tasks,
        }
      )
  return rows if tasks else []


def _collapsed(
  study: Findings, trials: pd.DataFrame, variants: Sequence[str]
) -> list[Row]:
  """Returns the trials that give all but one answer."""
  found = trials[trials.collapsed & trials.task.isin(glue.SCORES)]
  return [
    {"way": study.title(trial.variant, trial["mode"]), **trial}
    for _, trial in found[found.variant.isin(variants)].iterrows()
  ]


# -------------------------------------------------------------------- losses


def _losses(study: Findings, variants: Sequence[str]) -> _Losses:
  """Returns held-out losses at the end, and the lowest that was measured."""
  table = study.table[(study.table.task == HELD_OUT) & study.table.ended]
  out = {}
  for name in variants:
    of_variant = table[table.variant == name]
    for kind, losses in of_variant.groupby("mode", sort=False):
      by_seed = losses.groupby("seed", sort=False).value
      # A loss that is not finite is no number to be compared.
      end = by_seed.agg(lambda values: values.iloc[-1]).dropna()
      out[name, kind, "end"] = end.to_dict()
      out[name, kind, "lowest"] = by_seed.min().dropna().to_dict()
  return out


def _held_out(
  study: Findings, variants: Sequence[str], losses: _Losses
) -> list[Row]:
  heads = list(dict.fromkeys((kind, when) for _, kind, when in losses))
  rows = [
    {"row": study.title(name)}
    | {
      f"{kind}, {when}": statistics.mean(losses.get((name, kind, when), {}))
      for kind, when in heads
    }
    | {
      "_untrained": [
        f"{kind}, {when}"
        for kind, when in heads
        if kind not in study.runs[name][0].seen
      ]
    }
    for name in variants
  ]
  return rows if heads else []


def _entropy(study: Findings, variants: Sequence[str]) -> Mean | None:
  """Returns the loss, in nats, of who knows tokens' frequencies alone."""
  runs = [run for name in variants for run in ended(study.runs[name])]
  return statistics.mean(
    {str(i): r.summary["unigram_entropy"] for i, r in enumerate(runs)}
  )


def sizes(study: Findings, variants: Sequence[str]) -> list[tuple]:
  """Returns how many parameters, steps and rows of a batch ended runs have."""
  return list(
    dict.fromkeys(
      (
        run.summary["parameters"],
        run.summary["steps"],
        run.config["train"]["batch_size"],
      )
      for name in variants
      for run in study.runs[name]
      if run.summary is not None
    )
  )


def _curves(
  study: Findings, family: str, variants: Sequence[str]
) -> Iterator[Figure]:
  """Yields the picture of held-out losses, if any run is at its end."""
  runs = {
    study.title(name): [
      with_shared_steps(run, study.runs)
      for run in ended(study.runs[name])
      if run.losses
    ]
    for name in variants
  }
  runs = {title: found for title, found in runs.items() if found}
  if runs:
    draw = functools.partial(plots.curves, family, runs)
    yield Figure(f"curves_{family.lower().replace('-', '_')}.png", draw)


# ------------------------------------------------------------------ switches


def _add_switches(
  tables: Mapping[str, dict[str, list[Row]]],
  study: Findings,
  family: str,
  variants: Sequence[str],
) -> None:
  """Adds what becomes of objectives at switches, and what is forgotten."""
  switches, forgetting = [], []
  for name in variants:
    found = list(switches_lib.read(study.runs[name]))
    switches += [_switch(study, name, switch) for switch in found]
    # A variant that leaves nothing has nothing to forget.
    if left := [m for s in found if s.left for m in s.moments.values()]:
      changes = [m.forgotten for m in left]
      gaps = [m.again - m.best for m in left if m.again is not None]
      forgetting.append(
        {
          "row": study.title(name),
          "forgets": _how_often([change > 0 for change in changes]),
          "by (nats)": changes,
          "gets back": _how_often([gap <= 0 for gap in gaps]),
          "over its best before (nats)": gaps,
        }
      )
  tables["switches"][f"{family}, switches"] = switches
  tables["forgetting"][f"{family}, forgetting"] = forgetting


def _switch(study: Findings, name: str, switch: Switch) -> Row:
  left = switch.left  # what is taken up was not forgotten
  return {
    "row": study.title(name),
    "switch": f"{switch.phases} after {switch.step:,}",
    "loss of": f"{switch.kind}, {'left' if left else 'taken up'}",
    "best before": switch.mean("best"),
    "at the switch": switch.mean("at"),
    "at the end of the phase": switch.mean("end"),
    "forgotten by": switch.mean("forgotten") if left else None,
    "trained again": switch.mean("again") if left else None,
  }


def _how_often(found: Sequence[bool]) -> str | None:
  word = {0: "no", len(found): "yes"}.get(sum(found), "sometimes")
  return f"{word}: {sum(found)} of {len(found)} times" if found else None


# --------------------------------------------------------------------- gaps


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
  for benchmark in BENCHMARKS:
    for mode in study.variants[run.variant].modes:
      for what in _lacks_pairs(study, run, benchmark, mode):
        yield f"{benchmark.name}, {mode}: {what}"
  own = study.scores[study.scores.variant == run.variant]
  tuned = own[(own.seed == run.seed) & (own.pipeline == "")]
  there = set(tuned.task)
  absent = [task for task in glue.SCORES if task not in there]
  if absent:
    yield f"not fine-tuned on {', '.join(absent) if there else 'anything'}"
  if not tuned.complete.all():
    yield "fine-tuned on a part of a training set (--limit)"


def _lacks_pairs(
  study: Findings, run: TrainedRun, benchmark: measured.Benchmark, mode: str
) -> Iterator[str]:
  found = study.at(run.variant, benchmark.name, mode)
  found = found[found.seed == run.seed]
  if found.empty:
    yield "not evaluated"
    return
  score = found.iloc[0]
  if run.summary and score.step != run.summary["steps"]:
    yield f"evaluated at step {score.step:,}, before the end"
  if not score.complete:
    yield f"{score.pairs:,} pairs of {benchmark.pairs:,}"
  if not score["items"]:
    yield "no items.jsonl, so no interval"
  elif (run.variant, mode, run.seed) in study.common(benchmark.name).others:
    yield "other items than most, so not compared"
