"""How well a model predicts a text: perplexity by token and word, bits a byte.

antlm eval perplexity --checkpoint=RUN --data=TEXT --mode=causal
"""

from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.evals.zero_shot import command
from antlm_jax.evals.zero_shot.tasks import TASKS


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  task = {"perplexity": TASKS["perplexity"]}
  command.run(argv, __doc__, task)


if __name__ == "__main__":
  cli.run(main)
