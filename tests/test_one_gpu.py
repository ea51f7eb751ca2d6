"""Forecasts and packed results of launch/antlm_on_gpu.sh."""

import json

import numpy as np
import pytest

from antlm_jax.evals.benchmarks import train_step
from antlm_jax.evals.studies import one_gpu
from tests import runs
from tests.launching import ends_with_error, launch


@pytest.mark.parametrize(
  "rate, seconds, scale, seeds",
  [
    (2e6, 9000, "8m", 13),
    (2e6, 700, "8m", 6),
    (2e6, 400, "8m", 0),  # two seeds decide nothing
    (1e9, 700, "8m", 8),  # batches and pairs take the host's time
    (1e6, 500, "97m", 0),
    (1e6, 500, "97m --rows=babyllama_antlm", 1),
  ],
)
def test_as_many_seeds_as_fit(rate, seconds, scale, seeds, tmp_path, capsys):
  rows = [{"tokens_per_second": rate}, {"tokens_per_second": 2 * rate}, {}]
  (tmp_path / "step-h100.json").write_text(json.dumps({"rows": rows}))
  words = f"--times={tmp_path} --seconds={seconds} --scale={scale}".split()
  one_gpu.main(["seeds", *words])
  assert capsys.readouterr().out == f"{seeds}\n"


def test_a_size_without_times_is_an_error(tmp_path):
  words = "seeds", f"--times={tmp_path}", "--seconds=9", "--scale=8m"
  told = runs.refused("antlm_jax.evals.studies.one_gpu", *words)
  assert "has no time of a step" in told


def test_results_are_packed_by_row_and_set(tmp_path):
  """Pairs of BLiMP and of its supplement do not mix, nor do seeds."""
  for seed in "01":
    run = tmp_path / "runs/babyllama_c" / seed
    for name, count in ("blimp_filtered", 2), ("blimp_supplement_filtered", 1):
      folder = run / "evals" / name / "4-causal"
      folder.mkdir(parents=True)
      items = [
        {"uid": name, "id": str(i), "scores": [i, -int(seed)]}
        for i in range(count)
      ]
      lines = map(json.dumps, items)
      (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    records = {"step": 4, "eval/clm/loss": 2.5}, {"step": 5, "train/x": 1.0}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
  out = tmp_path / "out"
  one_gpu.main(["pack", f"--runs={tmp_path}/runs", f"--output={out}"])
  found = np.load(out / "babyllama_c-blimp_filtered-causal.npz")
  np.testing.assert_array_equal(found["odds"], [[0, 1], [1, 2]])
  assert [*found["seeds"]] == ["0", "1"] and [*found["id"]] == ["0", "1"]
  found = np.load(out / "babyllama_c-blimp_supplement_filtered-causal.npz")
  assert found["odds"].shape == (2, 1)
  lines = (out / "losses.csv").read_text().splitlines()
  assert lines[:2] == ["row,seed,step,eval/clm/loss", "babyllama_c,0,4,2.5"]


def test_the_steps_of_a_config_are_timed(tmp_path):
  """Each kind of batch has a row, with the settings of the command line."""
  words = "--vocab_size=64", "--seq_len=16", "--seconds=0.01", "--steps=1"
  config = "--config=quickstart:shrink", "--config.train.batch_size=4"
  train_step.main([*config, *words, f"--output={tmp_path}"])
  (path,) = tmp_path.glob("*.json")
  rows = json.loads(path.read_text())["rows"]
  assert [row["batch"] for row in rows] == ["C", "M"]
  for row in rows:
    assert row["tokens_per_second"] * row["seconds"] == pytest.approx(4 * 16)
    assert row["peak_bytes"] > 0 and "error" not in row


def test_settings_without_a_config_are_an_error():
  told = runs.refused(
    "antlm_jax.evals.benchmarks.train_step", "--config.train.batch_size=4"
  )
  assert "add --config=NAME" in told


@pytest.mark.parametrize(
  "words, part",
  [
    ((), "write pack or run first"),
    (("pack", "--pack=p", "--text=/nowhere"), "--text=/nowhere is no folder"),
    (("run", "--output=o"), "--pack is missing"),
    (("run", "--pack=/nowhere", "--output=o"), "holds no wheels"),
    (("run", "--gpu=1"), "unknown option --gpu=1"),
  ],
)
def test_the_script_refuses_bad_input(words, part, tmp_path):
  ends_with_error(launch("antlm_on_gpu", *words, cwd=tmp_path), part)
  assert not [*tmp_path.iterdir()]
