"""Tables and intervals of the pages are those of the stored data's reports."""

import json
import re

import pytest

from antlm_jax.evals.studies import report
from tests import runs
from tests.test_pictures import check_letters, load_pictures
from tests.tuned import section

RESULTS = runs.ROOT / "evals/benchmarks/results"
PAGE = "docs/results.md"
STUDIES = "antlm_small antlm_ltg_bert antlm_8m regularised_small"
STUDIES += " regularised_larger regularised_curve regularised_grid"
STUDIES += " wider_grid_final clm_then_mlm"
INTERVAL = r"{0} \({0} to {0}\)".format(r"[+-]\d+\.\d+")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
  """The text and the numbers of each study's report, without pictures."""
  folder, out = tmp_path_factory.mktemp("reports"), {}
  draw = "antlm_jax.evals.studies.reporting.plots.draw_losses"
  with pytest.MonkeyPatch.context() as patched:
    patched.setattr(draw, lambda *args, **options: None)
    for name in STUDIES.split():
      words = f"--runs={RESULTS}/{name}.json --output={folder}/{name}"
      report.main(words.split())
      table = json.loads((folder / name / "table.json").read_text())
      out[name] = (folder / name / "report.md").read_text(), table
  return out


def rows_of(text: str) -> list[dict[str, str]]:
  """Returns the rows of the first table of a text, by heading."""
  lines = [line for line in text.splitlines() if line.startswith("|")]
  table = [[x.strip() for x in line.strip("|").split("|")] for line in lines]
  return [dict(zip(table[0], row, strict=True)) for row in table[2:]]


def numbers(cell: str) -> list[float]:
  return [float(number) for number in re.findall(r"[\d.]+", cell)]


@pytest.mark.parametrize(
  ("page", "table", "name"),
  [
    (PAGE, "antlm_small", "antlm_small"),
    (PAGE, "antlm_ltg_bert", "antlm_ltg_bert"),
    (PAGE, "antlm_8m", "antlm_8m"),
    (PAGE, "regularised_small", "regularised_small"),
    ("README.md", "antlm_small", "antlm_small"),
  ],
)
def test_a_table_has_the_losses_of_the_report(reports, page, table, name):
  """Catches a loss, a deviation or brackets that the stored runs do not give.

  Losses have two or three digits, and scores have one digit.
  """
  text = (runs.ROOT / page).read_text()
  (text,) = re.findall(rf"<!-- table {table} -->(.*?)<!-- end -->", text, 16)
  lines = [[*row.values()] for row in rows_of(text)]
  _, *headings = rows_of(text)[0]
  families = section(reports[name][0], "Held-out losses").split("\n### ")
  (family,) = (x for x in families if f"\n| {lines[0][0]} |" in x)
  rows = {row["row"]: row for row in rows_of(family)}
  scores = section(reports[name][0], "Scores") if "BLiMP" in text else ""
  for line in rows_of(scores):
    rows[line["row"]][f"BLiMP, {line['mode']} (%)"] = line["BLiMP"]
  del rows["trivial answer"]
  assert [line[0] for line in lines] == [*rows]
  for title, *cells in lines:
    for heading, cell in zip(headings, cells, strict=True):
      # A report has lowest losses only if half of the rows chose them.
      if not (shown := rows[title].get(heading)):
        continue
      unit = 10.0 ** -len(cell.split()[0].partition(".")[2])
      assert numbers(cell) == pytest.approx(numbers(shown), abs=0.6 * unit)
      assert ("(" in cell) == ("(" in shown) or "BLiMP" in heading


def intervals(numbers) -> set[str]:
  """Returns the intervals of a report's numbers, as the pages write them."""
  if isinstance(numbers, list):
    return set().union(*map(intervals, numbers))
  if not isinstance(numbers, dict):
    return set()
  if "estimate" not in numbers:
    return intervals([*numbers.values()])
  ends = (numbers[end] for end in ("estimate", "low", "high"))
  value, low, high = ends
  return {f"{value:+.{n}f} ({low:+.{n}f} to {high:+.{n}f})" for n in (2, 3)}


def test_each_interval_in_a_page_is_that_of_a_report(reports):
  """Catches a difference, level or sign that the stored runs do not give."""
  known = intervals([table for _, table in reports.values()])
  counts = []
  for page in (PAGE, "docs/reference/curriculum.md"):
    text = " ".join((runs.ROOT / page).read_text().split())
    written = re.findall(INTERVAL, text)
    assert {*written} <= known
    counts.append(len(written))
  assert counts[0] > 30 and counts[1] == 6


def test_the_picture_of_findings_has_the_pages_intervals(reports):
  """Catches a claim of another row, and an interval that is drawn wrongly."""
  pictures = load_pictures()
  found = pictures.findings({name: x for name, (_, x) in reports.items()})
  figure = pictures.draw_findings(found)
  check_letters(figure)
  page = " ".join((runs.ROOT / PAGE).read_text().split())
  for (_, ends, _), line in zip(found, figure.axes[0].lines[1::2], strict=True):
    assert any(x in page for x in intervals(ends))
    assert [*line.get_xdata()] == [ends["low"], ends["high"]]


def test_a_choice_on_the_border_of_its_grid_is_named(reports):
  """Catches a best regularisation that a wider grid may beat."""
  lines = [x for x in reports["regularised_grid"][1]["missing"] if "grid" in x]
  (clm,) = (x for x in lines if x.startswith("repeated, `960C steps`"))
  for setting in ("model.dropout=0.2", "optimizer.weight_decay=1.5"):
    assert setting in clm
  # Its best causal loss has dropout 0.1, within the grid.
  mixed = "repeated, `960C:M=1:1 steps`: the best clm"
  (line,) = (x for x in lines if x.startswith(mixed))
  assert "dropout" not in line


def test_the_wider_grid_chose_the_rows_that_were_measured():
  """Catches a choice on other rows, or by another loss, than the design's."""
  stored = json.loads((RESULTS / "wider_grid_grid.json").read_text())
  ends = {
    name: row["runs"]["0"]["losses"]["choose"]["clm"][-1]
    for name, row in stored["rows"].items()
  }
  measured = json.loads((RESULTS / "wider_grid_final.json").read_text())["rows"]
  best = {
    kind: min((n for n in ends if n.startswith(kind)), key=ends.get)
    for kind in ("c_", "cm_", "objectives_")
  }
  assert [*measured] == [best["c_"], best["cm_"]]
  # Equal weights of both objectives, against CLM.
  assert ends[best["objectives_"]] - ends[best["cm_"]] == pytest.approx(
    0.18, abs=0.005
  )


def test_verdicts_of_pairs_are_those_of_the_page(reports):
  """Catches a stored study that `antlm report` shows in part."""
  claims = reports["antlm_8m"][1]["claims"][""]
  verdicts = {claim["on"]: claim["verdict"] for claim in claims}
  assert verdicts["BLiMP, causal (points)"] == "not decided"
  assert verdicts["BLiMP, mlm (points)"] == "contradicted"
