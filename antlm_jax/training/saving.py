"""A run's folder: who holds it, how a run begins, and its saved checkpoints.

`antlm_jax.training.checkpoint` has the format of a checkpoint.
"""

import contextlib
import ctypes
import dataclasses
import pathlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from antlm_jax import config as config_lib
from antlm_jax import mesh as mesh_lib
from antlm_jax import models, sections
from antlm_jax.data.prepared_folder import MANIFEST
from antlm_jax.data.tokenizer import MASK
from antlm_jax.errors import Unavailable, UserError
from antlm_jax.runtime import files, processes
from antlm_jax.training import checkpoint, metrics
from antlm_jax.training.checkpoint import Checkpoint, Meta, Unreadable
from antlm_jax.training.run import Run
from antlm_jax.training.step import TrainState

CONFIG = "config.json"
PAGE = "README.md"
LOCK = ".lock"
_PATIENCE = 600  # seconds that a process waits for the others' part of a save


@contextlib.contextmanager
def lock_workdir(workdir: pathlib.Path) -> Iterator[None]:
  """Keeps other runs out of a workdir while its block runs.

  If the block fails before it writes the config, nothing stays. Buckets have no
  locks: there, nothing prevents two runs on the same workdir. Raises a
  UserError if another run holds the workdir, with its name. It also raises
  one if the path is another folder in this process than in the first, or if no
  checkpoint can be saved there.
  """
  checkpoint.check_path(workdir)
  if files.is_remote(workdir):
    yield
    return
  lock = workdir / LOCK
  is_new = not workdir.exists()
  with contextlib.ExitStack() as stack:
    if processes.is_first():
      with files.writing(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
      stack.enter_context(files.file_lock(lock))
    try:
      # Before the first process has written its own, an older lock may exist.
      processes.wait_for_all()
      lock_hash = zlib.crc32(lock.read_bytes()) >> 1 if lock.exists() else 0
      if lock_hash != processes.largest_of_all(
        lock_hash if processes.is_first() else 0
      ):
        raise UserError(
          f"workdir={workdir} is another folder for process"
          f" {jax.process_index()} than for the first: give a folder that all"
          " share"
        )
      yield
    finally:
      # Unlinked while held: the next run makes a lock for itself.
      if processes.is_first() and not (workdir / CONFIG).exists():
        lock.unlink(missing_ok=True)
        if is_new:
          with contextlib.suppress(OSError):  # somebody else's files
            workdir.rmdir()


def first_state(
  run: Run,
  checkpoints: "RunCheckpoints",
  init: Callable[[], TrainState],
  shardings: TrainState,
) -> tuple[TrainState, Mapping | None, list[str]]:
  """Returns the newest checkpoint's state, another run's, or a new state.

  `init` makes the first state, with the given shardings.

  Returns:
    The first state, the log's sums since its last line, and notes for the user,
    a line each. The sums are None unless the run resumes.

  Raises:
    UserError: The workdir is another run's, or the checkpoint does not fit the
      run.
  """

  held_out = []  # of the newest step, and of the run from now on

  def check(meta: Meta) -> None:
    held_out[:] = [(x.held_out, x.config.eval.rows) for x in (meta, run.meta)]
    if changed := config_lib.config_differences(meta.config, run.config):
      raise UserError(
        f"{checkpoints.workdir} is the run of another config:"
        f" {'; '.join(changed)}. Give another workdir"
        " (init.checkpoint=WORKDIR starts from this run)"
      )
    if meta.data != run.meta.data:
      raise UserError(
        f"{checkpoints.workdir} was trained on other rows than those of"
        f" {run.config.data.path or 'this call'}: give those, or another"
        " workdir"
      )

  # Only shapes: the first state is not made if there is one to read.
  like = jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    jax.eval_shape(run.step.init),
    shardings,
  )
  if (resumed := checkpoints.read_newest(like, check)) is not None:
    state, _, notes = resumed
    if int(state.step) == (steps := run.curriculum.steps):
      notes[-1] = f"already finished: step {steps} of {steps}"
    before, now = held_out
    if before[0] and before != now:  # old checkpoints do not know
      notes.append(
        "warning: the run measured other held-out rows before this step: its"
        " losses before and after it do not compare"
      )
    return resumed
  _check_nothing_is_lost(checkpoints.workdir)
  if run.config.init.checkpoint:
    state, notes = _branch(run, init)
    return state, None, notes
  return init(), None, []


