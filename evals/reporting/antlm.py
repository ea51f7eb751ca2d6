"""The report of AntLM's table (arXiv 2412.03275), as a value.

A family's variants of several objectives are compared with those of one, its
controls. A control is scored as it was trained: causally, or with masks.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from antlm_jax import units
from evals.finetuning import glue
from evals.finetuning.loop import ATTENTIONS
from evals.reporting import compare, plots, switches
from evals.reporting.compare import Delta, Mean, Pair, Study
from evals.reporting.render import Figure, Report, Section, Table
from evals.reporting.render import nats, percent, points
from evals.reporting.runs import BENCHMARKS, BLIMP, CAUSAL, TrainedRun
from evals.reporting.switches import Switch

MACRO = "macro-average"
ONE_CLASS = "always one class"
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
_SCORES = """\
In percent, mean ± standard deviation over seeds. `causal` scores from left to
right, `mlm` with one token masked at a time; `mntp` likewise, but read one
position before."""
_DIFFERENCES = """\
Rows of several objectives minus rows of one, in points. A row of one objective
is scored as it was trained. Every difference is paired: both sides have the
same items, resampled within their UID. Intervals by items are of these very
runs; those by items and seeds are of other seeds, too, and decide where they
are."""
_SWITCHES = """\
Held-out losses in nats, means over seeds. *Forgotten by* is what the phase
after the switch adds to the loss of the objective that is left; *trained again*
is its loss at the end of the next phase that trains it. Over seeds and
switches, a row *forgets* where that loss is higher after the phase, and *gets
back* what it forgot where it is trained again to its best before, or lower."""
_TUNING = """\
In percent (MCC times 100), each at its best learning rate, mean ± standard
deviation over training seeds. BabyLM's validation sets are also its test sets:
rate and epoch are chosen on what is reported."""


class Tuning(NamedTuple):
  """A variant's fine-tuning with one attention.

  Attributes:
    variant: The variant's name.
    attention: With which it was fine-tuned.
    scores: By evaluation set, in GLUE's order.
    mean: Over the sets that all of the seeds have, which `tasks` names.
    tasks: See there.
    collapsed: The runs that give nearly one answer.
  """

  variant: str
  attention: str
  scores: Mapping[str, Mean]
  mean: Mean | None = None
  tasks: Sequence[str] = ()
  collapsed: Sequence[str] = ()


class Family(NamedTuple):
  """What is said of a family's variants."""

  name: str
  rows: Sequence[Mapping]
  deltas: Sequence[Delta]
  phenomena: Sequence[Delta]
  switches: Sequence[Switch]
  tunings: Sequence[Tuning]


def report(study: Study, absent: Sequence[str]) -> Report:
  """Returns the report; what `absent` says stands with what is missing."""
  families = [_family(study, *found) for found in study.families.items()]
  absent = [*missing(study), *absent]

  def every(parts: Callable[[Study, Family], Iterator]) -> list:
    return [part for family in families for part in parts(study, family)]

  return Report(
    "The AntLM table",
    [
      Section("What it shows", every(_shows), _SHOWS, _NO_DIFFERENCE),
      Section("What it does not show", [[*_limits(study, families)]]),
      Section("Scores", [*every(_scores), _published()], _SCORES),
      Section("Differences", every(_differences), _DIFFERENCES),
      Section("Learning curves", every(_curves)),
      Section("By phenomenon", every(_phenomena)),
      Section(
        "At every switch",
        every(_at_switches),
        _SWITCHES,
        otherwise="No row with a switch is at its end yet.",
      ),
      Section("Fine-tuning", every(_tuned), _TUNING),
      Section("What is not there", [absent], otherwise="Nothing."),
    ],
    {"pipeline": study.pipeline, "missing": absent},
  )


# --------------------------------------------------------------- the numbers


def _family(study: Study, name: str, variants: Sequence[str]) -> Family:
  pairs = list(_pairs(study, variants))
  return Family(
    name=name,
    rows=[_row(study, variant) for variant in variants],
    deltas=[
      delta
      for benchmark in BENCHMARKS
      if benchmark.name in study.common
      for delta in study.common[benchmark.name].differences(pairs)
    ],
    phenomena=_by_phenomenon(study, pairs),
    switches=[
      switch for v in variants for switch in switches.read(study.runs[v])
    ],
    tunings=[
      tuning
      for variant in variants
      for attention in ATTENTIONS
      if (tuning := _tuning(study, variant, attention)).scores
    ],
  )


