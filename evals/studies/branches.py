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


def shared_steps(config: Config, other: Config) -> int:
  """Returns the number of first steps that two runs on the same data share.

  It is 0 for curricula in epochs, whose length depends on the data. The last
  step of either run does not count, so that a branch has a step to train.
  """
  curricula = steps_of(config), steps_of(other)
  if None in curricula or _fixed_settings(config) != _fixed_settings(other):
    return 0
  length = min(curriculum.steps for curriculum in curricula) - 1
  rates = []
  averages = []
  steps = np.arange(length)
  for run, curriculum in zip((config, other), curricula, strict=True):
    restarts = run.schedule.restart_at_switch and curriculum.switches
    rate = run.schedule.build(curriculum.steps, restarts or ())
    rates.append(np.asarray(rate(steps)))
    average = run.optimizer.averaging(curriculum.steps) or np.zeros_like
    averages.append(np.broadcast_to(average(steps), length))
  differ = (rates[0] != rates[1]) | (averages[0] != averages[1])
  same_phases = _same_phases((config, other), curricula)
  return min(same_phases, length, *map(int, np.flatnonzero(differ)[:1]))


def steps_of(config: Config) -> Curriculum | None:
  """Returns a config's curriculum, or None if only the data say its length."""
  names = list(config.known_objectives)
  train = config.train
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


def _fixed_settings(config: Config) -> dict:
  """Returns the settings that have to be the same."""
  apart = tuple(f"{name}." for name in (*_BY_STEP, *_NO_STEP))
  leaves = config_lib.leaves(config).items()
  return {k: value for k, value in leaves if not f"{k}.".startswith(apart)}


def _same_phases(
  configs: tuple[Config, Config], curricula: tuple[Curriculum, Curriculum]
) -> int:
  """Returns the number of first steps whose objectives are the same."""
  lengths = [curriculum.steps for curriculum in curricula]
  same_length = lengths[0] == lengths[1]
  train = configs[0].train
  by_length = train.batch_start < 1 or train.batch_schedule
  if (by_length or configs[0].data.mix) and not same_length:
    return 0
  starts = {phase.start for c in curricula for phase in c.phases}
  for step in sorted(starts):
    phases = [curriculum.at(step) for curriculum in curricula]
    objectives, others = (
      [(config.known_objectives[name], x) for name, x in phase.shares.items()]
      for config, phase in zip(configs, phases, strict=True)
    )
    # Rows go to objectives by the number of steps since the phase's start.
    same_start = phases[0].start == phases[1].start or len(objectives) == 1
    changes = any(kind.mask_ratio_end is not None for kind, _ in objectives)
    if objectives != others or not same_start or (changes and not same_length):
      return step
  return min(lengths)
