"""Pictures of reports, in the style of `antlm_jax.page.plots`."""

import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from antlm_jax.evals.statistics import CONFIDENCE, Interval, Mean, mean_of_seeds
from antlm_jax.evals.studies.reporting.runs import TrainedRun
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.page.plots import COLOURS, canvas, save_figure, shade, step_axis

_OPEN = "0.55"  # grey of an interval that includes 0
_COLOURS = {1: COLOURS[0], -1: COLOURS[1], 0: _OPEN}  # by an interval's sign
_DASHES = ("-", "--", ":", "-.")
_Runs = Sequence[TrainedRun]


def draw_study_curves(
  title: str, runs: Mapping[str, _Runs], path: pathlib.Path
) -> None:
  """Draws held-out losses to a PNG, a panel for each variant, phases shaded.

  `runs` has the runs of a variant, which have one curriculum, by its title.
  """
  every = [run for found in runs.values() for run in found]
  measured = [k for run in every for k in run.names.values() if run.held_out(k)]
  names = {name: run.names[name] for run in every for name in run.objectives}
  names = dict(sorted(names.items()))  # the same colours in each picture
  known = *names.values(), *measured
  kinds = dict.fromkeys(kind for kind in known if kind in measured)
  panels = {
    f"{name}: {found[0].text}": {
      f"{kind}, held out": line
      for kind in kinds
      if (line := mean_line([run.held_out(kind) for run in found]))
    }
    for name, found in runs.items()
  }
  phases = [found[0].curriculum for found in runs.values()]
  limits = _limits(every, measured)
  draw_loss_lines(title, "step", panels, limits, path, phases, names)


def mean_line(losses: Sequence[Mapping[int, float]]) -> list[tuple[int, Mean]]:
  """Returns the mean over seeds at the steps that all of them have."""
  steps = sorted(set.intersection(*map(set, losses)))
  return [
    (
      step,
      mean_of_seeds({str(seed): of[step] for seed, of in enumerate(losses)}),
    )
    for step in steps
  ]


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


def _limits(runs: _Runs, measured: Sequence[str]) -> tuple[float, float]:
  """Returns the range of the losses of trained objectives.

  The loss of an objective that a variant never trains may be above it.
  """
  low, high = [], [run.summary["unigram_entropy"] for run in runs]
  for run in runs:
    low += [x for k in measured for s, x in run.held_out(k).items() if s]
    for name in run.objectives:
      phases = (p for p in run.curriculum.phases if name in p.shares)
      if not (first := next(phases, None)):
        continue  # the run ended before that phase
      losses = run.held_out(run.names[name]).items()
      high += [loss for step, loss in losses if step >= first.stop]
  margin = 0.05 * (max(high) - min(low, default=0.0)) + 0.05
  return min(low, default=0.0) - margin, max(high) + margin


def draw_differences(
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
  save_figure(figure, path)


_Line = Sequence[tuple[float, Mean]]  # points
_Panels = Mapping[str, Mapping[str, _Line]]  # lines by kind and label


def draw_lines(
  title: str, axis: str, panels: _Panels, path: pathlib.Path, log: bool = False
) -> None:
  """Draws scores to a PNG, a panel for each kind, a line for each label.

  A kind's name has its measure. Bars are the means' intervals over seeds.
  `axis` is the title of x.
  """
  title += f" (bars: {100 * CONFIDENCE:g} % intervals over seeds)"
  figure, places = _grid(len(panels), title, sharey=False)
  for panel, found in zip(places, panels.values() if log else (), strict=False):
    panel.set_xscale("log")  # its own ticks would be powers of ten
    panel.set_xticks(sorted({x for line in found.values() for x, _ in line}))
    panel.minorticks_off()
    step_axis(panel)
  for panel, points, style in _each_line(places, panels):
    y = [100 * mean.mean for _, mean in points]
    bars = [100 * (mean.half_width() or 0) for _, mean in points]
    style |= {"lw": 1.6, "marker": "o", "ms": 4, "capsize": 2.5}
    panel.errorbar([x for x, _ in points], y, bars, **style)
  _save_with_legend(figure, places, axis, "score (%)", path)


def draw_loss_lines(
  title: str,
  axis: str,
  panels: _Panels,
  limits: tuple[float, float],
  path: pathlib.Path,
  phases: Sequence[Curriculum] = (),
  names: Mapping[str, str] = {},
) -> None:
  """Draws losses to a PNG, a panel for each kind, a line for each label.

  `limits` are those of the losses, and `axis` names x. Thin lines are seeds.
  `phases` has the curriculum of each panel, whose phases are shaded, and
  `names` its objectives' names in logs.
  """
  means = [mean for of in panels.values() for x in of.values() for _, mean in x]
  thin = " (thin lines: seeds)" if any(len(m.values) > 1 for m in means) else ""
  figure, places = _grid(len(panels), f"{title}: held-out losses{thin}")
  places[0].set_ylim(limits)  # of all panels: they share it
  for panel, curriculum in zip(places, phases, strict=False):
    shade([panel], curriculum, names)
    panel.set_xlim(0, curriculum.steps)
  above = {panel: [] for panel in places}  # the ends of lines above the top
  for panel, points, style in _each_line(places, panels):
    x, y = zip(*points, strict=True)
    thin = style | {"lw": 0.6, "label": None}
    for seed in y[0].values if len(y[0].values) > 1 else ():
      panel.plot(x, [mean.values[seed] for mean in y], **thin)
    style |= {"lw": 1.8, "marker": "o", "ms": 2.5}
    panel.plot(x, [mean.mean for mean in y], **style)
    if y[-1].mean > limits[1]:
      above[panel].append(f"{style['label']} ends at {y[-1].mean:.1f}")
  style = {"fontsize": 8, "color": "0.25", "ha": "right", "va": "top"}
  for panel, notes in above.items():
    place = {"transform": panel.transAxes}
    panel.text(0.98, 0.96, "\n".join(notes), **place, **style)
  _save_with_legend(figure, places, axis, "loss (nats per target)", path)


def _each_line(places, panels: _Panels) -> Iterator[tuple]:
  """Yields each line's panel, points, and its label's style."""
  labels = dict.fromkeys(label for found in panels.values() for label in found)
  # Neighbours differ in both, so that they differ in a grey print, too.
  looks = {
    label: (_DASHES[(i + i // len(COLOURS)) % 4], COLOURS[i % len(COLOURS)])
    for i, label in enumerate(labels)
  }
  for panel, (kind, found) in zip(places, panels.items(), strict=True):
    panel.set_title(kind, fontsize=10)
    for label, points in found.items():
      dashes, colour = looks[label]
      yield panel, points, {"ls": dashes, "color": colour, "label": label}


def _save_with_legend(figure, places, x: str, y: str, path) -> None:
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
  save_figure(figure, path)