def _pairs(study: Study, variants: Sequence[str]) -> Iterator[Pair]:
  """Yields each mixed variant, in both modes, with every control."""
  first = {name: study.runs[name][0] for name in variants}
  controls = [v for v, run in first.items() if len(run.objectives) == 1]
  for name in (name for name in variants if name not in controls):
    for mode in study.variants[name].modes:
      for control in controls:
        causal, masked = study.variants[control].modes
        own = causal if first[control].causal else masked
        yield Pair(name, mode, control, own)


def _by_phenomenon(study: Study, pairs: Sequence[Pair]) -> list[Delta]:
  """Compares pairs that are scored alike on each phenomenon of BLiMP."""
  common = study.common.get(BLIMP.name)
  uids = collections.defaultdict(list)
  for uid in common.uids if common else ():
    if common.terms.get(uid):
      uids[common.terms[uid]].append(uid)
  alike = [pair for pair in pairs if pair.alike]
  return [
    delta
    for pair in alike
    for term, those in sorted(uids.items())
    for delta in common.differences([pair], term, those)
  ]


def _row(study: Study, name: str) -> dict:
  variant, runs = study.variants[name], study.runs[name]
  return {
    "variant": name,
    "family": variant.family,
    "title": variant.title,
    "curriculum": runs[0].text,
    "seeds": [run.seed for run in runs],
    "at_end": sum(run.summary is not None for run in runs),
    "scores": {
      mode: {b.name: study.mean(name, [b.name], mode) for b in BENCHMARKS}
      | {MACRO: _macro(study, name, mode)}
      for mode in variant.modes
    },
  }


def _macro(study: Study, variant: str, mode: str) -> Mean | None:
  """Returns BabyLM 2024's average of the seeds that have all of it in full.

  The unweighted mean of BLiMP, its supplement, EWoK and GLUE. GLUE is with the
  mode's own attention, or with the other one where there is no other.
  """
  names = [benchmark.name for benchmark in BENCHMARKS]
  pairs = study.mean(variant, names, mode, complete=True)
  tuned = {}
  own = CAUSAL if mode == CAUSAL else "bidirectional"
  for attention in sorted(ATTENTIONS, key=lambda a: a == own):
    found = study.mean(variant, glue.SCORES, attention, complete=True)
    tuned |= found.values if found else {}
  return compare.mean(
    {
      seed: (len(names) * score + tuned[seed]) / (len(names) + 1)
      for seed, score in (pairs.values if pairs else {}).items()
      if seed in tuned
    }
  )


def _tuning(study: Study, variant: str, attention: str) -> Tuning:
  found = {t: study.at(variant, t, attention) for t in glue.SCORES}
  found = {task: by_seed for task, by_seed in found.items() if by_seed}
  seeds = set().union(*found.values())
  tasks = [t for t, by_seed in found.items() if len(by_seed) == len(seeds)]
  return Tuning(
    variant=variant,
    attention=attention,
    scores={task: study.mean(variant, [task], attention) for task in found},
    mean=study.mean(variant, tasks, attention),
    tasks=tasks,
    collapsed=[
      f"{task}, {which} (run {seed})"
      for task, by_seed in found.items()
      for seed, result in by_seed.items()
      for which in result.collapsed
    ],
  )


def _tasks(tunings: Sequence[Tuning]) -> list[str]:
  there = {task for tuning in tunings for task in tuning.scores}
  return [task for task in glue.SCORES if task in there]


# -------------------------------------------------------------- the findings


def _title(study: Study, name: str, how: str = "") -> str:
  title = study.variants[name].title if name in study.variants else name
  return f"{title} ({how})" if how else title


def _shows(study: Study, family: Family) -> Iterator[Table]:
  alike = [delta for delta in family.deltas if delta.pair.alike]
  yield Table("", alike, _delta_columns(study), family.name)


def _differences(study: Study, family: Family) -> Iterator[Table]:
  for benchmark in BENCHMARKS:
    deltas = [d for d in family.deltas if d.task == benchmark.name]
    title = f"{family.name}, {benchmark.name}"
    yield Table("differences", deltas, _delta_columns(study), title)


