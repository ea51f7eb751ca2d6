"""GPT-BERT (arXiv 2410.24159): one causal row to fifteen masked rows.

    antlm prepare --text=BABYLM_FOLDER --output=data/babylm \\
      --vocab_size=8192 --seq_len=128 --boundary=bos
    antlm train --config=gpt_bert \\
      --workdir=runs/gpt_bert --config.data.path=data/babylm

The argument takes `size`: `small` (30M parameters, strict-small) or `base`
(119M, strict, 16,384 words), and `curriculum` (`C:N=1:15`).

Where each setting is from:
- The paper (section 2, Table 3) and its code: the shape, masked next-token
  prediction, z-loss and averaged weights. Masked spans have 1 to 3 tokens, and
  cover 30 % of each row at first and 15 % at the end. Tokens that were masked
  least so far are masked first. Each objective's mean loss weighs as its part
  of the rows. A run has 7,812 steps (15,625 for `base`), and rows of 128, then
  256 and 512 tokens. Each piece of a text follows <s>. Batches grow linearly
  from one to four million tokens. LAMB's learning rate falls from 1.41e-2
  (1e-2) to a tenth, and then to zero.
- Different here: a text's tokens take turns in being masked, where the original
  counts them. Rows are cut from a stream. All text is from one corpus (a third
  of the original's is BabyLM).
"""

from antlm_jax import config as config_lib
from antlm_jax.models import ltg_bert

# Steps and peak rate.
RUNS = {"small": (7_812, 1.41e-2), "base": (15_625, 1e-2)}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, size=tuple(RUNS), curriculum="C:N=1:15")
  steps, peak_lr = RUNS[arg.size]
  config = config_lib.changes("ltg_bert")
  config.curriculum = arg.curriculum
  for name in ("M", "N"):
    config.objectives[name].update(
      unit="span",
      choice="covering",
      span_length=3,
      mask_ratio=0.3,
      mask_ratio_end=0.15,
    )
  config.model.update(
    **ltg_bert.SHAPES[f"gpt_bert_{arg.size}"], dtype="bfloat16"
  )
  config.data.framed = True
  config.train.update(
    steps=steps,
    batch_size=32_768,
    batch_start=0.25,
    batch_schedule=("16384x256@0.7", "8192x512@0.9"),
    microbatches=32,
    loss_average="objectives",
    z_loss=1e-4,
  )
  config.optimizer.update(
    name="lamb",
    b1=0.9,
    b2=0.98,
    eps=1e-8,
    weight_decay=0.1,
    decay_scope="matrices",
    clip=2.0,
    ema=0.999,
  )
  config.schedule.update(
    name="cosine",
    peak_lr=peak_lr,
    warmup_steps=int(0.016 * steps),
    cooldown_steps=int(0.016 * steps),
    min_lr_ratio=0.1,
  )
  config.eval.update(every=0.05, rows=2048, objectives=("C", "N"))
  return config
