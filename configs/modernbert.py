"""ModernBERT's encoder in Ettin's six sizes (arXiv 2412.13663, 2507.11412).

    antlm prepare --text=TEXT --output=data/text --vocab_size=50368 \\
      --seq_len=1024 --packing=documents
    antlm train --config=modernbert:size=17M,curriculum=20M \\
      --workdir=runs/17m --config.data.path=data/text \\
      --config.train.batch_size=512 --config.schedule.warmup_steps=0.05 \\
      --config.schedule.decay_steps=0.2

This is a run of 20 epochs of MLM on a text of your own. 150M has ModernBERT
base's shape, and 400M has ModernBERT large's. Sizes count the embedding, which
is also the output layer.

The argument takes `size` (17M, 32M, 68M, 150M, 400M or 1B) and `curriculum`. By
default it is Ettin's first phase: 1.7T tokens in 360,000 steps of 4,608 rows.

Where each setting is from: Ettin's code, commit 6cbf954. Differences from it:
- Text is packed, with attention within documents. The original leaves the rest
  of a row empty, and does not compute it.
- AdamW with clipped gradients takes the place of StableAdamW. The original's
  weight decay is a part of the weights a step at the peak rate. Here it is that
  part divided by the rate, which is the same.
- Batches have their size from the start. The original's grow for 3 to 125B
  tokens.
- Outputs of attention are not dropped (0.1 in the original).
- The rate falls in the last 10,600 steps (50B tokens). The original first
  lengthens rows to 8,192 for 250B tokens. configs/longer.py continues so.
"""

from antlm_jax import config as config_lib

VOCAB_SIZE = 50_368
# Layers, width, MLP width, heads; peak rate, weight decay a step, and steps of
# warmup.
SIZES = {
  "17M": ((7, 256, 384, 4), (3e-3, 3e-4, 848)),
  "32M": ((10, 384, 576, 6), (3e-3, 3e-4, 848)),
  "68M": ((19, 512, 768, 8), (3e-3, 3e-4, 636)),
  "150M": ((22, 768, 1152, 12), (8e-4, 1e-5, 636)),
  "400M": ((28, 1024, 2624, 16), (5e-4, 1e-5, 424)),
  "1B": ((28, 1792, 3840, 28), (5e-4, 5e-5, 424)),
}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, size=tuple(SIZES), curriculum="360000M")
  (layers, width, mlp_width, heads), (rate, decay, warmup) = SIZES[arg.size]
  config = config_lib.changes("modernbert")
  config.curriculum = arg.curriculum
  config.objectives.M.mask_ratio = 0.3
  config.model.update(
    layers=layers,
    width=width,
    mlp_width=mlp_width,
    heads=heads,
    max_seq_len=1024,
    rope_theta=1e4,
    dtype="bfloat16",
  )
  config.train.batch_size = 4608
  config.optimizer.update(
    b1=0.9, b2=0.98, eps=1e-6, weight_decay=decay / rate, clip=1.0
  )
  config.schedule.update(
    peak_lr=rate, warmup_steps=warmup, decay_steps=10_600, min_lr_ratio=0.02
  )
  config.eval.update(every=2000, rows=1024)
  config.checkpoint.update(every=2000, keep_every=20_000)
  return config
