"""CLM and CLM:MLM on little text with stronger regularisation.

    ./launch/study.sh --config=configs/studies/wider_grid.py --scale=grid \\
      --text=BABYLM_FOLDER
    ./launch/study.sh --config=configs/studies/wider_grid.py --scale=final \\
      --text=BABYLM_FOLDER --rows=BEST_CLM,BEST_MIXTURE

The best CLM of configs/studies/regularised.py is in the corner of its grid, and
this grid continues there. `cm` averages the loss over targets, so that CLM has
87 % of the weight, and `objectives` over both objectives. `grid` has one seed,
which chooses a row of CLM and a mixture, and `final` measures them with eight
others. `shrink` tries the command. docs/designs/wider_grid.md has the claim and
expectations.
"""

import itertools

from antlm_jax import config as config_lib
from antlm_jax.evals.studies.study import ExpectedText, Row, Scale, row_of

REPORT = "controls"
CONFIDENCE = 0.95  # of the one claim
# Title, curriculum, and how the loss is averaged.
_KINDS = {
  "c": ("CLM", "960C steps", "targets"),
  "cm": ("CLM:MLM", "960C:M=1:1 steps", "targets"),
  "objectives": ("CLM:MLM, equal weights", "960C:M=1:1 steps", "objectives"),
}
# Dropout in percent, and ten times the weight decay.
_CELLS = list(itertools.product((10, 20, 30, 40), (15, 30, 50)))
_CLM = tuple(f"c_{dropout}_{decay}" for dropout, decay in _CELLS)


def _row(kind: str, dropout: float, decay: float) -> Row:
  """Makes a cell of the grid: a way of training with a regularisation."""
  title, curriculum, average = _KINDS[kind]
  settings = {
    "model.dropout": dropout,
    "model.attention_dropout": dropout,
    "optimizer.weight_decay": decay,
    "train.loss_average": average,
  }
  return Row(
    "repeated",
    f"{title}, dropout {dropout:g}, decay {decay:g}",
    {"grid": curriculum, "small": curriculum},
    {"grid": 1, "small": 8},
    settings,
    against=() if kind == "c" else _CLM,
  )


ROWS = {
  f"{kind}_{dropout}_{decay}": _row(kind, dropout / 100, decay / 10)
  for kind in _KINDS
  for dropout, decay in _CELLS
}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  scales = "grid", "small"
  arg = config_lib.parse_arg(arg, row="c_30_15", scale=scales, seed=0)
  row = row_of(arg, ROWS)
  # As there, the first seed of `grid` is 100.
  spec = f"row=repeated_c_20_15,scale={arg.scale},seed={arg.seed}"
  config = config_lib.config_module("regularised").get_config(spec)
  config.curriculum = row.curriculum[arg.scale]
  config.eval.update(every=0.1, rows=512)
  config.update(row.changes)
  return config


_WORDS = "--share=0.0025", "--vocab_size=2048", "--seq_len=128"
_TEXT = {"repeated": _WORDS}, ExpectedText(2048, 128), (), ()
SCALES = {
  "grid": Scale(*_TEXT),
  "final": Scale(*_TEXT, config="small"),
  "shrink": Scale(*_TEXT, config="small", shrink=True),
}
