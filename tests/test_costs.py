"""Forecasts next to measured speeds."""

import dataclasses
import json
import re
import shlex

import pytest

from antlm_jax import config as config_lib
from antlm_jax.errors import UserError
from antlm_jax.evals.benchmarks import costs, encoder_costs

LINES = [x for table in costs.TABLES for x in costs.read_speeds(table)]
NUMBER = re.compile(r"[\d,]+")


def numbers(text: str) -> list[int]:
  return [int(n.replace(",", "")) for n in NUMBER.findall(text)]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_line_makes_the_step_that_it_names(line):
  """A shape or batch in words alone would be compared with another step."""
  words = dict(w.split("=", 1) for w in shlex.split(line.words))
  changes = [f"{k}={v}" for k, v in words.items() if k.startswith("--config.")]
  changes = config_lib.parse_overrides(changes)
  config = config_lib.given_config(words["--config"], changes)
  rows, length = numbers(line.batch)
  assert (config.train.batch_size, int(words["--seq_len"])) == (rows, length)
  shape = re.search(r"(\d+) layers x ([\d,]+)", line.shape).groups()
  assert numbers(" ".join(shape)) == [config.model.layers, config.model.width]
  parts = line.devices * config.train.microbatches
  assert rows % parts == 0
  assert [*config.trained] == [config.known_objectives[line.program]]
  named = re.search(r"vocabulary ([\d,]+)", line.shape)
  assert not named or numbers(named[1]) == [int(words["--vocab_size"])]


def test_a_measured_line_names_the_attention_that_ran():
  """The words say how to measure the step again."""
  rows = costs.stored_speeds("own_speeds-measured", costs.RESULTS)["rows"]
  ran = {row["name"]: row["attention"] for row in rows}
  for line in costs.read_speeds("own_speeds"):
    assert f"model.attention={ran[line.name]}" in line.words


def test_forecasts_continue_where_they_stopped(tmp_path, monkeypatch):
  """A second call neither compiles a stored line again nor drops it."""
  compiled = []

  def forecast(line):
    compiled.append(line.name)
    return {"name": line.name, "seconds": float(len(compiled))}

  monkeypatch.setattr(costs, "forecast_speed", forecast)
  names = [line.name for line in costs.read_speeds("own_speeds")]
  words = ["--table=own_speeds", "--forecast", f"--output={tmp_path}"]
  costs.main([*words, f"--only={names[3]}"])
  costs.main(words)
  assert sorted(compiled) == sorted(names)
  costs.main([*words, f"--only={names[3]}"])
  rows = costs.stored_speeds("own_speeds", tmp_path)["rows"]
  seconds = {row["name"]: row["seconds"] for row in rows}
  assert sorted(seconds) == sorted(names)
  assert seconds[names[3]] == len(names) + 1
  with pytest.raises(UserError, match="--only=7M names no line"):
    costs.main([*words, "--only=7M"])


def test_a_time_follows_from_the_speed_or_the_share_of_the_peak():
  """Four devices of 100 FLOP/s; the step has 4,000 tokens and 800 FLOPs."""

  def of(**known):
    line = dataclasses.replace(
      LINES[0], **{"tokens_per_second": None, "mfu": None} | known
    )
    return line.measured_seconds(800, 4000, 400)

  assert of(tokens_per_second=500) == 8
  assert of(mfu=0.5) == 4
  assert of() is None


def test_the_stored_forecasts_are_compared(tmp_path, capsys):
  """A line without a forecast, or without a measured speed, is left out."""
  first, second, *_ = costs.read_speeds("public_speeds")
  rows = [
    {
      "name": line.name,
      "rows": 4608,
      "seq_len": 1024,
      "peak": 989e12,
      "devices": line.devices,
      "work": 1e15,
      "seconds": 4608 * 1024 / line.tokens_per_second / ratio,
    }
    for line, ratio in ((first, 2.0), (second, 1.5))
  ]
  rows.append({"name": "another", "error": "it does not fit into memory"})
  path = tmp_path / "public-speeds.json"
  path.write_text(json.dumps({"rows": rows}))
  costs.main([f"--output={tmp_path}"])
  printed = capsys.readouterr().out.splitlines()
  assert [line.split()[-2:] for line in printed[1:3]] == [
    ["2.00", "no"],
    ["1.50", "no"],
  ]
  assert printed[3].count("1.75 (1.50 to 2.00)") == 2
  # With a later formula, fitted to the first line.
  later = [row | {"seconds": row["seconds"] * 2} for row in rows[:1]]
  mended = {"fitted": [first.name], "rows": later}
  (tmp_path / "public-speeds-mended.json").write_text(json.dumps(mended))
  costs.main([f"--output={tmp_path}"])
  _, *printed = capsys.readouterr().out.splitlines()
  assert printed[0].split()[-2:] == ["1.00", "yes"]
  assert "1.75 (1.50 to 2.00)" in printed[2]
  assert printed[2].split("  ")[-1].strip() == "1.25 (1.00 to 1.50)"
  assert printed[3].count("1.50 (1.50 to 1.50)") == 2