def _delta_columns(study: Study) -> dict[str, Callable[[Delta], str]]:
  return {
    "row": lambda d: _title(study, d.pair.variant, d.pair.mode),
    "against": lambda d: _title(study, d.pair.control, d.pair.control_mode),
    "task": lambda d: d.task,
    "seeds": lambda d: f"{d.seeds[0]} and {d.seeds[1]}",
    "points": lambda d: points(d.by_items.estimate),
    "95 % by items": lambda d: points(d.by_items),
    "95 % by items and seeds": lambda d: points(d.by_seeds),
    "interval": _verdict,
  }


def _verdict(delta: Delta) -> str:
  shown = (
    delta.verdict if delta.interval.contains_zero else f"**{delta.verdict}**"
  )
  return shown if delta.by_seeds else f"{shown}, by one seed"


def _limits(study: Study, families: Sequence[Family]) -> Iterator[str]:
  """Says what the numbers do not show."""
  deltas = [delta for family in families for delta in family.deltas]
  single = sum(delta.by_seeds is None for delta in deltas)
  if deltas:
    yield (
      f"{len(deltas)} intervals of 95 % stand here, not corrected for their"
      f" number: some {round(len(deltas) / 20)} exclude 0 by chance if nothing"
      " differs."
    )
  if single:
    yield (
      f"In {single} of them a side has one seed: they are of these very runs,"
      " and another seed may turn them."
    )
  rows = [row for family in families for row in family.rows]
  if not any(scores[MACRO] for r in rows for scores in r["scores"].values()):
    yield (
      "No official macro-average is printed: no row has BLiMP, its supplement,"
      " EWoK and GLUE's eleven scores, all of them in full."
    )
  yield (
    f"Pairs are scored as `--pipeline={study.pipeline}`, published ones by the"
    " pipelines of their years. Fine-tuned scores have no interval, so no claim"
    " is made."
  )


# ---------------------------------------------------------------- the tables


def _scores(study: Study, family: Family) -> Iterator[Table]:
  modes = dict.fromkeys(mode for r in family.rows for mode in r["scores"])
  tasks = _tasks(family.tunings)
  columns = {
    "row": lambda r: r["title"],
    "curriculum": lambda r: f"`{r['curriculum']}`",
    "seeds": lambda r: str(r["at_end"]),
  }
  for task in [benchmark.name for benchmark in BENCHMARKS]:
    columns |= {f"{task}, {m}": _score_in(task, m) for m in modes}
  count = f" ({len(tasks)} of {len(glue.SCORES)})"
  name = "GLUE" + (count if len(tasks) < len(glue.SCORES) else "")
  for attention in dict.fromkeys(t.attention for t in family.tunings):
    columns[f"{name}, {attention}"] = _glue_in(family.tunings, tasks, attention)
  for mode in modes:
    if any(r["scores"].get(mode, {}).get(MACRO) for r in family.rows):
      columns[f"{MACRO}, {mode}"] = _score_in(MACRO, mode)
  note = _sizes(r for row in family.rows for r in study.runs[row["variant"]])
  note += f" GLUE: mean of {', '.join(tasks)}." if tasks else ""
  yield Table("rows", family.rows, columns, family.name, note)


def _score_in(task: str, mode: str) -> Callable[[Mapping], str | None]:
  """Returns the column of a task's scores in a mode."""
  return lambda row: percent(row["scores"].get(mode, {}).get(task))


def _glue_in(tunings, tasks, attention) -> Callable[[Mapping], str | None]:
  """Returns the column of GLUE's means with an attention."""
  found = {t.variant: t for t in tunings if t.attention == attention}

  def cell(row: Mapping) -> str | None:
    tuning = found.get(row["variant"])
    if tuning is None or tuning.mean is None:
      return None
    fewer = len(tuning.tasks) < len(tasks)
    of = f" (of {', '.join(tuning.tasks)})" if fewer else ""
    return f"{percent(tuning.mean)}{of}"

  return cell


def _sizes(runs: Iterator[TrainedRun]) -> str:
  sizes = dict.fromkeys(
    f"{units.quantity(run.summary['parameters'])} parameters,"
    f" {run.summary['steps']:,} steps of {run.config['train']['batch_size']}"
    " rows"
    for run in runs
    if run.summary is not None
  )
  return "; ".join(sizes) + "." if sizes else "No run is at its end."


def _published() -> Table:
  def column(index: int) -> Callable[[Sequence], str | None]:
    return lambda row: row[index] and f"{row[index]:.1f}"

  numbers = [*(benchmark.name for benchmark in BENCHMARKS), "GLUE", MACRO]
  columns = {"published": lambda row: row[0]}
  columns |= {name: column(i) for i, name in enumerate(numbers, start=1)}
  columns["source"] = lambda row: row[-1]
  return Table("published", PUBLISHED, columns, "Published", _PUBLISHED)


