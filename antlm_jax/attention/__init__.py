"""Attention with one function for all masks and devices."""

from antlm_jax.attention.api import (
  MaskPlan,
  attend,
  choose_attention,
  prepare_mask,
)
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
  "MaskPlan",
  "Relative",
  "Rope",
  "Split",
  "attend",
  "choose_attention",
  "device",
  "log_edges",
  "prepare_mask",
]