def test_lines_are_timed_on_the_devices_at_hand(tmp_path, monkeypatch):
  """A line that cannot be built does not stop the others."""
  words = "--config=quickstart:shrink --vocab_size=64 --seq_len=16"
  words += " --config.train.batch_size=4"
  line = dataclasses.replace(LINES[0], devices=1, words=words)
  bad = dataclasses.replace(line, name="bad", words=f"{words} --config.seed=x")
  monkeypatch.setattr(costs, "read_speeds", lambda table: [bad, line])
  costs.main(["--measure", "--seconds=0.01", f"--output={tmp_path}"])
  path = tmp_path / "public-speeds-measured.json"
  failed, timed = json.loads(path.read_text())["rows"]
  assert "seed" in failed["error"]
  assert timed["name"] == line.name and timed["steps"] >= 5
  assert timed["tokens_per_second"] * timed["seconds"] == pytest.approx(64)


@pytest.fixture
def stored(tmp_path):
  """Forecasts of two encoders, and of two measured steps on H200."""
  common = {"rows": 512, "seq_len": 1024, "peak": 989e12, "work": 1e15}
  common |= {"bound_seconds": 1.0, "attention": "tokamax"}
  cells = [
    common
    | {"name": f"17M, {topology}", "parameters": 17_000_000, "devices": devices}
    | {"seconds": seconds, "tokens_per_second": 512 * 1024 / seconds}
    for topology, devices, seconds in (("h100:8", 8, 2.0), ("v5e:2x4", 8, 9.0))
  ]
  own = [
    common | {"name": name, "parameters": size, "devices": 1, "seconds": 1.0}
    for name, size in (("Ettin 17M", 16_900_000), ("610M M", 10**9))
  ]
  timed = [{"name": "Ettin 17M", "seconds": 1.5}]
  timed.append({"name": "610M M", "seconds": 1.1})
  for name, rows in (
    ("encoder-costs", cells),
    ("own-speeds", own),
    ("own-speeds-measured", timed),
    ("public-speeds", []),
  ):
    (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
  return tmp_path


def test_the_cost_of_an_encoder_is_that_of_its_steps(stored):
  """Counts chips, watts and rates by hand; errors are of similar chips."""
  on_gpu, on_tpu = encoder_costs.encoder_costs(10e9, {"h100": 2.5}, stored)
  steps = 19074  # 10e9 / 524,288, rounded up
  hours = steps * 2.0 / 3600
  assert on_gpu.hours == pytest.approx(hours)
  assert on_gpu.cost.price == pytest.approx(8 * hours * 2.5)
  assert on_gpu.cost.energy == pytest.approx(8 * hours * 0.7)
  assert on_gpu.likely == pytest.approx((1.1, 1.3, 1.5))
  assert not on_gpu.elsewhere and on_gpu.nearest.name == "Ettin 17M"
  # Nobody measured a step on v5e here, and its power is not published.
  assert on_tpu.elsewhere and on_tpu.cost.energy is on_tpu.cost.price is None


def test_the_costs_are_printed_and_drawn(stored, capsys):
  """Runs the command, which no other test does."""
  path = stored / "cost.png"
  words = "--tokens=10G", f"--picture={path}", f"--output={stored}"
  encoder_costs.main([*words, "--price_per_hour=h100=2.5,v5e=1"])
  _, first, second, _ = capsys.readouterr().out.splitlines()
  assert re.split(r"  +", first)[:5] == ["17M", "8 x H100", "262k", "11", "85"]
  assert "other chips" in second and "Ettin 17M, 1 x H200: 1.50" in second
  assert path.read_bytes().startswith(b"\x89PNG")
  for bad in ("h100", "h101=2"):
    with pytest.raises(UserError, match="--price_per_hour"):
      encoder_costs.main([*words, f"--price_per_hour={bad}"])
