"""The BERT encoder: learned positions, a norm after each sublayer, biases.

BERT (arXiv 1810.04805) and models with other weights in the same encoder:
RoBERTa (arXiv 1907.11692), XLM-R, CamemBERT, MiniLM, BGE, E5. A table has a
vector for each position, so that no row can be longer than the table.

All tokens have type 0. BERT's pretraining and fine-tuning also have type 1, for
the second text of a pair. The table keeps that vector.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax import mesh as mesh_lib
from antlm_jax.models import encoder, layers
from antlm_jax.models.encoder import ENCODERS, EncoderConfig
from antlm_jax.settings import setting


@ENCODERS.register("bert")
@dataclasses.dataclass(frozen=True)
class BertConfig(EncoderConfig):
  """Settings of BERT, in addition to those of every encoder.

  The defaults are those of the base size. RoBERTa has `first_position=2`,
  `token_types=1` and `norm_eps=1e-5`.
  """

  mlp_width: int = setting(3072, "Inner MLP width F", least=1, most=2**20)
  max_seq_len: int = setting(
    512, "Longest row, in tokens: each position has a vector", least=1
  )
  norm_eps: float = setting(
    1e-12, "Term added to variances in norms", least=0, most=1
  )
  dropout: float = setting(
    0.1, "Dropout rate of embeddings and sublayer outputs", least=0, under=1
  )
  attention_dropout: float = setting(
    0.1, "Dropout rate of attention weights", least=0, under=1
  )
  first_position: int = setting(
    0,
    "Row of the position table for the first token; RoBERTa has 2",
    least=0,
    most=2**20,
  )
  token_types: int = setting(
    2, "Number of token types, of which all tokens have the first", least=1
  )
  init_std: float = setting(
    0.02, "Standard deviation of initial weights", least=0, most=100
  )
  tied: bool = setting(True, "Use the embeddings as output layer too")

  def module(self, rngs: nnx.Rngs) -> encoder.Encoder:
    """Builds the encoder."""
    return Bert(rngs, self)

  def linear(self, rngs: nnx.Rngs, shape, axes) -> layers.Linear:
    """Declares a matrix with a bias."""
    kernel = layers.truncated_normal(rngs, shape, axes, self.init_std)
    return layers.Linear(kernel, bias=True)

  def norm(self) -> layers.LayerNorm:
    """Declares a norm with a scale and a bias."""
    return layers.LayerNorm(self.width, self.norm_eps, affine=True)


class BertAttention(nnx.Module):
  """Attention without positions, since the embeddings have them."""

  def __init__(self, rngs: nnx.Rngs, config: BertConfig):
    c = self.config = config
    shape = (c.width, c.width)
    axes = ("embed", "heads")
    self.q, self.k, self.v = (c.linear(rngs, shape, axes) for _ in range(3))
    self.out = c.linear(rngs, shape, axes[::-1])

  @jax.named_scope("projections")
  def __call__(self, x, mask: attention.MaskPlan, key) -> jax.Array:
    c = self.config
    q, k, v = (
      layers.split_heads(f(x), c.head_dim) for f in (self.q, self.k, self.v)
    )
    dropped = layers.attention_dropout(c.attention_dropout, key, len(x))
    y = attention.attend(q, k, v, mask, dropout=dropped)
    return self.out(y.reshape(x.shape))


class BertMLP(nnx.Module):
  """Computes down(gelu(up(x))) with the exact GELU."""

  def __init__(self, rngs: nnx.Rngs, config: BertConfig):
    shape = (config.width, config.mlp_width)
    axes = ("embed", "mlp")
    self.up = config.linear(rngs, shape, axes)
    self.down = config.linear(rngs, shape[::-1], axes[::-1])

  @jax.named_scope("mlp")
  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down(layers.exact_gelu(self.up(x)))


class BertBlock(nnx.Module):
  """Attention and MLP; the sum of each with its input is normalized."""

  def __init__(self, rngs: nnx.Rngs, config: BertConfig):
    self.attention = BertAttention(rngs, config)
    self.attention_norm = config.norm()
    self.mlp = BertMLP(rngs, config)
    self.mlp_norm = config.norm()
    self.dropout = config.dropout

  def __call__(self, x, mask: attention.MaskPlan, key) -> jax.Array:
    keys = layers.split_key(key, 3)
    y = layers.dropout(self.attention(x, mask, keys[0]), self.dropout, keys[1])
    x = self.attention_norm(x + y)
    y = layers.dropout(self.mlp(x), self.dropout, keys[2])
    return self.mlp_norm(x + y)


class BertTokenHead(nnx.Module):
  """Transforms hidden states before their product with the output layer."""

  def __init__(self, rngs: nnx.Rngs, config: BertConfig):
    c = config
    self.linear = c.linear(rngs, (c.width, c.width), ("embed", None))
    self.norm = c.norm()
    self.bias = layers.vector(jnp.zeros(c.vocab_size), "bias")
    if not c.tied:
      self.kernel = layers.truncated_normal(
        rngs, (c.width, c.vocab_size), ("embed", "vocab"), c.init_std
      )

  def __call__(
    self, x: jax.Array, places: layers.DropoutPlaces | None
  ) -> jax.Array:
    return self.norm(layers.exact_gelu(self.linear(x)))


class Bert(encoder.Encoder):
  """The BERT encoder; hidden states are the output of the last block."""

  def __init__(self, rngs: nnx.Rngs, config: BertConfig):
    c = self.config = config

    def table(rows: int, axis: str) -> nnx.Param:
      shape = (rows, c.width)
      axes = (axis, "embed")
      return layers.truncated_normal(rngs, shape, axes, c.init_std)

    self.embedding = table(c.vocab_size, "vocab")
    self.positions = table(c.first_position + c.max_seq_len, "position")
    self.token_types = table(c.token_types, "position")
    self.embedding_norm = c.norm()
    self.blocks = encoder.stack(lambda r, _: BertBlock(r, c), rngs, c.layers)
    self.head = BertTokenHead(rngs, c)

  def __call__(self, tokens, positions, mask, dropout_key=None) -> jax.Array:
    c = self.config
    x = encoder.embed_tokens(self.embedding, tokens, c.dtype)
    x, masks, keys = encoder.block_inputs(
      c, self.embedding_norm(x + self._places(positions)), mask, dropout_key
    )
    return encoder.run_blocks(c, self.blocks, x, masks, keys)

  @jax.named_scope("embedding")
  def _places(self, positions: jax.Array) -> jax.Array:
    """Returns the vectors of positions and of the first type, `[B, T, D]`."""
    c = self.config
    table, types = (
      mesh_lib.gathered(p[...], "position", "embed")
      for p in (self.positions, self.token_types)
    )
    return (types[0] + table[c.first_position + positions]).astype(c.dtype)

  def output_head(self) -> encoder.Head:
    if self.config.tied:
      kernel = encoder.embedding_table(self.embedding).T
    else:
      kernel = mesh_lib.gathered(self.head.kernel[...], "embed", "vocab")
    return encoder.Head(kernel, self.head.bias[...], self.head)
