"""Scores a task, without training for it.

  antlm eval score --task=comps --checkpoint=RUN --data=FOLDER \\
    --mode=causal

The tasks, whose files are those of BabyLM's evaluation-pipeline-2025, but for
the last two, which read texts of any kind:

{tasks}
"""

from antlm_jax import cli
from antlm_jax.evals.zero_shot.tasks import TASKS, command

_LINES = (f"  {name:<16}{task.about}" for name, task in TASKS.items())
main, done = command(__doc__.format(tasks="\n".join(_LINES)), *TASKS)


if __name__ == "__main__":
  cli.run(main)
