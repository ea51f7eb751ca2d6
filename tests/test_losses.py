"""The head's loss and its gradients in chunks and by the TPU kernel."""

import functools
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from antlm_jax.head import chunks as head_chunks
from antlm_jax.head import losses
from antlm_jax.head import tpu as head_tpu
from antlm_jax.models.encoder import Head
from antlm_jax.models.layers import DropoutPlaces
from tests import helpers

KINDS = 3


@functools.cache
def make_inputs(
  shards=2, capacity=11, width=8, vocab=19, biased=False, seed=0
) -> dict[str, np.ndarray]:
  draw = np.random.default_rng(seed)
  shape = shards, capacity
  hidden = draw.normal(size=(*shape, width)).astype(np.float32)
  kernel = draw.normal(size=(width, vocab)).astype(np.float32)
  bias = biased * draw.normal(size=vocab).astype(np.float32)
  right, random = (
    (hidden @ kernel + bias).argmax(-1),
    draw.integers(0, vocab, shape),
  )
  targets = np.where(draw.random(shape) < 0.5, right, random).astype(np.int32)
  weights = np.float32(draw.random(shape) * (draw.random(shape) < 0.7))
  objective_ids = draw.integers(0, KINDS, shape, np.int32)
  return {
    "hidden": hidden,
    "kernel": kernel,
    "bias": bias if biased else None,
    "targets": targets,
    "weights": weights,
    "objective_ids": objective_ids,
  }


def reference(hidden, kernel, bias, targets, weights, objective_ids, z_loss=0):
  """Returns float64 sums and gradients of the loss, and sizes of their terms.

  A small difference of large terms has the rounding error of the terms.
  """
  hidden, kernel = np.float64(hidden), np.float64(kernel)
  scores = hidden @ kernel + (0 if bias is None else np.float64(bias))
  top = scores.max(axis=-1)
  partition = top + np.log(np.exp(scores - top[..., None]).sum(axis=-1))
  p, right = np.exp(scores - partition[..., None]), np.eye(kernel.shape[1])
  right = right[targets]
  at_target, real = (scores * right).sum(axis=-1), weights > 0

  def sums(at_target):
    nats = partition - at_target
    each = {
      "loss": weights * (nats + z_loss * partition**2),
      "weight": weights,
      "count": real,
      "nats": real * nats,
      "correct": real & (scores.argmax(axis=-1) == targets),
    }
    kinds = np.eye(KINDS)[objective_ids]
    return {n: np.einsum("sc,sck->k", x, kinds) for n, x in each.items()}

  def grads(hidden, kernel, sign):
    scale = weights * (1 + 2 * z_loss * partition)
    d = scale[..., None] * p - sign * weights[..., None] * right
    made = {"hidden": d @ kernel.T}
    made["kernel"] = np.einsum("scd,scv->dv", hidden, d)
    return made if bias is None else made | {"bias": d.sum((0, 1))}

  sizes = sums(at_target - abs(partition) - 2 * abs(at_target))
  sizes |= grads(abs(hidden), abs(kernel), -1)
  return sums(at_target), grads(hidden, kernel, 1), sizes


def run(inputs, **options):
  """Returns the sums and gradients of `losses.cross_entropy`."""
  names = ["hidden", "kernel", *["bias"] * (inputs["bias"] is not None)]
  of = {n: inputs[n] for n in names}
  rest = (inputs[n] for n in ("targets", "weights", "objective_ids"))

  def loss(of, *rest):
    head = Head(of["kernel"], of.get("bias"))
    found, sums = losses.cross_entropy(
      head, of["hidden"], None, *rest, KINDS, **options
    )
    return 3 * found, sums

  grads, sums = jax.jit(jax.grad(loss, has_aux=True))(of, *rest)
  return sums, jax.tree.map(lambda g: g.astype(jnp.float32) / 3, grads)


def check(inputs, limit=1e-5, **options):
  found, grads = run(inputs, **options)
  expected, exact, sizes = reference(**inputs, z_loss=options.get("z_loss", 0))
  assert found.keys() == expected.keys()
  for name, value in (expected | exact).items():
    error = np.abs((found | grads)[name] - value).max()
    assert error <= limit * np.abs(sizes[name]).max(), name
  return expected


@pytest.mark.sample(4, 6)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("how", [1, 4, 11, 100, "pallas"])
def test_cross_entropy_and_its_gradients(how, biased):
  kind = {"implementation": how} if how == "pallas" else {"chunk": how}
  inputs = make_inputs(biased=biased)
  expected = check(inputs, **kind)
  assert 0 < expected["count"].sum() < inputs["weights"].size
  assert expected["correct"].sum() > 0
  check(inputs, **kind, z_loss=0.1)


def test_the_statistics_in_one_pass_as_on_a_gpu(monkeypatch):
  gpu = types.SimpleNamespace(platform="gpu")
  monkeypatch.setattr(head_chunks, "device", lambda: gpu)
  check(make_inputs(biased=True), chunk=4, z_loss=0.1)


@pytest.fixture
def small_blocks(monkeypatch):
  """Shrinks blocks, so that few targets and tokens are several blocks."""
  monkeypatch.setattr(head_tpu, "_LARGEST", 128)


SIZES = st.tuples(
  st.integers(1, 2),  # shards
  st.integers(1, 200),  # targets of a shard
  st.sampled_from((1, 8, 96, 136)),  # width
  st.integers(1, 300),  # tokens
)


@pytest.mark.slow
def test_the_kernel_and_its_gradients_are_exact(small_blocks):
  """Covers several blocks, and blocks that end beyond targets or tokens."""

  @hypothesis.settings(max_examples=8)
  @hypothesis.given(SIZES, st.booleans(), st.sampled_from((0.0, 0.3)))
  def check_one(sizes, biased, z_loss):
    inputs = make_inputs(*sizes, biased)
    check(inputs, implementation="pallas", z_loss=z_loss)

  check_one()


