"""What mixing objectives is worth, under repetition and with more text.

    ./launch/study.sh --config=mixing --scale=small --text=BABYLM_FOLDER

trains and reports all of it; one run is

    antlm train --workdir=DIR --config.data.path=PREPARED \\
      --config=mixing:row=repeated_cd,seed=1

Six rows read the same rows of text in the same order, in as many steps: CLM,
MLM, masked diffusion, CLM mixed with either in every batch, and AntLM's blocks.
`repeated` is 15 epochs of 35,000 words; `fresh` has three of the rows, in 3.5
epochs of 144,000. All settings are ours, and alike in all rows, but for the
shift: masked tokens are predicted one position before beside diffusion, as in
dual language models (arXiv 2512.14549), and in place beside MLM, as in AntLM
(arXiv 2412.03275). All chosen tokens become `<mask>`, so that the held-out
masked loss shows no row what it was not trained on.

Written down before the first of these runs
-------------------------------------------

**Measures**, in nats per target, on 96 held-out rows that differ by seed and
are the same for all rows of one: the causal loss; the masked loss at 15 %;
diffusion's bound, which compares with the causal loss. All rows are measured
in all three, and what one was not trained in is said to be so. BLiMP's pairs
are left out: at four times these parameters and five times this text 49 to
52 % of them were right.

**Claims.** A mixed row is better than each of the rows of one objective that it
is made of, in what that one was trained in: at the end of the run, for whoever
trains for a fixed time, and at the lowest of the measurements, for whoever
stops in time. They are in `Row.against`: six in `repeated` and two in `fresh`,
so 16 differences.

**Decision.** Differences are paired by seed, with Student's t over five seeds,
at 1 - 0.05 / 16 (Bonferroni: 99.69 %, 6.4 standard errors of the mean). Without
zero: confirmed or contradicted. With zero it is not decided; within 0.05 nats
to both sides it is then called no difference that matters. Only these 16 are
confirmatory: what else is said, such as of one mixed row against another, or of
what repetition changes, is described, with 95 % intervals if any. A row whose
lowest loss in what it was trained in is not below the unigram entropy has
learnt nothing, and what is claimed with it is not decided.

**Expected**, at the end and at the lowest:

- repeated, against C: it overfits, so all three are better at the end, by 0.1
  to 1; at the lowest within 0.1, as they have half of the causal rows or less.
- repeated, against M and D: C:M and C:D are better by 0.05 to 0.3, both times,
  as causal rows teach faster (2512.14549); AntLM is worse at the end by over
  0.5, as its last phase forgets (docs/evaluate.md), and within 0.1 at the
  lowest.
- fresh: C:D is worse than C by 0.05 to 0.3, and better than D by as much, both
  times.

**Seeds.** In docs/evaluate.md's `small` the deviation over seeds of such
differences was 0.02 (causal, lowest) to 0.14 (masked, end). With five seeds the
interval is 2.8 deviations to a side, 0.05 to 0.4: effects of 0.1 are decided
where the noise is below 0.03. Pilots, by a seed that is none of the five, in
720 steps on 61,000 words of unigram entropy 6.34: C had its lowest causal loss,
5.34, at half of the steps, and ended at 5.40; D ended at 6.04, still falling.
That was at a peak rate of 3e-3. At 1e-2 C was better by 0.14 after 300 steps,
and D worse by 0.04: 5e-3, between them, is every row's.

If the time ends before all five seeds, those that all rows have are reported.

What came of it: docs/mixing.md.
"""

from antlm_jax import config as config_lib
from antlm_jax.evals.design import Row, Scale, Text, row_of

REPORT = "controls"
CONFIDENCE = 1 - 0.05 / 16  # of the claims: see above
SEEDS = {"small": 5}
_STEPS = 480  # of 2,048 tokens


def _row(data: str, title: str, objectives: str, *against, shift=1) -> Row:
  """Makes a row; `shift` is that of its masked objectives."""
  masked = {f"objectives.{name}.shift": shift for name in "MD"}
  return Row(
    data,
    title,
    curriculum={"small": f"{objectives} steps"},
    seeds=SEEDS,
    settings=masked,
    against=tuple(f"{data}_{name}" for name in against),
  )


ROWS = {
  "repeated_c": _row("repeated", "CLM", f"{_STEPS}C"),
  "repeated_m": _row("repeated", "MLM", f"{_STEPS}M", shift=0),
  "repeated_d": _row("repeated", "diffusion", f"{_STEPS}D"),
  "repeated_cm": _row(
    "repeated", "CLM:MLM", f"{_STEPS}C:M=1:1", "c", "m", shift=0
  ),
  "repeated_cd": _row(
    "repeated", "CLM:diffusion", f"{_STEPS}C:D=1:1", "c", "d"
  ),
  "repeated_antlm": _row(
    "repeated", "AntLM", "80C+320M+80C", "c", "m", shift=0
  ),
  "fresh_c": _row("fresh", "CLM", f"{_STEPS}C"),
  "fresh_d": _row("fresh", "diffusion", f"{_STEPS}D"),
  "fresh_cd": _row("fresh", "CLM:diffusion", f"{_STEPS}C:D=1:1", "c", "d"),
}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, row="repeated_cd", scale=("small",), seed=0)
  row = row_of(arg, ROWS)
  config = config_lib.default("llama")
  config.model.update(
    layers=3, width=64, heads=4, kv_heads=4, mlp_width=176, max_seq_len=128
  )
  config.model.init_std = 0.08
  config.seed = arg.seed
  config.train.batch_size = 16
  config.schedule.update(name="cosine", peak_lr=5e-3, warmup_steps=0.05)
  config.curriculum = row.curriculum[arg.scale]
  config.objectives.M.update(mask_token=1.0, random_token=0.0)
  config.objectives.D.mask_ends = False  # as when these runs were made
  config.eval.update(every=0.1, rows=96, objectives=("C", "M", "D"))
  config.checkpoint.every = 0
  config.log.update(every=48, writers=())
  config.update_from_flattened_dict(row.settings)
  return config


def _scale(repeated: float, fresh: float, vocab_size: int, **more) -> Scale:
  share = {"repeated": repeated, "fresh": fresh}
  words = (f"--vocab_size={vocab_size}", "--seq_len=128")
  prepare = {data: (f"--share={share[data]}", *words) for data in share}
  return Scale(prepare, Text(vocab_size, 128), (), (), **more)


SCALES = {
  "shrink": _scale(0.001, 0.002, 512, config="small", shrink=True),
  "small": _scale(0.0025, 0.015, 2048),
}
