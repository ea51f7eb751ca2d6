"""`python -m antlm_jax.train` is `antlm train`."""

from antlm_jax import cli
from antlm_jax.commands.train import done, main

__all__ = ["done", "main"]

if __name__ == "__main__":
  cli.run(main)
