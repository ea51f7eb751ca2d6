"""Whose a workdir is, and the checkpoints in it: saved, and gone on from.

What a checkpoint is, `antlm_jax.training.checkpoint` says.
"""

import contextlib
import ctypes
import dataclasses
import functools
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from ml_collections import ConfigDict
from orbax.checkpoint import checkpoint_managers as policies

from antlm_jax import config as config_lib
from antlm_jax import models
from antlm_jax.data.tokenizer import MASK
from antlm_jax.errors import UserError
from antlm_jax.runtime import files, processes, sharding
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Meta, Start, Unreadable
from antlm_jax.training.experiment import Run
from antlm_jax.training.step import TrainState

CONFIG = "config.json"
LOCK = ".lock"
_PATIENCE = 600  # seconds that a process waits for the others' part of a save


# ----------------------------------------------------------- whose a workdir is


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps other runs out of a workdir for the time of its block.

  Where the block fails before the config is written, nothing is left behind.
  Two runs on one workdir in a bucket, which has no locks, are not told apart.

  Raises:
    UserError: if another run holds it, which is named, or if it is another
      folder for this process than for the first.
  """
  if files.is_remote(workdir):
    yield
    return
  lock, made = workdir / LOCK, not workdir.exists()
  with contextlib.ExitStack() as held:
    if processes.is_first():
      with files.writing(f"--workdir={workdir}"):
        workdir.mkdir(parents=True, exist_ok=True)
      held.enter_context(files.locked(lock))
    try:
      # An older lock may lie there: wait until the first process wrote its own.
      processes.agreed(0)
      _check_shared(lock)
      yield
    finally:
      # Unlinked while it is held: who comes now makes a lock of its own.
      if processes.is_first() and not (workdir / CONFIG).exists():
        lock.unlink(missing_ok=True)
        if made:
          with contextlib.suppress(OSError):  # somebody else's files
            workdir.rmdir()


def _check_shared(lock: pathlib.Path) -> None:
  """Checks that the first process's lock is this process's as well."""
  with contextlib.suppress(OSError):
    found = zlib.crc32(lock.read_bytes()) >> 1  # an int32
    if processes.agreed(found if processes.is_first() else 0) == found:
      return
  raise UserError(
    f"--workdir={lock.parent} is another folder for process"
    f" {jax.process_index()} than for the first: give one that all share"
  )


# --------------------------------------------------------------- where to begin


@dataclasses.dataclass(frozen=True)
class Begun:
  """What a run begins with."""

  state: TrainState
  resumed: bool  # from a checkpoint of its own
  notes: list[str]  # what to say of it
  # The sums since its last log line, as `metrics.Window.sums` gives them.
  window: Mapping = dataclasses.field(default_factory=dict)


def begin(
  run: Run,
  checkpoints: "Checkpoints",
  init: Callable[[], TrainState],
  shardings: TrainState,
) -> Begun:
  """Begins at the run's newest checkpoint, another run's, or from scratch.

  `init` makes the first state, which has these shardings.

  Raises:
    UserError: if the workdir is another run's, or what it is to begin with
      does not fit.
  """
  _check_config(checkpoints.workdir, run.config)
  # Shapes alone: the first state is made only where nothing is to be read.
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(run.step.init),
    shardings,
  )
  own = checkpoints.read_newest(like)
  if own is not None:
    state, fields, notes = own
    if Meta.from_json(fields).data != run.meta.data:
      raise UserError(
        f"{checkpoints.workdir} was trained on other rows than those of"
        f" {run.config.data.path}: give those, or another --workdir"
      )
    notes = [*notes, f"going on from step {int(state.step)}"]
    return Begun(state, True, notes, fields.get("window", {}))
  if run.config.init.checkpoint:
    return _branch(run, init)
  return Begun(init(), False, ["starting from scratch"])


def _check_config(workdir: pathlib.Path, config: ConfigDict) -> None:
  """Checks that a workdir with checkpoints is this config's, as they say."""
  for _, path in sorted(checkpoint.steps(workdir).items(), reverse=True):
    try:
      saved = checkpoint.read_meta(path).config
    except Unreadable:
      continue
    if changed := config_lib.differences(saved, config):
      raise UserError(
        f"{workdir} is the run of another config: {'; '.join(changed)}. Give"
        " another --workdir (config.init.checkpoint starts from this one)"
      )
    return


