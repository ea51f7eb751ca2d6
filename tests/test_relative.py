"""Scores by relative position, in every implementation of attention."""

import fractions
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax import attention
from antlm_jax.attention.tpu import kernel
from antlm_jax.masks import CAUSAL, AttentionMask
from tests import runs
from tests.attention_cases import (
  CASES,
  EDGES,
  attend,
  check_errors,
  check_kernel,
  check_leaks,
  expected,
  inputs,
  kernel_cases,
  make_mask,
  position_terms,
)

LTG_BERTS = attention.log_edges(32, 512)


@pytest.mark.sample(4)
@pytest.mark.parametrize("mode", ["causal", "full", "bounds"])
@pytest.mark.parametrize("implementation", ["reference", 4, 16])
@pytest.mark.parametrize("case", ["square", "more keys", "one token"])
def test_position_terms_and_their_gradients_are_exact(
  case, implementation, mode
):
  shape = batch, queries, keys, *_ = CASES[case]
  arrays = q, k, v, g = inputs(shape)
  terms = position_terms(shape)
  mask = make_mask(mode, batch, queries, keys)
  dropout = attention.Dropout(0.2, jnp.arange(batch, dtype=jnp.uint32))
  options = {"dropout": dropout, "scale": 0.3}
  found = attend(q, k, v, mask, g, implementation, terms, **options)
  exact = expected(shape, mask, arrays, terms, **options)
  check_errors(found, exact, 1e-6)


def test_log_buckets_are_ltg_berts():
  """By its formula, one distance at a time, in exact arithmetic."""

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


def test_position_terms_that_do_not_fit_are_told():
  q, k, v, _ = inputs(CASES["square"])
  query, key = position_terms(CASES["square"])
  for terms, words in (
    ((query[:, 1:], key, EDGES), r"relative.query is float32\[2, 8, 4, 15\]"),
    ((query, key[..., 1:], EDGES), r"relative.key is float32\[2, 9, 4, 14\]"),
    ((query, key, EDGES[::-1]), "do not ascend"),
  ):
    with pytest.raises(ValueError, match=words):
      attention.attend(q, k, v, CAUSAL, relative=attention.Relative(*terms))


# In the kernel, by properties


@st.composite
def relative_cases(draw):
  """What `kernel_cases` draws with as many key as query heads, and edges."""
  edges = st.lists(st.integers(-420, 420), max_size=62, unique=True).map(
    lambda edges: tuple(sorted(edges))
  )
  return draw(kernel_cases(1)), draw(st.just(LTG_BERTS) | edges)


@pytest.mark.slow
@hypothesis.given(relative_cases())
@hypothesis.settings(max_examples=5, deadline=None, derandomize=True)
def test_the_kernels_terms_and_gradients_are_exact(case):
  check_kernel(*case)


@pytest.mark.nightly
@pytest.mark.slow
@hypothesis.given(relative_cases())
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
def test_the_kernels_terms_and_gradients_are_exact_at_length(case):
  check_kernel(*case)


@pytest.mark.slow
def test_blocks_of_several_heads_have_terms():
  shape = (2, 40, 40, 4, 4, 8)
  blocks = kernel.cut(40, 40, 1, 8, jnp.float32)
  assert kernel.heads_of_a_step(4, 1, 8, blocks, jnp.float32) == 2
  check_kernel((shape, CAUSAL, {}, 0.3, "float32", 0), LTG_BERTS)


def test_hidden_keys_have_no_influence_at_all():
  shape = batch, queries, *_ = (3, 7, 7, 2, 2, 4)
  q, k, v, g = inputs(shape)
  of_query, of_key = position_terms(shape)
  mask = AttentionMask(False, None, np.full((batch, queries), 4, np.int32))
  run = jax.jit(functools.partial(attend, implementation="pallas"))
  before = run(q, k, v, mask, g, terms=[of_query, of_key])
  k, v, of_key = (x.at[:, 4:].set(1e4) for x in (k, v, of_key))
  after = run(q, k, v, mask, g, terms=[of_query, of_key])
  for x, y in zip(before, after, strict=True):
    assert np.array_equal(x, y)


@pytest.mark.slow
def test_a_query_that_sees_nothing_has_no_gradients_of_its_terms():
  shape = batch, queries, keys, *_ = (2, 5, 7, 2, 2, 4)
  q, k, v, g = inputs(shape)
  end = np.full((batch, queries), keys, np.int32)
  end[0, 2] = end[1] = 0
  mask = AttentionMask(False, None, end)
  found = attend(q, k, v, mask, g, "pallas", position_terms(shape))
  assert all(np.isfinite(x).all() for x in found)
  *_, of_query, of_key = found
  assert not of_query[0, 2].any() and not of_query[1].any()
  assert of_query[0, 1].any() and of_key[0].any() and not of_key[1].any()


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["chunked", "pallas"])
@pytest.mark.parametrize("mode", ["causal", "packed", "blocks"])
def test_nothing_leaks_from_block_to_block(
  mode, implementation, dtype, monkeypatch
):
  check_leaks(mode, implementation, dtype, monkeypatch, LTG_BERTS, (1, 1))


def test_what_the_kernel_does_not_do_with_terms_is_told():
  def choose(heads, kv_heads, implementation="pallas"):
    q = jax.ShapeDtypeStruct((2, 128, heads, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((2, 128, kv_heads, 8), jnp.float32)
    return attention.choose(CAUSAL, q, k, implementation, buckets=3)

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
  """Compares the kernel on meshes with the reference, in a process of four."""
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
      attention.prepare(mask, q, k, split=attention.Split("data"))
    with pytest.raises(ValueError, match=r"split.heads='y' does not divide 3"):
      attention.prepare(
        mask, q[:, :, :3], k[:, :, :3], split=attention.Split(None, "y")
      )


@pytest.mark.slow
def test_on_any_mesh_attention_is_the_reference():
  code = "from tests import test_relative; test_relative.on_four_devices()"
  runs.run_code(code, devices=4)
