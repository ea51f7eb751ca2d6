"""Commands that make something together, each of them run once.

What is done is written down, so that the same list of jobs goes on after any
interruption: with the job that was interrupted, which goes on by itself.
"""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from antlm_jax.errors import INTERRUPTED, RUN_AGAIN, Stopped, UserError
from antlm_jax.runtime import files
from antlm_jax.training import saving
from antlm_jax.units import duration

DONE = "done.json"  # the commands that are done, with their seconds
# Large pages that stay with the process make a step a quarter faster on a CPU.
_ENVIRONMENT = {
  "GLIBC_TUNABLES": (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296"
    ":glibc.malloc.trim_threshold=8589934592"
  )
}


@dataclasses.dataclass(frozen=True)
class Job:
  """A command, and what to say of it."""

  about: str
  module: str
  arguments: tuple[str, ...]
  result: pathlib.Path  # a folder that it leaves: without it, it is not done


def run(
  todo: Sequence[Job],
  folder: pathlib.Path,
  seconds: float | None = None,
  go_on: bool = False,
) -> list[Job]:
  """Runs jobs one after another, but for those that are done.

  Args:
    todo: The jobs.
    folder: Of all of them; receives the list of what is done.
    seconds: When to stop; the job at hand is asked to save first.
    go_on: Whether to go on after one that fails.

  Returns:
    Those that failed.

  Raises:
    UserError: if one fails and that ends it, what it printed says why; or if
      another process runs jobs of this folder.
    Stopped: if time is up, or a signal ends it, before all is done.
  """
  begun, failed = time.monotonic(), []
  with files.writing(folder):
    folder.mkdir(parents=True, exist_ok=True)
  with files.locked(folder / "lock"):
    ledger = folder / DONE
    done = files.read_json(ledger, "what is done") if ledger.exists() else {}
    for number, job in enumerate(todo, start=1):
      # Done is what ran with the very same arguments.
      command = " ".join([job.module, *job.arguments])
      if command in done and job.result.exists():
        continue
      print(f"\n[{number}/{len(todo)}] {job.about}", flush=True)
      at = time.monotonic()
      _wait_for(job.result / saving.LOCK)
      try:
        call(job, seconds and begun + seconds - at)
      except UserError as error:
        if not go_on:
          raise
        print(f"error: {error}", flush=True)
        failed.append(job)
        continue
      done[command] = time.monotonic() - at
      files.write_json(ledger, done)
  spent = duration(time.monotonic() - begun)
  what = f"{len(failed)} failed" if failed else "all done"
  print(f"\n{what}: {spent}, of {duration(sum(done.values()))} in all")
  return failed


def _wait_for(lock: pathlib.Path) -> None:
  """Waits for what works on a result still, after the end of who began it."""
  if not lock.exists():
    return
  try:
    with files.locked(lock):
      pass
  except UserError as error:
    print(f"{error}; waiting", flush=True)
    with files.locked(lock, wait=True):
      pass


def call(job: Job, seconds: float | None = None) -> None:
  """Runs one job, done or not; arguments and errors are as of `run`."""
  command = [sys.executable, "-m", job.module, *job.arguments]
  environment = {**_ENVIRONMENT, **os.environ}  # the user's counts
  # By default SIGTERM would end this process and leave the job alone.
  before = signal.signal(signal.SIGTERM, _terminated)
  try:
    process = subprocess.Popen(command, env=environment)
    status = _wait(process, seconds)
  finally:
    signal.signal(signal.SIGTERM, before)
  if status in (INTERRUPTED, RUN_AGAIN):
    print("\nstopped: the same command goes on", flush=True)
    raise Stopped(status)
  if status:
    raise UserError(
      f"{job.about} failed (status {status}): see above; it was"
      f" {' '.join(command)}"
    )


def _terminated(*_) -> None:
  raise Stopped(RUN_AGAIN)


def _wait(process: subprocess.Popen, seconds: float | None) -> int:
  """Waits for a process, which saves before it ends if it has to."""
  try:
    return process.wait(seconds)
  except (subprocess.TimeoutExpired, Stopped):
    process.send_signal(signal.SIGTERM)
    process.wait()
    return RUN_AGAIN
  except KeyboardInterrupt:  # it got the signal too
    process.wait()
    return INTERRUPTED
