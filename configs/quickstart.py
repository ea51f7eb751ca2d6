"""The quickstart: a small AntLM on generated English, minutes on 2 cores.

    ./launch/quickstart.sh

or, by hand, on data that `python -m antlm_jax.prepare` made:

    python -m antlm_jax.train --config=configs/quickstart.py \\
      --workdir=runs/mine --config.data.path=PREPARED

The argument `shrink` makes it run in seconds.
"""

from antlm_jax import config as config_lib


def get_config(arg: str = ""):
  """Returns the config; `arg` may be `shrink`."""
  arg = config_lib.parse_arg(arg, shrink=False)
  config = config_lib.default()
  config.curriculum = "20%C+60%M+20%C"
  config.objectives.M.mask_ratio = 0.3
  config.model.update(
    layers=4, width=128, heads=4, kv_heads=4, mlp_width=384, max_seq_len=256
  )
  config.train.update(batch_size=64, steps=900)
  config.schedule.update(peak=3e-3, warmup=0.03, decay_steps=0.3)
  config.eval.update(every=0.1, rows=256)
  config.checkpoint.every = 0.2
  if arg.shrink:
    config_lib.shrink(config)
  return config
