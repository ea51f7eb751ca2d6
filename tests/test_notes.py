"""Tips and warnings of a run, before it, during it and at its end."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from antlm_jax import config as config_lib
from antlm_jax.commands import train
from antlm_jax.page import summary
from antlm_jax.planning import compilers, machine
from antlm_jax.training import notes
from antlm_jax.training import run as run_lib
from tests import runs


@pytest.mark.parametrize(
  "changes, meant",
  [
    (["curriculum=100C+150M"], r"250 steps, .*='100C\+150M steps'"),
    (["train.epochs=250"], "250 steps, --config.train.steps=250"),
    (["train.steps=100000"], ", 10 epochs"),
  ],
)
def test_a_run_of_very_many_epochs_gives_a_tip(changes, meant, prepared):
  """Catches counts of epochs that were meant as steps and train for days."""
  own = ["curriculum=C+M", "train.batch_size=64", *changes]
  words = (f"--config.{word}" for word in (f"data.path={prepared}", *own))
  built = run_lib.build_run(config_lib.load_config("quickstart", words))
  (tip,) = (x for x in notes.notes_of_run(built) if x.startswith("tip: "))
  assert re.fullmatch(
    rf"tip: .* epochs of the data: did you mean .*{meant}\?", tip
  )


def test_an_average_that_is_longer_than_the_run_is_warned_of(prepared):
  """Catches a run that evaluates its first weights."""
  lines = {}
  for ema in ("0.9", "0.999"):
    words = f"data.path={prepared} curriculum=C optimizer.ema={ema}".split()
    config = config_lib.load_config(
      "quickstart", [f"--config.{word}" for word in words]
    )
    built = run_lib.build_run(config)
    lines[ema] = [x for x in notes.notes_of_run(built) if "optimizer.ema" in x]
  (warning,) = lines["0.999"]
  assert "about 1,000 steps" in warning and not lines["0.9"]


@pytest.mark.parametrize(
  "curriculum, shuffle, rounding, warned",
  [
    ("4C:M", "False", "down", True),
    ("4C:M", "False", "carry", False),  # places turn from epoch to epoch
    ("4C:M", "True", "down", False),
    ("4C+4M", "False", "down", False),
  ],
)
def test_rows_that_keep_their_objective_are_warned_of(
  curriculum, shuffle, rounding, warned, prepared
):
  """Catches rows that no epoch trains with both objectives of a batch."""
  words = f"data.shuffle={shuffle}", f"data.rounding={rounding}"
  config = runs.settings(prepared, f"curriculum={curriculum}", *words)
  lines = notes.notes_of_run(run_lib.build_run(config))
  assert any("data.shuffle=False" in line for line in lines) == warned


def test_a_run_of_many_hours_gives_a_tip(prepared):
  """Catches a run of days that says so only in its time left."""
  built = run_lib.build_run(runs.settings(prepared))
  assert not [*notes.time_tip(built, 2, left=9 * 3600)]
  (tip,) = notes.time_tip(built, 2, left=20 * 3600)
  assert "tip: 40 steps" in tip and "20h00m" in tip
  assert "did you mean 2 steps, which take an hour?" in tip  # 38 in 20 hours


BAD_ENDS = (
  "warning: clm loss 3.200 is worse than its best (3.000 after step 400)",
  "4.100 is worse than the held-out text's own token frequencies (4.000)",
  "--config.curriculum='1200C:M steps'",
)


@pytest.mark.parametrize(
  "curriculum, at_400, at_1200, told",  # held-out losses of CLM and MLM
  [
    ("400C+800M", (3.0, 5.0), (3.02, 3.9), ()),
    ("400C+800M", (3.0, 5.0), (3.2, 4.1), BAD_ENDS),
    # No later phase has undone the first.
    ("400C+800M", (5.0, 6.0), (4.9, 3.9), ("clm", "train for longer")),
    ("1200C:M", (2.0, 2.0), (3.0, 2.0), ("clm", "eval.watch=clm ")),
    ("1200C", (5.0, 6.0), (4.5, 6.0), ("clm", "train for longer")),
    # A trial of a few steps has one line.
    ("40C", (5.0, 6.0), (4.5, 6.0), ("tip: 40 steps are too few",)),
    # No advice about an objective that was not trained, or not yet.
    ("1200C+400M", (3.0, 5.0), (2.5, 6.0), ()),
  ],
)
def test_a_mode_that_ends_badly_is_told_with_what_else_to_try(
  curriculum, at_400, at_1200, told, prepared
):
  settings = runs.settings(prepared, f"curriculum={curriculum} steps")
  run, names = run_lib.build_run(settings), ("eval/clm/loss", "eval/mlm/loss")
  rows = {
    400: dict(zip(names, at_400, strict=True)),
    1200: dict(zip(names, at_1200, strict=True)),
  }
  lines = notes.advice(summary.modes(rows, run), 4.0, run)
  assert len(lines) == len(told)
  assert all(words in line for words, line in zip(told, lines, strict=True))
  watching = dataclasses.replace(settings.eval, watch=("clm",))
  run = run_lib.build_run(dataclasses.replace(settings, eval=watching))
  lines = notes.advice(summary.modes(rows, run), 4.0, run)
  assert "eval.watch" not in " ".join(lines)


@pytest.mark.parametrize(
  ("seconds", "tip"),
  [
    ({"data": 400, "steps": 500, "total": 1000}, "data took 40% .*threads=4$"),
    (
      {"evaluation": 300, "data": 100, "total": 1000},
      "evaluation .*eval.every",
    ),
    ({"data": 150, "steps": 800, "total": 1000}, None),
    ({"compile": 30, "steps": 10, "total": 50}, None),  # a trial
  ],
)
def test_the_end_of_a_run_names_what_took_its_time(seconds, tip):
  """Catches a slow loader, or evaluations, that nobody is told of."""
  lines = notes.time_advice(seconds, threads=2)
  assert [bool(re.search(tip, line)) for line in lines] == [True] * bool(tip)


@pytest.mark.parametrize(
  ("mfu", "data", "suspect"),
  [
    (0.38, 900, None),  # a fifth is the limit
    (0.15, 400, "data took 40% of the time: .*data.threads=4$"),
    (0.15, 100, "the step itself: log.trace"),
  ],
)
def test_a_run_below_its_forecast_has_a_suspect(mfu, data, suspect):
  """Catches a slow loader that is blamed on the step, and the reverse."""
  seconds = {"data": data, "steps": 1000 - data, "compile": 5000}
  line, *suspects = notes.speed_advice(mfu, 0.46, seconds, threads=2)
  assert f"MFU {mfu:.1%}" in line and "46.0% by the forecast" in line
  assert len(suspects) == bool(suspect)
  assert not suspect or re.search(f"first suspect: {suspect}", suspects[0])


def test_a_run_says_the_shares_of_its_time():
  """Catches shares that do not add up, and an order by name."""
  seconds = {"compile": 30.0, "steps": 60.0, "data": 0.1, "total": 100.0}
  shares = notes.time_shares(seconds)
  assert shares == "steps 60%, compile 30%, other 10%"


@pytest.mark.parametrize(
  ("kind", "places", "processes", "topology"),
  [
    ("NVIDIA H200", range(1), 1, "h200:1"),
    ("NVIDIA H100 80GB HBM3", range(16), 2, "h100:2x8"),
    ("TPU v5 lite", np.ndindex(2, 4, 1), 1, "v5e:2x4"),
    ("TPU v5", np.ndindex(2, 2, 2), 2, "v5p:2x2x2"),
    ("NVIDIA A10G", range(1), 1, ""),  # plan does not know it
    ("cpu", range(1), 1, ""),
  ],
)
def test_devices_have_the_name_that_plan_knows(
  kind, places, processes, topology, monkeypatch
):
  devices = [SimpleNamespace(device_kind=kind, coords=x) for x in places]
  monkeypatch.setattr(jax, "devices", lambda: devices)
  monkeypatch.setattr(jax, "process_count", lambda: processes)
  local = len(devices) // processes
  monkeypatch.setattr(jax, "local_device_count", lambda: local)
  assert machine.topology() == topology


@pytest.mark.slow
@pytest.mark.parametrize(
  ("topology", "mfu", "said"),
  [
    ("h200:1", None, "speed: no MFU"),
    ("", 0.5, "no forecast for these devices"),
    ("v5e:1x1", 1e-6, "by the forecast.*first suspect: the step itself"),
    ("h100:9", 0.5, "no forecast of h100:9: error: .*at most 8"),
  ],
)
def test_speed_compares_the_run_with_its_plan(
  topology, mfu, said, prepared, monkeypatch, capsys
):
  """Catches a plan of other settings, and a plan that fails in silence."""
  if topology.startswith("v5e") and not compilers.libtpu():
    pytest.skip("needs libtpu")
  trained = train.Trained(
    workdir=prepared, steps=40, parameters=1, mfu=mfu, seconds={"steps": 9.0}
  )
  monkeypatch.setattr(train, "train", lambda *_, **options: trained)
  monkeypatch.setattr(machine, "topology", lambda: topology)
  train.main([*runs.train_args("unused", prepared), "--speed"])
  assert re.search(said, capsys.readouterr().out, re.DOTALL)
