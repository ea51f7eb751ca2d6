"""Scores by relative position in attention."""

import fractions
import functools

import jax
import jax.numpy as jnp
import pytest

from antlm_jax import attention
from antlm_jax.masks import CAUSAL
from tests import runs
from tests.attention_cases import (
  LTG_BERTS,
  attend,
  check_errors,
  expected,
  inputs,
  make_mask,
  position_terms,
)


def test_log_buckets_are_ltg_berts():
  """Compares with the formula, in exact arithmetic."""

  def bucket(distance, size=32, longest=512):
    far, middle = min(abs(distance), longest - 1), size // 2
    if far <= middle:
      return distance
    # The smallest n with (far / middle)^(middle - 1) <= (last / middle)^n.
    power = fractions.Fraction(far, middle) ** (middle - 1)
    base = fractions.Fraction(longest - 1, middle)
    n = next(n for n in range(middle) if power <= base**n)
    return (middle + n) * (1 if distance > 0 else -1)

  assert len(LTG_BERTS) == 62
  distances = range(-700, 701)
  found = [sum(d >= edge for edge in LTG_BERTS) - 31 for d in distances]
  assert found == [bucket(d) for d in distances]


def test_what_the_kernel_does_not_do_with_terms_is_told():
  def choose(heads, kv_heads, implementation="pallas"):
    q = jax.ShapeDtypeStruct((2, 128, heads, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((2, 128, kv_heads, 8), jnp.float32)
    return attention.choose_attention(CAUSAL, q, k, implementation, buckets=3)

  assert choose(4, 4) == "pallas"
  with pytest.raises(ValueError, match="needs as many key as query heads"):
    choose(4, 2)
  shape = (1, 9, 9, 1, 1, 8)
  q, k, v, _ = inputs(shape)
  edges = tuple(range(200))
  relative = attention.Relative(*position_terms(shape, edges), edges)
  with pytest.raises(ValueError, match=r"at most 128 buckets, not 201"):
    attention.attend(
      q, k, v, CAUSAL, relative=relative, implementation="pallas"
    )


def on_four_devices():
  """Compares the kernel on four devices with the reference."""
  shape = (4, 9, 9, 4, 4, 8)
  arrays = q, k, v, g = inputs(shape)
  terms, mask = position_terms(shape), make_mask("bounds", *shape[:3])
  dropout = attention.Dropout(0.2, jnp.arange(4, dtype=jnp.uint32))
  exact = expected(shape, mask, arrays, terms, dropout=dropout)
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=auto)
  with jax.set_mesh(mesh):
    for split in (attention.Split("x", "y"), attention.Split()):
      run = functools.partial(
        attend, implementation="pallas", dropout=dropout, split=split
      )
      found = jax.jit(run)(q, k, v, mask, g, terms=terms)
      assert len(found[0].sharding.device_set) == 4
      rows, _, heads, _ = found[0].sharding.shard_shape(q.shape)
      assert (rows, heads) == ((2, 2) if split.rows else (4, 4))
      check_errors(found, exact, 1e-6)
    with pytest.raises(ValueError, match=r"split.rows='data' is no axis of"):
      attention.prepare_mask(mask, q, k, split=attention.Split("data"))
    with pytest.raises(ValueError, match=r"split.heads='y' does not divide 3"):
      attention.prepare_mask(
        mask, q[:, :, :3], k[:, :, :3], split=attention.Split(None, "y")
      )


@pytest.mark.slow
def test_on_any_mesh_attention_is_the_reference():
  code = "from tests import test_relative; test_relative.on_four_devices()"
  runs.run_code(code, devices=4)
