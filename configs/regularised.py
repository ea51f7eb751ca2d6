"""Whether mixing objectives helps if every row is regularised as well.

    ./launch/study.sh --config=regularised --scale=grid --text=BABYLM_FOLDER
    ./launch/study.sh --config=regularised --scale=small --text=BABYLM_FOLDER
    ./launch/study.sh --config=regularised --scale=larger --text=BABYLM_FOLDER
    ./launch/study.sh --config=regularised --scale=curve --text=BABYLM_FOLDER

`grid` trains every way of training with nine regularisations. `small` trains
those that the grid has chosen with fresh seeds, and `larger` trains the best of
them at 1.1M parameters. `curve` asks how long an advantage lasts. One run is

    antlm train --workdir=DIR --config.data.path=PREPARED \\
      --config=regularised:row=repeated_cd_20_15,scale=grid,seed=0

It continues configs/mixing.py: its two texts, model, steps and settings. There
a CLM with dropout or strong weight decay was as good as mixing, but the mixed
rows had neither. Here all rows have the same grid: dropout 0, 0.1 or 0.2, and
weight decay 0.1, 0.5 or 1.5. `repeated_cd_20_15` reads the text `repeated` with
CLM and diffusion, dropout 0.2 and decay 1.5.

Written before the first run of `grid`
--------------------------------------

**Rows.** CLM, diffusion, CLM:MLM and CLM:diffusion 1:1, and AntLM's blocks, for
960 steps. Also CLM and diffusion alone for 480 steps, in which the schedule
ends: two models of half the compute. MLM alone is left out. In `mixing` it was
0.4 to 0.6 nats above diffusion, and still falling.

**Choice.** `grid` has one seed (100), and a loss of the half of held-out rows
that chooses lowest steps decides. It chooses seven cells for each text, both at
the end and at the lowest. CLM and half CLM are chosen by the causal loss,
diffusion and half diffusion by the masked loss at 15 %. Of all mixed rows it
chooses three: by the causal loss, by the masked loss, and by the mean of both.
`choose_rows` in evals/benchmarks/pages/regularised.py is this rule.

**Claims.** In each text, at the end and at the lowest, 16 in all:
1. The best mixed row is below the best CLM in causal nats.
2. The best mixed row is below the best diffusion in masked nats.
3. The best row in both modes is below half CLM in causal nats.
4. It is below half diffusion in masked nats. If 3 and 4 hold, then one model in
   both modes is better than two models of half the compute each.

**Decision.** Fresh seeds (0 to 7), on the other half of the held-out rows,
paired by seed, with Student's t at 1 - 0.05 / 16 (Bonferroni: 99.69 %). An
interval without zero decides.

**Expected.** `repeated`: the best CLM is at about 5.40 causal nats, from
dropout 0.2 and decay 0.5 or 1.5. The best mixed row is 0.05 to 0.2 above it at
the lowest, and within 0.1 at the end. It is 0.1 to 0.4 below diffusion in
masked nats. In both modes, it is within 0.1 of half CLM, and 0.3 to 0.6 below
half diffusion. `fresh`: little regularisation is best. The best mixed row is
0.05 to 0.15 above CLM in causal nats, and 0.1 to 0.3 below diffusion in masked
nats. In both modes it is 0 to 0.2 below half CLM, and 0.3 to 0.6 below half
diffusion.

**Noise and size.** In `mixing`, differences deviated over seeds by 0.02 to 0.04
(causal, lowest), 0.03 to 0.06 (causal, end, among rows that do not overfit) and
0.15 (masked). With eight seeds, half an interval is 1.6 deviations: 0.05 to
0.1 causally, and 0.24 with masks. With five seeds, it is 2.8 deviations, which
would not decide the masked claims. A run takes 75 to 100 seconds of one core:
`grid` takes 2.7 core-hours, `small` about 3.5.

Design of `larger` and `curve`, written before their first runs
----------------------------------------------------------------

This was written after 52 cells of `grid`, all of one seed.

**Larger.** The rows that `grid` chose at the end for `clm`, `mixed_clm` and
`both` (see `ROLES`), with the same regularisation. The model has four layers
of width 128 (1.1M parameters with embeddings), and the peak rate is 3e-3. Five
seeds. Expected: the mixed rows' differences from CLM have the same signs as at
`small`, and lie within 0.05 nats of them. Half an interval is 2.8 deviations,
0.06 to 0.15 nats, so that a small difference is not decided.

**Curve.** The same 1.97M tokens are read from 35,400 words (31 times), 70,900
(15), 142,000 (7), 396,000 (2.6) and 1.12M words (0.9): the texts of `TEXTS`.
Each has its own tokenizer, so losses are compared only within a text.
The rows are CLM, CLM:diffusion, CLM:MLM and AntLM. Each way of training has two
candidates: the cells of the grid with its lowest causal loss at the end, in
`repeated` and in `fresh`. In the other three texts, the grid's seed chooses one
of the two by the same loss. Five fresh seeds then measure the causal loss of
the mixed rows against CLM. Each of the 15 differences at the end has the
interval of the claims above (99.69 %). The lowest losses are described.

Expected: at 31 readings, the best mixed row is within 0.1 nats of CLM. The
difference grows as readings get fewer. With 0.9 readings, mixing costs 0.1 to
0.3 nats (CLM:MLM, CLM:diffusion) and 0.3 to 0.6 (AntLM). If so, mixing never
gains causal loss over a CLM that is regularised as well. The difference is then
the price of the second mode. Differences deviate by 0.03 to 0.06 nats, so that
half an interval is 0.08 to 0.17 nats.

A run of `larger` takes about five minutes: 2.5 core-hours. `curve` takes 24
runs of one seed, and 100 of the fresh seeds: 2.8 core-hours.

State of the runs: the 126 cells of `grid` have run (commit 0f86774). The 18
cells of CLM:diffusion ran again with commit a7cba17, before any counted run of
them: until then, the mask ratios of a step covered only half of their range.
The losses are in evals/benchmarks/results/regularised_grid.json, and the chosen
rows in `CHOSEN`. All 112 runs of `small`, the 25 of `larger` (commit e6590580)
and the 100 of `curve` have run. In the curve's other texts, seven candidates
each choose: 21 runs, not 24. Six rows of the curve are also rows of `small`,
with the same settings. So the runs of `small` with seeds 0 to 4 are theirs: 30
of the 100.
"""

