"""The llama encoder: RMSNorm, SwiGLU, RoPE, grouped queries.

BabyLlama (arXiv 2308.02019) and the 210M, 610M and 1B encoders of arXiv
2507.00994 (Table 1) are this one model. Which keys a position sees is the
mask's business alone, so the same weights run causal or bidirectional.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax.errors import UserError
from antlm_jax.masks import AttentionMask
from antlm_jax.models import encoder, layers
from antlm_jax.models.encoder import EncoderConfig
from antlm_jax.runtime import sharding


@dataclasses.dataclass(frozen=True)
class LlamaConfig(EncoderConfig):
  """The llama encoder's shape, beside the settings of every encoder.

  Attributes:
    kv_heads: Key/value heads K, which divide the query heads.
    head_width: Width H of a head; 0 means width / heads.
    rope_theta: RoPE's base.
    init_std: Standard deviation of the initial weights.
    tied: Whether the head is the transposed embedding.
  """

  kv_heads: int = 12
  head_width: int = 0
  rope_theta: float = 10_000.0
  init_std: float = 0.02
  tied: bool = True

  def __post_init__(self):
    super().__post_init__()
    if self.heads % self.kv_heads:
      raise UserError(
        f"model.heads={self.heads} is not a multiple of"
        f" model.kv_heads={self.kv_heads}"
      )
    if not self.head_width and self.width % self.heads:
      raise UserError(
        f"model.width={self.width} is not a multiple of"
        f" model.heads={self.heads}; set model.head_width"
      )
    object.__setattr__(
      self, "head_width", self.head_width or self.width // self.heads
    )
    if self.head_width < 0 or self.head_width % 2:
      raise UserError(
        f"model.head_width={self.head_width} is not even, as RoPE needs: set"
        " it, or change model.width or model.heads"
      )


# Published encoders: BabyLlama's llama-97M, and those of arXiv 2507.00994
# (Table 1), by the sizes that their papers call them by.
SHAPES = {
  "97M": {"layers": 12, "width": 768, "mlp_width": 2048,
          "heads": 12, "kv_heads": 12},
  "210M": {"layers": 12, "width": 768, "mlp_width": 3072,
           "heads": 12, "kv_heads": 12},
  "610M": {"layers": 26, "width": 1152, "mlp_width": 4096,
           "heads": 18, "kv_heads": 6},
  "1B": {"layers": 28, "width": 1728, "mlp_width": 5120,
         "heads": 18, "kv_heads": 6},
}  # fmt: skip


class Attention(nnx.Module):
  """Grouped-query attention with RoPE."""

  def __init__(self, rngs: nnx.Rngs, config: LlamaConfig):
    c = self.config = config
    q_width, kv_width = c.heads * c.head_width, c.kv_heads * c.head_width

    def linear(i, o, axes):
      return layers.Linear(layers.normal(rngs, (i, o), axes, c.init_std))

    self.q = linear(c.width, q_width, ("embed", "heads"))
    self.k = linear(c.width, kv_width, ("embed", "kv_heads"))
    self.v = linear(c.width, kv_width, ("embed", "kv_heads"))
    self.out = linear(q_width, c.width, ("heads", "embed"))

  def __call__(self, x, rope, mask: attention.Prepared, key) -> jax.Array:
    heads = lambda y: y.reshape(*y.shape[:2], -1, self.config.head_width)  # noqa: E731
    q = layers.rotate(heads(self.q(x)), *rope)
    k = layers.rotate(heads(self.k(x)), *rope)
    dropped = layers.attention_dropout(
      self.config.attention_dropout, key, len(x)
    )
    y = attention.attend(q, k, heads(self.v(x)), mask, dropout=dropped)
    return self.out(y.reshape(*y.shape[:2], -1))


class SwiGLU(nnx.Module):
  """down(silu(gate(x)) * up(x))."""

  def __init__(self, rngs: nnx.Rngs, config: LlamaConfig):
    shape, axes = (config.width, config.mlp_width), ("embed", "mlp")

    def linear(shape, axes):
      return layers.Linear(layers.normal(rngs, shape, axes, config.init_std))

    self.gate = linear(shape, axes)
    self.up = linear(shape, axes)
    self.down = linear(shape[::-1], axes[::-1])

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
  """Pre-norm attention, then pre-norm SwiGLU, each added to its input."""

  def __init__(self, rngs: nnx.Rngs, config: LlamaConfig):
    self.attention_norm = layers.RMSNorm(config.width, config.norm_eps)
    self.attention = Attention(rngs, config)
    self.mlp_norm = layers.RMSNorm(config.width, config.norm_eps)
    self.mlp = SwiGLU(rngs, config)
    self.dropout = config.dropout

  def __call__(self, x, rope, mask: attention.Prepared, key) -> jax.Array:
    keys = (None,) * 3 if key is None else jax.random.split(key, 3)
    y = self.attention(self.attention_norm(x), rope, mask, keys[0])
    x = x + layers.dropout(y, self.dropout, keys[1])
    y = self.mlp(self.mlp_norm(x))
    return x + layers.dropout(y, self.dropout, keys[2])


class Llama(nnx.Module):
  """The encoder: tokens in, hidden states out."""

  def __init__(self, rngs: nnx.Rngs, config: LlamaConfig):
    c = self.config = config
    self.embedding = layers.normal(
      rngs, (c.vocab_size, c.width), ("vocab", "embed"), c.init_std
    )
    self.blocks = encoder.stack(lambda r, _: Block(r, c), rngs, c.layers)
    self.norm = layers.RMSNorm(c.width, c.norm_eps)
    if not c.tied:
      shape = c.width, c.vocab_size
      self.head = layers.Linear(
        layers.normal(rngs, shape, ("embed", "vocab"), c.init_std)
      )

  def __call__(
    self,
    tokens: jax.Array,
    positions: jax.Array,
    mask: AttentionMask,
    dropout_key: jax.Array | None = None,
  ) -> jax.Array:
    """Encodes tokens.

    Args:
      tokens: int32 `[B, T]`.
      positions: Place of each token in its document, int32 `[B, T]`.
      mask: Which keys each position sees.
      dropout_key: Given in training; without it nothing is dropped.

    Returns:
      Hidden states `[B, T, D]` of the compute dtype, after the last norm.
    """
    c = self.config
    x = encoder.table(self.embedding)[tokens].astype(c.dtype)
    x, mask, keys = encoder.begin(c, x, mask, dropout_key)
    rope = layers.rotary(positions, c.head_width, c.rope_theta)

    def step(block, x, key):
      return sharding.constrain(
        block(x, rope, mask, key), "batch", "seq", "embed_act"
      )

    return self.norm(encoder.run_blocks(c, self.blocks, step, x, keys))

  def logits_of(self) -> encoder.LogitsOf:
    """Returns what scores every token; see `Model.logits`."""
    if self.config.tied:
      kernel = encoder.table(self.embedding).T
    else:
      kernel = sharding.gathered(self.head.kernel[...], *self.head.axes)

    def logits(hidden, at=None):
      return jnp.matmul(
        hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32
      )

    return logits
