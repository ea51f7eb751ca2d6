"""Inverse square root: after warm-up, the rate falls as step ** -0.5."""

import dataclasses

import jax.numpy as jnp

from antlm_jax.objectives.curriculum import amount
from antlm_jax.optim import SCHEDULES, Schedule


@SCHEDULES.register("inverse_root")
@dataclasses.dataclass(frozen=True)
class InverseRoot(Schedule):
  """The settings that every schedule has."""

  def build(self, steps, restarts=()):
    """Returns the learning rate as a function of the step."""
    warmup = max(1, amount(self.warmup_steps, steps))

    def rate(step):
      t = (step + 1) / warmup
      return self.peak_lr * jnp.minimum(t, 1 / jnp.sqrt(t))

    return rate
