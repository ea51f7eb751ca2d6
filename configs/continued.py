"""Continues a model that is there, with any curriculum: continued pretraining.

    antlm prepare --text=TEXT --output=data/smol \\
      --tokenizer=FOLDER --boundary=eos --seq_len=512
    antlm train --workdir=runs/smol_mlm --config.data.path=data/smol \\
      --config=continued:model=FOLDER,curriculum=2000M

The encoder is the model's. As arXiv 2507.00994 (section 5) continues a CLM
model with MLM: 40 % masked, all by <mask>. It does not give the learning rate,
warmup and optimizer state. Here the rate is a third of its peak, the warmup is
short and the optimizer state is new.

The argument takes
- `model`: a run, one of its steps, a folder of transformers or a name on
  the Hub;
- `curriculum`: `2000M` by default (the paper also has `12000M` and `22000M`);
- `mask_ratio`: 0.4 by default.

With `shrink` the encoder stays; only steps and batches are small.
"""

from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.hf import import_


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, model="", curriculum="2000M", mask_ratio=0.4)
  if not arg.model:
    raise UserError("config argument model=FOLDER is missing")
  start = import_.open_start(arg.model)
  config = config_lib.changes(start.meta.encoder)
  config.curriculum = arg.curriculum
  for name in ("M", "N"):
    config.objectives[name].update(
      mask_ratio=arg.mask_ratio, mask_token=1.0, random_token=0.0
    )
  config.train.update(batch_size=128)
  config.optimizer.update(eps=1e-5)
  config.schedule.update(peak_lr=1.5e-4, warmup_steps=0.05, decay_steps=0.5)
  config.checkpoint.every = 0.25
  config.init.update(checkpoint=start.name, optimizer="reset", step="reset")
  return config
