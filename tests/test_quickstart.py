"""The README's quickstart."""

import json
import os
import subprocess

import pytest

from tests import runs


def quickstart(folder, *args, **env) -> str:
  """Runs `./launch/quickstart.sh` into a folder; returns its output."""
  done = subprocess.run(
    ["./launch/quickstart.sh", *map(str, args)],
    cwd=runs.ROOT,
    env=os.environ | {"RUNS": str(folder)} | env,
    capture_output=True,
    text=True,
    timeout=1800,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


# A single test, because the run takes minutes.
@pytest.mark.nightly
@pytest.mark.slow
def test_it_learns_every_phenomenon_and_finds_all_done_a_second_time(tmp_path):
  folder = tmp_path / "quickstart"
  printed = quickstart(tmp_path)
  # README.md and docs/index.md state these figures and this sentence.
  for mode, least in {"causal": 0.99, "mlm": 0.98}.items():
    summary = (folder / f"blimp-{mode}" / "summary.json").read_text()
    by_uid = json.loads(summary)["by_uid"]
    accuracies = {uid: e["accuracy"] for uid, e in by_uid.items()}
    assert len(accuracies) == 12
    assert sum(accuracies.values()) / 12 > least, accuracies
    assert min(accuracies.values()) >= 0.75, accuracies
  for sentence in (
    "kind fathers have still followed themselves .",
    "house have often rested .",
  ):
    assert sentence in printed
  assert f"Everything is in {folder}" in printed
  assert (folder / "train" / "curves.png").exists()
  before = (folder / "train" / "metrics.jsonl").read_bytes()
  assert "already prepared" in quickstart(tmp_path)
  assert (folder / "train" / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_it_takes_a_folder_of_text(tmp_path):
  text = tmp_path / "mine"
  text.mkdir()
  lines = (f"Line {i} is about number {i % 97}.\n" for i in range(8_000))
  (text / "a.txt").write_text("".join(lines))
  quickstart(tmp_path, text, CONFIG="configs/babylm_small.py:shrink")
  assert (tmp_path / "quickstart-mine/train/curves.png").exists()
