"""Commands that make something together, each of them run once.

Their results are the record of finished jobs. A command's module has
`done(argv)`, which looks for its results without loading a model. So the same
list of jobs resumes after any interruption, wherever its jobs were run before.
"""

import contextlib
import dataclasses
import importlib
import io
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from typing import IO

from antlm_jax import cli
from antlm_jax.commands import COMMANDS
from antlm_jax.errors import INTERRUPTED, RUN_AGAIN, Stopped, UserError
from antlm_jax.runtime import files, progress
from antlm_jax.training import saving
from antlm_jax.units import duration

# Not the name of a run's lock: a job may have the folder of all jobs.
_LOCK = ".jobs.lock"
# Large pages that stay with the process make a step a quarter faster on a CPU.
_ENVIRONMENT = {
  "GLIBC_TUNABLES": (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296"
    ":glibc.malloc.trim_threshold=8589934592"
  )
}


@dataclasses.dataclass(frozen=True)
class Job:
  """A command with its description."""

  about: str
  command: str  # of `antlm`, or a module to run
  arguments: tuple[str, ...]
  folder: pathlib.Path  # the folder that it works on

  @property
  def words(self) -> list[str]:
    """The words after `python -m` that run it."""
    own = self.command in COMMANDS
    command = ["antlm_jax", *self.command.split()] if own else [self.command]
    return [*command, *self.arguments]

  def _found(self) -> tuple[types.ModuleType, tuple[str, ...]]:
    """Returns its command's module, and the arguments for it."""
    module, *first = COMMANDS.get(self.command, self.command).split()
    return importlib.import_module(module), (*first, *self.arguments)

  @property
  def done(self) -> bool:
    """Whether its results exist; False if its command cannot tell."""
    command, words = self._found()
    with contextlib.suppress(UserError):  # which the command itself reports
      return hasattr(command, "done") and command.done(words)
    return False

  def run_here(self) -> None:
    """Runs it in this process."""
    command, words = self._found()
    command.main(list(words))


def join_jobs(todo: Sequence[Job], most: int) -> list[Job]:
  """Returns jobs that each run up to `most` of the jobs in one process."""
  out = []
  for first in range(0, len(todo), most):
    some = todo[first : first + most]
    lines = tuple(shlex.join((j.command, *j.arguments)) for j in some)
    about = f"{len(some)} jobs, from {some[0].about} to {some[-1].about}"
    out.append(
      Job(about, "antlm_jax.evals.studies.jobs", lines, some[0].folder)
    )
  return out


def _split_jobs(lines: Sequence[str]) -> Iterator[Job]:
  """Yields the jobs that `join_jobs` has combined."""
  for line in lines:
    command, *words = shlex.split(line)
    yield Job(line, command, tuple(words), pathlib.Path())


def done(argv: Sequence[str]) -> bool:
  """Returns whether all jobs of a process are done; see `join_jobs`."""
  return all(job.done for job in _split_jobs(argv))


def main(argv: Sequence[str]) -> None:
  """Runs the jobs of a process that are not done; see `join_jobs`."""
  for job in _split_jobs(argv):
    if not job.done:
      job.run_here()


def run_jobs(
  todo: Sequence[Job],
  folder: pathlib.Path,
  seconds: float | None = None,
  go_on: bool = False,
) -> list[Job]:
  """Runs jobs one after another, except those that are done.

  Args:
    todo: The jobs.
    folder: Folder of all of them, which no other process may work on.
    seconds: Time limit. The current job is asked to save first.
    go_on: Whether to continue after a job that fails.

  Returns:
    The jobs that failed.

  Raises:
    UserError: A job failed and ended it (its output says why), or another
      process runs jobs of this folder.
    Stopped: The time is up, or a signal ended it, before all jobs are done.
  """
  begun, failed = time.monotonic(), []
  with files.writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  with files.file_lock(folder / _LOCK):
    for number, job in enumerate(todo, start=1):
      if job.done:
        continue
      progress.say(f"\n[{number}/{len(todo)}] {job.about}")
      _wait_for(job.folder / saving.LOCK)
      try:
        run_job(job, seconds and begun + seconds - time.monotonic())
      except UserError as error:
        if not go_on:
          raise
        progress.say(f"error: {error}")
        failed.append(job)
  what = f"{len(failed)} failed" if failed else "all done"
  progress.say(f"\n{what}: {duration(time.monotonic() - begun)}")
  return failed


def _wait_for(lock: pathlib.Path) -> None:
  """Waits for a job that outlived the process which began it."""
  if not lock.exists():
    return
  try:
    with files.file_lock(lock):
      pass
  except UserError as error:
    progress.say(f"{error}; waiting")
    with files.file_lock(lock, wait=True):
      pass


def _command(job: Job) -> list[str]:
  return [sys.executable, "-m", *job.words]


def start_job(job: Job, output: IO | int | None = None) -> subprocess.Popen:
  """Starts one job, done or not.

  Args:
    job: The job.
    output: File for its output and errors, or `subprocess.DEVNULL` for its
      output; None for this process's.
  """
  errors = subprocess.STDOUT if isinstance(output, io.IOBase) else None
  return subprocess.Popen(
    _command(job),
    env={**_ENVIRONMENT, **os.environ},  # the user's settings win
    stdout=output,
    stderr=errors,
  )


def run_job(job: Job, seconds: float | None = None) -> None:
  """Runs one job, done or not; arguments and errors are those of `run_jobs`."""

  def terminated(*_) -> None:
    raise Stopped(RUN_AGAIN)

  # By default SIGTERM would end this process and leave the job alone.
  before = signal.signal(signal.SIGTERM, terminated)
  try:
    shown = subprocess.DEVNULL if progress.is_quiet() else None
    process = start_job(job, shown)
    try:
      status = process.wait(seconds)
    except (subprocess.TimeoutExpired, Stopped):
      process.send_signal(signal.SIGTERM)
      process.wait()  # it saves first
      status = RUN_AGAIN
    except KeyboardInterrupt:
      # A terminal signals both, `kill` this process alone. A second signal of
      # another kind changes nothing.
      process.send_signal(signal.SIGTERM)
      process.wait()
      status = INTERRUPTED
  finally:
    signal.signal(signal.SIGTERM, before)
  if status in (INTERRUPTED, RUN_AGAIN):
    progress.say("\nstopped: run the same command to resume")
    raise Stopped(status, saved=True)
  if status:
    raise UserError(
      f"{job.about} failed (status {status}): see above; it was"
      f" {' '.join(_command(job))}"
    )


if __name__ == "__main__":
  cli.run_command(main)
