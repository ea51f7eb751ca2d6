"""Implementations of attention against float64 NumPy; blocks they visit."""

import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax import attention
from antlm_jax.attention.blocks import AttentionBlocks
from antlm_jax.attention.gpu import visits
from antlm_jax.attention.tpu import kernel
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from tests import reference
from tests.attention_cases import (
  CASES,
  EDGES,
  LTG_BERTS,
  MODES,
  attend,
  check_errors,
  check_kernel,
  check_leaks,
  expected,
  inputs,
  kernel_cases,
  long_mask,
  make_mask,
  position_terms,
)
from tests.helpers import closest
from tests.reference import relative_error

IMPLEMENTATIONS = ("reference", "pallas")


# Small rows


@pytest.mark.sample(16)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
  "implementation", ["reference", "reference with terms", "1", "4 with terms"]
)
@pytest.mark.parametrize("case", CASES)
def test_it_and_its_gradients_are_exact(case, implementation, mode):
  """An integer implementation is the number of queries in a chunk."""
  shape = batch, queries, keys, *_ = CASES[case]
  arrays = q, k, v, g = inputs(shape)
  mask = make_mask(mode, batch, queries, keys)
  options, terms = {"dropout": None, "scale": 0.3}, ()
  implementation, *with_terms = implementation.split()
  if with_terms:
    row_keys = jnp.arange(batch, dtype=jnp.uint32)
    options["dropout"] = attention.Dropout(0.2, row_keys)
    terms = position_terms(shape)
  if implementation != "reference":
    implementation = int(implementation)
  found = attend(q, k, v, mask, g, implementation, terms, **options)
  check_errors(found, expected(shape, mask, arrays, terms, **options), 1e-6)


def test_chunks_add_up_gradients_in_float32():
  shape = 1, 1024, 1024, 2, 1, 16
  q, k, v, g = inputs(shape, dtype=jnp.bfloat16)
  exact, _ = expected(shape, CAUSAL, (q, k, v, g))
  found = attend(q, k, v, CAUSAL, g, 16, scale=0.25, dropout=None)
  for x, y in zip(found[1:], exact[1:4], strict=True):
    assert x.dtype == jnp.bfloat16
    assert relative_error(x, y) < 5e-3


@pytest.fixture(params=["reference", "pallas", "pallas with terms"])
def small(request):
  """Returns small arrays (q, k, v, g and perhaps position terms) and `run`.

  `run(mask, *arrays)` returns the output and the gradients.
  """
  implementation, *with_terms = request.param.split()
  shape = (3, 7, 7, 2, 2, 4) if with_terms else CASES["grouped"]

  @jax.jit
  def run(mask, q, k, v, g, *terms):
    return attend(q, k, v, mask, g, implementation, terms)

  terms = position_terms(shape) if with_terms else ()
  return [*inputs(shape), *terms], run


def test_query_that_sees_nothing_is_zero_with_zero_gradients(small):
  arrays, run = small
  start, end = np.zeros((3, 7), np.int32), np.full((3, 7), 7, np.int32)
  end[0, 2] = 0  # an empty interval
  start[1] = 7  # a whole row that sees nothing
  mask = AttentionMask(False, start, end)
  found = out, dq, dk, dv, *d_terms = run(mask, *arrays)
  assert all(np.isfinite(x).all() for x in found)
  for x in (out, dq, *d_terms[:1]):
    assert not x[0, 2].any() and not x[1].any()
    assert x[0, 1].any()
  by_key = dk, dv, *d_terms[1:]
  assert not any(x[1].any() for x in by_key)
  # The upstream gradient of such a query must not reach any key.
  arrays[3] = arrays[3].at[0, 2].set(1e3)
  _, _, dk, dv, *d_terms = run(mask, *arrays)
  for x, y in zip(by_key, (dk, dv, *d_terms[1:]), strict=True):
    assert np.array_equal(x, y)


