"""AntLM on BabyLlama (arXiv 2412.03275): 97M parameters, 4C+16M+4C epochs.

    antlm prepare --text=BABYLM_FOLDER --output=data/babylm \\
      --vocab_size=16000 --seq_len=128
    antlm train --config=antlm_babyllama \\
      --workdir=runs/antlm --config.data.path=data/babylm

Its controls at equal epochs differ in the curriculum alone:
`--config=antlm_babyllama:curriculum=24C`, or `24M`.

Where each setting is from:
- AntLM's abstract: alternating objective and mask, BabyLM strict-small. Its
  full text could not be read: the curriculum is from a secondary source.
- BabyLlama's code (llama-97M): the shape, tied embeddings, vocabulary 16,000,
  rows of 128, batch 128, learning rate 7e-4 with 300 warmup steps and cosine,
  Adam without weight decay.
- BabyLlama's code has no tokens between texts. It moves the borders of its rows
  by a random offset in each epoch, and keeps the checkpoint of the lowest loss.
  Here each text is between <s> and </s>, rows are the same in all epochs, and
  the last checkpoint counts.
- Ours: 15 % masks with 80/10/10 by token, one schedule over the run, the
  optimizer's state kept at a switch, gradients clipped at 1.
"""

from antlm_jax import config as config_lib
from antlm_jax.models import llama


def get_config(arg: str = ""):
  """Returns the config; see the module."""
  arg = config_lib.parse_arg(arg, curriculum="4C+16M+4C")
  config = config_lib.changes()
  config.curriculum = arg.curriculum
  config.model.update(
    **llama.SHAPES["97M"],
    max_seq_len=256,
    norm_eps=1e-6,  # Hugging Face's default for Llama
    tied=True,
    dtype="bfloat16",
  )
  config.train.batch_size = 128
  config.optimizer.update(b1=0.9, b2=0.999, weight_decay=0.0, clip=1.0)
  config.schedule.update(name="cosine", peak_lr=7e-4, warmup_steps=300)
  config.eval.update(every=0.02, rows=2048)
  config.checkpoint.every = 1 / 24
  return config
