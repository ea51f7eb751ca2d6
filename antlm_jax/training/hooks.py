"""Hooks: actions around the steps of a run, such as logging and saving.

`hooks_of_run` lists a run's own hooks. `loop.train_run` accepts further hooks,
and `log.hooks` names registered hooks. For example, this evaluator records the
norm of the parameters:

    @hooks.HOOKS.register("norm")
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
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from antlm_jax import mesh as mesh_lib
from antlm_jax import units
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.batch import Batch
from antlm_jax.runtime import chips, processes, progress
from antlm_jax.settings import Registry
from antlm_jax.training import checkpoint, flops, metrics, notes
from antlm_jax.training.run import Run


@dataclasses.dataclass(frozen=True)
class DoneStep:
  """A step that the run has done, with its metrics."""

  step: int  # number of steps done with it
  batch: Batch  # its batch; of several processes, this one's part
  metrics: Mapping[str, np.ndarray]  # those of the train step
  seconds: float  # that it and its data took; 0 if compiling hides them


class Hook:
  """An action around the steps of a run. By default it does nothing.

  All processes of a run have the same hooks and call them in the same order.
  """

  spent_on = "hooks"  # activity of `run` in the summary of time

  def start(self, trainer) -> None:
    """Called before the first step."""

  def after_step(self, trainer, done_step: DoneStep) -> None:
    """Called after every step; the state may be a step ahead of `done_step`."""

  def due(self, trainer) -> bool:
    """Whether to call `run` now, after `trainer.step` steps."""
    return False

  def run(self, trainer) -> None:
    """Called when due; `trainer.state` is that after `trainer.step` steps."""

  def finish(self, trainer) -> None:
    """Called after the last step, which a signal may have chosen.

    It may save and record; it is not called after an error. Hooks finish in the
    reverse of their order: the first one last.
    """

  def end(self) -> None:
    """Called last, also after an error, to release the hook's resources."""


# Makers of hooks, such as classes, by their names in `log.hooks`.
HOOKS = Registry[Callable[[], Hook]]("log.hooks")


def hooks_of_run(
  run: Run, folder: pathlib.Path, extra: Sequence[Hook]
) -> list[Hook]:
  """Returns a run's hooks in their order; a profile goes into `folder`."""
  config = run.config
  # Log is first: it counts a step before other hooks record values after it.
  # Save is after all hooks that record, so that a resumed run has their values.
  named = [HOOKS[name]() for name in config.log.hooks]
  log = LogHook()
  watch = [Watch(log)] if config.eval.watch else []
  trace = []
  if config.log.trace:
    total = run.curriculum.steps
    trace = [Trace(config.log.trace, total, folder / "trace")]
  return [log, HeldOut(), *extra, *named, *watch, Save(), *trace]


def is_time(trainer, interval: float) -> bool:
  """Whether the run ends, or is at a multiple of `interval`.

  `interval` is an amount of steps as `curriculum.amount` reads it, or 0 for the
  end alone.
  """
  steps = curriculum.amount(interval, trainer.total)
  at_end = trainer.step == trainer.total
  return at_end or (steps > 0 and trainer.step % steps == 0)


def is_evaluated(trainer) -> bool:
  """Whether evaluators measure now: by `eval.every`, and at switches."""
  at_switch = trainer.step in trainer.run.switches
  return at_switch or is_time(trainer, trainer.config.eval.every)


class Evaluator(Hook):
  """Measures the state at the start, as `eval.every` says, and at switches."""

  spent_on = "evaluation"
  prefixes: tuple[str, ...] = ()  # of the names of its values

  def measure(self, trainer) -> dict[str, float]:
    """Returns values by their names, such as `eval/clm/loss`."""
    raise NotImplementedError

  def say(self, trainer, values: Mapping[str, float]) -> str:
    """Returns a line that shows the values."""
    shown = (f"{name} {value:.4g}" for name, value in values.items())
    return f"after step {trainer.step}: {' · '.join(shown)}"

  def start(self, trainer) -> None:
    """Measures the first state, or a state that a signal left unmeasured."""
    if trainer.resumed:
      rows = metrics.by_step(metrics.read_records(trainer.folder))
      names = rows.get(trainer.step, {})
      done = processes.is_first() and all(
        any(name.startswith(prefix) for name in names)
        for prefix in self.prefixes
      )
      if not self.due(trainer) or processes.largest_of_all(done):
        return
    with trainer.ledger.time(self.spent_on):
      self.run(trainer)

  def due(self, trainer) -> bool:
    return is_evaluated(trainer)

  def run(self, trainer) -> None:
    if values := self.measure(trainer):
      trainer.record(trainer.step, values)
      kind = "/".join(self.prefixes)
      trainer.progress.note(kind, trainer.step, self.say(trainer, values))


