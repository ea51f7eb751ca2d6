"""Measures the perplexity of texts: `eval score --task=perplexity`."""

from antlm_jax import cli
from antlm_jax.evals import score

main, done = score.of("perplexity")

if __name__ == "__main__":
  cli.run(main)
