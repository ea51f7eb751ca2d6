"""Parts of a report that any study may have: tables and figures of its runs.

Each takes a study and a family of its variants, and yields what a section
shows of them.
"""

import collections
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from antlm_jax import units
from antlm_jax.evals.finetuning.trial import ATTENTIONS
from antlm_jax.evals.reporting import plots, switches
from antlm_jax.evals.reporting.compare import Delta, Mean, Study, mean
from antlm_jax.evals.reporting.render import (
  Cell,
  Figure,
  Table,
  nats,
  nats_apart,
  percent,
  points,
)
from antlm_jax.evals.reporting.runs import ODDS
from antlm_jax.evals.reporting.switches import Switch

_MOST_SWITCHES = 12  # of a variant, in the text; the JSON has all


class Family(NamedTuple):
  """Variants that have runs, and how they differ."""

  name: str
  variants: Sequence[str]
  deltas: Sequence[Delta]


# --------------------------------------------------------------- differences


def difference(study: Study, delta: Delta) -> dict[str, Cell | str]:
  """Returns a table's row that says how two sides differ."""
  verdict = delta.verdict
  shown = verdict if delta.interval.contains_zero else f"**{verdict}**"
  shown += "" if delta.by_seeds else ", by one seed"
  seeds = "{} and {}".format(*delta.seeds)
  row, against = (study.title(*side) for side in delta.pair)
  write = nats_apart if delta.task.endswith(ODDS) else points
  return {
    "row": row,
    "against": against,
    "on": delta.part or delta.task,
    "seeds": Cell(delta.seeds, seeds),
    "difference": write(delta.by_items.estimate),
    "95 % by items": write(delta.by_items),
    "95 % by items and seeds": write(delta.by_seeds),
    "interval": Cell(verdict, shown),
  }


def by_part(
  study: Study, family: Family, task: str
) -> Iterator[Table | Figure]:
  """Compares those scored alike on each part of a task, a figure for each."""
  pairs = [d.pair for d in family.deltas if d.task == task and d.pair.alike]
  deltas = study.differences(task, pairs, by_part=True)
  rows = [difference(study, delta) for delta in deltas]
  yield Table("parts", rows, f"{family.name}, {task}", most=0)
  panels = collections.defaultdict(lambda: collections.defaultdict(list))
  for delta in deltas:
    against = f"against {study.title(*delta.pair.control)}"
    panels[delta.pair.variant[0]][against].append(delta)
  for name, by_control in panels.items():
    title = f"{study.title(name)}: {task} by phenomenon"
    odds = task.endswith(ODDS)
    draw = functools.partial(
      plots.differences, title, by_control, unit="nats" if odds else "points"
    )
    yield Figure(f"phenomena_{name}{'_odds' * odds}.png", draw)


# -------------------------------------------------------------------- scores


def sizes(study: Study, names: Sequence[str]) -> str:
  """Says how large the models are, and how long they were trained."""
  found = dict.fromkeys(
    f"{units.quantity(run.summary['parameters'])} parameters,"
    f" {run.summary['steps']:,} steps of"
    f" {run.config['train']['batch_size']} rows"
    for name in names
    for run in study.runs[name]
    if run.summary is not None
  )
  return "; ".join(found) + "." if found else "No run is at its end."


def tuned(
  study: Study, family: Family, tasks: Sequence[str]
) -> Iterator[Table | str | list[str]]:
  """Shows fine-tuned scores beside their baseline, and which runs collapsed."""
  found = {  # a task's metric and baseline are the same in all of its results
    task: next(iter(by_seed.values()))
    for (name, task, _), by_seed in study.results.items()
    if name in family.variants and task in tasks
  }
  tasks = [task for task in tasks if task in found]
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


# -------------------------------------------------------------------- losses


def losses(study: Study, names: Sequence[str]) -> dict[tuple, dict[str, float]]:
  """Returns held-out losses in nats, by (variant, kind, when) and then seed.

  When is `end`, or `lowest`: over all that was measured.
  """
  out = collections.defaultdict(dict)
  for name in names:
    for run in switches.ended(study.runs[name]):
      for kind in run.names.values():
        if found := run.held_out(kind):
          out[name, kind, "end"][run.seed] = found[max(found)]
          out[name, kind, "lowest"][run.seed] = min(found.values())
  return dict(out)


