"""Your own text: a model of both modes, by the text's size and the GPU.

    antlm prepare --text=TEXT --output=DATA --vocab_size=16000 --seq_len=128
    antlm train --config=own_text:words=10M,memory=24 --workdir=RUN \\
      --config.data.path=DATA

docs/how_to/one_gpu.md has the command, the hours and the memory of each size.

The argument takes
- `words`: 10M (default), 1M, 100M or 1B, the nearest to your text;
- `memory`: 24 (default), 8 or 80, the GPU's memory in GB. It changes the number
  of microbatches alone, so the result is the same up to rounding and dropout;
- `objectives`: `C:M=1:1` by default. C makes a causal model, M a masked model;
  for an encoder, also change the curriculum, such as 6C+18M;
- `dtype`: bfloat16 (default), or float32 for a T4 or V100.

Mixing and regularisation did best in docs/results.md, with at most 1.1M
parameters: strong dropout and weight decay for CLM on text that is read many
times, and a moderate decay for ample text. Masked objectives alone have the
latter on any text. In `regularised_grid.json`, diffusion ends lowest without
dropout at every decay, and in `antlm_8m.json` 24 readings of MLM end at the
lowest loss. Shapes and learning rates are those of the published configs.
Nobody has trained these models for this project.
"""

import re

from antlm_jax import config as config_lib
from antlm_jax.configs import antlm_babyllama, babylm_small
from antlm_jax.errors import UserError
from antlm_jax.models import llama

# Number of times that a text is read.
READINGS = {"10M": 24, "1M": 24, "100M": 7, "1B": 2}
# Number of microbatches that fits, by GB of memory and by words.
MICROBATCHES = {
  "24": {"10M": 1, "1M": 1, "100M": 4, "1B": 8},
  "8": {"10M": 4, "1M": 1, "100M": 16, "1B": 32},
  "80": {"10M": 1, "1M": 1, "100M": 1, "1B": 2},
}


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(
    arg,
    words=tuple(READINGS),
    memory=tuple(MICROBATCHES),
    objectives="C:M=1:1",
    dtype=("bfloat16", "float32"),
  )
  if not re.fullmatch(r"[A-Za-z][^+(%\s]*", arg.objectives):
    raise UserError(
      f"config argument objectives={arg.objectives}: write one mix without"
      " counts, such as C:M=1:1, or set --config.curriculum"
    )
  curriculum = f"curriculum={READINGS[arg.words]}{arg.objectives}"
  if arg.words == "1M":
    config = babylm_small.get_config(curriculum)
    config.train.batch_size = 64
  else:
    config = antlm_babyllama.get_config(curriculum)
  config.model.max_seq_len = 512  # of fine-tuning, if not of the rows
  config.optimizer.weight_decay = 0.5
  if arg.words in ("1M", "10M"):
    if {*"CEP"} & {*arg.objectives}:  # trained from left to right
      config.model.update(dropout=0.2, attention_dropout=0.2)
      config.optimizer.weight_decay = 1.5
    losses = {"C": "clm", "M": "mlm"}
    config.eval.watch = [x for n, x in losses.items() if n in arg.objectives]
  if arg.words == "1B":
    config.model.update(**llama.SHAPES["210M"], remat="dots")
    config.train.batch_size = 256
    config.schedule.peak_lr = 5e-4
  config.model.dtype = arg.dtype
  config.train.microbatches = MICROBATCHES[arg.memory][arg.words]
  return config
