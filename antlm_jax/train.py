"""Trains a model: the command, and the loop.

    python -m antlm_jax.train --config=configs/quickstart.py --workdir=DIR \\
      --config.data.path=PREPARED [--config.key=value ...]

The same command again goes on from the last checkpoint.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import signal
import time
from collections.abc import Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from antlm_jax import checkpoint as checkpoints_lib
from antlm_jax import cli, flops, monitor, plots, run, sharding
from antlm_jax import config as config_lib
from antlm_jax.cli import UserError
from antlm_jax.data import source as source_lib
from antlm_jax.step import TrainState, state_shardings


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict:
  """Trains to the end of the curriculum, from where `workdir` stands.

  Args:
    config: A config of `antlm_jax.config`.
    workdir: Receives config.json, checkpoints/, metrics.jsonl, tensorboard/,
      curves.png and summary.json.

  Returns:
    The summary, as in summary.json.

  Raises:
    UserError: for bad input, a loss that is not finite, or a failed save.
    KeyboardInterrupt: when interrupted, after a checkpoint is saved.
  """
  loop = Loop(run.build(config), pathlib.Path(workdir))
  with jax.set_mesh(loop.run.mesh), loop:
    return loop.go()


class Loop:
  """The loop's moving parts: what runs, what is shown and what is saved."""

  def __init__(self, parts: run.Run, workdir: pathlib.Path):
    self.run, self.workdir = parts, workdir
    self.ledger = monitor.Ledger()
    _claim(workdir, parts.config)
    settings = parts.config.checkpoint
    self.checkpoints = checkpoints_lib.Checkpoints(
      workdir, parts.meta, settings.keep_last, settings.keep_every
    )
    trainer = parts.trainer
    shardings = state_shardings(trainer, parts.mesh)
    self.init = jax.jit(trainer.init, out_shardings=shardings)
    self.reset = jax.jit(
      trainer.reset_optimizer, out_shardings=shardings, donate_argnums=0
    )
    self.train_step = jax.jit(
      trainer.train_step, out_shardings=(shardings, None), donate_argnums=0
    )
    self.eval_step = jax.jit(trainer.eval_step)
    self.eval_sources = parts.eval_sources()
    self.stop = False  # set by a signal

  def __enter__(self):
    with self.ledger.time("start"):
      self.state, note = _starting_state(self)
    self.start = int(self.state.step)
    self.records = monitor.Records(
      self.workdir, self.start, self.run.config.log.tensorboard
    )
    self.progress = monitor.Progress(self.start, self.run.curriculum.steps)
    self.progress.say(_describe(self.run))
    self.progress.say(note)
    model = self.run.trainer.model
    for line in sharding.undivided(self.run.mesh, model.axes, model.shapes):
      self.progress.say(line)
    self.window = Window(self)
    return self

  def __exit__(self, *exception):
    self.records.close()
    self.progress.close()
    self.checkpoints.close()

  def go(self) -> dict:
    """Runs every step that is left, then sums up."""
    total = self.run.curriculum.steps
    source = self.run.source()
    batches = source_lib.load(source, self.start, self.run.config.data.threads)
    due_eval, due_save = self._calendar(total)
    if self.start == 0 and total:
      self.evaluate(0)
    with _signals(self):
      for step in range(self.start, total):
        with self.ledger.time("data"):
          example = next(batches)
        self.take(step, example)
        done = step + 1
        if due_eval(done):
          self.evaluate(done)
        if due_save(done) or self.stop:
          self.save(done)
        if self.stop and done < total:
          self.progress.say(
            f"stopped after step {done}, saved: the same command goes on"
          )
          raise KeyboardInterrupt
    with self.ledger.time("checkpoint"):
      self.checkpoints.wait()
    return self.sum_up()

  def take(self, step: int, example) -> None:
    """Takes one step, and looks at the loss of the one before."""
    config, switches = self.run.config, self.run.curriculum.switches
    if config.optimizer.reset_at_switch and step in switches:
      self.state = self.reset(self.state)
    placed = sharding.place(self.run.mesh, example)
    compiled = self.train_step._cache_size()
    begun = time.monotonic()
    self.state, metrics = self.train_step(self.state, placed)
    new = self.train_step._cache_size() > compiled
    self.window.add(step + 1, example, metrics, timed=not new)
    self.ledger.add("compile" if new else "steps", time.monotonic() - begun)
    self.progress.step()

  def evaluate(self, step: int) -> None:
    """Measures every objective of `config.eval` on held-out text."""
    self.window.settle()
    with self.ledger.time("evaluation"):
      values = {}
      for name, source in self.eval_sources.items():
        values |= {
          f"eval/{name}/{metric}": value
          for metric, value in self._evaluate(source).items()
        }
    self.records.write(step, values)
    self.progress.say(f"held out after step {step}: {_eval_line(values)}")

  def _evaluate(self, source) -> dict[str, float]:
    sums: dict[str, float] = {}
    for example in source_lib.load(source, threads=1):
      placed = sharding.place(self.run.mesh, example)
      found = jax.device_get(self.eval_step(self.state.best_params, placed))
      for name, value in found.items():
        sums[name] = sums.get(name, 0.0) + float(value.sum())
    loss = sums["nats"] / max(sums["count"], 1)
    return {
      "loss": loss,
      "perplexity": math.exp(min(loss, 700)),
      "accuracy": sums["correct"] / max(sums["count"], 1),
    }

  def save(self, step: int) -> None:
    """Begins to save, once the loss of this step is known to be finite."""
    self.window.settle()
    with self.ledger.time("checkpoint"):
      self.checkpoints.save(step, self.state)

  def sum_up(self) -> dict:
    """Writes the summary and the picture, and prints the summary."""
    records = monitor.read_records(self.workdir)
    curriculum = self.run.curriculum
    names = {n: o.name for n, o in self.run.objectives.items()}
    unigram = self.run.unigram_entropy()
    summary = {
      "steps": curriculum.steps,
      "parameters": self.run.trainer.model.size,
      "unigram_entropy": unigram,
      "switches": list(curriculum.switches),
      "held_out": _held_out(records, curriculum),
      "seconds": {**self.ledger.seconds, "total": self.ledger.total},
    }
    _write_aside(self.workdir / "summary.json", json.dumps(summary, indent=2))
    plots.curves(
      records, curriculum, names, unigram, self.workdir / "curves.png"
    )
    for line in _summary_lines(summary, self):
      self.progress.say(line)
    return summary

  def _calendar(self, total: int):
    """Returns when to evaluate and when to save, as tests of steps done."""
    config, switches = self.run.config, self.run.curriculum.switches
    eval_every = config_lib.amount(config.eval.every, total)
    save_every = config_lib.amount(config.checkpoint.every, total)

    def due(every: int, done: int) -> bool:
      return done == total or (every > 0 and done % every == 0)

    return (
      lambda done: due(eval_every, done) or done in switches,
      lambda done: due(save_every, done),
    )


