"""The report of rows that are compared with their controls, as a value.

AntLM's table (arXiv 2412.03275) is one. A row's controls are those that it is
claimed to be better than (`Row.against`), each of one objective; a control is
scored as it was trained: causally, or with masks.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence

from antlm_jax.evals.design import CAUSAL
from antlm_jax.evals.finetuning import glue
from antlm_jax.evals.finetuning.trial import ATTENTIONS
from antlm_jax.evals.reporting import (
  claims,
  compare,
  render,
  sections,
  statistics,
)
from antlm_jax.evals.reporting.claims import Claim, Contrast
from antlm_jax.evals.reporting.compare import Mean, Pair, Study
from antlm_jax.evals.reporting.render import Cell, Section, Table, percent
from antlm_jax.evals.reporting.runs import BENCHMARKS, BLIMP, ODDS, TrainedRun
from antlm_jax.evals.reporting.sections import Family, difference

MACRO = "macro-average"
_PAIRS = [benchmark.name for benchmark in BENCHMARKS]
_COMPARED = [*_PAIRS, BLIMP.name + ODDS]

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
_CLAIMS = """\
Each in what the control was trained in. Held-out losses come first, as they
tell most with few seeds, at the end of the run and at their lowest; where pairs
are scored, then BLiMP's log-odds, then accuracies. Losses are compared seed by
seed (Student's t), pairs by items and seeds. *Confirmed* or *contradicted* is
what has an interval without zero."""
_HELD_OUT = """\
In nats, mean ± standard deviation over seeds: at the end of the run, and at its
lowest, which one would rather keep. In brackets: with an attention that the row
was not trained with."""
_SHOWS = """\
Both sides scored alike; in points, log-odds in nats, with 95 % intervals."""
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
Rows of several objectives minus rows of one, in points; log-odds in nats. A row
of one objective is scored as it was trained. Every difference is paired: both
sides have the same items, resampled within their UID. Intervals by items are of
these very runs; those by items and seeds are of other seeds, too, and decide
where they are."""
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


def report(study: Study, absent: Sequence[str]) -> render.Report:
  """Returns the report; what `absent` says stands with what is missing."""
  families = []
  for name, variants in study.families.items():
    pairs = list(_pairs(study, variants))
    deltas = [d for task in _COMPARED for d in study.differences(task, pairs)]
    families.append(Family(name, variants, deltas))
  absent = [*missing(study), *absent]

  def every(parts: Callable[[Study, Family], Iterator]) -> list:
    return [part for family in families for part in parts(study, family)]

  parts = [
    Section("Claims", every(_claims), _CLAIMS, "None that can be looked at."),
    Section("Held-out losses", every(sections.held_out), _HELD_OUT),
    *(_evaluated(study, every) if study.results else ()),
    Section("Learning curves", every(sections.curves)),
    Section(
      "At every switch",
      every(sections.at_switches),
      _SWITCHES,
      "No row with a switch is at its end yet.",
    ),
    Section("What is not there", [absent], otherwise="Nothing."),
  ]
  about = {"pipeline": study.pipeline, "missing": absent}
  return render.Report(study.name, parts, about)


def _evaluated(study: Study, every: Callable) -> Iterator[Section]:
  """Yields what stands on evaluations."""
  phenomena = functools.partial(sections.by_part, task=BLIMP.name)
  odds = functools.partial(sections.by_part, task=BLIMP.name + ODDS)
  tuned = functools.partial(sections.tuned, tasks=glue.SCORES)
  yield Section("What it shows", every(_shows), _SHOWS, _NO_DIFFERENCE)
  yield Section("What it does not show", [], _LIMITS, "")
  yield Section("Scores", [*every(_scores), _published(study)], _SCORES)
  yield Section("Differences", every(_differences), _DIFFERENCES)
  yield Section("By phenomenon", every(phenomena) + every(odds))
  yield Section("Fine-tuning", every(tuned), _TUNING)


def _pairs(study: Study, variants: Sequence[str]) -> Iterator[Pair]:
  """Yields each mixed variant, in both modes, with every control."""
  for name in variants:
    for mode in study.variants[name].modes:
      for control in _controls(study, name):
        # All runs of a variant have one curriculum.
        own = study.runs[control][0].attention
        yield Pair((name, mode), (control, study.variants[control].mode(own)))


def _controls(study: Study, name: str) -> list[str]:
  return [c for c in study.variants[name].against if c in study.runs]


# -------------------------------------------------------------------- claims


def _claims(study: Study, family: Family) -> Iterator:
  found = sections.losses(study, family.variants)
  made = []
  for name in family.variants:
    for control in _controls(study, name):
      run = study.runs[control][0]
      kind = run.names[run.objectives[0]]
      contrasts = [
        *_of_losses(study, found, name, control, kind),
        *_of_pairs(study, family, name, control, run.attention),
      ]
      text = f"{study.title(name)} is better than {study.title(control)}"
      made.append(Claim(text, family.name, contrasts))
  yield from claims.parts(made, family.name, study.confidence)


def _of_losses(study, found, name, control, kind) -> Iterator[Contrast]:
  sides = name, control
  lowest = [compare.mean(found.get((s, kind, "lowest"), {})) for s in sides]
  above = [
    study.title(side)
    for side, loss in zip(sides, lowest, strict=True)
    if loss and loss.mean >= sections.entropy(study, [side]).mean
  ]
  for when in ("end", "lowest"):
    a, b = (found.get((side, kind, when), {}) for side in sides)
    apart = [a[seed] - b[seed] for seed in a if seed in b]
    yield Contrast(
      f"held-out {kind} loss, {when} (nats)",
      None,
      statistics.paired(a, b, study.confidence),
      sign=-1,
      text="{:+.3f}".format,
      here=sum(apart) / len(apart) if apart else None,
      but=f"{above[0]} knows frequencies at most" if above else "",
    )


def _of_pairs(study, family, name, control, mode) -> Iterator[Contrast]:
  mode = study.variants[control].mode(mode)
  for task in (BLIMP.name + ODDS, *_PAIRS):
    for delta in family.deltas:
      side = name, study.variants[name].mode(mode)
      if delta.task == task and delta.pair == Pair(side, (control, mode)):
        scale, unit = (1, "nats") if task.endswith(ODDS) else (100, "points")
        interval = delta.by_seeds and delta.by_seeds * scale
        here = delta.by_items.estimate * scale
        yield Contrast(f"{task}, {mode} ({unit})", None, interval, here=here)


# --------------------------------------------------------------- differences


def _shows(study: Study, family: Family) -> Iterator[Table]:
  alike = [delta for delta in family.deltas if delta.pair.alike]
  yield Table("alike", [difference(study, d) for d in alike], family.name)


def _differences(study: Study, family: Family) -> Iterator[Table]:
  for task in _COMPARED:
    rows = [difference(study, d) for d in family.deltas if d.task == task]
    yield Table("differences", rows, f"{family.name}, {task}")


# -------------------------------------------------------------------- scores


def _scores(study: Study, family: Family) -> Iterator[Table]:
  rows = [
    _scored(study, name, mode)
    for name in family.variants
    for mode in study.variants[name].modes
  ]
  # An official number that nobody has is not even a column.
  if not any(row[MACRO].value for row in rows):
    rows = [{k: v for k, v in row.items() if k != MACRO} for row in rows]
  note = sections.sizes(study, family.variants)
  yield Table("scores", rows, family.name, note)


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
  # Its own comes last, and so takes the other one's place.
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


def _lacks(study: Study, run: TrainedRun) -> Iterator[str]:
  """Yields what one run lacks."""
  if run.summary is None:
    yield "training is not at its end"
  if not study.results:
    yield "neither scored on pairs nor fine-tuned"
    return
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
