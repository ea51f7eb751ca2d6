"""Style of all pictures, and the learning curves of a run."""

import functools
import io
import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from antlm_jax.config import Config
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.runtime import files
from antlm_jax.training.metrics import PAIRS, ByStep
from antlm_jax.units import parse_quantity, quantity

# Colours by order of appearance. They differ in grey and for the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Greys of phases, none of which is a curve's colour.
SHADES = ("0.96", "0.87", "0.78", "0.69", "0.60", "0.51")
_DASHES = ("--", ":", "-.")  # of several held-out sets
_MARKED = {"lw": 2, "marker": "o", "ms": 3.5}  # a line of measured values
_DPI = 130
# With more blocks, one line for each held-out loss would fill the picture. Two
# lines then show it after the objective's own blocks and after the others.
_MANY = 12
_LONGEST = 70  # characters of a curriculum that a title shows
_BINS = 300  # points of a training curve over the whole run


def draw_run_curves(
  config: Config,
  curriculum: Curriculum | None,
  mix: Curriculum | None,
  rows: ByStep,
  unigram: float,
):
  """Returns a figure of training and held-out losses over shaded phases.

  Accuracies on minimal pairs have a panel. If sources of data are mixed, the
  lowest panel shades their phases. `unigram` is the entropy of the held-out
  tokens' frequencies, in nats, or NaN. Without a curriculum, it shades none.
  """
  steps = curriculum.steps if curriculum else max(rows)
  keys = set().union(*rows.values())
  pairs = sorted(key for key in keys if key.startswith(PAIRS))
  heights = (5, 2, 1) if pairs else (5, 1)
  title = "Losses over the curriculum"
  if len(config.curriculum) <= _LONGEST:  # cut, it would mislead
    title += f" {config.curriculum}"
  out = canvas(9, 5.6 + bool(pairs), title)
  panels = out.subplots(len(heights), 1, sharex=True, height_ratios=heights)
  # Objectives in training order.
  objectives = config.known_objectives
  trained = curriculum.objectives if curriculum else objectives
  names = {name: objectives[name].name for name in trained}
  if curriculum:
    shade(panels[:-1] if mix else panels, curriculum, names)
    _label(panels[0], curriculum)
  if mix:
    shade(panels[-1:], mix, {name: name for name in mix.objectives}, "is read")
    _label(panels[-1], mix)
  _draw_losses(panels[0], rows, names, curriculum, steps, unigram)
  if pairs:
    _draw_pairs(panels[1], rows, pairs)
  _draw_line(panels[-1], rows, "train/learning_rate", color="0.2", lw=1.2)
  panels[-1].set(ylabel="learning\nrate", xlabel="step", xlim=(0, steps))
  if mix:
    legend(panels[-1])
  for axes in panels:
    step_axis(axes)
  return out


