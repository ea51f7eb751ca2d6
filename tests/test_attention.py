"""Implementations of attention against float64 NumPy; blocks they visit."""

import fractions
import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax import attention
from antlm_jax.attention import backends, choose_attention
from antlm_jax.attention.blocks import AttentionBlocks
from antlm_jax.attention.gpu import visits
from antlm_jax.attention.tpu import kernel
from antlm_jax.masks import BIDIRECTIONAL, CAUSAL, AttentionMask
from tests import reference, runs
from tests.attention_cases import (
  CASES,
  EDGES,
  GAP,
  LTG_BERTS,
  MODES,
  attend,
  check_errors,
  check_gaps,
  expected,
  inputs,
  long_mask,
  make_mask,
  mask_with_gaps,
  position_terms,
)
from tests.attention_draws import calls
from tests.helpers import closest
from tests.reference import relative_error

IMPLEMENTATIONS = ("reference", "pallas")


def refuses(words, call, *args, **options):
  """Asserts that a call raises a ValueError with these words."""
  with pytest.raises(ValueError, match=words):
    call(*args, **options)


# Small rows


@pytest.mark.sample(8, 12)
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


SMALL = 3, 48, 48  # rows, queries, keys


@pytest.fixture(
  scope="module", params=["reference", "chunked", "pallas", "pallas with terms"]
)
def small(request):
  """Returns small arrays (q, k, v, g and perhaps position terms) and `run`.

  `run(mask, *arrays)` returns the output and the gradients.
  """
  implementation, *with_terms = request.param.split()
  shape = (*SMALL, 2, 2, 4) if with_terms else (*SMALL, 6, 2, 4)

  @jax.jit
  def run(mask, q, k, v, g, *terms):
    return attend(q, k, v, mask, g, implementation, terms)

  terms = position_terms(shape) if with_terms else ()
  return [*inputs(shape), *terms], run


def test_query_that_sees_nothing_is_zero_with_zero_gradients(small):
  (q, k, v, g, *terms), run = small
  mask = mask_with_gaps(*SMALL[:2])
  results = run(mask, q, k, v, g, *terms)
  check_gaps(results)
  # The upstream gradient of such a query must not reach anything.
  again = run(mask, q, k, v, g.at[0, GAP].set(1e3), *terms)
  assert all(map(np.array_equal, again, results))