def test_hidden_keys_have_no_influence_at_all(small):
  arrays, run = small
  mask = AttentionMask(False, None, np.full((3, 7), 4, np.int32))
  before = run(mask, *arrays)
  for i in (1, 2, 5)[: len(arrays) // 2]:  # keys, values and terms of keys
    arrays[i] = arrays[i].at[:, 4:].set(1e4)
  for x, y in zip(before, run(mask, *arrays), strict=True):
    assert np.array_equal(x, y)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bounds_outside_the_row_mean_its_ends(implementation):
  shape = batch, queries, keys, *_ = CASES["more keys"]
  arrays = q, k, v, g = inputs(shape)
  start = np.full((batch, queries), -3, np.int32)
  end = np.full((batch, queries), keys + 5, np.int32)
  start[0, 1], end[0, 1] = keys + 1, keys + 2  # sees nothing
  start[0, 2], end[0, 2] = 4, 2  # nor does this
  mask = AttentionMask(False, start, end)
  # Compiled, because constant bounds are checked and refused.
  run = jax.jit(functools.partial(attend, implementation=implementation))
  found = run(q, k, v, mask, g)
  check_errors(found, expected(shape, mask, arrays), 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(implementation):
  q, k, v, g = inputs(CASES["square"])
  exact, _ = expected(CASES["square"], CAUSAL, (100 * q, 100 * k, v, g))
  how = {"implementation": implementation}
  found = attention.attend(100 * q, 100 * k, v, CAUSAL, **how)
  assert closest(found, exact.out) < 1e-4


@pytest.mark.parametrize("mode", ["causal", "bounds"])
def test_bfloat16_rounds_only_in_and_out(mode):
  shape = CASES["grouped"]
  arrays = q, k, v, g = inputs(shape, dtype=jnp.bfloat16)
  mask = make_mask(mode, *shape[:3])
  found = attend(q, k, v, mask, g, "reference")
  assert all(x.dtype == jnp.bfloat16 for x in found)
  check_errors(found, expected(shape, mask, arrays), 1e-2)


# The kernel


@pytest.mark.slow
@pytest.mark.parametrize(
  "examples", [17, pytest.param(65, marks=pytest.mark.nightly)]
)
def test_the_kernel_and_its_gradients_are_exact(examples):
  few = {"max_examples": examples, "deadline": None, "derandomize": True}
  check = hypothesis.given(kernel_cases())(check_kernel)
  hypothesis.settings(**few)(check)()


@pytest.mark.slow
@pytest.mark.parametrize(
  "heads, kv_heads, edges", [(48, 24, None), (4, 4, LTG_BERTS)]
)
def test_several_key_heads_in_a_step_but_not_all(heads, kv_heads, edges):
  blocks = kernel.choose_blocks(40, 40, heads // kv_heads, 8, jnp.float32)
  group = heads // kv_heads
  at_once = kernel.heads_of_a_step(kv_heads, group, 8, blocks, jnp.float32)
  assert 1 < at_once < kv_heads
  shape = 2, 40, 40, heads, kv_heads, 8
  check_kernel((shape, CAUSAL, {}, 0.3, "float32", 0, edges))


@pytest.mark.sample(15)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["chunked", "pallas"])
@pytest.mark.parametrize("mode", ["causal", "packed", "blocks"])
@pytest.mark.parametrize("edges", [None, LTG_BERTS], ids=["plain", "terms"])
def test_nothing_leaks_from_block_to_block(
  edges, mode, implementation, dtype, monkeypatch
):
  heads = (1, 1) if edges else (2, 1)
  check_leaks(mode, implementation, dtype, monkeypatch, edges, heads)


@pytest.mark.parametrize(
  "implementation, row",
  [("reference", 0), ("pallas", 0), ("pallas", kernel._ROW)],
)
def test_rotation_and_its_gradients_are_exact(implementation, row, monkeypatch):
  """Covers blocks beyond the end, and gradients in one or two kernels."""
  monkeypatch.setattr(kernel, "_BLOCK", 128)
  monkeypatch.setattr(kernel, "_ROW", row)
  shape = 2, 300, 300, 4, 2, 16
  q, k, v, g = inputs(shape)
  mask = long_mask("packed", *shape[:3], seed=1)
  positions = jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, 300)))
  rope = attention.Rope.of(positions, 16, 1e4)
  out, dq, dk, dv = attend(q, k, v, mask, g, implementation, rope=rope)

  def turn(x):
    cos, sin = (np.asarray(y, np.float64) for y in rope)
    a, b = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  exact = expected(shape, mask, (turn(q), turn(k), v, g))
  check_errors((out, turn(dq), turn(dk), dv), exact, 1e-5)


# Dropout


