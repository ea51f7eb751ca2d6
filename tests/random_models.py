"""Checkpoints of random models, for the tests of what reads them."""

import pathlib

import jax
import jax.numpy as jnp
import optax

from antlm_jax import checkpoint, config, models, toy_english
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.step import TrainState

STEP = 7


def tokenizer(vocab_size: int = 400) -> Tokenizer:
  """A tokenizer of a little generated English."""
  return Tokenizer.train(toy_english.sentences(0, 500), vocab_size)


def save(folder, tokenizer: Tokenizer, **changes) -> pathlib.Path:
  """Saves a random model as a run's step 7; `changes` are of its shape."""
  settings = config.default()
  with settings.unlocked():
    # A large init_std: the scores must tell sentences apart.
    settings.model.update(
      layers=2, width=32, heads=2, kv_heads=1, mlp_width=48, init_std=0.3
    )
    settings.model.max_seq_len = 48
    settings.model.update(changes)
  model = models.build(settings.model, tokenizer.vocab_size)
  params = jax.jit(lambda: model.init(0))()
  state = TrainState(
    jnp.int32(STEP), params, optax.scale_by_adam().init(params)
  )
  meta = checkpoint.Meta(settings, tokenizer, "bos_eos", "hash")
  saver = checkpoint.Checkpoints(folder, meta)
  saver.save(STEP, state)
  saver.close()
  return folder
