"""Trains runs of a sweep in one process; see `antlm sweep --together`."""

import shlex
from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.commands import train as training
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import jobs
from antlm_jax.page import summary
from antlm_jax.page.hook import Page
from antlm_jax.runtime import chips, signals
from antlm_jax.training import run as run_lib
from antlm_jax.training import together

done = jobs.done


def main(argv: Sequence[str]) -> None:
  """Trains the runs of `antlm train` commands, as `join_jobs` combines them."""
  chips.take_memory()
  with signals.listening():
    runs = []
    workdirs = []
    hooks = []
    for job in jobs.split_jobs(argv):
      config, workdir = training.read_run_arguments(job.arguments)
      run_hooks, start = training.hooks_and_start(config)
      runs.append(run_lib.build_run(config, start))
      workdirs.append(workdir)
      command = f"{summary.antlm_program()} {shlex.join(job.words[1:])}"
      hooks.append([*run_hooks, Page(command)])
    failed = together.train_together(runs, workdirs, hooks)
  if failed:
    raise UserError(f"{len(failed)} of {len(runs)} runs failed: see above")


if __name__ == "__main__":
  cli.run_command(main)
