"""Adapter to tokamax's attention for GPUs (github.com/openxla/tokamax).

tokamax takes an interval of keys for each query, as `AttentionMask` has, but
only in a private module (`antlm_jax.private`). So this file accepts only the
versions with which it was tested.
"""

import functools
import importlib.metadata
import importlib.util
import logging

import jax
import jax.numpy as jnp

from antlm_jax import private
from antlm_jax.masks import AttentionMask

TESTED = ("0.0.17",)  # Python 3.12 and jax 0.11.1 or later


def installed_version() -> str:
  """Returns the version of tokamax; "" if it is not installed."""
  try:
    version = importlib.metadata.version("tokamax")
  except importlib.metadata.PackageNotFoundError:
    return ""
  # tokamax requires and imports this large package, but does not use it here.
  # An installation with --no-deps may lack it.
  if importlib.util.find_spec("xprof") is None:
    return f"{version} without xprof"
  return version


def implementation(capability: float) -> str:
  """Returns the name of tokamax's kernels for a compute capability."""
  return "mosaic_gpu" if 9 <= capability < 11 else "triton"


@functools.partial(jax.jit, static_argnums=(0, 1))  # else each layer compiles
def tokamax_attention(
  name: str, scale: float, q, k, v, mask: AttentionMask
) -> jax.Array:
  """Computes attention `[B, T, N, H]` by an implementation of tokamax.

  A query that sees no key gets zero, where tokamax has the mean of all values.

  Args:
    name: Name of the implementation.
    scale: Factor of the scores.
    q: Queries `[B, T, N, H]`.
    k, v: Keys and values `[B, S, K, H]`.
    mask: Keys that each query sees.
  """
  run, mask_class = private.tokamax_attention(name)
  logging.getLogger("absl").addFilter(_not_a_cache_miss)
  bounds = {"k_start": mask.k_start, "k_end": mask.k_end}
  of_heads = {n: x[:, None] for n, x in bounds.items() if x is not None}
  tokamax_mask = mask_class(is_causal=mask.causal, **of_heads)
  out = run(q, k, v, mask=tokamax_mask, logits_scale=scale)
  if not mask.bounded:
    return out
  start, end = mask.bounds(q.shape[1], k.shape[1])
  return jnp.where((start < end)[:, :, None, None], out, 0)


def _not_a_cache_miss(record: logging.LogRecord) -> bool:
  """Drops the warnings of shapes without tuned settings, a kilobyte each."""
  return not str(record.msg).startswith("Autotuning cache miss")
