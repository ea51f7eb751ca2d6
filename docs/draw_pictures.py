"""Draws pictures of the pages, readable at a width of 400 pixels.

    python docs/draw_pictures.py [RUN]

The masks are those of `AttentionMask`, and the findings those of the stored
studies (this needs the extra `evals`). The start picture needs RUN, a folder of
the quickstart's run, such as runs/quickstart/train.
"""

import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from antlm_jax import config
from antlm_jax.evals.studies import report
from antlm_jax.evals.studies.reporting import record
from antlm_jax.evals.studies.reporting.plots import draw_means, mean_line
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.objectives.curriculum import parse_curriculum
from antlm_jax.page import history, plots

IMAGES = pathlib.Path(__file__).parent / "images"
RESULTS = pathlib.Path(__file__).parents[1] / "evals/benchmarks/results"
_DPI = 200
_BLUE, _ORANGE, *_ = plots.COLOURS
_DARK, _PALE = "#0B4A78", "#E8E8E8"
WORDS = ("dogs", "run", ".", "cats", "sleep", ".")


# ----------------------------------------------------------------------- masks


def masks() -> dict[str, AttentionMask]:
  """Returns the masks of the picture for `WORDS`, by title."""
  at = np.arange(len(WORDS), dtype=np.int32)
  document = at // 3  # two documents of three tokens
  return {
    "causal\n(CLM)": CAUSAL,
    "bidirectional\n(MLM)": BIDIRECTIONAL,
    "prefix of three\n(prefix LM)": AttentionMask(
      k_end=np.maximum(at + 1, 3)[None]
    ),
    "two documents\n(MLM)": AttentionMask(
      k_start=3 * document[None], k_end=3 * (document[None] + 1)
    ),
  }


def seen_tokens(mask: AttentionMask) -> np.ndarray:
  """Returns which tokens each of `WORDS` sees, bool `[T, T]`."""
  size = len(WORDS)
  dense = mask.dense(size, size)
  return np.ones((size, size), bool) if dense is None else np.asarray(dense[0])


def draw_masks():
  """Returns a figure of each mask: a grid with a row for each token."""
  figure = plots.canvas(4.4, 5.2, "Which words each word can see")
  panels = figure.subplots(2, 2).flat
  for axes, (title, mask) in zip(panels, masks().items(), strict=True):
    for (i, j), seen in np.ndenumerate(seen_tokens(mask)):
      style = {"fc": _DARK if seen else _PALE, "ec": "white", "lw": 1.5}
      axes.add_patch(_rectangle((j - 0.5, i - 0.5), 1, 1, **style))
    places = range(len(WORDS))
    axes.set(xlim=(-0.5, 5.5), ylim=(5.5, -0.5), aspect="equal")
    axes.set_xticks(places, WORDS, rotation=90, fontsize=9)
    axes.set_yticks(places, WORDS, fontsize=9)
    axes.set_title(title, fontsize=10)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
  figure.supxlabel("dark: the word of the row sees this word", fontsize=10)
  return figure


def _rectangle(*args, **style):
  from matplotlib.patches import Rectangle

  return Rectangle(*args, **style)


# ------------------------------------------------------------ the route of data

_ROUTE = (  # a box and its example, and the arrow that leads to the next
  ("text", "dogs run .", "antlm prepare"),
  ("rows of tokens, on disk", "17  42  9  23  51  9", "step number"),
  (
    "batch: inputs, mask, targets",
    "CLM  dogs run  →  run .\nMLM  dogs <mask> .  →  run",
    "train step: loss, gradients",
  ),
  ("state", "parameters, optimizer, step", "every tenth of a run"),
  ("checkpoint", "runs/NAME/checkpoints/2000", ""),
)
_ENDS = (
  ("use", "fill, generate,\nembed"),
  ("evaluate", "zero-shot,\nfine-tuning"),
  ("publish", "Hugging Face,\ntransformers"),
)


