"""The training loop: batches, a step, and the hooks around it."""

import contextlib
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from antlm_jax import config as config_lib
from antlm_jax import errors
from antlm_jax import mesh as mesh_lib
from antlm_jax.data import source as source_lib
from antlm_jax.data.prepared_folder import PreparedData
from antlm_jax.data.source import BatchSource
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import Batch
from antlm_jax.runtime import buckets, files, processes, progress
from antlm_jax.runtime.compilation import keep_programs
from antlm_jax.runtime.signals import Stop, listening
from antlm_jax.training import hooks as hooks_lib
from antlm_jax.training import metrics, notes, saving, writers
from antlm_jax.training.checkpoint import Checkpoint
from antlm_jax.training.hooks import DoneStep, Hook
from antlm_jax.training.run import Run, build_run
from antlm_jax.training.step import Metrics, Programs, jitted, state_shardings

# No model's loss, gradient or parameters have a norm like this.
BLOWN_UP = 1e9
_SLOW_BATCH = 10.0  # seconds until a batch arrives that are worth a line
_EVERY = 60.0  # least seconds from one such line to the next
_WATCHED = ("total_loss", "grad_norm", "param_norm")


def train_run(
  config: config_lib.Config,
  workdir: str | pathlib.Path,
  hooks: Sequence[Hook] = (),
  start: Checkpoint | None = None,
  data: Mapping[str, PreparedData] | None = None,
) -> None:
  """Trains to the end of the curriculum, and resumes a run that was stopped.

  Args:
    workdir: Path to the run's folder, which may be in a bucket.
      docs/how_to/watch.md lists its files.
    hooks: Hooks to call in addition to those of `hooks.hooks_of_run`, such as
      `page.hook.Page`.
    start: The model of `init.checkpoint`, if that is not a run's checkpoint.
    data: Prepared data by name, in place of that of `data.path`.

  Raises:
    UserError: Bad input, a workdir in use by another run, a loss that is not
      finite, or a failed save.
    Stopped: A signal ended the run. Its last step is saved.
  """
  keep_programs()
  writers.check_writers(config.log.writers)
  with listening() as stop:
    run = build_run(config, start, data)
    programs = jitted(run.step, state_shardings(run.step, run.mesh))
    train_built(run, programs, workdir, hooks, stop)


def train_built(
  run: Run,
  programs: Programs,
  workdir: str | pathlib.Path,
  hooks: Sequence[Hook],
  stop: Stop,
) -> None:
  """Trains a built run, as `train_run` does; `stop` reports signals."""
  fetched = metrics.METRICS, metrics.ROWS, writers.WANDB_ID
  with files.reaching(workdir), buckets.Mirror(workdir, *fetched) as mirror:
    _check_same_run(run, mirror.workdir)
    all_hooks = hooks_lib.hooks_of_run(run, mirror.folder, hooks)
    with (
      jax.set_mesh(run.mesh),
      saving.lock_workdir(mirror.workdir),
      Trainer(run, programs, mirror, stop, all_hooks) as trainer,
    ):
      trainer.train()


def _check_same_run(run: Run, workdir: pathlib.Path) -> None:
  """Checks that all processes train the same run."""
  text = config_lib.to_json(run.config) + run.meta.data
  if files.is_remote(workdir):  # on a disk, the lock tells
    text += str(workdir)
  if not processes.same_on_all(text):
    raise UserError(
      "the processes of this run have different settings or different data:"
      " start all of them with the same command, on the same data"
    )


class _PendingStep(NamedTuple):
  """The last step, whose loss the host does not know yet."""

  step: int  # number of steps done with it
  batch: Batch
  metrics: Metrics  # on the device
  clock: metrics.StepClock


