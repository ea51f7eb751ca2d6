"""Finds trainings that begin in the same way, to train their start only once.

Order, masks and dropout are functions of the seed and the step. So two runs are
the same, bit for bit, up to the step where their curricula or learning rates
differ. The longer run can continue a checkpoint of the other. A trunk is
trained once, and every budget adds its decay (arXiv 2507.00994, 3.2).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from antlm_jax import config as config_lib
from antlm_jax.config import Config
from antlm_jax.objectives import curriculum as curriculum_lib
from antlm_jax.objectives.curriculum import Curriculum

# Settings that are compared step by step, and settings that change no step. The
# mesh and the kind of attention change rounding, so they have to be the same.
_BY_STEP = "curriculum", "objectives", "schedule"
_NO_STEP = "checkpoint", "data.path", "data.threads", "eval", "log"


class Branch(NamedTuple):
  """A checkpoint of another run, where a run begins."""

  trunk: str  # name of that run
  step: int


def plan_branches(configs: Mapping[str, Config]) -> dict[str, Branch | None]:
  """Returns the branch that saves most steps, or None, for each run.

  Runs are trained in the given order. A run branches only from runs before it,
  at a step that these train themselves.
  """
  out: dict[str, Branch | None] = {}
  for name, config in configs.items():
    best = None
    for trunk, branch in out.items():
      step = shared_steps(configs[trunk], config)
      if step > max(branch.step if branch else 0, best.step if best else 0):
        best = Branch(trunk, step)
    out[name] = best
  return out


def shared_steps(one: Config, other: Config) -> int:
  """Returns the number of first steps that two runs on the same data share.

  It is 0 for curricula in epochs, whose length depends on the data. The last
  step of either run does not count, so that a branch has a step to train.
  """
  runs = (one, steps_of(one)), (other, steps_of(other))
  if None in (runs[0][1], runs[1][1]) or _rest(one) != _rest(other):
    return 0
  length = min(curriculum.steps for _, curriculum in runs) - 1
  rates, averages, steps = [], [], np.arange(length)
  for config, curriculum in runs:
    restarts = config.schedule.restart_at_switch and curriculum.switches
    rate = config.schedule.build(curriculum.steps, restarts or ())
    rates.append(np.asarray(rate(steps)))
    average = config.optimizer.averaging(curriculum.steps) or np.zeros_like
    averages.append(np.broadcast_to(average(steps), length))
  both = rates[0] != rates[1], averages[0] != averages[1]
  differ = np.flatnonzero(np.logical_or(*both))
  return min(_same_phases(*runs), *map(int, differ[:1]), length)


def steps_of(config: Config) -> Curriculum | None:
  """Returns a config's curriculum, or None if only the data say its length."""
  names, train = list(config.known_objectives), config.train
  # Phases in steps have the same length with any epoch.
  short, long = (
    curriculum_lib.parse_curriculum(
      config.curriculum,
      names,
      epoch,
      train.steps or round(train.epochs * epoch) or None,
    )
    for epoch in (1e3, 2e3)
  )
  return short if short == long else None


def _rest(config: Config) -> dict:
  """Returns the settings that have to be the same."""
  apart = tuple(f"{name}." for name in (*_BY_STEP, *_NO_STEP))
  leaves = config_lib.leaves(config).items()
  return {k: value for k, value in leaves if not f"{k}.".startswith(apart)}


def _same_phases(
  one: tuple[Config, Curriculum], other: tuple[Config, Curriculum]
) -> int:
  """Returns the number of first steps whose objectives are the same."""
  (a, of_a), (b, of_b) = one, other
  by_name = a.known_objectives, b.known_objectives
  same_length = of_a.steps == of_b.steps
  by_length = a.train.batch_start < 1 or a.train.batch_schedule or a.data.mix
  if by_length and not same_length:
    return 0
  for step in sorted({p.start for p in (*of_a.phases, *of_b.phases)}):
    phases = of_a.at(step), of_b.at(step)
    ours, theirs = (
      [(known[name], share) for name, share in phase.shares.items()]
      for known, phase in zip(by_name, phases, strict=True)
    )
    # Rows go to objectives by the number of steps since the phase's start.
    same_start = phases[0].start == phases[1].start or len(ours) == 1
    changes = any(kind.mask_ratio_end is not None for kind, _ in ours)
    if ours != theirs or not same_start or (changes and not same_length):
      return step
  return min(of_a.steps, of_b.steps)