from antlm_jax import config as config_lib
from antlm_jax.evals.studies.design import ExpectedText, Row, Scale, row_of

_MIXING = config_lib.config_module("mixing")
REPORT = "controls"
CONFIDENCE = 1 - 0.05 / 16  # of the claims: see above
# Shares of the text. The grid is of the first two.
GRID_TEXTS = "repeated", "fresh"
TEXTS = {
  "repeated": 0.0025,
  "read_15": 0.0075,
  "fresh": 0.015,
  "read_3": 0.042,
  "read_1": 0.12,
}
MIXED = "cm", "cd", "antlm"
_DROPOUTS = {0: 0.0, 10: 0.1, 20: 0.2}
_DECAYS = {1: 0.1, 5: 0.5, 15: 1.5}
_GRID_SEED = 100  # the first seed of `grid`
# Title, curriculum, and where masked tokens are predicted (see mixing.py).
_KINDS = {
  "c": ("CLM", "960C", 0),
  "d": ("diffusion", "960D", 1),
  "cm": ("CLM:MLM", "960C:M=1:1", 0),
  "cd": ("CLM:diffusion", "960C:D=1:1", 1),
  "antlm": ("AntLM", "160C+640M+160C", 0),
  "half_c": ("CLM, half the steps", "480C", 0),
  "half_d": ("diffusion, half the steps", "480D", 1),
}
# Roles of cells in the claims: the ways of training to choose from, and the
# objectives whose mean loss chooses.
ROLES = {
  "clm": (("c",), ("clm",)),
  "masked": (("d",), ("mlm",)),
  "mixed_clm": (MIXED, ("clm",)),
  "mixed_masked": (MIXED, ("mlm",)),
  "both": (MIXED, ("clm", "mlm")),
  "half_clm": (("half_c",), ("clm",)),
  "half_masked": (("half_d",), ("mlm",)),
}
# Each claim: a role is below another one in this loss.
CLAIMS = (
  ("mixed_clm", "clm", "clm"),
  ("mixed_masked", "masked", "mlm"),
  ("both", "half_clm", "clm"),
  ("both", "half_masked", "mlm"),
)
LARGER = "clm", "mixed_clm", "both"  # roles of the rows of `larger`
CURVE = "c", "cd", "cm", "antlm"  # ways of training of `curve`
# The rows that `grid` has chosen for each role, by text and measure: see
# "Choice" above.
_REPEATED = {
  "clm": "repeated_c_20_15",
  "masked": "repeated_d_0_5",
  "mixed_clm": "repeated_cm_10_15",
  "mixed_masked": "repeated_cm_20_15",
  "both": "repeated_cm_20_15",
  "half_clm": "repeated_half_c_10_15",
  "half_masked": "repeated_half_d_0_15",
}
_FRESH = {
  "clm": "fresh_c_0_15",
  "masked": "fresh_d_0_5",
  "mixed_clm": "fresh_cm_0_5",
  "mixed_masked": "fresh_cd_0_15",
  "both": "fresh_cm_0_5",
  "half_clm": "fresh_half_c_0_15",
  "half_masked": "fresh_half_d_0_5",
}
CHOSEN = {
  ("repeated", "end"): _REPEATED,
  ("repeated", "lowest"): _REPEATED | {"mixed_masked": "repeated_antlm_0_5"},
  ("fresh", "end"): _FRESH,
  ("fresh", "lowest"): _FRESH | {"mixed_masked": "fresh_antlm_0_5"},
}
# The two regularisations of each way of training in the curve's other texts.
CANDIDATES = {
  "c": ("20_15", "0_15"),
  "cd": ("0_15", "0_5"),
  "cm": ("10_15", "0_5"),
  "antlm": ("0_5",),
}
# The rows of the curve by text and way of training.
CHOSEN_FOR_CURVE = {
  "repeated": {
    "c": "repeated_c_20_15",
    "cd": "repeated_cd_0_15",
    "cm": "repeated_cm_10_15",
    "antlm": "repeated_antlm_0_5",
  },
  "read_15": {
    "c": "read_15_c_0_15",
    "cd": "read_15_cd_0_5",
    "cm": "read_15_cm_0_5",
    "antlm": "read_15_antlm_0_5",
  },
  "fresh": {
    "c": "fresh_c_0_15",
    "cd": "fresh_cd_0_5",
    "cm": "fresh_cm_0_5",
    "antlm": "fresh_antlm_0_5",
  },
  "read_3": {
    "c": "read_3_c_0_15",
    "cd": "read_3_cd_0_5",
    "cm": "read_3_cm_0_5",
    "antlm": "read_3_antlm_0_5",
  },
  "read_1": {
    "c": "read_1_c_0_15",
    "cd": "read_1_cd_0_5",
    "cm": "read_1_cm_0_5",
    "antlm": "read_1_antlm_0_5",
  },
}


