"""Lion: the sign of a momentum is the update (arXiv 2302.06675)."""

import dataclasses

import optax

from antlm_jax.optim import OPTIMIZERS, Optimizer
from antlm_jax.settings import setting


@OPTIMIZERS.register("lion")
@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
  """Settings of Lion."""

  b1: float = setting(0.9, "Decay in the update", least=0, under=1)
  b2: float = setting(0.99, "Decay of the momentum", least=0, under=1)

  def parts(self, axes, tensors):
    """Lion, then the decay."""
    decay = optax.add_decayed_weights(self.weight_decay, self.decays(axes))
    return [optax.scale_by_lion(self.b1, self.b2), decay]
