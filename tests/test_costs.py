"""Forecasts next to measured speeds."""

import dataclasses
import json
import re
import shlex

import pytest

from antlm_jax import config as config_lib
from antlm_jax.evals.benchmarks import costs, train_step
from tests import runs

LINES = [x for table in costs.TABLES for x in costs.read_speeds(table)]
NUMBER = re.compile(r"[\d,]+")


def numbers(text: str) -> list[int]:
  return [int(n.replace(",", "")) for n in NUMBER.findall(text)]


@pytest.mark.sample(8, 8)
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_a_line_makes_the_step_that_it_names(line):
  """A shape or batch in words alone would be compared with another step."""
  words = dict(w.split("=", 1) for w in shlex.split(line.words))
  changes = [f"{k}={v}" for k, v in words.items() if k.startswith("--config.")]
  changes = config_lib.parse_overrides(changes)
  config = config_lib.load_config(words["--config"], changes)
  rows, length = numbers(line.batch)
  assert (config.train.batch_size, int(words["--seq_len"])) == (rows, length)
  shape = re.search(r"(\d+) layers x ([\d,]+)", line.shape).groups()
  assert numbers(" ".join(shape)) == [config.model.layers, config.model.width]
  parts = line.devices * config.train.microbatches
  assert rows % parts == 0
  known = config.known_objectives
  assert [*config.trained] == [known[n] for n in line.program.split(":")]
  named = re.search(r"vocabulary ([\d,]+)", line.shape)
  assert not named or numbers(named[1]) == [int(words["--vocab_size"])]


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
  rows = costs.stored_forecasts("own_speeds", tmp_path)
  seconds = {row["name"]: row["seconds"] for row in rows}
  assert sorted(seconds) == sorted(names)
  assert seconds[names[3]] == len(names) + 1
  assert "--only=7M names no line" in runs.told(
    costs.main, [*words, "--only=7M"]
  )


def test_a_time_follows_from_the_speed_or_the_share_of_the_peak():
  """Four devices of 100 FLOP/s; the step has 4,000 tokens and 800 FLOPs."""

  first, *_ = costs.read_speeds("own_speeds")

  def of(**known):
    unknown = {"tokens_per_second": None, "mfu": None}
    line = dataclasses.replace(first, **unknown | known)
    return line.measured_seconds(800, 4000, 400)

  assert of(tokens_per_second=500) == 8
  assert of(mfu=0.5) == 4
  assert of() is None


def stored(folder, table, *rows):
  """Writes forecasts of steps of 512 x 1,024 tokens."""
  path = folder / f"{table.replace('_', '-')}.json"
  common = {"rows": 512, "seq_len": 1024, "peak": 989e12, "work": 1e15}
  common |= {"bound_seconds": 1.0, "attention": "tokamax", "devices": 1}
  path.write_text(json.dumps({"rows": [common | row for row in rows]}))


def printed(capsys, *words):
  """Returns the table that the command prints, without its rule."""
  costs.main([*words])
  lines = capsys.readouterr().out.splitlines()
  cells = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
  return [cells[0], *cells[2:]]


def test_the_stored_forecasts_are_compared(tmp_path, capsys):
  """Catches the ratio turned round, and a line without a forecast."""
  first, second, *_ = costs.read_speeds("public_speeds")
  rows = [
    {
      "name": line.name,
      "seconds": 512 * 1024 / line.tokens_per_second / ratio,
      "needed_bytes": 2**30,
    }
    for line, ratio in ((first, 2.0), (second, 1.5))
  ]
  rows.append({"name": "another", "error": "it does not fit into memory"})
  stored(tmp_path, "public_speeds", *rows)
  head, *lines = printed(capsys, f"--output={tmp_path}")
  assert head[-1] == "measured / forecast" and "hours" not in head
  assert [line[0] for line in lines[:2]] == [first.name, second.name]
  assert [x[-1] for x in lines] == ["2.00", "1.50", "1.75 (1.50 to 2.00)"]
  assert lines[0][4] == "1.00 GiB"


def test_the_cost_of_an_encoder_is_that_of_its_steps(tmp_path, capsys):
  """Counts chips, watts and rates by hand."""
  stored(
    tmp_path,
    "encoder_costs",
    {"name": "17M, h100:8", "devices": 8, "seconds": 2.0},
    {"name": "17M, v5e:2x4", "devices": 8, "seconds": 9.0},
    {"name": "1B, rtx4090:1", "needed_bytes": 27 * 2**30},
  )
  words = "--table=encoder_costs", "--tokens=10G", f"--output={tmp_path}"
  head, *lines = printed(capsys, *words, "--price_per_hour=h100=2.5")
  on_gpu, on_tpu, large = (dict(zip(head, x, strict=True)) for x in lines)
  steps = 19074  # 10e9 / 524,288, rounded up
  hours = steps * 2.0 / 3600
  assert on_gpu["tokens/s"] == "262k" and on_gpu["hours"] == f"{hours:.0f}"
  assert on_gpu["chip-hours"] == f"{8 * hours:.0f}"
  assert on_gpu["kWh"] == f"{8 * hours * 0.7:.0f}"
  assert on_gpu["price"] == f"{8 * hours * 2.5:.2f}"
  # Its power is not published, and it has no rate.
  assert on_tpu["hours"] == f"{steps * 9.0 / 3600:.0f}"
  assert on_tpu["kWh"] == on_tpu["price"] == "-"
  assert large["needs"] == "27.00 GiB" and large["tokens/s"] == "-"
  for bad in ("h100", "h101=2"):
    assert "--price_per_hour" in runs.told(
      costs.main, [*words, f"--price_per_hour={bad}"]
    )


@pytest.mark.parametrize(
  ("page", "table"),
  [
    ("docs/explanation/cost.md", "encoder_costs"),
    ("docs/appendix/forecast.md", "own_speeds"),
    ("docs/appendix/forecast.md", "public_speeds"),
  ],
)
def test_a_page_has_the_table_that_the_command_prints(page, table):
  """Catches a forecast or a price of another plan."""
  assert costs.cost_table(table) in (runs.ROOT / page).read_text()


def test_the_table_of_own_text_is_that_of_its_forecasts(capsys):
  """Each text and GPU is on the page, and fits; its time is counted by hand."""
  costs.main(["--table=own_text"])
  printed = capsys.readouterr().out.strip()
  page = (runs.ROOT / "docs/how_to/one_gpu.md").read_text()
  assert printed in page
  for line in costs.read_speeds("own_text"):
    size = line.name.partition(" ")[0]
    _, vocab, length, *_ = shlex.split(line.words)
    assert re.search(rf"\| {size}\b[^|]*\| `{vocab} {length}` \|", page), size
  (row,) = (
    row
    for row in costs.stored_forecasts("own_text")
    if row["name"] == "10M words, 24 GB"
  )
  minutes = 1.37 * 10e6 * 24 / (128 * 128) * row["seconds"] / 60
  assert f"| {minutes:.0f} min |" in printed
  lines = printed.splitlines()[2:]
  configs = {line.split("|")[-2] for line in lines}
  assert len(configs) == len(lines) == 16 and "error" not in printed


@pytest.mark.slow
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
