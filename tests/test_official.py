"""Our training compared with reimplementations of published code.

The reimplementations use float64 NumPy and none of our code.
"""

import dataclasses
import math

import jax
import numpy as np
import optax
import pytest

from antlm_jax import optim
from antlm_jax.data.order import Order, Stage
from antlm_jax.objectives.batch import BatchLayout
from tests import helpers, runs
from tests.helpers import FakeRows, source

MIX = "C:N=1:15"


# ------------------------------------------------- mixed batches of GPT-BERT


def one_step(batch, **changes):
  # With such a large step, the parameters' rounding is negligible.
  train_step = helpers.train_step(rate=1024.0, **changes)
  state = helpers.begin(train_step)
  after, metrics = jax.jit(train_step.update)(state, batch)
  both = state.params, after.params
  return jax.tree.map(lambda a, b: np.asarray(a - b), *both), metrics


def only(batch, objective: int):
  kept = batch.weights * (batch.objective_ids == objective)
  return dataclasses.replace(batch, weights=kept)


@pytest.mark.slow
def test_each_objective_weighs_as_its_part_of_the_rows():
  of = source(MIX, FakeRows(64), BatchLayout(32, 2), loss_average="objectives")
  batch = of[1]
  assert (batch.objective_ids[batch.weights > 0] == 0).sum() > 16  # causal
  moved, metrics = one_step(batch, loss_average="objectives")
  # Means over GPUs with one objective each: one causal, fifteen masked.
  ones = (batch.weights > 0).astype(np.float32)
  plain = dataclasses.replace(batch, weights=ones)
  (causal, c), (masked, m) = (one_step(only(plain, k)) for k in (0, 1))
  expected = jax.tree.map(lambda a, b: a / 16 + b * 15 / 16, causal, masked)
  assert helpers.closest(moved, expected) < 2e-6
  total = float(c["total_loss"]) / 16 + float(m["total_loss"]) * 15 / 16
  assert float(metrics["total_loss"]) == pytest.approx(total, rel=1e-6)
  shares = metrics["weight"] / metrics["weight"].sum()
  assert shares == pytest.approx([1 / 16, 15 / 16], rel=1e-6)


@pytest.mark.parametrize("average", ["targets", "objectives"])
def test_the_causal_part_is_a_sixteenth_from_start_to_end(average):
  ratios = {"mask_ratio": 0.3, "mask_ratio_end": 0.15}
  falling = {"N": dataclasses.replace(helpers.OBJECTIVES["N"], **ratios)}
  rows, how = FakeRows(64, 128, special=0.0), {"loss_average": average}
  of = source(MIX, rows, BatchLayout(64), falling, steps=40, **how)
  for step in (0, 20, 39):
    kept = [only(of[step], k).weights for k in (0, 1)]
    if average == "objectives":  # mean weights are the objectives' shares
      causal, masked = (w[w > 0].mean() for w in kept)
      assert causal / (causal + masked) == pytest.approx(1 / 16, rel=1e-6)
    else:  # .18 at the start, .31 at the end
      assert kept[0].sum() / (kept[0] + kept[1]).sum() > 0.17


def test_an_objective_that_small_batches_lack_has_its_part():
  """Catches a causal row that weighs a sixteenth of the few batches with it."""
  of = source(MIX, layout=BatchLayout(4), steps=16, loss_average="objectives")
  parts = []
  for step in range(16):
    kept = [only(of[step], k).weights for k in (0, 1)]
    causal, masked = (w.sum() / max(1, (w > 0).sum()) for w in kept)
    parts.append(causal / (causal + masked))
  assert np.mean(parts) == pytest.approx(1 / 16, rel=1e-6)


@pytest.mark.slow
def test_the_partition_is_drawn_to_one():
  rows, z = FakeRows(), 0.1
  batch = source("C", rows)[0]
  train_step = helpers.train_step(num_objectives=1)
  params = helpers.random_params(train_step.model)
  partition, at = helpers.target_scores(train_step.model, params, batch)
  loss = (partition - at + z * partition**2) * batch.weights[0, 0]
  _, metrics = one_step(batch, num_objectives=1, z_loss=z)
  expected = loss.sum() / batch.weights.sum()
  assert float(metrics["total_loss"]) == pytest.approx(expected, rel=1e-5)
  # The logged loss has no z-loss.
  nats = ((partition - at) * (batch.weights[0, 0] > 0)).sum()
  assert float(metrics["nats"][0]) == pytest.approx(nats, rel=1e-5)


