"""Optimizers and learning-rate schedules: settings that build their part.

To add one of either, register a section by name, here or in a new file.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from antlm_jax.errors import UserError
from antlm_jax.models import Tensor, divided
from antlm_jax.objectives.curriculum import amount, amount_setting
from antlm_jax.settings import Registry, Section, setting

_TAIL = 0.2  # share of the run that average=tail has
OPTIMIZERS = Registry("optimizer", "name")
SCHEDULES = Registry("schedule", "name")

Axes = Mapping[str, Sequence[str | None]]  # logical, of parameters by path
Tensors = Mapping[str, Tensor]  # that the parameters belong to, by path

# A parameter with one of these axes does not decay.
_NOT_DECAYED = {
  "all": set(),  # as arXiv 2507.00994's code
  "matrices": {"norm", "bias"},
  # as LTG-BERT's code
  "hidden": {"norm", "bias", "vocab", "relative", "position"},
}


# ---------------------------------------------------------------- optimizers


@dataclasses.dataclass(frozen=True)
class Optimizer(Section):
  """Settings of every optimizer. A subclass adds `parts`."""

  weight_decay: float = setting(
    0.1, "Weight decay per step, times the learning rate", least=0
  )
  # `matrices` leaves out norms and biases, and `hidden` also embeddings.
  decay_scope: str = setting(
    "matrices", "Parameters that decay", choices=tuple(_NOT_DECAYED)
  )
  clip: float = setting(
    1.0, "Largest gradient norm; 0 for no clipping", least=0
  )
  # `ema` has the decay of that name; `tail` is the mean of the last fifth.
  average: str = setting(
    "ema", "Parameter average to evaluate", choices=("ema", "tail")
  )
  ema: float = setting(
    0.0, "Decay of the parameters' moving average; 0 for none", least=0, under=1
  )
  reset_at_switch: bool = setting(False, "Reset the moments at each new phase")

  def decays(self, axes: Axes) -> dict[str, bool]:
    """Returns which parameters weight decay applies to, by path."""
    excluded = _NOT_DECAYED[self.decay_scope]
    return {path: not excluded & set(names) for path, names in axes.items()}

  def averaging(self, steps: int) -> Callable[[jax.Array], jax.Array] | None:
    """Returns the average's decay by the step, or None without an average.

    After step s of the run's `steps`, the average is decay x average +
    (1 - decay) x parameters.
    """
    if self.average == "tail":
      start = steps - max(1, round(_TAIL * steps))
      # Until the tail begins, the average is the parameters themselves.
      return lambda s: 1 - 1 / jnp.maximum(s + 1 - start, 1)
    return (lambda s: self.ema) if self.ema else None

  def build(
    self, axes: Axes, tensors: Tensors | None = None
  ) -> optax.GradientTransformation:
    """Makes the optimizer of parameters with these axes.

    Multiply its updates by the learning rate and subtract them. The learning
    rate depends on the run's step, not on the optimizer's own count. So a reset
    of the optimizer does not restart the schedule.

    By default, each parameter is a published tensor.
    """
    tensors = tensors or {path: Tensor(path) for path in axes}
    parts = self.parts(axes, tensors)
    if self.clip > 0:
      parts.insert(0, optax.clip_by_global_norm(self.clip))
    return optax.chain(*parts)

  def parts(
    self, axes: Axes, tensors: Tensors
  ) -> list[optax.GradientTransformation]:
    """Returns the transformations after clipping, including weight decay."""
    raise NotImplementedError


@OPTIMIZERS.register("adamw")
@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
  """Adam with decoupled weight decay (arXiv 1711.05101)."""

  b1: float = setting(0.9, "Decay of Adam's first moment", least=0, under=1)
  b2: float = setting(0.95, "Decay of Adam's second moment", least=0, under=1)
  # Not 0: the moments of a token that never occurred would be 0 / 0.
  eps: float = setting(
    1e-8, "Term added to the root of the second moment", over=0
  )

  def parts(self, axes, tensors):
    """Adam, then the decay."""
    adam = optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps)
    decay = optax.add_decayed_weights(self.weight_decay, self.decays(axes))
    return [adam, decay]


@OPTIMIZERS.register("lamb")
@dataclasses.dataclass(frozen=True)
class Lamb(AdamW):
  """AdamW with a trust ratio for each published tensor (arXiv 1904.00962)."""

  def parts(self, axes, tensors):
    """AdamW's, then the trust ratios."""
    # Only parameters that decay, as in LTG-BERT's code: norms get plain Adam.
    ratios = optax.masked(_trust_ratios(axes, tensors), self.decays(axes))
    return [*super().parts(axes, tensors), ratios]


