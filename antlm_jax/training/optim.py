"""Optimizers and learning-rate schedules, from the config."""

import itertools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from antlm_jax.errors import UserError
from antlm_jax.models import Tensor
from antlm_jax.objectives.curriculum import amount


def decays(axes: Mapping[str, Sequence[str | None]], scope: str):
  """Returns which parameters weight decay applies to, by path.

  The scope is `all` (as arXiv 2507.00994's code), `matrices` (neither norms
  nor biases), or `hidden` (nor embeddings, as LTG-BERT).
  """
  # A parameter with one of these axes does not decay.
  left_out = {
    "all": set(),
    "matrices": {"norm", "bias"},
    "hidden": {"norm", "bias", "vocab", "relative"},
  }[scope]
  return {path: not left_out & set(names) for path, names in axes.items()}


def make(
  config,
  axes: Mapping[str, Sequence[str | None]],
  tensors: Mapping[str, Tensor] | None = None,
) -> optax.GradientTransformation:
  """Makes the optimizer of an `optimizer` config section.

  Multiply its updates by the learning rate and subtract them. The learning
  rate is a function of the run's step, not of the optimizer's own count, so
  that resetting the optimizer does not restart the schedule.

  `axes` are the parameters' logical axes, by path. `tensors` are the published
  tensors that they belong to, by path; by default each parameter is a tensor.
  """
  mask = decays(axes, config.decay_scope)
  adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
  chain = [adam, optax.add_decayed_weights(config.weight_decay, mask)]
  if config.clip > 0:
    chain.insert(0, optax.clip_by_global_norm(config.clip))
  if config.name == "lamb":
    tensors = tensors or {path: Tensor(path) for path in axes}
    # Only parameters that decay, as in LTG-BERT's code: norms get plain Adam.
    chain.append(optax.masked(_scale_by_trust_ratio(axes, tensors), mask))
  return optax.chain(*chain)


def _scale_by_trust_ratio(axes, tensors) -> optax.GradientTransformation:
  """LAMB's trust ratio, |parameter| / |update|, for each published tensor.

  optax's own has one ratio for each array. An array here may hold a tensor for
  each layer, or several in a row (`Tensor.parts`), and a published tensor may
  be several arrays here, such as the projections of queries and keys.
  """
  paths_of = {}  # the arrays of each published tensor
  for path in sorted(axes):
    paths_of.setdefault(tensors[path].name, []).append(path)

  def squares(path, x):
    """Sums of squares: `[]`, or one for each layer or part."""
    if parts := tensors[path].parts:
      return jax.ops.segment_sum(x * x, _part_of_each(parts), len(parts))
    # The layer axis has no name, and is the first.
    stacked = int(axes[path][0] is None)
    return jnp.sum(x * x, axis=tuple(range(stacked, x.ndim)))

  def scaled(path, x, ratio):
    if parts := tensors[path].parts:
      return x * ratio[_part_of_each(parts)]
    return x * ratio.reshape(ratio.shape + (1,) * (x.ndim - ratio.ndim))

  def scale(updates, params):
    out = dict(updates)
    for paths in paths_of.values():
      if isinstance(updates[paths[0]], optax.MaskedNode):  # does not decay
        continue
      p = jnp.sqrt(sum(squares(path, params[path]) for path in paths))
      u = jnp.sqrt(sum(squares(path, updates[path]) for path in paths))
      ratio = jnp.where((p > 0) & (u > 0), p / jnp.where(u > 0, u, 1), 1)
      for path in paths:
        out[path] = scaled(path, updates[path], ratio)
    return out

  return optax.stateless(scale)


def _part_of_each(parts: Sequence[int]) -> np.ndarray:
  """Index of the part that each element of a vector belongs to."""
  return np.repeat(np.arange(len(parts)), parts)


_DECAYS = {
  "linear": lambda t: 1 - t,
  "cosine": lambda t: 0.5 * (1 + jnp.cos(jnp.pi * t)),
  "1-sqrt": lambda t: 1 - jnp.sqrt(t),
}


def schedule(
  config, steps: int, restarts: Sequence[int] = ()
) -> optax.Schedule:
  """Makes the learning rate of a `schedule` config section.

  Warmup, stable, decay: linear from peak / warmup_steps up to the peak, the
  peak, then down to `min_lr_ratio` x peak at the last step. `cosine` has no
  stable part. In the last `cooldown_steps` the rate falls from `min_lr_ratio`
  x peak to zero (GPT-BERT). At the steps `restarts` the schedule begins anew:
  each part of the run's `steps` has a warmup and a decay. Raises a UserError if
  these are longer than their part.
  """
  bounds = itertools.pairwise([0, *restarts, steps])
  parts = [_without_restarts(config, stop - start) for start, stop in bounds]
  return optax.join_schedules(parts, list(restarts))


def _without_restarts(config, steps: int) -> optax.Schedule:
  warmup = amount(config.warmup_steps, steps)
  shape, decay = config.decay, amount(config.decay_steps, steps)
  if config.name == "cosine":
    shape, decay = "cosine", steps - warmup
  cooldown = amount(config.cooldown_steps, steps)
  if decay < 0 or warmup + decay > steps:
    raise UserError(
      f"schedule.warmup_steps ({warmup} steps) and schedule.decay_steps"
      f" ({max(0, decay)}) do not fit in {steps} steps"
    )

  def rate(step):
    # Step s has the rate after s + 1 parts: the first step is over zero, and
    # the last is at the floor.
    up = jnp.minimum(1.0, (step + 1) / max(warmup, 1))
    t = jnp.clip((step + 1 - (steps - decay)) / max(decay, 1), 0.0, 1.0)
    down = config.min_lr_ratio + (1 - config.min_lr_ratio) * _DECAYS[shape](t)
    if cooldown:
      end = config.min_lr_ratio * jnp.maximum(steps - step, 0) / cooldown
      down = jnp.where(step < steps - cooldown, down, end)
    return config.peak_lr * jnp.where(step < warmup, up, down)

  return rate
