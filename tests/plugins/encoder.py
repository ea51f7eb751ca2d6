"""A llama with a gate on the update of each block."""

import dataclasses

import jax
from flax import nnx

from antlm_jax.models import ENCODERS, Encoder, encoder, layers, llama


@ENCODERS.register("gated_llama")
@dataclasses.dataclass(frozen=True)
class GatedConfig(llama.LlamaConfig):
  """The settings of a llama; its own would be fields made by `setting`."""

  def module(self, rngs):
    return GatedLlama(rngs, self)


class GatedBlock(nnx.Module):
  def __init__(self, rngs, config):
    shape = config.width, config.width
    kernel = layers.normal(rngs, shape, ("embed", "gate"), config.init_std)
    self.gate = layers.Linear(kernel, bias=True)
    self.block = llama.LlamaBlock(rngs, config)

  def __call__(self, x, rope, mask, key):
    update = self.block(x, rope, mask, key) - x
    return x + jax.nn.sigmoid(self.gate(x)) * update


class GatedLlama(Encoder):
  def __init__(self, rngs, config):
    c = self.config = config
    shape = c.vocab_size, c.width
    self.embedding = layers.normal(rngs, shape, ("vocab", "embed"), c.init_std)
    self.blocks = encoder.stack(lambda r, _: GatedBlock(r, c), rngs, c.layers)
    self.norm = layers.RMSNorm(c.width, c.norm_eps)

  def __call__(self, tokens, positions, mask, dropout_key=None):
    c = self.config
    x = encoder.embed_tokens(self.embedding, tokens, c.dtype)
    x, masks, keys = encoder.block_inputs(c, x, mask, dropout_key)
    rope = encoder.rope(c, positions)
    return self.norm(encoder.run_blocks(c, self.blocks, x, masks, keys, rope))

  def output_head(self):
    return encoder.Head(encoder.embedding_table(self.embedding).T)