def draw_route():
  """Returns a figure of the way from text to a checkpoint and its uses."""
  figure = plots.canvas(4.4, 6.4, "From text to a model")
  axes = figure.subplots()
  axes.set(xlim=(0, 12), ylim=(17.15, 0.1))
  axes.axis("off")
  arrow = {"arrowstyle": "-|>", "color": "0.2", "lw": 1.3}
  top = 0.3
  for title, example, action in _ROUTE:
    height = 1.25 + 0.55 * (1 + example.count("\n"))
    style = {"fc": "#EAF2F8", "ec": _DARK, "lw": 1.2}
    axes.add_patch(_rectangle((0.3, top), 11.4, height, **style))
    axes.text(6, top + 0.55, title, **_centred(10.5, weight="bold"))
    axes.text(6, top + 0.45 + height / 2, example, **_centred(9.5))
    top += height
    if action:
      axes.annotate("", (3, top + 0.95), (3, top), arrowprops=arrow)
      style = {"fontsize": 9.5, "va": "center", "style": "italic"}
      axes.text(3.5, top + 0.42, action, **style)
      top += 0.98
  for k, (title, example) in enumerate(_ENDS):
    left = 0.3 + 3.9 * k
    axes.annotate(
      "", (left + 1.8, top + 0.98), (left + 1.8, top), arrowprops=arrow
    )
    style = {"fc": "#F4F4F4", "ec": "0.3", "lw": 1.2}
    axes.add_patch(_rectangle((left, top + 1), 3.6, 2.35, **style))
    middle = left + 1.8
    axes.text(middle, top + 1.5, title, **_centred(10.5, weight="bold"))
    axes.text(middle, top + 2.5, example, **_centred(9.5))
  return figure


def _centred(size: float, **more) -> dict:
  return {"fontsize": size, "ha": "center", "va": "center", **more}


# ---------------------------------------------------------- the life of a pod

_PLACES = {  # left, top, width, height; a title and its lines
  "machine": (0.3, 0.3, 4.6, 1.9, "your machine", "may be off after 2"),
  "request": (7.1, 0.3, 4.6, 1.9, "queued request", "of TPU VMs"),
  "watcher": (1.7, 4.1, 2.9, 1.9, "watcher", "a small VM"),
  "prepare": (4.9, 5.0, 1.9, 1.0, "", "prepare"),
  "workers": (7.1, 4.1, 4.6, 1.9, "workers", "one for each host"),
  "bucket": (
    *(0.3, 7.9, 11.4, 2.5, "bucket"),
    "rows, checkpoints and metrics\ncode, packages, logs and status",
  ),
}
_ARROWS = (  # number, start and end
  (0, (5.85, 6), (5.85, 7.9)),
  (1, (0.9, 2.2), (0.9, 7.9)),
  (2, (4.9, 1.25), (7.1, 1.25)),
  (2, (3.2, 2.2), (3.2, 4.1)),
  (3, (10.5, 2.2), (10.5, 4.1)),
  (4, (8.2, 7.9), (8.2, 6)),
  (5, (10.5, 6), (10.5, 7.9)),
  (6, (4.6, 4.4), (7.1, 2)),
  (7, (8.2, 4.1), (8.2, 2.2)),
  (7, (3.2, 7.9), (3.2, 6)),
)
_EVENTS = (
  "0  Before: a VM prepares the rows, and copies them.",
  "1  run copies the code to the bucket.",
  "2  run requests TPUs, and starts the watcher.",
  "3  TPUs become free, and the workers start.",
  "4  Workers read code, rows and the last checkpoint.",
  "5  They write checkpoints, and each half minute logs.",
  "6  Preempted: the watcher requests the TPUs again.",
  "7  The end: the first worker writes the status and\n"
  "    deletes the TPUs. The watcher reads it, and ends.",
)