def _trust_ratios(axes, tensors) -> optax.GradientTransformation:
  """LAMB's trust ratio, |parameter| / |update|, for each published tensor.

  optax's own has one ratio for each array. An array here may hold a tensor for
  each layer, or several in a row (`Tensor.parts`). A published tensor may also
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


@OPTIMIZERS.register("muon")
@dataclasses.dataclass(frozen=True)
class Muon(AdamW):
  """Orthogonalized momentum for hidden matrices (Keller Jordan, 2024).

  The updates have the root mean square of Adam's, 0.2, so that both take about
  the same learning rate and weight decay (arXiv 2502.16982, equation 4).
  Embeddings, the head, norms and biases get Adam.
  """

  momentum: float = setting(0.95, "Decay of Muon's momentum", least=0, under=1)
  adam_rate: float = setting(
    1.0, "Adam's learning rate / Muon's, except in weight decay", least=0
  )

  def parts(self, axes, tensors):
    """Muon or Adam by parameter, then the decay."""
    encoder, _ = divided(axes)
    hidden = {
      path: path in encoder
      and len([name for name in names if name]) == 2
      and not _NOT_DECAYED["hidden"] & set(names)
      for path, names in axes.items()
    }
    # Layers are stacked along the first axis: each is a matrix of its own.
    matrix = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

    def dimensions(updates):
      return jax.tree.map(lambda _: matrix, updates)

    def scaled(updates, params):
      del params
      return jax.tree.map(lambda x: x * 0.2 * max(x.shape[-2:]) ** 0.5, updates)

    muon = optax.chain(
      contrib.scale_by_muon(
        beta=self.momentum, weight_dimension_numbers=dimensions
      ),
      optax.stateless(scaled),
    )
    adam, decay = super().parts(axes, tensors)
    adam = optax.chain(adam, optax.scale(self.adam_rate))
    not_hidden = {path: not is_hidden for path, is_hidden in hidden.items()}
    return [optax.masked(muon, hidden), optax.masked(adam, not_hidden), decay]


# ----------------------------------------------------------------- schedules

# Rates from 1 to 0 by the share t of the way in [0, 1]. `xp` is jax.numpy, or
# numpy for an array in float64.
DECAYS = {
  "linear": lambda t, xp: 1 - t,
  "cosine": lambda t, xp: 0.5 * (1 + xp.cos(xp.pi * t)),
  "1-sqrt": lambda t, xp: 1 - xp.sqrt(t),
}


@dataclasses.dataclass(frozen=True)
class Schedule(Section):
  """Settings of every learning-rate schedule. A subclass adds `fall`."""

  peak_lr: float = setting(1e-3, "Highest learning rate", least=0)
  warmup_steps: float | int = amount_setting(
    0.02, "Length of the linear warmup"
  )
  min_lr_ratio: float = setting(
    0.0, "Final learning rate / peak_lr", least=0, most=1
  )
  cooldown_steps: float | int = amount_setting(
    0.0, "Length of the final fall from min_lr_ratio x peak_lr to zero"
  )
  restart_at_switch: bool = setting(False, "Restart the schedule in each phase")

  def fall(
    self, steps: int, warmup: int, cooldown: int
  ) -> tuple[str, int, int]:
    """Returns the decay's shape, its first step, and the step after its last.

    All arguments are numbers of steps: of a part of the run, and of the warmup
    and the cooldown in it.
    """
    raise NotImplementedError

  def build(self, steps: int, restarts: Sequence[int] = ()) -> optax.Schedule:
    """Makes the learning rate by the step, from 0 to `steps` - 1.

    It rises linearly from peak / warmup_steps to the peak, stays, and falls to
    `min_lr_ratio` x peak. In the last `cooldown_steps` it falls from there to
    zero (GPT-BERT). At the steps `restarts` the schedule begins anew: each part
    of the run has a warmup and a decay. Raises a UserError if these are longer
    than their part, or a cooldown begins at zero.
    """
    bounds = itertools.pairwise([0, *restarts, steps])
    parts = [self._part(stop - start) for start, stop in bounds]
    return optax.join_schedules(parts, list(restarts))

  def _part(self, steps: int) -> optax.Schedule:
    warmup = amount(self.warmup_steps, steps)
    cooldown = amount(self.cooldown_steps, steps)
    shape, begin, end = self.fall(steps, warmup, cooldown)
    if not warmup <= begin <= end or warmup + cooldown > steps:
      lengths = {"warmup": warmup, "cooldown": cooldown}
      if hasattr(self, "decay_steps"):
        lengths["decay"] = max(0, end - begin)
      terms = (f"schedule.{n}_steps ({x})" for n, x in lengths.items() if x)
      amounts = (getattr(self, f"{n}_steps") for n in lengths)
      remedy = "give shares, as in --config.schedule.warmup_steps=0.1"
      # A share has at least one step.
      if all(length < 1 for length in amounts):
        remedy = "train for more steps"
      raise UserError(
        f"{' + '.join(terms)} do not fit in {steps} steps: lower them, or"
        f" {remedy}"
      )
    floor = self.min_lr_ratio
    last = floor if end > begin else 1.0
    if cooldown and not last:
      raise UserError(
        "schedule.cooldown_steps falls from schedule.min_lr_ratio x peak_lr,"
        " which is zero: set min_lr_ratio, such as 0.1, or leave it out"
      )

    def rate(step):
      # Step s has the rate after s + 1 parts: the first step is over zero, and
      # the last is at the floor.
      up = jnp.minimum(1.0, (step + 1) / max(warmup, 1))
      t = jnp.clip((step + 1 - begin) / max(end - begin, 1), 0.0, 1.0)
      down = floor + (1 - floor) * DECAYS[shape](t, jnp)
      if cooldown:
        cool = last * jnp.maximum(steps - step, 0) / cooldown
        down = jnp.where(step < steps - cooldown, down, cool)
      return self.peak_lr * jnp.where(step < warmup, up, down)

    return rate


@SCHEDULES.register("wsd")
@dataclasses.dataclass(frozen=True)
class WSD(Schedule):
  """Warmup, stable, decay (arXiv 2404.06395)."""

  decay_steps: float | int = amount_setting(
    0.1, "Length of the decay at the end"
  )
  decay: str = setting(
    "linear", "Shape of the rate's decay", choices=tuple(DECAYS)
  )

  def fall(
    self, steps: int, warmup: int, cooldown: int
  ) -> tuple[str, int, int]:
    """The last `decay_steps` before the cooldown."""
    end = steps - cooldown
    return self.decay, end - amount(self.decay_steps, steps), end


@SCHEDULES.register("cosine")
@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
  """Warmup, then half a cosine over the rest of the run."""

  def fall(
    self, steps: int, warmup: int, cooldown: int
  ) -> tuple[str, int, int]:
    """All steps after the warmup; a cooldown replaces the last (GPT-BERT)."""
    return "cosine", warmup, steps
