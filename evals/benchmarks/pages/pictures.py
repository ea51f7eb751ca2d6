"""Pictures of the report on regularised mixing, from stored runs."""

import pathlib
from collections.abc import Callable, Mapping

from antlm_jax.evals.benchmarks.pages import regularised, studies
from antlm_jax.page import plots

_MARKERS = {"c": "D", "cd": "o", "cm": "s", "antlm": "^"}
_SHORT = {
  "clm": "CLM",
  "masked": "diffusion",
  "mixed_clm": "best mixed",
  "mixed_masked": "best mixed",
  "both": "best in both",
  "half_clm": "half CLM",
  "half_masked": "half diffusion",
}


def draw_regularisation(path: pathlib.Path) -> None:
  """Draws each way's causal loss with the default and the best settings."""
  grid = studies.stored("regularised_grid")
  design, runs = regularised.config(), grid.findings.runs
  figure = plots.canvas(
    6.4, 3.4, "Causal loss at the end, one seed of the grid"
  )
  panels = figure.subplots(1, len(design.GRID_TEXTS))
  for axes, text in zip(panels, design.GRID_TEXTS, strict=True):
    for y, kind in enumerate(design.CURVE):
      best = regularised.best_row(runs, text, (kind,))
      plain = f"{text}_{kind}_0_1"
      x0, x1 = (runs[row][0].end("clm") for row in (plain, best))
      axes.plot((x0, x1), (y, y), color="0.6", zorder=1)
      for x, face in ((x0, "white"), (x1, "black")):
        style = {"marker": _MARKERS[kind], "mfc": face, "mec": "black"}
        axes.plot(x, y, ls="none", **style)
    names = [regularised.WAYS[kind] for kind in design.CURVE]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="nats", title=text)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
  panels[1].set_yticklabels([])
  note = "hollow: no dropout, weight decay 0.1; filled: the best of nine"
  figure.supxlabel(note, fontsize=9)
  plots.save_figure(figure, path)


def draw_claims(path: pathlib.Path) -> None:
  """Draws the claims' differences at the end, with their intervals."""
  study, design = studies.stored("regularised_small"), regularised.config()
  figure = plots.canvas(
    6.4, 3.6, f"Differences at the end, with {study.confidence:.2%} intervals"
  )
  panels = figure.subplots(1, len(design.GRID_TEXTS), sharex=True)
  for axes, text in zip(panels, design.GRID_TEXTS, strict=True):
    labels = []
    for y, (role, control, kind) in enumerate(design.CLAIMS):
      of = regularised.contrast_of(study, (text, "end"), role, control, kind)
      value, low, high = of.found.interval(study.confidence)
      decided = low * high > 0
      axes.plot((low, high), (y, y), color="black")
      face = "black" if decided else "white"
      axes.plot(value, y, marker="o", mfc=face, mec="black", ls="none")
      mode = {"clm": "causal", "mlm": "masked"}[kind]
      labels.append(f"{_SHORT[role]} - {_SHORT[control]}\n{mode}")
    axes.axvline(0, color="0.6", zorder=0)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(xlabel="nats", title=text)
    axes.spines[["top", "right"]].set_visible(False)
  panels[1].set_yticklabels([])
  note = "below zero, the first is better; filled: decided"
  figure.supxlabel(note, fontsize=9)
  plots.save_figure(figure, path)


def draw_curve(path: pathlib.Path) -> None:
  """Draws the causal cost of mixing by the number of readings."""
  study, design = studies.stored("regularised_curve"), regularised.config()
  readings = study.about["readings"]
  figure = plots.canvas(
    6.4, 3.6, "Causal loss at the end, minus that of CLM, as well regularised"
  )
  axes = figure.subplots()
  styles = zip(design.CURVE[1:], plots.COLOURS, ("-", "--", ":"), strict=False)
  for place, (way, colour, line) in enumerate(styles):
    points = [
      (readings[text], *of.found.interval(study.confidence))
      for text, of in regularised.curve_of(way).items()
    ]
    x, y, low, high = zip(*points, strict=True)
    x = [at * 1.04 ** (place - 1) for at in x]  # so that no interval hides
    style = {"color": colour, "marker": _MARKERS[way], "ls": line}
    axes.plot(x, y, label=regularised.WAYS[way], **style)
    axes.vlines(x, low, high, color=colour)
  axes.axhline(0, color="0.6", zorder=0)
  axes.set(xscale="log", xlabel="readings of the text", ylabel="nats")
  axes.set_xticks([*readings.values()], [f"{x:.2g}" for x in readings.values()])
  axes.minorticks_off()
  axes.spines[["top", "right"]].set_visible(False)
  axes.legend(fontsize=9, frameon=False)
  plots.save_figure(figure, path)


PICTURES: Mapping[str, Callable[[pathlib.Path], None]] = {
  "regularised-grid.png": draw_regularisation,
  "regularised-claims.png": draw_claims,
  "regularised-curve.png": draw_curve,
}
