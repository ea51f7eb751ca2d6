"""Tips and warnings of a run, before it, during it and at its end."""

import dataclasses
import re

import pytest

from antlm_jax import config as config_lib
from antlm_jax.page import summary
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
    ({"compile": 200, "steps": 90, "total": 300}, None),  # a trial
  ],
)
def test_the_end_of_a_run_names_what_took_its_time(seconds, tip, prepared):
  """Catches a slow loader, or evaluations, that nobody is told of."""
  run = run_lib.build_run(runs.settings(prepared))
  lines = notes.time_advice(seconds, run)
  assert [bool(re.search(tip, line)) for line in lines] == [True] * bool(tip)
