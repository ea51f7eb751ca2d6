"""Compares trainings: losses, the settings that differ, and the best run.

Runs have labels; the runs of one label differ in their seeds.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flax import traverse_util

from antlm_jax import config as config_lib
from antlm_jax import tables, units
from antlm_jax.data.prepared_folder import Manifest, folders_by_name
from antlm_jax.errors import UserError
from antlm_jax.evals.statistics import Mean, mean_of_seeds
from antlm_jax.evals.studies import branches
from antlm_jax.evals.studies.reporting import plots, render
from antlm_jax.evals.studies.reporting.render import Figure, Row
from antlm_jax.evals.studies.reporting.runs import ALL, TrainedRun
from antlm_jax.runtime import files
from antlm_jax.training.metrics import REPORT

# Runs by label.
_Runs = Mapping[str, Sequence[TrainedRun]]
FOLDER = "comparison"
# The paths of a run's folders and data do not describe it.
_APART = set(config_lib.FREE) | {"seed"}
# Settings that decide which tokens are held out, for all objectives.
_ROWS = "eval.rows"
_FRAMED = "data.framed"
# Settings of an objective that do not change how it is measured: held_out.py.
_NOT_MEASURED = "weight", "frequency_power", "mask_ratio_end"


@dataclasses.dataclass(frozen=True)
class Compared:
  """The runs of a label, which differ in their seeds."""

  label: str
  step: int  # that is compared: the best by `eval.watch`, or the last
  losses: Mapping[str, Mean]  # held out, in nats, by objective
  loss: Mean | None  # that ranks: the mean over the objectives asked for
  folders: tuple[pathlib.Path, ...]
  steps: str  # the least and the greatest step that is compared
  ended: bool
  parameters: int | None  # None before the first run's end
  seconds: float | None  # of all runs; None if one of them is unknown


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
  """Runs compared, the best first, and their table.

  Attributes:
    rows: The runs of each label.
    by: Objectives whose losses rank them.
    table: The rows as text.
    folder: Folder of the report; None if it is not written.
    failed: Runs of a sweep that failed.
    warning: Why the losses do not compare, so that no run is the best; empty
      if they do.
    note: Names of runs without a finite loss, which rank last with the other
      seeds of their line; empty if there are none.
  """

  rows: tuple[Compared, ...]
  by: tuple[str, ...]
  table: str
  folder: pathlib.Path | None = None
  failed: tuple[str, ...] = ()
  warning: str = ""
  note: str = ""

  @property
  def best(self) -> Compared:
    """The runs with the lowest loss."""
    return self.rows[0]

  def __repr__(self) -> str:
    loss = f" ({_mean_with_spread(self.best.loss)})" if self.best.loss else ""
    failed = f", {len(self.failed)} failed" if self.failed else ""
    best = "no best" if self.warning else f"best {self.best.label}{loss}"
    return f"<{len(self.rows)} compared{failed}; {best}>"

  def __str__(self) -> str:
    written = ""
    if self.folder:
      written = f"\nwritten to {files.shown_path(self.folder / 'report.md')}"
    best = self.warning or f"best: {self.best.label}"
    note = self.note and f"\n{self.note}"
    return f"{self.table}\n\n{best}{note}{written}"


def compare_runs(
  title: str,
  runs: _Runs,
  by: Sequence[str] = (),
  folder: pathlib.Path | None = None,
) -> Comparison:
  """Compares runs by the mean of some held-out losses, the lowest first.

  Args:
    title: Title of the report.
    runs: The runs by label.
    by: Logged names of objectives; by default those that every run has trained
      and measured.
    folder: Folder for the report; None for no report.

  Raises:
    UserError: A run has not measured one of the losses.
  """
  # Runs without any loss rank last, and do not influence how others compare.
  measured_runs = [
    run for run in itertools.chain(*runs.values()) if run.loss_names
  ]
  loss_names = _measured_losses(measured_runs)
  ranking_losses = _ranking_losses(measured_runs, loss_names, by)
  # A step that half of the rows chose is compared on the other half.
  chosen = any(_watched_step(run) is not None for run in measured_runs)
  has_halves = all(run.has_halves for run in measured_runs)
  report_half = REPORT if chosen and has_halves else ALL
  compared = [
    _compared(label, runs[label], loss_names, ranking_losses, report_half)
    for label in runs
  ]
  compared.sort(key=lambda x: (not x.loss, not x.ended, x.loss and x.loss.mean))
  table_rows = [
    _table_row(group, loss_names, ranking_losses) for group in compared
  ]
  head, cells = render.report_cells(table_rows, _cell_text)
  lost = [
    label if len(runs[label]) == 1 else run.folder.name
    for label in runs
    for run in runs[label]
    if not _mean_loss([run], ranking_losses, report_half)
  ]
  comparison = Comparison(
    rows=tuple(compared),
    by=tuple(ranking_losses),
    table=tables.text_table(cells, head, "<>"),
    folder=folder,
    warning=_not_comparable(measured_runs, ranking_losses)
    or _not_trained(measured_runs, () if by else ranking_losses)
    or ("" if compared[0].loss else "warning: no line has a finite loss"),
    note=f"no finite loss, so ranked last: {', '.join(lost)}" * bool(lost),
  )
  if folder:
    ranked_runs = {group.label: runs[group.label] for group in compared}
    _write_report(comparison, title, table_rows, ranked_runs, report_half)
  return comparison


def _write_report(
  comparison: Comparison,
  title: str,
  table_rows: Sequence[Row],
  runs: _Runs,
  report_half: str,
) -> None:
  """Writes the report: table, settings and picture of ranked runs."""
  head, cells = render.report_cells(table_rows, _cell_text)
  settings = _setting_differences(runs)
  seeds = {run.config["seed"] for run in itertools.chain(*runs.values())}
  warning = comparison.warning
  paragraphs = (
    f"# {title}",
    *_comparison_notes(comparison.by, report_half),
    *([f"**{warning}.**"] if warning else []),
    *filter(None, [comparison.note]),
    tables.markdown(cells, head),
    "![curves.png](curves.png)",
    "## Settings",
    _settings_table(settings, seeds),
  )
  best = None if warning else comparison.best.label
  render.write_report(
    comparison.folder,
    markdown="\n\n".join(paragraphs) + "\n",
    facts={"by": comparison.by, "best": best},
    tables={"runs": {"": table_rows}, "settings": {"": settings}},
    figures=[_curves(title, runs)],
  )


def _measured_losses(runs: Iterable[TrainedRun]) -> list[str]:
  """Returns the names of all held-out losses that some run has measured."""
  return list(dict.fromkeys(name for run in runs for name in run.loss_names))


def _ranking_losses(
  runs: Sequence[TrainedRun], loss_names: Sequence[str], by: Sequence[str]
) -> list[str]:
  """Returns the losses that rank runs, which all of them have measured."""
  shared = [
    name for name in loss_names if all(name in run.loss_names for run in runs)
  ]
  for loss_name in set(by) - set(shared):
    measured = ", ".join(shared) or "none"
    raise UserError(
      f"--by={loss_name}: not every run measured this loss (measured:"
      f" {measured})"
    )
  if not shared:
    measured = ", ".join(loss_names) or "none"
    raise UserError(
      f"every run must measure the same loss (measured by some: {measured})"
    )
  trained = [name for name in shared if all(_trains(run, name) for run in runs)]
  return list(by) or trained or shared


def _trains(run: TrainedRun, loss_name: str) -> bool:
  """Whether a run trained the attention of a loss, such as clm or clm/SET."""
  objective, _, _ = loss_name.partition("/")
  return objective in run.trained_names


def _not_trained(
  runs: Sequence[TrainedRun], ranking_losses: Iterable[str]
) -> str:
  """Returns a warning if a run is ranked by a loss that only others trained."""
  counts = {
    name: sum(_trains(r, name) for r in runs) for name in ranking_losses
  }
  if all(count in (0, len(runs)) for count in counts.values()):
    return ""
  return (
    "warning: the runs trained different objectives, so none is called the"
    f" best; choose a loss that ranks them, such as by={next(iter(counts))}"
  )


# ----------------------------------------------------------------- the losses


def _watched_step(run: TrainedRun) -> int | None:
  """Returns the best step by `eval.watch`, if the run has that."""
  best = run.summary and run.summary.get("best")
  return best["step"] if best else None


def _compared_step(run: TrainedRun) -> int:
  """Returns the step to compare at: the best by `eval.watch`, or the last."""
  best = _watched_step(run)
  if best is not None:
    return best
  return max(map(run.last_step, run.losses[ALL]), default=0)


def _mean_loss(
  runs: Sequence[TrainedRun], loss_names: Sequence[str], report_half: str
) -> Mean | None:
  """Returns the mean over runs; None if one of them has no finite loss."""
  losses = {}
  for run in runs:
    step = _compared_step(run)
    measured = [
      run.held_out(loss_name, report_half).get(step) for loss_name in loss_names
    ]
    if None in measured:
      return None
    losses[run.seed] = sum(measured) / len(measured)
  return mean_of_seeds(losses)


def _compared(
  label: str,
  runs: Sequence[TrainedRun],
  loss_names: Sequence[str],
  ranking_losses: Sequence[str],
  report_half: str,
) -> Compared:
  steps = sorted({_compared_step(run) for run in runs})
  ends = dict.fromkeys((steps[0], steps[-1]))
  summaries = [run.summary for run in runs if run.summary]
  seconds = [s["seconds"]["total"] for s in summaries if "seconds" in s]
  losses = {
    loss_name: _mean_loss(runs, [loss_name], report_half)
    for loss_name in loss_names
  }
  return Compared(
    label=label,
    step=steps[-1],
    losses={loss_name: loss for loss_name, loss in losses.items() if loss},
    loss=_mean_loss(runs, ranking_losses, report_half),
    folders=tuple(run.folder for run in runs),
    steps="-".join(f"{step:,}" for step in ends),
    ended=len(summaries) == len(runs),
    parameters=runs[0].summary and runs[0].summary["parameters"],
    seconds=sum(seconds) if len(seconds) == len(runs) else None,
  )


def _table_row(
  group: Compared, loss_names: Sequence[str], ranking_losses: Sequence[str]
) -> Row:
  seeds = {"seeds": len(group.folders)} if len(group.folders) > 1 else {}
  mean = {"mean": group.loss} if len(ranking_losses) > 1 else {}
  return {
    "run": group.label,
    **seeds,
    "step": group.step,
    "_step": group.steps if group.ended else f"{group.steps}, not at its end",
    **{loss_name: group.losses.get(loss_name) for loss_name in loss_names},
    **mean,
    "parameters": group.parameters,
    "time": group.seconds,
  }


def _cell_text(value, heading: str, row: Row) -> str:
  """Writes a value of a row."""
  if heading == "step":
    return row["_step"]
  if isinstance(value, Mean):
    return _mean_with_spread(value)
  write = {"parameters": units.quantity, "time": units.duration}
  return write.get(heading, str)(value)


def _mean_with_spread(value: Mean) -> str:
  spread = "" if value.std is None else f" ± {value.std:.3f}"
  return f"{value.mean:.3f}{spread}"


def _comparison_notes(
  ranking_losses: Sequence[str], report_half: str
) -> Iterator[str]:
  """Yields how runs are compared."""
  mean = "mean of " if len(ranking_losses) > 1 else ""
  yield "## Held out"
  yield (
    "Held-out losses in nats after the given step. The first run has the lowest"
    f" {mean}{' and '.join(ranking_losses)}."
  )
  if report_half == REPORT:
    yield (
      "Half of the held-out rows chose the best step (`eval.watch`); the losses"
      " are those of the other half, for all runs."
    )


def _not_comparable(
  runs: Sequence[TrainedRun], ranking_losses: Sequence[str]
) -> str:
  """Returns a warning if runs measure losses differently, as far as is known.

  `ranking_losses` are the losses that rank them.
  """
  settings = [_measuring_settings(run, ranking_losses) for run in runs]
  differences = [
    name
    for name in dict.fromkeys(itertools.chain.from_iterable(settings))
    if len({by_name.get(name) for by_name in settings}) > 1
  ]
  hint = ""
  if not _have_one_text(runs):
    differences = ["held-out text or tokenizer"]
  elif set(differences) - {_ROWS, _FRAMED}:
    hint = ": measure the same objective in each, such as eval.objectives=C,M15"
  if not differences:
    return ""
  return (
    f"warning: the runs differ in {', '.join(differences)}, so their losses do"
    f" not compare and none is called the best{hint}"
  )


def _have_one_text(runs: Sequence[TrainedRun]) -> bool:
  """Whether all runs measure the same held-out text, as far as is known."""
  entropies = {run.summary["unigram_entropy"] for run in runs if run.summary}
  if len(entropies) > 1:
    return False
  ended = all(run.summary for run in runs)
  return ended or len({*map(_held_out_data, runs)}) < 2


def _measuring_settings(
  run: TrainedRun, loss_names: Sequence[str]
) -> dict[str, str]:
  """Returns the settings that decide how a run measures losses, by title.

  The losses of two runs do not compare if these settings differ.
  """
  framed = run.config["data"].get("framed", False)
  settings_by_title = {
    _ROWS: str(run.config["eval"]["rows"]),
    _FRAMED: str(framed),
  }
  for loss_name in loss_names:
    # The part after the slash is the name of a further held-out set.
    objective_name = loss_name.partition("/")[0]
    (objective,) = (
      objective
      for objective in run.known_objectives.values()
      if objective["name"] == objective_name
    )
    # Held-out losses use the mask ratio at the end of the run.
    if (last_ratio := objective.get("mask_ratio_end")) is not None:
      objective = {**objective, "mask_ratio": last_ratio}
    settings_by_title |= {
      f"{name} of {loss_name}": str(value)
      for name, value in objective.items()
      if name not in _NOT_MEASURED
    }
  return settings_by_title


def _held_out_data(run: TrainedRun) -> tuple:
  """Returns hashes of the held-out text of a run that has begun."""
  path = run.config["data"]["path"]
  hashes = []
  for name, folder in folders_by_name(path, "data.path").items():
    try:
      manifest = Manifest.load(folder)
    except UserError:  # its folder is on another machine
      return (path,)
    text = manifest.splits["dev"].sha256
    hashes.append((name, manifest.tokenizer["sha256"], text))
  return tuple(hashes)


# --------------------------------------------------------------- the settings


def _setting_differences(runs: _Runs) -> list[Row]:
  """Returns a row for each setting that is not the same for all."""
  settings = {
    label: traverse_util.flatten_dict(label_runs[0].config, sep=".")
    for label, label_runs in runs.items()
  }
  keys = dict.fromkeys(itertools.chain.from_iterable(settings.values()))
  return [
    {"setting": key} | {name: s.get(key) for name, s in settings.items()}
    for key in keys
    if not any(f"{key}.".startswith(f"{apart}.") for apart in _APART)
    and len({str(s.get(key)) for s in settings.values()}) > 1
  ]


def _settings_table(settings: Sequence[Row], seeds: set[int]) -> str:
  if not settings:
    same = "differ in their seeds alone" if len(seeds) > 1 else "are the same"
    return f"They {same}."
  values = [
    [textwrap.shorten(str(x), 60) for x in s.values()] for s in settings
  ]
  return tables.markdown(values, list(settings[0]))


# ---------------------------------------------------------------- the picture


def _run_length(run: TrainedRun) -> int:
  """Returns a run's length: its end, the end that it is to have, or so far."""
  if run.summary:
    return run.summary["steps"]
  config = config_lib.config_from_json(json.dumps(run.config))
  planned = branches.steps_of(config)
  return planned.steps if planned else _compared_step(run)


def _curves(title: str, runs: _Runs) -> Figure:
  """Returns the picture: a panel for each loss, a line for each label.

  Its x axis has steps. If the longest run has over twice the steps of the
  shortest, which would be a stroke at 0, it has the share of each run.
  """
  all_runs = list(itertools.chain(*runs.values()))
  lengths = {
    label: max(1, *map(_run_length, label_runs))
    for label, label_runs in runs.items()
  }
  by_share = max(lengths.values()) > 2 * min(lengths.values())
  panels = {}
  for loss_name in _measured_losses(all_runs):
    panel = panels[f"{loss_name}, held out"] = {}
    for label, length in lengths.items():
      unit = 100 / length if by_share else 1
      losses = [run.held_out(loss_name) for run in runs[label]]
      if line := plots.mean_line(losses):
        panel[label] = [(unit * step, mean) for step, mean in line]
  tops = [run.summary["unigram_entropy"] for run in all_runs if run.summary]
  tops += [x[-1][1].mean for panel in panels.values() for x in panel.values()]
  axis = "share of the run (%)" if by_share else "step"
  draw = functools.partial(plots.draw_losses, title, axis, panels, tops)
  return Figure("curves.png", draw)
