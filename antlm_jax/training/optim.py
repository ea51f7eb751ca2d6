"""Optimizers and learning-rate schedules, from the config."""

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from antlm_jax.errors import UserError
from antlm_jax.objectives.curriculum import amount

Schedule = optax.Schedule


def decays(axes: Mapping[str, Sequence[str | None]], scope: str):
  """Returns which parameters weight decay applies to, by path.

  Args:
    axes: Logical axes of each parameter.
    scope: `all` (as arXiv 2507.00994's code), `matrices` (neither norms
      nor biases), or `hidden` (nor embeddings, as LTG-BERT).
  """
  # The axes that a parameter may not have, to decay.
  left_out = {
    "all": (),
    "matrices": ("norm", "bias"),
    "hidden": ("norm", "bias", "vocab", "relative"),
  }
  if scope not in left_out:
    raise UserError(
      f"optimizer.decay_scope={scope!r} is not one of {', '.join(left_out)}"
    )
  return {
    path: not set(names) & set(left_out[scope]) for path, names in axes.items()
  }


def make(config, axes: Mapping[str, Sequence[str | None]]):
  """Makes the optimizer of an `optimizer` config section.

  Its updates are to be multiplied by the learning rate and subtracted: the
  rate is a function of the run's step, not of the optimizer's own count, so
  that resetting the optimizer does not restart the schedule.

  Args:
    config: The section; see `antlm_jax.config`.
    axes: Logical axes of each parameter.

  Returns:
    An `optax.GradientTransformation`.
  """
  mask = decays(axes, config.decay_scope)
  adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
  decay = optax.add_decayed_weights(config.weight_decay, mask)
  # LAMB's trust ratio only where there is decay, as in LTG-BERT's code: norms
  # get plain Adam.
  trust = optax.masked(_scale_by_trust_ratio(axes), mask)
  chains = {"adamw": (adam, decay), "lamb": (adam, decay, trust)}
  if config.name not in chains:
    raise UserError(
      f"optimizer.name={config.name!r} is not one of {', '.join(chains)}"
    )
  clip = [optax.clip_by_global_norm(config.clip)] if config.clip > 0 else []
  return optax.chain(*clip, *chains[config.name])


def _scale_by_trust_ratio(axes) -> optax.GradientTransformation:
  """LAMB's trust ratio, |parameter| / |update|, of each layer by itself.

  optax's own would take the layers stacked in one array together.
  """

  def scale(path, update, param):
    # An axis without a name is that of the layers: they lie in one array.
    stacked = axes[path[-1].key][0] is None
    within = tuple(range(int(stacked), param.ndim))
    p, u = (
      jnp.sqrt(jnp.sum(x * x, axis=within, keepdims=True))
      for x in (param, update)
    )
    return update * jnp.where((p > 0) & (u > 0), p / jnp.where(u > 0, u, 1), 1)

  return optax.stateless(
    lambda updates, params: jax.tree.map_with_path(scale, updates, params)
  )


_DECAYS = {
  "linear": lambda t: 1 - t,
  "cosine": lambda t: 0.5 * (1 + jnp.cos(jnp.pi * t)),
  "1-sqrt": lambda t: 1 - jnp.sqrt(t),
}


def schedule(config, steps: int, restarts: Sequence[int] = ()) -> Schedule:
  """Makes the learning rate of a `schedule` config section.

  Warmup, stable, decay: linear from peak / warmup_steps up to the peak, the
  peak, then down to `min_lr_ratio` x peak at the last step. `cosine` is the
  same shape without a stable part.

  Args:
    config: The section; see `antlm_jax.config`.
    steps: Length of the run.
    restarts: Steps at which the schedule begins anew (an empty sequence: one
      schedule over the run); warmup and decay are then those of each part.

  Returns:
    A function from the step to the learning rate.
  """
  bounds = [0, *restarts, steps]
  parts = [
    _one(config, stop - start) for start, stop in itertools.pairwise(bounds)
  ]
  return optax.join_schedules(parts, bounds[1:-1])


def _one(config, steps: int) -> Schedule:
  shape = {"wsd": config.decay, "cosine": "cosine"}.get(config.name)
  if shape not in _DECAYS:
    raise UserError(
      f"schedule.name={config.name!r} with schedule.decay={config.decay!r}:"
      f" the name is wsd or cosine, the decay one of {', '.join(_DECAYS)}"
    )
  warmup = amount(config.warmup_steps, steps)
  decay = (
    steps - warmup
    if config.name == "cosine"
    else (amount(config.decay_steps, steps))
  )
  if decay < 0 or warmup + decay > steps:
    raise UserError(
      f"schedule.warmup_steps ({warmup} steps) and schedule.decay_steps"
      f" ({max(0, decay)}) do not fit in {steps} steps"
    )

  def rate(step):
    # The first step is one part of the peak, not zero, and the last step is
    # at the floor: the rate at step s is that after s + 1 parts.
    up = jnp.minimum(1.0, (step + 1) / max(warmup, 1))
    t = jnp.clip((step + 1 - (steps - decay)) / max(decay, 1), 0.0, 1.0)
    down = config.min_lr_ratio + (1 - config.min_lr_ratio) * _DECAYS[shape](t)
    return config.peak_lr * jnp.where(step < warmup, up, down)

  return rate


def ema(average, params, decay: float):
  """Moves an exponential moving average towards `params`."""
  return jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, average, params)
