"""Checkpoints of random models."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

from antlm_jax import config, models, sections
from antlm_jax.data import toy_english
from antlm_jax.data.tokenizer import Tokenizer
from antlm_jax.inference.model import FineTuned, Loaded, load, write_checkpoint
from antlm_jax.training import checkpoint
from antlm_jax.training.saving import RunCheckpoints
from antlm_jax.training.step import TrainState

STEP = 7


def with_curriculum(loaded: Loaded, text) -> Loaded:
  """Returns the same model, as if another curriculum had trained it."""
  changed = dataclasses.replace(loaded.config, curriculum=text)
  return with_meta(loaded, config=changed)


def with_meta(loaded: Loaded, **changes) -> Loaded:
  """Returns the same model with changes of its metadata."""
  meta = dataclasses.replace(loaded.meta, **changes)
  return dataclasses.replace(loaded, meta=meta)


def tokenizer(vocab_size: int = 400, kind: str = "bpe") -> Tokenizer:
  """Trains a tokenizer on a little generated English."""
  return Tokenizer.train(toy_english.make_sentences(0, 500), vocab_size, kind)


def without_mask(text: str) -> str:
  """Returns a tokenizer's JSON with the mask turned into a word."""
  spec = json.loads(text)
  spec["added_tokens"] = [
    token for token in spec["added_tokens"] if token["content"] != "<mask>"
  ]
  vocabulary = spec["model"]["vocab"]
  vocabulary["masked"] = vocabulary.pop("<mask>")
  return json.dumps(spec)


# With a large init_std, the scores of sentences differ clearly.
SHAPES = {
  "llama": {"kv_heads": 1, "init_std": 0.3},
  "gemma": {"kv_heads": 1, "init_std": 0.3, "windows": (5, 0)},
  "ltg_bert": {"dropout": 0.0, "attention_dropout": 0.0},
  "modernbert": {"layers": 3, "windows": (0, 5, 5), "init_std": 0.3},
  "bert": {"init_std": 0.3, "dropout": 0.0, "attention_dropout": 0.0},
  "ultrabert": {
    "kv_heads": 1,
    "init_std": 0.3,
    "windows": (5, 5, 0),
    "layers": 4,
    "head_mlp_width": 24,
  },
}


@functools.cache
def first_values(encoder: models.EncoderConfig, vocab_size: int):
  """Returns a model's first parameters, which are compiled once."""
  model = models.build_model(encoder, vocab_size)
  return jax.jit(lambda: model.init(0))()


def save(
  folder, tokenizer: Tokenizer, encoder: str = "llama", **changes
) -> pathlib.Path:
  """Saves a random model as step 7 of a run; `changes` are model settings."""
  shape = {"layers": 2, "width": 32, "heads": 2, "mlp_width": 48}
  shape |= {"max_seq_len": 48, **SHAPES[encoder], **changes}
  settings = config.Config(model=models.ENCODERS[encoder](**shape))
  params = first_values(settings.model, tokenizer.vocab_size)
  state = TrainState(
    jnp.int32(STEP), params, optax.scale_by_adam().init(params)
  )
  meta = checkpoint.Meta(settings, tokenizer, "bos_eos", "hash")
  saver = RunCheckpoints(folder, meta, sections.Saving())
  saver.save(STEP, state, {})
  saver.close()
  return folder


def tuned(
  folder, head, encoder="llama", attention="bidirectional", **changes
) -> Loaded:
  """Returns a random model with a random head, as fine-tuning saves it."""
  base = load(save(folder / "run", tokenizer(), encoder, **changes))
  return saved(with_head(base, head, attention), folder / "model")


def with_head(
  loaded: Loaded, head, attention="bidirectional", seed=0
) -> Loaded:
  """Returns the same model with a random head."""
  params = head.init(jax.random.key(seed), loaded.model.config.width)
  task = FineTuned("own", attention, head.kind, head.settings, params)
  return dataclasses.replace(loaded, task=task)


def saved(model: Loaded, folder) -> Loaded:
  """Saves a model as fine-tuning does, and opens it again."""
  return load(
    write_checkpoint(folder, STEP, model.params, model.meta, model.task)
  )


def run(**changes):
  """Returns a fixture with the folder of a random model's run.

  A test file calls it `run`, and the fixture `loaded` opens it. `changes` are
  those of `save`.
  """

  def make(tmp_path_factory):
    return save(tmp_path_factory.mktemp("run"), tokenizer(), **changes)

  return pytest.fixture(scope="module")(make)