def _draw_losses(
  axes,
  rows: ByStep,
  names: Mapping[str, str],
  curriculum: Curriculum | None,
  steps: int,
  unigram: float,
) -> None:
  """Draws the held-out losses in front of the training losses.

  The rows have train/KIND/loss, eval/KIND/loss and, of several held-out sets,
  eval/KIND/SET/loss. `names` has the kind of each trained objective, which
  precede others.
  """
  keys = dict.fromkeys(itertools.chain(*rows.values()))
  parts = [key.split("/") for key in keys]
  logged_kinds = [p[1] for p in parts if p[2:] == ["loss"]]
  kinds = dict.fromkeys([*names.values(), *logged_kinds])
  sets = dict.fromkeys(p[2] for p in parts if p[3:] == ["loss"])
  has_many = bool(curriculum) and len(curriculum.phases) > _MANY
  objectives = {kind: name for name, kind in names.items()}
  later_losses = []
  for kind, colour in zip(kinds, itertools.cycle(COLOURS), strict=False):
    for curve in smooth(rows, f"train/{kind}/loss", steps):
      axes.plot(*curve, color=colour, alpha=0.45, lw=1, zorder=1)
      later_losses += [*curve[1][1 + len(curve[1]) // 10 :]]
    if has_many and kind in objectives:
      _draw_by_blocks(axes, rows, kind, colour, curriculum, objectives[kind])
    else:
      style = {"label": f"{kind}, held out", "color": colour, **_MARKED}
      _draw_line(axes, rows, f"eval/{kind}/loss", **style)
    for name, dashes in zip(sets, itertools.cycle(_DASHES), strict=False):
      style = {"lw": 1.3, "ls": dashes, "label": f"{kind}, {name}"}
      _draw_line(axes, rows, f"eval/{kind}/{name}/loss", color=colour, **style)
  if not math.isnan(unigram):
    axes.axhline(unigram, color="0.4", lw=1, ls=":", label="unigram entropy")
    later_losses.append(unigram)
  _limit_losses(axes, rows, later_losses)
  axes.set_ylabel("loss (nats per target)")
  legend(axes, "held-out losses\n" * has_many + "thin: in training")


def _limit_losses(axes, rows: ByStep, others: Sequence[float]) -> None:
  # The losses of the first steps would flatten the curves.
  visible = [
    row[key]
    for step, row in rows.items()
    for key in row
    if step > 0 and key.startswith("eval/") and key.endswith("/loss")
  ]
  visible = [*filter(math.isfinite, [*visible, *others])]
  if visible:
    margin = 0.08 * (max(visible) - min(visible)) + 0.05
    axes.set_ylim(min(visible) - margin, max(visible) + margin)


def _draw_by_blocks(
  axes,
  rows: ByStep,
  kind: str,
  colour: str,
  curriculum: Curriculum,
  objective: str,
) -> None:
  """Draws a held-out loss after its objective's blocks, and after others.

  `kind` names the loss, and `objective` its objective in the curriculum. A thin
  line joins all values. Step 0 is after others.
  """
  steps_after = {
    step
    for phase in curriculum.phases
    for step in rows
    if phase.start < step <= phase.stop and objective in phase.shares
  }
  after = {step: row for step, row in rows.items() if step in steps_after}
  elsewhere = {s: row for s, row in rows.items() if s not in steps_after}
  key = f"eval/{kind}/loss"
  style = {"color": colour, **_MARKED}
  _draw_line(axes, rows, key, color=colour, alpha=0.4, lw=0.6)
  _draw_line(axes, after, key, label=f"{kind}, after {kind} blocks", **style)
  style |= {"lw": 1.2, "ls": "--", "mfc": "white"}
  _draw_line(axes, elsewhere, key, label=f"{kind}, after others", **style)


def _draw_pairs(axes, rows: ByStep, keys: Sequence[str]) -> None:
  """Draws accuracies on minimal pairs."""
  for key, colour in zip(keys, COLOURS, strict=False):
    style = {"label": key.removeprefix(PAIRS), "color": colour, **_MARKED}
    _draw_line(axes, rows, key, **style)
  axes.axhline(0.5, color="0.4", lw=1, ls=":", label="chance")
  axes.set_ylabel("minimal pairs\n(share right)")
  legend(axes)


def smooth(rows: ByStep, key: str, steps: int) -> Iterator[np.ndarray]:
  """Yields the curves of a training loss: steps and values, `[2, n]`.

  Both are means over 1/300 of the run's `steps`. Where the objective paused, a
  curve ends and another begins.
  """
  logged = [
    (step, row)
    for step, row in rows.items()
    if any(name.startswith("train/") for name in row)
  ]
  for has_loss, part in itertools.groupby(logged, lambda pair: key in pair[1]):
    if has_loss:
      points = ((step, row[key]) for step, row in part)
      bins = itertools.groupby(points, lambda p: (p[0] - 1) * _BINS // steps)
      yield np.stack([np.mean(list(group), 0) for _, group in bins], 1)


def _draw_line(axes, rows: ByStep, key: str, **style) -> None:
  points = [(step, row[key]) for step, row in rows.items() if key in row]
  if points:
    axes.plot(*zip(*points, strict=True), **style)


def legend(axes, title: str = "") -> None:
  axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=9, title=title)


def _label(axes, curriculum: Curriculum) -> None:
  """Writes the name of each phase above it, if the phase is long enough."""
  transform = axes.get_xaxis_transform()
  for phase in curriculum.phases:
    needed = (0.005 + 0.01 * len(str(phase))) * curriculum.steps
    if phase.stop - phase.start > needed:
      style = {"ha": "center", "transform": transform, "color": "0.3"}
      middle = (phase.start + phase.stop) / 2
      axes.text(middle, 1.01, str(phase), fontsize=9, **style)


def canvas(width: float, height: float, title: str):
  """Returns an empty figure of a size in inches, with a title that fits.

  No text in it is mathematics: names may have dollar signs.
  """
  # Here: it takes half a second, and most commands draw nothing.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure
  from matplotlib.text import Text

  class PlainFigure(Figure):
    def draw(self, renderer):
      for text in self.findobj(Text):
        text.set_parse_math(False)
      super().draw(renderer)

  figure = PlainFigure(figsize=(width, height), layout="constrained")
  FigureCanvasAgg(figure)
  figure._repr_png_ = functools.partial(_png, figure)  # notebooks show it
  style = {"x": 0.02, "ha": "left", "fontsize": 11, "parse_math": False}
  text = figure.suptitle(title[:200], **style)
  while text.get_window_extent().x1 > 0.98 * figure.bbox.x1:
    text.set_text(f"{text.get_text().removesuffix('...')[:-1]}...")
  return figure


def tick(value: float) -> str:
  """Writes a number without rounding it: 2,048, 20,000, 1.5M."""
  short = quantity(value)
  exact = value >= 1e6 and parse_quantity(short) == value
  return short if exact else f"{value:,.10g}"


def step_axis(axes) -> None:
  """Formats x as whole steps, and removes the frame's upper right half."""
  from matplotlib.ticker import FuncFormatter

  if axes.get_xscale() == "linear":
    axes.locator_params(axis="x", integer=True)
  axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: tick(x)))
  axes.spines[["top", "right"]].set_visible(False)


