"""Zero-shot accuracy on EWoK: which sentence fits a context.

antlm eval ewok --checkpoint=RUN --data=FOLDER --mode=causal
"""

from antlm_jax import cli
from antlm_jax.evals.zero_shot.tasks import command

main, done = command(__doc__, "ewok")

if __name__ == "__main__":
  cli.run(main)
