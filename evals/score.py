"""Scores a zero-shot task: BabyLM's, LAMBADA, or the perplexity of texts.

  antlm eval score --task=comps --checkpoint=RUN --data=FOLDER --mode=causal

--task=TASK --help describes a task and its options. The files of all but
lambada and perplexity, which read any texts, are those of BabyLM's
evaluation-pipeline-2025.
"""

import functools
from collections.abc import Callable

from antlm_jax import cli
from antlm_jax.evals.zero_shot import command, tasks
from antlm_jax.evals.zero_shot.command import evaluate

# So that all tasks are registered.
__all__ = ["done", "evaluate", "main", "of", "tasks"]


def of(name: str | None = None) -> tuple[Callable, Callable]:
  """Returns `main(argv)` and `done(argv)` of a task; by default, of --task."""
  run, done = command.run, command.done
  return tuple(functools.partial(f, __doc__, name) for f in (run, done))


main, done = of()

if __name__ == "__main__":
  cli.run(main)