def test_dropout_is_a_hash_of_row_head_query_and_key():
  def mix(state, counter):
    return _mix32((state + 0x9E3779B9) % 2**32 ^ counter * 0x9E3779B9 % 2**32)

  rows, queries, keys = (5, 2**32 - 1), (0, 7, 4000), (1, 9)
  dropout = attention.Dropout(0.25, jnp.array(rows, jnp.uint32))
  found = dropout.kept(3, np.array(queries), np.array(keys))
  assert found.shape == (2, 3, 3, 2)
  counters = itertools.product(rows, range(3), queries, keys)
  for kept, counter in zip(found.ravel(), counters, strict=True):
    assert kept == (functools.reduce(mix, counter) >> 8 >= 0.25 * 2**24)


def _mix32(x):
  x ^= x >> 16
  x = x * 0x21F0AAAD % 2**32
  x ^= x >> 15
  x = x * 0xD35A2D97 % 2**32
  return x ^ x >> 15


# Visited blocks


def kernel_visits(patch, mask, shape, block, row):
  """Returns the blocks (row, q, k) that each kernel's index maps visit."""
  calls = []

  def record(body, *, grid_spec, out_shape, name, **_):
    def run(*args):
      calls.append((name, grid_spec, args[: grid_spec.num_scalar_prefetch]))
      return [jnp.zeros(s.shape, s.dtype) for s in out_shape]

    return run

  patch.setattr(kernel, "_BLOCK", block)
  patch.setattr(kernel, "_ROW", row)
  patch.setattr(kernel.pl, "pallas_call", record)
  q, k, v, g = inputs(shape, dtype=jnp.bfloat16)
  attend(q, k, v, mask, g, "pallas")
  patch.undo()
  out = {}
  for name, spec, scalars in calls:
    heads, *grid = (int(n) for n in spec.grid)
    assert heads == 1
    ids = jnp.indices(grid).reshape(len(grid), -1)
    row, _, _, _, at_q = _walk(spec.in_specs[0].index_map, ids, scalars)
    again, _, _, at_k = _walk(spec.in_specs[1].index_map, ids, scalars)
    assert np.array_equal(row, again)
    at = np.stack([row, at_q, at_k]).tolist()
    out[name] = list(zip(*at, strict=True))
  return out


def _walk(index_map, ids, scalars):
  return jax.vmap(lambda *ids: index_map(0, *ids, *scalars))(*ids)


def needed_blocks(mask, batch, length, blocks):
  dense = reference.visible(mask, batch, length, length)
  seen = set()
  for b, q, k in np.ndindex(batch, blocks.q_count, blocks.k_count):
    rows = slice(q * blocks.q_size, (q + 1) * blocks.q_size)
    columns = slice(k * blocks.k_size, (k + 1) * blocks.k_size)
    if dense[b, rows, columns].any():
      seen.add((b, q, k))
  return seen


@pytest.mark.sample(5)
@pytest.mark.parametrize("length, block", [(512, 128), (640, 128), (2048, 512)])
@pytest.mark.parametrize(
  "mode", ["causal", "full", "packed", "mixed", "window", "prefix"]
)
def test_no_block_is_visited_but_those_needed(mode, length, block, monkeypatch):
  batch = 4
  mask = {"causal": CAUSAL, "full": BIDIRECTIONAL}.get(mode)
  mask = mask or long_mask(mode, batch, length, length, seed=3)
  shape = batch, length, length, 1, 1, 8
  visits = kernel_visits(monkeypatch, mask, shape, block, 0)
  visits |= kernel_visits(monkeypatch, mask, shape, block, 2**23)
  assert len(visits) == 4  # forward, and gradients in two or one kernels
  blocks = AttentionBlocks.of(length, length, block)
  needed = needed_blocks(mask, batch, length, blocks)
  assert mode == "full" or len(needed) < batch * blocks.q_count**2
  for name, steps in visits.items():
    assert len(steps) / len(needed) == 1.0, name
    assert set(steps) == needed, name
    # An output block is complete before the next begins.
    by_key = name in ("attention_key_gradients", "attention_gradients")
    owners = [(row, k if by_key else q) for row, q, k in steps]
    changes = 1 + sum(a != b for a, b in itertools.pairwise(owners))
    assert changes == len(set(owners)) == batch * blocks.q_count


