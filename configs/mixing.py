"""Whether mixing objectives beats a regularised CLM, under repetition.

    ./launch/study.sh --config=mixing --scale=small --text=BABYLM_FOLDER

trains and reports all of it; one run is

    antlm train --workdir=DIR --config.data.path=PREPARED \\
      --config=mixing:row=repeated_cd,seed=1

All rows of a text read the same rows of tokens in the same order, for 960 steps
of 2,048 tokens. `repeated` is 31 epochs of 35,400 words; `fresh` is 7 epochs of
142,000. The settings are our own. They are the same for all rows, except for
the settings that a row is named after, and for the shift. Rows with diffusion
predict masked tokens one position before, as dual language models do (arXiv
2512.14549). Rows with MLM predict them in place, as AntLM does (arXiv
2412.03275). All chosen tokens become `<mask>`, so that the held-out masked loss
shows no row an input that it was not trained on.

Written before the first counted run
------------------------------------

**Question.** In earlier runs (480 steps, commit e7f24fb) CLM mixed with
diffusion beat a CLM without dropout, noise or strong weight decay. Does it beat
the *best* regularised CLM? The published answers differ: yes (arXiv
2511.03276), or dropout, weight decay and noise gain as much (arXiv 2510.04071,
2606.16246).

**Measures**, in nats per target: the causal loss, the masked loss at 15 %, and
diffusion's bound. They use 96 held-out rows. (Corrected on 27 November 2026:
these are the same for all seeds. Only their masks differ by seed.) Each is
measured at the end, for users who train for a fixed time, and at its lowest,
for users who stop in time. Half of the held-out batches choose the lowest step,
and the other half measure it.

**Claims.** C:D is below the best of ten CLM rows (`_CLM`) in causal nats, and
below the better of M and D in masked nats. The same for C:M. C:D under Muon
with a tail average is below C under the same, in causal nats. In `fresh`, C:D
and C:M are below C in causal nats. Each claim counts at the end and at the
lowest: 14.

**Decision.** Differences are paired by seed, with Student's t over five seeds,
at 1 - 0.05 / 14 (Bonferroni over the claims: 99.64 %, 2.8 standard deviations
to a side). A claim about the best of several rows is confirmed if the mixed row
is better than each of them. This needs no further correction, since all must
hold. It is contradicted if any of the rows is better than the mixed row at 1 -
0.05 / 54, the number of all differences. Otherwise it is not decided. A row
that has not learnt decides nothing. All else is described.

**Expected**, repeated, for C:D against the best CLM row: better by over 0.3 at
the end, as most CLM rows still overfit. At the lowest it is within 0.1 to
either side, so not decided. C:M is expected to do the same. Against the better
of M and D in masked nats, C:D is better by 0.1 to 0.4 and C:M by 0 to 0.3. Of
CLM's regularisers dropout gains most at the lowest (0.05 to 0.15), decay of 1.5
gains most at the end. Under Muon the difference is as large as without. Fresh:
C:D is worse than C by 0.3 to 0.5, C:M by 0.2 to 0.5, at the lowest.

**Noise and size.** Over seeds, earlier differences deviated by 0.025 (causal,
lowest), 0.06 (causal, end) and 0.06 to 0.14 (masked). So intervals reach 0.07,
0.17 and 0.17 to 0.4 nats to a side. Pilots with seeds 100 and 101 chose the
length. MLM alone ends 960 steps at 5.84 nats, 0.46 below the 6.31 of token
frequencies (0.3 was required). In 480 steps it learnt nothing. CLM is lowest
after about 190 steps, at 5.77 and 5.80, and ends at 9.2.

**Order.** All rows of a seed are trained before the next seed. If the time ends
first, the seeds that all rows have are reported.

docs/results.md has the results.
"""

from antlm_jax import config as config_lib
from antlm_jax.evals.studies.design import ExpectedText, Row, Scale, row_of

REPORT = "controls"
CONFIDENCE = 1 - 0.05 / 14  # of the claims: see above
SEEDS = {"small": 5}
_STEPS = 960  # of 2,048 tokens


def _row(data: str, title: str, objectives: str, **more) -> Row:
  """Makes a row with five seeds."""
  curriculum = {"small": f"{objectives} steps"}
  return Row(data, title, curriculum, seeds=SEEDS, **more)


def _clm(title: str, settings: dict, objective: str = "C") -> Row:
  """Makes a row of CLM with a regulariser, compared by its causal loss."""
  return _row(
    "repeated",
    title,
    f"{_STEPS}{objective}",
    settings=settings,
    measured=("C",),
  )


def _masked(data: str, title: str, objectives: str, *against, shift=0, **more):
  """Makes a row with masked objectives, which predict by `shift`."""
  settings = {f"objectives.{name}.shift": shift for name in "MD"} | more
  return _row(
    data,
    title,
    objectives,
    settings=settings,
    measured=() if "C" in objectives else ("M",),
    against=tuple(f"{data}_{name}" for name in against),
  )


