"""The report's pictures, in the style of `antlm_jax.training.plots`."""

import math
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from antlm_jax.training.plots import COLOURS
from antlm_jax.units import quantity
from evals.reporting.compare import Delta, Study
from evals.reporting.runs import Run

_SHADE = 0.12
_OPEN = "0.55"  # grey: what an interval leaves open
_SIGN = {"above": COLOURS[0], "below": COLOURS[1], "contains 0": _OPEN}


def curves(study: Study, family: str, path: pathlib.Path) -> bool:
  """Draws the held-out losses of an encoder's rows to a PNG.

  Phases are shaded in the colour of what they train, a mixed one in bands as
  wide as its shares.

  Returns:
    Whether there was anything to draw.
  """
  rows = {name: _drawn(study.runs[name]) for name in study.of_family(family)}
  rows = {name: runs for name, runs in rows.items() if runs}
  if not rows:
    return False
  every = [run for runs in rows.values() for run in runs]
  colours = _colours(every)
  bottom, top = _limits(every)
  figure, panels = _grid(len(rows))
  for panel, (name, runs) in zip(panels, rows.items(), strict=True):
    panel.set_title(f"{study.rows[name].title}: {runs[0].text}", fontsize=9.5)
    _shade(panel, runs[0], colours)
    notes = [_lines(panel, runs, kind, colours[kind], top) for kind in colours]
    panel.set_ylim(bottom, top)
    panel.set_xlim(0, runs[0].curriculum.steps)
    panel.text(
      0.98, 0.96, "\n".join(filter(None, notes)), fontsize=8, color="0.25",
      ha="right", va="top", transform=panel.transAxes,
    )  # fmt: skip
  several = any(len(runs) > 1 for runs in rows.values())
  _frame(figure, f"{family}   (thin: seeds)" if several else family)
  _legend(figure, every, colours)
  _save(figure, path)
  return True


def _drawn(runs: Sequence[Run]) -> list[Run]:
  """The runs at their end, of the first one's curriculum."""
  runs = [run for run in runs if run.curriculum is not None and run.records]
  return [run for run in runs if run.text == runs[0].text]


def _measured(runs: Sequence[Run]) -> list[str]:
  kinds = (k for run in runs for k in run.names.values() if run.held_out(k))
  return list(dict.fromkeys(kinds))


def _colours(runs: Sequence[Run]) -> dict[str, str]:
  """Colours of what is measured or trained, by logged name."""
  trained = [run.names[name] for run in runs for name in run.objectives]
  kinds = dict.fromkeys([*_measured(runs), *trained])
  return dict(zip(kinds, COLOURS * len(kinds), strict=False))


def _grid(count: int):
  columns = min(count, 2)
  lines = math.ceil(count / columns)
  # Wide enough for the legend beside the title.
  figure = Figure(figsize=(max(5 * columns, 7.5), 2.5 * lines + 0.8))
  figure.set_layout_engine("constrained")
  FigureCanvasAgg(figure)
  panels = figure.subplots(
    lines, columns, sharex=True, sharey=True, squeeze=False
  ).ravel()
  for panel in panels:
    panel.spines[["top", "right"]].set_visible(False)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: quantity(x)))
  for panel in panels[count:]:
    panel.set_visible(False)
  if len(panels) > count:  # the one above the gap has the steps now
    panels[count - columns].xaxis.set_tick_params(labelbottom=True)
  return figure, panels[:count]


def _frame(figure: Figure, title: str) -> None:
  figure.suptitle(title, x=0.02, ha="left", fontsize=11)
  figure.supxlabel("step", fontsize=10)
  figure.supylabel("loss (nats per target)", fontsize=10)


def _legend(figure: Figure, runs: Sequence[Run], colours) -> None:
  measured = _measured(runs)
  handles = [
    Line2D([], [], color=colour, lw=2, label=f"{kind}, held out")
    if kind in measured
    else Patch(color=colour, alpha=_SHADE, label=f"{kind}, trained only")
    for kind, colour in colours.items()
  ]
  figure.legend(
    handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9
  )


