"""Commands that make something together, each of them run once.

Several run side by side, if they do not wait for each other.

Their results are the record of finished jobs. A command's module has
`done(argv)`, which looks for its results without loading a model. So the same
list of jobs resumes after any interruption, wherever its jobs were run before.
"""

import contextlib
import dataclasses
import importlib
import math
import os
import pathlib
import shlex
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence

from antlm_jax import cli
from antlm_jax.commands import COMMANDS
from antlm_jax.errors import INTERRUPTED, RUN_AGAIN, Stopped, UserError
from antlm_jax.runtime import files, progress
from antlm_jax.runtime.jobs import Child, running_children
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

# A GPU's memory for several processes: by default, the first takes most of it.
_SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclasses.dataclass(frozen=True)
class Job:
  """A command with its description.

  It waits for earlier jobs on its folder, and on the folders that it needs.
  """

  title: str
  command: str  # of `antlm`, or a module to run
  arguments: tuple[str, ...]
  folder: pathlib.Path  # the folder that it works on
  needs: tuple[pathlib.Path, ...] = ()  # folders that it reads

  @property
  def words(self) -> list[str]:
    """The words after `python -m` that run it."""
    module = [self.command]
    if self.command in COMMANDS:
      module = ["antlm_jax", *self.command.split()]
    return [*module, *self.arguments]

  @property
  def command_line(self) -> str:
    """The line of a shell that runs it on this machine."""
    return shlex.join(cli.python_command(*self.words))

  def _module_and_arguments(self) -> tuple[types.ModuleType, tuple[str, ...]]:
    """Returns its command's module, and the arguments for it."""
    module, *options = COMMANDS.get(self.command, self.command).split()
    return importlib.import_module(module), (*options, *self.arguments)

  @property
  def done(self) -> bool:
    """Whether its results exist; False if its command cannot tell."""
    module, arguments = self._module_and_arguments()
    with contextlib.suppress(UserError):  # which the command itself reports
      return hasattr(module, "done") and module.done(arguments)
    return False

  def run_here(self) -> None:
    """Runs it in this process."""
    module, arguments = self._module_and_arguments()
    module.main(list(arguments))


def join_jobs(
  jobs: Sequence[Job], command: str = "antlm_jax.evals.studies.jobs"
) -> Job:
  """Returns a job that runs jobs in one process, by a module's `main`."""
  if len(jobs) == 1:
    return jobs[0]
  return Job(
    title=f"{len(jobs)} jobs, from {jobs[0].title} to {jobs[-1].title}",
    command=command,
    arguments=tuple(shlex.join((j.command, *j.arguments)) for j in jobs),
    folder=jobs[0].folder,
  )


def split_jobs(lines: Sequence[str]) -> Iterator[Job]:
  """Yields the jobs that `join_jobs` has combined."""
  for line in lines:
    command, *words = shlex.split(line)
    yield Job(line, command, tuple(words), pathlib.Path())


def done(argv: Sequence[str]) -> bool:
  """Returns whether all jobs of a process are done; see `join_jobs`."""
  return all(job.done for job in split_jobs(argv))


def main(argv: Sequence[str]) -> None:
  """Runs the jobs of a process that are not done; see `join_jobs`."""
  for job in split_jobs(argv):
    if not job.done:
      job.run_here()


def run_jobs(
  todo: Sequence[Job],
  folder: pathlib.Path,
  seconds: float | None = None,
  go_on: bool = False,
  at_once: int = 1,
) -> list[Job]:
  """Runs jobs, except those that are done.

  Jobs side by side write into FOLDER/logs, and share a GPU's memory.

  Args:
    todo: The jobs, in the order in which they start.
    folder: Folder of all of them, which no other process may work on.
    seconds: Time limit. The jobs that run are asked to save first.
    go_on: Whether to continue after a job that fails.
    at_once: Number of jobs side by side.

  Returns:
    The jobs that failed, and those that wait for them.

  Raises:
    UserError: A job failed and ended it (its output says why), or another
      process runs jobs of this folder.
    Stopped: The time is up, or a signal ended it, before all jobs are done.
  """
  begun = time.monotonic()
  failed = []
  until = math.inf if seconds is None else begun + seconds
  waiting = dict(enumerate(todo, start=1))
  running: dict[int, Job] = {}
  logs = folder / "logs" if at_once > 1 else None
  with files.writing(folder):
    (logs or folder).mkdir(parents=True, exist_ok=True)
  with (
    files.file_lock(folder / _LOCK),
    _resumable(),
    running_children(at_once) as children,
  ):
    while waiting or children:
      while children.has_room():
        number = _ready_job(waiting, running.values())
        if number is None:
          break
        job = waiting.pop(number)
        if not job.done:
          progress.say(f"\n[{number}/{len(todo)}] {job.title}")
          _wait_for(job.folder / saving.LOCK)
          children[number] = start_job(job, logs and logs / f"{number}.log")
          running[number] = job
      for number, child in children.pop_ended():
        job = running.pop(number)
        error = child.failure()
        if error is None:
          continue
        if isinstance(error, Stopped) or not go_on:
          raise error
        progress.say(f"error: {error}")
        failed += [job, *_without_dependents(waiting, job)]
      if children and time.monotonic() > until:
        raise Stopped(RUN_AGAIN)
  outcome = f"{len(failed)} failed" if failed else "all done"
  progress.say(f"\n{outcome}: {duration(time.monotonic() - begun)}")
  return failed


def _ready_job(
  waiting: Mapping[int, Job], running: Iterable[Job]
) -> int | None:
  """Returns the first job that waits for no other, by its number."""
  unfinished = {job.folder for job in running}
  for number, job in waiting.items():
    if unfinished.isdisjoint((job.folder, *job.needs)):
      return number
    unfinished.add(job.folder)
  return None


def _without_dependents(waiting: dict[int, Job], failed: Job) -> list[Job]:
  """Removes and returns the jobs that wait for a failed job."""
  folders = {failed.folder}
  dependents = []
  for number, job in list(waiting.items()):
    if not folders.isdisjoint((job.folder, *job.needs)):
      folders.add(job.folder)
      dependents.append(waiting.pop(number))
  return dependents


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
  """Prints how to resume if a signal or the time ends its block."""
  try:
    yield
  except KeyboardInterrupt as error:
    status = error.status if isinstance(error, Stopped) else INTERRUPTED
    progress.say("\nstopped: run the same command to resume")
    raise Stopped(status, saved=True) from None


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


def start_job(job: Job, log: pathlib.Path | None = None) -> Child:
  """Starts a job, done or not; with a log, it is one of several."""
  shared = _SHARED if log else {}
  # The user's settings win.
  variables = {**_ENVIRONMENT, **shared, **os.environ}
  return Child(job.title, job.words, variables, log=log, shown=not log)


if __name__ == "__main__":
  cli.run_command(main)
