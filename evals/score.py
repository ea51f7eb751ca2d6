"""Scores a task, without training for it.

  antlm eval score --task=comps --checkpoint=RUN --data=FOLDER \\
    --mode=causal

The tasks, whose files are those of BabyLM's evaluation-pipeline-2025, but for
the last two, which read texts of any kind:

{tasks}
"""

from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.evals.zero_shot import command
from antlm_jax.evals.zero_shot.tasks import TASKS


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  lines = (f"  {name:<16}{task.about}" for name, task in TASKS.items())
  about = __doc__.format(tasks="\n".join(lines))
  command.run(argv, about, TASKS)


if __name__ == "__main__":
  cli.run(main)
