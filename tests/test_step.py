"""The train step, meshes, optimizers and schedules."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from antlm_jax import mesh as mesh_lib
from antlm_jax import optim, private, settings
from antlm_jax.objectives.batch import BatchLayout
from antlm_jax.training.step import jitted, state_shardings
from tests import helpers, runs
from tests.helpers import FakeRows, source

# The train step


@functools.cache
def after_one_step(microbatches):
  of = source("C:M=1:3", FakeRows(packed=True), BatchLayout(16, microbatches))
  train_step = helpers.train_step(rate=1.0)
  update = jax.jit(train_step.update)
  return of[1], *update(helpers.begin(train_step), of[1])


@pytest.mark.slow
def test_microbatches_change_nothing():
  _, state, metrics = after_one_step(1)
  example, other, again = after_one_step(4)
  counts = (example.weights > 0).sum(axis=(1, 2))
  assert len(set(counts.tolist())) > 1  # else early division would pass
  assert helpers.closest(other.params, state.params) < 1e-6
  assert metrics.keys() == again.keys()
  for name in metrics:
    assert helpers.closest(again[name], metrics[name]) < 2e-6


def test_metrics_are_those_of_the_batch_and_of_an_evaluation():
  example, state, metrics = after_one_step(1)
  real = example.weights > 0
  counts = np.bincount(example.objective_ids[real], minlength=2)
  assert metrics["count"].tolist() == metrics["weight"].tolist() == [*counts]
  total = metrics["loss"].sum() / metrics["weight"].sum()
  assert float(metrics["total_loss"]) == pytest.approx(float(total), rel=1e-6)
  assert int(state.step) == 1
  other = helpers.train_step(loss_chunk=7)
  before = helpers.random_params(other.model)
  for name, value in jax.jit(other.evaluate)(before, example).items():
    assert helpers.closest(value, metrics[name]) < 1e-5
  # With plain SGD at rate 1, the parameters move by the gradient.
  moved = jax.tree.map(lambda a, b: np.sum((a - b) ** 2), before, state.params)
  norm = math.sqrt(sum(moved.values()))
  assert norm == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)


def test_a_batch_without_targets_leaves_the_parameters():
  of = dataclasses.replace(source("M"), held_out=0)
  train_step = helpers.train_step()
  state = helpers.begin(train_step)
  after, metrics = jax.jit(train_step.update)(state, of[0])
  assert helpers.equal(after.params, state.params)
  assert float(metrics["total_loss"]) == 0


@pytest.mark.slow
def test_dropout_is_on_in_training_by_step_and_off_in_evaluation():
  of = source("C")
  model = helpers.model(layers=1, dropout=0.3)
  train_step = helpers.train_step(model, num_objectives=1, rate=0.0)
  step, state = jax.jit(train_step.update), helpers.begin(train_step)
  next_state, first = step(state, of[0])
  again, second = step(state, of[0])[1], step(next_state, of[0])[1]
  assert float(first["total_loss"]) == float(again["total_loss"])
  assert float(first["total_loss"]) != float(second["total_loss"])
  plain = helpers.train_step(num_objectives=1)
  a = jax.jit(train_step.evaluate)(state.params, of[0])
  b = jax.jit(plain.evaluate)(state.params, of[0])
  assert helpers.closest(a, b) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("average", ["ema", "tail"])
def test_the_average_follows_the_parameters(average):
  of = source("C")
  # The tail average covers a fifth of twelve steps: the last two.
  decay = optim.AdamW(average=average, ema=0.9).averaging(12)
  train_step = helpers.train_step(
    num_objectives=1, rate=0.5, average_decay=decay
  )
  state = jax.jit(train_step.init)()
  assert helpers.equal(state.ema, state.params)
  expected = {k: np.asarray(v, np.float64) for k, v in state.params.items()}
  step = jax.jit(train_step.update)
  for s in range(12):
    state, _ = step(state, of[s % 3])
    kept = 0.9 if average == "ema" else {11: 0.5}.get(s, 0.0)
    expected = {
      k: kept * v + (1 - kept) * np.asarray(state.params[k], np.float64)
      for k, v in expected.items()
    }
  assert helpers.closest(state.ema, expected) < 1e-6
  assert helpers.closest(state.ema, state.params) > 1e-4
  assert state.eval_params is state.ema
  without = jax.eval_shape(helpers.train_step(num_objectives=1).init)
  assert without.ema is None and without.eval_params is without.params


@pytest.mark.sample(1)
@pytest.mark.parametrize("text, share", [("C", 0.5), ("M", 0.85)])
def test_the_loss_of_an_easy_task_falls_to_a_fraction(text, share):
  of = source(text, helpers.CountingRows(), steps=60)
  adam = optax.scale_by_adam()
  train_step = helpers.train_step(num_objectives=1, rate=1e-2, optimizer=adam)
  step, state = jax.jit(train_step.update), jax.jit(train_step.init)()
  found = []
  for s in range(60):
    state, metrics = step(state, of[s])
    found.append(float(metrics["total_loss"]))
  assert found[0] == pytest.approx(math.log(helpers.VOCAB), rel=0.1)
  # Without context, the loss would be the entropy of 60 tokens.
  assert np.mean(found[-5:]) < share * math.log(60)


@pytest.mark.slow
@pytest.mark.parametrize(
  "attention", ["reference", pytest.param("pallas", marks=pytest.mark.nightly)]
)
def test_a_program_for_each_mask_and_no_more(attention):
  words = dataclasses.replace(helpers.OBJECTIVES["M"], unit="word")
  rows = FakeRows(24, 256, special=0)
  rows.tokens |= 1  # odd tokens only: a row is one word, hidden or not
  of = source(
    "3*(C+M)+C:M=1:1+E+C",
    rows,
    BatchLayout(2),
    objectives={"M": words},
    steps=36,
  )
  model = helpers.model(
    layers=1, width=8, mlp_width=8, max_seq_len=256, attention=attention
  )
  train_step = helpers.train_step(model, num_objectives=3)
  mesh = mesh_lib.Mesh().build()
  programs = set()
  with jax.set_mesh(mesh):
    shardings = state_shardings(train_step, mesh)
    init, step, _ = jitted(train_step, shardings)
    state = init()
    for s in range(36):
      example = of[s]
      bounds = example.mask.k_start is None, example.mask.k_end is None
      programs.add((example.mask.causal, bounds, example.targets.shape))
      state, _ = step(state, mesh_lib.place_batch(mesh, example))
  assert private.compiled_programs(step) == len(programs)
  assert len(programs) == 3  # causal, mixed, bidirectional


# Meshes


def on_two_devices(encoder):
  """Returns results of training by mesh axis, on two devices."""

  def run(axis, make=helpers.model, optimizer="adamw", head="auto", **changes):
    model = make(layers=1, attention_dropout=0.2, **changes)
    shape = {} if axis == "one" else {axis: 2}
    return helpers.trained(model, optimizer, head, **shape)

  if encoder == "llama by muon":
    return {a: run(a, optimizer="muon") for a in ("one", "fsdp", "tensor")}

  if encoder == "ltg_bert":  # its head has dropout, too
    axes, changes = ("one", "data", "tensor"), {"make": helpers.ltg_bert}
    found = {axis: run(axis, dropout=0.1, **changes) for axis in axes}
    found["tensor fused"] = run("tensor", head="pallas", dropout=0.1, **changes)
    return found
  if encoder == "llama by kernels":
    found = {"one": run("one")}
    found["data kernel"] = run("data", attention="pallas")
    for axis in ("one", "data", "tensor"):
      found[f"{axis} fused"] = run(axis, head="pallas")
    return found

  found = {axis: run(axis) for axis in ("one", "data", "fsdp", "tensor")}
  found["tensor kernel"] = run("tensor", attention="pallas")
  found["fsdp fused"] = run("fsdp", head="pallas")
  return found


@pytest.mark.slow
@pytest.mark.parametrize(
  "encoder",
  [
    "llama",
    pytest.param("llama by muon", marks=pytest.mark.nightly),
    pytest.param("llama by kernels", marks=pytest.mark.nightly),
    pytest.param("ltg_bert", marks=pytest.mark.nightly),
  ],
)
def test_two_devices_train_as_one_and_hold_their_shares(encoder):
  code = "import json; from tests import test_step as it\n"
  code += f"print(json.dumps(it.on_two_devices({encoder!r})))"
  found = json.loads(runs.run_code(code, devices=2))
  one = found.pop("one")
  assert one["losses"][0] != one["losses"][-1]
  for axis, other in found.items():
    axis = axis.split()[0]
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-5), axis
    assert other["first"] == pytest.approx(one["first"], rel=1e-6), axis
    assert other["follows"]
    for name, part in other["parts"].items():
      whole_there = (
        "norm" in name
        or "bias" in name
        or (axis == "tensor" and name in ("relative", "head/linear/kernel"))
      )
      whole_there |= axis in ("one", "data")
      assert part == (1 if whole_there else 2), (axis, name)
  if "fsdp" in found:
    assert found["fsdp"]["split"]["blocks/mlp/up/kernel"] == [1, 16, 48]
  if "tensor" in found:
    assert found["tensor"]["split"]["blocks/mlp/up/kernel"] == [1, 32, 24]
    assert found["tensor"]["split"]["embedding"] == [32, 32]


@pytest.mark.parametrize(
  "shape", [(2, 1, 1), (0, 1, 1), (-1, -1, 1), (-1, 2, 1)]
)
def test_a_mesh_that_does_not_fit_is_refused(shape):
  runs.refusal(
    f"mesh .data={shape[0]}, fsdp=",
    lambda: mesh_lib.Mesh(*shape).build(jax.devices()[:1]),
  )


def test_a_dimension_that_does_not_divide_takes_the_next_axis_or_none():
  mesh = jax.sharding.AbstractMesh((1, 2, 4), mesh_lib.MESH_AXES)
  spec = functools.partial(mesh_lib.spec, mesh)
  P = jax.sharding.PartitionSpec
  assert spec(("vocab", "embed"), (64, 32)) == P("tensor", "fsdp")
  assert spec(("vocab", "embed"), (66, 32)) == P("fsdp", None)
  assert spec(("vocab", "embed"), (61, 33)) == P(None, None)
  assert spec((None, "mlp"), (8, 8)) == P(None, "tensor")
  assert spec(("batch", "seq"), (4, 8)) == P(("data", "fsdp"), None)


# Optimizers

AXES = {
  "embedding": ("vocab", "embed"),
  "blocks/up": (None, "embed", "mlp"),
  "norm": ("norm",),
}
SCOPES = {
  "all": {"embedding", "blocks/up", "norm"},
  "matrices": {"embedding", "blocks/up"},
  "hidden": {"blocks/up"},
}


def trees(count):
  draw = np.random.default_rng(0)
  shapes = {"embedding": (5, 4), "blocks/up": (2, 4, 3), "norm": (4,)}
  return [
    {name: draw.normal(size=shape) for name, shape in shapes.items()}
    for _ in range(count)
  ]


def single(tree):
  return {name: jnp.asarray(value, jnp.float32) for name, value in tree.items()}


def optimizer_of(axes, **changes):
  return settings.build(optim.OPTIMIZERS, {"name": "adamw", **changes}).build(
    axes
  )


@pytest.mark.sample(5)
@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
@pytest.mark.parametrize("scope", SCOPES)
def test_adamw_is_adamw(scope, clip):
  b1, b2, eps, decay, rate = 0.8, 0.95, 1e-3, 0.1, 0.05
  changes = {"b1": b1, "b2": b2, "eps": eps, "clip": clip}
  changes |= {"weight_decay": decay, "decay_scope": scope}
  optimizer = optimizer_of(AXES, **changes)
  start, *grads = trees(6)
  params = single(start)
  state = optimizer.init(params)
  expected = dict(start)
  m, v = ({n: 0.0 for n in start} for _ in range(2))
  for t, grad in enumerate(grads, 1):
    updates, state = optimizer.update(single(grad), state, params)
    params = jax.tree.map(lambda p, u: p - rate * u, params, updates)
    norm = math.sqrt(sum((g**2).sum() for g in grad.values()))
    scale = min(1.0, clip / norm) if clip else 1.0
    for name, g in grad.items():
      g = g * scale
      m[name] = b1 * m[name] + (1 - b1) * g
      v[name] = b2 * v[name] + (1 - b2) * g**2
      step = m[name] / (1 - b1**t) / (np.sqrt(v[name] / (1 - b2**t)) + eps)
      if name in SCOPES[scope]:
        step = step + decay * expected[name]
      expected[name] = expected[name] - rate * step
  assert helpers.closest(params, expected) < 1e-5


@pytest.mark.sample(1)
@pytest.mark.parametrize("encoder", ["llama", "ultrabert"])
def test_muon_moves_hidden_matrices_in_all_directions_alike(encoder):
  """Catches Muon for the matrices in UltraBERT's output layer."""
  model = helpers.model(name=encoder, layers=2, tied=False)
  settings = {"momentum": 0.9, "adam_rate": 0.3, "clip": 0.0}
  optimizer = optimizer_of(model.axes, name="muon", **settings)
  adam = optimizer_of(model.axes, clip=0.0, weight_decay=0.0)
  params = helpers.random_params(model, 1)
  grads = [helpers.random_params(model, seed) for seed in (2, 3)]
  state, others = optimizer.init(params), adam.init(params)
  by_muon, by_adam = jax.jit(optimizer.update), jax.jit(adam.update)
  for grad in grads:
    updates, state = by_muon(grad, state, params)
    expected, others = by_adam(grad, others, params)
  for path, update in updates.items():
    update = np.asarray(update, np.float64)
    if optim.AdamW().decays(model.axes)[path]:
      update -= 0.1 * np.asarray(params[path], np.float64)
    if not path.startswith("blocks/") or "norm" in path:
      assert helpers.closest(update, 0.3 * expected[path]) < 1e-6, path
      continue
    # Nesterov's momentum of two gradients as in Keller Jordan's code, but with
    # bias correction, has the same singular vectors.
    first, last = (np.asarray(grad[path], np.float64) for grad in grads)
    moment = 0.9 * (0.09 * first + 0.1 * last) / (1 - 0.9**3)
    moment += 0.1 * last / (1 - 0.9**2)
    u, _, v = np.linalg.svd(moment, full_matrices=False)
    scale = 0.2 * max(update.shape[-2:]) ** 0.5
    along = np.einsum("lir,lio,lro->lr", u, update / scale, v)
    # After five iterations, the smallest singular values are below 1.
    assert np.quantile(along, 0.1) > 0.6 and along.max() < 1.3, path
    assert np.linalg.norm(update / scale) ** 2 == pytest.approx(
      (along**2).sum(), rel=1e-3
    ), path


