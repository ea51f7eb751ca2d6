"""Several runs in one process equal single runs, in steps and in files."""

import dataclasses
import functools
import shlex
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from antlm_jax import mesh as mesh_lib
from antlm_jax import private
from antlm_jax.errors import UserError
from antlm_jax.evals.studies import sweep
from antlm_jax.optim import AdamW
from antlm_jax.training import loop, metrics, together
from tests import helpers, runs

STEPS = 4


@pytest.mark.slow
def test_runs_share_programs_with_their_own_seeds_and_rates():
  """Catches a run that compiles anew, or has another run's seed or rate."""
  model = helpers.model(layers=1, dropout=0.2)
  own = helpers.train_step(model, optimizer=AdamW().build(model.axes))
  steps = [
    dataclasses.replace(
      own, seed=seed, schedule=lambda step, rate=rate: jnp.float32(rate) / step
    )
    for seed, rate in ((3, 1e-2), (2**32 - 1, 1e-1))
  ]
  sources = [helpers.source("C:M=1:1", seed=seed) for seed in (0, 1)]
  mesh = mesh_lib.Mesh().build(jax.devices()[:1])
  programs = together.shared_programs(steps, mesh)
  both = []
  for source, own in zip(sources, programs, strict=True):
    found = []
    with jax.set_mesh(mesh):
      state = own.init()
      for number in range(STEPS):
        batch = mesh_lib.place_batch(mesh, source[number])
        state, results = own.update(state, batch)
        found.append(jax.device_get((state.params, results)))
    both.append(found)
  assert private.compiled_programs(programs[1].update) == 1
  for step, source, found in zip(steps, sources, both, strict=True):
    state, update = jax.jit(step.init)(), jax.jit(step.update)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6)
    for number, taken in enumerate(found):
      state, results = update(state, source[number])
      jax.tree.map(close, taken, (state.params, results))


@pytest.mark.parametrize(
  "grid, expected",
  [
    ("schedule.peak_lr=1e-3,3e-3;seed=1,2", [3, 1]),
    ("model.width=64,128;seed=1,2", [2, 2]),
  ],
)
def test_runs_that_differ_in_seed_and_schedule_share_a_process(
  grid, expected, tmp_path, capsys
):
  words = f"--grid={grid}", f"--output={tmp_path}", "--together=3", "--commands"
  sweep.main([*words, "--", "--config=quickstart"])
  counts = []
  for line in capsys.readouterr().out.splitlines():
    words = shlex.split(line)
    module = "antlm_jax.evals.studies.together"
    is_joined = module in words
    counts.append(len(words) - words.index(module) - 1 if is_joined else 1)
    assert line.count("--workdir=") == counts[-1]
  assert counts == expected


@pytest.mark.slow
def test_runs_together_equal_runs_alone_and_one_may_fail(
  prepared, tmp_path, capsys
):
  words = "curriculum=8C+8M steps", "checkpoint.every=8", "eval.every=8"
  values = {"a": (1, 1e-3), "bad": (2, 1e30), "b": (3, 3e-3)}
  configs = {
    name: runs.settings(
      prepared, *words, f"seed={seed}", f"schedule.peak_lr={rate}"
    )
    for name, (seed, rate) in values.items()
  }
  built = [loop.build_run(config) for config in configs.values()]
  folders = [tmp_path / name for name in configs]
  failed = together.train_together(built, folders, [[]] * 3)
  assert failed.keys() == {1} and "stopped before saving" in str(failed[1])
  assert f"error: {folders[1]}: " in capsys.readouterr().out
  for name in ("a", "b"):
    alone = tmp_path / f"alone-{name}"
    loop.train_run(configs[name], alone)
    assert runs.same_params(tmp_path / name, alone)
    both = [recorded(folder) for folder in (tmp_path / name, alone)]
    assert both[0] == both[1]
  # Finished runs are not trained again.
  again = together.train_together(built[::2], folders[::2], [[]] * 2)
  assert not again and recorded(folders[0]) == recorded(tmp_path / "alone-a")


def recorded(folder) -> list:
  """Returns a run's records without speeds."""
  found = metrics.by_step(metrics.read_records(folder))
  return [
    (step, name, value)
    for step, values in found.items()
    for name, value in values.items()
    if "per_second" not in name
  ]


def test_what_one_process_cannot_do_is_refused(prepared):
  first = runs.settings(prepared, "log.trace=1:2")
  other = runs.settings(prepared, "model.width=64")
  for configs, told in (
    ([first, first], "log.trace is for one run a process"),
    ([first, other], "may differ in seed and schedule alone"),
  ):
    asked = [types.SimpleNamespace(config=config) for config in configs]
    with pytest.raises(UserError, match=told):
      together.train_together(asked, [], [])
