"""The picture of a run: its learning curves over its curriculum."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence

from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.runtime import files
from antlm_jax.training.experiment import Run
from antlm_jax.training.metrics import PAIRS
from antlm_jax.units import quantity

# Colours by order of appearance; told apart in grey and by the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREYS = ("0.1", "0.9", "0.5")  # of data
_DASHES = ("--", ":", "-.")  # of several held-out sets


def curves(
  run: Run, records: Sequence[dict], unigram: float, path: pathlib.Path
) -> None:
  """Draws training and held-out losses, phases shaded, to a PNG.

  Accuracies on minimal pairs have a panel of their own, and phases of data are
  the lowest panel's shades, if there are any. `records` are those of
  `metrics.read_records`, `unigram` the entropy of the held-out tokens in nats.
  """
  curriculum, mix = run.curriculum, run.order.mix
  names = {name: o.name for name, o in run.objectives.items()}
  pairs = sorted({k for r in records for k in r if k.startswith(PAIRS)})
  heights = (5, 2, 1) if pairs else (5, 1)
  figure = canvas(9, 5.2 + bool(pairs))
  panels = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
  kinds = _kinds(records, curriculum, names)
  colours = dict(zip(kinds, COLOURS * len(kinds), strict=False))
  shade(panels[:-1] if mix else panels, curriculum, names, colours)
  _label(panels[0], curriculum, names, colours)
  if mix:
    grey = {name: GREYS[i % 3] for i, name in enumerate(mix.objectives)}
    same = {name: name for name in grey}
    shade(panels[-1:], mix, same, grey)
    _label(panels[-1], mix, same, dict.fromkeys(grey, "0.3"))
  _draw_losses(panels[0], records, colours, unigram)
  if pairs:
    _draw_pairs(panels[1], records, pairs)
  rate = panels[-1]
  _line(rate, records, "train/learning_rate", "0.2", lw=1.2)
  rate.set_ylabel("rate")
  rate.set_xlabel("step")
  rate.set_xlim(0, curriculum.steps)
  for axes in panels:
    step_axis(axes)
  save(figure, path)


def _draw_losses(axes, records, colours, unigram) -> None:
  for kind, colour in colours.items():
    _line(axes, records, f"train/{kind}/loss", colour, alpha=0.45, lw=1)
    style = {"lw": 2, "marker": "o", "ms": 3.5, "label": f"{kind}, held out"}
    _line(axes, records, f"eval/{kind}/loss", colour, **style)
    for of, dashes in zip(_sets(records), itertools.cycle(_DASHES)):
      style = {"lw": 1.3, "ls": dashes, "label": f"{kind}, {of}"}
      _line(axes, records, f"eval/{kind}/{of}/loss", colour, **style)
  axes.axhline(unigram, color="0.4", lw=1, ls=":", label="unigram entropy")
  axes.set_ylabel("loss (nats per target)")
  axes.set_ylim(*_limits(records, unigram))
  # Many curves leave no room for it among them.
  beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
  place = beside if _sets(records) else {"loc": "best"}
  axes.legend(**place, frameon=True, title="thin: in training")


def _draw_pairs(axes, records, keys) -> None:
  for key, colour in zip(keys, COLOURS, strict=False):
    mode = key.removeprefix(PAIRS)
    _line(axes, records, key, colour, lw=2, marker="o", ms=3.5, label=mode)
  axes.axhline(0.5, color="0.4", lw=1, ls=":")  # by chance
  axes.set_ylabel("pairs right")
  axes.legend(loc="best", frameon=True)


def _kinds(records, curriculum, names) -> list[str]:
  """Objectives in training order, then those only evaluated."""
  kinds = [names[name] for name in curriculum.objectives]
  for record in records:
    for key in record:
      part = key.split("/")
      if part[2:] == ["loss"] and part[1] not in kinds:
        kinds.append(part[1])
  return kinds


def _sets(records) -> list[str]:
  """The names of the held-out sets, if there are several."""
  parts = [key.split("/") for record in records for key in record]
  return list(dict.fromkeys(p[2] for p in parts if p[3:] == ["loss"]))


def _line(axes, records, key, colour, **style) -> None:
  points = [(r["step"], r[key]) for r in records if key in r]
  # A gap where the objective paused, not a line across the other's phase.
  logged = [r["step"] for r in records if any(k[:6] == key[:6] for k in r)]
  place = {step: i for i, step in enumerate(dict.fromkeys(logged))}
  broken = points[:1]
  for (before, _), point in itertools.pairwise(points):
    if place[point[0]] - place[before] > 1:
      broken.append((before, float("nan")))
    broken.append(point)
  if broken:
    axes.plot(*zip(*broken, strict=True), color=colour, **style)


def _limits(records, unigram) -> tuple[float, float]:
  """Fits the held-out curves; the first steps' losses would flatten them."""
  values = [
    value
    for r in records
    for key, value in r.items()
    if key.startswith("eval/") and key.endswith("/loss") and r["step"] > 0
  ]
  values.append(unigram)  # its line is to be seen
  margin = 0.08 * (max(values) - min(values)) + 0.05
  return min(values) - margin, max(values) + margin


def _label(axes, curriculum: Curriculum, names, colours) -> None:
  """Writes over each phase that is long enough what it trains."""
  transform = axes.get_xaxis_transform()
  for phase in curriculum.phases:
    if phase.stop - phase.start > 0.04 * curriculum.steps:
      main = max(phase.shares, key=phase.shares.get)
      style = {"ha": "center", "weight": "bold", "transform": transform}
      middle = (phase.start + phase.stop) / 2
      axes.text(middle, 1.01, str(phase), color=colours[names[main]], **style)


# -------------------------------------------- shared with other pictures


def canvas(width: float, height: float):
  """Returns an empty figure of this size in inches."""
  # Here: it takes half a second, and most commands draw nothing.
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(width, height), layout="constrained")
  FigureCanvasAgg(figure)
  return figure


def step_axis(axes) -> None:
  """Makes x the steps, and leaves out the frame's upper right half."""
  from matplotlib.ticker import FuncFormatter

  axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: quantity(x)))
  axes.spines[["top", "right"]].set_visible(False)


def shade(
  panels: Sequence,
  curriculum: Curriculum,
  names: Mapping[str, str],
  colours: Mapping[str, str],
) -> None:
  """Shades phases in the colours of what they train, in bands by its shares.

  `names` are the objectives' logged names by name in the curriculum, `colours`
  are by logged name.
  """
  for phase in curriculum.phases:
    low = 0.0
    for name, share in phase.shares.items():
      colour, high = colours[names[name]], min(low + share, 1.0)
      for axes in panels:
        axes.axvspan(
          phase.start, phase.stop, low, high, color=colour, alpha=0.12, lw=0
        )
      low = high


def save(figure, path: pathlib.Path) -> None:
  """Writes a figure as a PNG, whole or not at all."""
  with files.replacing(path) as aside:
    figure.savefig(aside, dpi=130, format="png")