class HeldOut(Evaluator):
  """Measures every objective of `eval.objectives` on held-out text.

  `eval/clm/loss` is the loss on all that the run's own data hold out, and
  `eval/clm/loss/choose` and `eval/clm/loss/report` on each half of it. If there
  are several held-out sets, each also has these, such as `eval/clm/NAME/loss`.
  The file `metrics.ROWS` has the loss of each row.
  """

  def start(self, trainer) -> None:
    self.prefixes = tuple(f"eval/{name}/" for name in trainer.run.evaluations)
    super().start(trainer)

  def measure(self, trainer) -> dict[str, float]:
    """Returns the values, and records the losses of rows."""
    values = {}
    row_losses = {}
    for objective, sources in trainer.run.evaluations.items():
      sums = {}  # by set, and then by half
      rows = {}
      for set_name, source in sources.items():
        sums[set_name], rows[set_name] = self._sums(trainer, source)
      # The names of `held_out.loss_names`, with the sets of each.
      groups = {objective: list(trainer.run.sources.train)}
      if len(sources) > 1:
        groups |= {f"{objective}/{name}": [name] for name in sources if name}
      for group, set_names in groups.items():
        by_half = zip(*(sums[name] for name in set_names), strict=True)
        halves = [_total_by_name(sums_of_half) for sums_of_half in by_half]
        total = _total_by_name(halves)
        loss = _mean_loss(total)
        values |= {
          f"eval/{group}/loss": loss,
          # The exponential of more than 709 is infinite.
          f"eval/{group}/perplexity": math.exp(min(loss, 700)),
          f"eval/{group}/accuracy": total["correct"] / max(total["count"], 1),
        }
        if all(half["weight"] for half in halves):  # one row is in one half
          for number, half_name in enumerate(metrics.HALVES):
            half_loss = _mean_loss(halves[number])
            values[f"eval/{group}/loss/{half_name}"] = half_loss
            rows_of_half = [rows[name][number] for name in set_names]
            row_losses[f"{group}/{half_name}"] = _row_losses(rows_of_half)
    trainer.record_rows(row_losses)
    return values

  def _sums(self, trainer, source) -> tuple[list[dict], list[np.ndarray]]:
    """Returns `losses.cross_entropy`'s sums of even and of odd batches.

    Also returns each half's losses and weights by row, `[2, n]`.
    """
    halves = [collections.defaultdict(float) for _ in metrics.HALVES]
    rows = [[] for _ in metrics.HALVES]
    base = trainer.run.context_after(trainer.step)["rope_theta"]
    for number, batch in enumerate(trainer.batches(source)):
      batch = dataclasses.replace(batch, rope_theta=base)
      placed = mesh_lib.place_batch(trainer.run.mesh, batch)
      batch_sums = trainer.programs.evaluate(trainer.state.eval_params, placed)
      batch_sums = jax.device_get(batch_sums)
      half = number % len(halves)
      by_row = batch_sums.pop("row_loss"), batch_sums.pop("row_weight")
      rows[half].append(np.stack(by_row))
      for name, value in batch_sums.items():
        halves[half][name] += float(value.sum())
    # The first half has the even rows; the slots after the last row are empty.
    counts = -(-source.held_out // 2), source.held_out // 2
    arrays = zip(rows, counts, strict=True)
    return halves, [np.concatenate(x, axis=1)[:, :n] for x, n in arrays]

  def say(self, trainer, values: Mapping[str, float]) -> str:
    parts = []
    for key in values:
      if key.endswith("/loss"):
        name = metrics.objective_of_loss(key)
        parts.append(f"{name} {values[key]:.3f}")
        if "/" not in name:
          details = f"perplexity {values[f'eval/{name}/perplexity']:.4g}"
          details += f", accuracy {values[f'eval/{name}/accuracy']:.1%}"
          parts[-1] += f" ({details})"
    return f"held out after step {trainer.step}: {' · '.join(parts)}"


def _total_by_name(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
  """Adds sums up, by their names."""
  out = collections.defaultdict(float)
  for part in parts:
    for name, value in part.items():
      out[name] += value
  return out


def _mean_loss(sums: Mapping[str, float]) -> float:
  """Returns the loss of sums over batches, divided once.

  Targets count by their weights, as in the loss that training minimizes. They
  differ within an objective if a row's share does. In `train/NAME/loss` all
  targets count the same.
  """
  return sums["loss"] / max(sums["weight"], 1e-9)


def _row_losses(sums: Sequence[np.ndarray]) -> list[float]:
  """Returns losses of rows, whose mean is `_mean_loss` but for rounding.

  Args:
    sums: Losses and weights by row, `[2, n]`, of each held-out set.
  """
  losses, weights = np.concatenate(sums, axis=1).astype(np.float64)
  return np.round(losses / weights.mean(), 3).tolist()


class Watch(Hook):
  """Keeps the best step by `eval.watch`, and ends a run that stops improving.

  It reads the recorded losses alone, so a resumed run continues it. Losses on
  other held-out rows than the newest do not count. A step that is gone, because
  `eval.watch` was another, cannot be the best.
  """

  spent_on = "evaluation"

  def __init__(self, log: "LogHook"):
    """Makes the hook; `log` shows the last steps of a run that ends early."""
    self._log = log

  def start(self, trainer) -> None:
    # Later steps need only the best of these, which the run keeps.
    self._kept = checkpoint.checkpoint_steps(trainer.workdir)
    self.run(trainer)

  def due(self, trainer) -> bool:
    return is_evaluated(trainer)

  def run(self, trainer) -> None:
    watch = trainer.config.eval.watch
    patience = trainer.config.eval.patience
    losses = {}
    best = 0
    if processes.is_first():
      losses = metrics.comparable_losses(trainer.folder, watch)
      candidates = [s for s in losses if s in self._kept or s >= trainer.begun]
      best = min(candidates, key=losses.get, default=trainer.begun)
    since = sum(step > best for step in losses)
    best, since = map(int, processes.largest(lambda: [best, since])())
    trainer.checkpoints.best = best
    if patience and since >= patience and trainer.step < trainer.total:
      trainer.total = trainer.step
      self._log.show(trainer)
      progress.say(
        f"ended after step {trainer.step}: {' + '.join(watch)} has not improved"
        f" in {since} evaluations; the best step is {best}"
      )


class Save(Hook):
  """Saves as `checkpoint` says, and when a signal ends the run.

  It also saves the first state if `eval.watch` may find it the best.
  """

  spent_on = "checkpoint"

  def start(self, trainer) -> None:
    self._saved = trainer.step
    if trainer.checkpoints.best == trainer.step and not trainer.resumed:
      trainer.save()

  def due(self, trainer) -> bool:
    interval = trainer.config.checkpoint.every
    return trainer.checkpoints.keeps(trainer.step) or is_time(trainer, interval)

  def run(self, trainer) -> None:
    if trainer.step != self._saved:
      trainer.save()
      self._saved = trainer.step

  def finish(self, trainer) -> None:
    self.run(trainer)
    trainer.checkpoints.wait()


class LogHook(Hook):
  """Records losses, speed and every scalar of the step, and shows progress."""

  def start(self, trainer) -> None:
    self._tipped = trainer.resumed
    self._last_step = None
    self._paused = None  # seconds of hooks before the first step
    self._chip = chips.chip_of(jax.devices()[0])
    # Sums of the timed steps since the last log line, and of those before it.
    self._timed = np.zeros(3)
    self._last = np.zeros(3)

  def after_step(self, trainer, done_step: DoneStep) -> None:
    trainer.progress.step()
    self._last_step = done_step
    # The first three are of `losses.cross_entropy`.
    for name in ("nats", "count", "weight", "lost_targets"):
      trainer.sums[name] = trainer.sums.get(name, 0) + done_step.metrics[name]
    run = trainer.run
    step = done_step.step
    if self._paused is None:
      self._paused = trainer.ledger.paused
    if done_step.seconds:
      inputs = done_step.batch.inputs
      order = run.order
      filled = (
        order.batch_size(step - 1) / order.stage_at(step - 1).layout.batch_size
      )
      slots = mesh_lib.abstract(run.mesh, inputs).size
      work = 0.0
      if self._chip:  # the other processes' rows count as like these
        work = flops.train_step(run.model, done_step.batch, filled)
      work *= slots / inputs.size
      self._timed += slots * filled, work, done_step.seconds
    if step % trainer.config.log.every == 0 or step == trainer.total:
      self.show(trainer)

  def show(self, trainer) -> None:
    """Records and shows the steps since the last line, if there are any."""
    if self._last_step is None or not trainer.sums:
      return
    done_step = self._last_step
    step = self._last_step.step
    lost, count = (trainer.sums[n].sum() for n in ("lost_targets", "count"))
    values, shown = self._values(trainer, step)
    for name, value in done_step.metrics.items():
      if np.ndim(value) == 0:
        values[f"train/{name}"] = float(value)
    values["train/lost_targets"] = float(lost)
    if lost:
      share = lost / (lost + count)
      line = notes.lost_targets(share, trainer.config.trained)
      trainer.progress.note("lost", step, line)
    trainer.record(step, values)
    trainer.progress.show(step, " · ".join(shown))
    self._last = self._timed
    self._timed = np.zeros(3)

  def _values(self, trainer, step) -> tuple[dict[str, float], list[str]]:
    """Returns losses and speed since the last log line, also as text."""
    values = {}
    shown = []
    run = trainer.run
    sums = trainer.sums
    trainer.sums = {}
    # Each objective's part of the loss, by the weights of its targets.
    shares = sums["weight"] / max(sums["weight"].sum(), 1e-9)
    for k, objective in enumerate(run.curriculum.objectives):
      if sums["count"][k] > 0:
        name = run.config.known_objectives[objective].name
        loss = float(sums["nats"][k] / sums["count"][k])
        values[f"train/{name}/loss"] = loss
        values[f"train/{name}/share"] = float(shares[k])
        shown.append(f"{name} {loss:.3f}")
    timed = self._timed
    if step % trainer.config.log.every:
      # The end: the time of a few steps may hide behind the line before.
      timed = timed + self._last
    tokens, work, seconds = timed.tolist()
    if not tokens:
      return values, shown
    rate = tokens / seconds
    devices = jax.device_count()
    values["train/tokens_per_second"] = rate
    values["train/tokens_per_second_per_device"] = rate / devices
    shown.append(f"{units.quantity(rate)} tokens/s")
    if devices > 1:
      shown.append(f"{units.quantity(rate / devices)} on each device")
    if self._chip:
      mfu = work / seconds / (self._chip.flops * devices)
      values["train/mfu"] = mfu
      shown.append(f"MFU {mfu:.1%}")
    if step < trainer.total:
      # With evaluations and saves as so far.
      ledger = trainer.ledger
      pauses = (ledger.paused - self._paused) / ledger.training
      left = run.tokens(trainer.total) - run.tokens(step)
      left *= (1 + pauses) / rate  # seconds
      shown.append(f"{units.duration(left)} left")
      if not self._tipped and jax.process_count() == 1:
        for line in notes.time_tip(run, step, left):
          progress.say(line)
      self._tipped = True
    return values, shown


class Trace(Hook):
  """Profiles steps `FIRST:LAST` of the first process.

  Raises a UserError if `steps` cannot be read, or end after the
  run's `total`.
  """

  def __init__(self, steps: str, total: int, folder: pathlib.Path):
    self._folder = folder
    self._running = False
    match = re.fullmatch(r"(\d{1,10}):(\d{1,10})", steps)
    if not (match and int(match[1]) < int(match[2])):
      raise UserError(
        f"log.trace={steps!r} is not FIRST:LAST, such as 100:105 for five steps"
      )
    self._first, self._last = map(int, match.groups())
    if self._last > total:
      raise UserError(
        f"log.trace={steps} ends after the run, which has {total} steps"
      )

  def start(self, trainer) -> None:
    if self.due(trainer):
      self.run(trainer)

  def due(self, trainer) -> bool:
    return trainer.step in (self._first, self._last)

  def run(self, trainer) -> None:
    """Begins or ends the profile, while the device computes nothing."""
    self.end()
    if trainer.step == self._first and processes.is_first():
      jax.profiler.start_trace(str(self._folder))
      self._running = True

  def end(self) -> None:
    if self._running:
      jax.profiler.stop_trace()
      self._running = False
