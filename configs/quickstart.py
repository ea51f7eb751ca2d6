"""The quickstart: a small AntLM on generated English, minutes on 2 cores.

    ./launch/quickstart.sh

or, by hand, on data that `antlm prepare` made:

    antlm train --config=quickstart \\
      --workdir=runs/mine --config.data.path=PREPARED
"""

from antlm_jax import config as config_lib


def get_config(arg: str = ""):
  """Returns the config; it takes no argument."""
  config_lib.parse_arg(arg)
  config = config_lib.changes()
  # Short blocks: a model this small soon forgets the mode that it leaves.
  config.curriculum = "20*(2%C+3%M)"
  config.model.update(
    layers=4,
    width=128,
    heads=4,
    kv_heads=4,
    mlp_width=320,
    max_seq_len=256,
    init_std=0.08,  # about 1 / sqrt(width): learns twice as fast as 0.02 here
  )
  config.train.update(batch_size=32, steps=2000)
  config.schedule.update(name="cosine", peak_lr=3e-3, warmup_steps=0.05)
  config.eval.update(every=0, rows=128)  # at every switch
  config.checkpoint.every = 0.25
  config.log.every = 100
  return config