def _limits(runs: Sequence[Run]) -> tuple[float, float]:
  """Fits what was learnt, forgotten or not.

  A loss over that of frequencies alone, of what a row never trains, is off the
  picture: it would flatten the rest.
  """
  low, high = [], [run.summary["unigram_entropy"] for run in runs]
  for run in runs:
    low += [x for k in _measured([run]) for s, x in run.held_out(k) if s]
    for name in run.objectives:
      first = next(p for p in run.curriculum.phases if name in p.shares)
      losses = run.held_out(run.names[name])
      high += [loss for step, loss in losses if step >= first.stop]
  margin = 0.05 * (max(high) - min(low, default=0.0)) + 0.05
  return min(low, default=0.0) - margin, max(high) + margin


def _shade(panel, run: Run, colours) -> None:
  for phase in run.curriculum.phases:
    low = 0.0
    for name, share in phase.shares.items():
      panel.axvspan(
        phase.start, phase.stop, low, min(low + share, 1.0),
        color=colours[run.names[name]], alpha=_SHADE, lw=0,
      )  # fmt: skip
      low += share


def _lines(panel, runs, kind: str, colour: str, top: float) -> str:
  """Draws seeds and their mean; says where the mean ends above the top."""
  found = [dict(run.held_out(kind)) for run in runs]
  steps = sorted(set.intersection(*map(set, found)))
  if not steps:
    return ""
  for losses in found if len(found) > 1 else ():
    panel.plot(*zip(*losses.items(), strict=True), color=colour, lw=0.7)
  mean = [np.mean([losses[step] for losses in found]) for step in steps]
  panel.plot(steps, mean, color=colour, lw=1.8, marker="o", ms=2.5)
  return f"{kind} ends at {mean[-1]:.1f}" if mean[-1] > top else ""


def phenomena(
  deltas: Sequence[Delta],
  titles: Mapping[str, str],
  path: pathlib.Path,
) -> None:
  """Draws a row's differences from its controls by phenomenon to a PNG.

  Args:
    deltas: Those of one row.
    titles: By row.
    path: Where to write.
  """
  controls = list(dict.fromkeys(delta.control for delta in deltas))
  by_control = {
    control: sorted(
      (delta for delta in deltas if delta.control == control),
      key=lambda delta: delta.interval.estimate,
    )
    for control in controls
  }
  most = max(map(len, by_control.values()))
  figure = Figure(figsize=(5.4 * len(controls), 0.29 * most + 1.6))
  figure.set_layout_engine("constrained")
  FigureCanvasAgg(figure)
  panels = figure.subplots(1, len(controls), sharex=True, squeeze=False)[0]
  for panel, control in zip(panels, controls, strict=True):
    _forest(panel, by_control[control])
    reading = by_control[control][0].control_reading
    panel.set_title(f"against {titles[control]}, both {reading}", fontsize=10)
  figure.suptitle(f"{titles[deltas[0].row]}: BLiMP by phenomenon", fontsize=11)
  by = "items and seeds" if deltas[0].by_seeds else "items; one seed"
  figure.supxlabel(f"difference in points, 95 % by {by}", fontsize=9.5)
  _save(figure, path)


def _forest(panel, deltas: Sequence[Delta]) -> None:
  panel.axvline(0, color="0.3", lw=0.8)
  for at, delta in enumerate(deltas):
    colour, interval = _SIGN[delta.verdict], delta.interval
    panel.plot(
      [100 * interval.low, 100 * interval.high], [at, at], color=colour, lw=1.8
    )
    panel.plot(
      100 * interval.estimate, at, "o", ms=5, color=colour,
      mfc="white" if interval.contains_zero else colour,
    )  # fmt: skip
  panel.set_yticks(
    range(len(deltas)), [d.phenomenon.replace("_", " ") for d in deltas]
  )
  panel.tick_params(axis="y", length=0, labelsize=9)
  panel.grid(axis="x", color="0.9", lw=0.6)
  panel.set_axisbelow(True)
  panel.spines[["top", "right", "left"]].set_visible(False)


def _save(figure: Figure, path: pathlib.Path) -> None:
  aside = path.with_name(path.name + ".tmp")
  figure.savefig(aside, dpi=130, format="png")
  aside.replace(path)
