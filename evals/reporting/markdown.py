"""The report in words and tables, as Markdown."""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence

from antlm_jax import units
from evals.finetuning import glue
from evals.reporting.compare import (
  Delta,
  Mean,
  Moment,
  Numbers,
  Study,
  Switch,
  Tuning,
)
from evals.reporting.runs import BENCHMARKS, READINGS, Run
from evals.reporting.statistics import Interval

_MOST_SWITCHES = 12  # lines of a row, in the text; table.json has all

# Name; BLiMP, supplement, EWoK, GLUE, macro-average in percent; source.
PUBLISHED = (
  ("BabyLlama, 2024 baseline", 69.8, 59.5, 50.7, 63.3, 60.8, "pipeline"),
  ("LTG-BERT, 2024 baseline", 60.6, 60.8, 48.9, 60.3, 57.7, "pipeline"),
  ("LTG-BERT, 2023", 80.6, 69.8, None, 74.5, None, "GPT-BERT"),
  ("ELC-BERT, 2023", 80.5, 67.9, 51.0, 75.3, None, "GPT-BERT"),
  ("GPT-BERT, 2024", 81.2, 69.4, 54.6, 76.5, None, "GPT-BERT"),
)
_PUBLISHED = """\
All were trained on 10M words (GPT-BERT's are a third BabyLM). `pipeline` is the
README of babylm/evaluation-pipeline-2024: some 20 epochs, few for LTG-BERT, as
it says. `GPT-BERT` is Table 1 of arXiv 2410.24159, with BLiMP at each model's
best temperature. AntLM's own table could not be read; its abstract (arXiv
2412.03275) gives +1.0 points of macro-average over BabyLlama and +2.2 over
LTG-BERT at equal epochs. Data, scale and scoring of the rows above are others:
beside these numbers they say nothing about a method."""
_DIFFERENCES = """\
Rows of several objectives minus rows of one, in points. A row of one objective
is read as it was trained. Every difference is paired: both sides have the same
items, resampled within their UID. Intervals by items are of these very runs;
those by items and seeds are of other seeds, too, and decide where they are."""
_SWITCHES = """\
Held-out losses in nats, means over seeds. *Forgotten by* is what the phase
after the switch adds to the loss of the objective that is left; *trained again*
is its loss at the end of the next phase that trains it."""
_TUNING = """\
In percent (MCC times 100), each at its best learning rate, mean ± standard
deviation over training seeds. BabyLM's validation sets are also its test sets:
rate and epoch are chosen on what is reported."""


def markdown(
  numbers: Numbers, pictures: Sequence[str], absent: Sequence[str]
) -> str:
  """Writes the report.

  Args:
    numbers: What it says.
    pictures: Names of the pictures beside it.
    absent: What is not there, a line each.
  """
  parts = ["# The AntLM table", "## What it shows", *_shows(numbers)]
  parts += ["## What it does not show", _list(_limits(numbers))]
  parts += ["## Scores", *_scores(numbers)]
  parts += ["### Published", _published(), _PUBLISHED]
  parts += ["## Differences", _DIFFERENCES, *_differences(numbers)]
  parts += ["## Learning curves", _pictures(pictures, "curves_")]
  parts += ["## By phenomenon", _pictures(pictures, "phenomena_")]
  parts += ["## At every switch", _SWITCHES, *_at_switches(numbers)]
  parts += ["## Fine-tuning", _TUNING, *_tuned(numbers)]
  parts += ["## What is not there", _list(absent) or "Nothing."]
  return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
  """Lays out a table, the first column to the left."""
  rule = ["---"] + ["---:"] * (len(head) - 1)
  return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def _list(lines: Iterable[str]) -> str:
  return "\n".join(f"- {line}" for line in lines)


def _pictures(names: Sequence[str], prefix: str) -> str:
  names = [name for name in names if name.startswith(prefix)]
  return "\n".join(f"![{name}]({name})" for name in names) or "None yet."