def test_hidden_keys_have_no_influence_at_all(small):
  arrays, run = small
  mask = AttentionMask(False, None, np.full(SMALL[:2], 4, np.int32))
  changed = list(arrays)
  for i in (1, 2, 5)[: len(arrays) // 2]:  # keys, values and terms of keys
    changed[i] = arrays[i].at[:, 4:].set(1e4)
  assert all(map(np.array_equal, run(mask, *arrays), run(mask, *changed)))


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


@st.composite
def kernel_cases(draw):
  """Draws arguments of `check_kernel`.

  Position terms need as many key heads as query heads.
  """
  edges = st.lists(st.integers(-420, 420), max_size=62, unique=True)
  edges = edges.map(lambda numbers: tuple(sorted(numbers)))
  edges = draw(st.none() | st.just(LTG_BERTS) | edges)
  # Small blocks; `_ROW` chooses one or two kernels for the gradients.
  sizes = {
    "_BLOCK": draw(st.sampled_from([128, 256])),
    "_ROW": draw(st.sampled_from([0, kernel._ROW])),
  }
  call = draw(
    calls(
      longest=400,
      near=[1, 2, 127, 128, 129, 255, 256, 257, 300, 384],
      widths=[8, 16, 24, 64],
      dtypes=["float32", "bfloat16"],
      kv_heads=3,
      group=3 if edges is None else 1,
    )
  )
  return *call, sizes, edges


def check_kernel(case):
  """Compares a case of `kernel_cases` with the float64 reference."""
  shape, mask, dtype, rate, seed, sizes, edges = case
  arrays = inputs(shape, seed, dtype)
  terms = () if edges is None else position_terms(shape, edges, seed, dtype)
  options = {"edges": edges, "scale": shape[-1] ** -0.5, "dropout": None}
  if rate:
    row_keys = jnp.asarray(np.arange(shape[0]) + seed, jnp.uint32)
    options["dropout"] = attention.Dropout(rate, row_keys)
  with pytest.MonkeyPatch.context() as patch:
    for name, size in sizes.items():
      patch.setattr(kernel, name, size)
    # A new function, because jit's cache does not depend on the sizes.
    *qkv, g = arrays
    run = jax.jit(lambda *args: attend(*args[:5], "pallas", args[5], **options))
    found = run(*qkv, mask, g, terms)
  assert all(x.dtype == dtype for x in found)
  exact = expected(shape, mask, arrays, terms, **options)
  check_errors(found, exact, 1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
  "examples", [4, pytest.param(65, marks=pytest.mark.nightly)]
)
def test_the_kernel_and_its_gradients_are_exact(examples):
  few = {"max_examples": examples, "deadline": None, "derandomize": True}
  check = hypothesis.given(kernel_cases())(check_kernel)
  hypothesis.settings(**few)(check)()


@pytest.mark.slow
@pytest.mark.parametrize(
  "heads, kv_heads, edges",
  [pytest.param(48, 24, None, marks=pytest.mark.nightly), (4, 4, LTG_BERTS)],
)
def test_several_key_heads_in_a_step_but_not_all(heads, kv_heads, edges):
  blocks = kernel.choose_blocks(40, 40, heads // kv_heads, 8, jnp.float32)
  group = heads // kv_heads
  at_once = kernel.heads_of_a_step(kv_heads, group, 8, blocks, jnp.float32)
  assert 1 < at_once < kv_heads
  shape = 2, 40, 40, heads, kv_heads, 8
  check_kernel((shape, CAUSAL, "float32", 0.3, 0, {}, edges))


@pytest.mark.sample(9)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["chunked", "pallas"])
@pytest.mark.parametrize("mode", ["causal", "packed", "blocks"])
@pytest.mark.parametrize("edges", [None, LTG_BERTS], ids=["plain", "terms"])
def test_nothing_leaks_from_block_to_block(
  edges, mode, implementation, dtype, monkeypatch
):
  """A changed key changes, bit for bit, only the queries that see it."""
  monkeypatch.setattr(kernel, "_BLOCK", 128)
  shape = batch, length, *_ = (2, 400, 400, 1 if edges else 2, 1, 16)
  mask = CAUSAL if mode == "causal" else long_mask(mode, 2, 400, 400, seed=1)
  q, k, v, _ = inputs(shape, dtype=dtype)
  of_query = of_key = None
  if edges:
    of_query, of_key = position_terms(shape, edges, dtype=dtype)

  @jax.jit
  def run(k, v, of_key):
    relative = attention.Relative(of_query, of_key, edges) if edges else None
    return attention.attend(
      *(q, k, v, mask), relative=relative, implementation=implementation
    )

  def changed(at):
    plus = functools.partial(jax.tree.map, lambda x: x.at[0, at].add(3))
    return (before != np.asarray(run(*plus((k, v, of_key))))).any(axis=(2, 3))

  before = np.asarray(run(k, v, of_key))
  visible = reference.visible(mask, batch, length, length)
  for at in (0, 127, 128, 200, 399):
    found = changed(at)
    assert not found[1].any()
    assert (found[0] == visible[0, :, at]).all()


@pytest.mark.parametrize(
  "implementation, row",
  [("reference", 0), ("pallas", 0), ("pallas", kernel._ROW)],
)
def test_rotation_and_its_gradients_are_exact(implementation, row, monkeypatch):
  """Covers blocks beyond the end, and gradients in one or two kernels."""
  monkeypatch.setattr(kernel, "_BLOCK", 128)
  monkeypatch.setattr(kernel, "_ROW", row)
  shape = 2, 150, 150, 2, 1, 16
  q, k, v, g = inputs(shape)
  mask = long_mask("packed", *shape[:3], seed=1)
  positions = jnp.asarray(np.random.default_rng(0).integers(0, 300, (2, 150)))
  rope = attention.Rope.of(positions, 16, 1e4)
  run = jax.jit(lambda *arrays: attend(*arrays, implementation, rope=rope))
  out, dq, dk, dv = run(q, k, v, mask, g)

  def turn(x):
    cos, sin = (np.asarray(y, np.float64) for y in rope)
    a, b = np.split(np.asarray(x, np.float64), 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  exact = expected(shape, mask, (turn(q), turn(k), v, g))
  check_errors((out, turn(dq), turn(dk), dv), exact, 1e-5)


# Position terms, and meshes


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
    return choose_attention(CAUSAL, q, k, implementation, buckets=3)

  assert choose(4, 4) == "pallas"
  refuses("needs as many key as query heads", choose, 4, 2)
  shape = (1, 9, 9, 1, 1, 8)
  q, k, v, _ = inputs(shape)
  edges = tuple(range(200))
  relative = attention.Relative(*position_terms(shape, edges), edges)
  refuses(
    r"at most 128 buckets, not 201",
    attention.attend,
    q,
    k,
    v,
    CAUSAL,
    relative=relative,
    implementation="pallas",
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
    refuses(
      r"split.rows='data' is no axis of",
      lambda: attention.prepare_mask(mask, q, k, split=attention.Split("data")),
    )
    refuses(
      r"split.heads='y' does not divide 3",
      lambda: attention.prepare_mask(
        mask, q[:, :, :3], k[:, :, :3], split=attention.Split(None, "y")
      ),
    )


@pytest.mark.slow
def test_on_any_mesh_attention_is_the_reference():
  code = "from tests import test_attention; test_attention.on_four_devices()"
  runs.run_code(code, devices=4)


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


@pytest.mark.sample(2, 4)
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
    return choose_attention(mask, x, x, **options)

  assert choice(128) == "reference"
  assert choice(8192) == "chunked"
  for name in ("pallas", "chunked", "reference"):
    assert choice(128, implementation=name) == name
  refuses(r"'cudnn' needs a GPU", choice, 128, implementation="cudnn")
  refuses(
    r"'flash' is not one of auto, pallas", choice, 128, implementation="flash"
  )
  bounds = jax.ShapeDtypeStruct((2, 2**18), jnp.int32)
  refuses(
    "needs smaller batches",
    lambda: choice(2**18, AttentionMask(True, bounds), implementation="pallas"),
  )
  q = jax.ShapeDtypeStruct((2, 128, 40, 8), jnp.bfloat16)
  k = jax.ShapeDtypeStruct((2, 128, 1, 8), jnp.bfloat16)
  refuses(
    "needs at most 32 query heads", choose_attention, CAUSAL, q, k, "pallas"
  )
  q = jax.ShapeDtypeStruct((2**18, 128, 2, 8), jnp.bfloat16)
  assert choose_attention(CAUSAL, q, q, "pallas") == "pallas"
  refuses(
    "needs smaller batches",
    choose_attention,
    CAUSAL,
    q,
    q,
    "pallas",
    dropout=True,
  )


@pytest.mark.parametrize(
  "kind, plain, bounded, dropped",
  [
    ("NVIDIA H100 80GB HBM3", "cudnn", "mosaic", "mosaic"),
    ("NVIDIA H200", "cudnn", "mosaic", "mosaic"),
    ("NVIDIA B200", "cudnn", "tokamax", "chunked"),
    ("NVIDIA A100-SXM4-40GB", "cudnn", "tokamax", "chunked"),
    ("Tesla T4", "chunked", "chunked", "chunked"),
    ("AMD Instinct MI300X", "chunked", "chunked", "chunked"),
  ],
)
def test_the_choice_for_a_gpu_that_is_not_there(kind, plain, bounded, dropped):
  """Catches a plan that depends on the packages of this machine."""
  gpu = jax.sharding.AbstractDevice(kind, None, "gpu")
  mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=gpu)
  q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
  bound = AttentionMask(True, jnp.zeros((2, 128), jnp.int32))
  with jax.sharding.use_abstract_mesh(mesh):
    assert choose_attention(CAUSAL, q, q) == plain
    assert choose_attention(bound, q, q) == bounded
    assert choose_attention(CAUSAL, q, q, dropout=True) == dropped
    if bounded != "mosaic":
      refuses(
        "'mosaic' needs a Hopper GPU", choose_attention, bound, q, q, "mosaic"
      )
    if bounded == "chunked":
      refuses(
        "'tokamax' needs compute capabil",
        choose_attention,
        bound,
        q,
        q,
        "tokamax",
      )


# Whether the mask has bounds, and changes to heads of 64 in bfloat16.
CALLS = {
  "plain": (False, {}),
  "packed": (True, {}),
  "plain, dropout": (False, {"dropout": True}),
  "packed, dropout": (True, {"dropout": True}),
  "plain, float16": (False, {"dtype": "float16"}),
  "packed, float16": (True, {"dtype": "float16"}),
  "packed, float32": (True, {"dtype": "float32"}),
  "plain, wide": (False, {"width": 256}),
  "packed, wide": (True, {"width": 256}),
  "packed, too wide": (True, {"width": 512}),
  "plain, position terms": (False, {"buckets": 63}),
  "packed, position terms": (True, {"buckets": 63}),
}
C, M, T, X = "cudnn", "mosaic", "tokamax", "chunked"


@pytest.mark.parametrize(
  "platform, choices",
  [
    # All packages are installed.
    (("NVIDIA H200", 9.0), (C, M, M, M, M, M, X, C, T, X, X, X)),
    (("NVIDIA B200", 10.0), (C, T, X, X, T, T, X, C, T, X, X, X)),
    (("NVIDIA A100", 8.0), (C, T, X, X, T, T, X, T, T, X, X, X)),
    (("Tesla T4", 7.5), (X,) * 12),
    # Without tokamax, or another version of it.
    (("NVIDIA H200", 9.0, (0, 12), ""), (C, M, M, M, M, M, X, C, X, X, X, X)),
    (("NVIDIA A100", 8.0, (0, 12), ""), (C, *(X,) * 11)),
    (("NVIDIA A100", 8.0, (0, 12), "0.0.99"), (C, *(X,) * 11)),
    # Python 3.11 has neither our kernel's JAX nor tokamax.
    (("NVIDIA H200", 9.0, (0, 10, 2), ""), (C, *(X,) * 6, C, *(X,) * 4)),
    # The next implementation follows a kernel that cannot run.
    (
      ("NVIDIA H200", 9.0, (0, 11, 1), "0.0.17"),
      (C, T, X, X, T, T, X, C, T, X, X, X),
    ),
  ],
)
def test_the_choice_on_a_gpu(platform, choices):
  """The whole rule, for GPUs and packages that this machine lacks."""
  platform, found = backends.Platform("gpu", *platform), {}
  for name, (bounded, changes) in CALLS.items():
    known = {"dtype": "bfloat16", "dropout": False, "buckets": 0} | changes
    shape = 2, 128, 4, known.pop("width", 64)
    bounds = np.zeros(shape[:2], np.int32) if bounded else None
    call = backends.Call(shape, shape, **known)
    mask = AttentionMask(True, bounds)
    found[name] = backends.fastest_backend(platform, mask, call)
  assert found == dict(zip(CALLS, choices, strict=True))


@pytest.mark.parametrize(
  "name, packages, needed",
  [
    ("mosaic", {"jax_version": (0, 10, 2)}, "jax 0.11.2 .*, not jax 0.10.2"),
    ("tokamax", {"tokamax_version": ""}, "tokamax 0.0.17 .*, not installed"),
    ("tokamax", {"tokamax_version": "0.0.99"}, "tokamax 0.0.17 .*, not 0.0.99"),
  ],
)
def test_a_package_that_is_needed_is_named(monkeypatch, name, packages, needed):
  platform = backends.Platform("cpu", **packages)
  monkeypatch.setattr(backends.Platform, "here", lambda: platform)
  q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
  refuses(f"'{name}' needs {needed}", choose_attention, CAUSAL, q, q, name)


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
  refuses(words, attention.attend, **given)


def test_a_mask_prepared_for_something_else_is_refused():
  q, k, v, _ = inputs(CASES["grouped"])
  made = attention.prepare_mask(CAUSAL, q, k)
  keys = jnp.zeros(len(q), jnp.uint32)
  refuses(
    r"prepared for .*, not .*q=\(3, 3,", attention.attend, q[:, :3], k, v, made
  )
  refuses(
    "prepared for",
    lambda: attention.attend(
      q, k, v, made, dropout=attention.Dropout(0.1, keys)
    ),
  )
  refuses(
    "'reference', not 'pallas'",
    attention.attend,
    q,
    k,
    v,
    made,
    implementation="pallas",
  )
  able = attention.prepare_mask(CAUSAL, q, k, dropout=True)
  assert np.array_equal(*(attention.attend(q, k, v, m) for m in (made, able)))


def test_bounds_may_be_constants_of_a_program():
  q, k, v, _ = inputs(CASES["square"])
  end = np.full((2, 9), 4, np.int32)
  for bound in (end, jnp.asarray(end)):
    mask = AttentionMask(False, None, bound)
    out = jax.jit(lambda q, mask=mask: attention.attend(q, k, v, mask))(q)
    assert closest(out, attention.attend(q, k, v, mask)) < 1e-6
  refuses(
    "k_end ranges from 40 to 40",
    lambda: jax.jit(
      lambda q: attention.attend(q, k, v, AttentionMask(False, None, 10 * end))
    )(q),
  )
