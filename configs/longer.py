"""Continues a model at longer rows with another RoPE base.

    antlm prepare --text=TEXT --output=data/long \\
      --tokenizer=FOLDER --seq_len=8192
    antlm train --config=longer:model=FOLDER --workdir=runs/long \\
      --config.data.path=data/long

By default this is ModernBERT's context extension, as in its paper (arXiv
2412.13663, section 2.2) and published configuration. Rows have 8,192 tokens.
The base is 160,000 in the layers that see all keys, and layers with a window
keep theirs. The optimizer state is new. The learning rate is constant at 3e-4,
and decays by 1 - sqrt over the last sixth. The number of steps and the short
warmup are ours. The result has the new base and length, and so do its exports.

The argument takes `model`, `curriculum` and `mask_ratio` (0.3 by default) as
configs/continued.py does, and
- `tokens`: tokens of the longest row, 8192 by default;
- `base`: RoPE's base. By default 160,000, or the model's own if that is larger,
  as a Qwen3's 1,000,000 is.

docs/how_to/optimizer.md changes the base within a run instead.
"""

from antlm_jax import config as config_lib
from antlm_jax import models, settings
from antlm_jax.errors import UserError

_BASE = 160_000.0  # ModernBERT's


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(
    arg, model="", curriculum="2000M", mask_ratio=0.3, tokens=8192, base=0.0
  )
  continued = f"curriculum={arg.curriculum},mask_ratio={arg.mask_ratio}"
  if arg.model:
    continued += f",model={arg.model}"
  config = config_lib.config_module("continued").get_config(continued)
  encoder = models.ENCODERS[config.model.name]
  known = settings.fields_of(encoder)
  if "rope_theta" not in known:
    raise UserError(f"{arg.model} is {config.model.name}, which has no RoPE")
  own = config.model.get("rope_theta", known["rope_theta"].default)
  base = arg.base or max(_BASE, own)
  config.model.update(rope_theta=base, max_seq_len=arg.tokens)
  config.schedule.update(
    peak_lr=3e-4, warmup_steps=0.02, decay_steps=1 / 6, decay="1-sqrt"
  )
  return config