def draw_pod():
  """Returns a figure of a pod's life: the machines, and numbered events."""
  figure = plots.canvas(4.4, 5.65, "The life of a run on TPU VMs")
  axes = figure.subplots()
  axes.set(xlim=(0, 12), ylim=(14.75, 0))
  axes.axis("off")
  for name, (left, top, width, height, title, text) in _PLACES.items():
    style = {"fc": "#EAF2F8", "ec": _DARK, "lw": 1.2}
    if name == "machine":
      style |= {"fc": "white", "ls": "--"}
    axes.add_patch(_rectangle((left, top), width, height, **style))
    middle = left + width / 2
    axes.text(middle, top + 0.6, title, **_centred(10.5, weight="bold"))
    lower = top + height / 2 + (0.5 if title else 0)
    axes.text(middle, lower, text, **_centred(9))
  for number, start, end in _ARROWS:
    arrow = {"arrowstyle": "-|>", "color": "0.2", "lw": 1.3}
    axes.annotate("", end, start, arrowprops=arrow)
    middle = [sum(pair) / 2 for pair in zip(start, end, strict=True)]
    badge = {"boxstyle": "circle,pad=0.2", "fc": _BLUE, "ec": "white"}
    style = _centred(9, weight="bold", color="white")
    axes.text(*middle, str(number), bbox=badge, **style)
  axes.text(0.3, 10.9, "\n".join(_EVENTS), fontsize=8.7, va="top")
  return figure


# ---------------------------------------------------------- the start picture


def draw_start(run: pathlib.Path):
  """Returns a figure of the held-out losses of a run of CLM and MLM in turn."""
  summary = json.loads((run / "summary.json").read_text("utf-8"))
  ends = [*summary["switches"], summary["steps"]]  # of the blocks, CLM first
  figure = plots.canvas(4.6, 4.2, "One model learns two tasks in turn")
  axes = figure.subplots()
  for k, (name, colour, marker) in enumerate(
    (("clm", _BLUE, "o"), ("mlm", _ORANGE, "s"))
  ):
    loss = {m.step: m.value for m in history.read(run, f"eval/{name}/loss")}
    style = {"color": colour, "marker": marker, "zorder": 3}
    own, others = ends[k::2], ends[1 - k :: 2]
    axes.plot(own, [loss[step] for step in own], lw=2.4, ms=4, **style)
    style |= {"lw": 1, "ls": "--", "mfc": "white", "ms": 3.5}
    axes.plot(others, [loss[step] for step in others], **style)
  unigram = summary["unigram_entropy"]
  axes.axhline(unigram, color="0.4", lw=1, ls=":")
  end = ends[-1]
  for x, y, text, colour in (
    (end, unigram + 0.1, "knows only how frequent words are", "0.3"),
    (0.38 * end, 3.3, "dashed: after a block\nof the other task", "0.1"),
    (end, 2.25, "CLM: predict the next word", _BLUE),
    (end, 1.0, "MLM: fill in masked words", "#A34700"),
  ):
    right = "left" if x < end else "right"
    axes.text(x, y, text, color=colour, fontsize=10, ha=right, va="bottom")
  axes.set(xlim=(0, end), ylim=(0.8, None))
  axes.set_xlabel("training step", fontsize=10)
  axes.set_ylabel("loss on held-out text\n(lower is better)", fontsize=10)
  plots.step_axis(axes)
  axes.set_xticks(np.linspace(0, end, 5))
  return figure


# ------------------------------------------------------------------ curricula

CURRICULA = "24C:M=1:1", "4C+16M+4C", "6C+18M"