def _percent(found: Mean | None) -> str:
  if found is None:
    return "-"
  if found.std is None:
    return f"{100 * found.mean:.1f}"
  return f"{100 * found.mean:.1f} ± {100 * found.std:.1f}"


def _points(interval: Interval | None) -> str:
  if interval is None:
    return "-"
  return f"{100 * interval.low:+.1f} to {100 * interval.high:+.1f}"


def _nats(value: float | None) -> str:
  return "-" if value is None else f"{value:.3f}"


def _side(study: Study, name: str, how: str) -> str:
  return f"{study.rows[name].title} ({how})"


# ---------------------------------------------------------------- the summary


def _shows(numbers: Numbers) -> Iterator[str]:
  """Says what the numbers show, and nothing without its interval."""
  study = numbers.study
  for family in study.families:
    lines = [*_findings(study, numbers.deltas[family])]
    lines += _sentences(study, numbers.switches[family])
    if lines:
      yield (
        f"**{family}**: differences in points [95 % interval], both sides read"
        " alike."
      )
      yield _list(lines)
  if not any(numbers.deltas.values()):
    yield (
      "No difference yet: that takes a row of several objectives and one of"
      " one, of the same encoder and scored on the same items."
    )


def _findings(study: Study, deltas: Sequence[Delta]) -> Iterator[str]:
  """Says what the intervals show, a line for each benchmark and control."""
  groups = collections.defaultdict(list)
  for delta in deltas:
    if delta.reading == delta.control_reading:
      groups[delta.benchmark, delta.control].append(delta)
  for (benchmark, control), those in groups.items():
    against = f"{benchmark}, {those[0].reading}, against"
    yield f"{against} {study.rows[control].title}: {_verdicts(study, those)}."


def _verdicts(study: Study, deltas: Sequence[Delta]) -> str:
  """Lists the rows by what may be said of them."""
  parts = []
  for single in (False, True):
    for verdict in ("above", "below", "contains 0"):
      found = [
        _finding(study, delta)
        for delta in deltas
        if delta.verdict == verdict and (delta.by_seeds is None) == single
      ]
      if found:
        note = ", by one seed" * single
        what = verdict.replace("contains", "interval contains")
        parts.append(f"*{what}{note}*: {', '.join(found)}")
  return "; ".join(parts)


def _finding(study: Study, delta: Delta) -> str:
  points = f"{100 * delta.interval.estimate:+.1f}"
  return f"{study.rows[delta.row].title} {points} [{_points(delta.interval)}]"


def _limits(numbers: Numbers) -> Iterator[str]:
  """Says what the numbers do not show."""
  deltas = [d for found in numbers.deltas.values() for d in found]
  if deltas:
    yield (
      f"{len(deltas)} intervals of 95 % stand here, not corrected for their"
      f" number: some {round(len(deltas) / 20)} exclude 0 by chance if nothing"
      " differs."
    )
  single = [delta for delta in deltas if delta.by_seeds is None]
  if single:
    names = ", ".join(dict.fromkeys(_one_seed(numbers.study, single)))
    yield (
      f"In {len(single)} of them a side has one seed ({names}): they are of"
      " these very runs, and another seed may turn them."
    )
  yield _macro_note(numbers)
  scoring = f"Pairs are scored as `--pipeline={numbers.study.pipeline}`"
  if numbers.study.pipeline != "2024":
    scoring += "; the published numbers are by the pipelines of their years"
  yield f"{scoring}. Fine-tuned scores have no interval, so no claim is made."


def _one_seed(study: Study, deltas: Sequence[Delta]) -> Iterator[str]:
  for delta in deltas:
    sides = zip((delta.row, delta.control), delta.seeds, strict=True)
    for name in (name for name, seeds in sides if seeds == 1):
      yield _title(study, name)


