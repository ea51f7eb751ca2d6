"""The picture of a run: its learning curves over its curriculum."""

import itertools
import pathlib
from collections.abc import Sequence

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.units import quantity

# Colours by order of appearance; told apart in grey and by the colour-blind.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def curves(
  records: Sequence[dict],
  curriculum: Curriculum,
  names: dict[str, str],
  unigram: float,
  path: pathlib.Path,
) -> None:
  """Draws training and held-out losses, phases shaded, to a PNG.

  Args:
    records: As `monitor.read_records` gives them.
    curriculum: Its phases are shaded.
    names: The objectives' logged names, by name in the curriculum.
    unigram: Entropy of the held-out tokens in nats, drawn as a line.
    path: Where to write.
  """
  figure = Figure(figsize=(9, 5.2), layout="constrained")
  FigureCanvasAgg(figure)
  loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
  kinds = _kinds(records, curriculum, names)
  colours = dict(zip(kinds, COLOURS * len(kinds), strict=False))
  _shade((loss, rate), curriculum, names, colours)
  for kind in kinds:
    _line(loss, records, f"train/{kind}/loss", colours[kind], alpha=0.45, lw=1)
    _line(
      loss, records, f"eval/{kind}/loss", colours[kind],
      lw=2, marker="o", ms=3.5, label=f"{kind}, held out",
    )  # fmt: skip
  loss.axhline(unigram, color="0.4", lw=1, ls=":", label="unigram entropy")
  loss.set_ylabel("loss (nats per target)")
  loss.set_ylim(*_limits(records, kinds, unigram))
  loss.legend(loc="best", frameon=True, title="thin: in training")
  _line(rate, records, "train/learning_rate", "0.2", lw=1.2)
  rate.set_ylabel("rate")
  rate.set_xlabel("step")
  rate.set_xlim(0, curriculum.steps)
  rate.xaxis.set_major_formatter(FuncFormatter(lambda x, _: quantity(x)))
  for axes in (loss, rate):
    axes.spines[["top", "right"]].set_visible(False)
  figure.savefig(path, dpi=130)


def _kinds(records, curriculum, names) -> list[str]:
  """Objectives in training order, then those only evaluated."""
  kinds = [names[name] for name in curriculum.objectives]
  for record in records:
    for key in record:
      part = key.split("/")
      if len(part) == 3 and part[1] not in kinds:
        kinds.append(part[1])
  return kinds


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


def _limits(records, kinds, unigram) -> tuple[float, float]:
  """Fits the held-out curves; the first steps' losses would flatten them."""
  values = [
    r[f"eval/{kind}/loss"]
    for r in records
    for kind in kinds
    if f"eval/{kind}/loss" in r and r["step"] > 0
  ]
  values.append(unigram)
  margin = 0.08 * (max(values) - min(values)) + 0.05
  return min(values) - margin, max(values) + margin


def _shade(all_axes, curriculum, names, colours) -> None:
  for phase in curriculum.phases:
    main = max(phase.shares, key=phase.shares.get)
    for axes in all_axes:
      axes.axvspan(
        phase.start, phase.stop, color=colours[names[main]], alpha=0.10, lw=0
      )
    if phase.stop - phase.start > 0.04 * curriculum.steps:
      all_axes[0].text(
        (phase.start + phase.stop) / 2, 1.01, str(phase),
        transform=all_axes[0].get_xaxis_transform(), ha="center",
        color=colours[names[main]], weight="bold",
      )  # fmt: skip