def _at_switches(study: Study, family: Family) -> Iterator[Table]:
  yield Table(
    "switches",
    family.switches,
    {
      "row": lambda s: study.variants[s.variant].title,
      "switch": lambda s: f"{s.phases} after {s.step:,}",
      "loss of": lambda s: f"{s.kind}, {'left' if s.left else 'taken up'}",
      "best before": lambda s: nats(s.mean("best")),
      "at the switch": lambda s: nats(s.mean("at")),
      "at the end of the phase": lambda s: nats(s.mean("end")),
      "forgotten by": lambda s: nats(s.mean("change"), "+") if s.left else "",
      "trained again": lambda s: nats(s.mean("again")) if s.left else "",
    },
    f"{family.name}, switches",
    most=_MOST_SWITCHES,
  )
  yield Table(
    "forgetting",
    switches.forgetting(family.switches),
    {
      "row": lambda f: study.variants[f.variant].title,
      "forgets": lambda f: _times(f.changes, lambda change: change > 0),
      "by (nats)": lambda f: _range(f.changes),
      "gets back": lambda f: _times(f.gaps, lambda gap: gap <= 0),
      "over its best before (nats)": lambda f: _range(f.gaps),
    },
  )


def _times(values: Sequence[float], holds: Callable[[float], bool]) -> str:
  count, of = sum(map(holds, values)), len(values)
  verdict = {0: "no", of: "yes"}.get(count, "sometimes")
  return f"{verdict}, {count} of {of} times" if of else None


def _range(values: Sequence[float]) -> str | None:
  if not values:
    return None
  ends = dict.fromkeys(nats(end, "+") for end in (min(values), max(values)))
  return " to ".join(ends)


def _tuned(study: Study, family: Family) -> Iterator[Table | list[str]]:
  if not family.tunings:
    return
  tasks = _tasks(family.tunings)
  results = {
    task: result
    for (_, task, _), by_seed in study.results.items()
    for result in by_seed.values()
  }
  one = {task: Mean({}, results[task].majority, None) for task in tasks}
  records = [Tuning(ONE_CLASS, "", one), *family.tunings]
  columns = {
    "row": lambda t: _title(study, t.variant),
    "attention": lambda t: t.attention,
  }
  for task in tasks:
    title = f"{task} ({results[task].metric})"
    columns[title] = lambda t, task=task: percent(t.scores.get(task))
  yield Table("fine_tuned", records, columns, f"{family.name}, fine-tuned")
  collapses = [
    f"{_title(study, t.variant, t.attention)}: {run}"
    for t in family.tunings
    for run in t.collapsed
  ]
  yield "Collapsed, all but one answer:" if collapses else "None collapsed."
  yield collapses


# --------------------------------------------------------------- the pictures


def _curves(study: Study, family: Family) -> Iterator[Figure]:
  runs = {
    study.variants[r["variant"]].title: switches.same_curriculum(
      [run for run in study.runs[r["variant"]] if run.records]
    )
    for r in family.rows
  }
  runs = {title: found for title, found in runs.items() if found}
  name = family.name.lower().replace("-", "_")
  if runs:
    yield Figure(
      f"curves_{name}.png", lambda path: plots.curves(family.name, runs, path)
    )


def _phenomena(study: Study, family: Family) -> Iterator[Table | Figure]:
  yield Table("phenomena", family.phenomena)
  by_variant = collections.defaultdict(lambda: collections.defaultdict(list))
  for d in family.phenomena:
    against = _title(study, d.pair.control, d.pair.control_mode)
    by_variant[d.pair.variant][f"against {against}"].append(d)
  for name, deltas in by_variant.items():
    title = f"{study.variants[name].title}: BLiMP by phenomenon"
    yield Figure(
      f"phenomena_{name}.png",
      functools.partial(plots.differences, title, deltas),
    )


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
  absent = [
    task for task in glue.SCORES if task not in {t for t, _ in run.tuned}
  ]
  if absent:
    some = len(absent) < len(glue.SCORES)
    yield f"not fine-tuned on {', '.join(absent) if some else 'anything'}"
  if not all(tuned.complete for tuned in run.tuned.values()):
    yield "fine-tuned on a part of a training set (--limit)"


def _lacks_pairs(
  study: Study, run: TrainedRun, benchmark, mode
) -> Iterator[str]:
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
