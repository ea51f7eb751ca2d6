"""Pictures of reports, in the style of `antlm_jax.training.plots`."""

import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from antlm_jax.evals.reporting.runs import TrainedRun
from antlm_jax.evals.reporting.statistics import Interval, Mean
from antlm_jax.training.plots import COLOURS, canvas, save, shade, step_axis

_OPEN = "0.55"  # grey of an interval that includes 0
_COLOURS = {1: COLOURS[0], -1: COLOURS[1], 0: _OPEN}  # by an interval's sign
_Runs = Sequence[TrainedRun]


def curves(title: str, runs: Mapping[str, _Runs], path: pathlib.Path) -> None:
  """Draws held-out losses to a PNG, a panel for each variant, phases shaded.

  `runs` has the runs of a variant, which have one curriculum, by its title.
  """
  every = [run for found in runs.values() for run in found]
  measured = [k for run in every for k in run.names.values() if run.held_out(k)]
  names = {name: run.names[name] for run in every for name in run.objectives}
  known = *names.values(), *measured
  kinds = dict.fromkeys(kind for kind in known if kind in measured)
  colours = dict(zip(kinds, COLOURS * len(kinds), strict=False))
  bottom, top = _limits(every, measured)
  thin = " (thin lines: seeds)" if len(every) > len(runs) else ""
  figure, panels = _grid(len(runs), f"{title}: held-out losses{thin}")
  for panel, (name, found) in zip(panels, runs.items(), strict=True):
    panel.set_title(f"{name}: {found[0].text}", fontsize=9.5)
    shade([panel], found[0].curriculum, names)
    notes = [_lines(panel, found, kind, colours[kind], top) for kind in kinds]
    panel.set_ylim(bottom, top)
    panel.set_xlim(0, found[0].curriculum.steps)
    style = {"fontsize": 8, "color": "0.25", "ha": "right", "va": "top"}
    note = "\n".join(filter(None, notes))
    panel.text(0.98, 0.96, note, transform=panel.transAxes, **style)
  for panel in panels[-2:]:  # the figure's own label would be under the legend
    panel.set_xlabel("step", fontsize=10)
  figure.supylabel("loss (nats per target)", fontsize=10)
  _legend(figure, colours, panels)
  save(figure, path)


def _grid(count: int, title: str, sharey: bool = True):
  columns = min(count, 2)
  rows = math.ceil(count / columns)
  figure = canvas(max(5 * columns, 7.5), 2.5 * rows + 1.1, title)
  panels = figure.subplots(
    rows, columns, sharex=True, sharey=sharey, squeeze=False
  ).ravel()
  for panel in panels:
    step_axis(panel)
  for panel in panels[count:]:
    panel.set_visible(False)
  if len(panels) > count:  # the panel above the gap shows the steps
    panels[count - columns].xaxis.set_tick_params(labelbottom=True)
  return figure, panels[:count]


def _legend(figure, colours: Mapping[str, str], panels):
  from matplotlib.lines import Line2D

  marks = {
    f"{kind}, held out": Line2D([], [], color=colour, lw=2)
    for kind, colour in colours.items()
  }
  for panel in panels:  # the shades of phases
    handles, names = panel.get_legend_handles_labels()
    marks |= zip(names, handles, strict=True)
  columns = min(4, len(marks))
  place = {"loc": "outside lower center", "ncols": columns, "fontsize": 9}
  figure.legend(marks.values(), marks.keys(), **place)


def _limits(runs: _Runs, measured: Sequence[str]) -> tuple[float, float]:
  """Returns the range of the losses of trained objectives.

  The loss of an objective that a variant never trains may be above it.
  """
  low, high = [], [run.summary["unigram_entropy"] for run in runs]
  for run in runs:
    low += [x for k in measured for s, x in run.held_out(k).items() if s]
    for name in run.objectives:
      first = next(p for p in run.curriculum.phases if name in p.shares)
      losses = run.held_out(run.names[name]).items()
      high += [loss for step, loss in losses if step >= first.stop]
  margin = 0.05 * (max(high) - min(low, default=0.0)) + 0.05
  return min(low, default=0.0) - margin, max(high) + margin


def _lines(panel, runs: _Runs, kind: str, colour: str, top: float) -> str:
  """Draws seeds and their mean; says where the mean ends above the top."""
  found = [run.held_out(kind) for run in runs]
  steps = sorted(set.intersection(*map(set, found)))
  if not steps:
    return ""
  for losses in found if len(found) > 1 else ():
    panel.plot(*zip(*losses.items(), strict=True), color=colour, lw=0.7)
  mean = [np.mean([losses[step] for losses in found]) for step in steps]
  panel.plot(steps, mean, color=colour, lw=1.8, marker="o", ms=2.5)
  return f"{kind} ends at {mean[-1]:.1f}" if mean[-1] > top else ""


