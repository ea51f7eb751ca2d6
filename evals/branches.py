"""Which trainings begin alike, so that what they share is trained once.

Order, masks and dropout are functions of the seed and the step. So two runs
are the same, bit for bit, up to the step where their curricula or learning
rates part, and the longer one may go on from a checkpoint of the other's: a
trunk is trained once, and every budget adds its decay (arXiv 2507.00994, 3.2).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from antlm_jax import config as config_lib
from antlm_jax.objectives import curriculum as curriculum_lib
from antlm_jax.objectives.curriculum import Curriculum
from antlm_jax.training import optim

# What may differ while the runs are the same, or is compared by step.
_BY_STEP = ("curriculum", "objectives", "schedule", *config_lib.FREE)


class Branch(NamedTuple):
  """Where a run begins, in another's checkpoint."""

  trunk: str  # the name of that run
  step: int


def plan(configs: Mapping[str, ConfigDict]) -> dict[str, Branch | None]:
  """Returns for each run the branch that spares most steps; None: no branch.

  Runs are trained in the order in which they are given, and one may branch only
  from those before it, at a step that these train themselves.
  """
  out: dict[str, Branch | None] = {}
  for name, config in configs.items():
    best = None
    for trunk, branch in out.items():
      step = shared(configs[trunk], config)
      if step > max(branch.step if branch else 0, best.step if best else 0):
        best = Branch(trunk, step)
    out[name] = best
  return out


def shared(one: ConfigDict, other: ConfigDict) -> int:
  """Returns how many first steps two runs on the same data have in common.

  It is 0 for curricula that are not in steps: how long an epoch is only the
  data says. The last step of neither counts: a branch has something to train.
  """
  if _rest(one) != _rest(other):
    return 0
  found = [steps_of(config) for config in (one, other)]
  if None in found:
    return 0
  length = min(curriculum.steps for curriculum in found) - 1
  return min(_alike(one, other, *found), _same_rates(one, other, length))


def steps_of(config: ConfigDict) -> Curriculum | None:
  """Returns a config's curriculum, or None if only its data says its length."""
  names = list(config_lib.objectives(config))
  parse = curriculum_lib.parse
  length = config.train.steps or None
  # Phases in steps are as long whatever an epoch is.
  short, long = (
    parse(config.curriculum, names, epoch, length) for epoch in (1e3, 2e3)
  )
  return short if short == long else None


def _rest(config: ConfigDict) -> dict:
  """Returns the settings that have to be the same."""
  leaves = config_lib.leaves(config)
  return {
    key: value
    for key, value in leaves.items()
    if not any(key == name or key.startswith(f"{name}.") for name in _BY_STEP)
  }


def _alike(a: ConfigDict, b: ConfigDict, of_a: Curriculum, of_b: Curriculum):
  """Returns for how many steps the phases train the same."""
  objectives = config_lib.objectives(a), config_lib.objectives(b)
  grows = a.train.batch_start < 1 or a.train.batch_schedule
  if grows and of_a.steps != of_b.steps:  # goes by the run's length
    return 0
  for one, other in zip(of_a.phases, of_b.phases, strict=False):
    if (one.start, one.shares) != (other.start, other.shares):
      return one.start
    trained = [(objectives[0][n], objectives[1][n]) for n in one.shares]
    changes = any(x.mask_ratio_end is not None for x, _ in trained)
    if any(x != y for x, y in trained) or (
      changes and of_a.steps != of_b.steps
    ):
      return one.start
    if one.stop != other.stop:
      return min(one.stop, other.stop)
  return min(of_a.steps, of_b.steps)


def _same_rates(one: ConfigDict, other: ConfigDict, length: int) -> int:
  """Returns the first step whose learning rates differ, at most `length`."""
  rates = [_rates(config, length) for config in (one, other)]
  differ = np.flatnonzero(rates[0] != rates[1])
  return int(differ[0]) if len(differ) else length


def _rates(config: ConfigDict, length: int) -> np.ndarray:
  curriculum = steps_of(config)
  again = config.schedule.restart_at_switch
  restarts = curriculum.switches if again else ()
  rate = optim.schedule(config.schedule, curriculum.steps, restarts)
  return np.asarray(rate(np.arange(length)))
