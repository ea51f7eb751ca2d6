"""A small model of both modes on real text that a CPU can train.

    antlm prepare --text=BABYLM_FOLDER --output=data/babylm \\
      --vocab_size=8192 --seq_len=128
    antlm train --config=babylm_small \\
      --workdir=runs/babylm_small --config.data.path=data/babylm

The argument takes `curriculum=...`.
"""

from antlm_jax import config as config_lib


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, curriculum="3510C:M=1:1 steps")
  config = config_lib.changes()
  config.curriculum = arg.curriculum
  # Many masks teach fast; the held-out loss is measured with few.
  config.objectives.M.update(mask_ratio=0.3, mask_ratio_end=0.15)
  config.model.update(
    layers=4,
    width=256,
    heads=4,
    kv_heads=4,
    mlp_width=704,
    max_seq_len=512,
    init_std=0.06,
  )
  config.train.update(batch_size=8)
  config.schedule.update(name="cosine", peak_lr=2e-3, warmup_steps=0.03)
  config.eval.update(every=0.05, rows=256)
  return config
