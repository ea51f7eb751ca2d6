"""The training loop.

The same run again goes on from its last checkpoint.
"""

import contextlib
import dataclasses
import json
import math
import pathlib
import signal
import time
from collections.abc import Iterator

import jax
from ml_collections import ConfigDict

from antlm_jax import config as config_lib
from antlm_jax import errors, units
from antlm_jax.data import source as source_lib
from antlm_jax.errors import UserError
from antlm_jax.objectives import curriculum
from antlm_jax.objectives.batch import Batch
from antlm_jax.runtime import buckets, files, processes, progress, sharding
from antlm_jax.training import checkpoint, flops, metrics, plots, run, summary
from antlm_jax.training.saving import Checkpoints
from antlm_jax.training.step import TrainState, jitted, state_shardings

# No model's loss, gradient or parameters have a norm like this.
BLOWN_UP = 1e9
# What a signal asks of a run, by the exit status that says so.
ENDS = {signal.SIGINT: errors.INTERRUPTED, signal.SIGTERM: errors.RUN_AGAIN}


def train(config: ConfigDict, workdir: str | pathlib.Path) -> dict | None:
  """Trains to the end of the curriculum, from where `workdir` stands.

  Args:
    config: A config of `antlm_jax.config`.
    workdir: Receives config.json, checkpoints/, metrics.jsonl, tensorboard/,
      curves.png and summary.json; may be in a bucket (gs://BUCKET/RUN).

  Returns:
    The summary, as in summary.json; None on all processes but the first.

  Raises:
    UserError: for bad input, a loss that is not finite, or a failed save.
    Stopped: when told to end by a signal, after what was trained is saved.
  """
  with _signals() as stop, buckets.Mirror(workdir, metrics.METRICS) as mirror:
    loop = Loop(run.build(config), mirror, stop)
    with jax.set_mesh(loop.run.mesh), loop:
      return loop.go()


@dataclasses.dataclass
class Stop:
  """What a signal asked for.

  Attributes:
    status: One of ENDS; 0 if there was none.
    waits: Whether the run looks at it itself; before, a signal ends it.
  """

  status: int = 0
  waits: bool = False


@contextlib.contextmanager
def _signals() -> Iterator[Stop]:
  """Lets Ctrl-C and SIGTERM end a run, after saving if there is something."""
  stop = Stop()

  def handle(number, frame):
    # A launcher's SIGTERM may come twice: to us and to all of our group.
    if stop.status and number == signal.SIGINT:
      raise KeyboardInterrupt  # a second time: at once
    stop.status = stop.status or ENDS[number]
    if not stop.waits:
      raise errors.Stopped(stop.status)

  try:
    before = [signal.signal(number, handle) for number in ENDS]
  except ValueError:  # not the main thread, as in some notebooks
    yield stop
    return
  try:
    yield stop
  finally:
    for number, handler in zip(ENDS, before, strict=True):
      signal.signal(number, handler)


