"""Scores EWoK, sentences that fit a context: `eval score --task=ewok`."""

from antlm_jax import cli
from antlm_jax.evals import score

main, done = score.of("ewok")

if __name__ == "__main__":
  cli.run(main)
