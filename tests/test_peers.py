"""The benchmark against peers: its arithmetic, and a run of every case."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from antlm_jax.evals.benchmarks import turns
from tests import runs


class Machine:
  """A clock, with the CPU time of this process and of all processes."""

  def __init__(self):
    self.now = self.own = self.all = 0.0

  def work(self, seconds: float, others: float = 0.0):
    """Advances time: this process uses one core of two, others a part."""
    self.now += seconds
    self.own += seconds
    self.all += seconds * (1 + 2 * others)


@pytest.fixture
def machine(monkeypatch):
  of = Machine()
  monkeypatch.setattr(turns.time, "perf_counter", lambda: of.now)
  monkeypatch.setattr(turns, "_own_cpu_seconds", lambda: of.own)
  monkeypatch.setattr(turns, "_busy", lambda: of.all)
  monkeypatch.setattr(turns.os, "cpu_count", lambda: 2)
  return of


def case(ours, theirs, **changes):
  of = turns.TimedCase(
    *("work", "a peer", ours, theirs),
    work=10,
    unit="things",
    same=lambda a, b: a == b,
  )
  return dataclasses.replace(of, **changes)


def test_the_first_call_and_disturbed_turns_do_not_count(machine):
  calls = []

  def ours():
    calls.append("ours")
    machine.work(7.0 if len(calls) == 1 else 2.0)

  def theirs():
    calls.append("theirs")
    # In the second turn, others use a fifth of the machine.
    machine.work(4.0, others=0.2 if calls.count("theirs") == 5 else 0.0)

  row = turns.time_case(case(ours, theirs), rounds=3)
  np.testing.assert_allclose([*row["ratios"], row["best"]], [2.0] * 4)
  assert row["compile_seconds"] == pytest.approx(5.0)
  assert (row["ours"], row["theirs"]) == (5.0, 2.5)
  assert row["repeated"] == 1 and row["others"] == 0 and row["same"]
  # The order alternates, so that after-effects of one affect both.
  assert calls[2:6] == ["ours"] * 2 + ["theirs"] * 2
  assert calls[6:8] == ["theirs"] * 2


@pytest.mark.nightly
@pytest.mark.slow
def test_every_case_runs_and_finds_the_same(tmp_path):
  """Uses the versions of the peers in setup.py."""
  for peer in ("torch", "transformers", "lm_eval", "minicons", "datasets"):
    pytest.importorskip(peer)
  # `runs.run` would turn the peers' warnings into errors.
  done = subprocess.run(
    [
      *(
        sys.executable,
        "-m",
        "antlm_jax.evals.benchmarks.peers",
        "--sizes=tiny",
      ),
      *("--limit=2", "--rounds=1", f"--output={tmp_path}"),
    ],
    cwd=runs.ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  (path,) = tmp_path.glob("*.json")
  rows = json.loads(path.read_text())["rows"]
  assert len(rows) == 2 + 4 + 6 + 3
  assert all(row["same"] and row["ratio"] > 0 for row in rows)
