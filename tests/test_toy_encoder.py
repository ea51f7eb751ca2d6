"""A new encoder is one file and one row: a minimal GPT, written here."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from antlm_jax import attention, models
from antlm_jax.commands import train
from antlm_jax.inference.model import load
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.models import encoder, layers
from antlm_jax.training import metrics
from tests import helpers, reference, runs

T = 12

# The encoder: learned positions, LayerNorm, as many key as query heads.


@models.ENCODERS.register("toy_gpt")
@dataclasses.dataclass(frozen=True)
class GptConfig(models.EncoderConfig):
  """No settings but those of every encoder."""

  def module(self, rngs):
    return Gpt(rngs, self)


def linear(rngs, i, o, axes):
  return layers.Linear(layers.normal(rngs, (i, o), axes, 0.02), bias=True)


class Block(nnx.Module):
  def __init__(self, rngs, c):
    self.config = c
    norm = functools.partial(layers.LayerNorm, c.width, c.norm_eps, affine=True)
    self.norm, self.mlp_norm = norm(), norm()
    self.q, self.k, self.v = (
      linear(rngs, c.width, c.width, ("embed", "heads")) for _ in range(3)
    )
    self.out = linear(rngs, c.width, c.width, ("heads", "embed"))
    self.up = linear(rngs, c.width, c.mlp_width, ("embed", "mlp"))
    self.down = linear(rngs, c.mlp_width, c.width, ("mlp", "embed"))

  def __call__(self, x, mask, key):
    keys = (None,) * 2 if key is None else jax.random.split(key)
    y = self.norm(x)
    q, k, v = (
      layers.split_heads(f(y), self.config.head_dim)
      for f in (self.q, self.k, self.v)
    )
    y = attention.attend(q, k, v, mask).reshape(x.shape)
    x = x + layers.dropout(self.out(y), self.config.dropout, keys[0])
    y = self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))
    return x + layers.dropout(y, self.config.dropout, keys[1])


class Gpt(models.Encoder):
  def __init__(self, rngs, config):
    c = self.config = config
    draw = functools.partial(layers.normal, rngs, std=0.02)
    self.embedding = draw((c.vocab_size, c.width), ("vocab", "embed"))
    # An axis that no table of the library knows.
    self.places = draw((c.max_seq_len, c.width), ("seq_table", "embed"))
    self.blocks = encoder.stack(lambda r, _: Block(r, c), rngs, c.layers)
    self.norm = layers.LayerNorm(c.width, c.norm_eps, affine=True)

  def __call__(self, tokens, positions, mask, dropout_key=None):
    c = self.config
    x = encoder.table(self.embedding)[tokens] + self.places[...][positions]
    x, mask, keys = encoder.begin(c, x.astype(c.dtype), mask, dropout_key)
    return self.norm(encoder.run_blocks(c, self.blocks, x, mask, keys))

  def logits_of(self):
    kernel = encoder.table(self.embedding).T
    return lambda hidden, at=None: encoder.scores(hidden, kernel)


SMALL = {name: n for name, n in helpers.TINY.items() if name != "kv_heads"}
SMALL["name"] = "toy_gpt"


# What it is held to, as the others are


TWO = (  # where each token's document begins and ends
  np.repeat([ends], [5, T - 5], 1).astype(np.int32).repeat(2, 0)
  for ends in ([0, 5], [5, T])
)
MASKS = CAUSAL, BIDIRECTIONAL, AttentionMask(False, *TWO)


@pytest.mark.sample(1)
@pytest.mark.parametrize("implementation", ["reference", "pallas"])
def test_only_what_is_seen_changes_a_logit(implementation):
  changes = {"attention": implementation, "layers": 1}
  of = models.build(SMALL | changes, helpers.VOCAB)
  params = helpers.random_params(of)
  positions = np.arange(T, dtype=np.int32)[None].repeat(2, 0)

  @jax.jit
  def run(tokens, mask):
    return of.logits(params, of.encode(params, tokens, positions, mask))

  for mask in MASKS:
    seen = reference.visible(mask, 2, T, T)[0]
    masked = functools.partial(run, mask=mask)
    helpers.check_leaks(masked, seen, (0, 4, 5, T - 1))


CONFIG = """
from antlm_jax import config

def get_config(arg):
  out = config.default("toy_gpt")
  out.curriculum = "C+M+C:M=1:1"
  out.model.dropout = 0.1
  config.shrink(out)
  out.schedule.peak_lr = 1e-2
  out.log.writers = ()
  return out
"""


@pytest.mark.slow
def test_a_run_trains_it(tmp_path, prepared):
  (tmp_path / "config.py").write_text(CONFIG)
  words = [f"--config={tmp_path}/config.py", f"--workdir={tmp_path}/run"]
  train.main([*words, f"--config.data.path={prepared}"])
  loaded = load(tmp_path / "run")
  assert loaded.config.model.name == "toy_gpt"
  assert loaded.params["places"].shape == (2048, 32)
  records = metrics.read_records(tmp_path / "run")
  for name in ("eval/clm/loss", "eval/mlm/loss"):
    found = [record[name] for record in records if name in record]
    assert found[-1] < 0.9 * found[0], name


# Two devices


def trained(**shape) -> dict:
  """What training on a mesh gives, in a process of its own."""
  of = models.build(SMALL | {"layers": 1, "dropout": 0.1}, helpers.VOCAB)
  return helpers.trained(of, **shape)


@pytest.mark.nightly
@pytest.mark.slow
def test_two_devices_train_it_as_one_and_hold_their_shares():
  code = "import json; from tests.test_toy_encoder import trained as of\n"
  code += "print(json.dumps([of(), of(fsdp=2), of(tensor=2)]))"
  one, fsdp, tensor = json.loads(runs.run_code(code, devices=2))
  assert one["losses"][0] != one["losses"][-1]
  for other in (fsdp, tensor):
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5)
  small = {path for path in one["parts"] if "norm" in path or "bias" in path}
  for path, parts in fsdp["parts"].items():
    assert parts == (1 if path in small else 2), path
  for path, parts in tensor["parts"].items():
    # Its own axis has no rule: the table of positions is whole.
    assert parts == (1 if path in {*small, "places"} else 2), path


def test_its_settings_are_those_of_every_encoder():
  of = models.build(SMALL, helpers.VOCAB)
  assert of.config.kv_heads == 4 and of.config.head_dim == 8
  assert jnp.dtype(of.config.dtype) == jnp.float32
  assert of.axes["places"] == ("seq_table", "embed")
  assert of.axes["blocks/up/kernel"] == (None, "embed", "mlp")
  assert of.attention_of(np.zeros((1, 2, T)), CAUSAL) == "reference"
