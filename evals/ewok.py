"""Zero-shot accuracy on EWoK: which sentence fits a context.

antlm eval ewok --checkpoint=RUN --data=FOLDER --mode=causal
"""

from collections.abc import Sequence

from antlm_jax import cli
from antlm_jax.evals.zero_shot import command, ewok
from antlm_jax.evals.zero_shot.tasks import TASKS


def main(argv: Sequence[str]) -> None:
  """Runs the command."""
  about = f"{__doc__}\n{ewok.__doc__}"
  command.run(argv, about, {"ewok": TASKS["ewok"]})


if __name__ == "__main__":
  cli.run(main)
