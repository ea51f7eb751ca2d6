"""Pictures of reports, in the style of `antlm_jax.page.plots`."""

import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from antlm_jax.evals.statistics import CONFIDENCE, Mean, mean_of_seeds
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.page.plots import COLOURS, canvas, save_figure, shade, step_axis

_DASHES = ("-", "--", ":", "-.")
Line = Sequence[tuple[float, Mean]]  # points
Panels = Mapping[str, Mapping[str, Line]]  # lines by title and label


def mean_line(losses: Sequence[Mapping[int, float]]) -> list[tuple[int, Mean]]:
  """Returns the mean over seeds at the steps that all of them have."""
  steps = sorted(set.intersection(*map(set, losses)))
  return [
    (step, mean_of_seeds({str(i): x[step] for i, x in enumerate(losses)}))
    for step in steps
  ]


def draw_losses(
  title: str,
  axis: str,
  panels: Panels,
  tops: Iterable[float],
  path: pathlib.Path,
  phases: Sequence[Curriculum] = (),
  names: Mapping[str, str] = {},
) -> None:
  """Draws held-out losses to a PNG, a line for each label, with intervals.

  Args:
    title: Title of the picture.
    axis: Title of x.
    panels: Lines by the panel's title and by label.
    tops: Losses to show; the ends of lines above them are written down.
    path: Path to the file.
    phases: Curriculum of each panel, whose phases are shaded.
    names: Objectives' names in logs, by name in the curriculum.
  """
  title += ": held-out losses"
  lines = [line for panel in panels.values() for line in panel.values()]
  means = [mean for line in lines for _, mean in line]
  if any(mean.std is not None for mean in means):
    title += f" (bands: {100 * CONFIDENCE:g} % intervals over seeds)"
  low = min(mean.mean for mean in means)
  top = max(tops, default=low)
  margin = 0.05 * (top - low) + 0.02
  figure, all_axes = _grid(len(panels), title)
  labels = dict.fromkeys(itertools.chain(*panels.values()))
  # Neighbours differ in both, so that they differ in a grey print, too.
  styles = {
    label: {
      "ls": _DASHES[(i + i // len(COLOURS)) % 4],
      "color": COLOURS[i % len(COLOURS)],
    }
    for i, label in enumerate(labels)
  }
  for axes, curriculum in zip(all_axes, phases, strict=False):
    shade([axes], curriculum, names)
  if phases:  # the panels share the axis of steps
    all_axes[0].set_xlim(0, max(curriculum.steps for curriculum in phases))
  marks = {}  # by label: not every panel has every line
  for axes, (name, panel) in zip(all_axes, panels.items(), strict=True):
    axes.set_title(name, fontsize=10)
    above = []  # the ends of lines above the top
    for label, points in panel.items():
      style = {"lw": 1.7, "ms": 2.5, **styles[label]}
      draw_means(axes, points, label=label, **style)
      if points[-1][1].mean > top + margin:
        above.append(f"{label} ends at {points[-1][1].mean:.1f}")
    handles, texts = axes.get_legend_handles_labels()
    marks |= zip(texts, handles, strict=True)
    style = {"fontsize": 8, "color": "0.25", "ha": "right", "va": "top"}
    style["transform"] = axes.transAxes
    axes.text(0.98, 0.96, "\n".join(above), **style)
  all_axes[0].set_ylim(low - margin, top + margin)  # of all: they share it
  columns = min(3, len(marks), 1 + 60 // max(map(len, marks)))
  height = figure.get_figheight() + 0.22 * math.ceil(len(marks) / columns)
  figure.set_figheight(height)
  figure.legend(
    marks.values(), marks.keys(), loc="outside lower center", ncols=columns
  )
  for axes in all_axes:  # the figure's own label would be under the legend
    if axes.get_subplotspec().is_last_row():
      axes.set_xlabel(axis, fontsize=10)
  figure.supylabel("loss (nats per target)", fontsize=10)
  save_figure(figure, path)


def draw_means(axes, points: Line, **style) -> None:
  """Draws means by step, in a style, with the bands of their intervals."""
  x = [step for step, _ in points]
  y = np.array([mean.mean for _, mean in points])
  half = np.array([mean.half_width() or 0 for _, mean in points])
  axes.plot(x, y, marker="o", **style)
  axes.fill_between(
    x, y - half, y + half, color=style["color"], alpha=0.15, lw=0
  )


def _grid(count: int, title: str):
  columns = 1 if count % 2 else 2
  rows = count // columns
  figure = canvas(max(5 * columns, 7.5), 2.5 * rows + 1.1, title)
  all_axes = figure.subplots(
    rows, columns, sharex=True, sharey=True, squeeze=False
  ).ravel()
  for axes in all_axes:
    step_axis(axes)
  return figure, all_axes
