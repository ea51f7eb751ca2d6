"""The report of AntLM's table (arXiv 2412.03275), as a value.

A family's variants of several objectives are compared with those of one, its
controls. A control is scored as it was trained: causally, or with masks.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from antlm_jax import units
from evals.finetuning import glue
from evals.finetuning.loop import ATTENTIONS
from evals.reporting import compare, plots, render, switches
from evals.reporting.compare import Delta, Mean, Pair, Study
from evals.reporting.render import Figure, Section, Table, nats, percent, points
from evals.reporting.runs import BENCHMARKS, BLIMP, CAUSAL, TrainedRun

GLUE, MACRO = "GLUE", "macro-average"
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
  """A family's variants that have runs, and what is computed of them."""

  name: str
  variants: Sequence[str]
  deltas: Sequence[Delta]
  switches: Sequence[switches.Switch]
  tasks: Sequence[str]  # of GLUE, that any of them is fine-tuned on


def report(study: Study, absent: Sequence[str]) -> render.Report:
  """Returns the report; what `absent` says stands with what is missing."""
  families = [_family(study, *found) for found in study.families.items()]
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


def _family(study: Study, name: str, variants: Sequence[str]) -> Family:
  pairs = list(_pairs(study, variants))
  tuned = {task for variant, task, _ in study.results if variant in variants}
  return Family(
    name=name,
    variants=variants,
    deltas=[d for t in _PAIRS for d in study.differences(t, pairs)],
    switches=[s for v in variants for s in switches.read(study.runs[v])],
    tasks=[task for task in glue.SCORES if task in tuned],
  )


def _pairs(study: Study, variants: Sequence[str]) -> Iterator[Pair]:
  """Yields each mixed variant, in both modes, with every control."""
  first = {name: study.runs[name][0] for name in variants}
  controls = [v for v, run in first.items() if len(run.objectives) == 1]
  for name in (name for name in variants if name not in controls):
    for mode in study.variants[name].modes:
      for control in controls:
        own = study.variants[control].mode(first[control].attention)
        yield Pair(name, mode, control, own)


def _title(study: Study, name: str, how: str = "") -> str:
  return study.variants[name].title + (f" ({how})" if how else "")


# --------------------------------------------------------------- differences


def _shows(study: Study, family: Family) -> Iterator[Table]:
  alike = [delta for delta in family.deltas if delta.pair.alike]
  yield Table("", alike, _delta_columns(study), family.name)


def _differences(study: Study, family: Family) -> Iterator[Table]:
  for task in _PAIRS:
    deltas = [delta for delta in family.deltas if delta.task == task]
    columns, title = _delta_columns(study), f"{family.name}, {task}"
    yield Table("differences", deltas, columns, title)


def _delta_columns(study: Study) -> dict[str, Callable[[Delta], str]]:
  return {
    "row": lambda d: _title(study, d.pair.variant, d.pair.mode),
    "against": lambda d: _title(study, d.pair.control, d.pair.control_mode),
    "on": lambda d: d.task,
    "seeds": lambda d: f"{d.seeds[0]} and {d.seeds[1]}",
    "points": lambda d: points(d.by_items.estimate),
    "95 % by items": lambda d: points(d.by_items),
    "95 % by items and seeds": lambda d: points(d.by_seeds),
    "interval": _verdict,
  }


def _verdict(delta: Delta) -> str:
  decided = not delta.interval.contains_zero
  verdict = f"**{delta.verdict}**" if decided else delta.verdict
  return verdict if delta.by_seeds else f"{verdict}, by one seed"


def _phenomena(study: Study, family: Family) -> Iterator[Table | Figure]:
  """Compares those that are scored alike on each phenomenon of BLiMP."""
  pairs = [d.pair for d in family.deltas if d.task == BLIMP.name]
  pairs = [pair for pair in pairs if pair.alike]
  deltas = study.by_part(BLIMP.name, pairs)
  yield Table("phenomena", deltas)
  panels = collections.defaultdict(lambda: collections.defaultdict(list))
  for d in deltas:
    control = _title(study, d.pair.control, d.pair.control_mode)
    panels[d.pair.variant][f"against {control}"].append(d)
  for name, by_control in panels.items():
    title = f"{_title(study, name)}: BLiMP by phenomenon"
    draw = functools.partial(plots.differences, title, by_control)
    yield Figure(f"phenomena_{name}.png", draw)


