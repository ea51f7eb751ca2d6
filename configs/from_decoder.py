"""Makes an encoder of a decoder: a short CLM on your text, then masks.

    antlm prepare --text=TEXT --output=data/mine \\
      --tokenizer=MODEL --seq_len=512
    antlm train --config=from_decoder:model=MODEL --workdir=runs/encoder \\
      --config.data.path=data/mine
    antlm export --checkpoint=runs/encoder --output=encoder \\
      --as=bidirectional --sentence_transformers

The decoder first learns your text as it was trained, then with masks and
bidirectional attention. If its tokenizer has no mask token, `<mask>` is added.
docs/tutorials/decoder_to_encoder.md has the whole way to an embedder.

Where each setting is from:
- MLM after CLM, with 40 % of the tokens masked: arXiv 2507.00994 (section 5).
  `N` predicts a masked token one position before it, where the decoder
  predicted it: MNTP, as in LLM2Vec (arXiv 2404.05961).
- Warmup over 6 % of the steps, and decay over the last 20 %: the configs with
  which Ettin makes encoders of its decoders (arXiv 2507.11412), on 50B tokens.
  Those mask 15 %, and have no causal phase.
- The number of steps and the causal share are ours. All else is of
  configs/continued.py, which continues an encoder in the same way.

The argument takes
- `model`: a decoder, which is a folder of transformers, a name on the Hub or a
  run;
- `objective`: M for MLM (the default), or N for MNTP;
- `steps`: 2000 by default, of 128 rows;
- `causal`: the share of the steps that is causal, 0.1 by default;
- `mask_ratio`: 0.4 by default.
"""

import dataclasses
from typing import Any

from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.hf import import_
from antlm_jax.hf.mapping import ARCHITECTURES
from antlm_jax.models import EncoderConfig
from antlm_jax.objectives.objective import OBJECTIVES


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(
    arg, model="", objective=("M", "N"), steps=2000, causal=0.1, mask_ratio=0.4
  )
  causal = round(arg.steps * arg.causal)
  if not 0 <= causal < arg.steps:
    raise UserError(
      f"config argument causal={arg.causal} leaves no step with masks: give a"
      " share from 0 to below 1"
    )
  phases = f"{causal}C+" * bool(causal) + f"{arg.steps - causal}{arg.objective}"
  continued = [f"curriculum={phases} steps", f"mask_ratio={arg.mask_ratio}"]
  continued += [f"model={arg.model}"] * bool(arg.model)
  config = config_lib.config_module("continued").get_config(",".join(continued))
  start = import_.open_start(arg.model).meta
  if not any(objective.left_to_right for objective in start.config.trained):
    raise UserError(
      f"{arg.model} is no decoder: continue it with"
      f" --config=continued:model={arg.model}"
    )
  dropped = _dropped_window(start.encoder)
  config.model.update(dropped)
  encoder = dataclasses.replace(start.encoder, **dropped)
  # Tell now, rather than after the training, that transformers has no such
  # encoder.
  architecture = ARCHITECTURES[encoder.name]
  shift = OBJECTIVES[arg.objective].shift
  target = architecture.target(encoder, "bidirectional", shift)
  architecture.extra(encoder, target)
  config.schedule.update(warmup_steps=0.06, decay_steps=0.2)
  config.eval.objectives = (arg.objective,)  # CLM ends with its phase
  return config


def _dropped_window(decoder: EncoderConfig) -> dict[str, Any]:
  """Returns settings without a window that all layers have, as in Mistral.

  In rows that are no longer than it, the window hides no token.
  """
  windows = {*decoder.layer_windows}
  if len(windows) > 1 or not (window := windows.pop()):
    return {}
  longest = min(window, decoder.max_seq_len)
  return {"windows": (), "max_seq_len": longest}