def _check_nothing_is_lost(workdir: pathlib.Path) -> None:
  """Raises a UserError if a new run would mix with files of a folder."""
  for name, content in ((MANIFEST, "prepared data"), ("meta", "a checkpoint")):
    if (workdir / name).exists():
      raise UserError(f"{workdir} holds {content}: give another workdir")
  if (workdir / metrics.SUMMARY).exists():
    raise UserError(
      f"{workdir} holds a run that has ended, but no checkpoint: restore"
      f" {checkpoint.FOLDER}/, or give another workdir"
    )
  # A run writes its page after its first checkpoint.
  other = PAGE if (workdir / PAGE).exists() else ""
  try:
    if (workdir / CONFIG).exists():  # of a run that was killed early, perhaps
      text = files.read_text(workdir / CONFIG, "the config")
      config_lib.config_from_json(text)
  except Unavailable:
    raise
  except UserError:
    other = CONFIG
  if other:
    raise UserError(
      f"{workdir} has a {other} of no run, which this run would replace: give"
      " another workdir"
    )


def _branch(
  run: Run, init: Callable[[], TrainState]
) -> tuple[TrainState, list[str]]:
  """Starts from another run's checkpoint, or from an imported model.

  Returns the state, and notes for the user.
  """
  settings = run.config.init
  start = run.start
  start.say_better_step()
  _check_fits(start, run)
  lacks_mask = start.meta.tokenizer.vocab_size < run.tokenizer.vocab_size
  state = init()  # compiles, so only after the checks
  # A run that continues both has the bits of a run that never stopped.
  continues = settings.optimizer == "keep" and state.ema is not None
  is_raw = continues or settings.weights == "last"
  weights = "params" if is_raw else start.weights
  if lacks_mask:
    loaded = _with_mask(start, state, weights)
  else:
    loaded = start.restore(state, settings.optimizer == "keep", weights)
  if settings.step == "reset":
    loaded = dataclasses.replace(loaded, step=state.step)
  if int(loaded.step) >= run.curriculum.steps:
    raise UserError(
      f"{start.name} is at step {int(loaded.step)}, past the end of curriculum"
      f" {run.config.curriculum!r} ({run.curriculum.steps} steps):"
      " lengthen it, or set init.step=reset"
    )
  average = run.config.optimizer.average
  continues_tail = continues and start.meta.config.optimizer.average == "tail"
  if average == "tail" and not continues_tail:
    _check_tail_begins(run, start, int(loaded.step))
  source = start.name
  if "://" not in source:
    source = files.shown_path(pathlib.Path(source))
  notes = [f"starting from {source} (optimizer: {settings.optimizer})"]
  if start.weights == "ema":
    raw = "last weights, and their average" if continues else "last weights"
    name = raw if is_raw else "average of the weights, which it evaluated"
    notes.append(f"it kept an average: the run begins with the {name}")
  if lacks_mask:
    notes.append(
      f"{MASK} is added to the vocabulary, with the mean of all embeddings"
    )
  if start.lacks_head(run.model.shapes):
    notes.append("it has no output layer: the run begins with a new one")
  if changed := _model_changes(start, run):
    notes.append(f"the model's settings change: {'; '.join(changed)}")
  return loaded, notes


def _model_changes(start: Checkpoint, run: Run) -> list[str]:
  """Lists the model's settings in which a run differs from its start."""
  meta = start.meta
  before = dataclasses.replace(meta.config, model=meta.encoder)
  changed = config_lib.config_differences(before, run.config)
  return [line for line in changed if line.startswith("model.")]


def _check_fits(start: Checkpoint, run: Run) -> None:
  """Checks that a model has the run's shapes, and its tokens but the mask."""
  tokenizer = start.meta.tokenizer
  if tokenizer.mask_id is None and run.tokenizer.mask_id is not None:
    tokenizer = tokenizer.extended([MASK])
    if run.config.init.optimizer == "keep":
      raise UserError(
        f"{start.name} is of a tokenizer without {MASK}, for which its"
        " optimizer's state has no place: set init.optimizer=reset"
      )
  if tokenizer.to_json() != run.tokenizer.to_json():
    raise UserError(
      f"{start.name} was trained with another tokenizer than that of"
      f" {run.config.data.path}: prepare the data with its own"
    )
  settings = start.meta.config.model
  shapes = models.build_model(settings, tokenizer.vocab_size).shapes
  # Settings may differ if shapes do not, such as dropout or attention.
  if shapes != run.model.shapes:
    raise UserError(
      f"init.checkpoint={start.name} is of another model:"
      f" {'; '.join(_model_changes(start, run))}: set model as it was there"
    )


