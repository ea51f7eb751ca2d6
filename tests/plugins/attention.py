"""Attention by the reference implementation, which counts its calls."""

from antlm_jax.attention import BACKENDS
from antlm_jax.attention.backends import Backend
from antlm_jax.attention.reference import reference

calls = 0


def counted(*args):
  """Computes attention, and counts the call."""
  global calls
  calls += 1
  return reference(*args)


BACKENDS["counted"] = Backend(counted)
