"""The checkpoints of a run in training: saved, kept, and gone on from.

What one of them is, `antlm_jax.training.checkpoint` says.
"""

import contextlib
from collections.abc import Mapping

import jax
import orbax.checkpoint as ocp

from antlm_jax.errors import UserError
from antlm_jax.runtime import files, processes
from antlm_jax.training import checkpoint
from antlm_jax.training.checkpoint import Meta, Unreadable
from antlm_jax.training.step import TrainState

_PATIENCE = 600  # seconds that a process waits for the others' part of a save


class Checkpoints:
  """The checkpoints of a run, saved in the background.

  Args:
    workdir: The run's folder.
    meta: Written into every step.
    keep_last: How many of the newest steps are kept.
    keep_every: Steps whose multiples are kept too; 0 for none.
  """

  def __init__(
    self, workdir, meta: Meta, keep_last: int = 2, keep_every: int = 0
  ):
    self._folder = files.path(workdir) / checkpoint.FOLDER
    self._meta = meta.to_json()
    self._saving: int | None = None
    self._last_good: int | None = None
    self._manager = ocp.CheckpointManager(
      self._folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep_last,
        keep_period=keep_every or None,
        enable_async_checkpointing=True,
        async_options=ocp.AsyncOptions(timeout_secs=_PATIENCE),
      ),
    )
    self._last_good = self._manager.latest_step()

  def latest(self) -> int | None:
    """Returns the newest whole step, or None."""
    return self._last_good

  def save(self, step: int, state: TrainState) -> None:
    """Begins to save; waits for the save before it.

    Raises:
      UserError: if either cannot be written, with the newest step that is.
    """
    with self._told(step):
      self.wait()
      checkpoint.check_space(self._folder, state)
      items = checkpoint.to_items(state)
      args = checkpoint.save_args(items, self._meta)
      self._manager.save(step, args=args, force=True)
      self._saving = step

  def read_newest(
    self, like: TrainState
  ) -> tuple[TrainState, Meta, list[str]] | None:
    """Reads the newest step that can be read, on all processes the same.

    Newer ones are set aside, under a name that says so.

    Args:
      like: A state of its shapes and shardings.

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
          state, meta = checkpoint.complete(like, found), Meta.from_json(fields)
          return state, meta, self._set_aside(bad)
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
    if files.is_remote(self._folder):  # there, a save cut off has its name
      there = set(checkpoint.steps(self._folder))
    elif self._folder.is_dir():
      names = (entry.name for entry in self._folder.iterdir())
      there = {int(name) for name in names if name.isdigit()}
    else:  # though the first process has just made it
      raise UserError(
        f"{self._folder.parent} is another folder for process"
        f" {jax.process_index()} than for the first: give a --workdir that all"
        " share"
      )
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
      self._manager.reload()
      self._last_good = self._manager.latest_step()
    return notes

  def wait(self) -> None:
    """Waits until what was begun is whole."""
    with self._told(self._saving):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    self._last_good = self._manager.latest_step()

  def close(self) -> None:
    """Waits, and ends the background threads."""
    self.wait()
    self._manager.close()

  @contextlib.contextmanager
  def _told(self, step: int | None):
    try:
      yield
    except files.failures() as error:
      if processes.is_of_a_computation(error):
        raise
      last = "none" if self._last_good is None else f"step {self._last_good}"
      raise UserError(
        f"saving step {step} under {self._folder} failed:"
        f" {checkpoint.reason_of(error)}; the last good checkpoint is {last}"
      ) from error
