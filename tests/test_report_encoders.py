"""The report of "CLM, MLM or both": claims, scores, figures and gaps."""

import json

import numpy as np
import pytest
from scipy import stats

from antlm_jax import config as config_lib
from antlm_jax.evals import statistics
from antlm_jax.evals.finetuning.loop import TrialRun
from antlm_jax.evals.statistics import MeanEstimate
from antlm_jax.evals.studies import report, study
from antlm_jax.evals.studies.branches import steps_of
from antlm_jax.evals.studies.reporting import claims
from antlm_jax.evals.studies.reporting.scores import published_numbers
from tests import runs, tuned
from tests.tuned import cells, section

CONFIG = runs.ROOT / "configs/studies/clm_or_mlm.py"
_, ROWS = study.read_scale(CONFIG, "tiny")
LOOK = ROWS["tiny_clm_42"].looks["tiny"][0]  # step 2,000 in the paper


def train(folder, row, done=True, seed=0):
  """Writes the files of a trained row."""
  settings = config_lib.load_config(f"{CONFIG}:row=tiny_{row}")
  curriculum = steps_of(settings)
  about = {"steps": curriculum.steps, "switches": [*curriculum.switches]}
  run = folder / f"tiny_{row}" / str(seed)
  return runs.write_run(run, settings, summary=about if done else None)


def tune(run, task, right, step=None, other=None, **how):
  """Writes a task's results: `right` of 100 by seed, at one learning rate.

  `other` has the numbers of right answers on dev and on test at another rate.
  """
  by_run = {}
  for seed, count in enumerate(right):
    by_run[TrialRun(1e-4, seed)] = (count, count)
    if other:
      by_run[TrialRun(1e-5, seed)] = other
  write(run, task, by_run, step, **how)


def write(run, task, by_run, step=None, **how):
  """Writes results, of right answers on dev and on test by run."""
  sets = f"{task}-dev", f"{task}-test"
  answers = {
    trial: dict(zip(sets, map(tuned.answers, right), strict=True))
    for trial, right in by_run.items()
  }
  if step is None:
    step = json.loads((run / "summary.json").read_text())["steps"]
  folder = run / "evals" / "finetune-study"
  tuned.write(folder, task, answers, step, "bidirectional", **how)


def make(folder):
  return tuned.report_of(folder, CONFIG, "--scale=tiny")