class Loop:
  """The loop's moving parts: what runs, what is shown and what is saved."""

  def __init__(self, parts: run.Run, mirror: buckets.Mirror, stop: Stop):
    self.run, self.mirror, self.stop = parts, mirror, stop
    self.workdir, self.folder = mirror.workdir, mirror.folder
    self.total = parts.curriculum.steps
    self.ledger = metrics.Ledger()
    settings = parts.config.checkpoint
    _check_same(parts)
    _check_claim(self.workdir, parts.config)
    self.checkpoints = Checkpoints(
      self.workdir, parts.meta, settings.keep_last, settings.keep_every
    )
    self.shardings = state_shardings(parts.step, parts.mesh)
    self.init, self.train_step = jitted(parts.step, self.shardings)
    self.reset = jax.jit(
      parts.step.reset_optimizer, out_shardings=self.shardings, donate_argnums=0
    )
    self.eval_step = jax.jit(
      parts.step.evaluate, out_shardings=sharding.whole(parts.mesh)
    )
    self.eval_sources = parts.eval_sources()
    self.trace = metrics.Trace(parts.config.log.trace, self.folder / "trace")
    self.pending = None  # the last step's metrics, not yet looked at

  def __enter__(self):
    with self.ledger.time("start"):
      self.state, self.resumed, notes = _starting_state(self)
    _claim(self.workdir, self.run.config)
    self.start = self.saved = int(self.state.step)
    # What was recorded before a first checkpoint is recorded again.
    last = self.start if self.resumed else -1
    self.records = metrics.Records(
      self.folder, last, self.run.config.log.tensorboard
    )
    self.progress = progress.Progress(self.start, self.total)
    for line in summary.of_run(self.run):
      self.progress.say(line)
    for note in notes:
      self.progress.say(note)
    model = self.run.model
    for line in sharding.undivided(self.run.mesh, model.axes, model.shapes):
      self.progress.say(line)
    self.window = metrics.Window(self.ledger)
    return self

  def __exit__(self, kind, *exception):
    failed = kind is not None and not issubclass(kind, errors.Stopped)
    try:
      self.trace.end()
      self.records.close()
      self.progress.close()
    finally:
      # A save takes all processes: with one that fails, none waits for it.
      if not (failed and jax.process_count() > 1):
        self.checkpoints.close()

  def go(self) -> dict | None:
    """Runs every step that is left, then sums up."""
    source = self.run.source()
    threads = self.run.config.data.threads
    examples = source_lib.load(source, self.start, threads)
    batches = _in_step(examples, self.stop)
    due_eval, due_save = self._calendar()
    if not self.resumed or (due_eval(self.start) and not self._evaluated()):
      self.evaluate(self.start)
    self.stop.waits = True
    for step in range(self.start, self.total):
      with self.ledger.time("data"):
        example, stop = next(batches)
      if stop:
        self.end_early(step, stop)
      self.profile(step)
      self.take(step, example)
      done = step + 1
      if due_eval(done):
        self.evaluate(done)
      if due_save(done):
        self.save(done)
    with self.ledger.time("checkpoint"):
      self.checkpoints.wait()
    found = self.sum_up() if processes.is_first() else None
    processes.agreed(0)  # the others end with the first, well or not
    return found

  def end_early(self, done: int, status: int):
    """Saves, as a signal to one of the processes asked for, and ends."""
    self.save(done)
    with self.ledger.time("checkpoint"):
      self.checkpoints.wait()
    self.progress.say(
      f"stopped after step {done}, saved: the same command goes on"
    )
    raise errors.Stopped(status, saved=True)

  def profile(self, step: int) -> None:
    """Begins and ends the trace, where no step is being computed."""
    trace = self.trace
    for when, what in ((trace.last, trace.end), (trace.first, trace.begin)):
      if step == when:
        self.settle()
        what()

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
    self.ledger.add("compile" if new else "steps", time.monotonic() - begun)
    self.settle()
    self.pending = (step + 1, example, metrics, not new)
    self.progress.step()

  def settle(self) -> None:
    """Waits for the step before, checks its loss and counts it.

    So the device is always one step ahead of what is looked at.

    Raises:
      UserError: if the loss, the gradient or the parameters blew up.
    """
    if self.pending is None:
      return
    done, example, metrics, timed = self.pending
    self.pending = None
    with self.ledger.time("steps"):
      metrics = jax.device_get(metrics)
    self._check(done, metrics)
    tokens = work = 0.0
    if timed:
      tokens = math.prod(sharding.abstract(self.run.mesh, example.inputs).shape)
      work = flops.train_step(self.run.model, example)
      work *= tokens / example.inputs.size  # the other processes' rows
    self.window.add(metrics, tokens, work)
    if done % self.run.config.log.every == 0 or done == self.total:
      self._log(done, metrics)

  def evaluate(self, step: int) -> None:
    """Measures every objective of `config.eval` on held-out text."""
    self.settle()
    with self.ledger.time("evaluation"):
      values = {}
      for name, source in self.eval_sources.items():
        values |= {
          f"eval/{name}/{metric}": value
          for metric, value in self._evaluate(step, source).items()
        }
    if values:
      self.records.write(step, values)
      self.progress.say(
        f"held out after step {step}: {summary.of_evaluation(values)}"
      )
      self.mirror.push()

  def save(self, step: int) -> None:
    """Begins to save, once the loss of this step is known to be good."""
    self.settle()
    if step != self.saved:
      with self.ledger.time("checkpoint"):
        # First, so that no checkpoint is ahead of the bucket's metrics.
        self.mirror.push(wait=buckets.PATIENCE)
        self.checkpoints.save(step, self.state)
      self.saved = step

  def sum_up(self) -> dict:
    """Writes the summary and the picture, and prints the summary."""
    records = metrics.read_records(self.folder)
    curriculum, unigram = self.run.curriculum, self.run.unigram_entropy()
    names = {n: o.name for n, o in self.run.objectives.items()}
    rows = summary.held_out(records, curriculum)
    found = {
      "steps": self.total,
      "parameters": self.run.model.size,
      "unigram_entropy": unigram,
      "switches": list(curriculum.switches),
      "held_out": rows,
      "seconds": {**self.ledger.seconds, "total": self.ledger.total},
    }
    files.write_text(self.folder / "summary.json", json.dumps(found, indent=2))
    plots.curves(
      records, curriculum, names, unigram, self.folder / "curves.png"
    )
    for line in (
      f"\ndone: {self.total} steps in {self.ledger}\n",
      *summary.table(rows, unigram, curriculum, list(self.eval_sources)),
      f"\ncurves, metrics, checkpoints: {self.workdir}",
    ):
      self.progress.say(line)
    return found

  def _evaluated(self) -> bool:
    """Whether the start was evaluated, before the run was told to end."""
    recorded = processes.is_first() and any(
      record["step"] == self.start
      and any(k.startswith("eval/") for k in record)
      for record in metrics.read_records(self.folder)
    )
    return bool(processes.agreed(recorded))

  def _evaluate(self, step: int, source) -> dict[str, float]:
    sums: dict[str, float] = {}
    batches = source_lib.load(source, threads=1)
    for example, stop in _in_step(batches, self.stop):
      if stop:  # it is evaluated when it goes on
        self.end_early(step, stop)
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

  def _check(self, done: int, metrics) -> None:
    for name in ("total_loss", "grad_norm", "param_norm"):
      if not metrics[name] < BLOWN_UP:  # NaN is not, either
        self.checkpoints.wait()
        last = self.checkpoints.latest()
        where = "there is none" if last is None else f"is step {last}"
        raise UserError(
          f"{name} is {metrics[name]:g} at step {done}: stopped before saving;"
          f" the last good checkpoint {where}. Try a lower schedule.peak_lr,"
          " or a longer schedule.warmup_steps"
        )

  def _log(self, done: int, metrics) -> None:
    names = [
      self.run.objectives[name].name for name in self.run.curriculum.objectives
    ]
    values = self.window.take(names)
    text = [
      f"{name} {values[f'train/{name}/loss']:.3f}"
      for name in names
      if f"train/{name}/loss" in values
    ]
    if rate := values.get("train/tokens_per_second"):
      text.append(f"{units.quantity(rate)} tokens/s")
      if jax.device_count() > 1:
        each = values["train/tokens_per_second_per_device"]
        text.append(f"{units.quantity(each)} on each device")
      if mfu := values.get("train/mfu"):
        text.append(f"MFU {mfu:.1%}")
      step = self.run.config.train.batch_size * self.run.train_rows.seq_len
      left = (self.total - done) * step / rate
      text.append(f"{units.duration(left)} left")
    for name in ("learning_rate", "grad_norm"):
      values[f"train/{name}"] = float(metrics[name])
    self.records.write(done, values)
    self.progress.show(done, " · ".join(text))

  def _calendar(self):
    """Returns when to evaluate and when to save, as tests of steps done."""
    config, switches = self.run.config, self.run.curriculum.switches
    eval_every = curriculum.amount(config.eval.every, self.total)
    save_every = curriculum.amount(config.checkpoint.every, self.total)

    def due(every: int, done: int) -> bool:
      return done == self.total or (every > 0 and done % every == 0)

    return (
      lambda done: due(eval_every, done) or done in switches,
      lambda done: due(save_every, done),
    )


