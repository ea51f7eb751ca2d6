"""The results pages hold exactly the tables of their stored data."""

import itertools
import json
import re

import numpy as np
import pytest
from scipy import stats

from antlm_jax.errors import UserError
from antlm_jax.evals.benchmarks import verdicts
from antlm_jax.evals.benchmarks.pages import antlm_table, regularised, studies
from antlm_jax.evals.studies import report
from tests import runs, test_report

RESULTS = runs.ROOT / "evals/benchmarks/results"
# Figures of a page's text that are settings, or from other work.
GIVEN = {
  "docs/results.md": {
    *(0.006, 0.022, 0.03, 0.05, 0.1, 0.13, 0.2, 0.25, 0.5),
    *(1.0, 1.1, 1.5, 1.8, 1.97, 2.2, 3.2, 99.69),
  },
  "docs/explanation/when_to_mix.md": {
    *(0.1, 0.2, 0.5, 1.1, 1.12, 1.5, 1.97, 99.69)
  },
  "docs/appendix/optimizers.md": {0.1, 1.1, 1.2, 1.4},
}


@pytest.mark.parametrize("page", verdicts.PAGES)
def test_the_tables_of_a_page_are_those_of_its_data(page):
  """Catches a table, interval or verdict that its JSON does not give."""
  text = (runs.ROOT / page).read_text()
  assert verdicts.fill_page(page, text) == text


@pytest.mark.parametrize("page", GIVEN)
def test_the_figures_of_the_text_are_those_of_the_data(page):
  """Catches a decimal number in a sentence that no table or JSON gives."""
  text = (runs.ROOT / page).read_text()
  text = re.sub(r"```.*?```|`[^`]*`|\d{4}\.\d{5}|\]\(.*?\)", "", text, flags=16)
  tables = "".join(make() for make in verdicts.PAGES[page].values())
  known = {abs(float(x)) for x in re.findall(r"\d+\.\d+", tables)}
  known |= {abs(x) for make in verdicts.FIGURES[page] for x in make()}
  known |= GIVEN[page]
  prose = re.sub(r"^\|.*$|<!--.*?-->", "", text, flags=re.MULTILINE)
  for figure in re.findall(r"\d+\.\d+", prose):
    half = 0.5001 * 10.0 ** -len(figure.partition(".")[2])
    assert any(abs(x - float(figure)) <= half for x in known), figure


def lines_of(table: str) -> list[str]:
  """Returns the rows of a table of the results about AntLM against a row."""
  lines = verdicts.PAGES["docs/results.md"][table]().splitlines()
  return [line for line in lines if re.match(r"\| [CM]LM", line)]


@pytest.mark.parametrize(
  ("name", "encoder", "count"),
  [
    ("small", "babyllama", 4),
    ("ltg_bert", "ltg_bert", 4),
    ("8m", "babyllama", 10),
  ],
)
def test_a_verdict_is_that_of_an_independent_computation(name, encoder, count):
  """Catches an interval, level or sign that differs from scipy's t test."""
  found = json.loads((RESULTS / f"antlm_{name}.json").read_text())["rows"]
  lines = lines_of(f"antlm-{name.replace('_', '-')}-differences")
  lines = [line for line in lines if "loss" in line]
  halves = ("all", "all") if name == "small" else ("choose", "report")
  measures = itertools.product((("clm", "c"), ("mlm", "m")), (-1, None))
  for line, ((kind, control), last) in zip(lines, measures, strict=True):
    one, other = (
      [
        measured[last or np.argmin(chosen)]
        for run in found[f"{encoder}_{row}"]["runs"].values()
        if "summary" in run  # it has ended
        for chosen, measured in [[run["losses"][x][kind] for x in halves]]
      ]
      for row in ("antlm", control)
    )
    test = stats.ttest_rel(one, other)
    ends = test.confidence_interval(1 - 0.05 / count)
    value = f"{np.mean(np.subtract(one, other)):+.3f}"
    decided = ends.low > 0 or ends.high < 0
    value = f"**{value}**" if decided else value
    assert f"| {value} ({ends.low:+.3f} to {ends.high:+.3f}) |" in line
    word = "better" if value.startswith("**-") else "worse"
    assert line.split(" | ")[2].startswith(word if decided else "not decided")


def test_the_seeds_that_find_an_effect_are_those_of_a_simulation():
  """Catches a power that is one-sided, unpaired, or of one seed more."""
  effect, deviation, confidence = 0.05, 0.04, 0.9875
  seeds = antlm_table.seeds_to_find(effect, deviation, confidence)
  draws = np.random.default_rng(0).normal(effect, deviation, (40_000, seeds))
  for count in (seeds - 1, seeds):
    of = stats.ttest_1samp(draws[:, :count], 0, axis=1)
    share = np.mean(of.pvalue < 1 - confidence)
    told = antlm_table.chance_to_find(effect, deviation, count, confidence)
    assert abs(share - told) < 0.01
    assert (told >= 0.8) == (count == seeds)
  assert antlm_table.seeds_to_find(1.0, 0.01, confidence) == 5
  assert antlm_table.seeds_to_find(0.01, 1.0, confidence) == 13


