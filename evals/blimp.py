"""Zero-shot accuracy on minimal pairs in BLiMP's form (arXiv 1912.00582).

antlm eval blimp --checkpoint=RUN --data=FOLDER --mode=causal
"""

from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.evals.zero_shot import command
from antlm_jax.evals.zero_shot.tasks import TASKS
from antlm_jax.inference import pairs


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  about = f"{__doc__}\n{pairs.__doc__}"
  command.run(argv, about, {"blimp": TASKS["blimp"]})


if __name__ == "__main__":
  cli.run(main)