@pytest.mark.parametrize(
  "mode", ["causal", "full", "packed", "mixed", "window", "prefix", "bounds"]
)
def test_a_gpu_visits_what_is_needed_and_masks_what_is_hidden(mode):
  batch, queries, keys = 3, 640, 500
  mask = long_mask(mode, batch, queries, keys, seed=3)
  made = visits.make_visit_schedule(mask, batch, queries, keys)
  seen = np.zeros((batch, 640, 512), bool)
  seen[:, :, :keys] = reference.visible(mask, batch, queries, keys)
  seen = seen.reshape(batch, 5, 128, 4, 128)
  needed, whole = seen.any((2, 4)), seen.all((2, 4))
  assert whole.any() or mode in ("window", "bounds")
  for listed, axis in ((made.by_query, 1), (made.by_key, 2)):
    for row, outer in np.ndindex(listed.counts.shape[:2]):
      no_mask, count = listed.counts[row, outer]
      blocks = listed.blocks[row, outer].tolist()
      of_outer = (np.take(x[row], outer, axis - 1) for x in (needed, whole))
      some, every = (set(np.flatnonzero(x)) for x in of_outer)
      assert set(blocks[:count]) == some and len(some) == count
      assert set(blocks[:no_mask]) == every and len(every) == no_mask


def test_plain_masks_need_no_table():
  q, k = (jax.ShapeDtypeStruct((2, 600, 2, 8), jnp.float32),) * 2
  for mask in (CAUSAL, BIDIRECTIONAL):
    made = attention.prepare_mask(mask, q, k, "pallas")
    assert not jax.tree.leaves(made)
  made = attention.prepare_mask(
    long_mask("packed", 2, 600, 600, 0), q, k, "pallas"
  )
  assert len(jax.tree.leaves(made.schedules)) == 4


# Choice of implementation, and errors


def test_the_choice_on_cpu_is_by_length():
  def choice(length, mask=CAUSAL, **options):
    x = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    return attention.choose_attention(mask, x, x, **options)

  assert choice(128) == "reference"
  assert choice(8192) == "chunked"
  for name in ("pallas", "chunked", "reference"):
    assert choice(128, implementation=name) == name
  with pytest.raises(ValueError, match=r"'cudnn' needs a GPU"):
    choice(128, implementation="cudnn")
  with pytest.raises(ValueError, match=r"'flash' is not one of auto, pallas"):
    choice(128, implementation="flash")
  bounds = jax.ShapeDtypeStruct((2, 2**18), jnp.int32)
  with pytest.raises(ValueError, match="needs smaller batches"):
    choice(2**18, AttentionMask(True, bounds), implementation="pallas")
  q = jax.ShapeDtypeStruct((2, 128, 40, 8), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((2, 128, 1, 8), jnp.bfloat16)
  with pytest.raises(ValueError, match="needs at most 32 query heads"):
    attention.choose_attention(CAUSAL, q, k, "pallas")
  q = jax.ShapeDtypeStruct((2**18, 128, 2, 8), jnp.bfloat16)
  assert attention.choose_attention(CAUSAL, q, q, "pallas") == "pallas"
  with pytest.raises(ValueError, match="needs smaller batches"):
    attention.choose_attention(CAUSAL, q, q, "pallas", dropout=True)


@pytest.mark.parametrize(
  "kind, plain, bounded",
  [
    ("NVIDIA H100 80GB HBM3", "cudnn", "tokamax"),
    ("NVIDIA B200", "cudnn", "tokamax"),
    ("NVIDIA A100-SXM4-40GB", "cudnn", "tokamax"),
    ("Tesla T4", "chunked", "chunked"),
    ("AMD Instinct MI300X", "chunked", "chunked"),
  ],
)
def test_the_choice_for_a_gpu_that_is_not_there(kind, plain, bounded):
  gpu = jax.sharding.AbstractDevice(kind, None, "gpu")
  mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)
  q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
  bound = AttentionMask(True, jnp.zeros((2, 128), jnp.int32))
  needs = "jax 0.11.2" if "H100" in kind else "a Hopper GPU"
  with jax.sharding.use_abstract_mesh(mesh):
    assert attention.choose_attention(CAUSAL, q, q) == plain
    assert attention.choose_attention(bound, q, q) == bounded
    assert attention.choose_attention(CAUSAL, q, q, dropout=True) == "chunked"
    if needs == "a Hopper GPU" or jax.__version_info__ < (0, 12):
      with pytest.raises(ValueError, match=f"'mosaic' needs {needs}"):
        attention.choose_attention(bound, q, q, "mosaic")
    if bounded == "chunked":
      with pytest.raises(ValueError, match="'tokamax' needs compute capabil"):
        attention.choose_attention(bound, q, q, "tokamax")


SHAPES = {"q": (2, 8, 4, 4), "k": (2, 8, 2, 4), "v": (2, 8, 2, 4)}