def test_resetting_forgets_the_moments_and_nothing_else():
  model = helpers.model(layers=1)
  adam = optimizer_of(model.axes)
  train_step = helpers.train_step(model, optimizer=adam, num_objectives=1)
  of = source("C")
  state, _ = jax.jit(train_step.update)(helpers.begin(train_step), of[0])
  reset = train_step.reset_optimizer(state)
  assert helpers.equal(reset.opt_state, adam.init(state.params))
  assert not helpers.equal(reset.opt_state, state.opt_state)
  assert helpers.equal(reset.params, state.params) and int(reset.step) == 1


# Schedules


def rates(steps, restarts=(), **changes):
  changes = {"name": "wsd", "peak_lr": 2.0, "warmup_steps": 10} | changes
  decay = {"decay_steps": changes.pop("decay_steps", 20)}
  changes |= decay if changes["name"] == "wsd" else {}
  made = settings.build(optim.SCHEDULES, changes).build(steps, restarts)
  return np.asarray(jax.vmap(made)(jnp.arange(steps)))


DECAYS = {
  "linear": lambda t: 1 - t,
  "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
  "1-sqrt": lambda t: 1 - math.sqrt(t),
}


@pytest.mark.parametrize("floor", [0.0, 0.25])
@pytest.mark.parametrize("decay", DECAYS)
def test_wsd_warms_up_stays_and_decays(decay, floor):
  found = rates(100, decay=decay, min_lr_ratio=floor)
  expected = [2.0 * (s + 1) / 10 for s in range(10)] + [2.0] * 70
  for s in range(20):
    down = DECAYS[decay]((s + 1) / 20)
    expected.append(2.0 * (floor + (1 - floor) * down))
  assert found == pytest.approx(np.array(expected), abs=2e-6)
  assert found.min() >= 0