def contrasts(numbers, about):
  """Returns a claim's rows by kind of task."""
  return {
    row["on"].partition(":")[0]: row
    for row in numbers["claims"][""]
    if row["claim"].startswith(about)
  }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A report in which CLM is above, below or equal to MLM by kind of task."""
  folder = tmp_path_factory.mktemp("runs")
  right = {
    "clm_42": {"sst2": (60, 61, 62), "conll": (70, 72), "squad": (80, 82, 81)},
    "mlm40_42": {
      "sst2": (90, 92, 91),
      "conll": (71, 70),
      "squad": (50, 51, 52),
    },
    "mlm20_42": {"sst2": (80, 90)},
    "mlm40_12": {"nfcorpus": (70, 72, 71), "sst2": (70, 72, 71)},
    "clm3_mlm40_12": {"nfcorpus": (71, 72, 73), "sst2": (73, 70, 72)},
    "clm10_mlm40_42": {"sst2": (95, 97, 96)},
    "clm_42_more_12": {"sst2": (97, 98, 99)},
    "mlm40_42_more_12": {"sst2": (94, 95, 97)},
  }
  for row, by_task in right.items():
    run = train(folder, row)
    for task, those in by_task.items():
      tune(run, task, those)
    for step, less in ((LOOK, 20), (5 * LOOK, 10)):
      if row in ("clm_42", "mlm40_42"):
        tune(run, "sst2", [n - less for n in by_task["sst2"]], step)
  return folder, *make(folder)


def test_a_claim_is_borne_out_or_not_by_the_sign_of_what_is_clear(made):
  _, numbers, text = made
  found = contrasts(numbers, "MLM scores above CLM")
  these = "for these models"
  verdicts = {"SC": f"confirmed {these}", "QA": f"contradicted {these}"}
  verdicts["IR"] = "not run"
  assert {kind: row["verdict"] for kind, row in found.items()} == verdicts
  assert found["SC"]["here"] == pytest.approx(30)
  # Seven differences have an interval: 1 - 0.05 / 7.
  assert found["SC"]["99.29 %"]["low"] > 0
  assert found["SC"]["over"] == "3 fine-tunings, 100 items"
  assert found["QA"]["here"] == pytest.approx(-30)
  assert found["SC"]["published"] == pytest.approx(87.00 - 83.58)
  assert found["IR"]["here"] is None
  words = f"**confirmed {these} in 1 of 2, contradicted {these} in 1 of 2**"
  assert f"in tagging words (tables 2 to 5): {words}" in text


def test_noise_decides_nothing_and_says_how_much_would(made):
  _, numbers, text = made
  found = contrasts(numbers, "CLM for 3k steps")
  assert {r["verdict"] for r in found.values()} == {"not decided", "not run"}
  needed = []
  for kind in ("SC", "IR"):
    interval = found[kind]["99.29 %"]
    assert interval["low"] < 0 < interval["high"]
    half = (interval["high"] - interval["low"]) / 2
    needed.append((half / interval["estimate"]) ** 2)
  times = round(min(needed))
  assert 2 <= times <= 1000
  words = f"**not decided; some {times} times the seeds and items would**"
  assert f"above MLM alone at 12k (tables 10 to 13): {words}" in text


def test_early_scores_are_those_of_the_looks(made):
  _, numbers, _ = made
  found = contrasts(numbers, "CLM learns from less text")
  assert found["SC"]["verdict"] == "contradicted for these models"
  assert found["SC"]["here"] == pytest.approx(-30)
  assert found["SC"]["published"] == pytest.approx(73.61 - 68.23)


@pytest.mark.parametrize(
  "value, error, sign, verdict",
  [
    (2, 0.4, 1, "confirmed"),
    (2, 0.4, -1, "contradicted"),
    (-2, 0.4, -1, "confirmed"),
    (1, 1.02, 1, "not decided; some 4 times the items would"),
    (1, 99, 1, "not decided; some over 1,000 times the items would"),
  ],
)
def test_a_verdict_goes_by_the_sign_of_a_claim(value, error, sign, verdict):
  found = MeanEstimate(value, 2, 1000, 998, error**2)
  contrast = claims.Contrast("it", found, sign=sign)
  assert (
    claims.Claim("it", "there", [contrast]).verdict(0.95).startswith(verdict)
  )
  nothing = claims.Contrast("it", None)
  assert claims.Claim("it", "there", [nothing]).verdict(0.95) == "not run"


def both(folder, right, seeds=1):
  """Writes results of CLM and MLM: right answers of both by task."""
  for row, side in (("clm_42", 0), ("mlm40_42", 1)):
    for seed in range(seeds):
      run = train(folder, row, seed=seed)
      for task, sides in right.items():
        tune(run, task, [n + seed for n in sides[side]])


def test_a_task_that_no_row_has_learnt_does_not_count(tmp_path):
  # Half of the labels are equal, so 30 and 45 right answers are below chance.
  squad = (30, 31, 32), (45, 46, 47)
  both(tmp_path, {"sst2": ((60, 61, 62), (90, 91, 92)), "squad": squad})
  numbers, text = make(tmp_path)
  found = contrasts(numbers, "MLM scores above CLM")
  assert found["QA"]["here"] == pytest.approx(15)
  assert found["QA"]["verdict"] == (
    "not learnt: tiny MLM 40 % (bidirectional) and tiny CLM (bidirectional)"
  )
  assert numbers["not_learnt"] == ["squad"]
  words = "(tables 2 to 5): **confirmed for these models**"
  assert f"in tagging words {words}" in text
  # The mean of a kind leaves such a task out. One row above is enough.
  both(tmp_path, {"record": ((30, 31, 32), (80, 81, 82))})
  numbers, text = make(tmp_path)
  found = contrasts(numbers, "MLM scores above CLM")
  assert found["QA"]["here"] == pytest.approx(50)
  assert found["QA"]["verdict"] == "confirmed for these models"
  assert "means of their tasks but squad." in text


def test_several_pretrainings_are_what_an_interval_is_over(tmp_path):
  both(tmp_path, {"sst2": ((60, 61, 62), (90, 91, 92))}, seeds=3)
  numbers, text = make(tmp_path)
  found = contrasts(numbers, "MLM scores above CLM")["SC"]
  assert found["over"] == "3 pretrainings, 100 items"
  assert found["verdict"] == "confirmed"
  assert "in tagging words (tables 2 to 5): **confirmed**" in text
  row = next(r for r in numbers["scores"]["tiny"] if r["row"] == "CLM")
  assert row["SC (accuracy)"]["values"] == pytest.approx(
    {"0": 0.61, "1": 0.62, "2": 0.63}
  )


def test_rates_and_ratios_are_claims_of_deviations(tmp_path):
  for row, other in (("clm_42", (70, 74)), ("mlm40_42", (40, 44))):
    tune(train(tmp_path, row), "sst2", (80, 84, 86), other=other)
  numbers, text = make(tmp_path)
  found = contrasts(numbers, "CLM depends less")["SC"]
  deviations = [
    np.mean([np.std([n, x], ddof=1) for n in (80, 84, 86)]) for x in (44, 74)
  ]
  assert found["here"] == pytest.approx(deviations[0] - deviations[1])
  assert found["over"] == "3 fine-tunings"
  # The scale has no rows for these claims.
  for claim in ("With MLM in the decay alone", "A higher masking ratio"):
    line = next(x for x in text.splitlines() if x.startswith(f"- {claim}"))
    assert line.endswith(": not run")


def test_every_claim_is_of_rows_that_the_paper_has():
  # A claim with an unknown row would be "not run" at every scale.
  _, rows = study.read_scale(CONFIG, "paper")
  for claim in published_numbers("encoders_claims"):
    names = f"{claim['plus']} {claim['minus']}".split()
    assert all(name in rows or f"610m_{name}" in rows for name in names)


def test_a_report_is_the_same_from_its_record(made, tmp_path):
  """Catches a record without a difference over items, a rate or a look."""
  report.main([f"--runs={made[0]}/report/study.json", f"--output={tmp_path}"])
  assert (tmp_path / "report.md").read_text() == made[2]
  assert json.loads((tmp_path / "table.json").read_text()) == made[1]


def test_a_kind_is_the_mean_of_its_tasks_where_a_seed_has_all(tmp_path):
  run = train(tmp_path, "mlm40_42")
  tune(run, "sst2", (80, 90))
  tune(run, "qqp", (60, 50, 10))
  numbers, _ = make(tmp_path)
  _, row = numbers["scores"]["tiny"]
  assert row["SC (accuracy)"]["values"] == pytest.approx({"0": 0.7, "1": 0.7})
  other = train(tmp_path, "clm_42")
  tune(other, "sst2", (80, 90))
  numbers, text = make(tmp_path)
  rows = {row["row"]: row for row in numbers["scores"]["tiny"]}
  assert rows["CLM"]["SC (accuracy)"] is None
  assert rows["CLM"]["sst2 (accuracy)"]
  assert "not fine-tuned on qqp: tiny CLM (seed 0)" in text


def test_a_rate_outside_figure_5_is_in_no_claim(tmp_path):
  """Catches a sensitivity claim over all rates that were tried.

  A row's deviation is the mean over its tasks.
  """
  for row, far in (("clm_42", (1, 2)), ("mlm40_42", (30, 40))):
    for task, middle in (("sst2", 80), ("qqp", 90)):
      rates = {1e-5: 70, 1e-4: middle, 2e-4: far[0], 5e-4: far[1]}
      right = {
        TrialRun(rate, seed): [count + seed] * 2
        for rate, count in rates.items()
        for seed in range(3)
      }
      write(train(tmp_path, row), task, right)
  numbers, text = make(tmp_path)
  found = contrasts(numbers, "CLM depends less")["SC"]
  assert found["on"].endswith("over rates from 1e-05 to 0.0001")
  assert found["here"] == 0
  rows = [row for row in numbers["rates"]["tiny"] if row["row"] == "CLM"]
  near, far = (row["SC"] for row in rows)
  assert [row["rates"] for row in rows] == [
    "1e-05 to 0.0001",
    "1e-05 to 0.0005",
  ]
  deviations = [
    np.std([70, 71, 72, middle, middle + 1, middle + 2], ddof=1) / 100
    for middle in (80, 90)
  ]
  assert near == pytest.approx(np.mean(deviations))
  assert far > 3 * near
  assert "use the rates from 1e-5 to 1e-4" in text


def test_scores_have_students_interval_and_the_usual_measures(tmp_path):
  """Catches scores at a claim's confidence, or without their measures."""
  run, right = train(tmp_path, "mlm40_42"), (80, 90, 94)
  tune(run, "sst2", right, also=("macro_f1",))
  # The dev set selects the rate, even if another rate is best on the test.
  tune(run, "conll", (70,), other=(60, 99))
  tune(train(tmp_path, "clm_42"), "sst2", (60, 61, 62))
  numbers, text = make(tmp_path)
  scores = section(text, "Scores")
  head = cells(scores, "row")
  assert {"sst2 (accuracy)", "sst2 (macro_f1)"} < {*head}
  line = dict(zip(head, cells(scores, "MLM 40 %"), strict=True))
  half = stats.t.ppf(0.975, 2) * np.std(right, ddof=1) / 3**0.5
  shown = f"{np.mean(right):.1f} ± {half:.1f}"
  assert line["sst2 (accuracy)"] == line["SC (accuracy)"] == shown
  # One seed has no interval.
  assert line["conll (accuracy)"] == line["TC (accuracy)"] == "70.0"
  rows = {row["row"]: row for row in numbers["scores"]["tiny"]}
  mean = rows["MLM 40 %"]["sst2 (accuracy)"]["mean"]
  assert mean == pytest.approx(np.mean(right) / 100)
  usual = rows["MLM 40 %"]["sst2 (macro_f1)"]["values"].values()
  for n, f1 in zip(right, usual, strict=True):
    found = tuned.answers(n)
    by_class = [
      2 * (x & y).sum() / (x.sum() + y.sum())
      for x, y in ((found, tuned.LABELS), (1 - found, 1 - tuned.LABELS))
    ]
    assert f1 == pytest.approx(np.mean(by_class))
  # Table 13 of the paper, with halves of intervals.
  line = cells(scores, "clm_42")
  assert line[2:8] == ["83.58", "0.17", "92.69", "0.14", "42.09", "0.2"]