# -------------------------------------------------------------------- scores


def _scores(study: Study, family: Family) -> Iterator[Table]:
  records = [
    _line(study, name, mode)
    for name in family.variants
    for mode in study.variants[name].modes
  ]
  columns = {
    "row": lambda r: r["title"],
    "curriculum": lambda r: f"`{r['curriculum']}`",
    "seeds": lambda r: str(r["at_end"]),
    "mode": lambda r: r["mode"],
  }
  columns |= {task: _score_of(task) for task in _PAIRS}
  if family.tasks:
    columns[_glue_name(family)] = functools.partial(_glue, family)
  if any(record["scores"][MACRO] for record in records):
    columns[MACRO] = _score_of(MACRO)
  note = _sizes([run for v in family.variants for run in study.runs[v]])
  yield Table("rows", records, columns, family.name, note)


def _line(study: Study, name: str, mode: str) -> dict[str, Any]:
  variant, runs = study.variants[name], study.runs[name]
  own = CAUSAL if mode == CAUSAL else "bidirectional"
  tasks = _tuned_on(study, name, own)
  scores = {task: study.mean(name, [task], mode) for task in _PAIRS}
  scores[GLUE] = study.mean(name, tasks, own)
  scores[MACRO] = _macro(study, name, mode, own)
  return {
    "row": name,
    "family": variant.family,
    "title": variant.title,
    "curriculum": runs[0].text,
    "seeds": [run.seed for run in runs],
    "at_end": sum(run.summary is not None for run in runs),
    "mode": mode,
    "scores": scores,
    "glue_tasks": tasks,
  }


def _score_of(task: str) -> Callable[[Mapping], str | None]:
  """Returns the column of a task."""
  return lambda record: percent(record["scores"].get(task))


def _macro(study: Study, name: str, mode: str, own: str) -> Mean | None:
  """Returns the macro-average of the seeds that have all of it in full.

  GLUE is with the mode's own attention, or with the other one without it.
  """
  pairs = study.mean(name, _PAIRS, mode, complete=True)
  tuned = {}
  for attention in sorted(ATTENTIONS, key=lambda a: a == own):
    found = study.mean(name, glue.SCORES, attention, complete=True)
    tuned |= found.values if found else {}
  count = len(_PAIRS)
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
  def column(at: int) -> Callable[[Sequence], str | None]:
    return lambda row: row[at] and f"{row[at]:.1f}"

  names = [*_PAIRS, GLUE, MACRO]
  columns = {"published": lambda row: row[0]}
  columns |= {name: column(at) for at, name in enumerate(names, start=1)}
  columns["source"] = lambda row: row[-1]
  ours = f" Pairs above are scored as `--pipeline={study.pipeline}`."
  note = _PUBLISHED + ours
  return Table("published", PUBLISHED, columns, "Published", note)


# --------------------------------------------------------------- fine-tuning


def _tuned_on(study: Study, name: str, attention: str) -> list[str]:
  """Returns the tasks that all of a variant's fine-tuned seeds have."""
  found = {task: study.at(name, task, attention) for task in glue.SCORES}
  seeds = set().union(*found.values())
  return [task for task in found if seeds and set(found[task]) == seeds]


def _glue_name(family: Family) -> str:
  count, of = len(family.tasks), len(glue.SCORES)
  return GLUE if count == of else f"{GLUE} ({count} of {of})"


def _glue(family: Family, record: Mapping) -> str | None:
  """Writes the mean over tasks, and over which if others have more."""
  shown, tasks = percent(record["scores"][GLUE]), record["glue_tasks"]
  fewer = shown and len(tasks) < len(family.tasks)
  return f"{shown} (of {', '.join(tasks)})" if fewer else shown