def _in_step(
  batches: Iterator[Batch], stop: Stop
) -> Iterator[tuple[Batch, int]]:
  """Yields the examples of all processes in step.

  Every process then has target lists of the same length, the longest that one
  of them needs, and stops where the others do. What they compare is computed
  one batch ahead, while the step before runs: nobody waits for it.

  Args:
    batches: This process's examples.
    stop: What a signal to this process asked for.

  Yields:
    An example, and the status of `ENDS` to end with before it, or 0.
  """
  ahead = None
  for example in batches:
    votes = processes.largest(lambda e=example: (e.capacity, stop.status))
    if ahead is not None:
      yield _settled(*ahead)
    ahead = example, votes
  if ahead is not None:
    yield _settled(*ahead)


def _settled(example: Batch, votes) -> tuple[Batch, int]:
  capacity, stop = votes()
  return example.padded(int(capacity)), int(stop)


def _check_same(parts: run.Run) -> None:
  """Checks that all processes are about to train the same."""
  if not processes.same(config_lib.to_json(parts.config) + parts.meta.data):
    raise UserError(
      "the processes of this run have different settings, or different data:"
      " start all of them by the same command, on the same data"
    )


def _check_claim(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Checks that a workdir with checkpoints is this config's."""
  path = workdir / "config.json"
  if not path.exists() or not checkpoint.steps(workdir):
    return
  changed = config_lib.differences(
    config_lib.from_json(path.read_text()), config
  )
  if changed:
    raise UserError(
      f"{workdir} is the run of another config: {'; '.join(changed)}. Give"
      " another --workdir (config.init.checkpoint starts from this one)"
    )


def _claim(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Writes the config into the workdir, once all else has been checked."""
  path = workdir / "config.json"
  if processes.is_first():
    try:
      workdir.mkdir(parents=True, exist_ok=True)
      files.write_text(path, config_lib.to_json(config))
    except files.failures() as error:
      raise UserError(f"--workdir={workdir}: {files.reason(error)}") from error
  processes.agreed(0)  # waits for the first process
  if not path.exists():
    raise UserError(
      f"--workdir={workdir} is another folder for process"
      f" {jax.process_index()} than for the first: give one that all share"
    )


def _starting_state(loop: Loop) -> tuple[TrainState, bool, list[str]]:
  """Decides where to start: own checkpoint, another run's, or scratch.

  Returns:
    The state, whether it is this run's own, and what to say of it.
  """
  like = jax.tree.map(
    lambda shape, placed: jax.ShapeDtypeStruct(
      shape.shape, shape.dtype, sharding=placed
    ),
    jax.eval_shape(loop.run.step.init),
    loop.shardings,
  )
  own = loop.checkpoints.read_newest(like)
  if own is not None:
    state, meta, notes = own
    if meta.data != loop.run.meta.data:
      raise UserError(
        f"{loop.workdir} was trained on other rows than those of"
        f" {loop.run.config.data.path}: give those, or another --workdir"
      )
    return state, True, [*notes, f"going on from step {int(state.step)}"]
  if loop.run.config.init.checkpoint:
    state, note = _branch(loop)
    return state, False, [note]
  return loop.init(), False, ["starting from scratch"]


def _branch(loop: Loop) -> tuple[TrainState, str]:
  """Starts from another run's checkpoint."""
  init, state = loop.run.config.init, loop.init()
  for key in ("optimizer", "step"):
    if init[key] not in ("keep", "reset"):
      raise UserError(f"init.{key}={init[key]!r} is neither keep nor reset")
  path = checkpoint.find(init.checkpoint)
  meta = checkpoint.read_meta(path)
  if meta.tokenizer.to_json() != loop.run.tokenizer.to_json():
    raise UserError(
      f"{path} was trained with another tokenizer than that of"
      f" {loop.run.config.data.path}: prepare the data with the checkpoint's"
    )
  loaded = checkpoint.restore(
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
