"""How well a model predicts a text: perplexity by token and word, bits a byte.

antlm eval perplexity --checkpoint=RUN --data=TEXT --mode=causal
"""

from antlm_jax import cli
from antlm_jax.evals.zero_shot.tasks import command

main, done = command(__doc__, "perplexity")

if __name__ == "__main__":
  cli.run(main)