@pytest.mark.parametrize("name", ["wsd", "cosine"])
def test_shares_are_of_the_run_and_may_be_nothing(name):
  constant = rates(50, warmup_steps=0, decay_steps=0)
  assert (constant == 2.0).all()
  by_share = rates(200, name=name, warmup_steps=0.05, decay_steps=0.2)
  by_step = rates(200, name=name, warmup_steps=10, decay_steps=40)
  assert np.array_equal(by_share, by_step)


@pytest.mark.parametrize("name", ["wsd", "cosine"])
def test_restarts_begin_the_schedule_anew(name):
  changes = {"name": name, "warmup_steps": 0.1, "decay_steps": 0.5}
  found = rates(100, (40, 60), **changes)
  parts = [rates(steps, **changes) for steps in (40, 20, 40)]
  assert found == pytest.approx(np.concatenate(parts), abs=2e-6)
  assert found[[0, 40, 60]] == pytest.approx([0.5, 1.0, 0.5])
  assert found[[39, 59, 99]] == pytest.approx(0, abs=1e-6)


def test_after_the_end_the_rate_stays_at_the_floor():
  made = optim.WSD(peak_lr=1.0, min_lr_ratio=0.3).build(50)
  assert float(made(jnp.int32(80))) == pytest.approx(0.3)