def _macro_note(numbers: Numbers) -> str:
  if numbers.macros:
    return (
      "The macro-average, BabyLM 2024's unweighted mean of BLiMP, its"
      " supplement, EWoK and GLUE, stands only where all four are complete."
    )
  found = _tasks(t for tunings in numbers.tunings.values() for t in tunings)
  absent = [task for task in glue.SCORES if task not in found]
  why = f"; of GLUE no row has {', '.join(absent)}" if absent else ""
  return (
    "No official macro-average is printed: no row has BLiMP, its supplement,"
    f" EWoK and GLUE's eleven scores, all of them in full{why}."
  )


# ----------------------------------------------------------------- the scores


def _scores(numbers: Numbers) -> Iterator[str]:
  study = numbers.study
  shifted = [
    _title(study, name)
    for name, row in study.rows.items()
    if row.masked == "mntp"
  ]
  note = f" ({', '.join(shifted)}: read one position before)" if shifted else ""
  yield (
    "In percent, mean ± standard deviation over seeds. `causal` reads left to"
    f" right, `masked` with one token masked at a time{note}."
  )
  for family in study.families:
    if study.of_family(family):
      yield f"### {family}"
      yield _scale(study, family)
      yield _score_table(numbers, family)


def _scale(study: Study, family: str) -> str:
  """Says how large an encoder's runs are."""
  runs = [run for name in study.of_family(family) for run in study.runs[name]]
  done = [run for run in runs if run.summary is not None]
  sizes = dict.fromkeys(_size(run) for run in done)
  return "; ".join(sizes) + "." if sizes else "No run is at its end."


def _size(run: Run) -> str:
  parameters = units.quantity(run.summary["parameters"])
  rows = run.config["train"]["batch_size"]
  return (
    f"{parameters} parameters, {run.summary['steps']:,} steps of {rows} rows"
  )


def _score_table(numbers: Numbers, family: str) -> str:
  study, macros = numbers.study, numbers.macros
  names = study.of_family(family)
  tunings = {(t.row, t.attention): t for t in numbers.tunings[family]}
  attentions = list(dict.fromkeys(attention for _, attention in tunings))
  tasks = _tasks(tunings.values())
  official = [r for r in READINGS if any((name, r) in macros for name in names)]
  head = ["row", "curriculum", "seeds"]
  head += [f"{b.name}, {reading}" for b in BENCHMARKS for reading in READINGS]
  head += [f"{_glue(tasks)}, {attention}" for attention in attentions]
  head += [f"macro-average, {reading}" for reading in official]
  lines = []
  for name in names:
    done = sum(run.summary is not None for run in study.runs[name])
    line = [study.rows[name].title, f"`{study.runs[name][0].text}`", str(done)]
    line += [
      _percent(study.score(name, benchmark, reading))
      for benchmark in BENCHMARKS
      for reading in READINGS
    ]
    line += [_glue_mean(tunings.get((name, a)), tasks) for a in attentions]
    line += [_percent(macros.get((name, reading))) for reading in official]
    lines.append(line)
  table = _table(head, lines)
  return f"{table}\n\nGLUE: mean of {', '.join(tasks)}." if tasks else table


def _tasks(tunings: Iterable[Tuning]) -> list[str]:
  there = {task for tuning in tunings for task in tuning.scores}
  return [task for task in glue.SCORES if task in there]


def _glue(tasks: Sequence[str]) -> str:
  if len(tasks) == len(glue.SCORES):
    return "GLUE"
  return f"GLUE ({len(tasks)} of {len(glue.SCORES)})"


def _glue_mean(tuning: Tuning | None, tasks: Sequence[str]) -> str:
  if tuning is None or tuning.mean is None:
    return "-"
  if len(tuning.tasks) == len(tasks):
    return _percent(tuning.mean)
  return f"{_percent(tuning.mean)} (of {', '.join(tuning.tasks)})"


def _published() -> str:
  head = ["published", *(benchmark.name for benchmark in BENCHMARKS)]
  lines = [
    [name, *("-" if n is None else f"{n:.1f}" for n in numbers), source]
    for name, *numbers, source in PUBLISHED
  ]
  return _table([*head, "GLUE", "macro-average", "source"], lines)


# ---------------------------------------------------------------- differences