def _tuned(study: Study, family: Family) -> Iterator[Table | str | list[str]]:
  if not family.tasks:
    return
  # A task's metric and majority are the same in all of its results.
  any_of = {
    task: result
    for (_, task, _), by_seed in study.results.items()
    for result in by_seed.values()
  }
  one = {task: Mean({}, any_of[task].majority, None) for task in family.tasks}
  records = [{"title": "always one class", "attention": "", "scores": one}]
  for name, attention in itertools.product(family.variants, ATTENTIONS):
    records += _tuned_line(study, name, attention, family.tasks)
  columns = {"row": lambda r: r["title"], "attention": lambda r: r["attention"]}
  for task in family.tasks:
    columns[f"{task} ({any_of[task].metric})"] = _score_of(task)
  yield Table("fine_tuned", records, columns, f"{family.name}, fine-tuned")
  collapsed = [
    f"{record['title']} ({record['attention']}): {run}"
    for record in records[1:]
    for run in record["collapsed"]
  ]
  yield "Collapsed, all but one answer:" if collapsed else "None collapsed."
  yield collapsed


def _tuned_line(study, name, attention, tasks) -> Iterator[dict[str, Any]]:
  """Yields the record of a variant's fine-tuning, if there was any."""
  found = {task: study.at(name, task, attention) for task in tasks}
  found = {task: by_seed for task, by_seed in found.items() if by_seed}
  if found:
    yield {
      "row": name,
      "title": _title(study, name),
      "attention": attention,
      "scores": {task: study.mean(name, [task], attention) for task in found},
      "tasks": _tuned_on(study, name, attention),
      "collapsed": [
        f"{task}, {which} (run {seed})"
        for task, by_seed in found.items()
        for seed, result in by_seed.items()
        for which in result.collapsed
      ],
    }


# -------------------------------------------------------------------- curves


def _curves(study: Study, family: Family) -> Iterator[Figure]:
  runs = {
    _title(study, v): [r for r in switches.ended(study.runs[v]) if r.records]
    for v in family.variants
  }
  runs = {title: found for title, found in runs.items() if found}
  name = family.name.lower().replace("-", "_")
  if runs:
    draw = functools.partial(plots.curves, family.name, runs)
    yield Figure(f"curves_{name}.png", draw)


def _at_switches(study: Study, family: Family) -> Iterator[Table]:
  columns = {
    "row": lambda s: _title(study, s.variant),
    "switch": lambda s: f"{s.phases} after {s.step:,}",
    "loss of": lambda s: f"{s.kind}, {'left' if s.left else 'taken up'}",
    "best before": lambda s: nats(s.mean("best")),
    "at the switch": lambda s: nats(s.mean("at")),
    "at the end of the phase": lambda s: nats(s.mean("end")),
    "forgotten by": lambda s: nats(s.mean("change"), "+") if s.left else "",
    "trained again": lambda s: nats(s.mean("again")) if s.left else "",
  }
  title, most = f"{family.name}, switches", _MOST_SWITCHES
  yield Table("switches", family.switches, columns, title, most=most)
  columns = {
    "row": lambda f: _title(study, f.variant),
    "forgets": lambda f: _how_often([x > 0 for x in f.changes]),
    "by (nats)": lambda f: _range(f.changes),
    "gets back": lambda f: _how_often([x <= 0 for x in f.gaps]),
    "over its best before (nats)": lambda f: _range(f.gaps),
  }
  yield Table("forgetting", switches.forgetting(family.switches), columns)


def _how_often(found: Sequence[bool]) -> str | None:
  word = {0: "no", len(found): "yes"}.get(sum(found), "sometimes")
  return f"{word}: {sum(found)} of {len(found)} times" if found else None


def _range(values: Sequence[float]) -> str | None:
  ends = (min(values), max(values)) if values else ()
  return " to ".join(dict.fromkeys(nats(end, "+") for end in ends)) or None


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