def dropout(share: float) -> dict:
  """Returns the settings that drop this share of activations."""
  return {"model.dropout": share, "model.attention_dropout": share}


def _noise(share: float) -> dict:
  """Returns the settings that replace a share of E's input by any tokens."""
  return {
    "objectives.E.mask_ratio": share,
    "objectives.E.mask_token": 0.0,
    "objectives.E.random_token": 1.0,
  }


_MUON = {
  "optimizer.name": "muon",
  "optimizer.average": "tail",
  "schedule.peak_lr": 2e-2,
}
_CLM = {
  "c": _clm("CLM", {}),
  "c_dropout_10": _clm("CLM, dropout 0.1", dropout(0.1)),
  "c_dropout_20": _clm("CLM, dropout 0.2", dropout(0.2)),
  "c_decay_5": _clm("CLM, weight decay 0.5", {"optimizer.weight_decay": 0.5}),
  "c_decay_15": _clm("CLM, weight decay 1.5", {"optimizer.weight_decay": 1.5}),
  "c_masks": _clm("CLM, 15 % masks in its input", {}, "E"),
  "c_random_5": _clm("CLM, 5 % random input", _noise(0.05), "E"),
  "c_random_15": _clm("CLM, 15 % random input", _noise(0.15), "E"),
  "c_middle": _clm("CLM, fill in the middle", {}, "F"),
  "c_muon": _clm("CLM, Muon", _MUON),
}
_CD, _CM = f"{_STEPS}C:D", f"{_STEPS}C:M"
ROWS = {f"repeated_{name}": row for name, row in _CLM.items()} | {
  "repeated_m": _masked("repeated", "MLM", f"{_STEPS}M"),
  "repeated_d": _masked("repeated", "diffusion", f"{_STEPS}D", shift=1),
  "repeated_cm": _masked("repeated", "CLM:MLM", f"{_CM}=1:1", *_CLM, "m", "d"),
  "repeated_cd": _masked(
    "repeated", "CLM:diffusion", f"{_CD}=1:1", *_CLM, "m", "d", shift=1
  ),
  "repeated_cm_3_1": _masked("repeated", "CLM:MLM 3:1", f"{_CM}=3:1"),
  "repeated_cd_3_1": _masked(
    "repeated", "CLM:diffusion 3:1", f"{_CD}=3:1", shift=1
  ),
  "repeated_cd_7_1": _masked(
    "repeated", "CLM:diffusion 7:1", f"{_CD}=7:1", shift=1
  ),
  "repeated_cd_muon": _masked(
    "repeated", "CLM:diffusion, Muon", f"{_CD}=1:1", "c_muon", shift=1, **_MUON
  ),
  "repeated_antlm": _masked("repeated", "AntLM", "160C+640M+160C"),
  "fresh_c": _masked("fresh", "CLM", f"{_STEPS}C"),
  "fresh_m": _masked("fresh", "MLM", f"{_STEPS}M"),
  "fresh_d": _masked("fresh", "diffusion", f"{_STEPS}D", shift=1),
  "fresh_cm": _masked("fresh", "CLM:MLM", f"{_CM}=1:1", "c"),
  "fresh_cd": _masked("fresh", "CLM:diffusion", f"{_CD}=1:1", "c", shift=1),
  "fresh_antlm": _masked("fresh", "AntLM", "160C+640M+160C"),
}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, row="repeated_cd", scale=("small",), seed=0)
  row = row_of(arg, ROWS)
  config = config_lib.changes("llama")
  config.model.update(
    layers=3, width=64, heads=4, kv_heads=4, mlp_width=176, max_seq_len=128
  )
  config.model.init_std = 0.08
  config.seed = arg.seed
  config.train.batch_size = 16
  config.schedule.update(name="cosine", peak_lr=5e-3, warmup_steps=0.05)
  config.curriculum = row.curriculum[arg.scale]
  config.objectives.M.update(mask_token=1.0, random_token=0.0)
  config.eval.update(every=0.05, rows=96, objectives=("C", "M", "D"))
  config.checkpoint.every = 0
  config.log.update(every=48, writers=())
  config.update(row.changes)
  return config


def _scale(repeated: float, fresh: float, vocab_size: int, **more) -> Scale:
  share = {"repeated": repeated, "fresh": fresh}
  words = (f"--vocab_size={vocab_size}", "--seq_len=128")
  prepare = {data: (f"--share={share[data]}", *words) for data in share}
  return Scale(prepare, ExpectedText(vocab_size, 128), (), (), **more)


SCALES = {
  "shrink": _scale(0.001, 0.002, 512, config="small", shrink=True),
  "small": _scale(0.0025, 0.015, 2048),
}
