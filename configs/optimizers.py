"""AdamW, LAMB and Muon compared, at a size for a CPU.

To train all rows with eight seeds and report them, run

    ./launch/study.sh --config=optimizers --scale=small --text=BABYLM_FOLDER

To find an objective's best learning rates (`RATES`) again, run

    antlm sweep --output=DIR \\
      --grid="optimizer.name=adamw,lamb,muon;schedule.peak_lr=RATE,RATE" \\
      -- --config=optimizers:row=clm_adamw,seed=50 --config.data.path=PREPARED

Each optimizer trains CLM, MLM and GPT-BERT's mixture, `C:N=1:15`, on the same
rows of text in the same order, for 480 steps of 2,048 tokens. No text repeats.
`adamw_long` is AdamW at the same peak rate for 960 steps, without repetition
either. The model has 282,000 parameters. MLM and MNTP mask 30 % of the tokens,
and a mixed batch has the mean over all targets as its loss.

Written before the first counted run
------------------------------------

**Measure.** Held-out loss at the end of the run, in nats per target, on 512
rows of text (32,000 tokens). (Corrected on 27 November 2026: these are the same
for all seeds. Only their masks differ by seed.) The mixture has two measures,
causal and MNTP, so there are four.

**Rates.** 2.5e-3, 5e-3, 1e-2, 2e-2 and 4e-2, with one seed (50). The lowest
loss at the end wins, for the mixture the lowest mean of the two. If the best
rate is at an edge, the next rate by the factor of two is tried as well.

**Decision.** Muon against AdamW, LAMB against AdamW, Muon against LAMB, and
Muon against `adamw_long`, in four measures: 16 differences. They are paired by
seed (fresh seeds, 0 to 7) with Student's t at 1 - 0.05 / 16 (Bonferroni: 99.69
%). An interval without zero decides. Everything else is described, with 95 %
intervals if any. All rows of a seed are trained before the next seed. The clock
alone ends the runs, at 20:40 UTC: the seeds that all rows have count.

**Speed-up.** AdamW's loss as a linear function of log(steps), through its 480
and 960 steps: the steps at which it has Muon's loss, over 480. Published for
Muon after fair tuning: 1.4 at 0.1B parameters, 1.1 at 1.2B (arXiv 2509.02046).

**Expected.** Muon better than AdamW by 0.1 to 0.2 nats (CLM), 0.3 to 0.6 (MLM)
and 0.2 to 0.4 (both of the mixture). A speed-up of over 1.4 in each. LAMB
within 0.1 of AdamW.

**Noise and size.** The pilots had seeds 100 to 102. After 480 steps Muon at
2e-2 was better than AdamW at 1e-2 by 0.11 to 0.23 nats on CLM (deviation 0.06).
On MLM it was better than AdamW at 5e-3 by 0.44 to 0.74 nats (deviation 0.15).
Half an interval is 10.3 deviations with three seeds, 2.8 with five and 1.6 with
eight. So five seeds are about enough for CLM's 0.16 and MLM's 0.59, eight are
surely, and three would not decide. The range of the rates is from pilots, too.
CLM's best were 1e-2 (AdamW, of 5e-3 to 2e-2), 2e-2 (LAMB, of 1e-2 to 8e-2) and
2e-2 (Muon, of 5e-3 to 4e-2). A run of 480 steps takes 30 to 45 seconds on one
core that it shares.

The results are in docs/appendix/optimizers.md.
"""

from antlm_jax import config as config_lib
from antlm_jax.evals.studies.design import ExpectedText, Row, Scale, row_of

REPORT = "controls"
CONFIDENCE = 1 - 0.05 / 16  # of the differences: see above
_STEPS = 480  # of 2,048 tokens
# The sweeps' best peak rates: the same for all objectives, none at an edge.
RATES = {"adamw": 1e-2, "lamb": 2e-2, "muon": 2e-2}
_OBJECTIVES = {"clm": ("C",), "mlm": ("M",), "mixed": ("C", "N")}


def _row(family: str, optimizer: str, *against: str, steps=_STEPS) -> Row:
  """Makes a row of an objective (`family`) and an optimizer."""
  curriculum = {"clm": "C", "mlm": "M", "mixed": "C:N=1:15"}[family]
  title = {"adamw": "AdamW", "lamb": "LAMB", "muon": "Muon"}[optimizer]
  return Row(
    family,
    title if steps == _STEPS else f"{title}, {steps} steps",
    curriculum={"small": f"{steps}{curriculum} steps"},
    seeds={"small": 8},
    settings={
      "optimizer.name": optimizer,
      "schedule.peak_lr": RATES[optimizer],
      "eval.objectives": _OBJECTIVES[family],
    },
    masked="mntp" if family == "mixed" else "mlm",
    attention="causal" if family == "clm" else "bidirectional",
    against=tuple(f"{family}_{name}" for name in against),
  )


ROWS = {
  f"{family}_{name}": row
  for family in _OBJECTIVES
  for name, row in {
    "adamw": _row(family, "adamw"),
    "lamb": _row(family, "lamb", "adamw"),
    "muon": _row(family, "muon", "adamw", "lamb", "adamw_long"),
    "adamw_long": _row(family, "adamw", steps=2 * _STEPS),
  }.items()
}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, row="clm_muon", scale=("small",), seed=0)
  row = row_of(arg, ROWS)
  config = config_lib.changes("llama")
  config.model.update(
    layers=3, width=64, heads=4, kv_heads=4, mlp_width=176, max_seq_len=64
  )
  config.model.init_std = 0.08
  config.seed = arg.seed
  config.train.batch_size = 32
  config.schedule.update(name="cosine", warmup_steps=0.05)
  config.curriculum = row.curriculum[arg.scale]
  for name in ("M", "N"):
    masks = {"mask_ratio": 0.3, "mask_token": 1.0, "random_token": 0.0}
    config.objectives[name].update(masks)
  config.eval.update(every=48, rows=512)
  config.checkpoint.every = 0
  config.log.update(every=48, writers=())
  config.update(row.changes)
  return config


def _scale(share: float, vocab_size: int, **more) -> Scale:
  words = (f"--share={share}", f"--vocab_size={vocab_size}", "--seq_len=64")
  prepare = dict.fromkeys(_OBJECTIVES, words)
  return Scale(prepare, ExpectedText(vocab_size, 64), (), (), **more)


SCALES = {
  "shrink": _scale(0.002, 512, config="small", shrink=True),
  "small": _scale(0.15, 2048),
}
