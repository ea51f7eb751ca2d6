"""The gemma encoder: llama with norms after its sublayers as well.

Gemma 3's text models (arXiv 2503.19786), and the encoder of EmbeddingGemma. By
default every sixth layer sees all keys, and the others only near ones.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax.models import encoder, layers, llama
from antlm_jax.settings import setting


@encoder.ENCODERS.register("gemma")
@dataclasses.dataclass(frozen=True)
class GemmaConfig(llama.LlamaConfig):
  """Settings of the gemma encoder: those of llama, and its own."""

  windows: tuple[int, ...] = setting(
    (512,) * 5 + (0,), "as llama's, repeated: keys nearer are seen", least=0
  )
  rope_theta: float = setting(1e6, "RoPE's base where all is seen", over=0)
  window_rope_theta: float = setting(
    10_000.0, "RoPE's base in layers with a window, which is not scaled", over=0
  )
  query_scalar: int = setting(256, "scores are divided by its root", least=1)
  qk_norm: bool = setting(True, "norms of each query and key head")

  norm = layers.OffsetRMSNorm
  activation = staticmethod(functools.partial(jax.nn.gelu, approximate=True))

  @property
  def score_scale(self) -> float:
    """Factor of attention's scores."""
    return self.query_scalar**-0.5

  def module(self, rngs: nnx.Rngs) -> encoder.Encoder:
    """Makes the encoder."""
    return Gemma(rngs, self)


class Block(llama.Block):
  """Attention, then the gated MLP, each between two norms."""

  def __init__(self, rngs: nnx.Rngs, config: GemmaConfig):
    super().__init__(rngs, config)
    self.attention_out_norm = config.norm(config.width, config.norm_eps)
    self.mlp_out_norm = config.norm(config.width, config.norm_eps)

  def __call__(self, x, rope, mask: attention.Prepared, key) -> jax.Array:
    keys = layers.split_key(key, 3)
    y = self.attention(self.attention_norm(x), rope, mask, keys[0])
    x = x + layers.dropout(self.attention_out_norm(y), self.dropout, keys[1])
    y = self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
    return x + layers.dropout(y, self.dropout, keys[2])


class Gemma(llama.Llama):
  """The encoder; hidden states are those after the last norm."""

  block = Block

  def embed(self, tokens: jax.Array) -> jax.Array:
    c = self.config
    # The factor is rounded to the compute dtype, as in its authors' code.
    return super().embed(tokens) * jnp.asarray(c.width**0.5, c.dtype)
