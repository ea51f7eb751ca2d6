"""What is done around the steps of a run: logging, evaluating, saving.

A hook is one place for one such thing; `of_run` is the list. Others are given
to `loop.train`: an evaluator, for instance, is

    class Norm(hooks.Evaluator):
      prefixes = ("eval/norm",)

      def measure(self, trainer):
        return {"eval/norm": float(optax.tree.norm(trainer.state.params))}

`trainer` is the `loop.Trainer` throughout, which imports this module.
"""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from antlm_jax import units
from antlm_jax.data.source import Source
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.batch import Batch
from antlm_jax.runtime import processes, sharding
from antlm_jax.training import flops, metrics, summary


@dataclasses.dataclass(frozen=True)
class Taken:
  """A step that was taken."""

  step: int  # number of steps done with it
  batch: Batch  # what it took; of several processes, this one's part
  metrics: Mapping[str, np.ndarray]  # the train step's; in hooks, NumPy arrays
  timed: bool  # its time tells the speed: nothing was compiled for it

  def here(self) -> "Taken":
    """Waits for the results, and fetches them from the device."""
    return dataclasses.replace(self, metrics=jax.device_get(self.metrics))


class Hook:
  """Something that is done around the steps; by default nothing.

  All processes of a run have the same hooks, called in the same order.
  """

  spent_on = "hooks"  # what the time of `run` counts as, in the summary

  def start(self, trainer) -> None:
    """Called before the first step."""

  def after_step(self, trainer, taken: Taken) -> None:
    """Called after every step; the state may be a step ahead of its results."""

  def due(self, trainer) -> bool:
    """Whether to call `run` now, after `trainer.step` steps."""
    return False

  def run(self, trainer) -> None:
    """Called where due; `trainer.state` is that after `trainer.step` steps."""

  def stop(self, trainer) -> None:
    """Called where a signal ends the run, after `trainer.step` steps."""

  def end(self) -> None:
    """Called at the end of the run, well or not."""


def of_run(
  config: ConfigDict, folder: pathlib.Path, given: Sequence[Hook]
) -> list[Hook]:
  """Returns a run's hooks, in their order; what grows is in `folder`."""
  # Log is first: it counts a step before others record what came after it.
  # Save is after all that records, which a run that goes on has then.
  return [
    Log(),
    HeldOut(),
    *given,
    *([Watch()] if config.eval.watch else []),
    Save(),
    Trace(config.log.trace, folder / "trace"),
  ]


def is_time(trainer, every: float) -> bool:
  """Whether `every` so much (`curriculum.amount`) are done, or all; 0: all."""
  steps = curriculum.amount(every, trainer.total)
  at_end = trainer.step == trainer.total
  return at_end or (steps > 0 and trainer.step % steps == 0)


def is_evaluated(trainer) -> bool:
  """Whether the state is one that evaluators measure."""
  at_switch = trainer.step in trainer.run.switches
  return at_switch or is_time(trainer, trainer.config.eval.every)


class Evaluator(Hook):
  """Measures the state at the start, as often as `eval.every`, at switches."""

  spent_on = "evaluation"
  prefixes: tuple[str, ...] = ()  # what the names of its values begin with

  def measure(self, trainer) -> dict[str, float]:
    """Returns values by their names, such as `eval/clm/loss`."""
    raise NotImplementedError

  def say(self, trainer, values: Mapping[str, float]) -> str:
    """Puts values into a line."""
    shown = (f"{name} {value:.4g}" for name, value in values.items())
    return f"after step {trainer.step}: {' · '.join(shown)}"

  def start(self, trainer) -> None:
    """Measures what a run begins with, or what an end came before."""
    if not trainer.resumed or (self.due(trainer) and not self._done(trainer)):
      with trainer.ledger.time(self.spent_on):
        self.run(trainer)

  def due(self, trainer) -> bool:
    """As often as the config says, and where objectives or data change."""
    return is_evaluated(trainer)

  def run(self, trainer) -> None:
    """Measures, and records it."""
    if values := self.measure(trainer):
      trainer.record(trainer.step, values)
      trainer.say(self.say(trainer, values))

  def _done(self, trainer) -> bool:
    """Whether the start was measured, before the run was told to end."""
    records = metrics.read_records(trainer.folder)
    row = metrics.by_step(records).get(trainer.step, {})
    done = any(name.startswith(self.prefixes) for name in row)
    return bool(processes.agreed(processes.is_first() and done))


class HeldOut(Evaluator):
  """Measures every objective of `eval.objectives` on held-out text.

  `eval/clm/loss` is of what the run's own data hold out, all together; of
  several sets each has an `eval/clm/NAME/loss`, too.
  """

  def start(self, trainer) -> None:
    self._sources = trainer.run.evaluations
    self.prefixes = tuple(f"eval/{name}/" for name in self._sources)
    self._evaluate = jax.jit(
      trainer.run.step.evaluate, out_shardings=sharding.whole(trainer.run.mesh)
    )
    super().start(trainer)

  def measure(self, trainer) -> dict[str, float]:
    out = {}
    for name, sets in self._sources.items():
      sums = {of: self._sums(trainer, sets[of]) for of in sets}
      own = [sums[of] for of in trainer.run.sources.train]
      of_each = {name: jax.tree.map(lambda *each: sum(each), *own)}
      if len(sums) > 1:
        of_each |= {f"{name}/{of}": sums[of] for of in filter(None, sums)}
      for what, total in of_each.items():
        out |= {f"eval/{what}/{k}": v for k, v in _means(total).items()}
    return out

  def _sums(self, trainer, source: Source) -> dict[str, float]:
    sums = collections.defaultdict(float)
    for batch in trainer.in_step(source):
      placed = sharding.place(trainer.run.mesh, batch)
      found = self._evaluate(trainer.state.best_params, placed)
      for name, value in jax.device_get(found).items():
        sums[name] += float(value.sum())
    return sums

  def say(self, trainer, values: Mapping[str, float]) -> str:
    shown = summary.of_evaluation(values)
    return f"held out after step {trainer.step}: {shown}"


