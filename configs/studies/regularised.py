"""Whether mixing objectives helps if every row is regularised as well.

    ./launch/study.sh --config=configs/studies/regularised.py --scale=grid \\
      --text=BABYLM_FOLDER

The other scales are `small`, `larger` and `curve`, in this order.
`grid` trains every way of training with nine regularisations. `small` trains
those that the grid has chosen with fresh seeds, and `larger` trains the best of
them at 1.1M parameters. `curve` asks how long an advantage lasts. One run is

    antlm train --workdir=DIR --config.data.path=PREPARED \\
      --config=regularised:row=repeated_cd_20_15,scale=grid,seed=0

All rows have the same grid: dropout 0, 0.1 or 0.2, and weight decay 0.1, 0.5 or
1.5. `repeated_cd_20_15` reads the text `repeated` with CLM and diffusion,
dropout 0.2 and decay 1.5. docs/designs/regularised.md has the claims and
expectations that were written before the runs.
"""

from antlm_jax import config as config_lib
from antlm_jax.evals.studies.study import ExpectedText, Row, Scale, row_of

REPORT = "controls"
CONFIDENCE = 1 - 0.05 / 16  # of the 16 claims
# Shares of the text. The grid is of the first two.
GRID_TEXTS = "repeated", "fresh"
TEXTS = {
  "repeated": 0.0025,
  "read_15": 0.0075,
  "fresh": 0.015,
  "read_3": 0.042,
  "read_1": 0.12,
}
_DROPOUTS = {0: 0.0, 10: 0.1, 20: 0.2}
_DECAYS = {1: 0.1, 5: 0.5, 15: 1.5}
_GRID_SEED = 100  # the first seed of `grid`
# Title, curriculum, and how many places before a masked token predicts it.
_KINDS = {
  "c": ("CLM", "960C", 0),
  "d": ("diffusion", "960D", 1),
  "cm": ("CLM:MLM", "960C:M=1:1", 0),
  "cd": ("CLM:diffusion", "960C:D=1:1", 1),
  "antlm": ("AntLM", "160C+640M+160C", 0),
  "half_c": ("CLM, half the steps", "480C", 0),
  "half_d": ("diffusion, half the steps", "480D", 1),
}
# Each claim: the row of a role has a lower loss than the row of another role.
CLAIMS = (
  ("mixed_clm", "clm"),
  ("mixed_masked", "masked"),
  ("both", "half_clm"),
  ("both", "half_masked"),
)
LARGER = "clm", "mixed_clm", "both"  # roles of the rows of `larger`
# The rows that `grid` has chosen for each role, by text and measure.
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
# The rows of the curve by text and way of training. The grid's seed has chosen
# the first candidates in `repeated`, and the last in all other texts.
CHOSEN_FOR_CURVE = {
  text: {
    kind: f"{text}_{kind}_{cells[0 if text == 'repeated' else -1]}"
    for kind, cells in CANDIDATES.items()
  }
  for text in TEXTS
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
    for role, control in CLAIMS
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
  settings = {
    "model.dropout": share,
    "model.attention_dropout": share,
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
  config = config_lib.changes("llama")
  config.model.update(
    layers=3, width=64, heads=4, kv_heads=4, mlp_width=176, max_seq_len=128
  )
  config.model.init_std = 0.08
  config.train.batch_size = 16
  config.schedule.update(name="cosine", peak_lr=5e-3, warmup_steps=0.05)
  config.objectives.M.update(mask_token=1.0, random_token=0.0)
  config.eval.update(every=0.05, rows=96, objectives=("C", "M"))
  config.checkpoint.every = 0
  config.log.update(every=48, writers=())
  config.seed = arg.seed + (_GRID_SEED if arg.scale == "grid" else 0)
  config.curriculum = row.curriculum[arg.scale]
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
