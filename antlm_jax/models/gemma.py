"""The gemma encoder: llama with a second norm after each sublayer.

Gemma 3's text models (arXiv 2503.19786) and EmbeddingGemma use it. By default,
every sixth layer sees all keys, and the other layers have a window.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from antlm_jax import attention
from antlm_jax.models import encoder, layers, llama
from antlm_jax.settings import setting


class OffsetRMSNorm(layers.RMSNorm):
  """RMSNorm that multiplies by 1 + scale before the cast back."""

  def __init__(self, width: int, eps: float):
    self.scale = layers.vector(jnp.zeros(width), "norm")
    self.eps = eps

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    return (self.normed(x) * (1 + self.scale[...])).astype(x.dtype)


@encoder.ENCODERS.register("gemma")
@dataclasses.dataclass(frozen=True)
class GemmaConfig(llama.LlamaConfig):
  """Settings of the gemma encoder, in addition to those of llama.

  `rope_scaling` does not change layers with a window.
  """

  windows: tuple[int, ...] = setting(
    (512,) * 5 + (0,),
    "Window of each layer, repeated; 0 for no window",
    least=0,
  )
  rope_theta: float = setting(1e6, "RoPE base of layers without window", over=0)
  window_rope_theta: float = setting(
    10_000.0, "RoPE base of layers with a window", over=0
  )
  query_scalar: int = setting(
    256, "Number whose square root divides the scores", least=1
  )
  qk_norm: bool = setting(True, "Normalize each query and key head")

  norm = OffsetRMSNorm
  activation = staticmethod(jax.nn.gelu)  # its tanh approximation

  @property
  def score_scale(self) -> float:
    """Factor of attention's scores."""
    return self.query_scalar**-0.5

  def module(self, rngs: nnx.Rngs) -> encoder.Encoder:
    """Builds the encoder."""
    return Gemma(rngs, self)


class GemmaBlock(llama.LlamaBlock):
  """Attention and gated MLP, each with a norm before and after it."""

  def __init__(self, rngs: nnx.Rngs, config: GemmaConfig):
    super().__init__(rngs, config)
    self.attention_out_norm = config.norm(config.width, config.norm_eps)
    self.mlp_out_norm = config.norm(config.width, config.norm_eps)

  def __call__(self, x, rope, mask: attention.MaskPlan, key) -> jax.Array:
    keys = layers.split_key(key, 3)
    y = self.attention(self.attention_norm(x), rope, mask, keys[0])
    x = x + layers.dropout(self.attention_out_norm(y), self.dropout, keys[1])
    y = self.mlp_out_norm(self.mlp(self.mlp_norm(x)))
    return x + layers.dropout(y, self.dropout, keys[2])


class Gemma(llama.Llama):
  """The gemma encoder; hidden states are the output of the last norm."""

  block = GemmaBlock

  def embed(self, tokens: jax.Array) -> jax.Array:
    c = self.config
    # The published code rounds the factor to the compute dtype.
    return super().embed(tokens) * jnp.asarray(c.width**0.5, c.dtype)