# ---------------------------------------------- learning rate and batch size


def test_the_rate_falls_once_more_at_the_end():
  steps, warmup, cooldown, peak, floor = 1000, 16, 16, 0.5, 0.1
  how = {"warmup_steps": warmup, "cooldown_steps": cooldown}
  rate = optim.Cosine(peak_lr=peak, min_lr_ratio=floor, **how).build(steps)

  def official(step):
    if step < warmup:
      return peak * step / warmup
    if step >= steps - cooldown:
      return peak * floor * (steps - step) / cooldown
    progress = (step - warmup) / (steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (floor + (1 - floor) * cosine)

  # Our schedule is a step ahead, since it does not start at zero.
  for step in range(0, steps - cooldown - 1):
    assert float(rate(step)) == pytest.approx(official(step + 1), rel=2e-4)
  for step in range(steps - cooldown, steps):
    assert float(rate(step)) == pytest.approx(official(step), rel=1e-5)
  assert float(rate(steps + 5)) == 0


def test_batches_grow_linearly():
  parts = Stage(0.0, BatchLayout(512, 4)), Stage(0.7, BatchLayout(256, 4), 2)
  order = Order({"": 10_000}, parts, 800, growth=0.25, shuffle=False)
  taken = 0
  for step in range(800):
    whole, joined = (512, 1) if step < 560 else (256, 2)
    expected = whole / 4 * (1 - step / 800) + whole * step / 800
    assert abs(order.batch_size(step) - expected) <= 1
    if step < 560:  # rows without gaps
      assert order.slots(step).rows[0, 0] == taken % 10_000
      taken += order.batch_size(step)
    assert order.slots(step).rows.shape == (whole, joined)
  mean = 512 * (0.25 + 0.75 / 2)
  assert order.steps_per_epoch == pytest.approx(10_000 / mean, rel=1e-3)


@pytest.mark.slow
def test_a_step_of_a_growing_batch_is_that_of_its_rows():
  of = source("C", FakeRows(64), BatchLayout(32, 8), steps=10)
  order = dataclasses.replace(of.order, steps=10, growth=0.25)
  of = dataclasses.replace(of, order=order)
  batch = of[4]
  filled = order.batch_size(4)
  assert filled == round(32 * (0.25 + 0.75 * 0.45)) and filled % 4
  rows = batch.weights.reshape(8, -1).any(axis=1)
  assert rows.tolist() == [i * 4 < filled for i in range(8)]
  moved, metrics = one_step(batch, num_objectives=1, growing=True)
  alone = source("C", FakeRows(64), BatchLayout(filled), steps=10)
  plain = dataclasses.replace(alone.order, shuffle=False)
  fewer = dataclasses.replace(alone, order=plain)
  fewer.rows.tokens = of.rows.tokens[order.slots(4).rows[:filled, 0]]
  expected, other = one_step(fewer[0], num_objectives=1)
  assert helpers.closest(moved, expected) < 2e-6
  assert float(metrics["count"][0]) == float(other["count"][0])


def test_growing_batches_need_epochs_that_carry_on():
  assert "batch_start need data.rounding=carry" in runs.told(
    Order,
    {"": 100},
    (Stage(0.0, BatchLayout(8)),),
    10,
    growth=0.5,
    rounding="up",
  )


# ------------------------------------------------------------------------ LAMB


def published(params):
  """Returns the tensors of GPT-BERT's code as `{name: [(path, index)]}`."""
  out = {}
  for path, value in params.items():
    if not path.startswith("blocks/"):
      if path == "depth_weights":
        ends = np.cumsum(range(2, 2 + value.shape[0]))
        starts = [0, *ends[ends < value.shape[0]]]
        for i, (a, n) in enumerate(zip(starts, range(2, 99), strict=False)):
          out[f"alpha {i}"] = [(path, slice(a, a + n))]
      else:
        out[path] = [(path, ...)]
      continue
    for layer in range(len(value)):
      name = path
      for fused in (("q", "k"), ("v", "gate"), ("up", "gate")):
        inside = "mlp" if "up" in fused else "attention"
        for part in fused:
          name = name.replace(f"{inside}/{part}/", f"{inside}/{fused}/")
      out.setdefault(f"{name} {layer}", []).append((path, layer))
  return out


def decays(path) -> bool:
  return not any(word in path for word in ("bias", "norm"))


def test_lamb_moves_the_published_tensors():
  model = helpers.ltg_bert(attention_gate=True, depth_weights=True)
  lamb = optim.Lamb(b1=0.9, b2=0.98, clip=0.0, eps=1e-8, weight_decay=0.1)
  optimizer = lamb.build(model.axes, model.tensors)
  params = helpers.random_params(model)
  expected = {k: np.asarray(v, np.float64) for k, v in params.items()}
  m = {k: 0 * v for k, v in expected.items()}
  v = {k: 0 * v for k, v in expected.items()}
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  draw, rate = np.random.default_rng(0), 0.01
  tensors = published(params)
  assert len([t for t in tensors if t.startswith("alpha")]) == 4  # 2 layers
  for t in range(1, 21):
    grads = {k: draw.normal(size=p.shape) for k, p in expected.items()}
    single = {k: g.astype(np.float32) for k, g in grads.items()}
    moved, state = update(single, state, params)
    moved = jax.tree.map(lambda u: -rate * u, moved)
    params = optax.apply_updates(params, moved)
    step = {}
    for k, g in grads.items():
      m[k] = 0.9 * m[k] + 0.1 * g
      v[k] = 0.98 * v[k] + 0.02 * g**2
      second = np.sqrt(v[k] / (1 - 0.98**t)) + 1e-8
      step[k] = m[k] / (1 - 0.9**t) / second + 0.1 * decays(k) * expected[k]
    ratios = {k: np.ones_like(p) for k, p in expected.items()}
    for parts in tensors.values():
      if decays(parts[0][0]):
        w, u = (
          math.sqrt(sum((x[k][i] ** 2).sum() for k, i in parts))
          for x in (expected, step)
        )
        for k, i in parts:
          ratios[k][i] = w / u
    expected = {k: p - rate * ratios[k] * step[k] for k, p in expected.items()}
  assert max(helpers.closest(params[k], expected[k]) for k in params) < 1e-5


# ------------------------------------------------------------------------ rows


@pytest.mark.parametrize("after", [None, 2])
def test_every_row_is_framed_and_documents_are_apart(after):
  rows, before = FakeRows(24, 16), 1
  draw = np.random.default_rng(0)
  rows.tokens = draw.integers(10, 60, (24, 16)).astype(np.int32)
  rows.tokens[draw.random((24, 16)) < 0.1] = before
  of = source("N", rows, BatchLayout(24), steps=1, frame=(before, after))
  found, plain = of[0], dataclasses.replace(of, frame=None)[0]
  assert (plain.targets != found.targets).any()
  there = rows.tokens[of.order.slots(0).rows[:, 0]]
  bare = dataclasses.replace(helpers.OBJECTIVES["C"], name="bare")
  shown = source(
    "C", rows, BatchLayout(24), {"C": bare}, 1, frame=(before, after)
  )
  visible = shown[0].mask.k_start[0]
  inputs = shown[0].inputs[0]
  for row, text, k_start in zip(inputs, there, visible, strict=True):
    expected = text.tolist() if text[0] == before else [before, *text][:16]
    if after is not None:
      expected[-1] = after
    assert row.tolist() == expected
    # A token sees back to the start of its document.
    begins = [i for i, token in enumerate(expected) if token == before]
    last = [max(b for b in begins if b <= i) for i in range(16)]
    assert k_start.tolist() == last


def test_a_streams_rows_are_cut_elsewhere_at_every_visit():
  rows = FakeRows(24, 16)
  rows.tokens = np.arange(24 * 16, dtype=np.int32).reshape(24, 16)
  of = source("C", rows, BatchLayout(24), steps=3, random_offset=True)
  firsts = []
  for step in range(3):
    inputs, numbers = of[step].inputs[0], of.order.slots(step).rows[:, 0]
    assert (np.diff(inputs, axis=1) == 1).all()  # one stream, no seam
    offsets = inputs[:, 0] - numbers * 16
    assert (offsets[numbers == 23] == 0).all()  # no text after the last row
    assert offsets.min() >= 0 and offsets.max() < 16
    firsts.append(tuple(offsets[np.argsort(numbers)]))
  assert len(set(firsts)) == 3 and np.ptp(firsts) > 8
