"""The quickstart as the README has it, whole."""

import json
import os
import subprocess

import pytest

from tests import runs


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
  """What `./launch/quickstart.sh` leaves, and what it prints."""
  folder = tmp_path_factory.mktemp("runs")
  done = subprocess.run(
    ["./launch/quickstart.sh"],
    cwd=runs.ROOT,
    env=os.environ | {"RUNS": str(folder)},
    capture_output=True,
    text=True,
    timeout=1800,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return folder / "quickstart", done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["causal", "mlm"])
def test_it_learns_every_phenomenon_in_both_modes(quickstart, mode):
  folder, _ = quickstart
  summary = json.loads((folder / f"blimp-{mode}" / "summary.json").read_text())
  accuracies = {uid: e["accuracy"] for uid, e in summary["by_uid"].items()}
  assert len(accuracies) == 12
  assert sum(accuracies.values()) / 12 >= 0.90, accuracies
  assert min(accuracies.values()) >= 0.75, accuracies


@pytest.mark.slow
def test_it_says_where_everything_is_and_shows_the_model(quickstart):
  folder, printed = quickstart
  assert f"Everything is in {folder}" in printed
  assert (folder / "train" / "curves.png").exists()


@pytest.mark.slow
def test_a_second_time_it_finds_all_done(quickstart):
  folder, _ = quickstart
  before = (folder / "train" / "metrics.jsonl").read_bytes()
  done = subprocess.run(
    ["./launch/quickstart.sh"],
    cwd=runs.ROOT,
    env=os.environ | {"RUNS": str(folder.parent)},
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  assert "already prepared" in done.stdout
  assert (folder / "train" / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_it_takes_a_folder_of_text(tmp_path):
  text = tmp_path / "mine"
  text.mkdir()
  lines = (f"Line {i} is about number {i % 97}.\n" for i in range(40_000))
  (text / "a.txt").write_text("".join(lines))
  shrunk = {"RUNS": str(tmp_path), "CONFIG": "configs/babylm_small.py:shrink"}
  done = subprocess.run(
    ["./launch/quickstart.sh", str(text)],
    cwd=runs.ROOT,
    env=os.environ | shrunk,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert (tmp_path / "quickstart-mine/train/curves.png").exists()