def test_an_open_claim_says_how_many_pretrainings_decide(tmp_path):
  """Catches a forecast that ignores how Student's t shrinks with them."""
  draw = np.array([3.0, 1.0, 4.0]) - 8 / 3
  values = {(str(seed), ""): 2.0 + x for seed, x in enumerate(draw)}
  found = statistics.estimate_over_seeds(values)
  contrast = claims.Contrast("it", found)
  deviation, confidence = np.std(draw, ddof=1), 0.9967
  needed = next(
    n
    for n in range(4, 100)
    if stats.t.ppf((1 + confidence) / 2, n - 1) * deviation / n**0.5 < 2
  )
  words = claims.Claim("it", "there", [contrast]).verdict(confidence)
  assert words == f"not decided; some {needed} pretrainings would"


def test_scores_before_the_decay_are_by_step(made):
  """Catches a look with the scores of another step, or of the end."""
  _, numbers, text = made
  scores = {
    (row["row"], row["mode"]): row["SC (accuracy)"]
    for row in numbers["scores"]["tiny"]
    if row["row"] in ("CLM", "MLM 40 %")
  }
  by_step = {
    "bidirectional": (0.61, 0.91),
    f"bidirectional, step {LOOK}": (0.41, 0.71),
    f"bidirectional, step {5 * LOOK}": (0.51, 0.81),
  }
  assert {key: mean["mean"] for key, mean in scores.items()} == pytest.approx(
    {
      (row, mode): mean
      for mode, means in by_step.items()
      for row, mean in zip(("CLM", "MLM 40 %"), means, strict=True)
    }
  )
  shown = section(text, "Scores")
  mode = f"CLM | `840C steps` | 1 | bidirectional, step {LOOK}"
  assert cells(shown, mode)[4].startswith("41.0 ± ")


