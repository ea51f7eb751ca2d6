"""Scores a zero-shot task: BabyLM's, LAMBADA, or the perplexity of texts.

  antlm eval score --task=comps --checkpoint=RUN --data=FOLDER --mode=causal

--task=TASK --help describes a task and its options. The files of all but
lambada and perplexity, which read any texts, are those of BabyLM's pipeline of
2026, babylm-org/babylm-eval.
"""

import functools

from antlm_jax import cli
from antlm_jax.evals.zero_shot import command, tasks
from antlm_jax.evals.zero_shot.command import evaluate

# So that all tasks are registered.
__all__ = ["done", "evaluate", "main", "tasks"]

main = functools.partial(command.run_task, __doc__)
done = functools.partial(command.done, __doc__)

if __name__ == "__main__":
  cli.run_command(main)