def _branch(run: Run, make: Callable[[], TrainState]) -> Begun:
  """Starts from another run's checkpoint."""
  init, start = run.config.init, run.start
  grows = _check_same_model(start, run)
  state = make()  # compiles: after all that can be wrong with the checkpoint
  restore = functools.partial(_with_mask, start) if grows else start.restore
  loaded = restore(state, init.optimizer == "keep")
  if init.step == "reset":
    loaded = dataclasses.replace(loaded, step=state.step)
  if int(loaded.step) >= run.curriculum.steps:
    raise UserError(
      f"{start.name} is at step {int(loaded.step)}, past the end of curriculum"
      f" {run.config.curriculum!r} ({run.curriculum.steps} steps):"
      " lengthen it, or set init.step=reset"
    )
  note = f"starting from {start.name} (optimizer: {init.optimizer})"
  return Begun(loaded, False, [note])


def _with_mask(
  start: Start, state: TrainState, with_optimizer: bool
) -> TrainState:
  """Restores a model whose vocabulary lacks the last token, the mask.

  Its row is the mean of the others: no loss then changes by more than
  log(1 + 1/V) nats, the most that its logit adds.
  """
  if with_optimizer:
    raise UserError(
      f"{start.name} is of a tokenizer without {MASK}, for which its"
      " optimizer's state has no place: set init.optimizer=reset"
    )
  meta = start.meta
  model = models.build(meta.config.model, meta.tokenizer.vocab_size)

  def empty(name, value):
    shape, mesh = model.shapes[name].shape, value.sharding.mesh
    spec = sharding.spec(mesh, model.axes[name], shape)
    where = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, value.dtype, sharding=where)

  def grow(params):
    return {n: with_mean(p, state.params[n].shape) for n, p in params.items()}

  old = {name: empty(name, value) for name, value in state.params.items()}
  like = dataclasses.replace(state, params=old, ema=None)
  loaded = start.restore(like, False)
  shardings = jax.tree.map(lambda value: value.sharding, state.params)
  params = jax.jit(grow, out_shardings=shardings)(loaded.params)
  ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
  return dataclasses.replace(loaded, params=params, ema=ema)


