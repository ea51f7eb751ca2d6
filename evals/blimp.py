"""Zero-shot accuracy on minimal pairs in BLiMP's form (arXiv 1912.00582).

antlm eval blimp --checkpoint=RUN --data=FOLDER --mode=causal
"""

from antlm_jax import cli
from antlm_jax.evals.zero_shot.tasks import command

main, done = command(__doc__, "blimp")

if __name__ == "__main__":
  cli.run(main)
