"""The report of AntLM's table (arXiv 2412.03275), as a value.

A family's variants of several objectives are compared with those of one, its
controls. A control is scored as it was trained: causally, or with masks.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from antlm_jax import units
from evals.finetuning import glue
from evals.finetuning.loop import ATTENTIONS
from evals.reporting import compare, plots, render, switches
from evals.reporting.compare import Delta, Mean, Pair, Study
from evals.reporting.render import (
  Cell,
  Figure,
  Section,
  Table,
  nats,
  percent,
  points,
)
from evals.reporting.runs import BENCHMARKS, BLIMP, CAUSAL, TrainedRun

MACRO = "macro-average"
_PAIRS = [benchmark.name for benchmark in BENCHMARKS]
_MOST_SWITCHES = 12  # of a variant, in the text; the JSON has all

# Name; BLiMP, supplement, EWoK, GLUE, macro-average in percent; source.
PUBLISHED = (
  ("BabyLlama, 2024 baseline", 69.8, 59.5, 50.7, 63.3, 60.8, "pipeline"),
  ("LTG-BERT, 2024 baseline", 60.6, 60.8, 48.9, 60.3, 57.7, "pipeline"),
  ("LTG-BERT, 2023", 80.6, 69.8, None, 74.5, None, "GPT-BERT"),
  ("ELC-BERT, 2023", 80.5, 67.9, 51.0, 75.3, None, "GPT-BERT"),
  ("GPT-BERT, 2024", 81.2, 69.4, 54.6, 76.5, None, "GPT-BERT"),
)
_PUBLISHED = """\
In percent; all were trained on 10M words (GPT-BERT on a third BabyLM's).
`pipeline` is the README of babylm/evaluation-pipeline-2024: some 20 epochs, few
for LTG-BERT, as it says. `GPT-BERT` is Table 1 of arXiv 2410.24159, with BLiMP
at each model's best temperature. AntLM's abstract (arXiv 2412.03275) gives +1.0
points of macro-average over BabyLlama and +2.2 over LTG-BERT at equal epochs.
Data, scale and scoring of the rows above are others: beside these numbers they
say nothing about a method."""
_SHOWS = "Both sides scored alike; in points, with 95 % intervals."
_NO_DIFFERENCE = """\
No difference yet: that takes a row of several objectives and one of one, of the
same encoder and scored on the same items."""
_LIMITS = """\
Fine-tuned scores have no interval, so no claim is made. Intervals are not
corrected for their number: of 20 that stand here, one excludes 0 by chance if
nothing differs. Where a side has one seed, they are of these very runs:
another seed may turn them."""
_SCORES = """\
In percent, mean ± standard deviation over seeds. `causal` scores from left to
right, `mlm` with one token masked at a time; `mntp` likewise, but read one
position before. The macro-average is BabyLM 2024's, the unweighted mean of
BLiMP, its supplement, EWoK and GLUE, where all of them are complete."""
_DIFFERENCES = """\
Rows of several objectives minus rows of one, in points. A row of one objective
is scored as it was trained. Every difference is paired: both sides have the
same items, resampled within their UID. Intervals by items are of these very
runs; those by items and seeds are of other seeds, too, and decide where they
are."""
_SWITCHES = """\
Held-out losses in nats, means over seeds. *Forgotten by* is what the phase
after the switch adds to the loss of the objective that is left; *trained again*
is its loss at the end of the next phase that trains it. Over seeds and switches
a row *forgets* where that loss is higher after the phase, and *gets back* where
it is trained again to its best before, or lower."""
_TUNING = """\
In percent (MCC times 100), each at its best learning rate, mean ± standard
deviation over training seeds. BabyLM's validation sets are also its test sets:
rate and epoch are chosen on what is reported."""


class Family(NamedTuple):
  """A family's variants that have runs, and how they differ."""

  name: str
  variants: Sequence[str]
  deltas: Sequence[Delta]


def report(study: Study, absent: Sequence[str]) -> render.Report:
  """Returns the report; what `absent` says stands with what is missing."""
  families = []
  for name, variants in study.families.items():
    pairs = list(_pairs(study, variants))
    deltas = [d for task in _PAIRS for d in study.differences(task, pairs)]
    families.append(Family(name, variants, deltas))
  absent = [*missing(study), *absent]

  def every(parts: Callable[[Study, Family], Iterator]) -> list:
    return [part for family in families for part in parts(study, family)]

  no_switch = "No row with a switch is at its end yet."
  sections = [
    Section("What it shows", every(_shows), _SHOWS, _NO_DIFFERENCE),
    Section("What it does not show", [], _LIMITS, ""),
    Section("Scores", [*every(_scores), _published(study)], _SCORES),
    Section("Differences", every(_differences), _DIFFERENCES),
    Section("Learning curves", every(_curves)),
    Section("By phenomenon", every(_phenomena)),
    Section("At every switch", every(_at_switches), _SWITCHES, no_switch),
    Section("Fine-tuning", every(_tuned), _TUNING),
    Section("What is not there", [absent], otherwise="Nothing."),
  ]
  about = {"pipeline": study.pipeline, "missing": absent}
  return render.Report("The AntLM table", sections, about)


def _pairs(study: Study, variants: Sequence[str]) -> Iterator[Pair]:
  """Yields each mixed variant, in both modes, with every control."""
  first = {name: study.runs[name][0] for name in variants}
  controls = [v for v, run in first.items() if len(run.objectives) == 1]
  for name in (name for name in variants if name not in controls):
    for mode in study.variants[name].modes:
      for control in controls:
        own = study.variants[control].mode(first[control].attention)
        yield Pair(name, mode, control, own)


# --------------------------------------------------------------- differences


def _shows(study: Study, family: Family) -> Iterator[Table]:
  alike = [delta for delta in family.deltas if delta.pair.alike]
  yield Table("alike", [_difference(study, d) for d in alike], family.name)


def _differences(study: Study, family: Family) -> Iterator[Table]:
  for task in _PAIRS:
    rows = [_difference(study, d) for d in family.deltas if d.task == task]
    yield Table("differences", rows, f"{family.name}, {task}")


def _difference(study: Study, delta: Delta) -> dict[str, Cell | str]:
  verdict = delta.verdict
  shown = verdict if delta.interval.contains_zero else f"**{verdict}**"
  shown += "" if delta.by_seeds else ", by one seed"
  seeds = "{} and {}".format(*delta.seeds)
  row, against = (study.title(*side) for side in delta.pair.sides)
  return {
    "row": row,
    "against": against,
    "on": delta.part or delta.task,
    "seeds": Cell(delta.seeds, seeds),
    "points": points(delta.by_items.estimate),
    "95 % by items": points(delta.by_items),
    "95 % by items and seeds": points(delta.by_seeds),
    "interval": Cell(verdict, shown),
  }


def _phenomena(study: Study, family: Family) -> Iterator[Table | Figure]:
  """Compares those that are scored alike on each phenomenon of BLiMP."""
  pairs = [d.pair for d in family.deltas if d.task == BLIMP.name]
  alike = [pair for pair in pairs if pair.alike]
  deltas = study.differences(BLIMP.name, alike, by_part=True)
  rows = [_difference(study, delta) for delta in deltas]
  yield Table("phenomena", rows, family.name, most=0)
  panels = collections.defaultdict(lambda: collections.defaultdict(list))
  for delta in deltas:
    against = f"against {study.title(*delta.pair.sides[1])}"
    panels[delta.pair.variant][against].append(delta)
  for name, by_control in panels.items():
    title = f"{study.title(name)}: BLiMP by phenomenon"
    draw = functools.partial(plots.differences, title, by_control)
    yield Figure(f"phenomena_{name}.png", draw)


# -------------------------------------------------------------------- scores


def _scores(study: Study, family: Family) -> Iterator[Table]:
  runs = [run for name in family.variants for run in study.runs[name]]
  rows = [
    _scored(study, name, mode)
    for name in family.variants
    for mode in study.variants[name].modes
  ]
  if not any(row[MACRO].value for row in rows):
    rows = [{k: v for k, v in row.items() if k != MACRO} for row in rows]
  yield Table("scores", rows, family.name, _sizes(runs))


def _scored(study: Study, name: str, mode: str) -> dict[str, Cell | str]:
  runs = study.runs[name]
  ended = [run.seed for run in runs if run.summary is not None]
  return {
    "row": study.title(name),
    "curriculum": Cell(runs[0].text, f"`{runs[0].text}`"),
    "seeds": Cell(ended, str(len(ended))),
    "mode": mode,
    **{task: percent(study.mean(name, [task], mode)) for task in _PAIRS},
    MACRO: percent(_macro(study, name, mode)),
  }


def _macro(study: Study, name: str, mode: str) -> Mean | None:
  """Returns the macro-average of the seeds that have all of it in full.

  GLUE is with the mode's own attention, or with the other one without it.
  """
  pairs = study.mean(name, _PAIRS, mode, complete=True)
  tuned, count = {}, len(_PAIRS)
  for attention in sorted(
    ATTENTIONS, key=lambda a: (a == CAUSAL) == (mode == CAUSAL)
  ):
    found = study.mean(name, glue.SCORES, attention, complete=True)
    tuned |= found.values if found else {}
  return compare.mean(
    {
      seed: (count * score + tuned[seed]) / (count + 1)
      for seed, score in (pairs.values if pairs else {}).items()
      if seed in tuned
    }
  )


def _sizes(runs: Sequence[TrainedRun]) -> str:
  sizes = dict.fromkeys(
    f"{units.quantity(run.summary['parameters'])} parameters,"
    f" {run.summary['steps']:,} steps of"
    f" {run.config['train']['batch_size']} rows"
    for run in runs
    if run.summary is not None
  )
  return "; ".join(sizes) + "." if sizes else "No run is at its end."


def _published(study: Study) -> Table:
  names = [*_PAIRS, "GLUE", MACRO]
  rows = [
    {
      "published": model,
      **{
        name: Cell(number, number and f"{number:.1f}")
        for name, number in zip(names, found, strict=True)
      },
      "source": source,
    }
    for model, *found, source in PUBLISHED
  ]
  ours = f" Pairs above are scored as `--pipeline={study.pipeline}`."
  return Table("published", rows, "Published", _PUBLISHED + ours)


# --------------------------------------------------------------- fine-tuning


def _tuned(study: Study, family: Family) -> Iterator[Table | str | list[str]]:
  found = {  # a task's metric and baseline are the same in all of its results
    task: next(iter(by_seed.values()))
    for (name, task, _), by_seed in study.results.items()
    if name in family.variants and task in glue.SCORES
  }
  tasks = [task for task in glue.SCORES if task in found]
  if not tasks:
    return
  heads = {f"{task} ({found[task].metric})": task for task in tasks}
  ways = [
    (name, attention)
    for name, attention in itertools.product(family.variants, ATTENTIONS)
    if any(study.at(name, task, attention) for task in tasks)
  ]
  one = {head: Mean({}, found[t].baseline, None) for head, t in heads.items()}
  rows = [{"row": "always one class", "attention": "", "mean": ""}]
  rows[0] |= {head: percent(score) for head, score in one.items()}
  rows += [_tuned_row(study, *way, heads) for way in ways]
  yield Table("fine_tuned", rows, f"{family.name}, fine-tuned")
  collapsed = [
    f"{study.title(*way)}: {task}, {which} (run {seed})"
    for way in ways
    for task in tasks
    for seed, result in study.at(way[0], task, way[1]).items()
    for which in result.collapsed
  ]
  yield "Collapsed, all but one answer:" if collapsed else "None collapsed."
  yield collapsed


def _tuned_row(study: Study, name: str, attention: str, heads) -> dict:
  by_task = {t: study.at(name, t, attention) for t in heads.values()}
  # The mean is over the tasks that all of the seeds have.
  seeds = set().union(*by_task.values())
  common = [task for task, found in by_task.items() if found.keys() == seeds]
  note = f" (of {', '.join(common)})" if len(common) < len(heads) else ""
  means = {h: study.mean(name, [t], attention) for h, t in heads.items()}
  return {
    "row": study.title(name),
    "attention": attention,
    "mean": percent(study.mean(name, common, attention), note),
    **{head: percent(mean) for head, mean in means.items()},
  }


# -------------------------------------------------------------------- curves


def _curves(study: Study, family: Family) -> Iterator[Figure]:
  runs = {
    study.title(v): [r for r in switches.ended(study.runs[v]) if r.records]
    for v in family.variants
  }
  runs = {title: found for title, found in runs.items() if found}
  name = family.name.lower().replace("-", "_")
  if runs:
    draw = functools.partial(plots.curves, family.name, runs)
    yield Figure(f"curves_{name}.png", draw)


def _at_switches(study: Study, family: Family) -> Iterator[Table]:
  found = {name: [*switches.read(study.runs[name])] for name in family.variants}
  rows = [
    {
      "row": study.title(name),
      "switch": f"{switch.phases} after {switch.step:,}",
      "loss of": f"{switch.kind}, {'left' if switch.left else 'taken up'}",
      "best before": nats(switch.mean("best")),
      "at the switch": nats(switch.mean("at")),
      "at the end of the phase": nats(switch.mean("end")),
      "forgotten by": nats(switch.mean("end", "at"), "+")
      if switch.left
      else "",
      "trained again": nats(switch.mean("again")) if switch.left else "",
    }
    for name, its in found.items()
    for switch in its
  ]
  title = f"{family.name}, switches"
  yield Table("switches", rows, title, most=_MOST_SWITCHES)
  rows = []
  for name, its in found.items():
    moments = [m for s in its if s.left for m in s.moments.values()]
    changes = [m.end - m.at for m in moments]
    gaps = [m.again - m.best for m in moments if m.again is not None]
    if moments:
      rows.append(
        {
          "row": study.title(name),
          "forgets": _how_often([change > 0 for change in changes]),
          "by (nats)": _range(changes),
          "gets back": _how_often([gap <= 0 for gap in gaps]),
          "over its best before (nats)": _range(gaps),
        }
      )
  yield Table("forgetting", rows, f"{family.name}, forgetting")


def _how_often(found: Sequence[bool]) -> str | None:
  word = {0: "no", len(found): "yes"}.get(sum(found), "sometimes")
  return f"{word}: {sum(found)} of {len(found)} times" if found else None


def _range(values: Sequence[float]) -> Cell:
  ends = (min(values), max(values)) if values else ()
  shown = dict.fromkeys(f"{end:+.3f}" for end in ends)
  return Cell(values, " to ".join(shown) or None)


# ----------------------------------------------------------- what is not there


def missing(study: Study) -> list[str]:
  """Returns what the report lacks, and of which variants, a line each."""
  lacking = collections.defaultdict(lambda: collections.defaultdict(list))
  for name, variant in study.variants.items():
    if name not in study.runs:
      lacking["not trained"][str(variant)] = []
    for run in study.runs.get(name, ()):
      for what in _lacks(study, run):
        lacking[what][str(variant)].append(run.seed)
  every = {
    str(study.variants[name]): [run.seed for run in runs]
    for name, runs in study.runs.items()
  }
  return [
    f"{what}: {'every run' if rows == every else _runs(rows)}"
    for what, rows in lacking.items()
  ]


def _runs(rows: Mapping[str, Sequence[str]]) -> str:
  return ", ".join(
    f"{title} (seed {', '.join(seeds)})" if seeds else title
    for title, seeds in rows.items()
  )


def _lacks(study: Study, run: TrainedRun) -> Iterator[str]:
  """Yields what one run lacks."""
  if run.summary is None:
    yield "training is not at its end"
  for benchmark in BENCHMARKS:
    for mode in study.variants[run.variant].modes:
      for what in _lacks_pairs(study, run, benchmark, mode):
        yield f"{benchmark.name}, {mode}: {what}"
  there = {task for task, _ in run.tuned}
  absent = [task for task in glue.SCORES if task not in there]
  if absent:
    yield f"not fine-tuned on {', '.join(absent) if there else 'anything'}"
  if not all(tuned.complete for tuned in run.tuned.values()):
    yield "fine-tuned on a part of a training set (--limit)"


def _lacks_pairs(study, run: TrainedRun, benchmark, mode) -> Iterator[str]:
  found = study.at(run.variant, benchmark.name, mode).get(run.seed)
  if found is None:
    yield "not evaluated"
    return
  if run.summary and found.step != run.summary["steps"]:
    yield f"evaluated at step {found.step:,}, before the end"
  if not found.complete:
    yield f"{found.pairs:,} pairs of {benchmark.pairs:,}"
  if found.items is None:
    yield "no items.jsonl, so no interval"
  elif (run.variant, mode, run.seed) in study.common[benchmark.name].others:
    yield "other items than most, so not compared"