def _means(sums: Mapping[str, float]) -> dict[str, float]:
  # Divided once, over all batches. Targets count by their weights, as in
  # training: they differ within an objective where a row's share does.
  loss = sums["loss"] / max(sums["weight"], 1e-9)
  accuracy = sums["correct"] / max(sums["count"], 1)
  perplexity = math.exp(min(loss, 700))
  return {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}


class Watch(Hook):
  """Keeps the best step by `eval.watch`, and ends a run that gets no better.

  What was recorded says all, so a run that goes on, also one that was ended,
  is where it was.
  """

  spent_on = "evaluation"

  def start(self, trainer) -> None:
    self.run(trainer)

  def due(self, trainer) -> bool:
    return is_evaluated(trainer)

  def run(self, trainer) -> None:
    watch, patience = trainer.config.eval.watch, trainer.config.eval.patience
    found, best = {}, 0
    if processes.is_first():
      found = summary.watched(metrics.read_records(trainer.folder), watch)
      best = min(found, key=found.get, default=0)
    since = sum(step > best for step in found)
    best, since = map(int, processes.largest(lambda: [best, since])())
    trainer.checkpoints.best = best
    if patience and since >= patience and trainer.step < trainer.total:
      trainer.end_here()
      trainer.say(
        f"ended after step {trainer.step}: {' + '.join(watch)} got no better in"
        f" {since} evaluations; best after step {best}"
      )


class Save(Hook):
  """Saves as `checkpoint` says, and where a signal ends the run."""

  spent_on = "checkpoint"

  def start(self, trainer) -> None:
    self._saved = trainer.step

  def due(self, trainer) -> bool:
    return trainer.checkpoints.keeps(trainer.step) or is_time(
      trainer, trainer.config.checkpoint.every
    )

  def run(self, trainer) -> None:
    if trainer.step != self._saved:
      trainer.save()
      self._saved = trainer.step

  def stop(self, trainer) -> None:
    self.run(trainer)
    trainer.checkpoints.wait()


class Log(Hook):
  """Records losses, speed and every scalar of the step, and shows progress."""

  def after_step(self, trainer, taken: Taken) -> None:
    trainer.progress.step()
    trainer.window.add(taken.metrics, *self._work(trainer, taken))
    every, at_end = trainer.config.log.every, taken.step == trainer.total
    if at_end or taken.step % every == 0:
      self._log(trainer, taken)

  def _work(self, trainer, taken: Taken) -> tuple[float, float]:
    """Returns a step's tokens and operations, if they tell the speed."""
    if not taken.timed:
      return 0.0, 0.0
    inputs = taken.batch.inputs
    whole = sharding.abstract(trainer.run.mesh, inputs)
    # An objective's work in the other processes' rows is about that in ours.
    work = flops.train_step(trainer.run.model, taken.batch)
    order, step = trainer.run.order, taken.step - 1
    filled = order.batch_size(step) / order.at(step).layout.batch_size
    return whole.size * filled, work * whole.size / inputs.size * filled

  def _log(self, trainer, taken: Taken) -> None:
    run = trainer.run
    names = [run.objectives[n].name for n in run.curriculum.objectives]
    values = trainer.window.take(names)
    losses = ((name, values.get(f"train/{name}/loss")) for name in names)
    shown = [f"{name} {loss:.3f}" for name, loss in losses if loss is not None]
    shown += self._speed(trainer, values, taken.step)
    values |= {
      f"train/{name}": float(value)
      for name, value in taken.metrics.items()
      if np.ndim(value) == 0
    }
    trainer.record(taken.step, values)
    trainer.progress.show(taken.step, " · ".join(shown))

  def _speed(self, trainer, values, step: int) -> list[str]:
    rate = values.get("train/tokens_per_second")
    if not rate:
      return []
    shown = [f"{units.quantity(rate)} tokens/s"]
    if jax.device_count() > 1:
      each = values["train/tokens_per_second_per_device"]
      shown.append(f"{units.quantity(each)} on each device")
    if mfu := values.get("train/mfu"):
      shown.append(f"MFU {mfu:.1%}")
    tokens = trainer.config.train.batch_size * trainer.run.sources.rows.seq_len
    left = (trainer.total - step) * tokens / rate
    return [*shown, f"{units.duration(left)} left"]


class Trace(Hook):
  """Profiles steps `FIRST:LAST` of the first process; none of empty text.

  Raises:
    UserError: for steps that cannot be read.
  """

  def __init__(self, steps: str, folder: pathlib.Path):
    self._folder, self._running = folder, False
    found = re.fullmatch(r"(\d+):(\d+)", steps)
    if steps and not (found and int(found[1]) < int(found[2])):
      raise UserError(
        f"log.trace={steps!r} is not FIRST:LAST, such as 100:105 for five steps"
      )
    self._first, self._last = map(int, found.groups()) if found else (-1, -1)

  def start(self, trainer) -> None:
    if self.due(trainer):
      self.run(trainer)

  def due(self, trainer) -> bool:
    return trainer.step in (self._first, self._last)

  def run(self, trainer) -> None:
    """Begins or ends, while nothing is being computed."""
    self.end()
    if trainer.step == self._first and processes.is_first():
      jax.profiler.start_trace(str(self._folder))
      self._running = True

  def end(self) -> None:
    """Ends, and writes what was seen; nothing where none was begun."""
    if self._running:
      jax.profiler.stop_trace()
      self._running = False