class Trainer:
  """The state of a run, with all that hooks need.

  Attributes:
    run, config, workdir, checkpoints, programs: The run and its parts.
    folder: Path to the folder on this machine for files that grow.
    total: Number of steps. A hook that lowers it ends the run early.
    state: The state after `step` steps; in `after_step`, maybe after one more.
    resumed: Whether the run continues from a checkpoint of its own.
    begun: The step that this start of the run began from.
    stopped: Whether a signal ends the run, maybe before its last evaluation.
    sums: Sums of the steps' metrics since the last log line.
    ledger, progress: Seconds by activity, and the progress bar.
  """

  def __init__(
    self,
    run: Run,
    programs: Programs,
    mirror: buckets.Mirror,
    stop: Stop,
    hooks: Sequence[Hook],
  ):
    self.run = run
    self.config = run.config
    self.hooks = hooks
    self.programs = programs
    self.workdir = mirror.workdir
    self.folder = mirror.folder
    self._mirror = mirror
    self._stop = stop
    self.total = run.curriculum.steps
    self.stopped = False
    self._pending: _PendingStep | None = None
    self._last_slow = -_EVERY  # when a slow batch was last said
    settings = run.config.checkpoint
    self.checkpoints = saving.RunCheckpoints(self.workdir, run.meta, settings)
    shardings = state_shardings(run.step, run.mesh)
    reset = run.step.reset_optimizer
    self._reset = jax.jit(reset, out_shardings=shardings, donate_argnums=0)
    self.ledger = metrics.Ledger()
    with self.ledger.time("start"):
      self.state, sums, about_start = saving.first_state(
        run, self.checkpoints, programs.init, shardings
      )
      self.resumed = sums is not None
      self.step = self.begun = int(self.state.step)
    self.sums = {n: np.asarray(x, np.float32) for n, x in (sums or {}).items()}
    # All checks have passed: from here on the workdir is this run's.
    if processes.is_first():
      config = config_lib.to_json(run.config)
      files.write_text(self.workdir / saving.CONFIG, config)
    # Values before the first checkpoint will be recorded again.
    last_recorded = self.step if self.resumed else -1
    name = self.workdir.name
    self._records = metrics.Records(
      self.folder, last_recorded, run.config, name
    )
    self.progress = progress.Progress(self.step, self.total)
    for line in (*notes.notes_of_run(run), *about_start):
      progress.say(line)

  def __enter__(self):
    return self

  def __exit__(self, kind, *exception):
    failed = kind is not None and not issubclass(kind, errors.Stopped)
    with contextlib.ExitStack() as ends:  # calls each, even if one fails
      # A save takes all processes, so none waits for it after a failure.
      if not (failed and jax.process_count() > 1):
        ends.callback(self.checkpoints.close)
      ends.callback(self.progress.close)
      ends.callback(self._records.close)
      for hook in self.hooks:
        ends.callback(hook.end)

  def train(self) -> None:
    """Takes all remaining steps."""
    batches = self.batches(
      self.run.batches, self.step, self.config.data.threads
    )
    for hook in self.hooks:
      hook.start(self)
    if self.step < self.total and processes.is_first():
      # The summary is that of a run that has ended.
      for folder in {self.workdir, self.folder}:
        (folder / metrics.SUMMARY).unlink(missing_ok=True)
    # From here on, all processes look for a signal between steps.
    self._stop.waits = True
    while self.step < self.total:
      self._take(batches)
      self._call_due_hooks()
    self._finish()

  def _call_due_hooks(self) -> None:
    # Hooks need the state, and its loss must be good before it is saved. So the
    # host waits for the device, which may then idle.
    if any(hook.due(self) for hook in self.hooks):
      self._settle()
      for hook in self.hooks:
        # Asked again, since a hook before it may have ended the run here.
        if hook.due(self):
          with self.ledger.time(hook.spent_on):
            hook.run(self)

  def _finish(self) -> None:
    self._settle()
    for hook in reversed(self.hooks):
      with self.ledger.time(hook.spent_on):
        hook.finish(self)
    processes.wait_for_all()  # the other processes end with the first

  def _take(self, batches: Iterator[Batch]) -> None:
    """Begins a step, then checks the results of the one before."""
    clock = metrics.StepClock(self.ledger)
    begun = time.monotonic()
    with self.ledger.time("data"):
      batch = next(batches)
    self._say_slow_batch(time.monotonic() - begun)
    switches = self.run.curriculum.switches
    if self.config.optimizer.reset_at_switch and self.step in switches:
      self.state = self._reset(self.state)
    placed = mesh_lib.place_batch(self.run.mesh, batch)
    with clock.handing_over(self.programs.update):
      # The state is a step ahead of `step` until the step before is settled.
      self.state, results = self.programs.update(self.state, placed)
    # The step before may have run while the host compiled this step.
    self._settle(compiled_meanwhile=clock.compiled)
    self.step += 1
    self._pending = _PendingStep(self.step, batch, results, clock)

  def _say_slow_batch(self, seconds: float) -> None:
    """Says that training waits for its data, at most once a minute."""
    now = time.monotonic()
    if seconds > _SLOW_BATCH and now - self._last_slow >= _EVERY:
      self._last_slow = now
      progress.say(notes.slow_batch(seconds, self.config.data.threads))

  def _settle(self, compiled_meanwhile: bool = False) -> None:
    """Waits for the pending step, checks its loss, and calls `after_step`.

    If the host `compiled_meanwhile`, the step's time is unknown, 0.
    """
    pending = self._pending
    if pending is None:
      return
    with pending.clock.waiting():
      results = jax.device_get(pending.metrics)
    seconds = 0.0 if compiled_meanwhile else pending.clock.seconds
    done_step = DoneStep(pending.step, pending.batch, results, seconds)
    self._pending = None
    self._check_metrics(done_step)
    for hook in self.hooks:
      hook.after_step(self, done_step)

  def _check_metrics(self, done_step: DoneStep) -> None:
    """Raises a UserError if a loss or norm is NaN or at least `BLOWN_UP`."""
    # A comparison with NaN is false, so `not ... <` includes NaN.
    bad_metrics = [
      name for name in _WATCHED if not done_step.metrics[name] < BLOWN_UP
    ]
    if not bad_metrics:
      return
    metric = bad_metrics[0]
    self.checkpoints.wait()  # a save in progress may end well
    last_step = self.checkpoints.last_good
    checkpoint_note = "there is no good checkpoint"
    if last_step is not None:
      checkpoint_note = f"the last good checkpoint is step {last_step}"
    advice = "Try a lower schedule.peak_lr, or a longer schedule.warmup_steps"
    # A step computes its loss and gradient before it changes the parameters, so
    # the learning rate has not affected those of the first step.
    if done_step.step == self.begun + 1 and metric != "param_norm":
      advice = (
        "The first step already had it, so look at the settings in model, or at"
        " the parameters of init.checkpoint, not at the learning rate"
      )
    raise UserError(
      f"{metric} is {done_step.metrics[metric]:g} at step {done_step.step}:"
      f" stopped before saving; {checkpoint_note}. {advice}"
    )

  def batches(
    self, source: BatchSource, start: int = 0, threads: int = 1
  ) -> Iterator[Batch]:
    """Yields batches, read by `threads` threads, in step with all processes.

    Once a signal has asked one of the processes to end, all of them save and
    end before the next batch.
    """
    # Asked a batch ahead, while the step before runs, so that nobody waits.
    status_of_all = processes.largest(lambda: [self._stop.status])
    for batch in source_lib.load_batches(source, start, threads):
      if status := int(status_of_all()[0]):
        self._end_early(status)
      status_of_all = processes.largest(lambda: [self._stop.status])
      yield batch

  def record(self, step: int, values: Mapping[str, float]) -> None:
    """Records values, named such as `eval/clm/loss`, after `step` steps."""
    self._records.write(step, values)
    self._mirror.push()

  def record_rows(self, rows: Mapping[str, Sequence[float]]) -> None:
    """Records losses of held-out rows, by objective and half."""
    self._records.write_rows(self.step, rows)

  def save(self) -> None:
    """Begins to save the state, whose loss is known to be good."""
    # First, so that no checkpoint is ahead of the bucket's metrics.
    self._mirror.push(wait=buckets.PATIENCE)
    sums = {name: total.tolist() for name, total in self.sums.items()}
    context = self.run.context_after(self.step)
    self.checkpoints.save(self.step, self.state, sums, context)

  def _end_early(self, status: int) -> None:
    """Saves the state, and ends with the status that a signal asks for."""
    self.stopped = True
    self._finish()
    progress.say(
      f"stopped after step {self.step}, saved: run the same command to resume"
    )
    raise errors.Stopped(status, saved=True)
