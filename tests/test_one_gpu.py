"""Processes side by side and packed results of launch/antlm_on_gpu.sh."""

import json

import pytest

from antlm_jax.evals.benchmarks import train_step
from antlm_jax.evals.studies import one_gpu
from tests import runs
from tests.launching import ends_with_error, launch

_SETS = {"blimp_filtered": 2, "blimp_supplement_filtered": 1}


def _make_pairs(folder, term=""):
  """Writes a pair or two of each set, as BabyLM's files have them."""
  for name, count in _SETS.items():
    (folder / name).mkdir(parents=True)
    lines = [
      {
        "sentence_good": f"The dog {i} barks.",
        "sentence_bad": f"The dog {i} bark.",
        "linguistics_term": term,
        "UID": name,
        "pair_id": i,
      }
      for i in range(count)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / name / f"{name}.jsonl").write_text(text)
  return folder


def _scored(run, name, mode, scores, crc32):
  """Writes the results of a set in a run's folder."""
  folder = run / "evals" / name / f"4-{mode}"
  folder.mkdir(parents=True)
  items = [
    {
      "uid": name,
      "id": str(i),
      "correct": good > bad,
      "scores": [good, bad],
      "choices": [f"good {i}", f"bad {i}"],
    }
    for i, (good, bad) in enumerate(scores)
  ]
  text = "".join(json.dumps(item) + "\n" for item in items)
  (folder / "items.jsonl").write_text(text)
  request = {"data": {"crc32": crc32}, "mode": mode}
  (folder / "summary.json").write_text(json.dumps({"request": request}))
  return items


def test_packed_results_are_restored(tmp_path):
  """Sets and runs do not mix; the sign of a small difference stays."""
  scores = {
    "0": [(-9.0, -11.5), (-7.0, -7.000001)],
    "1": [(-20.0, -12.0), (-4.0, -4.0)],
  }
  made, expected = tmp_path / "made", {}
  for seed, pair in scores.items():
    run = made / "babyllama_c" / seed
    first = _scored(run, "blimp_filtered", "causal", pair, 1)
    other = _scored(run, "blimp_supplement_filtered", "causal", pair[:1], 2)
    (run / "config.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 4, "eval/clm/loss": 2.5}\n')
    expected[seed] = first, other
  (made / "babyllama_c/0/summary.json").write_text('{"steps": 4}')
  # Its results are being written.
  _scored(made / "babyllama_c/1", "blimp_filtered", "mlm", pair, 1)
  late = "babyllama_c/1/evals/blimp_filtered/4-mlm"
  (made / late / "summary.json").unlink()
  packed, back = tmp_path / "out/8m.tar.gz", tmp_path / "back"
  one_gpu.main(["pack", f"--runs={made}", f"--output={packed}"])
  one_gpu.main(["unpack", f"--packed={packed}", f"--runs={back}"])
  for seed, sets in expected.items():
    run = back / "babyllama_c" / seed
    for name, items in zip(_SETS, sets, strict=True):
      folder = run / "evals" / name / "4-causal"
      lines = (folder / "items.jsonl").read_text().splitlines()
      for line, item in zip(map(json.loads, lines), items, strict=True):
        good, bad = line.pop("scores")
        wanted = item.pop("scores")
        odds = wanted[0] - wanted[1]
        assert good - bad == pytest.approx(odds, rel=1e-3, abs=1e-6)
        assert line == item
      assert (folder / "summary.json").is_file()
    assert "2.5" in (run / "metrics.jsonl").read_text()
    assert (run / "summary.json").exists() == (seed == "0")
  assert not (back / late).exists()


@pytest.mark.slow
def test_rows_are_trained_and_scored_side_by_side(tmp_path, capfd):
  """A row's seeds share a process, and no row waits for another.

  The second call resumes a first call with too little time.
  """
  text, data = tmp_path / "text", _make_pairs(tmp_path / "data", "agreement")
  text.mkdir()
  for name in "train", "dev":
    lines = (f"The dog {i % 97} barks at the cat {i}.\n" for i in range(9000))
    (text / f"all.{name}").write_text("".join(lines))
  out = tmp_path / "runs"
  words = ["run", "--scale=8m_shrink", f"--data={data}", f"--text={text}"]
  words += [f"--runs={out}", "--seeds=2", "--rows=babyllama_c,babyllama_antlm"]
  words += ["--trainings=2", "--scorings=2", "--config.model.layers=1"]
  told = runs.refused("antlm_jax.evals.studies.one_gpu", *words, "--rows=no")
  assert "'no' is not one of" in told
  with pytest.raises(KeyboardInterrupt):
    one_gpu.main([*words, "--minutes=0.03", "--reserve=0"])
  assert "stopped: run the same command" in capfd.readouterr().out
  one_gpu.main([*words, "--minutes=9"])
  assert "4 of 4" in capfd.readouterr().out
  for row in "babyllama_c", "babyllama_antlm":
    logs = (out / "logs").glob(f"train-*-{row}.log")
    assert any("run 2 of 2" in log.read_text() for log in logs)
    for seed in "01":
      for name, mode in ((n, m) for n in _SETS for m in ("causal", "mlm")):
        (found,) = (out / row / seed / "evals" / name).glob(f"*-{mode}")
        assert (found / "summary.json").is_file()
      config = json.loads((out / row / seed / "config.json").read_text())
      assert not config["init"]["checkpoint"]


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
    (("run", "--budget=25"), "unknown option --budget=25"),
  ],
)
def test_the_script_refuses_bad_input(words, part, tmp_path):
  ends_with_error(launch("antlm_on_gpu", *words, cwd=tmp_path), part)
  assert not [*tmp_path.iterdir()]