def _check_tail_begins(run: Run, start: Checkpoint, step: int) -> None:
  """Checks that `average=tail` averages no steps before a run's first."""
  # It would count the weights of the start as those of all these steps.
  if run.step.average_decay(step) > 0:
    raise UserError(
      f"optimizer.average=tail begins before step {step}, and {start.name} has"
      " no average of these steps: set init.step=reset or optimizer.average=ema"
    )


def _with_mask(
  start: Checkpoint, state: TrainState, weights: str
) -> TrainState:
  """Restores a model whose vocabulary lacks the last token, the mask.

  The mask's embedding is the mean of the others. Its logit then changes no loss
  by more than log(1 + 1/V) nats.
  """
  meta = start.meta
  model = models.build_model(meta.config.model, meta.tokenizer.vocab_size)

  def smaller(name: str, value: jax.Array) -> jax.ShapeDtypeStruct:
    shape = model.shapes[name].shape
    mesh = value.sharding.mesh
    spec = mesh_lib.spec(mesh, model.axes[name], shape)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding)

  def grow(params):
    return {n: with_mean(p, state.params[n].shape) for n, p in params.items()}

  old = {name: smaller(name, value) for name, value in state.params.items()}
  like = dataclasses.replace(state, params=old, ema=None)
  loaded = start.restore(like, with_optimizer=False, weights=weights)
  # An output layer that the start lacks is new, with the mask.
  restored = {
    name: value
    for name, value in loaded.params.items()
    if isinstance(value, jax.Array)
  }
  shardings = {name: state.params[name].sharding for name in restored}
  params = state.params | jax.jit(grow, out_shardings=shardings)(restored)
  ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
  return dataclasses.replace(loaded, params=params, ema=ema)


def with_mean(value: jax.Array, shape: Sequence[int]) -> jax.Array:
  """Appends the values' mean along the axis that is longer in `shape`."""
  for axis, (old, new) in enumerate(zip(value.shape, shape, strict=True)):
    if old != new:
      return jnp.append(value, value.mean(axis, keepdims=True), axis)
  return value


@dataclasses.dataclass
class _Chosen(policies.PreservationPolicy):
  """Keeps the steps that a function chooses."""

  keeps: Callable[[int], bool]

  def should_preserve(self, checkpoints, *, context):
    return [self.keeps(saved.step) for saved in checkpoints]


