"""CLM, then MLM, against MLM alone in as many steps (arXiv 2507.00994).

    ./launch/study.sh --config=configs/studies/clm_then_mlm.py --scale=small \\
      --text=BABYLM_FOLDER

Rows train CLM for no, a quarter or half of their steps, and then MLM, at two
budgets. The model is LTG-BERT at 291,000 parameters, as in antlm_table. The
learning rate is constant until the last tenth (WSD), so that rows with the same
first steps train them once. docs/designs/clm_then_mlm.md has the claims and
expectations. `shrink` tries the command.
"""

from antlm_jax import config as config_lib
from antlm_jax.evals.studies.study import ExpectedText, Row, Scale, row_of

REPORT = "controls"
CONFIDENCE = 1 - 0.05 / 4  # of the four claims at the end
_BUDGETS = {"long": 4000, "short": 2000}  # steps; short rows branch from long
_SHARES = {"m": 0, "c25_m": 25, "c50_m": 50}  # of CLM, in percent


def _row(kind: str, budget: str) -> Row:
  """Makes a row: a share of CLM at a budget."""
  causal = _BUDGETS[budget] * _SHARES[kind] // 100
  masked = _BUDGETS[budget] - causal
  title = f"{_SHARES[kind]} % CLM, then MLM" if causal else "MLM"
  return Row(
    "LTG-BERT",
    f"{title}, {budget}",
    {"small": f"{causal}C+{masked}M steps" if causal else f"{masked}M steps"},
    {"small": 8},
    against=(f"m_{budget}",) if causal else (),
  )


ROWS = {f"{kind}_{b}": _row(kind, b) for b in _BUDGETS for kind in _SHARES}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, row="c25_m_long", scale="small", seed=0)
  row = row_of(arg, ROWS)
  table = config_lib.config_module("antlm_table")
  config = table.get_config(f"row=ltg_bert_m,scale=small,seed={arg.seed}")
  config.curriculum = row.curriculum[arg.scale]
  steps = _BUDGETS[arg.row.rpartition("_")[2]]
  config.schedule.update(name="wsd", warmup_steps=100, decay_steps=steps // 10)
  config.eval.update(every=200, rows=512)
  config.checkpoint.every = 0
  config.log.writers = ()
  return config


_WORDS = "--seq_len=128", "--share=0.008", "--vocab_size=2048"
_TEXT = {"LTG-BERT": _WORDS}, ExpectedText(2048, 128), (), ()
SCALES = {
  "small": Scale(*_TEXT),
  "shrink": Scale(*_TEXT, config="small", shrink=True),
}