@pytest.mark.parametrize("how", ["pallas", "chunked"])
def test_bfloat16_is_rounded_in_products_alone(small_blocks, how):
  inputs = dict(make_inputs(1, 200, 64, 300))
  rounded = jnp.bfloat16(inputs["hidden"]), jnp.bfloat16(inputs["kernel"])
  inputs["hidden"], inputs["kernel"] = rounded[0], np.float32(rounded[1])
  found, grads = run(inputs, implementation=how)
  exact = {**inputs, "hidden": np.float32(rounded[0])}
  expected, of, _ = reference(**exact)
  for name, value in expected.items():  # float32 sums
    assert helpers.closest(found[name], value) < 1e-5, name
  # The products' weights and the result have bfloat16's 8 bits.
  assert helpers.closest(grads["hidden"], of["hidden"]) < 2**-8
  assert helpers.closest(grads["kernel"], of["kernel"]) < 2**-8


def test_scores_are_rounded_on_a_gpu_in_training_alone(monkeypatch):
  """Catches noise of bfloat16 in held-out losses."""
  gpu = types.SimpleNamespace(platform="gpu")
  monkeypatch.setattr(head_chunks, "device", lambda: gpu)
  inputs = dict(make_inputs(1, 200, 64, 300, biased=True))
  rounded = jnp.bfloat16(inputs["hidden"]), jnp.bfloat16(inputs["kernel"])
  inputs["hidden"], inputs["kernel"] = rounded[0], np.float32(rounded[1])
  expected, exact, _ = reference(**inputs | {"hidden": np.float32(rounded[0])})
  trained, grads = run(inputs)
  # A score's rounding is a relative error of its exponential.
  scores = np.float32(rounded[0]) @ inputs["kernel"] + inputs["bias"]
  for name in exact:
    limit = np.abs(scores).max() * 2**-9
    assert helpers.closest(grads[name], exact[name]) < limit, name
  head = Head(inputs["kernel"], inputs["bias"])
  places = [inputs[n] for n in ("targets", "weights", "objective_ids")]
  _, held_out = losses.cross_entropy(head, rounded[0], None, *places, KINDS)
  assert helpers.closest(held_out["nats"], expected["nats"]) < 1e-5
  assert 1e-5 < helpers.closest(trained["nats"], expected["nats"]) < 2**-8


def test_a_tied_bfloat16_head_runs_on_a_cpu():
  """Catches products that XLA compiles for a CPU and then cannot run."""
  inputs = make_inputs(1, 16, 64, 300)
  places = [inputs[n] for n in ("targets", "weights", "objective_ids")]

  def loss(embedding, states):
    head = Head(embedding.T, None)
    return losses.cross_entropy(head, states, None, *places, KINDS)[0]

  grad = jax.jit(jax.grad(loss))
  embedding, states = inputs["kernel"].T, inputs["hidden"]
  found = grad(embedding, jnp.bfloat16(states))
  assert helpers.closest(found, grad(embedding, states)) < 2**-6


@pytest.mark.parametrize("how", ["pallas", "chunked"])
def test_of_equal_scores_the_first_is_correct(small_blocks, how):
  """Accuracy as `score >= highest` would count every target."""
  inputs = dict(make_inputs(1, 6, 8, 300))
  inputs["hidden"] = np.zeros_like(inputs["hidden"])
  inputs["targets"] = np.int32([[0, 1, 127, 128, 0, 299]])
  inputs["weights"] = np.ones((1, 6), np.float32)
  found, _ = run(inputs, implementation=how)
  assert found["correct"].sum() == 2


@pytest.mark.parametrize("how", ["pallas", "chunked"])
def test_large_scores_do_not_overflow(small_blocks, how):
  inputs = dict(make_inputs(1, 40, 8, 300))
  inputs["kernel"] = 1000 * inputs["kernel"]
  check(inputs, implementation=how)


def test_each_state_is_transformed_with_its_place():
  inputs = make_inputs()
  hidden = inputs["hidden"]
  places = jnp.arange(hidden.shape[0] * hidden.shape[1])
  at = DropoutPlaces(jnp.uint32(0), places.reshape(hidden.shape[:2]))

  def transform(part, at):
    same = part == hidden.reshape(-1, hidden.shape[-1])[at.index]
    return jnp.where(same, part, jnp.nan)

  rest = (inputs[n] for n in ("targets", "weights", "objective_ids"))
  head = Head(inputs["kernel"], transform=transform)
  _, sums = losses.cross_entropy(head, hidden, at, *rest, KINDS, chunk=4)
  expected, *_ = reference(**inputs)
  assert helpers.closest(sums["loss"], expected["loss"]) < 1e-5


def test_the_choice_and_its_reasons():
  states = jax.ShapeDtypeStruct((1, 8, 64), jnp.float32)
  kernel = jax.ShapeDtypeStruct((64, 100), jnp.float32)
  assert losses.choose_head(states, kernel) == "chunked"  # on CPU
  assert losses.choose_head(states, kernel, 0, "pallas") == "pallas"
  with pytest.raises(ValueError, match="not one of auto, pallas, chunked"):
    losses.choose_head(states, kernel, 0, "triton")
  wide = jax.ShapeDtypeStruct((1, 8, 2**17), jnp.float32)
  kernel = jax.ShapeDtypeStruct((2**17, 100), jnp.float32)
  with pytest.raises(
    ValueError, match="'pallas' needs blocks in vector memory"
  ):
    losses.choose_head(wide, kernel, 0, "pallas")
