"""The ultrabert encoder: llama with windows and a deeper output layer.

UltraBERT (dmis-lab's models of 2026) is bidirectional. Two of three layers have
a window and a smaller RoPE base. Two layers with GELU transform the hidden
states before the output matrix.
"""

import dataclasses

import jax
from flax import nnx

from antlm_jax.models import encoder, layers, llama
from antlm_jax.settings import setting


@encoder.ENCODERS.register("ultrabert")
@dataclasses.dataclass(frozen=True)
class UltraBertConfig(llama.LlamaConfig):
  """Settings of the ultrabert encoder, in addition to those of llama.

  `rope_scaling` does not change layers with a window.
  """

  windows: tuple[int, ...] = setting(
    (129, 129, 0), "Window of each layer, repeated; 0 for no window", least=0
  )
  rope_theta: float = setting(
    2_560_000.0, "RoPE base of layers without window", over=0
  )
  window_rope_theta: float = setting(
    10_000.0, "RoPE base of layers with a window", over=0
  )
  head_mlp_width: int = setting(
    768, "Inner width of the output layer", least=1, most=2**20
  )
  tied: bool = setting(False, "Use the embeddings as output layer too")

  def module(self, rngs: nnx.Rngs) -> encoder.Encoder:
    """Builds the encoder."""
    return UltraBert(rngs, self)


class UltraBertTokenHead(nnx.Module):
  """Transforms hidden states before their product with the output matrix."""

  def __init__(
    self, rngs: nnx.Rngs, config: UltraBertConfig, output: layers.Linear | None
  ):
    shape = (config.width, config.head_mlp_width)
    axes = ("embed", "mlp")
    self.up = config.linear(rngs, shape, axes)
    self.down = config.linear(rngs, shape[::-1], axes[::-1])
    if output is not None:
      self.kernel = output.kernel
      self.axes = output.axes

  def __call__(
    self, x: jax.Array, places: layers.DropoutPlaces | None
  ) -> jax.Array:
    return jax.nn.gelu(self.down(jax.nn.gelu(self.up(x))))  # tanh's form


class UltraBert(llama.Llama):
  """The ultrabert encoder; hidden states are the output of the last norm."""

  def __init__(self, rngs: nnx.Rngs, config: UltraBertConfig):
    super().__init__(rngs, config)
    output = None if config.tied else self.head
    self.head = UltraBertTokenHead(rngs, config, output)

  def output_head(self) -> encoder.Head:
    return dataclasses.replace(super().output_head(), transform=self.head)
