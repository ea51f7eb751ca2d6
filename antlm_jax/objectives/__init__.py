"""Training objectives, curricula of them, and their batches."""

# So that it is registered.
from antlm_jax.objectives import fill_in_the_middle

__all__ = ["fill_in_the_middle"]
