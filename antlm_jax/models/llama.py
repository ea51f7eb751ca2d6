"""The llama encoder: RMSNorm, SwiGLU, RoPE, grouped queries.

BabyLlama (arXiv 2308.02019), the 210M, 610M and 1B encoders of arXiv 2507.00994
(Table 1), and Llama 1 to 3 use it. Mistral also has `windows`, Qwen2 has
`qkv_bias`, and Qwen3 has `qk_norm`.
"""

import dataclasses
import functools

import jax
from flax import nnx

from antlm_jax import attention
from antlm_jax import mesh as mesh_lib
from antlm_jax.errors import UserError
from antlm_jax.models import encoder, fused, layers
from antlm_jax.models.encoder import ENCODERS, EncoderConfig
from antlm_jax.models.layers import Linear
from antlm_jax.settings import setting


@ENCODERS.register("llama")
@dataclasses.dataclass(frozen=True)
class LlamaConfig(EncoderConfig):
  """Settings of the llama encoder, in addition to those of every encoder."""

  kv_heads: int = setting(
    12, "Number of key/value heads K; it divides the query heads", least=1
  )
  head_width: int = setting(
    0, "Head width H; 0 for width / heads", least=0, most=2**20
  )
  rope_theta: float = setting(10_000.0, "RoPE base", over=0)
  rope_scaling: tuple[float, ...] = setting(
    (), "RoPE factor, or Llama 3's factor, low, high, original length", over=0
  )
  windows: tuple[int, ...] = setting(
    (), "Window of each layer, repeated; 0 for no window", least=0
  )
  qkv_bias: bool = setting(
    False, "Add biases to queries, keys and values (Qwen2)"
  )
  qk_norm: bool = setting(False, "Normalize each query and key head (Qwen3)")
  init_std: float = setting(
    0.02, "Standard deviation of initial weights", least=0, most=100
  )
  tied: bool = setting(True, "Use the embeddings as output layer too")

  # Subclasses may override these.
  norm = layers.RMSNorm
  activation = staticmethod(jax.nn.silu)
  score_scale = None  # None for 1 / sqrt(H)
  window_rope_theta = None  # RoPE base with a window; None for `rope_theta`

  def linear(
    self, rngs: nnx.Rngs, shape, axes, bias=False, out=False
  ) -> Linear:
    """Declares a matrix; `out` if its output is added to the states."""
    kernel = layers.normal(rngs, shape, axes, self.init_std)
    return Linear(kernel, bias)

  def __post_init__(self):
    super().__post_init__()
    if self.heads % self.kv_heads:
      raise UserError(
        f"model.heads={self.heads} is not a multiple of"
        f" model.kv_heads={self.kv_heads}"
      )
    if self.head_width == self.width / self.heads:  # the default
      object.__setattr__(self, "head_width", 0)
    if self.head_dim % 2:
      raise UserError(
        f"model.head_width={self.head_dim} is odd, but RoPE needs an even"
        " width: set it, or change model.width or model.heads"
      )
    scaling = self.rope_scaling
    if len(scaling) > 1 and not (len(scaling) == 4 and scaling[1] < scaling[2]):
      raise UserError(
        f"model.rope_scaling={scaling} is invalid: give one factor, or factor,"
        " low, high and original length, with low under high"
      )

  def module(self, rngs: nnx.Rngs) -> encoder.Encoder:
    """Builds the encoder."""
    return Llama(rngs, self)


# Shapes of BabyLlama (97M) and of arXiv 2507.00994's encoders (Table 1).
_COLUMNS = ("layers", "width", "mlp_width", "heads", "kv_heads")
SHAPES = {
  size: dict(zip(_COLUMNS, row, strict=True))
  for size, row in {
    "97M": (12, 768, 2048, 12, 12),
    "210M": (12, 768, 3072, 12, 12),
    "610M": (26, 1152, 4096, 18, 6),
    "1B": (28, 1728, 5120, 18, 6),
  }.items()
}


