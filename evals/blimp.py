"""Scores minimal pairs such as BLiMP's: `eval score --task=blimp`."""

from antlm_jax import cli
from antlm_jax.evals import score

main, done = score.of("blimp")

if __name__ == "__main__":
  cli.run(main)