def held_out(study: Study, family: Family) -> Iterator[Table]:
  """Shows each objective's held-out loss at the end, and at its lowest."""
  found = losses(study, family.variants)
  heads = list(dict.fromkeys((kind, when) for _, kind, when in found))
  rows = []
  for name in family.variants:
    row, trained = {"row": study.title(name)}, study.runs[name][0].seen
    for kind, when in heads:
      cell = nats(mean(found.get((name, kind, when), {})), spread=True)
      if kind not in trained and cell.text:
        cell = cell._replace(text=f"({cell.text})")
      row[f"{kind}, {when}"] = cell
    rows.append(row)
  note, alone = sizes(study, family.variants), entropy(study, family.variants)
  note += f" Frequencies alone give {alone.mean:.2f} nats." if alone else ""
  yield Table("held_out", rows if heads else [], family.name, note)


def entropy(study: Study, names: Sequence[str]) -> Mean | None:
  """Returns the loss, in nats, of who knows tokens' frequencies alone."""
  runs = [run for name in names for run in switches.ended(study.runs[name])]
  return mean(
    {str(i): r.summary["unigram_entropy"] for i, r in enumerate(runs)}
  )


# -------------------------------------------------------------------- curves


def curves(study: Study, family: Family) -> Iterator[Figure]:
  """Draws the held-out losses of variants whose runs are at their end."""
  runs = {
    study.title(v): [r for r in switches.ended(study.runs[v]) if r.records]
    for v in family.variants
  }
  runs = {title: found for title, found in runs.items() if found}
  name = family.name.lower().replace("-", "_")
  if runs:
    draw = functools.partial(plots.curves, family.name, runs)
    yield Figure(f"curves_{name}.png", draw)


def at_switches(study: Study, family: Family) -> Iterator[Table]:
  """Shows what becomes of objectives at switches, and what is forgotten."""
  found = {v: [*switches.read(study.runs[v])] for v in family.variants}
  rows = [_switch(study, v, switch) for v in found for switch in found[v]]
  yield Table("switches", rows, f"{family.name}, switches", most=_MOST_SWITCHES)
  rows = [_forgetting(study, v, found[v]) for v in found]
  # A variant that leaves nothing has nothing to forget.
  rows = [row for row in rows if row["by (nats)"].value]
  yield Table("forgetting", rows, f"{family.name}, forgetting")


def _switch(study: Study, name: str, switch: Switch) -> dict[str, Cell | str]:
  left = switch.left  # what is taken up was not forgotten
  return {
    "row": study.title(name),
    "switch": f"{switch.phases} after {switch.step:,}",
    "loss of": f"{switch.kind}, {'left' if left else 'taken up'}",
    "best before": nats(switch.mean("best")),
    "at the switch": nats(switch.mean("at")),
    "at the end of the phase": nats(switch.mean("end")),
    "forgotten by": nats(switch.mean("forgotten") if left else None, "+"),
    "trained again": nats(switch.mean("again") if left else None),
  }


def _forgetting(study: Study, name: str, found: Sequence[Switch]) -> dict:
  moments = [m for s in found if s.left for m in s.moments.values()]
  changes = [m.forgotten for m in moments]
  gaps = [m.again - m.best for m in moments if m.again is not None]
  return {
    "row": study.title(name),
    "forgets": _how_often([change > 0 for change in changes]),
    "by (nats)": _range(changes),
    "gets back": _how_often([gap <= 0 for gap in gaps]),
    "over its best before (nats)": _range(gaps),
  }


def _how_often(found: Sequence[bool]) -> str | None:
  word = {0: "no", len(found): "yes"}.get(sum(found), "sometimes")
  return f"{word}: {sum(found)} of {len(found)} times" if found else None


def _range(values: Sequence[float]) -> Cell:
  ends = (min(values), max(values)) if values else ()
  shown = dict.fromkeys(f"{end:+.3f}" for end in ends)
  return Cell(values, " to ".join(shown) or None)