def with_mean(value: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Appends the values' mean along the axis that grows, if one does."""
  for axis, (old, new) in enumerate(zip(value.shape, shape, strict=True)):
    if old != new:
      return jnp.append(value, value.mean(axis, keepdims=True), axis)
  return value


def _check_same_model(start: Start, run: Run) -> bool:
  """Returns whether the run's tokenizer has a mask more, and nothing else."""
  meta = start.meta
  grows = meta.tokenizer.mask_id is None and run.tokenizer.mask_id is not None
  own = meta.tokenizer.extended([MASK]) if grows else meta.tokenizer
  if own.to_json() != run.tokenizer.to_json():
    raise UserError(
      f"{start.name} was trained with another tokenizer than that of"
      f" {run.config.data.path}: prepare the data with its own"
    )
  with checkpoint.readable(pathlib.Path(start.name, "meta")):
    shapes = models.build(meta.config.model, own.vocab_size).shapes
  # Settings may differ where shapes do not, such as dropout or attention.
  if shapes != run.model.shapes:
    changed = config_lib.differences(meta.config, run.config)
    of_model = [line for line in changed if line.startswith("model.")]
    raise UserError(
      f"init.checkpoint={start.name} is of another model:"
      f" {'; '.join(of_model)}: set model as it was there"
    )
  return grows


# ------------------------------------------------------------------ checkpoints


@dataclasses.dataclass
class _Chosen(policies.PreservationPolicy):
  """Keeps the steps of which a function says so."""

  keeps: Callable[[int], bool]

  def should_preserve(self, checkpoints, *, context):
    return [self.keeps(found.step) for found in checkpoints]


class Checkpoints:
  """The checkpoints of a run, saved in the background.

  `meta` is written into every step; it and `settings`, the config's section of
  this name, say which steps are kept, and so is `best`, if there is one.
  `last_good` is the newest whole step, or None.
  """

  def __init__(self, workdir, meta: Meta, settings: config_lib.Checkpoint):
    self.workdir = files.path(workdir)
    self._folder = self.workdir / checkpoint.FOLDER
    self._meta = meta.to_json()
    self._chosen = {*settings.at, *meta.milestones.values()}
    self.best: int | None = None
    kept = [policies.LatestN(settings.keep_last), _Chosen(self.keeps)]
    if settings.keep_every:
      kept += [policies.EveryNSteps(settings.keep_every)]
    self._options = ocp.CheckpointManagerOptions(
      preservation_policy=policies.AnyPreservationPolicy(kept),
      enable_async_checkpointing=True,
      async_options=ocp.AsyncOptions(timeout_secs=_PATIENCE),
    )
    # Made with the first save: it makes the folder, and sees what is in it.
    self._manager: ocp.CheckpointManager | None = None
    self._saving: int | None = None
    self.last_good: int | None = max(checkpoint.steps(workdir), default=None)

  def keeps(self, step: int) -> bool:
    """Whether a step is to be saved, and to stay when it is not the newest."""
    return step in self._chosen or step == self.best

  def save(self, step: int, state: TrainState, window: Mapping) -> None:
    """Begins to save, with the log's sums; waits for the save before it.

    Raises:
      UserError: if either cannot be written, with the newest step that is.
    """
    with self._told(step):
      self.wait()  # one at a time: memory holds a copy of each
      self._manager = self._manager or ocp.CheckpointManager(
        self._folder, options=self._options
      )
      checkpoint.check_space(self._folder, state)
      fields = {**self._meta, "window": window}
      args = checkpoint.save_args(checkpoint.to_items(state), fields)
      self._manager.save(step, args=args, force=True)
      self._saving = step
      # On a CPU what is written is the state itself, which no step can then
      # take over: it would be there twice, and be copied once more to write.
      if jax.default_backend() == "cpu":
        self.wait()
        # glibc keeps what was freed in parts, which no step's arrays fit in.
        with contextlib.suppress(AttributeError, OSError, TypeError):
          ctypes.CDLL(None).malloc_trim(0)

  def read_newest(
    self, like: TrainState
  ) -> tuple[TrainState, Mapping, list[str]] | None:
    """Reads the newest step that can be read, on all processes the same.

    `like` has the shapes and shardings of the state. Newer steps are set aside,
    under a name that says so.

    Returns:
      The state, what its checkpoint says beside it, and what to say of those
      that were passed over; None where there is no step at all.

    Raises:
      Unreadable: if there are steps, and none can be read.
    """
    bad: dict[int, str] = {}
    while (step := self._newest_but(bad)) is not None:
      path, reason = self._folder / str(step), "another process cannot read it"
      try:
        found, fields = checkpoint.read(path, checkpoint.to_items(like))
        readable = True
      except Unreadable as error:
        readable, reason = False, str(error)
      # Their sums take all processes: none begins where another does not.
      if not processes.agreed(not readable):
        try:
          checkpoint.check_sums(path, found, fields)
          return checkpoint.complete(like, found), fields, self._set_aside(bad)
        except Unreadable as error:  # the same for all
          reason = str(error)
      bad[step] = reason
    if not bad:
      return None
    raise Unreadable(
      f"{bad[max(bad)]}; nor can any other step under {self._folder} be read:"
      " move that folder away to start anew"
    )

  def _newest_but(self, bad: Mapping[int, str]) -> int | None:
    """Returns the newest step that a process has, whole or not."""
    there: set[int] = set()
    if files.is_remote(self._folder):  # there, a save cut off has its name
      there = set(checkpoint.steps(self._folder))
    elif self._folder.is_dir():
      names = (entry.name for entry in self._folder.iterdir())
      there = {int(name) for name in names if name.isdigit()}
    newest = processes.agreed(max(there - set(bad), default=-1))
    return None if newest < 0 else newest

  def _set_aside(self, bad: Mapping[int, str]) -> list[str]:
    """Renames steps that cannot be read, so that they can be saved again."""
    notes = []
    for step, reason in bad.items():
      count = sum(1 for _ in self._folder.glob(f"{step}.unreadable*"))
      name = f"{step}.unreadable" + (f".{count}" if count else "")
      notes.append(f"{reason}: passed over, and kept as {name}")
      if processes.is_first():
        (self._folder / str(step)).rename(self._folder / name)
    if bad:
      processes.agreed(0)  # waits for the first process
      self.last_good = max(checkpoint.steps(self._folder), default=None)
    return notes

  def wait(self) -> None:
    """Waits until what was begun is whole."""
    if self._manager is not None:
      with self._told(self._saving):
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
      self.last_good = self._manager.latest_step()

  def close(self) -> None:
    """Waits, and ends the background threads."""
    self.wait()
    if self._manager is not None:
      self._manager.close()

  @contextlib.contextmanager
  def _told(self, step: int | None):
    try:
      yield
    except files.failures() as error:
      if processes.is_of_a_computation(error):
        raise
      last = "none" if self.last_good is None else f"step {self.last_good}"
      raise UserError(
        f"saving step {step} under {self._folder} failed:"
        f" {files.reason(error)}; the last good checkpoint is {last}"
      ) from error
