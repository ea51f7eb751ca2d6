"""Trainings with equal first steps: how many, and which run shares which."""

import hypothesis
import numpy as np
import pytest
from flax import traverse_util
from hypothesis import strategies as st

from antlm_jax import config as config_lib
from antlm_jax.evals.studies import branches, study
from tests import runs

CONFIGS = runs.ROOT / "configs"


def make(text, ratio=0.15, warmup=0, decay=0, **settings):
  """Returns a config of phases with WSD, with more settings by key."""
  out = config_lib.changes()
  out.curriculum = text
  out.objectives.M.mask_ratio = ratio
  out.schedule.warmup_steps = warmup
  if "schedule.name" not in settings:
    out.schedule.decay_steps = decay
  out.update(traverse_util.unflatten_dict(settings, sep="."))
  return config_lib.load_config(out)


@st.composite
def runs_of(draw):
  """Draws a run's phases (objective, steps), mask ratio, warm-up and decay."""
  phase = st.tuples(st.sampled_from("CM"), st.integers(1, 9))
  phases = draw(st.lists(phase, min_size=1, max_size=3))
  total = sum(steps for _, steps in phases)
  warmup = draw(st.integers(0, min(4, total)))
  decay = draw(st.integers(0, min(8, total - warmup)))
  return phases, draw(st.sampled_from((0.15, 0.4))), warmup, decay


def config(run):
  phases, *settings = run
  text = "+".join(f"{steps}{name}" for name, steps in phases)
  return make(f"{text} steps", *settings)


def by_step(run):
  """Returns (objective, ratio, rate) of each step, by WSD's definition."""
  phases, ratio, warmup, decay = run
  names = [name for name, steps in phases for _ in range(steps)]
  done = np.arange(len(names)) + 1
  up = done / max(warmup, 1)
  down = (len(names) - done) / max(decay, 1)
  rates = np.minimum(1, np.where(done <= warmup, up, down if decay else 1))
  ratios = [ratio if name == "M" else None for name in names]
  return list(zip(names, ratios, rates.round(9), strict=True))


def in_common(one, other):
  steps = [by_step(run) for run in (one, other)]
  least = min(map(len, steps)) - 1
  return next((i for i in range(least) if steps[0][i] != steps[1][i]), least)


PROPERTY = hypothesis.settings(max_examples=60, deadline=None)


@hypothesis.given(runs_of(), runs_of())
@PROPERTY
def test_two_runs_share_their_first_steps_that_are_alike(one, other):
  a, b = config(one), config(other)
  assert branches.shared_steps(a, b) == in_common(one, other)
  assert branches.shared_steps(b, a) == in_common(one, other)


@hypothesis.given(st.lists(runs_of(), min_size=1, max_size=5))
@PROPERTY
def test_a_plan_spares_all_that_was_trained_before(those):
  configs = {f"run{i}": config(run) for i, run in enumerate(those)}
  before, spared = {}, 0
  found = branches.plan_branches(configs)
  assert list(found) == list(configs)
  for (name, branch), run in zip(found.items(), those, strict=True):
    most = max((in_common(other, run) for other in before.values()), default=0)
    assert (branch.step if branch else 0) == most
    if branch:
      assert branch.step <= in_common(before[branch.trunk], run)
      # The trunk has a checkpoint there only if it trained up to it.
      beginning = found[branch.trunk]
      assert branch.step > (beginning.step if beginning else 0)
    before[name] = run
    spared += most
  assert spared < sum(len(by_step(run)) for run in those)


# Settings of every kind, with and without an influence on training.
@pytest.mark.parametrize(
  "changes, steps",
  [
    ({"model.width": 384}, 0),
    ({"seed": 1}, 0),
    ({"data.short": 0.1}, 0),
    ({"optimizer.b1": 0.8}, 0),
    ({"train.batch_size": 64}, 0),
    ({"init.optimizer": "reset"}, 0),
    # These compute the same with other rounding.
    ({"mesh.fsdp": 2}, 0),
    ({"model.attention": "reference"}, 0),
    ({"data.path": "elsewhere"}, 11),
    ({"data.threads": 7}, 11),
    ({"eval.every": 3.0}, 11),
    ({"checkpoint.at": (3, 5)}, 11),
    ({"log.every": 7}, 11),
    ({"objectives.C.weight": 2.0}, 0),
    ({"objectives.M.weight": 2.0}, 9),
    ({"objectives.N.weight": 2.0}, 11),
  ],
)
def test_settings_that_differ_end_what_is_shared(changes, steps):
  one, other = make("9C+3M steps"), make("9C+8M steps", **changes)
  assert branches.shared_steps(one, other) == steps