class Window:
  """Sums metrics between log lines, one step behind the device."""

  def __init__(self, loop: Loop):
    self._loop = loop
    self._pending: tuple | None = None
    self._peak = flops.peak(jax.devices()[0])
    self._clear()

  def _clear(self) -> None:
    self._sums: dict[str, np.ndarray] = {}
    self._tokens = self._flops = 0.0
    self._begun = self._spent()

  def _spent(self) -> float:
    """Seconds of training so far, without compiling, evaluating and saving."""
    seconds = self._loop.ledger.seconds
    return seconds.get("data", 0.0) + seconds.get("steps", 0.0)

  def add(self, done: int, example, metrics, timed: bool) -> None:
    """Takes a step's metrics; looks at those of the step before.

    Args:
      done: Steps done with this one.
      example: Its batch.
      metrics: What the train step returned.
      timed: Whether it counts for the speed; not if it had to be compiled.
    """
    self.settle()
    self._pending = (done, example, metrics, timed)

  def settle(self) -> None:
    """Waits for the pending step, checks it and counts it.

    Raises:
      UserError: if its loss or gradient is not finite.
    """
    if self._pending is None:
      return
    done, example, metrics, timed = self._pending
    self._pending = None
    metrics = jax.device_get(metrics)
    self._check(done, metrics)
    for name in ("nats", "count"):
      self._sums[name] = self._sums.get(name, 0) + metrics[name]
    if timed:
      self._tokens += example.inputs.size
      self._flops += flops.train_step(self._loop.run.trainer.model, example)
    total = self._loop.run.curriculum.steps
    if done % self._loop.run.config.log.every == 0 or done == total:
      self._log(done, metrics)

  def _check(self, done: int, metrics) -> None:
    for name in ("total_loss", "grad_norm"):
      if not np.isfinite(metrics[name]):
        last = self._loop.checkpoints.latest()
        where = "there is none" if last is None else f"is step {last}"
        raise UserError(
          f"{name} is {metrics[name]} at step {done}: stopped before saving;"
          f" the last good checkpoint {where}. Try a lower schedule.peak, or a"
          " longer schedule.warmup"
        )

  def _log(self, done: int, metrics) -> None:
    seconds = self._spent() - self._begun
    run_ = self._loop.run
    values = {}
    for kind, name in enumerate(run_.curriculum.objectives):
      if self._sums["count"][kind] > 0:
        loss = self._sums["nats"][kind] / self._sums["count"][kind]
        values[f"train/{run_.objectives[name].name}/loss"] = float(loss)
    text = [f"{k.split('/')[1]} {v:.3f}" for k, v in values.items()]
    if self._tokens:
      rate = values["train/tokens_per_second"] = self._tokens / seconds
      per_step = run_.config.train.batch_size * run_.train_rows.seq_len
      left = (run_.curriculum.steps - done) * per_step / rate
      text += [
        f"{monitor.quantity(rate)} tokens/s",
        f"{monitor.duration(left)} left",
      ]
    if self._tokens and self._peak:
      share = self._flops / seconds / (self._peak * jax.device_count())
      values["train/share_of_peak"] = share
      text.insert(-1, f"{share:.1%} of peak")
    values |= {
      "train/learning_rate": float(metrics["learning_rate"]),
      "train/grad_norm": float(metrics["grad_norm"]),
    }
    self._loop.records.write(done, values)
    self._loop.progress.show(done, " · ".join(text))
    self._clear()


