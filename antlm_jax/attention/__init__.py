"""Attention with one function for all masks and devices."""

from antlm_jax.attention.api import Prepared, attend, choose, prepare
from antlm_jax.attention.backends import BACKENDS, Backend
from antlm_jax.attention.blocks import SAVED
from antlm_jax.attention.cache import Cache, Cached
from antlm_jax.attention.dropout import Dropout
from antlm_jax.attention.relative import Relative, log_edges
from antlm_jax.attention.rope import Rope
from antlm_jax.mesh import Split, device

__all__ = [
  "BACKENDS",
  "SAVED",
  "Backend",
  "Cache",
  "Cached",
  "Dropout",
  "Prepared",
  "Relative",
  "Rope",
  "Split",
  "attend",
  "choose",
  "device",
  "log_edges",
  "prepare",
]
