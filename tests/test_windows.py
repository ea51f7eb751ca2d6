"""Layers with different windows: visibility and cost."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest

from antlm_jax import attention, models
from antlm_jax.attention import api, backends
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from antlm_jax.training import flops
from tests import helpers, reference

T = 12
PATTERN = (2, 0, 3)  # four layers see two, all, three and two keys


def bounds(*pieces):
  ends = np.cumsum(pieces)
  found = np.repeat([ends - pieces, ends], pieces, axis=1).astype(np.int32)
  return found[:, None].repeat(2, 1)


MASKS = {
  "causal": CAUSAL,
  "bidirectional": BIDIRECTIONAL,
  "packed causal": AttentionMask(True, *bounds(5, 1, 6)),
  "prefix": AttentionMask(
    False, None, np.maximum(np.arange(1, T + 1), [[4], [9]]).astype(np.int32)
  ),
}


def run(mask, **changes):
  """Returns hidden states and gradients of a small model."""
  of = helpers.model(layers=4, windows=PATTERN, **changes)
  params, tokens = helpers.random_params(of), helpers.tokens(2, T)
  positions = np.broadcast_to(np.arange(T), tokens.shape)

  @jax.jit
  def total(params):
    hidden = of.encode(params, tokens, positions, MASKS[mask])
    return (hidden**2).sum(), hidden

  grads, hidden = jax.grad(total, has_aux=True)(params)
  return {"hidden": hidden} | grads


@pytest.mark.parametrize(
  "mask, changes",
  [("packed causal", {"remat": "block"}), ("prefix", {"attention": "pallas"})],
)
def test_a_loop_chooses_the_windows_that_unrolled_layers_have(mask, changes):
  expected = run(mask, scan_layers="no")
  found = run(mask, scan_layers="yes", **changes)
  for path, value in expected.items():
    assert helpers.closest(found[path], value) < 1e-4, path


def test_the_attention_of_each_window_is_named(monkeypatch):
  """Catches the name of the first layer's for all, on a GPU."""
  kind = "NVIDIA H100 80GB HBM3"
  gpu = types.SimpleNamespace(platform="gpu", device_kind=kind)
  for module in (api, backends):
    monkeypatch.setattr(module, "device", lambda: gpu)
  of = helpers.model(layers=4, windows=(0, 8), dtype="bfloat16")
  tokens = jax.ShapeDtypeStruct((1, 2, 128), np.int32)
  whole, windowed = of.attention_of(tokens, CAUSAL)
  assert whole == "cudnn" and windowed in ("tokamax", "chunked")


@pytest.mark.parametrize("mask", MASKS)
def test_only_what_is_seen_through_the_windows_changes_a_state(mask):
  of = helpers.model(layers=4, windows=PATTERN, scan_layers="yes")
  params = helpers.random_params(of)
  positions = np.arange(T)[None].repeat(2, 0)
  through = np.eye(T, dtype=int)
  distance = np.abs(np.arange(T)[:, None] - np.arange(T))
  for window in (2, 0, 3, 2):
    near = distance < (window or T)
    seen = reference.visible(MASKS[mask], 2, T, T)[0] & near
    through = (seen | np.eye(T, dtype=bool)).astype(int) @ through
  encode = jax.jit(lambda x: of.encode(params, x, positions, MASKS[mask]))
  helpers.check_leaks(encode, through > 0)


def test_far_blocks_are_skipped_and_only_near_pairs_counted():
  length, window = 2048, 200
  of = models.build_model(
    helpers.TINY | {"windows": (0, window), "attention": "pallas"}, 64
  )
  near = np.arange(length)
  near = np.minimum(near + window, length) - np.maximum(near - window + 1, 0)
  for mask, pairs in (
    (CAUSAL, (near.sum() + length) // 2),
    (BIDIRECTIONAL, near.sum()),
  ):
    masks = models.encoder.masks(of.config, mask, (1, length))
    found = masks.map(lambda mask: flops.visible_pairs(mask, (1, length)))
    assert sum(found.of_layer(1)) == pairs
    shape = jax.ShapeDtypeStruct((1, length, 4, 8), np.float32)
    made = masks.map(
      lambda mask, x=shape: attention.prepare_mask(
        mask, x, x, "pallas"
      ).schedules[0]
    )
    steps = [
      math.prod(int(n) for n in made.of_layer(layer).grid(1))
      for layer in (0, 1)
    ]
    n = made.of_layer(0).blocks.q_count
    assert length / n > window  # a window reaches only into the next block
    expected = [n * (n + 1) // 2, 2 * n - 1]
    assert steps == (expected if mask.causal else [n**2, 3 * n - 2])


def test_rows_as_short_as_the_windows_keep_their_plain_mask():
  of = helpers.model(windows=(0, T))
  masks = models.encoder.masks(of.config, CAUSAL, (2, T))
  assert masks.kinds == [CAUSAL] and len(masks.which) == of.config.layers


def test_a_layer_without_a_window_keeps_a_mask_without_bounds():
  """Else it loses cuDNN's kernel, which knows no bounds, on GPUs."""
  of = helpers.model(layers=3, windows=(0, 2))
  for loop, plain in (("no", True), ("yes", False)):
    config = dataclasses.replace(of.config, scan_layers=loop)
    masks = models.encoder.masks(config, BIDIRECTIONAL, (2, T))
    assert (masks.of_layer(2) is BIDIRECTIONAL) == plain
    assert masks.of_layer(1).bounded
