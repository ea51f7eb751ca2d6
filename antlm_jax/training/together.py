"""Trains several runs in one process.

The runs differ in their seeds and schedules alone. Each has its own folder,
hooks and checkpoints, and all share the compiled programs. On a CPU, they train
one after another. On an accelerator, one program takes a step of all runs, with
the runs as a leading axis of the train state.

Each run has a thread, but only one thread works at a time. The others wait for
their turn, or for the step of all runs.
"""

import concurrent.futures
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from antlm_jax import config as config_lib
from antlm_jax.config import Config
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import Batch
from antlm_jax.runtime import files, progress
from antlm_jax.runtime.compilation import keep_programs
from antlm_jax.runtime.signals import listening
from antlm_jax.training import loop
from antlm_jax.training.experiment import Run
from antlm_jax.training.hooks import Hook
from antlm_jax.training.step import Programs, TrainStep, jitted, state_shardings


def shared(config: Config) -> str:
  """Returns the settings that runs trained together have in common, as JSON."""
  common = dataclasses.replace(config, seed=0, schedule=Config.schedule)
  return config_lib.to_json(common)


def train(
  runs: Sequence[Run],
  workdirs: Sequence[files.Path],
  hooks: Sequence[Sequence[Hook]],
  commands: Sequence[str],
) -> dict[int, UserError]:
  """Trains runs to their ends, and resumes those that were stopped.

  Arguments after `runs` are those of `loop.train`, for each run. A run that
  fails does not stop the others.

  Returns:
    The errors of the runs that failed, by their numbers.

  Raises:
    UserError: The runs differ in more than their seeds and schedules, or write
      what only one run of a process can write.
    Stopped: A signal ended the runs. Their last steps are saved.
  """
  keep_programs()
  _check([run.config for run in runs])
  lanes = Lanes([run.step for run in runs], runs[0].mesh)
  total = sum(run.curriculum.steps for run in runs)
  failed = {}
  with (
    listening() as stop,
    progress.Amount(total, "step", f"{len(runs)} runs") as shown,
    concurrent.futures.ThreadPoolExecutor(len(runs)) as pool,
  ):

    def one(lane: int) -> None:
      given = runs[lane], lanes.programs(lane), workdirs[lane]
      around = [*hooks[lane], _Count(shown)]
      with lanes.turn:
        try:
          with progress.quietly():
            loop.train_built(*given, around, commands[lane], stop)
        except UserError as error:
          progress.say(f"error: {workdirs[lane]}: {error}")
          failed[lane] = error
        finally:
          lanes.leave(lane)

    # In copies of this context, so that they are quiet if it is.
    contexts = [contextvars.copy_context() for _ in runs]
    begun = [pool.submit(c.run, one, lane) for lane, c in enumerate(contexts)]
  for done in begun:
    done.result()
  return failed


def _check(configs: Sequence[Config]) -> None:
  if jax.process_count() > 1:
    raise UserError("runs are trained together by one process, not by several")
  if len(set(map(shared, configs))) > 1:
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


class _Count(Hook):
  """Counts the steps of a run for the progress of all runs."""

  def __init__(self, shown: progress.Amount):
    self._shown = shown

  def start(self, trainer) -> None:
    self._shown.add(trainer.step)

  def after_step(self, trainer, taken) -> None:
    self._shown.add()


class Lanes:
  """The compiled programs of several runs, each in its lane.

  With `at_once` over 1, a call of `update` waits until all runs that are left
  have called it. Then one program takes a step of those that have done the
  fewest steps, at most `at_once`.

  Attributes:
    turn: The lock that a thread holds while it works.
  """

  def __init__(
    self,
    steps: Sequence[TrainStep],
    mesh: jax.sharding.Mesh,
    at_once: int | None = None,
  ):
    """Takes the step of each run. By default, `at_once` is 1 on a CPU."""
    # Products with a leading axis are slow on a CPU.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    self._at_once = at_once or (1 if on_cpu else len(steps))
    self._steps = steps
    self._seeds = np.array([step.seed for step in steps], np.uint32)
    shardings = state_shardings(steps[0], mesh)
    self._init = jax.jit(
      lambda lane: self._of(lane).init(), out_shardings=shardings
    )
    self._evaluate = jitted(steps[0], shardings).evaluate
    self._shardings = shardings
    self._update = jax.jit(self.step, donate_argnums=1)
    self.turn = threading.Condition()
    self._left = set(range(len(steps)))
    self._done: dict[int, int] = {}  # number of steps, by lane
    self._waiting: dict[int, tuple] = {}  # state and batch, by lane
    self._taken: dict[int, tuple | Exception] = {}  # results, by lane

  def programs(self, lane: int) -> Programs:
    """Returns the programs of a run."""
    init = functools.partial(self._init, lane)
    update = functools.partial(self.update, lane)
    update._cache_size = self._update._cache_size  # as `jax.jit` has it
    return Programs(init, update, self._evaluate)

  def update(self, lane: int, state, batch: Batch) -> tuple:
    """Takes a step of a run whose thread holds `turn`.

    See `TrainStep.update`.
    """
    if lane not in self._done:
      self._done[lane] = int(state.step)
    self._waiting[lane] = state, batch
    self._go()
    self.turn.wait_for(lambda: lane in self._taken)
    taken = self._taken.pop(lane)
    if isinstance(taken, Exception):
      raise taken
    return taken

  def leave(self, lane: int) -> None:
    """Takes a run that has ended out of the others' way."""
    self._left.discard(lane)
    self._go()

  def _go(self) -> None:
    """Takes a step of waiting runs, if no other run can join them."""
    joined = self._at_once == 1 or self._left == self._waiting.keys()
    if not (self._waiting and joined):
      return
    least = min(self._done[lane] for lane in self._waiting)
    ready = [lane for lane in self._waiting if self._done[lane] == least]
    # Batches of one step may differ in their number of places for targets.
    shapes = {n: jax.tree.map(np.shape, self._waiting[n][1]) for n in ready}
    alike = [lane for lane in ready if shapes[lane] == shapes[ready[0]]]
    lanes = sorted(alike)[: self._at_once]
    states, batches = zip(*map(self._waiting.pop, lanes), strict=True)
    try:
      taken = self._update(np.array(lanes), states, batches)
    except Exception as error:  # such as too little memory: each run fails
      taken = [error] * len(lanes)
    for lane, result in zip(lanes, taken, strict=True):
      self._done[lane] += 1
      self._taken[lane] = result
    self.turn.notify_all()

  def step(self, lanes: jax.Array, states: tuple, batches: tuple) -> list:
    """Returns the state and metrics of each of N runs; lanes are `[N]`."""
    if len(states) == 1:
      found = [self._of(lanes[0]).update(states[0], batches[0])]
    else:
      step = jax.vmap(lambda lane, *args: self._of(lane).update(*args))
      out = step(lanes, _stacked(states), _stacked(batches))
      found = [
        jax.tree.map(lambda x, i=i: x[i], out) for i in range(len(states))
      ]
    constrain = jax.lax.with_sharding_constraint
    return [(constrain(s, self._shardings), metrics) for s, metrics in found]

  def _of(self, lane: jax.Array) -> TrainStep:
    """Returns the step of the run in a lane, whose number may be traced."""

    def schedule(step: jax.Array) -> jax.Array:
      return jnp.stack([each.schedule(step) for each in self._steps])[lane]

    seed = jnp.asarray(self._seeds)[lane]
    return dataclasses.replace(self._steps[0], seed=seed, schedule=schedule)


def _stacked(trees: Sequence):
  return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)
