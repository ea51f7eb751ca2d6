"""The llama encoder: RMSNorm, SwiGLU, RoPE, grouped queries.

BabyLlama (arXiv 2308.02019) and the 210M, 610M and 1B encoders of arXiv
2507.00994 (Table 1) are this one model. Which keys a position sees is the
mask's business alone, so the same weights run causal or bidirectional.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention, sharding
from antlm_jax.cli import UserError
from antlm_jax.masks import AttentionMask
from antlm_jax.models import layers


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
  """The llama encoder's shape.

  Attributes:
    vocab_size: Number of tokens V.
    layers: Number of blocks L.
    width: Hidden width D.
    heads: Query heads N.
    kv_heads: Key/value heads K, which divide the query heads.
    head_width: Width H of a head; 0 means width / heads.
    mlp_width: Inner width F of the SwiGLU.
    max_seq_len: Longest row the model is made for, in tokens.
    rope_theta: RoPE's base.
    norm_eps: Added to the mean square in RMSNorm.
    init_std: Standard deviation of the initial weights.
    tied: Whether the head is the transposed embedding.
    dropout: Share of embeddings and of sublayer outputs dropped in training.
    attention_dropout: Share of attention weights dropped in training.
    attention: What computes attention: auto, or a name of
      `antlm_jax.attention.IMPLEMENTATIONS`.
    dtype: What is computed in; parameters, softmax and loss stay float32.
    scan_layers: Run the blocks as a loop: yes, no (unrolled), or auto: no on
      CPU, where a loop costs speed, yes elsewhere.
    remat: none, dots or block: what the backward pass recomputes.
  """

  vocab_size: int
  layers: int = 12
  width: int = 768
  heads: int = 12
  kv_heads: int = 12
  head_width: int = 0
  mlp_width: int = 2048
  max_seq_len: int = 2048
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-5
  init_std: float = 0.02
  tied: bool = True
  dropout: float = 0.0
  attention_dropout: float = 0.0
  attention: str = "auto"
  dtype: str = "float32"
  scan_layers: str = "auto"
  remat: str = "none"

  def __post_init__(self):
    for name in ("layers", "width", "heads", "kv_heads", "mlp_width"):
      if getattr(self, name) < 1:
        raise UserError(f"model.{name}={getattr(self, name)} is not positive")
    for name in ("dropout", "attention_dropout"):
      if not 0 <= getattr(self, name) < 1:
        raise UserError(f"model.{name}={getattr(self, name)} is not in [0, 1)")
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
    for name, choices in (
      ("remat", layers.REMAT_POLICIES),
      ("scan_layers", ("auto", "yes", "no")),
      ("attention", ("auto", *attention.IMPLEMENTATIONS)),
      ("dtype", ("float32", "bfloat16")),
    ):
      if getattr(self, name) not in choices:
        raise UserError(
          f"model.{name}={getattr(self, name)!r} is not one of"
          f" {', '.join(choices)}"
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
      return layers.Linear(rngs, (i, o), axes, c.init_std)

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
    shape, std = (config.width, config.mlp_width), config.init_std
    self.gate = layers.Linear(rngs, shape, ("embed", "mlp"), std)
    self.up = layers.Linear(rngs, shape, ("embed", "mlp"), std)
    self.down = layers.Linear(rngs, shape[::-1], ("mlp", "embed"), std)

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
    self.blocks = layers.stack(lambda r: Block(r, c), rngs, c.layers)
    self.norm = layers.RMSNorm(c.width, c.norm_eps)
    if not c.tied:
      self.head = layers.Linear(
        rngs, (c.width, c.vocab_size), ("embed", "vocab"), c.init_std
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
    keys = None
    x = self.embedding[...].astype(c.dtype)[tokens]
    if dropout_key is not None and (c.dropout or c.attention_dropout):
      first, rest = jax.random.split(dropout_key)
      x = layers.dropout(x, c.dropout, first)
      keys = jax.random.split(rest, c.layers)
    mask = layers.prepare_mask(
      c, mask, *tokens.shape, training=keys is not None
    )
    rope = layers.rotary(positions, c.head_width, c.rope_theta)

    def step(block, x, key):
      return sharding.constrain(
        block(x, rope, mask, key), "batch", "seq", "embed_act"
      )

    x = sharding.constrain(x, "batch", "seq", "embed_act")
    scan = c.scan_layers == "yes" or (
      c.scan_layers == "auto" and sharding.device().platform != "cpu"
    )
    x = layers.run_blocks(self.blocks, step, x, keys, scan=scan, remat=c.remat)
    return self.norm(x)

  def logits(self, hidden: jax.Array) -> jax.Array:
    """Scores of every token, float32 `[..., V]`, from hidden `[..., D]`."""
    kernel = (
      self.embedding[...].T if self.config.tied else self.head.kernel[...]
    )
    return jnp.matmul(
      hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32
    )
