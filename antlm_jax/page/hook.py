"""The hook that writes a run's page and tells its results."""

import contextlib
import pathlib
from typing import Any

import numpy as np

from antlm_jax import tables
from antlm_jax.errors import UserError
from antlm_jax.page import plots, summary
from antlm_jax.runtime import files, processes, progress
from antlm_jax.training import checkpoint, metrics, notes, saving
from antlm_jax.training.hooks import Hook
from antlm_jax.training.loop import Trainer
from antlm_jax.training.metrics import ByStep
from antlm_jax.units import duration


class Page(Hook):
  """Writes README.md and curves.png, and at the end summary.json.

  Attributes:
    summary: The figures of summary.json, once the run has ended. Processes but
      the first have two of them.
  """

  def __init__(self, command: str = ""):
    """Makes the hook; the page shows `command`, the run's command line."""
    self._command = command
    self.summary: dict[str, Any] = {}

  def finish(self, trainer: Trainer) -> None:
    self.summary = {"steps": trainer.step, "parameters": trainer.run.model.size}
    if not processes.is_first():
      return
    if trainer.stopped:
      # The run is saved without a page too.
      with contextlib.suppress(UserError):
        self._write(trainer, at_end=False)
        self._say_time(trainer)
      return
    table = self._write(trainer, at_end=True)
    contents = self.summary | {"data": trainer.run.meta.data}
    files.write_json(trainer.folder / metrics.SUMMARY, contents)
    self._say(trainer, table)

  def _write(self, trainer: Trainer, at_end: bool) -> str:
    """Writes the curves and the page; returns the table of held-out losses."""
    run = trainer.run
    step = trainer.step
    values = metrics.by_step(metrics.read_records(trainer.folder))
    watch = run.config.eval.watch
    best = summary.best_step(values, watch, trainer.checkpoints.best)
    at_best = best and best["step"]
    held_out = summary.held_out_evaluations(values, run, step, at_best)
    unigram = run.unigram_entropy()
    modes = summary.modes(values, run)
    seconds = {**trainer.ledger.seconds, "total": trainer.ledger.total}
    times = {"seconds": seconds, "mfu": _median_mfu(values, trainer.begun)}
    if step == trainer.begun and at_end:
      # No step was left to train: keep the times of the run that trained.
      with contextlib.suppress(UserError, KeyError):
        # Not from `folder`, which is new if the run is in a bucket.
        before = files.read_json(
          trainer.workdir / metrics.SUMMARY, "the summary"
        )
        times = {"seconds": before["seconds"], "mfu": before.get("mfu")}
    advice = []
    if at_end:
      threads = run.config.data.threads
      advice += notes.advice(modes, unigram, run)
      advice += notes.time_advice(times["seconds"], threads)
    self.summary |= {
      "unigram_entropy": unigram,
      "steps_per_epoch": run.order.steps_per_epoch,
      "switches": [s for s in run.curriculum.switches if s < step],
      "best": best,
      "modes": modes,
      "advice": advice,
      "held_out": held_out,
      **times,
    }
    table = summary.held_out_table(held_out, unigram, run, step)
    self._write_files(trainer, values, table)
    return tables.text_table(*table, "<>")

  def _write_files(self, trainer: Trainer, values: ByStep, table) -> None:
    """Writes the picture and the page; a run ends well without them, too."""
    run = trainer.run
    unigram = self.summary["unigram_entropy"]

    def draw(path: pathlib.Path) -> None:
      schedules = run.curriculum, run.order.mix
      figure = plots.draw_run_curves(run.config, *schedules, values, unigram)
      plots.save_figure(figure, path)

    def describe(path: pathlib.Path) -> None:
      text = summary.page(
        run, trainer.workdir, self._command, self.summary, table
      )
      files.write_text(path, text)

    for name, write in (("curves.png", draw), (saving.PAGE, describe)):
      try:
        write(trainer.folder / name)
      except UserError:  # as on a full disk
        raise
      except Exception as error:  # matplotlib raises many types
        why = files.failure_reason(error)
        progress.say(f"warning: {name} is not written: {why}")

  def _say(self, trainer: Trainer, table: str) -> None:
    """Prints the time, the held-out losses, advice, and where the files are."""
    step = trainer.step
    self._say_time(trainer)
    for line in (*table.splitlines(), *self.summary["advice"]):
      progress.say(line)
    remarks = {step: ""}  # on each checkpoint
    if best := self.summary["best"]:
      remarks[best["step"]] = " (best)"
    steps = (f"{checkpoint.FOLDER}/{s}{text}" for s, text in remarks.items())
    names = saving.PAGE, "curves.png", metrics.METRICS, *steps
    progress.say(f"\nresults in {trainer.workdir}: {', '.join(names)}")

  def _say_time(self, trainer: Trainer) -> None:
    """Prints the time of the steps, and the share of each activity."""
    step = trainer.step
    if steps := step - trainer.begun:
      all_steps = f" of {step:,}" if trainer.begun else ""
      seconds = self.summary["seconds"]
      time = duration(seconds["total"])
      mfu = self.summary["mfu"]
      speed = "" if mfu is None else f", MFU {mfu:.1%}"
      progress.say(f"\ndone: {steps:,}{all_steps} steps in {time}{speed}")
      progress.say(f"time: {notes.time_shares(seconds)}\n")


def _median_mfu(rows: ByStep, begun: int) -> float | None:
  """Returns the median MFU after a step; None for a chip of unknown peak."""
  name = "train/mfu"
  values = [x[name] for step, x in rows.items() if step > begun and name in x]
  return float(np.median(values)) if values else None