def shade(
  panels: Sequence,
  curriculum: Curriculum,
  names: Mapping[str, str],
  verb: str = "trains",
) -> None:
  """Shades each phase of a curriculum in the greys of its objectives.

  In a mixed phase, each objective has a band whose height is its share.

  Args:
    panels: Axes to shade.
    curriculum: Phases to shade.
    names: Logged name of each objective, by its name in the curriculum. Their
      order decides the greys.
    verb: Verb after the name of an objective in the legend.
  """
  greys = dict(zip(names, itertools.cycle(SHADES), strict=False))
  # Many stripes would be stronger than the curves.
  opacity = {"alpha": 0.7 if len(curriculum.phases) > _MANY else 1.0}
  for axes, name in itertools.product(panels, curriculum.objectives):
    label = f"{names[name]} {verb}"
    axes.fill([], [], color=greys[name], label=label, **opacity)
  for phase in curriculum.phases:
    bottom = 0.0
    for name, share in phase.shares.items():
      top = min(bottom + share, 1.0)
      style = {"color": greys[name], "lw": 0, "zorder": 0, **opacity}
      for axes in panels:
        axes.axvspan(phase.start, phase.stop, bottom, top, **style)
      bottom = top


def save_figure(figure, path: pathlib.Path) -> None:
  """Writes a figure as a PNG, whole or not at all."""
  with files.replacing(path) as aside:
    figure.savefig(aside, dpi=_DPI, format="png")


def _png(figure) -> bytes:
  out = io.BytesIO()
  figure.savefig(out, dpi=_DPI, format="png")
  return out.getvalue()
