"""Trains several runs in one process, one after another.

The runs differ in their seeds and schedules alone. Each has its own folder,
hooks and checkpoints, and all share the compiled programs.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import config as config_lib
from antlm_jax.config import Config
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, progress
from antlm_jax.runtime.compilation import keep_programs
from antlm_jax.runtime.signals import listening
from antlm_jax.training import loop
from antlm_jax.training.hooks import Hook
from antlm_jax.training.run import Run
from antlm_jax.training.step import Programs, TrainStep, jitted, state_shardings


def shared_settings(config: Config) -> str:
  """Returns the settings that runs trained together have in common, as JSON."""
  common = dataclasses.replace(config, seed=0, schedule=Config.schedule)
  return config_lib.to_json(common)


def train_together(
  runs: Sequence[Run],
  workdirs: Sequence[files.Path],
  hooks: Sequence[Sequence[Hook]],
) -> dict[int, UserError]:
  """Trains runs to their ends, and resumes those that were stopped.

  Arguments after `runs` are those of `loop.train_run`, for each run. A run that
  fails does not stop the others.

  Returns:
    The error of each run that failed, by the run's index.

  Raises:
    UserError: The runs differ in more than their seeds and schedules, or write
      what only one run of a process can write.
    Stopped: A signal ended the runs. Their last steps are saved.
  """
  keep_programs()
  _check_configs([run.config for run in runs])
  programs = shared_programs([run.step for run in runs], runs[0].mesh)
  failed = {}
  for number, run in enumerate(runs):
    workdir = workdirs[number]
    progress.say(f"\nrun {number + 1} of {len(runs)}: {workdir}")
    try:
      with listening() as stop:
        loop.train_built(run, programs[number], workdir, hooks[number], stop)
    except UserError as error:
      progress.say(f"error: {workdir}: {error}")
      failed[number] = error
  return failed


def _check_configs(configs: Sequence[Config]) -> None:
  if jax.process_count() > 1:
    raise UserError("runs are trained together by one process, not by several")
  if len(set(map(shared_settings, configs))) > 1:
    raise UserError(
      "runs that are trained together may differ in seed and schedule alone"
    )
  log = configs[0].log
  for name, used in {
    "log.trace": log.trace,
    "log.writers=wandb": "wandb" in log.writers,
  }.items():
    if used:
      raise UserError(f"{name} is for one run a process: leave out --together")


def shared_programs(
  steps: Sequence[TrainStep], mesh: jax.sharding.Mesh
) -> list[Programs]:
  """Returns the programs of each run, which compile once for all of them.

  The steps differ in their seeds and schedules alone. So the number of the run
  is an argument of the compiled programs.
  """
  seeds = np.array([step.seed for step in steps], np.uint32)
  shardings = state_shardings(steps[0], mesh)

  def numbered(run: jax.Array) -> TrainStep:
    def schedule(step: jax.Array) -> jax.Array:
      return jnp.stack([train_step.schedule(step) for train_step in steps])[run]

    seed = jnp.asarray(seeds)[run]
    return dataclasses.replace(steps[0], seed=seed, schedule=schedule)

  init = jax.jit(lambda run: numbered(run).init(), out_shardings=shardings)
  update = jax.jit(
    lambda run, *args: numbered(run).update(*args),
    out_shardings=(shardings, shardings.step),
    donate_argnums=1,
  )
  evaluate = jitted(steps[0], shardings).evaluate
  out = []
  for run in range(len(steps)):
    of_run = functools.partial(init, run), functools.partial(update, run)
    out.append(Programs(*of_run, evaluate))
  return out
