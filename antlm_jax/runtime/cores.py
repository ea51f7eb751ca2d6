"""CPU cores of this process, which may be fewer than the machine's."""

import os
import pathlib

_QUOTA = pathlib.Path("/sys/fs/cgroup/cpu.max")  # of a container


def count_cores() -> int:
  """Returns the number of CPU cores that this process may use.

  That is the smallest of its CPU affinity, the cores that Slurm gives a task,
  and a container's quota.
  """
  if hasattr(os, "sched_getaffinity"):
    limits = [len(os.sched_getaffinity(0))]
  else:
    limits = [os.cpu_count() or 1]
  task = os.environ.get("SLURM_CPUS_PER_TASK", "")
  if task.isdecimal():
    limits.append(int(task))
  try:
    quota, period = _QUOTA.read_text("utf-8").split()
    limits.append(int(quota) // int(period))
  except (OSError, ValueError):
    pass  # "max" is no quota
  return max(1, min(limits))