@pytest.mark.parametrize("decay", [0, 20])
def test_wsd_decays_before_its_cooldown(decay):
  """Catches a cooldown that replaces the decay, so that the rate jumps."""
  how = {"min_lr_ratio": 0.25, "cooldown_steps": 10, "decay_steps": decay}
  found, floor = rates(100, **how), 0.25 if decay else 1.0
  down = [1 - (1 - floor) * (s + 1) / 20 for s in range(decay)]
  cool = [floor * (1 - s / 10) for s in range(10)]
  stays = [1.0] * (80 - decay)
  expected = 2.0 * np.array([*stays, *down, *cool])
  assert found[10:] == pytest.approx(expected, abs=2e-6)


def test_a_schedule_that_does_not_fit_is_refused():
  runs.refusal(
    r"cooldown_steps \(75\).* do not fit",
    rates,
    100,
    cooldown_steps=75,
    min_lr_ratio=0.1,
  )
  runs.refusal(r"is zero: set min_lr_ratio", rates, 100, cooldown_steps=5)
  cosine = optim.Cosine(warmup_steps=60, cooldown_steps=50, min_lr_ratio=0.1)
  wanted = r"warmup_steps \(60\) \+ schedule.cooldown_steps \(50\) do not fit"
  runs.refusal(wanted, cosine.build, 100)
  runs.refusal(r"schedule.warmup_steps \(90\)", rates, 100, warmup_steps=90)
  runs.refusal(
    r"schedule\.warmup_steps", rates, 100, name="cosine", warmup_steps=101
  )
