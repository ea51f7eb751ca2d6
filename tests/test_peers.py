"""The benchmark against peers: its arithmetic, and a run of every case."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from antlm_jax.evals.benchmarks import peers, train_step, turns
from antlm_jax.evals.benchmarks.beside import training
from antlm_jax.objectives.batch import BatchLayout
from tests import runs


@dataclasses.dataclass(frozen=True)
class Adding(turns.Work):
  """Work of a test: a sum that takes no time."""

  kind = "test"
  unit = "sums"


def ours(work, folder):
  return lambda: 7.0, 10.0


def broken(work, folder):
  raise OSError("no such\ndevice")


def killed(work, folder):
  os._exit(1)


CASE = turns.Case("cpu", Adding(), "a peer", ours, ours)


class Side:
  """A worker whose calls take known seconds, and longer after a wait.

  The first one also compiles.
  """

  def __init__(self, name, seconds, calls):
    self.name, self.seconds, self.calls = name, seconds, calls

  def first(self):
    return turns.Timed(self.seconds + 5.0, 1.0, None), 10.0

  def __call__(self):
    waited = self.calls[-1:] != [self.name]
    self.calls.append(self.name)
    return turns.Timed(self.seconds * (3 if waited else 1), 1.0, 2**30)


def test_calls_after_a_wait_do_not_count_and_the_order_alternates():
  calls = []
  sides = Side("ours", 2.0, calls), Side("theirs", 4.0, calls)
  row = turns.time_case(CASE, *sides, rounds=3)
  assert row["ratios"] == [2.0] * 3 and row["ratio"] == 2.0
  assert row["compile_seconds"] == pytest.approx(5.0)
  assert (row["ours"], row["theirs"], row["same"]) == (5.0, 2.5, True)
  assert row["peak_bytes"] == [2**30] * 2
  # After-effects of one affect both.
  assert calls[:8:2] == ["ours", "theirs", "theirs", "ours"]


@pytest.mark.parametrize(
  ("theirs", "error"),
  [(broken, "OSError: no such device"), (killed, "its process was killed")],
)
def test_a_side_that_fails_leaves_one_line(theirs, error, tmp_path):
  """Catches a crash of a peer that ends the cases after it."""
  with (
    turns.Worker(ours, Adding(), tmp_path) as first,
    turns.Worker(theirs, Adding(), tmp_path) as second,
  ):
    row = turns.time_case(CASE, first, second, rounds=1)
  assert row == {"case": str(Adding()), "peer": "a peer", "error": error}


def test_padded_rows_have_the_documents_and_targets_of_packed_rows():
  """Catches a ratio of unequal work."""
  rows, length, vocabulary = 3, 64, 97
  batch = train_step.make_example(
    "packed", BatchLayout(rows), length, vocabulary
  )
  arrays = training.padded(batch, "causal")
  visible = arrays["attention_mask"].astype(bool)
  np.testing.assert_array_equal(
    arrays["input_ids"][visible], batch.inputs.ravel()
  )
  assert len(visible) > 2 * rows and visible.any(0).all()
  labels = arrays["labels"]
  counted = labels != -100
  # A causal model predicts each token of a document but the first.
  np.testing.assert_array_equal(counted[:, 1:], visible[:, 1:])
  assert not counted[:, 0].any()
  np.testing.assert_array_equal(labels[counted], arrays["input_ids"][counted])
  assert counted.sum() == (batch.weights > 0).sum()


def test_the_page_has_the_stored_figures():
  """Catches a table of another machine or date."""
  file = runs.ROOT / "evals/benchmarks/results/peers-x86-64-cpu-2-cores.json"
  stored = {
    (row["case"], row["peer"]): [
      f"{x:.2f}" for x in (row["ratio"], row["ratios"][0], row["ratios"][-1])
    ]
    for row in json.loads(file.read_text())["rows"]
  }
  page = (runs.ROOT / "docs/explanation/speed.md").read_text()
  table = page[page.index("| | peer | ratio |") :].partition("\n\n")[0]
  _, _, *lines = table.splitlines()
  for line in lines:
    case, peer, *figures = (cell.strip() for cell in line.strip("|").split("|"))
    assert figures[:3] == stored[case, peer]
  assert len(lines) == len(stored) == 13


def test_a_device_without_such_cases_is_told():
  words = "--devices=gpu", "--kinds=generate"
  assert "no such cases for gpu" in runs.told(peers.main, words)


@pytest.mark.nightly
@pytest.mark.slow
def test_every_case_runs_and_finds_the_same(tmp_path):
  """Uses the versions of the peers in setup.py; rehearses the GPU's cases."""
  for peer in ("torch", "transformers", "lm_eval", "minicons"):
    pytest.importorskip(peer)
  # `runs.run` would turn the peers' warnings into errors.
  words = "--tiny", "--devices=cpu,gpu", "--rounds=1", f"--output={tmp_path}"
  done = subprocess.run(
    [sys.executable, "-m", "antlm_jax.evals.benchmarks.peers", *words],
    cwd=runs.ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
    capture_output=True,
    text=True,
    timeout=1200,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  (path,) = tmp_path.glob("*.json")
  rows = json.loads(path.read_text())["rows"]
  assert len(rows) == len(peers.CASES)
  assert all(row["same"] and row["ratio"] > 0 for row in rows)