def test_a_difference_of_pairs_is_that_of_the_seeds_scores():
  """Catches a stored value or variance that the stored scores contradict."""
  record = json.loads((RESULTS / "antlm_8m.json").read_text())
  lines = [x for x in lines_of("antlm-8m-differences") if "loss" not in x]
  for of, line in zip(record["differences"], lines, strict=True):
    task, mode = re.match(r"([^(,]+).*, (\w+) ", of["on"]).groups()
    odds = "log-odds" in of["on"]
    key, unit = ("log_odds", 1) if odds else ("accuracy", 100)
    one, other = (
      {
        x["seed"]: unit * x[key]
        for x in record["scores"]
        if (x["row"], x["task"], x["mode"]) == (row, task.strip(), mode)
      }
      for row in (of["row"], of["control"])
    )
    values = [one[seed] - other[seed] for seed in one]
    assert len(values) == 4
    variance = of["found"]["by_seeds"]
    np.testing.assert_allclose(variance, stats.sem(values) ** 2, rtol=1e-2)
    cells = re.search(r"(\S+) \((\S+) to (\S+)\)", line.replace("**", ""))
    value, low, high = map(float, cells.groups())
    assert abs(value - np.mean(values)) < 0.006
    # Other items can only widen an interval over seeds.
    least = stats.ttest_1samp(values, 0).confidence_interval(1 - 0.05 / 10)
    assert low < least.low + 0.006 and high > least.high - 0.006


def test_no_claim_of_smollm2_is_decided_more_than_its_seeds_decide():
  """Catches a wrong p, Holm correction, or pairing of the seeds."""
  found = json.loads((RESULTS / "from_decoder.json").read_text())["rows"]
  points = {}
  for one in found:
    if one["measure"].endswith("_tuned"):
      metric = "accuracy" if "sst2" in one["measure"] else "entity_f1"
      key = one["row"], one["seed"]
      scores = [25 * one[rate][metric] for rate in ("3e-05", "0.0001")]
      points[key] = points.get(key, 0) + sum(scores)
  claims = [
    *(("mlm", row) for row in ("bidirectional", "scratch", "clm")),
    *((row, "mlm") for row in ("clm_mlm", "mntp")),
  ]
  lines = verdicts.PAGES["docs/results.md"]["from-decoder-claims"]()
  chances = []
  for row, control in claims:
    one, other = ([points[name, s] for s in (0, 1)] for name in (row, control))
    test = stats.ttest_rel(one, other)
    ends = test.confidence_interval()
    chances.append(test.pvalue)
    (line,) = re.findall(rf"\| `{row}` against `{control}`, T.*", lines)
    assert f" ({ends.low:+.1f} to {ends.high:+.1f}) | 2 |" in line
  # R has no smaller p than the smallest of T, which counts ten times.
  assert f"| {10 * min(chances):.2f} | not decided |" in lines


@pytest.fixture
def rows(tmp_path):
  path = tmp_path / "rows.py"
  path.write_text(test_report.ROWS)
  return path


def reported(folder, config, output) -> list[str]:
  """Writes the report of runs, or of a record; returns its three files."""
  options = f"--runs={folder}", f"--config={config}", f"--output={output}"
  report.main(options)
  names = "report.md", "table.json", "losses.json"
  return [(output / name).read_text() for name in names]


def test_a_report_is_the_same_from_its_record(tmp_path, rows):
  """Catches a loss, half, switch or shared step that the record leaves out."""
  for seed in range(3):
    for row, gain in (("c", 0.0), ("antlm", 0.4), ("m", -0.1)):
      losses = {0: 6.5, 10: 5.0, 30: 3.5 + 0.01 * seed - gain, 40: 4.0 - gain}
      both = {"clm": losses, "mlm": losses | {40: 3.9}}
      test_report.train(tmp_path / "runs", row, seed, both)
  path = tmp_path / "runs/antlm/0/metrics.jsonl"
  path.write_text(path.read_text().replace('report": 3.1', 'report": 3.4'))
  first = reported(tmp_path / "runs", rows, tmp_path / "first")
  assert "3.4" in first[2] and "pretrainings" in first[0]
  packed = tmp_path / "first/losses.json"
  assert reported(packed, rows, tmp_path / "again") == first


def test_a_file_that_is_no_record_is_named(tmp_path, rows):
  """Catches a traceback of `antlm report --runs=FILE` on another JSON file."""
  path = tmp_path / "table.json"
  for text in ('{"other": 1}', '{"rows": {}}', '{"rows": {"c": {}}}', "[]"):
    path.write_text(text)
    told = runs.told(reported, path, rows, tmp_path / "report")
    assert str(path) in told


def test_a_page_without_its_tables_is_named():
  """Catches a page that lost a marker, so that its table is never compared."""
  with pytest.raises(UserError, match=r"README\.md has the tables none"):
    verdicts.fill_page("README.md", "no table")


def test_the_cells_of_the_grid_are_chosen_by_the_rule():
  """Catches a row of the counted runs that someone else has chosen."""
  runs, found = studies.stored("regularised_grid").findings.runs, {}
  assert len(runs) == 126 + 21
  found["chosen"] = regularised.choose_rows(runs)
  found["candidates"] = regularised.choose_candidates(runs)
  found["curve"] = regularised.choose_for_curve(runs)
  of = regularised.config()
  assert found == {
    "chosen": of.CHOSEN,
    "candidates": of.CANDIDATES,
    "curve": of.CHOSEN_FOR_CURVE,
  }