def _seeds(row: str) -> dict[str, int]:
  """Returns the number of a row's seeds by scale."""
  seeds = {"grid": 1}
  if any(row in cells.values() for cells in CHOSEN.values()):
    seeds["small"] = 8
  for (_, when), cells in CHOSEN.items():
    if when == "end" and row in (cells[role] for role in LARGER):
      seeds["larger"] = 5
  if any(row in cells.values() for cells in CHOSEN_FOR_CURVE.values()):
    seeds["curve"] = 5
  return seeds


def _controls(row: str) -> tuple[str, ...]:
  """Returns the chosen rows that a chosen row is compared with."""
  found = [
    cells[control]
    for cells in CHOSEN.values()
    for role, control, _ in CLAIMS
    if cells[role] == row
  ]
  # `larger` and `curve` compare mixed rows with CLM.
  of_larger = (cells for (_, when), cells in CHOSEN.items() if when == "end")
  groups = [[cells[role] for role in LARGER] for cells in of_larger]
  groups += [list(cells.values()) for cells in CHOSEN_FOR_CURVE.values()]
  found += [clm for clm, *mixed in groups if row in mixed]
  return tuple(dict.fromkeys(found))


def _row(text: str, kind: str, regularisation: str) -> Row:
  """Makes a cell of the grid: a way of training with a regularisation."""
  dropout, decay = map(int, regularisation.split("_"))
  title, objectives, shift = _KINDS[kind]
  share, strength = _DROPOUTS[dropout], _DECAYS[decay]
  settings = _MIXING.dropout(share) | {
    "optimizer.weight_decay": strength,
    "objectives.M.shift": shift,
    "objectives.D.shift": shift,
  }
  name = f"{text}_{kind}_{regularisation}"
  seeds = _seeds(name)
  return Row(
    text,
    f"{title}, dropout {share:g}, decay {strength:g}",
    dict.fromkeys(seeds, f"{objectives} steps"),
    seeds,
    settings,
    measured=() if "C" in objectives else ("M",),
    against=_controls(name),
  )


_GRID = [f"{dropout}_{decay}" for dropout in _DROPOUTS for decay in _DECAYS]
ROWS = {
  f"{text}_{kind}_{regularisation}": _row(text, kind, regularisation)
  for text in TEXTS
  for kind in _KINDS
  for regularisation in (
    _GRID if text in GRID_TEXTS else CANDIDATES.get(kind, ())
  )
}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  scales = tuple(SCALES)
  arg = config_lib.parse_arg(arg, row="repeated_cd_20_15", scale=scales, seed=0)
  row = row_of(arg, ROWS)
  config = _MIXING.get_config()
  config.seed = arg.seed + (_GRID_SEED if arg.scale == "grid" else 0)
  config.curriculum = row.curriculum[arg.scale]
  config.eval.objectives = ("C", "M")
  if arg.scale == "larger":
    config.model.update(layers=4, width=128, mlp_width=352)
    config.schedule.peak_lr = 3e-3
  config.update(row.changes)
  return config


def _scale(**more) -> Scale:
  words = "--vocab_size=2048", "--seq_len=128"
  prepare = {t: (f"--share={share}", *words) for t, share in TEXTS.items()}
  return Scale(prepare, ExpectedText(2048, 128), (), (), **more)


SCALES = {name: _scale() for name in ("grid", "small", "larger", "curve")}