def _differences(numbers: Numbers) -> Iterator[str]:
  for family, deltas in numbers.deltas.items():
    for benchmark in BENCHMARKS:
      those = [d for d in deltas if d.benchmark == benchmark.name]
      if those:
        yield f"### {family}, {benchmark.name}"
        yield _delta_table(numbers.study, those)
  if not any(numbers.deltas.values()):
    yield "None yet."


def _delta_table(study: Study, deltas: Sequence[Delta]) -> str:
  head = ["row", "against", "seeds", "points", "95 % by items"]
  head += ["95 % by items and seeds", "interval"]
  lines = (
    [
      _side(study, d.row, d.reading),
      _side(study, d.control, d.control_reading),
      f"{d.seeds[0]} and {d.seeds[1]}",
      f"{100 * d.by_items.estimate:+.1f}",
      _points(d.by_items),
      _points(d.by_seeds),
      d.verdict if d.interval.contains_zero else f"**{d.verdict}**",
    ]
    for d in deltas
  )
  return _table(head, lines)


# ------------------------------------------------------------------- switches


def _at_switches(numbers: Numbers) -> Iterator[str]:
  for family, switches in numbers.switches.items():
    if switches:
      yield f"### {family}, switches"
      yield _switch_table(numbers.study, switches)
      yield _list(_sentences(numbers.study, switches))
  if not any(numbers.switches.values()):
    yield "No row with a switch is at its end yet."


def _switch_table(study: Study, switches: Sequence[Switch]) -> str:
  head = ["row", "switch", "loss of", "best before", "at the switch"]
  head += ["at the end of the phase", "forgotten by", "trained again"]
  lines = []
  for name in dict.fromkeys(switch.row for switch in switches):
    shown = [_switch(study, s) for s in switches if s.row == name]
    if len(shown) > _MOST_SWITCHES:
      half = _MOST_SWITCHES // 2
      shown[half:-half] = [["...", *[""] * (len(head) - 1)]]
    lines += shown
  return _table(head, lines)


def _switch(study: Study, switch: Switch) -> list[str]:
  forgotten = f"{switch.mean('change'):+.3f}" if switch.left else ""
  return [
    study.rows[switch.row].title,
    f"{switch.phases} after {switch.step:,}",
    f"{switch.kind}, {'left' if switch.left else 'taken up'}",
    _nats(switch.mean("best")),
    _nats(switch.mean("at")),
    _nats(switch.mean("end")),
    forgotten,
    _nats(switch.mean("again")) if switch.left else "",
  ]


def _sentences(study: Study, switches: Sequence[Switch]) -> Iterator[str]:
  """Says of every row whether what it leaves is forgotten, and got back."""
  left = collections.defaultdict(list)
  for switch in switches:
    if switch.left:
      left[switch.row] += switch.moments.values()
  for name, moments in left.items():
    text = _forgets(moments)
    if any(moment.change > 0 for moment in moments):
      text += _regains(moments)
    yield f"{study.rows[name].title}: {text}."


def _forgets(moments: Sequence[Moment]) -> str:
  worse = sum(moment.change > 0 for moment in moments)
  verdict = {0: "not forgotten", len(moments): "forgotten"}
  return (
    f"what it leaves is {verdict.get(worse, 'sometimes forgotten')}: its"
    f" held-out loss is higher at the end of the phase after {worse} of"
    f" {len(moments)} times, over seeds and switches"
    f" ({_range(moment.change for moment in moments)})"
  )


def _regains(moments: Sequence[Moment]) -> str:
  again = [moment for moment in moments if moment.again is not None]
  if not again:
    return "; none of it is trained again"
  above = [moment.again - moment.best for moment in again]
  back = sum(gap <= 0 for gap in above)
  verdict = {0: "not got back", len(again): "got back"}
  return (
    f"; trained again, it is {verdict.get(back, 'sometimes got back')}: at its"
    f" best before or lower {back} of {len(again)} times ({_range(above)})"
  )


