"""AntLM on LTG-BERT (arXiv 2412.03275): 6C+60M+6C epochs, from memory.

    antlm prepare --text=BABYLM_FOLDER --output=data/babylm \\
      --kind=wordpiece --vocab_size=16384 --seq_len=128
    antlm train --config=antlm_ltg_bert \\
      --workdir=runs/antlm_ltg --config.data.path=data/babylm

Its controls at equal epochs differ in the curriculum alone:
`--config=antlm_ltg_bert:curriculum=72M`, or `72C`. The argument
`size` is `base` (the default), `small` or `xs`.

Where each setting is from:
- AntLM's abstract: alternating objective and mask, BabyLM strict-small. Its
  full text could not be read: the curriculum is remembered, and in no source
  that could be.
- LTG-BERT's code (arXiv 2303.09859): the shape, dropout and initial weights.
  Rows have 128 tokens, and 512 at the end, in batches of as many tokens. Each
  row is between <s> and </s>, and a tenth of the rows are short. Each masked
  span has one 80/10/10 draw. The last span passes the count that is drawn for
  15 %, so 16.1 % are masked. LAMB has a peak of 1e-2, weight decay, warmup, a
  cosine to a tenth, and clipping at 2.
- Different here: batches have 1,024 rows, because an epoch of 10M words has
  only three of LTG-BERT's 32,768. Rows are filled up with further texts. One
  schedule spans the run, and a switch keeps the optimizer's state.
"""

from antlm_jax import config as config_lib
from antlm_jax.models import ltg_bert

SIZES = ("base", "small", "xs")


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, size=SIZES, curriculum="6C+60M+6C")
  config = config_lib.changes("ltg_bert")
  config.curriculum = arg.curriculum
  config.objectives.M.update(
    unit="span",
    span_length=9,
    span_lengths="geometric",
    choice="binomial",
    mask_ratio=0.161,
  )
  config.data.update(short=0.1, framed=True)
  config.model.update(**ltg_bert.SHAPES[arg.size], dtype="bfloat16")
  config.train.update(batch_size=1024, batch_schedule=("256x512@0.9",))
  config.optimizer.update(
    name="lamb",
    b1=0.9,
    b2=0.98,
    eps=1e-6,
    weight_decay=0.1,
    decay_scope="hidden",
    clip=2.0,
  )
  config.schedule.update(
    name="cosine", peak_lr=1e-2, warmup_steps=0.016, min_lr_ratio=0.1
  )
  config.eval.update(every=0.02, rows=2048)
  config.checkpoint.every = 1 / 36
  return config
