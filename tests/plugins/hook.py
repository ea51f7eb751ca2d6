"""The norm of the parameters, whenever held-out losses are measured."""

import optax

from antlm_jax.training.hooks import HOOKS, Evaluator


@HOOKS.register("norm")
class Norm(Evaluator):
  """The hook."""

  prefixes = ("eval/norm",)

  def measure(self, trainer):
    """Returns the norm."""
    return {"eval/norm": float(optax.tree.norm(trainer.state.params))}
