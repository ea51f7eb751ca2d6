"""A hook that records the parameters' norm with the held-out losses."""

import optax

from antlm_jax.training.hooks import HOOKS, Evaluator


@HOOKS.register("norm")
class Norm(Evaluator):
  """Measures the norm of all parameters."""

  prefixes = ("eval/norm",)

  def measure(self, trainer):
    """Returns the norm."""
    return {"eval/norm": float(optax.tree.norm(trainer.state.params))}