def _range(values: Iterable[float]) -> str:
  shown = [f"{value:+.3f}" for value in sorted(values)]
  ends = dict.fromkeys((shown[0], shown[-1]))
  return f"{' to '.join(ends)} nats"


# ---------------------------------------------------------------- fine-tuning


def _tuned(numbers: Numbers) -> Iterator[str]:
  for family, tunings in numbers.tunings.items():
    if tunings:
      collapses = _collapses(numbers.study, tunings)
      yield f"### {family}, fine-tuned"
      yield _tuning_table(numbers, tunings)
      yield "Collapsed, all but one answer:" if collapses else "None collapsed."
      yield _list(collapses)
  if not any(numbers.tunings.values()):
    yield "None yet."


def _tuning_table(numbers: Numbers, tunings: Sequence[Tuning]) -> str:
  tasks, majorities = _tasks(tunings), numbers.study.majorities
  metrics = [f"{task} ({majorities[task][0]})" for task in tasks]
  one = [f"{100 * majorities[task][1]:.1f}" for task in tasks]
  lines = [["always one class", "", *one]]
  for tuning in tunings:
    scores = [_percent(tuning.scores.get(task)) for task in tasks]
    title = numbers.study.rows[tuning.row].title
    lines.append([title, tuning.attention, *scores])
  return _table(["row", "attention", *metrics], lines)


def _collapses(study: Study, tunings: Sequence[Tuning]) -> list[str]:
  return [
    f"{_side(study, tuning.row, tuning.attention)}: {run}"
    for tuning in tunings
    for run in tuning.collapsed
  ]


# ----------------------------------------------------------- what is not there


def missing(study: Study) -> list[str]:
  """Names what the report lacks, and of which rows."""
  lacking = collections.defaultdict(dict)
  every = {_title(study, name): [run.seed for run in runs]
           for name, runs in study.runs.items()}  # fmt: skip
  for name in study.rows:
    if name not in study.runs:
      lacking["not trained"][_title(study, name)] = []
    for run in study.runs.get(name, ()):
      for what in _lacks(study, run):
        seeds = lacking[what].setdefault(_title(study, name), [])
        seeds.append(run.seed)
  return [
    f"{what}: {'every run' if rows == every else _runs(rows)}"
    for what, rows in lacking.items()
  ]


def _title(study: Study, name: str) -> str:
  return f"{study.rows[name].family} {study.rows[name].title}"


def _runs(rows: Mapping[str, Sequence[str]]) -> str:
  return ", ".join(
    f"{title} (seed {', '.join(seeds)})" if seeds else title
    for title, seeds in rows.items()
  )


def _lacks(study: Study, run: Run) -> Iterator[str]:
  """Says what one run lacks."""
  if run.summary is None:
    yield "training is not at its end"
  for benchmark in BENCHMARKS:
    for reading in READINGS:
      yield from _lacks_scores(study, run, benchmark, reading)
  there = {task for tuned in run.tuned.values() for task in tuned.scores}
  absent = [task for task in glue.SCORES if task not in there]
  if absent:
    yield f"not fine-tuned on {', '.join(absent) if there else 'anything'}"
  if not all(tuned.full for tuned in run.tuned.values()):
    yield "fine-tuned on a part of a training set (--limit)"


def _lacks_scores(study: Study, run: Run, benchmark, reading) -> Iterator[str]:
  what = f"{benchmark.name}, {reading}"
  found = study.zero_shot(run.row, benchmark, reading).get(run.seed)
  if found is None:
    yield f"{what}: not evaluated"
    return
  step, pairs = found.step, found.summary["pairs"]
  if run.summary and step != run.summary["steps"]:
    yield f"{what}: evaluated at step {step:,}, before the end"
  if pairs != benchmark.pairs:
    yield f"{what}: {pairs:,} pairs of {benchmark.pairs:,}"
  if found.items is None:
    yield f"{what}: no items.jsonl, so no interval"
  elif (run.row, run.seed, reading) in study.common[benchmark.folder].others:
    yield f"{what}: other items than most, so not compared"
