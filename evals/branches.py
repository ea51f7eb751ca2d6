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
from antlm_jax.objectives.curriculum import Curriculum, Phase
from antlm_jax.objectives.objective import Objective
from antlm_jax.training import optim

# What is compared step by step, and what no step knows of. Of what is free on
# going on, the mesh and how attention is computed round otherwise.
_BY_STEP = (
  *("curriculum", "objectives", "schedule"),
  *("checkpoint", "data.path", "data.threads", "eval", "log"),
)


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
  both = (one, steps_of(one)), (other, steps_of(other))
  if _rest(one) != _rest(other) or None in (both[0][1], both[1][1]):
    return 0
  length = min(curriculum.steps for _, curriculum in both) - 1
  rates = [_rates(*run, length) for run in both]
  differ = np.flatnonzero(rates[0] != rates[1])
  return min(_alike(*both), *map(int, differ[:1]), length)


def steps_of(config: ConfigDict) -> Curriculum | None:
  """Returns a config's curriculum, or None if only its data says its length."""
  names, train = list(config_lib.objectives(config)), config.train
  # Phases in steps are as long whatever an epoch is.
  short, long = (
    curriculum_lib.parse(
      config.curriculum,
      names,
      epoch,
      train.steps or round(train.epochs * epoch) or None,
    )
    for epoch in (1e3, 2e3)
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


def _alike(
  one: tuple[ConfigDict, Curriculum], other: tuple[ConfigDict, Curriculum]
) -> int:
  """Returns for how many steps the phases train the same."""
  (a, of_a), (b, of_b) = one, other
  same_length = of_a.steps == of_b.steps
  by_length = a.train.batch_start < 1 or a.train.batch_schedule or a.data.mix
  if by_length and not same_length:
    return 0
  for step in sorted({p.start for p in (*of_a.phases, *of_b.phases)}):
    x, y = of_a.at(step), of_b.at(step)
    ours = mix(a, x)
    # Which rows an objective gets goes by the steps from the phase's start on.
    same = ours == mix(b, y) and (x.start == y.start or len(ours) == 1)
    changes = any(one.mask_ratio_end is not None for one, _ in ours)
    if not same or (changes and not same_length):
      return step
  return min(of_a.steps, of_b.steps)


def mix(config: ConfigDict, phase: Phase) -> list[tuple[Objective, float]]:
  """Returns a phase's objectives and shares; their order counts."""
  objectives = config_lib.objectives(config)
  return [(objectives[name], share) for name, share in phase.shares.items()]


def _rates(
  config: ConfigDict, curriculum: Curriculum, length: int
) -> np.ndarray:
  """Returns the learning rates of the first steps."""
  again = config.schedule.restart_at_switch
  restarts = curriculum.switches if again else ()
  rate = optim.schedule(config.schedule, curriculum.steps, restarts)
  return np.asarray(rate(np.arange(length)))
