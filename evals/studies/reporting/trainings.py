"""Compares trainings: losses, the settings that differ, and the best run.

Runs have labels; the runs of one label differ in their seeds.
"""

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence

from flax import traverse_util

from antlm_jax import config as config_lib
from antlm_jax import tables, units
from antlm_jax.data.prepared_folder import Manifest, folders_by_name
from antlm_jax.errors import UserError
from antlm_jax.evals.statistics import Mean, mean_of_seeds
from antlm_jax.evals.studies import branches
from antlm_jax.evals.studies.reporting import plots, render
from antlm_jax.evals.studies.reporting.render import Figure, Report, Row
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.runtime import files
from antlm_jax.training.checkpoint import Checkpoint
from antlm_jax.training.metrics import REPORT

_Runs = Mapping[str, Sequence[TrainedRun]]
FOLDER = "comparison"
# Titles of the picture's x axis.
AXES = {"step": "step", "tokens": "tokens", "share": "share of the run (%)"}
# The paths of a run's folders and data do not describe it.
_APART = set(config_lib.FREE) | {"seed"}
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
  """

  rows: tuple[Compared, ...]
  by: tuple[str, ...]
  table: str
  folder: pathlib.Path | None = None
  failed: tuple[str, ...] = ()
  warning: str = ""

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
    return f"{self.table}\n\n{best}{written}"


def compare_runs(
  title: str,
  runs: _Runs,
  by: Sequence[str] = (),
  folder: pathlib.Path | None = None,
  axis: str | None = None,
) -> Comparison:
  """Compares runs by the mean of some held-out losses, the lowest first.

  Args:
    title: Title of the report.
    runs: The runs by label.
    by: Logged names of objectives; by default all that every run has measured.
    folder: Folder for the report; None for no report.
    axis: X axis of the picture, a key of `AXES`; by default `share` if the
      longest run has over twice the steps of the shortest.

  Raises:
    UserError: A run has not measured one of the losses, or the tokens of its
      steps are not known.
  """
  every = [run for found in runs.values() for run in found]
  kinds = list(dict.fromkeys(kind for run in every for kind in run.kinds))
  by = _ranking(every, kinds, by)
  watched = any(_watched_best_step(run) is not None for run in every)
  half = REPORT if watched and all(run.halves for run in every) else ""

  def rank(label: str) -> tuple[bool, float]:
    """Puts finished runs first, then the lowest loss."""
    found = _loss_over_seeds(runs[label], by, half)
    ended = all(run.summary for run in runs[label])
    return not ended, found.mean if found else math.inf

  runs = {label: runs[label] for label in sorted(runs, key=rank)}
  rows = [
    _comparison_row(label, x, kinds, by, half) for label, x in runs.items()
  ]
  warning = _not_comparable(every, by)
  head, lines = render.report_cells(rows, _cell_text)
  if folder:
    settings = _setting_differences(runs)
    text = (
      f"# {title}",
      *_comparison_notes(by, half),
      *([f"**{warning}.**"] if warning else []),
      tables.markdown(lines, head),
      "![curves.png](curves.png)",
      "## Settings",
      _laid_out(settings, {run.config["seed"] for run in every}),
    )
    best = None if warning else rows[0]["run"]
    about = {"by": by, "best": best}
    found = {"runs": {"": rows}, "settings": {"": settings}}
    figures = [Figure("curves.png", _curves_drawer(title, runs, kinds, axis))]
    report = Report("\n\n".join(text) + "\n", about, found, figures)
    render.write_report(report, folder)
  compared = tuple(
    Compared(
      label=row["run"],
      step=row["step"],
      losses={kind: row[kind] for kind in kinds if row[kind]},
      loss=row["mean"] if len(by) > 1 else row[by[0]],
      folders=tuple(run.folder for run in runs[row["run"]]),
    )
    for row in rows
  )
  return Comparison(
    compared, tuple(by), tables.text_table(lines, head, "<>"), folder, warning
  )


def _ranking(
  runs: Sequence[TrainedRun], kinds: Sequence[str], by: Sequence[str]
) -> list[str]:
  """Returns the losses that rank runs, which all of them have measured."""
  shared = [kind for kind in kinds if all(kind in run.kinds for run in runs)]
  for kind in set(by) - set(shared):
    known = ", ".join(shared) or "none"
    raise UserError(
      f"--by={kind}: not every run measured this loss (measured: {known})"
    )
  if not shared:
    known = ", ".join(kinds) or "none"
    raise UserError(
      f"every run must measure the same loss (measured by some: {known})"
    )
  return list(by) or shared


# ----------------------------------------------------------------- the losses


def _watched_best_step(run: TrainedRun) -> int | None:
  """Returns the best step by `eval.watch`, if the run has that."""
  best = run.summary and run.summary.get("best")
  return best["step"] if best else None


def _step_to_compare(run: TrainedRun) -> int:
  """Returns the step to compare at: the best by `eval.watch`, or the last."""
  best = _watched_best_step(run)
  return max(run.losses[run.kinds[0]]) if best is None else best


def _loss_over_seeds(
  runs: Sequence[TrainedRun], kinds: Sequence[str], half: str
) -> Mean | None:
  losses = {}
  for run in runs:
    found = [
      run.held_out(kind, half).get(_step_to_compare(run), math.nan)
      for kind in kinds
    ]
    losses[run.seed] = sum(found) / len(found)
  return mean_of_seeds({s: x for s, x in losses.items() if not math.isnan(x)})


def _comparison_row(label: str, runs, kinds, by, half: str) -> Row:
  row = {"run": label}
  if len(runs) > 1:
    row["seeds"] = len(runs)
  steps = sorted({_step_to_compare(run) for run in runs})
  text = "-".join(f"{step:,}" for step in dict.fromkeys((steps[0], steps[-1])))
  ended = all(run.summary for run in runs)
  row["step"] = steps[-1]
  row["_step"] = text if ended else f"{text}, not at its end"
  for kind in kinds:
    row[kind] = _loss_over_seeds(runs, [kind], half)
  if len(by) > 1:
    row["mean"] = _loss_over_seeds(runs, by, half)
  row["parameters"] = runs[0].summary and runs[0].summary["parameters"]
  timed = [s for run in runs if "seconds" in (s := run.summary or {})]
  total = sum(summary["seconds"]["total"] for summary in timed)
  row["time"] = total if len(timed) == len(runs) else None
  return row


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


def _comparison_notes(by: Sequence[str], half: str) -> Iterator[str]:
  """Yields how runs are compared."""
  mean = "mean of " if len(by) > 1 else ""
  yield "## Held out"
  yield (
    "Held-out losses in nats after the given step. The first run has the lowest"
    f" {mean}{' and '.join(by)}."
  )
  if half:
    yield (
      "Half of the held-out rows chose the best step (`eval.watch`); the losses"
      " are those of the other half, for all runs."
    )


def _not_comparable(runs: Sequence[TrainedRun], by: Sequence[str]) -> str:
  """Returns a warning if runs measure losses differently, as far as is known.

  `by` are the losses that rank them.
  """
  differ, hint = "", ""
  masks = {kind: _measured_differently(runs, kind) for kind in by}
  if not _have_one_text(runs):
    differ = "held-out text or tokenizer"
  elif len({run.config["eval"]["rows"] for run in runs}) > 1:
    differ = "eval.rows"
  elif kinds := [kind for kind, names in masks.items() if names]:
    differ = f"{', '.join(masks[kinds[0]])} of {kinds[0]}"
    hint = ": measure the same objective in each, such as eval.objectives=C,M15"
  return differ and (
    f"warning: the runs differ in {differ}, so their losses do not compare and"
    f" none is called the best{hint}"
  )


def _have_one_text(runs: Sequence[TrainedRun]) -> bool:
  """Whether all runs measure the same held-out text, as far as is known."""
  finished = {run.summary["unigram_entropy"] for run in runs if run.summary}
  if all(run.summary for run in runs):
    return len(finished) < 2
  return len(finished) < 2 and len({*map(_held_out_data, runs)}) < 2


def _measured_differently(runs: Sequence[TrainedRun], kind: str) -> list[str]:
  """Returns the settings in which runs measure a held-out loss differently."""
  every = []
  for run in runs:
    own = kind.partition("/")[0]  # without the name of a further set
    (about,) = (of for of in run.known.values() if of["name"] == own)
    if (last := about.get("mask_ratio_end")) is not None:
      about = {**about, "mask_ratio": last}
    every.append(about)
  names = dict.fromkeys(name for about in every for name in about)
  return [
    name
    for name in names
    if name not in _NOT_MEASURED
    and len({str(about.get(name)) for about in every}) > 1
  ]


def _held_out_data(run: TrainedRun) -> tuple:
  """Returns hashes of the held-out text of a run that has begun."""
  path, found = run.config["data"]["path"], []
  for name, folder in folders_by_name(path, "data.path").items():
    try:
      manifest = Manifest.load(folder)
    except UserError:  # its folder is on another machine
      return (path,)
    hashes = manifest.tokenizer["sha256"], manifest.splits["dev"].sha256
    found.append((name, *hashes))
  return tuple(found)


# --------------------------------------------------------------- the settings


def _setting_differences(runs: _Runs) -> list[Row]:
  """Returns a row for each setting that is not the same for all."""
  settings = {
    label: traverse_util.flatten_dict(found[0].config, sep=".")
    for label, found in runs.items()
  }
  keys = dict.fromkeys(itertools.chain.from_iterable(settings.values()))
  return [
    {"setting": key} | {name: s.get(key) for name, s in settings.items()}
    for key in keys
    if not any(f"{key}.".startswith(f"{apart}.") for apart in _APART)
    and len({str(s.get(key)) for s in settings.values()}) > 1
  ]


def _laid_out(settings: Sequence[Row], seeds: set[int]) -> str:
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
  return planned.steps if planned else _step_to_compare(run)


def _scale(runs: Sequence[TrainedRun], axis: str) -> float:
  """Returns the length of a step on the x axis, for a label's runs."""
  if axis == "step":
    return 1
  if axis == "share":
    return 100 / max(1, *map(_run_length, runs))
  run = runs[0]
  train = run.config["train"]
  if train["batch_start"] < 1 or train["batch_schedule"]:
    raise UserError(
      f"--x=tokens needs batches of one size, but those of {run.folder} grow:"
      " choose --x=step or --x=share"
    )
  return train["batch_size"] * Checkpoint(run.folder).meta.row_tokens


