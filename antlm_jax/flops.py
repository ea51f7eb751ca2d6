"""Floating-point operations of a step, and the chips' peaks."""

from collections.abc import Sequence

import jax
import numpy as np

from antlm_jax.examples import Example
from antlm_jax.masks import AttentionMask
from antlm_jax.models import Model

# Dense bfloat16 FLOP/s per device, from the makers' data sheets, by the
# beginning of jax.Device.device_kind. The longest that fits counts.
PEAKS = {
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v6": 918e12,
  "TPU7x": 2307e12,
  "NVIDIA A100": 312e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H200": 989e12,
  "NVIDIA L4": 121e12,
  "NVIDIA L40": 181e12,
  "NVIDIA L40S": 362e12,
  "Tesla T4": 65e12,
}


def peak(device: jax.Device) -> float | None:
  """Returns a device's peak in FLOP/s; None where it is not known."""
  kinds = [kind for kind in PEAKS if device.device_kind.startswith(kind)]
  return PEAKS[max(kinds, key=len)] if kinds else None


def train_step(model: Model, example: Example) -> float:
  """Counts the multiplications and additions that a step needs.

  Two per weight and token forward and four backward, for the blocks' matrices
  on every token and for the head on every target; and the two products of
  attention for every pair of a query and a key that it sees. Recomputation and
  the padding of target lists do not count.
  """
  c = model.config
  blocks = sum(
    shape.size
    for path, shape in model.shapes.items()
    if path.startswith("blocks/") and shape.ndim > 2
  )
  tokens = example.inputs.size
  targets = (example.weights > 0).sum()
  pairs = visible_pairs(example.mask, example.inputs.shape)
  attention = 2 * c.layers * c.heads * c.head_width * pairs
  head = c.width * c.vocab_size * targets
  return 6.0 * (blocks * tokens + head + attention)


def visible_pairs(mask: AttentionMask, shape: Sequence[int]) -> int:
  """Counts the queries and keys that see each other.

  Args:
    mask: Its bounds, if any, have this shape.
    shape: `[..., T]`: rows of T queries and as many keys.
  """
  start, end = mask.bounds(shape[-1], shape[-1], np)
  return int(np.broadcast_to(np.maximum(end - start, 0), shape).sum())