def test_early_scores_are_paired_without_those_of_the_end(tmp_path):
  """Catches a look on fewer tasks than the end, whose items differ."""
  for row, right in (("clm_42", (60, 61)), ("mlm40_42", (90, 92))):
    run = train(tmp_path, row)
    for task in ("sst2", "qqp"):
      tune(run, task, right)
    tune(run, "sst2", [count - 20 for count in right], LOOK)
  numbers, text = make(tmp_path)
  found = contrasts(numbers, "CLM learns from less text")["SC"]
  assert found["here"] == pytest.approx(-30.5)
  assert found["verdict"] == "contradicted for these models"
  assert "other items than most" not in text


def test_what_is_missing_is_named(tmp_path):
  run = train(tmp_path, "mlm40_42")
  tune(run, "sst2", (80, 81))
  train(tmp_path, "clm_42", done=False)
  run = train(tmp_path, "mlm20_42")
  tune(run, "sst2", (80, 81), step=LOOK)
  _, text = make(tmp_path)
  lines = section(text, "What is missing").splitlines()
  for line in (
    "- training is not at its end: tiny CLM (seed 0)",
    f"- sst2, bidirectional: evaluated at step {LOOK:,}, before the end: tiny"
    " MLM 20 % (seed 0)",
  ):
    assert line in lines
  assert "- not trained: tiny MLM 12k, " in text
  assert "- no row is fine-tuned on qqp, mnli," in text
  # Existing results are of all training examples.
  assert "--limit" not in text
  tune(run, "qqp", (80, 81), limit=9)
  tune(run, "squad", (0, 0))
  _, text = make(tmp_path)
  assert "- not learnt: squad: no row is above the trivial answer" in text
  words = "qqp, bidirectional: fine-tuned on a part of its training set"
  assert f"- {words} (--limit): tiny MLM 20 % (seed 0)" in text


def test_without_results_or_items_no_claim_is_run(tmp_path):
  train(tmp_path, "clm_42")
  numbers, text = make(tmp_path)
  row = {"row": "CLM", "curriculum": "840C steps", "seeds": 1}
  assert numbers["scores"]["tiny"] == [row]
  assert "- neither scored on pairs nor fine-tuned: every run" in text
  # First one side exists, and then both, but only CLM has scores of items.
  for name, right in (("clm_42", (60, 61)), ("mlm40_42", (90, 92))):
    run = train(tmp_path, name)
    tune(run, "sst2", right)
    if name != "clm_42":
      next(run.rglob("items.jsonl")).unlink()
    numbers, text = make(tmp_path)
    mean = numbers["scores"]["tiny"][1]["SC (accuracy)"]["mean"]
    assert mean == pytest.approx(0.605)
    assert "tagging words (tables 2 to 5): not run" in text
    assert "confirmed**" not in text
