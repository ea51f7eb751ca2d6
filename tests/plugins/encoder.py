"""A minimal GPT: learned positions, LayerNorm, full multi-head attention."""

import dataclasses
import functools

import jax
from flax import nnx

from antlm_jax import attention, models
from antlm_jax.models import encoder, layers


@models.ENCODERS.register("toy_gpt")
@dataclasses.dataclass(frozen=True)
class GptConfig(models.EncoderConfig):
  """The settings that every encoder has."""

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
    x = (
      encoder.embedding_table(self.embedding)[tokens]
      + self.places[...][positions]
    )
    x, mask, keys = encoder.block_inputs(
      c, x.astype(c.dtype), mask, dropout_key
    )
    return self.norm(encoder.run_blocks(c, self.blocks, x, mask, keys))

  def output_head(self):
    return encoder.Head(encoder.embedding_table(self.embedding).T)