@pytest.mark.parametrize("trunk, row", [(400, 100), (100, 110)])
def test_a_branch_averages_what_its_own_run_averages(trunk, row):
  """Catches an average that begins at the end of the trunk's length."""
  how = {"optimizer.average": "tail", "schedule.decay_steps": 0}
  configs = {n: make(f"{n}C steps", **how) for n in (trunk, row)}
  branch = branches.plan_branches(configs)[row]
  weights = {}
  for name, length in ((trunk, trunk), (row, row)):
    decays = configs[name].optimizer.averaging(length)(np.arange(row))
    weights[name] = np.asarray(decays)
  both = [*weights[trunk][: branch.step], *weights[row][branch.step :]]
  np.testing.assert_array_equal(both, weights[row])


@pytest.mark.parametrize(
  "one, other, steps",
  [
    ("9C:M", "9C:M+3C", 9),
    ("9C:M=1:3", "9C:M=3:1", 0),
    ("9C:M", "9M:C", 0),  # other rows of a batch
    ("4C+9C:M", "4C+9C:M+1C", 13),
    ("4C+9C:M", "3C:M+9C", 0),
    # Rows are dealt from the start of the phase.
    ("4C:M+9C:M", "13C:M", 4),
    ("2C+7C", "9C+3M", 8),
    ("9M", "9M", 8),
    ("1C", "1C", 0),
  ],
)
def test_mixed_batches_are_alike_by_order_and_start(one, other, steps):
  a, b = make(f"{one} steps"), make(f"{other} steps")
  least = min(branches.steps_of(x).steps for x in (a, b)) - 1
  assert (
    branches.shared_steps(a, b)
    == branches.shared_steps(b, a)
    == min(steps, least)
  )


@pytest.mark.parametrize(
  "changes",
  [
    {"objectives.C.mask_ratio_end": 0.5},
    {"train.batch_start": 0.5},
    {"train.batch_schedule": ("4x64@0.5",)},
    {"schedule.warmup_steps": 0.2},  # a share of the run
    {"schedule.name": "cosine"},
  ],
)
def test_what_goes_by_the_runs_length_is_alike_at_one_length(changes):
  one, other = make("9C+3M steps", **changes), make("9C+9M steps", **changes)
  assert branches.shared_steps(one, other) == 0
  other = config_lib.load_config(other, {"curriculum": "6C+6M steps"})
  assert branches.shared_steps(one, other) == 6


@pytest.mark.parametrize(
  "text, epochs",
  [("24C", 0.0), ("4C+16M+4C", 0.0), ("C+M", 2.0), ("25%C+75%M", 2.0)],
)
def test_epochs_share_nothing(text, epochs):
  settings = {"train.epochs": epochs}
  found = make(text, **settings)
  assert branches.steps_of(found) is None
  assert branches.shared_steps(found, found) == 0
  assert branches.shared_steps(found, make("9C steps", **settings)) == 0


def test_shares_of_so_many_steps_are_steps():
  one, other = (make(x, **{"train.steps": 8}) for x in ("C+M", "25%C+75%M"))
  assert branches.shared_steps(one, other) == 2


def test_a_restart_at_a_switch_is_in_the_rates():
  again = {"decay": 2, "schedule.restart_at_switch": True}
  # The first one's rate falls before its switch, the second one's does not.
  one, other = make("6C+6M steps", **again), make("9C+6M steps", **again)
  assert branches.shared_steps(one, other) == 4


def read(name, scale):
  return study.read_study(str(CONFIGS / "studies" / name), scale)


def test_the_papers_models_share_what_they_do():
  found = read("clm_or_mlm.py", "paper")
  steps = {n: branches.steps_of(found.configs[n]).steps for n in found.rows}
  spared = {n: b.step for n, b in found.plan.items() if b}
  assert len(steps) == 38 and sum(map(found.seeds, found.rows)) == 38
  assert sum(steps.values()) == 1_166_000
  assert sum(spared.values()) == 354_000
  # Section 3.2 of the paper: each budget adds a decay.
  assert found.plan["610m_mlm40_12"] == ("610m_mlm40_42", 10_000)
  assert found.plan["610m_clm40_mlm20_42"] == ("610m_clm_42", 40_000)


def test_the_table_in_epochs_shares_nothing():
  assert not any(read("antlm_table.py", "small").plan.values())