def differences(
  title: str,
  deltas: Mapping[str, Mapping[str, Interval]],
  path: pathlib.Path,
  unit: str = "points",
) -> None:
  """Draws differences by part of a task to a PNG: a panel's by its title."""
  most = max(map(len, deltas.values()))
  figure = canvas(5.4 * len(deltas), 0.29 * most + 1.6, title)
  panels = figure.subplots(1, len(deltas), sharex=True, squeeze=False)[0]
  for panel, (name, found) in zip(panels, deltas.items(), strict=True):
    panel.set_title(name, fontsize=10)
    label = f"difference ({unit}); grey: interval includes 0"
    panel.set_xlabel(label, fontsize=9.5)
    panel.axvline(0, color="0.3", lw=0.8)
    parts = sorted(found, key=lambda part: found[part].estimate)
    for y, part in enumerate(parts):
      of, colour = found[part], _COLOURS[found[part].sign]
      panel.plot([of.low, of.high], [y, y], color=colour, lw=1.8)
      inside = colour if of.sign else "white"
      panel.plot(of.estimate, y, "o", color=colour, ms=5, mfc=inside)
    panel.set_yticks(range(len(parts)), [p.replace("_", " ") for p in parts])
    panel.tick_params(axis="y", length=0, labelsize=9)
    panel.grid(axis="x", color="0.9", lw=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
  save(figure, path)


_Line = Sequence[tuple[float, Mean]]  # points
_Panels = Mapping[str, Mapping[str, _Line]]  # lines by kind and label


def lines(
  title: str,
  axis: str,
  panels: _Panels,
  path: pathlib.Path,
  confidence: float,
  log: bool = False,
) -> None:
  """Draws scores to a PNG, a panel for each kind, a line for each label.

  Bars are the means' intervals over seeds. `axis` is the title of x.
  """
  title += f" (bars: {100 * confidence:.4g} % intervals over seeds)"
  figure, places = _grid(len(panels), title, sharey=False)
  for panel, found in zip(places, panels.values() if log else (), strict=False):
    panel.set_xscale("log")  # its own ticks would be powers of ten
    panel.set_xticks(sorted({x for line in found.values() for x, _ in line}))
    panel.minorticks_off()
    step_axis(panel)
  for panel, points, style in _each_line(places, panels):
    y = [100 * mean.mean for _, mean in points]
    bars = [100 * (mean.half_width(confidence) or 0) for _, mean in points]
    style |= {"lw": 1.6, "marker": "o", "ms": 4, "capsize": 2.5}
    panel.errorbar([x for x, _ in points], y, bars, **style)
  _save(figure, places, axis, "score (%)", path)


def losses(
  title: str,
  axis: str,
  panels: _Panels,
  limits: tuple[float, float],
  path: pathlib.Path,
) -> None:
  """Draws losses to a PNG, a panel for each kind, a line for each label.

  `limits` are those of the losses, and `axis` names x. Thin lines are seeds.
  """
  means = [mean for of in panels.values() for x in of.values() for _, mean in x]
  thin = " (thin lines: seeds)" if any(len(m.values) > 1 for m in means) else ""
  figure, places = _grid(len(panels), f"{title}: held-out losses{thin}")
  places[0].set_ylim(limits)  # of all panels: they share it
  for panel, points, style in _each_line(places, panels):
    x, y = zip(*points, strict=True)
    thin = style | {"lw": 0.6, "label": None}
    for seed in y[0].values if len(y[0].values) > 1 else ():
      panel.plot(x, [mean.values[seed] for mean in y], **thin)
    style |= {"lw": 1.8, "marker": "o", "ms": 2.5}
    panel.plot(x, [mean.mean for mean in y], **style)
  _save(figure, places, axis, "loss (nats per target)", path)


def _each_line(places, panels: _Panels) -> Iterator[tuple]:
  """Yields each line's panel, points, and its label's style."""
  labels = dict.fromkeys(label for found in panels.values() for label in found)
  looks = itertools.cycle(itertools.product(("-", "--", ":", "-."), COLOURS))
  looks = dict(zip(labels, looks, strict=False))
  for panel, (kind, found) in zip(places, panels.items(), strict=True):
    panel.set_title(kind, fontsize=10)
    for label, points in found.items():
      dashes, colour = looks[label]
      yield panel, points, {"ls": dashes, "color": colour, "label": label}


def _save(figure, places, x: str, y: str, path) -> None:
  """Adds the axes' titles and the legend of all lines, and writes the PNG."""
  marks = {}  # by label: not every panel has every line
  for panel in places:
    handles, names = panel.get_legend_handles_labels()
    marks |= zip(names, handles, strict=True)
  columns = min(3, len(marks), 1 + 60 // max(map(len, marks)))
  height = figure.get_figheight() + 0.22 * math.ceil(len(marks) / columns)
  figure.set_figheight(height)
  figure.legend(
    marks.values(), marks.keys(), loc="outside lower center", ncols=columns
  )
  for panel in places[-2:]:  # the figure's own label would be under the legend
    panel.set_xlabel(x, fontsize=10)
  figure.supylabel(y, fontsize=10)
  save(figure, path)
