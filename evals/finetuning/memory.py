"""How many runs train together: as many as a device's memory holds."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from antlm_jax.evals.finetuning import rows as rows_lib
from antlm_jax.evals.finetuning import step as step_lib
from antlm_jax.evals.finetuning.loop import Data, Run
from antlm_jax.evals.finetuning.rows import Rows, TaskBatch
from antlm_jax.evals.finetuning.step import Settings
from antlm_jax.evals.finetuning.task import Task
from antlm_jax.training.checkpoint import Loaded

_FILLED = 0.8  # of the free memory: it is never allotted without gaps


def runs_together(
  loaded: Loaded,
  task: Task,
  data: Data,
  settings: Settings,
  runs: Sequence[Run],
) -> int:
  """Chooses how many of the runs train together, for speed alone.

  An accelerator takes as many as it holds. A CPU is busy with one run: several
  at once take 5 to 35 % more of its time than one by one.
  """
  if jax.default_backend() == "cpu" or len(runs) == 1:
    return 1
  stats = jax.local_devices()[0].memory_stats() or {}
  if "bytes_limit" not in stats:
    return len(runs)
  free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
  needed = bytes_of_one(loaded, task, data, settings)
  return runs_that_fit(len(runs), needed, int(_FILLED * free))


def runs_that_fit(runs: int, needed: int, free: int) -> int:
  """Returns how many runs of so many bytes train together in what is free.

  Groups are as few as may be, and as even: one that is smaller than the others
  is another program.
  """
  groups = -(-runs // max(1, free // needed))
  return -(-runs // groups)


def bytes_of_one(
  loaded: Loaded, task: Task, data: Data, settings: Settings
) -> int:
  """Returns the memory of a run on the device, beside what it starts from.

  As the compiler has it, of the longest rows; the batches are small beside it.
  """
  made = step_lib.programs(loaded.model.config, task.head, settings)
  encoder, frozen = made.parted(loaded.params)
  rates, seeds = np.zeros(1, np.float32), np.zeros(1, np.uint32)
  state = jax.eval_shape(made.init, encoder, seeds)
  size = settings.batch_size

  def longest(rows: Rows) -> TaskBatch:
    return rows_lib.gather(rows, [rows_lib.batches(rows, size)[-1]])

  needed = _bytes(
    made.step, state, frozen, longest(data.train), rates, seeds, 0
  )
  # While it predicts, the optimizer's state stays where it is.
  kept = sum(
    x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state)
  )
  for rows in data.evaluations.values():
    batch = longest(rows)
    args = state.params, frozen, batch.tokens[0], batch.lengths[0]
    calls = -(-len(rows) // size)  # whose results wait there for the last
    needed = max(needed, kept + _bytes(made.predict, *args, calls=calls))
  return needed


def _bytes(program: Callable, *args, calls: int = 1) -> int:
  """Returns what a program needs; what it does not read is not counted."""
  found = program.lower(*args).compile().memory_analysis()
  out = found.output_size_in_bytes - found.alias_size_in_bytes
  return found.argument_size_in_bytes + found.temp_size_in_bytes + calls * out