def draw_curricula():
  """Returns a figure of `CURRICULA`: a bar over the epochs for each."""
  figure = plots.canvas(4.4, 3.2, "Which objective trains when")
  panels = figure.subplots(len(CURRICULA), 1, sharex=True)
  known = config.Config().known_objectives
  for axes, text in zip(panels, CURRICULA, strict=True):
    for phase in parse_curriculum(text, known, 1).phases:
      bottom, steps = 0.0, phase.stop - phase.start
      for name, share in phase.shares.items():
        style = {"fc": {"C": _BLUE, "M": _ORANGE}[name], "ec": "white"}
        corner = phase.start, bottom
        axes.add_patch(_rectangle(corner, steps, share, lw=1.5, **style))
        middle = phase.start + steps / 2, bottom + share / 2
        title = known[name].name.upper()
        style = _centred(9.5, color="white", weight="bold")
        axes.text(*middle, title, **style)
        bottom += share
    axes.set(xlim=(0, 24), ylim=(0, 1), yticks=[])
    axes.set_title(text, fontsize=10, loc="left", family="monospace")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
  panels[-1].set_xticks(range(0, 25, 4))
  panels[-1].set_xlabel("epoch", fontsize=10)
  return figure


# ------------------------------------------------------------------- findings

# Label, study, row and control of the claim, and measure.
_MIXED = "CLM:MLM, dropout 0, decay 0.5"
FINDINGS = (
  (
    "AntLM against overfit CLM, BabyLlama 1.1M (C)",
    "antlm_small",
    ("AntLM", "CLM"),
    "held-out clm loss, end",
  ),
  (
    "AntLM against CLM, lowest, LTG-BERT 0.3M (C)",
    "antlm_ltg_bert",
    ("AntLM", "CLM"),
    "held-out clm loss, lowest",
  ),
  (
    "AntLM against MLM, BabyLlama 1.1M (M)",
    "antlm_small",
    ("AntLM", "MLM"),
    "held-out mlm loss, end",
  ),
  (
    "25 % CLM first against MLM, 2,000 steps (M)",
    "clm_then_mlm",
    ("25 % CLM, then MLM, short", "MLM, short"),
    "held-out mlm loss, end",
  ),
  (
    "25 % CLM first against MLM, 4,000 steps (M)",
    "clm_then_mlm",
    ("25 % CLM, then MLM, long", "MLM, long"),
    "held-out mlm loss, end",
  ),
  (
    "C:M against CLM, read 31 times (C, at 95 %)",
    "wider_grid_final",
    ("CLM:MLM, dropout 0.1, decay 1.5", "CLM, dropout 0.2, decay 1.5"),
    "held-out clm loss, end",
  ),
  (
    "C:M against CLM, read 7 times (C)",
    "regularised_small",
    (_MIXED, "CLM, dropout 0, decay 1.5"),
    "held-out clm loss, end",
  ),
  (
    "C:M against half CLM, read 7 times (C)",
    "regularised_small",
    (_MIXED, "CLM, half the steps, dropout 0, decay 1.5"),
    "held-out clm loss, end",
  ),
  (
    "C:M against half diffusion, read 7 times (M)",
    "regularised_small",
    (_MIXED, "diffusion, half the steps, dropout 0, decay 0.5"),
    "held-out mlm loss, end",
  ),
)


def read_studies(folder: pathlib.Path) -> dict[str, dict]:
  """Returns the numbers of each study of `FINDINGS`, reported in a folder."""
  for name in {study for _, study, *_ in FINDINGS}:
    report.report(RESULTS / f"{name}.json", output=folder / name)
  return {
    path.parent.name: json.loads(path.read_text("utf-8"))
    for path in folder.glob("*/table.json")
  }


def findings(studies: dict[str, dict]) -> list[tuple[str, dict, str]]:
  """Returns the label, interval and verdict of each of `FINDINGS`."""
  found = []
  for label, study, (row, control), measure in FINDINGS:
    (claim,) = (
      claim
      for claim in studies[study]["claims"][""]
      if claim["claim"] == f"{row} is better than {control}"
      and claim["on"].startswith(measure)
    )
    level = f"{100 * studies[study]['confidence']:.4g} %"
    found.append((label, claim[level], claim["verdict"]))
  return found


