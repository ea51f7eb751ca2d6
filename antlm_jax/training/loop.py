"""The training loop: data, a step, and the hooks around it."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
from ml_collections import ConfigDict

from antlm_jax import config as config_lib
from antlm_jax import errors, tables
from antlm_jax.data import source as source_lib
from antlm_jax.data.source import Source
from antlm_jax.errors import UserError
from antlm_jax.objectives.batch import Batch
from antlm_jax.runtime import (
  buckets,
  compilation,
  files,
  processes,
  progress,
  sharding,
)
from antlm_jax.runtime.signals import Stop, listening
from antlm_jax.training import (
  experiment,
  metrics,
  plots,
  saving,
  summary,
  writers,
)
from antlm_jax.training import hooks as hooks_lib
from antlm_jax.training.checkpoint import Start
from antlm_jax.training.hooks import Hook, Taken
from antlm_jax.training.step import jitted, state_shardings

# No model's loss, gradient or parameters have a norm like this.
BLOWN_UP = 1e9
_WATCHED = ("total_loss", "grad_norm", "param_norm")


def train(
  config: ConfigDict,
  workdir: str | pathlib.Path,
  hooks: Sequence[Hook] = (),
  command: str = "",
  start: Start | None = None,
) -> dict | None:
  """Trains to the end of the curriculum, from where `workdir` stands.

  The workdir, which may be in a bucket, receives what docs/runs.md lists;
  `hooks` are called beside `hooks.of_run`'s, `command` is what does this, for
  the page about the run, and `start` is the model of init.checkpoint, if that
  is not a run's checkpoint.

  Returns:
    The summary, as in summary.json; None on all processes but the first.

  Raises:
    UserError: for bad input, a workdir in use by another run, a loss that is
      not finite, or a failed save.
    Stopped: when told to end by a signal, after what was trained is saved.
  """
  compilation.keep_programs()
  with (
    listening() as stop,
    buckets.Mirror(workdir, metrics.METRICS, writers.WANDB_ID) as mirror,
  ):
    run = experiment.build(config, start)
    writers.check(config.log.writers)
    _check_same(run, mirror.workdir)
    around = hooks_lib.of_run(config, mirror.folder, hooks)
    with (
      jax.set_mesh(run.mesh),
      saving.locked(mirror.workdir),
      Trainer(run, mirror, stop, around, command) as trainer,
    ):
      return trainer.train()


class Trainer:
  """What trains: the state of a run, and what hooks need.

  Attributes:
    run, config, workdir, checkpoints: The run's.
    folder: The folder on this machine for the files that grow.
    total: Its number of steps; fewer than the curriculum's if it ends early.
    state: The state after `step` steps, those that are done.
    resumed: Whether it goes on from a checkpoint of its own.
    window, ledger, progress: Sums since the last log line, where its time goes,
      and what is shown.
  """

  def __init__(
    self,
    run: experiment.Run,
    mirror: buckets.Mirror,
    stop: Stop,
    hooks: Sequence[Hook],
    command: str,
  ):
    self.run, self.config, self.hooks = run, run.config, hooks
    self.command = command
    self.workdir, self.folder = mirror.workdir, mirror.folder
    self.total = run.curriculum.steps
    self.ledger = metrics.Ledger()
    self.window = metrics.Window(self.ledger)
    self._mirror, self._stop = mirror, stop
    self._pending: Taken | None = None  # the last step, not yet looked at
    self.checkpoints = saving.Checkpoints(
      self.workdir, run.meta, run.config.checkpoint
    )
    shardings = state_shardings(run.step, run.mesh)
    init, self._update = jitted(run.step, shardings)
    self._reset = jax.jit(
      run.step.reset_optimizer, out_shardings=shardings, donate_argnums=0
    )
    with self.ledger.time("start"):
      begun = saving.begin(run, self.checkpoints, init, shardings)
      self.state, self.resumed = begun.state, begun.resumed
      self.step = self._begun = int(self.state.step)
      self.window.restore(begun.window)
    # Only now, once all else has been checked: then the workdir is this run's.
    if processes.is_first():
      config = config_lib.to_json(run.config)
      files.write_text(self.workdir / saving.CONFIG, config)
    # What was recorded before a first checkpoint is recorded again.
    start = self.step if self.resumed else -1
    name = self.workdir.name
    self._records = metrics.Records(self.folder, start, run.config, name)
    self.progress = progress.Progress(self.step, self.total)
    for line in (*summary.of_run(run), *begun.notes):
      self.say(line)

  def __enter__(self):
    return self

  def __exit__(self, kind, *exception):
    failed = kind is not None and not issubclass(kind, errors.Stopped)
    with contextlib.ExitStack() as ends:  # each, also where one before fails
      # A save takes all processes: with one that fails, none waits for it.
      if not (failed and jax.process_count() > 1):
        ends.callback(self.checkpoints.close)
      ends.callback(self.progress.close)
      ends.callback(self._records.close)
      for hook in self.hooks:
        ends.callback(hook.end)

  def train(self) -> dict | None:
    """Takes every step that is left, then sums up."""
    batches = self.in_step(self.run.source, self.step, self.config.data.threads)
    for hook in self.hooks:
      hook.start(self)
    # From here on a signal is looked at between steps, by all processes.
    self._stop.waits = True
    while self.step < self.total:
      with self.ledger.time("data"):
        batch = next(batches)
      self._take(batch)
      # Hooks that are due take the device's lead away: they need the state,
      # and its loss is to be known to be good before it is saved.
      if any(hook.due(self) for hook in self.hooks):
        self._settle()
        for hook in self.hooks:
          # Asked again: one before may have ended the run here.
          if hook.due(self):
            with self.ledger.time(hook.spent_on):
              hook.run(self)
    with self.ledger.time("checkpoint"):
      self.checkpoints.wait()
    found = self._sum_up() if processes.is_first() else None
    processes.agreed(0)  # the others end with the first, well or not
    return found

  # -------------------------------------------------------- a step, its results

  def _take(self, batch: Batch) -> None:
    """Begins a step, and looks at the results of the one before."""
    switches = self.run.curriculum.switches
    if self.config.optimizer.reset_at_switch and self.step in switches:
      self.state = self._reset(self.state)
    placed = sharding.place(self.run.mesh, batch)
    # A step that compiles takes minutes; it is no part of the speed.
    compiled = self._update._cache_size()
    begun = time.monotonic()
    self.state, results = self._update(self.state, placed)
    new = self._update._cache_size() > compiled
    self.ledger.add("compile" if new else "steps", time.monotonic() - begun)
    self._settle()
    self.step += 1
    self._pending = Taken(self.step, batch, results, timed=not new)

  def _settle(self) -> None:
    """Waits for the step begun last, checks its loss, and tells the hooks."""
    taken, self._pending = self._pending, None
    if taken is None:
      return
    with self.ledger.time("steps"):
      taken = taken.here()
    self._check(taken)
    for hook in self.hooks:
      hook.after_step(self, taken)

  def _check(self, taken: Taken) -> None:
    wrong = [n for n in _WATCHED if not taken.metrics[n] < BLOWN_UP]  # or NaN
    if not wrong:
      return
    self.checkpoints.wait()
    last = self.checkpoints.last_good
    where = "there is none" if last is None else f"is step {last}"
    # A step's loss and gradient are those of the parameters before it.
    advice = "Try a lower schedule.peak_lr, or a longer schedule.warmup_steps"
    if taken.step == self._begun + 1 and wrong[0] != "param_norm":
      advice = (
        "It was so from the first step: no learning rate did it, but the"
        " settings in model, or the parameters that it began with"
      )
    raise UserError(
      f"{wrong[0]} is {taken.metrics[wrong[0]]:g} at step {taken.step}:"
      f" stopped before saving; the last good checkpoint {where}. {advice}"
    )

  # -------------------------------------------------------------- for the hooks

  def in_step(
    self, source: Source, start: int = 0, threads: int = 1
  ) -> Iterator[Batch]:
    """Yields batches, read by `threads` threads, in step with all processes.

    Once a signal has asked one of the processes to end, all of them save and
    end before the next batch.
    """
    # Asked a batch ahead, while the step before runs, so that nobody waits.
    asked = processes.largest(lambda: [self._stop.status])
    for batch in source_lib.load(source, start, threads):
      if status := int(asked()[0]):
        self._end_early(status)
      asked = processes.largest(lambda: [self._stop.status])
      yield batch

  def record(self, step: int, values: Mapping[str, float]) -> None:
    """Records values, named such as `eval/clm/loss`, after `step` steps."""
    self._records.write(step, values)
    self._mirror.push()

  def say(self, line: str) -> None:
    """Prints a line above the progress bar."""
    progress.say(line)

  def end_here(self) -> None:
    """Ends the run after the steps done, as if the curriculum did."""
    self.total = self.step

  def save(self) -> None:
    """Begins to save the state, whose loss is known to be good."""
    # First, so that no checkpoint is ahead of the bucket's metrics.
    self._mirror.push(wait=buckets.PATIENCE)
    self.checkpoints.save(self.step, self.state, self.window.sums())

  # -------------------------------------------------------------------- the end

  def _end_early(self, status: int) -> None:
    """Saves, as a signal to one of the processes asked for, and ends."""
    self._settle()
    for hook in self.hooks:
      hook.stop(self)
    self.say(f"stopped after step {self.step}, saved: the same command goes on")
    if processes.is_first():
      with contextlib.suppress(UserError):  # it ends well all the same
        self._describe()
    raise errors.Stopped(status, saved=True)

  def _sum_up(self) -> dict:
    """Writes the summary and what goes with it, and prints it."""
    found, table = self._describe()
    files.write_json(self.folder / "summary.json", found)
    for line in (
      f"\ndone: {self.total} steps in {self.ledger}\n",
      *table.splitlines(),
      *found["advice"],
      f"\nwhat it is, curves, metrics, checkpoints: {self.workdir}",
    ):
      self.say(line)
    return found

  def _describe(self) -> tuple[dict, str]:
    """Draws the curves and writes the page; returns the summary, its table."""
    run, records = self.run, metrics.read_records(self.folder)
    watched = summary.watched(records, self.config.eval.watch)
    best = min(watched, key=watched.get, default=None)
    held_out = summary.held_out(records, run, self.step, best)
    unigram, modes = run.unigram_entropy(), summary.modes(records, run)
    at_end = self.step == self.total
    found = {
      "steps": self.step,
      "parameters": run.model.size,
      "unigram_entropy": unigram,
      "switches": [s for s in run.curriculum.switches if s < self.step],
      "best": {"step": best, "loss": watched[best]} if watched else None,
      "modes": {name: dataclasses.asdict(m) for name, m in modes.items()},
      "advice": summary.advice(modes, unigram, run) if at_end else [],
      "held_out": held_out,
      "seconds": {**self.ledger.seconds, "total": self.ledger.total},
    }
    if self.step == self._begun and at_end:
      # Nothing was left to train: the times are those of the run that did.
      with contextlib.suppress(errors.UserError, KeyError):
        before = files.read_json(self.folder / "summary.json", "it")
        found["seconds"] = before["seconds"]
    rows, head = summary.table(held_out, unigram, run, self.step)
    plots.curves(run, records, unigram, self.folder / "curves.png")
    page = summary.page(run, self.workdir, self.command, found, rows, head)
    files.write_text(self.folder / "README.md", page)
    return found, tables.text(rows, head, "<>")


def _check_same(run: experiment.Run, workdir: pathlib.Path) -> None:
  """Checks that all processes are about to train the same."""
  text = config_lib.to_json(run.config) + run.meta.data
  if files.is_remote(workdir):  # elsewhere the lock tells
    text += str(workdir)
  if not processes.same(text):
    raise UserError(
      "the processes of this run have different settings, or different data:"
      " start all of them by the same command, on the same data"
    )