def _curves_drawer(
  title: str, runs: _Runs, kinds: Sequence[str], axis: str | None
) -> Callable[[pathlib.Path], None]:
  """Returns a function that draws a line for each label.

  Each loss has a panel, of models of one size.
  """
  every = [run for found in runs.values() for run in found]
  lengths = [_run_length(run) for run in every]
  # A run of a tenth of the steps would be a stroke at 0.
  axis = axis or ("share" if max(lengths) > 2 * min(lengths) else "step")
  scales = {label: _scale(found, axis) for label, found in runs.items()}
  panels = {
    f"{kind}, held out{size}": {
      label: [(scales[label] * step, found) for step, found in line]
      for label in labels
      if (line := plots.mean_line([run.held_out(kind) for run in runs[label]]))
    }
    for size, labels in _by_size(runs).items()
    for kind in kinds
  }
  points = [p for found in panels.values() for p in found.values()]
  # The first losses would flatten the rest.
  top = [run.summary["unigram_entropy"] for run in every if run.summary]
  top += [line[-1][1].mean for line in points]
  low = min(found.mean for line in points for _, found in line)
  margin = 0.05 * (max(top) - low) + 0.02
  limits = low - margin, max(top) + margin
  return functools.partial(
    plots.draw_loss_lines, title, AXES[axis], panels, limits
  )


def _by_size(runs: _Runs) -> dict[str, list[str]]:
  """Returns labels by the size of their models in words, the smallest first.

  Models of one size have at most 10 % more parameters than the smallest. An
  unfinished run has those of a finished run with its model and data.
  """

  def model(run: TrainedRun) -> str:
    return str((run.config["model"], run.config["data"]["path"]))

  every = [run for found in runs.values() for run in found]
  known = {
    model(run): run.summary["parameters"] for run in every if run.summary
  }
  sizes = {x: known.get(model(of[0]), math.inf) for x, of in runs.items()}
  groups, least = {}, 0
  for label in sorted(sizes, key=sizes.get):
    least = sizes[label] if sizes[label] > 1.1 * least else least
    groups.setdefault(least, []).append(label)
  if len(groups) == 1:
    return {"": list(runs)}  # in the table's order
  return {
    _difference_size(sizes[x[0]], sizes[x[-1]]): x for x in groups.values()
  }


def _difference_size(least: float, most: float) -> str:
  if least == math.inf:
    return " (unfinished: size unknown)"
  ends = dict.fromkeys((units.quantity(least), units.quantity(most)))
  return f", {' to '.join(ends)} parameters"