def draw_findings(found: list[tuple[str, dict, str]]):
  """Returns a figure of differences: intervals around zero, with verdicts.

  As in the other pictures, causal is blue and masked orange.
  """
  figure = plots.canvas(4.6, 6.2, "Differences in held-out loss, in nats")
  axes = figure.subplots()
  axes.axvline(0, color="0.3", lw=1)
  verdicts = {"confirmed": "lower", "contradicted": "higher"}
  for y, (label, ends, verdict) in enumerate(found):
    word = verdicts.get(verdict.split()[0], "not decided")
    colour = _BLUE if "(C" in label else _ORANGE
    inside = colour if word == "lower" else "white"
    axes.plot([ends["low"], ends["high"]], [y, y], color=colour, lw=2.4)
    axes.plot(ends["estimate"], y, "o", color=colour, mfc=inside, ms=6)
    text = f"{label}: {ends['estimate']:+.3f}, {word}"
    style = {"bbox": {"fc": "white", "ec": "none", "pad": 1}, "color": colour}
    axes.text(-3.3, y - 0.42, text, fontsize=9, va="center", **style)
  axes.set_xscale("symlog", linthresh=0.2)
  ticks = (-2, -1, -0.4, -0.1, 0, 0.1, 0.4, 1, 2)
  axes.set_xticks(ticks, [f"{x:g}" for x in ticks], fontsize=9)
  axes.set(xlim=(-3.3, 3.3), ylim=(len(found) - 0.5, -0.8), yticks=[])
  axes.minorticks_off()
  axes.set_xlabel(
    "C, blue: causal loss. M, orange: masked loss.\n"
    "Filled: lower. From line 4 on: 0.3M parameters.\n"
    "(logarithmic beyond 0.2)",
    fontsize=10,
  )
  axes.spines[["top", "left", "right"]].set_visible(False)
  return figure


# ------------------------------------------------------------- CLM, then MLM

_SHARES = {  # by kind of row: label, colour (MLM is orange) and dash
  "m": ("MLM", _ORANGE, "-"),
  "c25_m": ("25 % CLM first", plots.COLOURS[2], "--"),
  "c50_m": ("50 % CLM first", plots.COLOURS[3], ":"),
}


def draw_clm_then_mlm():
  """Returns a figure of the masked losses of the study, by budget of steps."""
  rows = record.read_record(RESULTS / "clm_then_mlm.json")["rows"]
  figure = plots.canvas(4.6, 5.4, "Masked loss of MLM, and of CLM, then MLM")
  panels = figure.subplots(2, 1, sharex=True, sharey=True)
  for axes, budget in zip(panels, ("long", "short"), strict=True):
    for kind, (label, colour, dash) in _SHARES.items():
      runs = rows[f"{kind}_{budget}"]
      points = mean_line([run.held_out("mlm") for run in runs])
      style = {"color": colour, "ls": dash, "lw": 1.8, "ms": 3}
      draw_means(axes, points, label=label, **style)
    axes.set_title(f"{points[-1][0]:,} steps", fontsize=10)
    axes.set_ylabel("nats per token", fontsize=10)
    axes.set(xlim=(0, 4100), ylim=(5, 6.4))
    plots.step_axis(axes)
  panels[1].set_xticks(range(0, 4001, 1000))
  panels[1].legend(fontsize=10, loc="upper right")
  panels[1].set_xlabel("step (bands: 95 % intervals over seeds)", fontsize=10)
  return figure


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as folder:
    found = findings(read_studies(pathlib.Path(folder)))
  figures = {
    "masks": draw_masks(),
    "route": draw_route(),
    "pod": draw_pod(),
    "curricula": draw_curricula(),
    "findings": draw_findings(found),
    "clm_then_mlm": draw_clm_then_mlm(),
  }
  if sys.argv[1:]:
    figures["start"] = draw_start(pathlib.Path(sys.argv[1]))
  for name, figure in figures.items():
    figure.savefig(IMAGES / f"{name}.png", dpi=_DPI)
    print(f"wrote docs/images/{name}.png")
