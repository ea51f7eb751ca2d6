"""Attention through one function, for every mask."""

from antlm_jax.attention.api import (
  IMPLEMENTATIONS,
  SAVED,
  Dropout,
  Prepared,
  Relative,
  attend,
  choose,
  log_edges,
  prepare,
)

__all__ = [
  "IMPLEMENTATIONS",
  "SAVED",
  "Dropout",
  "Prepared",
  "Relative",
  "attend",
  "choose",
  "log_edges",
  "prepare",
]
