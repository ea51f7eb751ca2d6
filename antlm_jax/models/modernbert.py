"""The ModernBERT encoder: windows in most layers, RoPE, GeGLU, no biases.

ModernBERT (arXiv 2412.13663) and mmBERT (arXiv 2509.06888), which has Gemma 2's
tokenizer, are bidirectional. Ettin's decoders (arXiv 2507.11412) use the same
encoder with a causal mask and windows one token shorter.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax.errors import UserError
from antlm_jax.models import encoder, fused, layers, llama
from antlm_jax.models.encoder import ENCODERS, EncoderConfig
from antlm_jax.models.layers import Linear, exact_gelu
from antlm_jax.settings import setting


@ENCODERS.register("modernbert")
@dataclasses.dataclass(frozen=True)
class ModernBertConfig(EncoderConfig):
  """Settings of ModernBERT; the defaults are those of the base size.

  `dropout` applies to the embeddings and inside the MLPs. `attention_dropout`
  applies to attention's weights and outputs.
  """

  layers: int = setting(22, "Number of blocks L", least=1, most=1000)
  mlp_width: int = setting(1152, "Inner MLP width F", least=1, most=2**20)
  max_seq_len: int = setting(8192, "Longest row, in tokens", least=1)
  windows: tuple[int, ...] = setting(
    (0, 65, 65), "Window of each layer, repeated; 0 for no window", least=0
  )
  rope_theta: float = setting(160_000.0, "RoPE base", over=0)
  window_rope_theta: float = setting(
    10_000.0, "RoPE base of layers with a window", over=0
  )
  init_std: float = setting(
    0.02, "Standard deviation of initial weights", least=0, most=100
  )

  # Llama's layers read these settings, which are fixed in ModernBERT.
  qkv_bias = qk_norm = False
  rope_scaling = ()
  score_scale = None
  activation = staticmethod(exact_gelu)

  def __post_init__(self):
    super().__post_init__()
    if self.head_dim % 2:
      raise UserError(
        f"model.width={self.width} / model.heads={self.heads} is odd, but RoPE"
        " needs an even width"
      )

  def module(self, rngs: nnx.Rngs) -> encoder.Encoder:
    """Builds the encoder."""
    return ModernBert(rngs, self)

  def linear(
    self, rngs: nnx.Rngs, shape, axes, bias=False, out=False
  ) -> Linear:
    """Declares a matrix, with smaller weights if its output is added."""
    std = self.init_std / ((2 * self.layers) ** 0.5 if out else 1)
    return Linear(layers.truncated_normal(rngs, shape, axes, std), bias)


def _layer_norm(config: ModernBertConfig) -> layers.LayerNorm:
  return layers.LayerNorm(config.width, config.norm_eps, True, bias=False)


class ModernBertAttention(llama.LlamaAttention):
  """Llama's attention with dropout of its output."""

  def __init__(self, rngs: nnx.Rngs, config: ModernBertConfig):
    super().__init__(rngs, config)
    layers.published_as("qkv", self.q, self.k, self.v)

  def __call__(self, x, rope, mask: attention.MaskPlan, key) -> jax.Array:
    keys = layers.split_key(key, 2)
    y = super().__call__(x, rope, mask, keys[0])
    return layers.dropout(y, self.config.attention_dropout, keys[1])


class GeGLU(llama.GatedMLP):
  """Computes down(gelu(gate(x)) * up(x)) with the exact GELU."""

  def __init__(self, rngs: nnx.Rngs, config: ModernBertConfig):
    super().__init__(rngs, config)
    self.dropout = config.dropout
    layers.published_as("gate_up", self.gate, self.up)

  @jax.named_scope("mlp")
  def __call__(self, x: jax.Array, key) -> jax.Array:
    return self.down(layers.dropout(self.gated(x), self.dropout, key))


class ModernBertBlock(nnx.Module):
  """Pre-norm attention and pre-norm GeGLU, each added to its input."""

  def __init__(self, rngs: nnx.Rngs, config: ModernBertConfig):
    self.attention_norm = _layer_norm(config)
    self.attention = ModernBertAttention(rngs, config)
    self.mlp_norm = _layer_norm(config)
    self.mlp = GeGLU(rngs, config)
    self.fused = config.fused_layers

  def __call__(self, x, first, rope, mask: attention.MaskPlan, key):
    keys = layers.split_key(key, 2)
    add = functools.partial(fused.residual_norm, fused=self.fused)
    x, y = add(self.attention_norm, x)
    # The norm of the embeddings has already normalized the first input.
    y = self.attention(jnp.where(first, x, y), rope, mask, keys[0])
    x, y = add(self.mlp_norm, x, y)
    return x + self.mlp(y, keys[1])


class ModernBertTokenHead(nnx.Module):
  """Transforms hidden states before their product with the embeddings."""

  def __init__(self, rngs: nnx.Rngs, config: ModernBertConfig):
    c = config
    shape = c.width, c.width
    self.linear = c.linear(rngs, shape, ("embed", None), out=True)
    self.norm = _layer_norm(c)
    self.bias = layers.vector(jnp.zeros(c.vocab_size), "bias")

  def __call__(
    self, x: jax.Array, places: layers.DropoutPlaces | None
  ) -> jax.Array:
    return self.norm(exact_gelu(self.linear(x)))


class ModernBert(encoder.Encoder):
  """The ModernBERT encoder; hidden states are the output of the last norm."""

  def __init__(self, rngs: nnx.Rngs, config: ModernBertConfig):
    c = self.config = config
    self.embedding = layers.truncated_normal(
      rngs, (c.vocab_size, c.width), ("vocab", "embed"), c.init_std
    )
    self.embedding_norm = _layer_norm(c)
    self.blocks = encoder.stack(
      lambda r, _: ModernBertBlock(r, c), rngs, c.layers
    )
    self.norm = _layer_norm(c)
    self.head = ModernBertTokenHead(rngs, c)

  def __call__(self, tokens, positions, mask, dropout_key=None) -> jax.Array:
    c = self.config
    x = encoder.embed_tokens(self.embedding, tokens, c.dtype)
    x, masks, keys = encoder.block_inputs(
      c, self.embedding_norm(x), mask, dropout_key
    )
    first = encoder.per_layer([layer == 0 for layer in range(c.layers)])
    rope = encoder.rope(c, positions)
    x = encoder.run_blocks(c, self.blocks, x, masks, keys, first, rope)
    return self.norm(x)

  def output_head(self) -> encoder.Head:
    kernel = encoder.embedding_table(self.embedding).T
    return encoder.Head(kernel, self.head.bias[...], self.head)