def bounds(start, end):
  """Returns a mask of 2 rows of 8; a bound is a shape or a constant."""
  bounds = (
    np.zeros(x, np.int32) if isinstance(x, tuple) else np.full((2, 8), x, "i4")
    for x in (start, end)
  )
  return {"mask": AttentionMask(False, *bounds)}


def dropout(rate, *keys):
  return {"dropout": attention.Dropout(rate, np.array(keys))}


def terms(queries=8, buckets=15, edges=EDGES):
  query, key = np.ones((2, queries, 4, 15), "f4"), np.ones((2, 8, 4, buckets))
  return {"relative": attention.Relative(query, np.float32(key), edges)}


def rope(*shape):
  return {"rope": attention.Rope(*(np.ones(shape, "f4"),) * 2)}


ZERO = np.uint32(0)


@pytest.mark.parametrize(
  "words, changes",
  [
    (r"needs q \[B, T, N, H\]", {"q": (2, 8, 4)}),
    ("k and v differ in shape", {"v": (2, 9, 2, 4)}),
    ("differ in rows or head width", {"q": (3, 8, 4, 4)}),
    ("differ in rows or head width", {"q": (2, 8, 4, 8)}),
    ("5 query heads are not a multiple of 2", {"q": (2, 8, 5, 4)}),
    ("at least one query and key", dict.fromkeys("qkv", (0, 8, 2, 4))),
    ("share a dtype", {"q": np.ones(SHAPES["q"], jnp.bfloat16)}),
    ("share a dtype", dict.fromkeys("qkv", np.ones((2, 8, 2, 4), int))),
    (r"k_start is int32\[2, 7\], not int32\[2, 8\]", bounds((2, 7), (2, 8))),
    (r"k_end is int32\[8\], not int32\[2, 8\]", bounds((2, 8), (8,))),
    (r"k_start ranges from -1 to -1, outside \[0, 8\]", bounds(-1, 8)),
    (r"k_end ranges from 9 to 9, outside \[0, 8\]", bounds(0, 9)),
    ("k_start > k_end at row 0, query 0", bounds(5, 4)),
    (r"1.0 is not in \[0, 1\)", dropout(1.0, ZERO, ZERO)),
    (r"is uint32\[1\], not uint32\[2\]", dropout(0.1, ZERO)),
    (r"is int32\[2\]", dropout(0.1, np.int32(0), np.int32(0))),
    (r"relative.query is float32\[2, 7, 4, 15\]", terms(queries=7)),
    (r"relative.key is float32\[2, 8, 4, 14\]", terms(buckets=14)),
    ("do not ascend", terms(edges=EDGES[::-1])),
    (r"rope is float32\[2, 8, 1, 4\]", rope(2, 8, 1, 4)),
  ],
)
def test_what_does_not_fit_is_told(words, changes):
  given = {"mask": CAUSAL} | SHAPES | changes
  for name in "qkv":
    if isinstance(given[name], tuple):
      given[name] = jnp.ones(given[name])
  with pytest.raises(ValueError, match=words):
    attention.attend(**given)


def test_a_mask_prepared_for_something_else_is_refused():
  q, k, v, _ = inputs(CASES["grouped"])
  made = attention.prepare_mask(CAUSAL, q, k)
  keys = jnp.zeros(len(q), jnp.uint32)
  with pytest.raises(ValueError, match=r"prepared for .*, not .*q=\(3, 3,"):
    attention.attend(q[:, :3], k, v, made)
  with pytest.raises(ValueError, match="prepared for"):
    attention.attend(q, k, v, made, dropout=attention.Dropout(0.1, keys))
  with pytest.raises(ValueError, match="'reference', not 'pallas'"):
    attention.attend(q, k, v, made, implementation="pallas")
  able = attention.prepare_mask(CAUSAL, q, k, dropout=True)
  assert np.array_equal(*(attention.attend(q, k, v, m) for m in (made, able)))


def test_bounds_may_be_constants_of_a_program():
  q, k, v, _ = inputs(CASES["square"])
  end = np.full((2, 9), 4, np.int32)
  for bound in (end, jnp.asarray(end)):
    mask = AttentionMask(False, None, bound)
    out = jax.jit(lambda q, mask=mask: attention.attend(q, k, v, mask))(q)
    assert closest(out, attention.attend(q, k, v, mask)) < 1e-6
  with pytest.raises(ValueError, match="k_end ranges from 40 to 40"):
    jax.jit(
      lambda q: attention.attend(q, k, v, AttentionMask(False, None, 10 * end))
    )(q)