class LlamaAttention(nnx.Module):
  """Grouped-query attention with RoPE."""

  def __init__(self, rngs: nnx.Rngs, config: LlamaConfig):
    c = self.config = config
    q = (c.width, c.heads * c.head_dim), ("embed", "heads")
    kv = (c.width, c.kv_heads * c.head_dim), ("embed", "kv_heads")
    self.q = c.linear(rngs, *q, c.qkv_bias)
    self.k = c.linear(rngs, *kv, c.qkv_bias)
    self.v = c.linear(rngs, *kv, c.qkv_bias)
    self.out = c.linear(rngs, *(x[::-1] for x in q), out=True)
    if c.qk_norm:
      self.q_norm = c.norm(c.head_dim, c.norm_eps)
      self.k_norm = c.norm(c.head_dim, c.norm_eps)

  @jax.named_scope("projections")
  def __call__(self, x, rope, mask: attention.MaskPlan, key) -> jax.Array:
    c = self.config
    q, k, v = (
      layers.split_heads(f(x), c.head_dim) for f in (self.q, self.k, self.v)
    )
    if c.qk_norm:
      q = self.q_norm(q)
      k = self.k_norm(k)
    dropped = layers.attention_dropout(c.attention_dropout, key, len(x))
    y = attention.attend(
      *(q, k, v, mask), scale=c.score_scale, dropout=dropped, rope=rope
    )
    return self.out(y.reshape(*y.shape[:2], -1))


class GatedMLP(nnx.Module):
  """Computes down(activation(gate(x)) * up(x)): SwiGLU if it is SiLU."""

  def __init__(self, rngs: nnx.Rngs, config: LlamaConfig):
    self.activation = config.activation
    self.fused = config.fused_layers
    shape = (config.width, config.mlp_width)
    axes = ("embed", "mlp")
    self.gate = config.linear(rngs, shape, axes)
    self.up = config.linear(rngs, shape, axes)
    self.down = config.linear(rngs, shape[::-1], axes[::-1], out=True)

  @jax.named_scope("mlp")
  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(self.gated(x))

  def gated(self, x: jax.Array) -> jax.Array:
    """Returns activation(gate(x)) * up(x)."""
    gate = self.gate(x)
    return fused.gated_product(self.activation, gate, self.up(x), self.fused)


class LlamaBlock(nnx.Module):
  """Pre-norm attention and a pre-norm gated MLP, each added to its input."""

  def __init__(self, rngs: nnx.Rngs, config: LlamaConfig):
    self.attention_norm = config.norm(config.width, config.norm_eps)
    self.attention = LlamaAttention(rngs, config)
    self.mlp_norm = config.norm(config.width, config.norm_eps)
    self.mlp = GatedMLP(rngs, config)
    self.dropout = config.dropout
    self.fused = config.fused_layers

  def __call__(self, x, rope, mask: attention.MaskPlan, key) -> jax.Array:
    keys = layers.split_key(key, 3)
    add = functools.partial(fused.residual_norm, fused=self.fused)
    x, y = add(self.attention_norm, x)
    y = self.attention(y, rope, mask, keys[0])
    x, y = add(self.mlp_norm, x, layers.dropout(y, self.dropout, keys[1]))
    return x + layers.dropout(self.mlp(y), self.dropout, keys[2])


class Llama(encoder.Encoder):
  """The llama encoder; hidden states are the output of the last norm."""

  block = LlamaBlock

  def __init__(self, rngs: nnx.Rngs, config: LlamaConfig):
    c = self.config = config
    self.embedding = layers.normal(
      rngs, (c.vocab_size, c.width), ("vocab", "embed"), c.init_std
    )
    self.blocks = encoder.stack(lambda r, _: self.block(r, c), rngs, c.layers)
    self.norm = c.norm(c.width, c.norm_eps)
    if not c.tied:
      shape = c.width, c.vocab_size
      self.head = c.linear(rngs, shape, ("embed", "vocab"))

  def __call__(self, tokens, positions, mask, dropout_key=None) -> jax.Array:
    c = self.config
    x, masks, keys = encoder.block_inputs(
      c, self.embed(tokens), mask, dropout_key
    )
    rope = encoder.rope(c, positions)
    return self.norm(encoder.run_blocks(c, self.blocks, x, masks, keys, rope))

  def embed(self, tokens: jax.Array) -> jax.Array:
    """Returns the first hidden states, `[B, T, D]`."""
    return encoder.embed_tokens(self.embedding, tokens, self.config.dtype)

  def output_head(self) -> encoder.Head:
    if self.config.tied:
      return encoder.Head(encoder.embedding_table(self.embedding).T)
    kernel = mesh_lib.gathered(self.head.kernel[...], *self.head.axes)
    return encoder.Head(kernel)