def _claim(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Writes the config into a new workdir; checks it against an old one's."""
  path = workdir / "config.json"
  if path.exists():
    changed = config_lib.differences(
      config_lib.from_json(path.read_text()), config
    )
    if changed:
      raise UserError(
        f"{workdir} is the run of another config: {'; '.join(changed)}. Give"
        " another --workdir (config.init.checkpoint starts from this one)"
      )
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    _write_aside(path, config_lib.to_json(config))
  except OSError as error:
    raise UserError(f"--workdir={workdir}: {error.strerror}") from error


def _write_aside(path: pathlib.Path, text: str) -> None:
  aside = path.with_name(path.name + ".tmp")
  aside.write_text(text)
  aside.replace(path)


def _starting_state(loop: Loop) -> tuple[TrainState, str]:
  """Decides where to start: own checkpoint, another run's, or scratch."""
  state = loop.init()
  own = loop.checkpoints.latest()
  if own is not None:
    folder = loop.workdir / checkpoints_lib.FOLDER
    meta = checkpoints_lib.read_meta(checkpoints_lib.find(folder, own))
    if meta.data != loop.run.meta.data:
      raise UserError(
        f"{loop.workdir} was trained on other rows than those of"
        f" {loop.run.config.data.path}: give those, or another --workdir"
      )
    return loop.checkpoints.restore(own, state), f"going on from step {own}"
  if loop.run.config.init.checkpoint:
    return _branch(loop, state)
  return state, "starting from scratch"


def _branch(loop: Loop, state: TrainState) -> tuple[TrainState, str]:
  """Starts from another run's checkpoint."""
  init = loop.run.config.init
  for key in ("optimizer", "step"):
    if init[key] not in ("keep", "reset"):
      raise UserError(f"init.{key}={init[key]!r} is neither keep nor reset")
  path = checkpoints_lib.find(init.checkpoint)
  meta = checkpoints_lib.read_meta(path)
  if meta.tokenizer.to_json() != loop.run.tokenizer.to_json():
    raise UserError(
      f"{path} was trained with another tokenizer than that of"
      f" {loop.run.config.data.path}: prepare the data with the checkpoint's"
    )
  loaded = checkpoints_lib.restore(
    path, state, with_optimizer=init.optimizer == "keep"
  )
  if init.step == "reset":
    loaded = dataclasses.replace(loaded, step=state.step)
  if int(loaded.step) >= loop.run.curriculum.steps:
    raise UserError(
      f"{path} is at step {int(loaded.step)}, past the end of curriculum"
      f" {loop.run.config.curriculum!r} ({loop.run.curriculum.steps} steps):"
      " lengthen it, or set init.step=reset"
    )
  return loaded, f"starting from {path} (optimizer: {init.optimizer})"


@contextlib.contextmanager
def _signals(loop: Loop):
  """Lets Ctrl-C and SIGTERM end the run after the step at hand."""

  def handle(number, frame):
    if loop.stop:  # a second time: at once
      raise KeyboardInterrupt
    loop.stop = True

  both = (signal.SIGINT, signal.SIGTERM)
  try:
    before = [signal.signal(number, handle) for number in both]
  except ValueError:  # not the main thread, as in some notebooks
    yield
    return
  try:
    yield
  finally:
    for number, handler in zip(both, before, strict=True):
      signal.signal(number, handler)


def _describe(parts: run.Run) -> str:
  model, rows = parts.trainer.model, parts.train_rows
  device = jax.devices()[0]
  return (
    f"{parts.config.model.name} of {monitor.quantity(model.size)} parameters,"
    f" {parts.config.curriculum} = {parts.curriculum.steps} steps of"
    f" {parts.config.train.batch_size} x {rows.seq_len} tokens on"
    f" {jax.device_count()} {device.device_kind}"
  )


def _eval_line(values: dict[str, float]) -> str:
  parts = []
  for key in values:
    if key.endswith("/loss"):
      name = key.split("/")[1]
      perplexity = values[f"eval/{name}/perplexity"]
      accuracy = values[f"eval/{name}/accuracy"]
      parts.append(
        f"{name} {values[key]:.3f} (perplexity {perplexity:.4g},"
        f" accuracy {accuracy:.1%})"
      )
  return " · ".join(parts)


def _held_out(records: Sequence[dict], curriculum) -> list[dict]:
  """The held-out measurements at the start, each switch and the end."""
  wanted = {0, *curriculum.switches, curriculum.steps}
  rows = {}
  for record in records:
    values = {k: v for k, v in record.items() if k.startswith("eval/")}
    if record["step"] in wanted and values:
      rows[record["step"]] = {"step": record["step"], **values}
  return list(rows.values())


def _summary_lines(summary: dict, loop: Loop) -> list[str]:
  """The summary, for people."""
  lines = ["", f"done: {summary['steps']} steps in {loop.ledger}", ""]
  names = list(loop.eval_sources)
  head = f"{'held out, loss in nats':<26}" + "".join(f"{n:>10}" for n in names)
  lines.append(head)
  for row in summary["held_out"]:
    step = row["step"]
    label = "start" if step == 0 else f"after step {step}"
    before = loop.run.curriculum.at(step - 1) if step else ""
    after = loop.run.curriculum.at(step) if step < summary["steps"] else "end"
    text = f"{label} ({before}→{after})" if step else label
    losses = "".join(f"{row[f'eval/{n}/loss']:>10.3f}" for n in names)
    lines.append(f"{text:<26}{losses}")
  unigram = summary["unigram_entropy"]
  lines.append(f"{'unigram entropy':<26}{unigram:>10.3f}")
  lines += ["", f"curves, metrics, checkpoints: {loop.workdir}"]
  return lines


def main(argv: Sequence[str]) -> None:
  """The command."""
  parser = cli.Parser(
    prog="python -m antlm_jax.train",
    description="Trains a model; the same command again goes on.",
    epilog="Any setting: --config.KEY=VALUE. All keys: antlm_jax/config.py.",
  )
  parser.add_argument(
    "--config", required=True, help="a config file, FILE.py or FILE.py:ARG"
  )
  parser.add_argument("--workdir", required=True, help="the run's folder")
  args, rest = parser.parse_known_args(argv)
  for word in rest:
    if not word.startswith("--config."):
      parser.error(f"unknown argument {word!r}")
  train(config_lib.load(args.config, rest), args.workdir)


if __name__ == "__main__":
  cli.run(main)
