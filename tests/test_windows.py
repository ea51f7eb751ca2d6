"""Layers with different windows: their masks and their cost.

`test_encoders` tests which tokens they see.
"""

import dataclasses
import types

import jax
import numpy as np

from antlm_jax import models
from antlm_jax.attention import backends
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL
from tests import helpers

T = 12


def test_the_attention_of_each_window_is_named(monkeypatch):
  """Catches the name of the first layer's for all, on a GPU."""
  kind = "NVIDIA H100 80GB HBM3"
  gpu = types.SimpleNamespace(platform="gpu", device_kind=kind)
  monkeypatch.setattr(backends, "device", lambda: gpu)
  of = helpers.model(layers=4, windows=(0, 8), dtype="bfloat16")
  tokens = jax.ShapeDtypeStruct((1, 2, 128), np.int32)
  whole, windowed = of.attention_of(tokens, CAUSAL)
  # Heads of width 8 are too narrow for the kernels that take windows.
  assert (whole, windowed) == ("cudnn", "chunked")


def test_rows_as_short_as_the_windows_keep_their_plain_mask():
  of = helpers.model(windows=(0, T))
  masks = models.encoder.layer_masks(of.config, CAUSAL, (2, T))
  assert masks.kinds == [CAUSAL] and len(masks.indices) == of.config.layers


def test_a_layer_without_a_window_keeps_a_mask_without_bounds():
  """Else it loses cuDNN's kernel, which knows no bounds, on GPUs."""
  of = helpers.model(layers=3, windows=(0, 2))
  for loop, plain in (("no", True), ("yes", False)):
    config = dataclasses.replace(of.config, scan_layers=loop)
    masks = models.encoder.layer_masks(config, BIDIRECTIONAL, (2, T))
    assert (masks.of_layer(2) is BIDIRECTIONAL) == plain
    assert masks.of_layer(1).bounded