class RunCheckpoints:
  """The checkpoints of a run, saved in the background.

  Each has the metadata `meta`. The config's section `settings`, the milestones
  and `best` (the best step by `eval.watch`) choose the kept checkpoints.
  """

  _last: "RunCheckpoints | None" = None  # those that this process saved to last

  def __init__(self, workdir, meta: Meta, settings: sections.Saving):
    self.workdir = files.absolute_path(workdir)
    self.best: int | None = None
    self._folder = self.workdir / checkpoint.FOLDER
    self._meta = meta.to_json()
    self._chosen = {*settings.at, *meta.milestones.values()}
    self._every = settings.keep_every
    self._kept = [policies.LatestN(settings.keep_last), _Chosen(self.keeps)]
    self._manager: ocp.CheckpointManager | None = None  # from the first save on
    self._saving: int | None = None

  @property
  def last_good(self) -> int | None:
    """The newest whole step."""
    return max(checkpoint.checkpoint_steps(self._folder), default=None)

  def keeps(self, step: int) -> bool:
    """Whether a step is saved, and kept when it is not the newest."""
    multiple = self._every and step % self._every == 0
    return bool(multiple) or step in self._chosen or step == self.best

  def save(
    self, step: int, state: TrainState, window: Mapping, context: Mapping = {}
  ) -> None:
    """Begins to save, with the log's sums, after the save before has ended.

    `context` is `Run.context_after`. Raises a UserError, with the last good
    step, if either cannot be written.
    """
    # One at a time: memory holds a copy of each. Runs that train together
    # wait for each other.
    (RunCheckpoints._last or self).wait()
    RunCheckpoints._last = self
    with self._reported(step):
      items = checkpoint.to_items(state)
      fields = {**self._meta, **context, "window": window}
      args = checkpoint.save_args(self._folder, items, fields)
      if self._manager is None:
        options = ocp.CheckpointManagerOptions(
          preservation_policy=policies.AnyPreservationPolicy(self._kept),
          async_options=ocp.AsyncOptions(timeout_secs=_PATIENCE),
        )
        self._manager = ocp.CheckpointManager(self._folder, options=options)
      self._manager.save(step, args=args, force=True)
      self._saving = step
    # A CPU writes the state itself: while that lasts, a step cannot reuse its
    # memory and would need it twice.
    if jax.default_backend() == "cpu":
      self.wait()
      # glibc keeps freed memory in pieces that no step's arrays fit in.
      with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)

  def read_newest(
    self, like: TrainState, check: Callable[[Meta], None]
  ) -> tuple[TrainState, Mapping, list[str]] | None:
    """Reads the newest step that all processes can read, if there is any step.

    `like` has the shapes and shardings of the state. `check` raises a UserError
    for the metadata of another run. Unreadable steps are renamed, so that they
    can be saved again.

    Returns:
      The state, the log's sums since its last line, and notes for the user.

    Raises:
      Unreadable: There are steps, and none can be read.
    """
    bad = {  # why steps cannot be read
      step: f"{self._folder / str(step)} is not whole: it has no meta"
      for step in checkpoint.torn(self._folder)
    }
    while (step := self._newest_but(bad)) is not None:
      try:
        state, window = self._read(step, like, check)
      except Unreadable as error:  # on all processes
        bad[step] = str(error)
        continue
      notes = [*self._set_aside(bad), f"resuming from step {step}"]
      return state, window, notes
    if not bad:
      return None
    raise Unreadable(
      f"{bad[max(bad)]}; nor can any other step under {self._folder} be read:"
      " move that folder away to start anew"
    )

  def _newest_but(self, bad: Mapping[int, str]) -> int | None:
    """Returns the newest step that is not bad; the same on all processes."""
    steps = checkpoint.checkpoint_steps(self._folder).keys() - bad.keys()
    newest = processes.largest_of_all(max(steps, default=-1))
    return newest if newest >= 0 else None

  def _read(
    self, step: int, like: TrainState, check: Callable[[Meta], None]
  ) -> tuple[TrainState, Mapping]:
    """Reads the state of a step, and the log's sums; see `read_newest`.

    Raises Unreadable on all processes if one of them cannot read it.
    """
    arrays = None
    why = "another process cannot read it"
    try:
      saved = Checkpoint(self._folder / str(step))
      check(saved.meta)
      arrays = saved.read(checkpoint.to_items(like))
    except Unreadable as error:
      why = str(error)
    # Verifying takes all processes: none begins unless all have read.
    if processes.largest_of_all(arrays is None):
      raise Unreadable(why)
    saved.verify(arrays)  # raises on all processes, or on none
    state = checkpoint.complete_state(like, arrays)
    return state, saved.fields.get("window", {})

  def _set_aside(self, bad: Mapping[int, str]) -> list[str]:
    """Renames unreadable steps; returns a note about each."""
    notes = []
    for step, why in bad.items():
      count = len(list(self._folder.glob(f"{step}.unreadable*")))
      aside = self._folder / f"{step}.unreadable{count or ''}"
      notes.append(f"warning: {why}: skipped, and kept as {aside.name}")
      if processes.is_first():
        (self._folder / str(step)).rename(aside)
    # All wait for the first process. Some may have seen no torn step, as a
    # network's disk does not show a folder to all at the same time.
    processes.wait_for_all()
    return notes

  def wait(self) -> None:
    """Waits until the last save has ended."""
    if self._manager is not None:
      with self._reported(self._saving):
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

  def close(self) -> None:
    """Waits, and ends the background threads."""
    # A failed save is this run's error, not that of the process's next run.
    if RunCheckpoints._last is self:
      RunCheckpoints._last = None
    self.wait()
    if self._manager is not None:
      self._manager.close()

  @contextlib.contextmanager
  def _reported(self, step: int | None) -> Iterator[None]:
    """Turns a failure to save in its block into a UserError."""
    try:
      with files.writing(f"step {step} under {self._folder}"):
        yield
    except Unavailable:  # nor can the bucket tell the last step now
      raise
    except UserError as error:
      last = "none" if self.last_good is None else f"step {self.last_good}"
      raise UserError(f"{error}; the last good checkpoint is {last}") from error
